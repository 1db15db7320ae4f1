// out (ROWS, F) = x (ROWS, D) weight (F, D)^T + bias + residual, for the few rows of a step that generates.
//
// It takes as long as reading the matrix once takes: a warp reads a row of it, 16 bytes a lane, and multiplies it with
// all rows of x, which lie in the L1 cache.  Each element of out is added up in the same order whatever ROWS is, so the
// bits of a row do not depend on the others.
//
// -DDTYPE -DWIDTH -DROWS
#include "vectors.cuh"

using T = DTYPE;
constexpr int W = WIDTH;

extern "C" __global__ void linear_few(const T* x, const T* weight, const T* bias, const T* residual, T* out, int columns,
                                      int features) {
    const int lane = threadIdx.x % 32;
    const long feature = long(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (feature >= features) return;
    const T* row = weight + feature * columns;
    float sums[ROWS] = {};
#pragma unroll 4
    for (int i = lane * W; i < columns; i += 32 * W) {
        float w[W];
        load(w, row + i);
#pragma unroll
        for (int n = 0; n < ROWS; ++n) {
            float a[W];
            load(a, x + long(n) * columns + i);
#pragma unroll
            for (int j = 0; j < W; ++j) sums[n] = fmaf(w[j], a[j], sums[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < ROWS; ++n) {
        float sum = warp_sum(sums[n]);
        if (lane == 0) {
            const long at = n * long(features) + feature;
            if (bias) sum += widen(bias[feature]);
            if (residual) sum += widen(residual[at]);
            narrow(sum, out[at]);
        }
    }
}
