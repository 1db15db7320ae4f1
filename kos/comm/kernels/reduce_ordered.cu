// Adding the contributions of all ranks in rank order, once they lie side by side in this rank's memory.
//
// -DDTYPE is the type of the contributions, -DRESULT that of the result, -DOP the operation, -DRANKS how many.
// Each contribution is widened, all are combined from rank 0 on, and the result is rounded once: what
// kos.comm.reduction does on the host, bit for bit.

// 8-bit floats as ml_dtypes has them: what rounds beyond the largest number becomes NaN (e4m3fn) or inf (e5m2).
struct float8_e4m3fn {
    using Bits = unsigned char;
    using Wide = float;
    static __device__ float widen(Bits x) {
        unsigned halves;
        float y;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)x));
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)halves));
        return y;
    }
    static __device__ Bits narrow(float x) {
        if (!(fabsf(x) <= 464)) return x < 0 ? 0xff : 0x7f;
        unsigned short pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
        return Bits(pair);
    }
};
struct float8_e5m2 {
    using Bits = unsigned char;
    using Wide = float;
    static __device__ float widen(Bits x) {
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)(x << 8)));
        return y;
    }
    static __device__ Bits narrow(float x) {
        if (x != x) return 0x7e;
        if (fabsf(x) >= 61440) return x < 0 ? 0xfc : 0x7c;
        unsigned short pair;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
        return Bits(pair);
    }
};

#include "reduce.cuh"

using Index = long long;
#define EACH(i, count)                                                                  \
    for (Index i = blockIdx.x * Index(blockDim.x) + threadIdx.x; i < count;             \
         i += gridDim.x * Index(blockDim.x))

// out[i] = in[0][i] op in[1][i] op ...; rank r's contribution begins at in + r * stride.
extern "C" __global__ void reduce_ordered(const Bits *in, Index stride, RESULT::Bits *out, Index count) {
    EACH(i, count) {
        Wide x[RANKS];
#pragma unroll
        for (int r = 0; r < RANKS; r++) x[r] = T::widen(in[r * stride + i]);
#pragma unroll
        for (int r = 1; r < RANKS; r++) x[0] = Op::combine(x[0], x[r]);
        out[i] = RESULT::narrow(Op::finish(x[0]));
    }
}

// out[i] = in[i] * factor, before it travels.
extern "C" __global__ void scale(const Bits *in, RESULT::Bits *out, Index count, double factor) {
    EACH(i, count) out[i] = RESULT::narrow(multiply(T::widen(in[i]), Wide(factor)));
}
