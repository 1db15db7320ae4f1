// Adding the contributions of all ranks in rank order, once they lie side by side in this rank's memory.
//
// -DDTYPE is the type of the contributions, -DRESULT that of the result, -DOP the operation, -DRANKS how many.
// Each contribution is widened, all are combined from rank 0 on, and the result is rounded once: what
// kos.comm.reduction does on the host, bit for bit.

#include "reduce.cuh"

using i64 = long long;
using Result = Named<RESULT>::type;
#define EACH(i, count)                                                                  \
    for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < count;             \
         i += gridDim.x * i64(blockDim.x))

// out[i] = in[0][i] op in[1][i] op ...; rank r's contribution begins at in + r * stride.
extern "C" __global__ void reduce_ordered(const Bits *in, i64 stride, Result::Bits *out, i64 count) {
    EACH(i, count) {
        Wide x[RANKS];
#pragma unroll
        for (int r = 0; r < RANKS; r++) x[r] = T::widen(in[r * stride + i]);
#pragma unroll
        for (int r = 1; r < RANKS; r++) x[0] = Op::combine(x[0], x[r]);
        out[i] = Result::narrow(Op::finish(x[0]));
    }
}

// Row r of ``out`` is in[0] op ... op in[r], or without in[r] and from row 1 on (exclusive); rows are ``stride`` apart.
extern "C" __global__ void scan_ordered(const Bits *in, i64 stride, Result::Bits *out, i64 count, int exclusive) {
    EACH(i, count) {
        Wide sum = T::widen(in[i]);
        for (int r = 0; r < RANKS; r++) {
            if (r) sum = Op::combine(sum, T::widen(in[r * stride + i]));
            if (r + exclusive < RANKS) out[(r + exclusive) * stride + i] = Result::narrow(Op::finish(sum));
        }
    }
}

// out[i] = in[i] * factor, before it travels.
extern "C" __global__ void scale(const Bits *in, Result::Bits *out, i64 count, double factor) {
    EACH(i, count) out[i] = Result::narrow(multiply(T::widen(in[i]), Wide(factor)));
}
