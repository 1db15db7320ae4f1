// Attention, forward and backward, for any dtype and any head size up to 256: fp32 checks, odd head sizes.
//
// A warp owns one row: a query, or a key in attention_backward_kv, where the queries of all heads that share it are
// added up.  Every product is a dot product over the lanes.  No tiles, no tensor cores, no scratch memory.
#include "attention.cuh"

#define WARPS 8
#define THREADS (32 * WARPS)
#define PER_LANE ((HEAD_DIM + 31) / 32)

#if IS_FLOAT32
using Element = float;
__device__ inline float widen(Element x) { return x; }
__device__ inline Element narrow(float x) { return x; }
#else
using Element = u16;
__device__ inline float widen(Element x) { return unpack(x).x; }
__device__ inline Element narrow(float x) { return (Element)pack(x, 0); }
#endif

// What kernels are given to see other keys than causal ones, and where keys and values are.
#if CAUSAL
using Output = Element;
#define OTHERS
#define FIND_KEYS                                                 \
    const long width = (long)(H + 2 * K) * HEAD_DIM, kv_width = width; \
    const Element* kv = qkv + (long)H * HEAD_DIM;                 \
    const int keys = T, stride = T;
#else
using Output = float;
#define OTHERS , const Element *kv, int keys, int stride
#define FIND_KEYS const long width = (long)(H + 2 * K) * HEAD_DIM, kv_width = 2l * K * HEAD_DIM;
#endif

struct Row {
    float x[PER_LANE];
    __device__ void zero() {
        for (int i = 0; i < PER_LANE; ++i) x[i] = 0;
    }
    __device__ void load(const Element* source) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int column = threadIdx.x % 32 + 32 * i;
            x[i] = column < HEAD_DIM ? widen(source[column]) : 0;
        }
    }
    // Times a factor; without CAUSAL added to what is there, times `old`.
    __device__ void store(Output* target, float factor, float old = 1) const {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int column = threadIdx.x % 32 + 32 * i;
            if (column >= HEAD_DIM) continue;
#if CAUSAL
            target[column] = narrow(x[i] * factor);
#else
            target[column] = target[column] * old + x[i] * factor;
#endif
        }
    }
    __device__ void add(float factor, const Row& other) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) x[i] += factor * other.x[i];
    }
};
__device__ inline float dot(const Row& a, const Row& b) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) sum += a.x[i] * b.x[i];
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

