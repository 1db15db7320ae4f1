// RMSNorm and its backward.  A row is read once and stays in registers; D is a constant of the compilation,
// so every loop over it is unrolled and all loads of a row are in flight together.
//
// THREADS threads (a warp or more) share a row, ROWS rows lie in a block.  The backward walks over rows with
// a grid that fits the GPU once: each thread keeps the sums of d_weight of its columns in registers, the rows
// of a block are added in shared memory, the blocks by `sum_partials`, always in the same order.
//
// -DDTYPE -DWIDTH -DCOLUMNS (D) -DTHREADS -DROWS -DGRADIENT (dtype of d_weight) -DACCUMULATE
#include "vectors.cuh"

using T = DTYPE;
constexpr int W = WIDTH, D = COLUMNS;
constexpr int PACKS = (D / W + THREADS - 1) / THREADS;

// The sum over the THREADS threads of a row; `turn` alternates, so that one barrier a call is enough.
__device__ __forceinline__ float row_sum(float x, int turn) {
    x = warp_sum(x);
    if constexpr (THREADS > 32) {
        __shared__ float parts[2][ROWS * THREADS / 32];
        parts[turn][threadIdx.x / 32] = x;
        __syncthreads();
        x = 0;
#pragma unroll
        for (int i = 0; i < THREADS / 32; ++i) x += parts[turn][threadIdx.x / THREADS * (THREADS / 32) + i];
    }
    return x;
}

__device__ __forceinline__ int column(int pack) { return (pack * THREADS + int(threadIdx.x) % THREADS) * W; }

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
rms_norm(const T* x, const T* weight, float eps, T* out, float* rstd, long rows) {
    const long row = long(blockIdx.x) * ROWS + threadIdx.x / THREADS;
    const bool inside = row < rows;
    float v[PACKS][W];
    float squares = 0;
#pragma unroll
    for (int p = 0; p < PACKS; ++p)
        if (inside && column(p) < D) {
            load(v[p], x + row * D + column(p));
#pragma unroll
            for (int j = 0; j < W; ++j) squares += v[p][j] * v[p][j];
        }
    const float r = rsqrtf(row_sum(squares, 0) * (1.0f / D) + eps);
    if (!inside) return;
    if (threadIdx.x % THREADS == 0) rstd[row] = r;
#pragma unroll
    for (int p = 0; p < PACKS; ++p)
        if (column(p) < D) {
            float w[W];
            load(w, weight + column(p));
#pragma unroll
            for (int j = 0; j < W; ++j) v[p][j] *= r * w[j];
            store(out + row * D + column(p), v[p]);
        }
}

// dx += rstd (d_out weight - x rstd^2 mean(d_out weight x)); partial (gridDim.x, D): sums of d_out x rstd.
extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
rms_norm_backward(const T* d_out, const T* x, const T* weight, const float* rstd, T* dx, float* partial, long rows) {
    const int group = threadIdx.x / THREADS;
    float w[PACKS][W], sums[PACKS][W];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        if (column(p) < D) load(w[p], weight + column(p));
#pragma unroll
        for (int j = 0; j < W; ++j) sums[p][j] = 0;
    }
    int turn = 0;
    for (long first = long(blockIdx.x) * ROWS; first < rows; first += long(gridDim.x) * ROWS, turn ^= 1) {
        const long row = first + group;
        const bool inside = row < rows;
        float g[PACKS][W], v[PACKS][W], d[PACKS][W];
        float dot = 0;
#pragma unroll
        for (int p = 0; p < PACKS; ++p)
            if (inside && column(p) < D) {
                const long at = row * D + column(p);
                load(g[p], d_out + at);
                load(v[p], x + at);
                load(d[p], dx + at);
            }
        const float r = inside ? rstd[row] : 0;
#pragma unroll
        for (int p = 0; p < PACKS; ++p)
            if (inside && column(p) < D) {
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    const float scaled = v[p][j] * r;
                    sums[p][j] += g[p][j] * scaled;
                    g[p][j] *= w[p][j];
                    v[p][j] = scaled;
                    dot += g[p][j] * scaled;
                }
            }
        const float slope = row_sum(dot, turn) * (-1.0f / D);
#pragma unroll
        for (int p = 0; p < PACKS; ++p)
            if (inside && column(p) < D) {
#pragma unroll
                for (int j = 0; j < W; ++j) d[p][j] += r * (g[p][j] + slope * v[p][j]);
                store(dx + row * D + column(p), d[p]);
            }
    }
    if constexpr (ROWS > 1) {
        __shared__ float all[ROWS][D];
#pragma unroll
        for (int p = 0; p < PACKS; ++p)
            if (column(p) < D) {
#pragma unroll
                for (int j = 0; j < W; ++j) all[group][column(p) + j] = sums[p][j];
            }
        __syncthreads();
        for (int i = threadIdx.x; i < D; i += THREADS * ROWS) {
            float sum = 0;
#pragma unroll
            for (int k = 0; k < ROWS; ++k) sum += all[k][i];
            partial[long(blockIdx.x) * D + i] = sum;
        }
    } else {
#pragma unroll
        for (int p = 0; p < PACKS; ++p)
            if (column(p) < D) store(partial + long(blockIdx.x) * D + column(p), sums[p]);
    }
}

// d_weight (D,) = or += the sum of `blocks` rows of partial; 32 x 8 threads take 32 columns.
extern "C" __global__ void sum_partials(const float* partial, int blocks, GRADIENT* d_weight) {
    __shared__ float parts[8][32];
    const int x = threadIdx.x % 32, y = threadIdx.x / 32, i = blockIdx.x * 32 + x;
    float sum = 0;
    if (i < D)
        for (int block = y; block < blocks; block += 8) sum += partial[long(block) * D + i];
    parts[y][x] = sum;
    __syncthreads();
    if (y || i >= D) return;
    sum = ACCUMULATE ? widen(d_weight[i]) : 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) sum += parts[k][x];
    narrow(sum, d_weight[i]);
}
