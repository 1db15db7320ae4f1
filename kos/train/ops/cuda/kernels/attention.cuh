// What all attention kernels share: 16-bit types without CUDA's headers, softmax's arithmetic, order of blocks.
//
// Macros: HEAD_DIM, a multiple of 16 (attention_simple.cu: any); DTYPE bfloat16, float16 or (attention_simple.cu only)
// float32; SCALE = 1 / sqrt(HEAD_DIM); CAUSAL; MASKED.
// Scores are kept without SCALE.  Exponentials have base 2: exp(SCALE (s - max)) = exp2(LOG2_SCALE s - LOG2_SCALE max), one
// FFMA and one EX2.
//
// Tokens: qkv (B, T, W), W = (H + 2K) HEAD_DIM, holds the heads of q, then k, then v; out and d_out (B, T, H d).
//
// Without CAUSAL all queries see all keys, which lie in an array of their own: kv (B, `keys`, 2 K d).  T counts the
// queries; a sample of any array is `stride` tokens, of which pointers and tensor maps give the part that is meant.
// What is written is fp32 then: out and log_sum_exp are merged with what they hold of other keys, gradients are added to
// what is there.
//
// With MASKED a query sees no key before its own first one, which may also leave it none without CAUSAL; see Mask.
#pragma once
#include "attention_scores.cuh"

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// The columns of a tile on Hopper, of which those from HEAD_DIM on are 0, and eight times the lanes that read a head.
#define PADDED_DIM (HEAD_DIM <= 64 ? 64 : HEAD_DIM <= 128 ? 128 : 256)

#define LOG2_E 1.4426950408889634f
#define LOG2_SCALE (SCALE * LOG2_E)
#define INFINITE __int_as_float(0x7f800000)

#ifndef CAUSAL
#define CAUSAL 1
#endif
#ifndef MASKED
#define MASKED 0
#endif

#define float32 2
#define float16 1
#define bfloat16 0
#define IS_FLOAT32 (DTYPE == float32)
#define IS_FLOAT16 (DTYPE == float16)

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <int N>
__device__ inline void to_scores(float (&products)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) products[i] = score_of(products[i]);
}
__device__ inline float exponential(float score, float log2_shift) { return exp2_fast(score * LOG2_SCALE - log2_shift); }

// Two floats as a pair of 16-bit values, `low` at the lower address.
__device__ inline u32 pack(float low, float high) {
    u32 pair;
#if IS_FLOAT16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

__device__ inline float2 unpack(u32 pair) {
#if IS_FLOAT16
    float2 x;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(x.x), "=f"(x.y) : "r"(pair));
    return x;
#else
    return {__int_as_float(pair << 16), __int_as_float(pair & 0xffff0000u)};
#endif
}

// The maximum or the sum over the four lanes that hold one row of a matrix fragment.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Which keys a query sees (attention_mask.cu): for each query of a sample of `stride` tokens the first key, for each key the
// last query that sees it.  Neither decreases along a sample, so that the first query of a block has its first key and the
// last key its last query.  Both count tokens of a sample; kernels count from query `queries_from` and key `keys_from`,
// where the pointers begin too, and have `queries` of them.
struct Mask {
#if MASKED
    const int *first_keys, *last_queries;
    int queries_from, keys_from, queries, stride;
    __device__ int first_key(int sample, int query) const { return max(0, first_keys[(long)sample * stride + query] - keys_from); }
    __device__ int last_query(int sample, int key) const {
        return min(queries - 1, last_queries[(long)sample * stride + key] - queries_from);
    }
#else
    __device__ int first_key(int, int) const { return 0; }
    __device__ int last_query(int, int) const { return 0; }
#endif
};
#if MASKED
#define MASK , const int *first_keys, const int *last_queries, int queries_from, int keys_from
#define MASK_OF(stride) {first_keys, last_queries, queries_from, keys_from, T, stride}
#else
#define MASK
#define MASK_OF(stride) {}
#endif

// How attention to some keys, of this maximum of the scores and sum of exponentials, is merged with that to others: what
// their results are multiplied by, and the log_sum_exp of all keys.
struct Merge {
    float old, now, log_sum_exp;
    __device__ Merge(float before, float top, float sum) {
        const float mine = top * SCALE + logf(sum), high = fmaxf(before, mine);
        const float a = expf(before - high), b = expf(mine - high);
        old = a / (a + b), now = MASKED && sum == 0 ? 0 : b / (a + b) / sum, log_sum_exp = high + logf(a + b);
    }
};

// Which block of rows of which head this thread block works on.  Blocks start in the order of their number: the rows
// with the most work come first, so that the last wave is short, and `section` heads at a time, so that what they
// read stays in the L2.
struct Place {
    int head, block;  // head counts over samples too; block 0 is the one that starts first
};
__device__ inline Place place(int index, int heads, int blocks, int section) {
    const int number = index / (section * blocks), rest = index - number * section * blocks;
    const int width = min(section, heads - number * section);
    return {number * section + rest % width, rest / width};
}

// Statistics that the backward reads, fp32: per head and 64 tokens, 64 log2-sum-exps of the scores, 64 deltas (sum of
// d_out out) and 64 powers of two that dQ is multiplied by to be added up in integers; T is padded to PAD, with inf and
// 0, so that tokens that do not exist have probability 0.
#define PAD 128
#define STATISTICS 3
__host__ __device__ constexpr int padded(int T) { return (T + PAD - 1) / PAD * PAD; }
__device__ inline long statistics_at(int head, int token, int T) {
    return ((long)head * (padded(T) / 64) + token / 64) * (64 * STATISTICS) + token % 64;
}

// Accumulators of the tensor cores, 16 rows a warp: element i of a lane is in row lane / 4, or in the row 8 below.
// Packed in pairs they are, unmoved, the left operand of the next product.
#define LOWER(i) ((i) / 2 % 2)  // 1: the row below
#define COLUMN_OF(i, lane) ((i) / 4 * 8 + (lane) % 4 * 2 + (i) % 2)

// Adds the rows of d that exist, times a factor for the thread's upper and one for its lower row, to what is there, times
// another.
template <int N>
__device__ inline void add_rows(const float (&d)[N], float upper, float lower, float* head, long stride, int row,
                                int rows, float old_upper = 1, float old_lower = 1) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i += 2) {
        const int at = row + LOWER(i) * 8;
        const float factor = LOWER(i) ? lower : upper, old = LOWER(i) ? old_lower : old_upper;
        if (at >= rows) continue;
        float2* pair = (float2*)(head + at * stride + COLUMN_OF(i, threadIdx.x % 32));
        const float2 there = *pair;
        *pair = {there.x * old + d[i] * factor, there.y * old + d[i + 1] * factor};
    }
}
