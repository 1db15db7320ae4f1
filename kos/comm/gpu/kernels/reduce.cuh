// Element types and reduce operations, chosen by -DDTYPE=bfloat16 -DOP=SUM -DRANKS=8.
//
// A contribution is widened once (16-bit floats to fp32), combined in rank order, finished (AVG divides)
// and rounded once: what kos.comm.reduction does on the host, bit for bit.  The _rn intrinsics keep the
// compiler from fusing a multiplication and an addition into one rounding.
#pragma once

#include "types.cuh"

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

// Complex numbers.  Only PROD needs them: other operations work on the real and imaginary parts separately.  A product
// is rounded as on the host (prod_c32 in kos/_core/reduce.c), and as in NumPy on a CPU that has fused multiply-add.
template <class V> struct Complex {
    V re, im;
    Complex() = default;
    __device__ Complex(V re, V im) : re(re), im(im) {}
    __device__ explicit Complex(double re) : re(V(re)), im(0) {}
};
template <class V> __device__ inline Complex<V> multiply(Complex<V> a, Complex<V> b) {
    return {fma(a.re, b.re, -multiply(a.im, b.im)), fma(a.re, b.im, multiply(a.im, b.re))};
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

using T = Named<DTYPE>::type;
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
