// Cross-entropy fused with softmax and its gradient, in place: one block a row of logits.
//
// First pass: the maximum and the sum of exponentials together, rescaled when the maximum rises (Milakov &
// Gimelshein 2018, arXiv:1805.02867), thread by thread, then over the block.  Second pass: the row becomes
// (softmax - one_hot) / count.  The first CACHED elements of a row wait for it in shared memory, the rest in
// the L2 cache, so logits are read once from memory and written once.
//
// -DDTYPE -DWIDTH -DBACKWARD (0: losses only) -DCACHED (elements, a multiple of WIDTH) -DTHREADS
#include "vectors.cuh"

using T = DTYPE;
constexpr int W = WIDTH;
constexpr float LOWEST = -1e30f;  // finite: the difference of two is 0, not NaN
constexpr int AHEAD = W > 1 ? 4 : 1;  // accesses of a thread under way at once

// exp(x - shift).  In bf16 as one multiply-add and one power of two: its rounding is far below the result's
// where x and shift are logits.
__device__ __forceinline__ float exponential(float x, float shift) {
    if constexpr (sizeof(T) == 4) return expf(x - shift);
    constexpr float log2e = 1.4426950408889634f;
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, log2e, -shift * log2e)));
    return y;
}

struct Sum {  // the maximum so far and the sum of exp(x - top)
    float top, total;
};

__device__ __forceinline__ Sum join(Sum a, Sum b) {
    const float top = fmaxf(a.top, b.top);
    return {top, a.total * expf(a.top - top) + b.total * expf(b.top - top)};
}

// PACKS neighbours of a thread's stride: one maximum, one rescaling.
template <int PACKS>
__device__ __forceinline__ void add_packs(Sum& sum, const T* row, T* cache, long i, int stride) {
    Raw<W, T> raw[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) raw[p].load(row + i + p * stride);
    float top = sum.top;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        float x[W];
        raw[p].floats(x);
        if (BACKWARD && i + p * stride < CACHED) raw[p].store(cache + i + p * stride);
#pragma unroll
        for (int j = 0; j < W; ++j) top = fmaxf(top, x[j]);
    }
    sum.total *= expf(sum.top - top);
    sum.top = top;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        float x[W];
        raw[p].floats(x);
#pragma unroll
        for (int j = 0; j < W; ++j) sum.total += exponential(x[j], top);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy(T* logits, const int* targets, const float* count, float* losses, long vocabulary) {
    __shared__ Sum parts[32];
    extern __shared__ __align__(16) unsigned char shared[];
    T* cache = reinterpret_cast<T*>(shared);
    const int target = targets[blockIdx.x];
    T* row = logits + long(blockIdx.x) * vocabulary;
    const int start = threadIdx.x * W, stride = blockDim.x * W;
    if (target < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (BACKWARD)
            for (long i = start; i < vocabulary; i += stride) {
                const float zeros[W] = {};
                store(row + i, zeros);
            }
        return;
    }
    Sum sum = {LOWEST, 0};
    long at = start;
    for (; at + (AHEAD - 1) * stride < vocabulary; at += AHEAD * stride) add_packs<AHEAD>(sum, row, cache, at, stride);
    for (; at < vocabulary; at += stride) add_packs<1>(sum, row, cache, at, stride);
#pragma unroll
    for (int offset = 16; offset; offset >>= 1)
        sum = join(sum, {__shfl_xor_sync(~0u, sum.top, offset), __shfl_xor_sync(~0u, sum.total, offset)});
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = parts[0];
    for (int i = 1; i < blockDim.x / 32; ++i) sum = join(sum, parts[i]);
    const bool known = target < vocabulary;
    const float logit = known ? widen(row[target]) : __int_as_float(0x7fffffff);
    if (threadIdx.x == 0) losses[blockIdx.x] = sum.top - logit + logf(sum.total);
    if (!BACKWARD) return;
    const float share = 1.0f / count[0], scale = share / sum.total;
    const float shift = sum.top - logf(scale);  // so that bf16's gradient is one exponential
    __syncthreads();  // every thread has read the target's logit
#pragma unroll 4
    for (long i = start; i < vocabulary; i += stride) {
        float x[W];
        load(x, i < CACHED ? cache + i : row + i);
#pragma unroll
        for (int j = 0; j < W; ++j)
            x[j] = sizeof(T) == 2 ? exponential(x[j], shift) : exponential(x[j], sum.top) * scale;
        store(row + i, x);
    }
    __syncthreads();
    if (threadIdx.x == 0 && known) narrow(exponential(logit, sum.top) * scale - share, row[target]);
}

// out (1,) = how many targets are not negative, at least 1.  One block.
extern "C" __global__ void count_targets(const int* targets, float* out, long n) {
    int kept = 0;
    for (long i = threadIdx.x; i < n; i += blockDim.x) kept += targets[i] >= 0;
    kept = block_sum(kept);
    if (threadIdx.x == 0) out[0] = kept > 1 ? kept : 1;
}

// out (1,) = sum(losses) / count, in double.  One block, so the order is fixed.
extern "C" __global__ void mean_loss(const float* losses, const float* count, double* out, long n) {
    double sum = 0;
    for (long i = threadIdx.x; i < n; i += blockDim.x) sum += losses[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[0] = sum / count[0];
}
