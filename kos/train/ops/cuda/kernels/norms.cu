// RMSNorm or LayerNorm (-DCENTERED=1) and its backward, at the speed of memory.
//
// D is a constant of the compilation: every loop over a row is unrolled, and a row stays in registers, read
// once.  THREADS threads (a warp or more) share a row, and meet at a barrier of their own; ROWS of these groups make
// a block.
//
// Forward: a group a row; enough blocks fit a multiprocessor that some load while others compute and store.
// Backward: a grid that fits the GPU walks over all rows, and while a group works on one row its loads of the next
// are under way: each thread keeps the sums of d_weight (and d_bias) of its columns in registers.  The groups of a
// block are added in shared memory, the blocks by `sum_partials` of sums.cu, always in the same order.
//
// No kernel adds the residual and norms the sum: the product before adds it as it writes (`linear(residual=)`, cuBLASLt's
// C), and the backward adds to dx in place.  Product and norm so read two arrays and write two; with such a kernel they
// would read as many and write three, the product's output being one of them.
//
// -DDTYPE -DWIDTH -DCOLUMNS (D) -DTHREADS -DROWS -DCENTERED
#include "vectors.cuh"

using T = DTYPE;
constexpr int W = WIDTH, D = COLUMNS;
constexpr int PACKS = (D / W + THREADS - 1) / THREADS;
using Row = Raw<W, T>[PACKS];

__device__ __forceinline__ int column(int pack) { return (pack * THREADS + int(threadIdx.x) % THREADS) * W; }

__device__ __forceinline__ void load_row(Row& raw, const T* p, bool inside = true) {
#pragma unroll
    for (int p_ = 0; p_ < PACKS; ++p_)
        if (inside && column(p_) < D) raw[p_].load(p + column(p_));
}

// The sum over the THREADS threads of a row; `turn` alternates, so that one barrier a call is enough.
__device__ __forceinline__ float row_sum(float x, int turn) {
    x = warp_sum(x);
    if constexpr (THREADS > 32) {
        constexpr int WARPS = THREADS / 32;
        __shared__ float parts[2][ROWS][WARPS];
        const int group = threadIdx.x / THREADS;
        parts[turn][group][threadIdx.x % THREADS / 32] = x;
        asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(THREADS) : "memory");
        x = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) x += parts[turn][group][i];
    }
    return x;
}

// statistics: rstd (rows,), and with CENTERED the mean after it.  Without `out` (fp8.cu computes that) they are all.
extern "C" __global__ void __launch_bounds__(THREADS * ROWS, 1024 / (THREADS * ROWS))
norm_forward(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, float eps,
     T* __restrict__ out, float* __restrict__ statistics, long rows) {
    const long row = long(blockIdx.x) * ROWS + threadIdx.x / THREADS;
    if (row >= rows) return;
    Row raw;
    load_row(raw, x + row * D);
    float mean = 0, squares = 0;
    if constexpr (CENTERED) {
        float sum = 0;
#pragma unroll
        for (int p = 0; p < PACKS; ++p)
            if (column(p) < D) {
                float v[W];
                raw[p].floats(v);
#pragma unroll
                for (int j = 0; j < W; ++j) sum += v[j];
            }
        mean = row_sum(sum, 0) * (1.0f / D);
    }
#pragma unroll
    for (int p = 0; p < PACKS; ++p)
        if (column(p) < D) {
            float v[W];
            raw[p].floats(v);
#pragma unroll
            for (int j = 0; j < W; ++j) squares += (v[j] - mean) * (v[j] - mean);
        }
    const float r = rsqrtf(row_sum(squares, 1) * (1.0f / D) + eps);
    if (threadIdx.x % THREADS == 0) {
        statistics[row] = r;
        if constexpr (CENTERED) statistics[rows + row] = mean;
    }
    if (!out) return;
#pragma unroll
    for (int p = 0; p < PACKS; ++p)
        if (column(p) < D) {
            float v[W], w[W], b[W] = {};
            raw[p].floats(v);
            load(w, weight + column(p));  // from the L1 cache
            if constexpr (CENTERED) load(b, bias + column(p));
#pragma unroll
            for (int j = 0; j < W; ++j)
                v[j] = CENTERED ? (v[j] - mean) * r * w[j] + b[j] : v[j] * r * w[j];
            store(out + row * D + column(p), v);
        }
}