// Where the rows of one sample start, and the row of this warp; `heads` of them for each token.
struct Work {
    long row;
    int sample, head, token;
    bool exists;
    __device__ Work(int samples, int T, int heads) : row(((long)blockIdx.x * THREADS + threadIdx.x) / 32) {
        exists = row < (long)samples * T * heads;
        head = row % heads;
        token = row / heads % T;
        sample = row / heads / T;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_forward(const Element* qkv, Output* out, float* log_sum_exp, int samples, int T, int H, int K OTHERS MASK) {
    const Work at(samples, T, H);
    if (!at.exists) return;
    FIND_KEYS
    const Mask mask MASK_OF(stride);
    const long token = (long)at.sample * stride + at.token, first_key = (long)at.sample * stride;
    const long k_at = (long)(at.head / (H / K)) * HEAD_DIM, v_at = k_at + (long)K * HEAD_DIM;
    Row q, k, v, sums;
    q.load(qkv + token * width + at.head * HEAD_DIM);
    sums.zero();
    float top = -INFINITE, total = 0;
    const int seen = CAUSAL ? at.token + 1 : keys;
    for (int key = mask.first_key(at.sample, at.token); key < seen; ++key) {
        k.load(kv + (first_key + key) * kv_width + k_at);
        v.load(kv + (first_key + key) * kv_width + v_at);
        const float score = SCALE * score_of(dot(q, k)), high = fmaxf(top, score);
        const float factor = expf(top - high), probability = expf(score - high);
        top = high;
        total = total * factor + probability;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) sums.x[i] *= factor;
        sums.add(probability, v);
    }
    float* lse = log_sum_exp + ((long)at.sample * H + at.head) * stride + at.token;
    Output* target = out + (token * H + at.head) * HEAD_DIM;
#if CAUSAL
    sums.store(target, 1 / total);
    if (threadIdx.x % 32 == 0) *lse = top + logf(total);
#else
    const Merge merge(*lse, top / SCALE, total);
    __syncwarp();  // all have read what the first writes
    sums.store(target, merge.now, merge.old);
    if (threadIdx.x % 32 == 0) *lse = merge.log_sum_exp;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_q(const Element* qkv, const Element* d_out, const Element* out, const float* log_sum_exp, Output* d_qkv,
                         int samples, int T, int H, int K OTHERS MASK) {
    const Work at(samples, T, H);
    if (!at.exists) return;
    FIND_KEYS
    const Mask mask MASK_OF(stride);
    const long token = (long)at.sample * stride + at.token, first_key = (long)at.sample * stride;
    const long k_at = (long)(at.head / (H / K)) * HEAD_DIM, v_at = k_at + (long)K * HEAD_DIM;
    const long q_at = token * width + at.head * HEAD_DIM, out_at = (token * H + at.head) * HEAD_DIM;
    const float lse = log_sum_exp[((long)at.sample * H + at.head) * stride + at.token];
    Row q, dout, o, k, v, dq;
    q.load(qkv + q_at);
    dout.load(d_out + out_at);
    o.load(out + out_at);
    dq.zero();
    const float delta = dot(dout, o);
    const int seen = CAUSAL ? at.token + 1 : keys;
    for (int key = mask.first_key(at.sample, at.token); key < seen; ++key) {
        k.load(kv + (first_key + key) * kv_width + k_at);
        v.load(kv + (first_key + key) * kv_width + v_at);
        const float p = expf(SCALE * score_of(dot(q, k)) - lse);
        dq.add(product_gradient(p, dot(dout, v), delta, lse * LOG2_E), k);
    }
    dq.store(d_qkv + q_at, SCALE);
}

// gradient: of qkv, or without CAUSAL of kv.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_kv(const Element* qkv, const Element* d_out, const Element* out, const float* log_sum_exp, Output* gradient,
                          int samples, int T, int H, int K OTHERS MASK) {
    FIND_KEYS
    const Work at(samples, keys, K);
    if (!at.exists) return;
    const long first = (long)at.sample * stride;
    const long k_at = (first + at.token) * kv_width + (long)at.head * HEAD_DIM, v_at = k_at + (long)K * HEAD_DIM;
    Row q, dout, o, k, v, dk, dv;
    const Mask mask MASK_OF(stride);
    const int seen_by = MASKED ? mask.last_query(at.sample, at.token) + 1 : T;
    k.load(kv + k_at);
    v.load(kv + v_at);
    dk.zero();
    dv.zero();
    for (int head = at.head * (H / K); head < (at.head + 1) * (H / K); ++head)
        for (int query = CAUSAL ? at.token : 0; query < seen_by; ++query) {
            const long out_at = ((first + query) * H + head) * HEAD_DIM;
            q.load(qkv + (first + query) * width + head * HEAD_DIM);
            dout.load(d_out + out_at);
            o.load(out + out_at);
            const float score = SCALE * score_of(dot(q, k));
            const float lse = log_sum_exp[((long)at.sample * H + head) * stride + query], p = expf(score - lse);
            dv.add(p, dout);
            const float d_probability = dot(dout, v), delta = dot(dout, o);
            dk.add(product_gradient(p, d_probability, delta, lse * LOG2_E), q);
        }
    Output* keys_gradient = gradient + (CAUSAL ? H * HEAD_DIM : 0);
    dk.store(keys_gradient + k_at, SCALE);
    dv.store(keys_gradient + v_at, 1);
}
