// Muon over matrices: momentum, what comes before and after the products of Newton-Schulz, and the update of weights.
//
// `muon_momentum` leaves of a rank's part of a matrix what is to be orthogonalised, `arrange` makes matrices of the parts of
// all tensor-parallel ranks. `frobenius` and `normalize` divide matrices by their norms, in sums of a fixed order.
// `muon_update` subtracts the result.  If the step is not finite, neither momentum nor weights change.
//
// -DMASTER -DGRADIENT -DWEIGHT -DCOPY as in optimizers.cuh; -DDTYPE (of the matrices that are multiplied)
#include "optimizers.cuh"

// u = g + mu (m - g), after m += (1 - mu) (g - m).
extern "C" __global__ void __launch_bounds__(256)
muon_momentum(const GRADIENT* gradients, float* momentum, DTYPE* out, long size, const State* state, double momentum_rate) {
    if (!state->finite) return;
    const float scale = state->scale, mu = momentum_rate;
    const long stride = 256l * gridDim.x, first = 256l * blockIdx.x + threadIdx.x;
    auto step = [&](float g, float& m) {
        g *= scale;  // fused as it is written: in a pack and alone, the same bits
        m = fmaf(1 - mu, g - m, m);
        return fmaf(mu, m - g, g);
    };
    const bool aligned = wide(gradients, W * sizeof(GRADIENT)) && wide(momentum, 16) && wide(out, W * sizeof(DTYPE));
    const long packs = aligned ? size / W : 0;
    for (long i = first; i < packs; i += stride) {
        float g[W], m[W];
        load_few(g, gradients + i * W);
        load(m, momentum + i * W);
#pragma unroll
        for (int j = 0; j < W; ++j) g[j] = step(g[j], m[j]);
        store(momentum + i * W, m);
        store_few(out + i * W, g);
    }
    for (long i = packs * W + first; i < size; i += stride) narrow(step(widen(gradients[i]), momentum[i]), out[i]);
}

// out (matrices, shards x rows, columns) if `stacked`, else (matrices, rows, shards x columns), of
// parts (shards, copies, matrices, rows, columns), whose copies are equal.
extern "C" __global__ void __launch_bounds__(256)
arrange(const DTYPE* parts, DTYPE* out, long matrices, int shards, int copies, long rows, long columns,
        int stacked) {
    const long size = rows * columns, total = matrices * shards * size;
    for (long i = 256l * blockIdx.x + threadIdx.x; i < total; i += 256l * gridDim.x) {
        const long row = i / columns % rows, matrix = i / size % matrices, shard = i / (size * matrices);
        const long at = stacked ? shard * rows + row : row * shards + shard;
        out[matrix * shards * size + at * columns + i % columns] = parts[i + shard * (copies - 1) * size * matrices];
    }
}

// A row of blocks for each matrix of x (matrices, size): partial (matrices, blocks), sums of squares.
extern "C" __global__ void __launch_bounds__(256) frobenius(const DTYPE* x, long size, float* partial) {
    float total = 0;
    for (long i = 256l * blockIdx.x + threadIdx.x; i < size; i += 256l * gridDim.x) {
        const float value = widen(x[blockIdx.y * size + i]);
        total = fmaf(value, value, total);
    }
    total = block_sum(total);
    if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = total;
}

// y = x / |x|, but for |x| of at least `least`; blocks as above.
extern "C" __global__ void __launch_bounds__(256)
normalize(const DTYPE* x, long size, const float* partial, float least, DTYPE* y) {
    float total = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += 256) total += partial[blockIdx.y * gridDim.x + i];
    const float norm = sqrtf(block_sum(total)), factor = 1 / (norm < least ? least : norm);
    for (long i = 256l * blockIdx.x + threadIdx.x; i < size; i += 256l * gridDim.x)
        narrow(widen(x[blockIdx.y * size + i]) * factor, y[blockIdx.y * size + i]);
}

// Of a matrix's part (size / columns, columns), which begins at `update` in rows of `stride` elements; `place` is its
// first weight's in the layout of the whole model.
extern "C" __global__ void __launch_bounds__(256)
muon_update(MASTER* weights, const DTYPE* update, WEIGHT* copy, long size, int columns, int stride, const State* state,
       double lr_scale, double decayed, double factor, long seed, long place) {
    if (!state->finite) return;
    const float rate = state->lr * lr_scale * factor, decay = 1 - state->lr * lr_scale * decayed;
    const unsigned key = key_of(seed, state);
    const long threads = 256l * gridDim.x, first = 256l * blockIdx.x + threadIdx.x;
    const bool aligned = wide(weights, W * sizeof(MASTER)) && wide(update, W * sizeof(DTYPE)) &&
                         wide(copy, W * sizeof(WEIGHT)) && columns % W == 0 && stride % W == 0;
    const long packs = aligned ? size / W : 0;
    for (long i = first; i < packs; i += threads) {
        float w[W], u[W];
        load_few(w, weights + i * W);
        load_few(u, update + i * W / columns * stride + i * W % columns);
#pragma unroll
        for (int j = 0; j < W; ++j) w[j] = rounded(fmaf(w[j], decay, -rate * u[j]), key, place + i * W + j);
        store_few(weights + i * W, w);
        if (COPY) store_few(copy + i * W, w);
    }
    for (long i = packs * W + first; i < size; i += threads) {
        const float u = widen(update[i / columns * stride + i % columns]);
        const float w = rounded(fmaf(widen(weights[i]), decay, -rate * u), key, place + i);
        narrow(w, weights[i]);
        if (COPY) narrow(w, copy[i]);
    }
}
