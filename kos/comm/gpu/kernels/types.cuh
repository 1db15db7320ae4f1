// Element types by the names of kos.dtypes: their bits, and the type in which one computes with them.
#pragma once

#include "ptx.cuh"

template <class V, class B>
struct Integer {
    using Bits = B;
    using Wide = V;
    static __device__ Wide widen(Bits x) { return Wide(x); }
    static __device__ Bits narrow(Wide x) { return Bits(x); }
};
template <class V, class N, class B>
struct Short : Integer<V, B> {  // computed in 32 bits; the low ones are the same
    static __device__ V widen(B x) { return V(N(x)); }
};
struct int8 : Short<int, signed char, unsigned char> {};
struct int16 : Short<int, short, unsigned short> {};
struct int32 : Integer<int, unsigned> {};
struct int64 : Integer<long long, unsigned long long> {};
struct uint8 : Integer<unsigned, unsigned char> {};
struct uint16 : Integer<unsigned, unsigned short> {};
struct uint32 : Integer<unsigned, unsigned> {};
struct uint64 : Integer<unsigned long long, unsigned long long> {};
struct Boolean : uint8 {  // true if the byte is not 0
    static __device__ unsigned widen(unsigned char x) { return x != 0; }
};

struct float64 {
    using Bits = unsigned long long;
    using Wide = double;
    static __device__ double widen(Bits x) { return __longlong_as_double(x); }
    static __device__ Bits narrow(double x) { return __double_as_longlong(x); }
};
struct float32 {
    using Bits = unsigned;
    using Wide = float;
    static constexpr float max_finite = 3.40282347e38f;
    static __device__ float widen(Bits x) { return __uint_as_float(x); }
    static __device__ Bits narrow(float x) { return __float_as_uint(x); }
};
struct float16 {
    using Bits = unsigned short;
    using Wide = float;
    static constexpr float max_finite = 65504;
    static __device__ float widen(Bits x) { return from_half(x); }
    static __device__ Bits narrow(float x) { return to_half(x); }
};
struct bfloat16 {
    using Bits = unsigned short;
    using Wide = float;
    static constexpr float max_finite = 3.38953139e38f;
    static __device__ float widen(Bits x) { return __uint_as_float(unsigned(x) << 16); }
    static __device__ Bits narrow(float x) { return to_bfloat16(x); }
};

// The type that a macro such as DTYPE names: ``bool`` is a keyword.
template <class D> struct Named { using type = D; };
template <> struct Named<bool> { using type = Boolean; };

// 8-bit floats as ml_dtypes has them: what rounds beyond the largest number becomes NaN (e4m3fn) or inf (e5m2).
struct float8_e4m3fn {
    using Bits = unsigned char;
    using Wide = float;
    static __device__ float widen(Bits x) { return from_half(e4m3_to_half(x)); }
    static __device__ Bits narrow(float x) { return fabsf(x) <= 464 ? to_e4m3(x) : x < 0 ? 0xff : 0x7f; }
};
struct float8_e5m2 {
    using Bits = unsigned char;
    using Wide = float;
    static __device__ float widen(Bits x) { return from_half((unsigned short)(x << 8)); }
    static __device__ Bits narrow(float x) {
        if (x != x) return 0x7e;
        return fabsf(x) < 61440 ? to_e5m2(x) : x < 0 ? 0xfc : 0x7c;
    }
};
