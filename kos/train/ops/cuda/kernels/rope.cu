// Rotary embedding in place, on q and k as they lie in the rows of qkv: no split, no copy.
//
// A pair (i, i + d/2) of a head turns by position x frequency; cos and sin come from fp32 tables (T, d/2)
// that all heads of a token share through the L1 cache.  One thread turns WIDTH pairs.
//
// -DDTYPE -DWIDTH -DHALF (d/2) -DHEADS (that are turned) -DROW (elements from token to token) -DSIGN (-1: back)
#include "vectors.cuh"

using T = DTYPE;
constexpr int W = WIDTH;

extern "C" __global__ void rope(T* qkv, const float* cosines, const float* sines, int length, long packs) {
    const long item = long(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= packs) return;
    const int i = item % (HALF / W) * W, head = item / (HALF / W) % HEADS;
    const long token = item / (HALF / W * HEADS);
    const long angle = token % length * HALF + i;
    T* at = qkv + token * ROW + head * 2 * HALF + i;
    float a[W], b[W], c[W], s[W];
    load(a, at);
    load(b, at + HALF);
    load(c, cosines + angle);
    load(s, sines + angle);
#pragma unroll
    for (int j = 0; j < W; ++j) {
        const float left = a[j], right = b[j], sine = SIGN * s[j];
        a[j] = left * c[j] - right * sine;
        b[j] = right * c[j] + left * sine;
    }
    store(at, a);
    store(at + HALF, b);
}
