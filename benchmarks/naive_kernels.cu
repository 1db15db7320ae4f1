// The kernels as one would first write them: one thread an element or a row, no wide accesses, nothing fused,
// angles computed on the spot, float atomics.  What the fast ones are checked and timed against.
// -DDTYPE
#include "../kos/train/kernels/vectors.cuh"

using T = DTYPE;

__device__ __forceinline__ long index() { return long(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ void put(T* p, float x) { narrow(x, *p); }

extern "C" __global__ void add(const T* a, const T* b, T* out, long n) {
    const long i = index();
    if (i < n) put(out + i, widen(a[i]) + widen(b[i]));
}

// One thread a row.
extern "C" __global__ void rms_norm(const T* x, const T* weight, float eps, T* out, float* rstd, long n, int d) {
    const long row = index();
    if (row >= n) return;
    float squares = 0;
    for (int i = 0; i < d; ++i) squares += widen(x[row * d + i]) * widen(x[row * d + i]);
    const float r = rsqrtf(squares / d + eps);
    rstd[row] = r;
    for (int i = 0; i < d; ++i) put(out + row * d + i, widen(x[row * d + i]) * r * widen(weight[i]));
}

// One thread a row for dx; d_weight by atomics.
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

extern "C" __global__ void rope(T* qkv, float theta, int length, int half, int heads, int row, long n) {
    const long item = index();
    if (item >= n) return;
    const int i = item % half, head = item / half % heads;
    const long token = item / half / heads;
    const float angle = token % length * powf(theta, -float(i) / half);
    T* a = qkv + token * row + head * 2 * half + i;
    const float left = widen(a[0]), right = widen(a[half]);
    put(a, left * cosf(angle) - right * sinf(angle));
    put(a + half, right * cosf(angle) + left * sinf(angle));
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

extern "C" __global__ void embedding_backward(const T* d_out, const int* tokens, float* d_table, int d, long n) {
    const long i = index();
    if (i < n) atomicAdd(d_table + long(tokens[i / d]) * d + i % d, widen(d_out[i]));
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
