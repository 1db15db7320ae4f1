// Data that changes with every turn and operation, and whether what came is right: small integers, exact in any type.
#include "../../kos/comm/gpu/kernels/reduce.cuh"

__device__ inline int value(unsigned rank, unsigned turn, unsigned operation, u64 i) {
    unsigned h = unsigned(i) * 0x9e3779b9u ^ rank * 0xc2b2ae35u ^ turn * 0x27d4eb2fu ^ operation * 0x85ebca6bu;
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    return int((h ^ h >> 16) % 5) - 2;
}
#define EACH(i, n) for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < n; i += u64(gridDim.x) * blockDim.x)

extern "C" __global__ void fill(Bits* in, u64 n, Bits* out, u64 results, unsigned rank, unsigned operation,
                                const unsigned* turn) {
    EACH(i, results) out[i] = Bits(-1);
    EACH(i, n) in[i] = T::narrow(Wide(value(rank, *turn, operation, i)));
}

// Element i of the output is the sum over all ranks of element first + i, or, where parts are gathered, element
// first + i % part of rank whose + i / part.
extern "C" __global__ void check(const Bits* out, u64 n, u64 first, u64 part, unsigned whose, unsigned operation,
                                 const unsigned* turn, u64* wrong) {
    unsigned bad = 0;
    EACH(i, n) {
        int expected = 0;
        if (part) expected = value(whose + i / part, *turn, operation, first + i % part);
        else
            for (unsigned r = 0; r < RANKS; r++) expected += value(r, *turn, operation, first + i);
        bad += out[i] != T::narrow(Wide(expected));
    }
    if (bad) atomicAdd(wrong, u64(bad));
}

extern "C" __global__ void advance(unsigned* turn) { ++*turn; }
