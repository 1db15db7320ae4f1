// Element types and reduce operations, chosen by -DDTYPE=bfloat16 -DOP=SUM -DRANKS=8.
//
// A contribution is widened once (16-bit floats to fp32), combined in rank order, finished (AVG divides)
// and rounded once: what kos.comm.reduction does on the host, bit for bit.  The _rn intrinsics keep the
// compiler from fusing a multiplication and an addition into one rounding.
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

__device__ inline float add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double add(double a, double b) { return __dadd_rn(a, b); }
__device__ inline int add(int a, int b) { return int(unsigned(a) + unsigned(b)); }
__device__ inline unsigned add(unsigned a, unsigned b) { return a + b; }
__device__ inline long long add(long long a, long long b) {
    return (long long)((unsigned long long)a + (unsigned long long)b);
}
__device__ inline unsigned long long add(unsigned long long a, unsigned long long b) { return a + b; }
__device__ inline float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ inline int multiply(int a, int b) { return int(unsigned(a) * unsigned(b)); }
__device__ inline unsigned multiply(unsigned a, unsigned b) { return a * b; }
__device__ inline long long multiply(long long a, long long b) {
    return (long long)((unsigned long long)a * (unsigned long long)b);
}
__device__ inline unsigned long long multiply(unsigned long long a, unsigned long long b) { return a * b; }
__device__ inline float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline double divide(double a, double b) { return __ddiv_rn(a, b); }

// Complex numbers, for PROD alone: other operations take their parts one by one.
template <class V> struct Complex {
    V re, im;
    Complex() = default;
    __device__ Complex(V re, V im) : re(re), im(im) {}
    __device__ explicit Complex(double re) : re(V(re)), im(0) {}
};
template <class V> __device__ inline Complex<V> multiply(Complex<V> a, Complex<V> b) {
    return {add(multiply(a.re, b.re), -multiply(a.im, b.im)), add(multiply(a.re, b.im), multiply(a.im, b.re))};
}
template <class V> struct OfParts {
    using Bits = Complex<V>;
    using Wide = Bits;
    static __device__ Wide widen(Bits x) { return x; }
    static __device__ Bits narrow(Wide x) { return x; }
};
struct complex64 : OfParts<float> {};
struct complex128 : OfParts<double> {};

// stage: a rank's own contribution before it travels; finish: the whole before it is rounded.
struct Plain {
    static constexpr bool staged = false;
    template <class V> static __device__ V stage(V x, double) { return x; }
    template <class V> static __device__ V finish(V x) { return x; }
};
struct SUM : Plain {
    template <class V> static __device__ V combine(V a, V b) { return add(a, b); }
};
struct AVG : SUM {
    template <class V> static __device__ V finish(V x) { return divide(x, V(RANKS)); }
};
struct PREMUL_SUM : SUM {
    static constexpr bool staged = true;
    template <class V> static __device__ V stage(V x, double factor) { return multiply(x, V(factor)); }
};
struct PROD : Plain {
    template <class V> static __device__ V combine(V a, V b) { return multiply(a, b); }
};
struct MIN : Plain {  // a NaN stays
    template <class V> static __device__ V combine(V a, V b) { return a < b || a != a ? a : b; }
};
struct MAX : Plain {
    template <class V> static __device__ V combine(V a, V b) { return a > b || a != a ? a : b; }
};
struct BAND : Plain {
    template <class V> static __device__ V combine(V a, V b) { return a & b; }
};
struct BOR : Plain {
    template <class V> static __device__ V combine(V a, V b) { return a | b; }
};
struct BXOR : Plain {
    template <class V> static __device__ V combine(V a, V b) { return a ^ b; }
};

using T = DTYPE;
using Op = OP;
using Bits = T::Bits;
using Wide = T::Wide;

// Element k of B's in a run of 32-bit words held in registers (k is known when compiled).
template <class B, int W>
__device__ inline B get(const unsigned (&w)[W], int k) {
    if constexpr (sizeof(B) == 8) return (unsigned long long)w[2 * k + 1] << 32 | w[2 * k];
    constexpr int per = sizeof(B) == 8 ? 1 : 4 / sizeof(B);
    return B(w[k / per] >> (32 / per * (k % per)) % 32);
}

// The reverse; the words must be zero before.
template <class B, int W>
__device__ inline void set(unsigned (&w)[W], int k, B x) {
    if constexpr (sizeof(B) == 8) {
        w[2 * k] = unsigned(x);
        w[2 * k + 1] = unsigned(x >> 32);
    } else {
        constexpr int per = 4 / sizeof(B);
        w[k / per] |= unsigned(x) << (32 / per * (k % per)) % 32;
    }
}

// The running reduction of the elements in W words of T.
template <int W>
struct Sum {
    static constexpr int n = 4 * W / sizeof(Bits);
    Wide x[n];
    __device__ void first(const unsigned (&w)[W]) {
#pragma unroll
        for (int k = 0; k < n; k++) x[k] = T::widen(get<Bits>(w, k));
    }
    __device__ void combine(const unsigned (&w)[W]) {
#pragma unroll
        for (int k = 0; k < n; k++) x[k] = Op::combine(x[k], T::widen(get<Bits>(w, k)));
    }
    __device__ void finish(unsigned (&w)[W]) const {
#pragma unroll
        for (int k = 0; k < W; k++) w[k] = 0;
#pragma unroll
        for (int k = 0; k < n; k++) set<Bits>(w, k, T::narrow(Op::finish(x[k])));
    }
};
