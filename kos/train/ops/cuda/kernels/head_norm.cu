// RMSNorm of each head of q or k (Qwen3), or of all of them together (OLMo 2), in place in the rows of qkv, and its
// backward.
//
// THREADS threads, a warp or a whole block, have a head of a token, D elements, and keep them in registers; a block has
// HEADS at a time.  The forward writes what it read to `raw`, from which the backward works out the statistics again.
// The threads of the backward walk over heads, and each adds up d_weight of its columns; the heads of a block are added
// in shared memory, the blocks by `sum_partials` of sums.cu, always in the same order.
//
// -DDTYPE -DCOLUMNS (D) -DROW (elements from token to token of x) -DRAW (of raw) -DTHREADS -DHEADS (1 if not of warps)
#include "vectors.cuh"

using T = DTYPE;
constexpr int D = COLUMNS, EACH = (D + THREADS - 1) / THREADS;

// The elements of this lane, lane, lane + THREADS, …; 0 beyond the head.
__device__ __forceinline__ void load_head(float (&v)[EACH], const T* p) {
    const int lane = threadIdx.x % THREADS;
#pragma unroll
    for (int j = 0; j < EACH; ++j) v[j] = lane + THREADS * j < D ? widen(p[lane + THREADS * j]) : 0;
}

__device__ __forceinline__ void store_head(const float (&v)[EACH], T* p) {
    const int lane = threadIdx.x % THREADS;
#pragma unroll
    for (int j = 0; j < EACH; ++j)
        if (lane + THREADS * j < D) narrow(v[j], p[lane + THREADS * j]);
}

__device__ __forceinline__ float dot(const float (&a)[EACH], const float (&b)[EACH]) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) sum += a[j] * b[j];
    if constexpr (THREADS > 32) return block_sum(sum);
    return warp_sum(sum);
}

// x and raw begin at the first of `heads` heads; count = tokens x heads.
extern "C" __global__ void head_norm(T* x, const T* weight, float eps, T* raw, int heads, long count) {
    const long item = long(blockIdx.x) * (blockDim.x / THREADS) + threadIdx.x / THREADS;
    if (item >= count) return;
    const long token = item / heads, head = item % heads;
    float v[EACH], w[EACH];
    load_head(v, x + token * ROW + head * D);
    load_head(w, weight);
    store_head(v, raw + token * RAW + head * D);
    const float r = rsqrtf(dot(v, v) * (1.0f / D) + eps);
#pragma unroll
    for (int j = 0; j < EACH; ++j) v[j] *= r * w[j];
    store_head(v, x + token * ROW + head * D);
}

// With n = raw rstd: dx becomes rstd (dx scale - n mean(dx scale n)); partial (gridDim.x, D): sums of dx n.
extern "C" __global__ void head_norm_backward(const T* raw, const T* weight, float eps, T* dx, float* partial,
                                              int heads, long count) {
    __shared__ float all[HEADS][THREADS * EACH];
    const int lane = threadIdx.x % THREADS, group = threadIdx.x / THREADS;
    float w[EACH], sums[EACH] = {};
    load_head(w, weight);
    for (long item = long(blockIdx.x) * HEADS + group; item < count; item += long(gridDim.x) * HEADS) {
        const long token = item / heads, head = item % heads;
        float n[EACH], g[EACH];
        load_head(n, raw + token * RAW + head * D);
        load_head(g, dx + token * ROW + head * D);
        const float r = rsqrtf(dot(n, n) * (1.0f / D) + eps);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            n[j] *= r;
            sums[j] += g[j] * n[j];
            g[j] *= w[j];
        }
        const float slope = dot(g, n) * (1.0f / D);
#pragma unroll
        for (int j = 0; j < EACH; ++j) g[j] = r * (g[j] - slope * n[j]);
        store_head(g, dx + token * ROW + head * D);
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j) all[group][lane + THREADS * j] = sums[j];
    __syncthreads();
    for (int i = threadIdx.x; i < D; i += THREADS * HEADS) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < HEADS; ++k) sum += all[k][i];
        partial[long(blockIdx.x) * D + i] = sum;
    }
}
