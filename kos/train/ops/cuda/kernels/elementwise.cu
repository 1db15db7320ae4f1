// add, cast, columns of a row, swiglu, gelu and their backward: one pass, 16-byte accesses, nothing kept.
//
// -DDTYPE (activations) -DWIDTH -DCOLUMNS (swiglu's F, columns of a row: a constant so that rows and columns of an index cost
// no division) -DSOURCE (the input of cast and add_tree) -DTERMS (of add_tree).  Grids cover all packs of WIDTH
// elements; `packs` is their number.
#include "swiglu.cuh"

using T = DTYPE;
constexpr int W = WIDTH;

__device__ __forceinline__ long pack_index() { return long(blockIdx.x) * blockDim.x + threadIdx.x; }

// out = a + b; out may be a or b.
extern "C" __global__ void add(const T* a, const T* b, T* out, long packs) {
    const long i = pack_index();
    if (i >= packs) return;
    float x[W], y[W];
    load(x, a + i * W);
    load(y, b + i * W);
#pragma unroll
    for (int j = 0; j < W; ++j) x[j] += y[j];
    store(out + i * W, x);
}

// out = ((t0 + t1) + (t2 + t3)) + …, rounded once, of TERMS terms that are `stride` elements apart; out may be the first.
extern "C" __global__ void add_tree(const SOURCE* terms, T* out, long stride, long packs) {
    const long i = pack_index();
    if (i >= packs) return;
    float x[TERMS][W];
#pragma unroll
    for (int k = 0; k < TERMS; ++k) load(x[k], terms + k * stride + i * W);
#pragma unroll
    for (int count = TERMS / 2; count; count /= 2)
#pragma unroll
        for (int k = 0; k < count; ++k)
#pragma unroll
            for (int j = 0; j < W; ++j) x[k][j] = x[2 * k][j] + x[2 * k + 1][j];
    store(out + i * W, x[0]);
}

extern "C" __global__ void cast(const SOURCE* source, T* out, long packs) {
    const long i = pack_index();
    if (i >= packs) return;
    float x[W];
    load(x, source + i * W);
    store(out + i * W, x);
}

// Of rows of `width` elements, x, the last COLUMNS: to or from rows of their own, y.
__device__ __forceinline__ long in_last_columns(long i, int width) {
    return i * W + (i / (COLUMNS / W) + 1) * (width - COLUMNS);
}
extern "C" __global__ void last_columns(const T* x, T* y, int width, long packs) {
    const long i = pack_index();
    if (i >= packs) return;
    float values[W];
    load(values, x + in_last_columns(i, width));
    store(y + i * W, values);
}
extern "C" __global__ void add_to_last_columns(T* x, const T* y, int width, long packs) {
    const long i = pack_index();
    if (i >= packs) return;
    T* const sum = x + in_last_columns(i, width);
    float values[W], more[W];
    load(values, sum);
    load(more, y + i * W);
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] += more[j];
    store(sum, values);
}

// gate_up (rows, 2 F) holds gate, then up; out (rows, F) = gate sigmoid(gate) up.
extern "C" __global__ void swiglu(const T* gate_up, T* out, long packs) {
    const long i = pack_index();
    if (i >= packs) return;
    const long row = i / (COLUMNS / W);
    const T* at = gate_up + i * W + row * COLUMNS;
    float gate[W], up[W];
    load(gate, at);
    load(up, at + COLUMNS);
    apply_swiglu<T>(gate, up);
    store(out + i * W, gate);
}

// d_gate_up (rows, 2 F) holds the gradient of gate, then of up.
extern "C" __global__ void swiglu_backward(const T* d_out, const T* gate_up, T* d_gate_up, long packs) {
    const long i = pack_index();
    if (i >= packs) return;
    const long at = i * W + i / (COLUMNS / W) * COLUMNS;
    float gate[W], up[W], d[W];
    load(d, d_out + i * W);
    load(gate, gate_up + at);
    load(up, gate_up + at + COLUMNS);
    apply_swiglu_backward<T>(d, gate, up);
    store(d_gate_up + at, gate);
    store(d_gate_up + at + COLUMNS, up);
}

// GPT-2's gelu: x s with s = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float SCALE = 0.7978845608028654f, CUBE = 0.044715f;
__device__ __forceinline__ float gelu_sigmoid(float x) { return sigmoid<T>(2 * SCALE * x * (1 + CUBE * x * x)); }

extern "C" __global__ void gelu(const T* in, T* out, long packs) {
    const long i = pack_index();
    if (i >= packs) return;
    float x[W];
    load(x, in + i * W);
#pragma unroll
    for (int j = 0; j < W; ++j) x[j] *= gelu_sigmoid(x[j]);
    store(out + i * W, x);
}

// dx = d_out s (1 + x (1 - s) 2 u').
extern "C" __global__ void gelu_backward(const T* d_out, const T* in, T* dx, long packs) {
    const long i = pack_index();
    if (i >= packs) return;
    float x[W], d[W];
    load(d, d_out + i * W);
    load(x, in + i * W);
#pragma unroll
    for (int j = 0; j < W; ++j) {
        const float s = gelu_sigmoid(x[j]);
        d[j] *= s * (1 + x[j] * (1 - s) * 2 * SCALE * (1 + 3 * CUBE * x[j] * x[j]));
    }
    store(dx + i * W, d);
}
