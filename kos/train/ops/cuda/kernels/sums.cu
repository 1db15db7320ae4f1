// Sums over rows, for biases and for the gradients of norms: first of some rows, then of these, always in the same
// order.  Apart from norms.cu, which unrolls over D: here D may be a million (T x hidden, of learned positions).
//
// -DDTYPE -DWIDTH -DCOLUMNS (D) -DGRADIENT (dtype of d_weight) -DACCUMULATE
#include "vectors.cuh"

using T = DTYPE;
constexpr int W = WIDTH, D = COLUMNS;

// partial (gridDim.y, D): sums of every gridDim.y-th 8 rows of x, which are `stride` elements apart.  A block of 32 x 8
// threads takes 32 WIDTH columns.
extern "C" __global__ void sum_rows(const T* __restrict__ x, long stride, float* __restrict__ partial,
                                    long rows) {
    __shared__ float all[8][32 * W];
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32, first = blockIdx.x * 32 * W, at = first + lane * W;
    float sum[W] = {};
    if (at < D)
#pragma unroll 4
        for (long row = long(blockIdx.y) * 8 + group; row < rows; row += long(gridDim.y) * 8) {
            float v[W];
            load(v, x + row * stride + at);
#pragma unroll
            for (int j = 0; j < W; ++j) sum[j] += v[j];
        }
#pragma unroll
    for (int j = 0; j < W; ++j) all[group][lane * W + j] = sum[j];
    __syncthreads();
    if (threadIdx.x >= 32 * W || first + int(threadIdx.x) >= D) return;
    float whole = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) whole += all[k][threadIdx.x];
    partial[long(blockIdx.y) * D + first + threadIdx.x] = whole;
}

// d_weight (D,) = or += the sum of `blocks` rows of partial, `stride` apart; 32 x 8 threads take 32 columns.
extern "C" __global__ void sum_partials(const float* partial, long stride, int blocks, GRADIENT* d_weight) {
    __shared__ float parts[8][32];
    const int x = threadIdx.x % 32, y = threadIdx.x / 32, i = blockIdx.x * 32 + x;
    float sum = 0;
    if (i < D)
        for (int block = y; block < blocks; block += 8) sum += partial[block * stride + i];
    parts[y][x] = sum;
    __syncthreads();
    if (y || i >= D) return;
    sum = ACCUMULATE ? widen(d_weight[i]) : 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) sum += parts[k][x];
    narrow(sum, d_weight[i]);
}
