// What the kernels of optimizers have in common: the scalars of a step, rounding at random.
#pragma once
#include "vectors.cuh"

constexpr int W = 4;

struct State {  // doubles, read by the host by index
    double step, lr, norm, scale, step_size, root, finite, sum_of_squares, rest, halted;
};

__device__ __forceinline__ bool wide(const void* p, int bytes) { return (unsigned long long)p % bytes == 0; }

// Weights that have no fp32 copy are rounded up as often as they are near it: updates far below bf16's spacing are not
// lost, on average.  The bits are a hash (C. Wellons' lowbias32) of seed, step and the element's place in the layout of
// the whole model.
__device__ __forceinline__ unsigned mixed(unsigned bits) {
    bits = (bits ^ bits >> 16) * 0x7feb352du;
    bits = (bits ^ bits >> 15) * 0x846ca68bu;
    return bits ^ bits >> 16;
}
__device__ __forceinline__ float rounded(float x, unsigned key, long place) {
    if (sizeof(MASTER) == 4 || !isfinite(x)) return x;  // the sum would carry the GPU's NaN, 0x7fffffff, over to -0
    const unsigned of_place = mixed(key ^ mixed(place >> 32) ^ unsigned(place));
    return __uint_as_float(__float_as_uint(x) + (of_place & 0xffffu) & 0xffff0000u);
}

__device__ __forceinline__ unsigned key_of(long seed, const State* state) {
    return mixed(mixed(mixed(seed) ^ seed >> 32) ^ unsigned(state->step));
}