// What the groups of a block have summed goes to out (D,).
__device__ __forceinline__ void store_sums(const float (&sums)[PACKS][W], float* out) {
    if constexpr (ROWS > 1) {
        __shared__ float all[ROWS][D];
#pragma unroll
        for (int p = 0; p < PACKS; ++p)
            if (column(p) < D) {
#pragma unroll
                for (int j = 0; j < W; ++j) all[threadIdx.x / THREADS][column(p) + j] = sums[p][j];
            }
        __syncthreads();
        for (int i = threadIdx.x; i < D; i += THREADS * ROWS) {
            float sum = 0;
#pragma unroll
            for (int k = 0; k < ROWS; ++k) sum += all[k][i];
            out[i] = sum;
        }
    } else {
#pragma unroll
        for (int p = 0; p < PACKS; ++p)
            if (column(p) < D) store(out + column(p), sums[p]);
    }
}

// With n = (x - mean) rstd: dx += rstd (d_out scale - n mean(d_out scale n)), and with CENTERED - mean(d_out scale)
// inside; partial (gridDim.x, 1 + CENTERED, D): sums of d_out n, and of d_out.
extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
norm_backward(const T* __restrict__ d_out, const T* __restrict__ x, const T* __restrict__ weight,
              const float* __restrict__ statistics, T* __restrict__ dx, float* __restrict__ partial, long rows) {
    const long stride = long(gridDim.x) * ROWS;
    long row = long(blockIdx.x) * ROWS + threadIdx.x / THREADS;
    Row w, g_next, x_next, d_next;
    float r_next = row < rows ? statistics[row] : 0, mean = 0;
    load_row(g_next, d_out + row * D, row < rows);
    load_row(x_next, x + row * D, row < rows);
    load_row(d_next, dx + row * D, row < rows);
    load_row(w, weight);
    float sums[PACKS][W] = {}, bias_sums[PACKS][W] = {};
    for (int turn = 0; row < rows; row += stride, turn ^= 1) {
        float g[PACKS][W], v[PACKS][W], d[PACKS][W];
        const float r = r_next;
        if constexpr (CENTERED) mean = statistics[rows + row];
        float dot = 0, total = 0;
#pragma unroll
        for (int p = 0; p < PACKS; ++p)
            if (column(p) < D) {
                float weights[W];
                g_next[p].floats(g[p]);
                x_next[p].floats(v[p]);
                d_next[p].floats(d[p]);
                w[p].floats(weights);
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    if constexpr (CENTERED) v[p][j] -= mean, bias_sums[p][j] += g[p][j];
                    v[p][j] *= r;
                    sums[p][j] += g[p][j] * v[p][j];
                    g[p][j] *= weights[j];
                    dot += g[p][j] * v[p][j];
                    if constexpr (CENTERED) total += g[p][j];
                }
            }
        const long after = row + stride;
        if (after < rows) r_next = statistics[after];
        load_row(g_next, d_out + after * D, after < rows);
        load_row(x_next, x + after * D, after < rows);
        load_row(d_next, dx + after * D, after < rows);
        if constexpr (CENTERED) {
            total = row_sum(total, 0) * (-1.0f / D);
#pragma unroll
            for (int p = 0; p < PACKS; ++p)
#pragma unroll
                for (int j = 0; j < W; ++j) g[p][j] += total;
        }
        const float slope = row_sum(dot, CENTERED ? 1 : turn) * (-1.0f / D);
#pragma unroll
        for (int p = 0; p < PACKS; ++p)
            if (column(p) < D) {
#pragma unroll
                for (int j = 0; j < W; ++j) d[p][j] += r * (g[p][j] + slope * v[p][j]);
                store(dx + row * D + column(p), d[p]);
            }
    }
    partial += long(blockIdx.x) * (1 + CENTERED) * D;
    store_sums(sums, partial);
    if constexpr (CENTERED) {
        __syncthreads();
        store_sums(bias_sums, partial + D);
    }
}
