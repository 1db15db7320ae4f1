// What every backward of attention reads of the forward, prepared once: per head and token the log2-sum-exp of the
// scores and delta = sum(d_out out), which is what the softmax's gradient subtracts (Dao 2023, arXiv:2307.08691).
//
// Where dQ is added up in integers, also the power of two that each query's is multiplied by: an element of dQ is the sum
// of P (d_out v - delta) k over keys, whose P add up to 1, so that none, nor a part of it, is beyond
// |d_out| max(|v| max |k_c|) + |delta| max |k_c|, and that becomes 2^29 to 2^30.  (Rounding adds less than a factor of 2,
// but for scores that fp32 cannot tell apart by 1.)  What is not finite makes the power NaN.  `attention_bounds` finds both
// maxima of PAD keys; a query takes those of its own PAD and of all before, without CAUSAL of all; with MASKED from the PAD
// of its first key on.
//
// A group of PADDED_DIM / 8 lanes reads one head of one token, 16 bytes a lane; memory-bound.
#include "attention.cuh"

#define LANES (PADDED_DIM / 8)
#define CHUNKS (HEAD_DIM / 8)  // lanes that have elements; others have zeros
#define THREADS 256

__device__ inline void widen(float (&x)[8], uint4 packed) {
    const u32 pairs[] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(pairs[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}
// The larger one, or NaN.
__device__ inline float larger(float a, float b) { return a > b || a != a ? a : b; }
template <int WIDTH>
__device__ inline float sum_of(float x) {
#pragma unroll
    for (int step = WIDTH / 2; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
template <int WIDTH>
__device__ inline float largest_of(float x) {
#pragma unroll
    for (int step = WIDTH / 2; step; step /= 2) x = larger(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// At least the length of the vector of which each lane of WIDTH has 8 elements; without squares, which may underflow.
template <int WIDTH>
__device__ inline float length_of(const float (&x)[8]) {
    float sum = 0, largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += fabsf(x[i]), largest = larger(largest, fabsf(x[i]));
    return sqrtf(sum_of<WIDTH>(sum)) * sqrtf(largest_of<WIDTH>(largest));
}

// bounds (samples, K, padded(keys) / PAD): of the keys of a block, max |k_c|, and the largest |v| max |k_c| of one.
// kv: the first key, in samples of `stride` rows of `width` heads, of which v are K after k.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_bounds(const uint4* kv, float2* bounds, int keys, int stride, int width, int K) {
    __shared__ float2 of_warps[THREADS / 32];
    const int blocks = padded(keys) / PAD, block = blockIdx.x % blocks, sample = blockIdx.x / blocks / K;
    const int kv_head = blockIdx.x / blocks % K, lane = threadIdx.x % LANES;
    float key = 0, both = 0;
#pragma unroll
    for (int i = threadIdx.x / LANES; i < PAD; i += THREADS / LANES) {
        const int token = block * PAD + i;
        float x[8] = {}, y[8] = {}, mine = 0;
        if (token < keys && lane < CHUNKS) {
            const uint4* at = kv + (((long)sample * stride + token) * width + kv_head) * CHUNKS + lane;
            widen(x, at[0]);
            widen(y, at[K * CHUNKS]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) mine = larger(mine, fabsf(x[j]));
        mine = largest_of<LANES>(mine);
        key = larger(key, mine), both = larger(both, mine * length_of<LANES>(y));
    }
    key = largest_of<32>(key), both = largest_of<32>(both);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = {key, both};
    __syncthreads();
    if (threadIdx.x) return;
    for (const float2 of_warp : of_warps) key = larger(key, of_warp.x), both = larger(both, of_warp.y);
    bounds[blockIdx.x] = {key, both};
}

// Of T queries to `keys` keys, in samples of `stride` tokens.  sums, if there are any, become 0: samples padded(T) H
// PADDED_DIM integers.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_statistics(const uint4* d_out, const uint4* out, const float* log_sum_exp, float* statistics,
                         const float2* bounds, uint4* sums, int samples, int T, int H, int K, int keys, int stride MASK) {
    const long thread = (long)blockIdx.x * THREADS + threadIdx.x, index = thread / LANES;
    const int lane = threadIdx.x % LANES, head = index % H;
    const long place = index / H;  // of the token, in padded samples
    const int token = place % padded(T), sample = place / padded(T);
    const bool exists = sample < samples && token < T;
    float x[8] = {}, y[8] = {}, delta = 0, lse = INFINITE;
    if (exists) {
        const long at = (((long)sample * stride + token) * H + head) * CHUNKS + lane;
        if (lane < CHUNKS) {
            widen(x, d_out[at]);
            widen(y, out[at]);
        }
        lse = log_sum_exp[((long)sample * H + head) * stride + token];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) delta += x[i] * y[i];
    delta = sum_of<LANES>(delta);
    float scale = 0;
    if (sums) {
        float key = 0, both = 0;
        if (exists) {
            const int blocks = padded(keys) / PAD, seen = CAUSAL ? token / PAD + 1 : blocks;
            const float2* of_blocks = bounds + (sample * K + head / (H / K)) * blocks;
            const Mask mask MASK_OF(stride);
            for (int i = lane + mask.first_key(sample, token) / PAD; i < seen; i += LANES) {
                key = larger(key, of_blocks[i].x);
                both = larger(both, of_blocks[i].y);
            }
        }
        key = largest_of<LANES>(key), both = largest_of<LANES>(both);
        const float bound = length_of<LANES>(x) * both + fabsf(delta) * key + (exists ? 0 * lse : 0);
        const int exponent = 29 - ilogbf(fmaxf(bound, 1e-28f));
        scale = bound < INFINITE ? scalbnf(1, exponent) : bound - bound;
        if (sample < samples) sums[2 * thread] = sums[2 * thread + 1] = {};
    }
    if (lane || sample >= samples) return;
    float* target = statistics + statistics_at(sample * H + head, token, T);
    target[0] = lse * LOG2_E;
    target[64] = delta;
    target[128] = scale;
}
