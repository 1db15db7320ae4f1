// Cross-entropy fused with softmax and its gradient, in place: one block a row of logits.
//
// First pass: the maximum and the sum of exponentials together, rescaled when the maximum rises (Milakov &
// Gimelshein 2018, arXiv:1805.02867), thread by thread, then over the block.  Second pass: the row, still in
// the L2 cache, becomes (softmax - one_hot) / count.  So logits are read once from memory and written once.
//
// -DDTYPE -DWIDTH -DBACKWARD (0: losses only)
#include "vectors.cuh"

using T = DTYPE;
constexpr int W = WIDTH;
#define LOWEST __int_as_float(0xff800000)  // -inf

__device__ __forceinline__ float exponential(float x) { return sizeof(T) == 2 ? __expf(x) : expf(x); }

struct Sum {  // the maximum so far and the sum of exp(x - top)
    float top, total;
};

__device__ __forceinline__ Sum join(Sum a, Sum b) {
    const float top = fmaxf(a.top, b.top);
    if (top == LOWEST) return a;
    return {top, a.total * exponential(a.top - top) + b.total * exponential(b.top - top)};
}

extern "C" __global__ void __launch_bounds__(1024)
cross_entropy(T* logits, const int* targets, const float* count, float* losses, long vocabulary) {
    __shared__ Sum parts[32];
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
#pragma unroll 4
    for (long i = start; i < vocabulary; i += stride) {
        float x[W];
        load(x, row + i);
        float top = sum.top;
#pragma unroll
        for (int j = 0; j < W; ++j) top = fmaxf(top, x[j]);
        if (top > LOWEST) {
            sum.total *= exponential(sum.top - top);
            sum.top = top;
#pragma unroll
            for (int j = 0; j < W; ++j) sum.total += exponential(x[j] - top);
        }
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1)
        sum = join(sum, {__shfl_xor_sync(~0u, sum.top, offset), __shfl_xor_sync(~0u, sum.total, offset)});
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = parts[0];
    for (int i = 1; i < blockDim.x / 32; ++i) sum = join(sum, parts[i]);
    const bool known = target < vocabulary;
    const float at = known ? widen(row[target]) : __int_as_float(0x7fffffff);
    if (threadIdx.x == 0) losses[blockIdx.x] = sum.top - at + logf(sum.total);
    if (!BACKWARD) return;
    const float share = 1.0f / count[0], scale = share / sum.total;
    __syncthreads();  // every thread has read the target's logit
#pragma unroll 4
    for (long i = start; i < vocabulary; i += stride) {
        float x[W];
        load(x, row + i);
#pragma unroll
        for (int j = 0; j < W; ++j) x[j] = exponential(x[j] - sum.top) * scale;
        store(row + i, x);
    }
    __syncthreads();
    if (threadIdx.x == 0 && known) narrow(exponential(at - sum.top) * scale - share, row[target]);
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
