// Causal attention, forward and backward, for any dtype and any head size up to 256: fp32 checks, odd head sizes.
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
    __device__ void store(Element* target, float factor) const {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int column = threadIdx.x % 32 + 32 * i;
            if (column < HEAD_DIM) target[column] = narrow(x[i] * factor);
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
    attention_forward(const Element* qkv, Element* out, float* log_sum_exp, int samples, int T, int H, int K) {
    const Work at(samples, T, H);
    if (!at.exists) return;
    const long width = (long)(H + 2 * K) * HEAD_DIM, first = (long)at.sample * T;
    const long k_at = (long)(H + at.head / (H / K)) * HEAD_DIM, v_at = k_at + (long)K * HEAD_DIM;
    Row q, k, v, sums;
    q.load(qkv + (first + at.token) * width + at.head * HEAD_DIM);
    sums.zero();
    float top = -INFINITE, total = 0;
    for (int key = 0; key <= at.token; ++key) {
        k.load(qkv + (first + key) * width + k_at);
        v.load(qkv + (first + key) * width + v_at);
        const float score = SCALE * dot(q, k), high = fmaxf(top, score);
        const float factor = expf(top - high), probability = expf(score - high);
        top = high;
        total = total * factor + probability;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) sums.x[i] *= factor;
        sums.add(probability, v);
    }
    sums.store(out + (first + at.token) * H * HEAD_DIM + at.head * HEAD_DIM, 1 / total);
    if (threadIdx.x % 32 == 0) log_sum_exp[((long)at.sample * H + at.head) * T + at.token] = top + logf(total);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_q(const Element* qkv, const Element* d_out, const Element* out, const float* log_sum_exp, Element* d_qkv,
                         int samples, int T, int H, int K) {
    const Work at(samples, T, H);
    if (!at.exists) return;
    const long width = (long)(H + 2 * K) * HEAD_DIM, first = (long)at.sample * T;
    const long k_at = (long)(H + at.head / (H / K)) * HEAD_DIM, v_at = k_at + (long)K * HEAD_DIM;
    const long q_at = (first + at.token) * width + at.head * HEAD_DIM, out_at = ((first + at.token) * H + at.head) * HEAD_DIM;
    const float lse = log_sum_exp[((long)at.sample * H + at.head) * T + at.token];
    Row q, dout, o, k, v, dq;
    q.load(qkv + q_at);
    dout.load(d_out + out_at);
    o.load(out + out_at);
    dq.zero();
    const float delta = dot(dout, o);
    for (int key = 0; key <= at.token; ++key) {
        k.load(qkv + (first + key) * width + k_at);
        v.load(qkv + (first + key) * width + v_at);
        dq.add(expf(SCALE * dot(q, k) - lse) * (dot(dout, v) - delta), k);
    }
    dq.store(d_qkv + q_at, SCALE);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_kv(const Element* qkv, const Element* d_out, const Element* out, const float* log_sum_exp, Element* d_qkv,
                          int samples, int T, int H, int K) {
    const Work at(samples, T, K);
    if (!at.exists) return;
    const long width = (long)(H + 2 * K) * HEAD_DIM, first = (long)at.sample * T;
    const long k_at = (first + at.token) * width + (long)(H + at.head) * HEAD_DIM, v_at = k_at + (long)K * HEAD_DIM;
    Row q, dout, o, k, v, dk, dv;
    k.load(qkv + k_at);
    v.load(qkv + v_at);
    dk.zero();
    dv.zero();
    for (int head = at.head * (H / K); head < (at.head + 1) * (H / K); ++head)
        for (int query = at.token; query < T; ++query) {
            const long out_at = ((first + query) * H + head) * HEAD_DIM;
            q.load(qkv + (first + query) * width + head * HEAD_DIM);
            dout.load(d_out + out_at);
            o.load(out + out_at);
            const float p = expf(SCALE * dot(q, k) - log_sum_exp[((long)at.sample * H + head) * T + query]);
            dv.add(p, dout);
            dk.add(p * (dot(dout, v) - dot(dout, o)), q);
        }
    dk.store(d_qkv + k_at, SCALE);
    dv.store(d_qkv + v_at, 1);
}
