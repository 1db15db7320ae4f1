// The kernels as one would first write them: one thread an element or a row, no wide accesses, nothing fused,
// angles computed on the spot, K and V repeated, float atomics.  What the fast ones are checked and timed against.
// -DDTYPE
#include "../../kos/train/ops/cuda/kernels/vectors.cuh"

using T = DTYPE;

__device__ __forceinline__ long index() { return long(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ void put(T* p, float x) { narrow(x, *p); }

// --- elementwise ---

extern "C" __global__ void add(const T* a, const T* b, T* out, long n) {
    const long i = index();
    if (i < n) put(out + i, widen(a[i]) + widen(b[i]));
}

extern "C" __global__ void cast(const float* source, bfloat16* out, long n) {
    const long i = index();
    if (i < n) narrow(source[i], out[i]);
}

extern "C" __global__ void zero(T* out, long n) {
    const long i = index();
    if (i < n) put(out + i, 0);
}

extern "C" __global__ void swiglu(const T* gate_up, T* out, int f, long n) {
    const long i = index();
    if (i >= n) return;
    const float gate = widen(gate_up[i / f * 2 * f + i % f]), up = widen(gate_up[i / f * 2 * f + f + i % f]);
    put(out + i, gate / (1 + expf(-gate)) * up);
}

extern "C" __global__ void swiglu_backward(const T* d_out, const T* gate_up, T* d_gate_up, int f, long n) {
    const long i = index();
    if (i >= n) return;
    const long at = i / f * 2 * f + i % f;
    const float gate = widen(gate_up[at]), up = widen(gate_up[at + f]), d = widen(d_out[i]);
    const float s = 1 / (1 + expf(-gate));
    put(d_gate_up + at, d * up * s * (1 + gate * (1 - s)));
    put(d_gate_up + at + f, d * gate * s);
}

constexpr float SCALE = 0.7978845608028654f, CUBE = 0.044715f;  // sqrt(2 / pi) and what GPT-2's gelu has of x^3

extern "C" __global__ void gelu(const T* in, T* out, long n) {
    const long i = index();
    if (i >= n) return;
    const float x = widen(in[i]);
    put(out + i, 0.5f * x * (1 + tanhf(SCALE * (x + CUBE * x * x * x))));
}

extern "C" __global__ void gelu_backward(const T* d_out, const T* in, T* dx, long n) {
    const long i = index();
    if (i >= n) return;
    const float x = widen(in[i]), t = tanhf(SCALE * (x + CUBE * x * x * x));
    const float slope = 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * SCALE * (1 + 3 * CUBE * x * x);
    put(dx + i, widen(d_out[i]) * slope);
}

// --- norms: one thread a row; gradients of weights by atomics ---

extern "C" __global__ void rms_norm(const T* x, const T* weight, float eps, T* out, float* rstd, long n, int d) {
    const long row = index();
    if (row >= n) return;
    float squares = 0;
    for (int i = 0; i < d; ++i) squares += widen(x[row * d + i]) * widen(x[row * d + i]);
    const float r = rsqrtf(squares / d + eps);
    rstd[row] = r;
    for (int i = 0; i < d; ++i) put(out + row * d + i, widen(x[row * d + i]) * r * widen(weight[i]));
}

extern "C" __global__ void rms_norm_backward(const T* d_out, const T* x, const T* weight, const float* rstd, T* dx,
                                             float* d_weight, long n, int d) {
    const long row = index();
    if (row >= n) return;
    const float r = rstd[row];
    float dot = 0;
    for (int i = 0; i < d; ++i) {
        const long at = row * d + i;
        dot += widen(d_out[at]) * widen(weight[i]) * widen(x[at]) * r;
        atomicAdd(d_weight + i, widen(d_out[at]) * widen(x[at]) * r);
    }
    for (int i = 0; i < d; ++i) {
        const long at = row * d + i;
        const float g = widen(d_out[at]) * widen(weight[i]);
        put(dx + at, widen(dx[at]) + r * (g - widen(x[at]) * r * dot / d));
    }
}

extern "C" __global__ void layer_norm(const T* x, const T* weight, const T* bias, float eps, T* out, float* statistics,
                                      long n, int d) {
    const long row = index();
    if (row >= n) return;
    float sum = 0, squares = 0;
    for (int i = 0; i < d; ++i) sum += widen(x[row * d + i]);
    const float mean = sum / d;
    for (int i = 0; i < d; ++i) squares += (widen(x[row * d + i]) - mean) * (widen(x[row * d + i]) - mean);
    const float r = rsqrtf(squares / d + eps);
    statistics[row] = r;
    statistics[n + row] = mean;
    for (int i = 0; i < d; ++i)
        put(out + row * d + i, (widen(x[row * d + i]) - mean) * r * widen(weight[i]) + widen(bias[i]));
}

extern "C" __global__ void layer_norm_backward(const T* d_out, const T* x, const T* weight, const float* statistics,
                                               T* dx, float* d_weight, float* d_bias, long n, int d) {
    const long row = index();
    if (row >= n) return;
    const float r = statistics[row], mean = statistics[n + row];
    float sum = 0, dot = 0;
    for (int i = 0; i < d; ++i) {
        const long at = row * d + i;
        const float dy = widen(d_out[at]), normed = (widen(x[at]) - mean) * r;
        sum += dy * widen(weight[i]);
        dot += dy * widen(weight[i]) * normed;
        atomicAdd(d_weight + i, dy * normed);
        atomicAdd(d_bias + i, dy);
    }
    for (int i = 0; i < d; ++i) {
        const long at = row * d + i;
        const float g = widen(d_out[at]) * widen(weight[i]), normed = (widen(x[at]) - mean) * r;
        put(dx + at, widen(dx[at]) + r * (g - sum / d - normed * dot / d));
    }
}

// One thread a column.
extern "C" __global__ void sum_rows(const T* x, float* out, int rows, int d) {
    const long i = index();
    if (i >= d) return;
    float sum = 0;
    for (long row = 0; row < rows; ++row) sum += widen(x[row * d + i]);
    out[i] = sum;
}

// --- linear: one thread an output ---

// out (m, n) = a (m, k) b (k, n) + residual, which may be absent; a and b in any strides.
extern "C" __global__ void matmul(const T* a, const T* b, const T* residual, T* out, long m, int n, int k, long a_row,
                                  long a_column, long b_row, long b_column) {
    const long i = index();
    if (i >= m * n) return;
    a += i / n * a_row;
    b += i % n * b_column;
    float sum = residual ? widen(residual[i]) : 0;
    for (int j = 0; j < k; ++j) sum += widen(a[j * a_column]) * widen(b[j * b_row]);
    put(out + i, sum);
}

// --- attention: rows of qkv are the heads of q, then those of k, then those of v ---

// sign -1: the backward.
extern "C" __global__ void rope(T* qkv, float theta, int length, int half, int heads, int row, int sign, long n) {
    const long item = index();
    if (item >= n) return;
    const int i = item % half, head = item / half % heads;
    const long token = item / half / heads;
    const float angle = sign * (token % length * powf(theta, -float(i) / half));
    T* a = qkv + token * row + head * 2 * half + i;
    const float left = widen(a[0]), right = widen(a[half]);
    put(a, left * cosf(angle) - right * sinf(angle));
    put(a + half, right * cosf(angle) + left * sinf(angle));
}

// repeated (N, 2 H d): every head of k, then every head of v, as often as query heads read it.
extern "C" __global__ void repeat_kv(const T* qkv, T* repeated, int heads, int kv_heads, int d, long n) {
    const long i = index();
    if (i >= n) return;
    const long token = i / d / (2 * heads);
    const int head = i / d % (2 * heads) / (heads / kv_heads);
    repeated[i] = qkv[(token * (heads + 2 * kv_heads) + heads + head) * d + i % d];
}

extern "C" __global__ void repeat_kv_backward(const float* d_repeated, T* d_qkv, int heads, int kv_heads, int d,
                                              long n) {
    const long i = index();
    if (i >= n) return;
    const long token = i / d / (2 * kv_heads);
    const int head = i / d % (2 * kv_heads), group = heads / kv_heads;
    float sum = 0;
    for (int j = 0; j < group; ++j) sum += d_repeated[(token * 2 * heads + head * group + j) * d + i % d];
    put(d_qkv + (token * (heads + 2 * kv_heads) + heads + head) * d + i % d, sum);
}

// A block has one head of one query, a thread one of its columns; blocks are whole warps.
struct Query {
    int head, heads, d, i = threadIdx.x;
    long token, first, at_q, at_statistic;

    __device__ Query(int length, int heads, int kv_heads, int d) : heads(heads), d(d) {
        head = blockIdx.x % heads;
        token = blockIdx.x / heads;
        first = token / length * length;
        at_q = (token * (heads + 2 * kv_heads) + head) * d + i;
        at_statistic = (token / length * heads + head) * length + token % length;
    }
    __device__ long at_out() const { return (token * heads + head) * d + i; }
    __device__ long at_key(long key) const { return (key * 2 * heads + head) * d + i; }
    __device__ long at_value(long key) const { return at_key(key) + long(heads) * d; }
    __device__ float load(const T* p, long at) const { return i < d ? widen(p[at]) : 0; }
};

// Two passes over the keys, each of which computes the scores.
extern "C" __global__ void attention(const T* qkv, const T* repeated, T* out, float* log_sum_exp, int length, int heads,
                                     int kv_heads, int d) {
    const Query my(length, heads, kv_heads, d);
    const float q = my.load(qkv, my.at_q) * rsqrtf(d);
    float top = __int_as_float(0xff800000), total = 0, sum = 0;
    for (long key = my.first; key <= my.token; ++key)
        top = fmaxf(top, block_sum(q * my.load(repeated, my.at_key(key))));
    for (long key = my.first; key <= my.token; ++key) {
        const float p = expf(block_sum(q * my.load(repeated, my.at_key(key))) - top);
        total += p;
        sum += p * my.load(repeated, my.at_value(key));
    }
    if (my.i < d) put(out + my.at_out(), sum / total);
    if (my.i == 0) log_sum_exp[my.at_statistic] = top + logf(total);
}

// d_qkv gets dQ; dK and dV are added up in d_repeated, in the order of `repeated`.
extern "C" __global__ void attention_backward(const T* d_out, const T* qkv, const T* repeated, const T* out,
                                              const float* log_sum_exp, T* d_qkv, float* d_repeated, int length,
                                              int heads, int kv_heads, int d) {
    const Query my(length, heads, kv_heads, d);
    const float scale = rsqrtf(d), q = my.load(qkv, my.at_q), dy = my.load(d_out, my.at_out());
    const float slope = block_sum(dy * my.load(out, my.at_out()));
    float dq = 0;
    for (long key = my.first; key <= my.token; ++key) {
        const float k = my.load(repeated, my.at_key(key)), v = my.load(repeated, my.at_value(key));
        const float p = expf(scale * block_sum(q * k) - log_sum_exp[my.at_statistic]);
        const float ds = scale * p * (block_sum(dy * v) - slope);
        dq += ds * k;
        if (my.i < d) atomicAdd(d_repeated + my.at_key(key), ds * q);
        if (my.i < d) atomicAdd(d_repeated + my.at_value(key), p * dy);
    }
    if (my.i < d) put(d_qkv + my.at_q, dq);
}

// --- embedding and loss ---

extern "C" __global__ void embedding(const int* tokens, const T* table, T* out, int d, long n) {
    const long i = index();
    if (i < n) out[i] = table[long(tokens[i / d]) * d + i % d];
}

extern "C" __global__ void embedding_backward(const T* d_out, const int* tokens, float* d_table, int d, long n) {
    const long i = index();
    if (i < n) atomicAdd(d_table + long(tokens[i / d]) * d + i % d, widen(d_out[i]));
}

extern "C" __global__ void count_targets(const int* targets, float* count, long n) {
    const long i = index();
    if (i < n && targets[i] >= 0) atomicAdd(count, 1.0f);
}

// One block a row, three passes over it.
extern "C" __global__ void cross_entropy(T* logits, const int* targets, const float* count, float* losses, long v) {
    __shared__ float tops[32];
    T* row = logits + long(blockIdx.x) * v;
    float top = __int_as_float(0xff800000), total = 0;
    for (long i = threadIdx.x; i < v; i += blockDim.x) top = fmaxf(top, widen(row[i]));
    for (int offset = 16; offset; offset >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
    for (int i = 0; i < blockDim.x / 32; ++i) top = fmaxf(top, tops[i]);
    for (long i = threadIdx.x; i < v; i += blockDim.x) total += expf(widen(row[i]) - top);
    total = block_sum(total);
    const int target = targets[blockIdx.x];
    if (threadIdx.x == 0) losses[blockIdx.x] = top + logf(total) - widen(row[target]);
    __syncthreads();
    for (long i = threadIdx.x; i < v; i += blockDim.x)
        put(row + i, (expf(widen(row[i]) - top) / total - (i == target)) / count[0]);
}

extern "C" __global__ void mean_loss(const float* losses, const float* count, double* mean, long n) {
    const long i = index();
    if (i < n) atomicAdd(mean, double(losses[i]) / count[0]);
}

// --- optimizer ---

extern "C" __global__ void gradient_norm(const float* g, double* sum_of_squares, long n) {
    const long i = index();
    if (i < n) atomicAdd(sum_of_squares, double(g[i]) * g[i]);
}

extern "C" __global__ void adamw(float* w, const float* g, float* m, float* v, T* copy, float lr, float step_size,
                                 float root, float decay, float beta1, float beta2, float eps, long n) {
    const long i = index();
    if (i >= n) return;
    m[i] = beta1 * m[i] + (1 - beta1) * g[i];
    v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
    w[i] = w[i] * (1 - lr * decay) - step_size * m[i] / (sqrtf(v[i]) * root + eps);
    put(copy + i, w[i]);
}
