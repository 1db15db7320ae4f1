// Embedding and its backward without float atomics: the same bits every time.
//
// Backward: tokens are sorted by a stable radix sort of 9-bit digits (two passes up to 262,144 tokens of
// vocabulary), three kernels a pass: `digit_counts` of tiles of 1024, one `scan`, `scatter`.  A position's
// place in its tile is the number of equal digits before it: in its warp by a vote, in the warps before from
// their counts in shared memory.  `sum_runs` then adds
// the rows of each run of equal tokens, 32 sorted positions a block, in order; a run that leaves a block goes
// as partial sums to `join_runs`, which adds those of neighbouring blocks, in order.
//
// -DDTYPE -DWIDTH -DCOLUMNS (D) -DGRADIENT (dtype of d_table) -DACCUMULATE
#include "vectors.cuh"

using T = DTYPE;
constexpr int W = WIDTH, D = COLUMNS;
constexpr int DIGITS = 512, TILE = 1024, RUN = 32, AHEAD = 8;  // rows whose loads are under way at once

// out (n, D) = rows of table (vocabulary, D), which begins at token `first`; a token outside gives `otherwise`.
extern "C" __global__ void embedding(const int* tokens, const T* table, T* out, int first, unsigned vocabulary,
                                     float otherwise, long packs) {
    const long item = long(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= packs) return;
    const unsigned token = tokens[item / (D / W)] - first;
    float x[W];
#pragma unroll
    for (int j = 0; j < W; ++j) x[j] = otherwise;
    if (token < vocabulary) load(x, table + long(token) * D + item % (D / W) * W);
    store(out + item * W, x);
}

// out (n,) = the sort key of each token, for a table whose first row is token `first`: 1 for the first row, 2 for the
// next, and so on; 0 for tokens before the table and for the token `padding`; vocabulary + 1 for tokens after it.
extern "C" __global__ void count_from(const int* tokens, int n, int first, unsigned vocabulary, int padding, int* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int token = tokens[i];
    out[i] = token < first || token == padding ? 0 : min(unsigned(token - first), vocabulary) + 1;
}

__device__ __forceinline__ int digit_of(int key, int shift) { return key >> shift & (DIGITS - 1); }

// counts (gridDim.x, DIGITS): how often each digit occurs in each tile.
extern "C" __global__ void __launch_bounds__(TILE) digit_counts(const int* keys, int n, int shift, int* counts) {
    __shared__ int here[DIGITS];
    if (threadIdx.x < DIGITS) here[threadIdx.x] = 0;
    __syncthreads();
    const int i = blockIdx.x * TILE + threadIdx.x;
    if (i < n) atomicAdd(&here[digit_of(keys[i], shift)], 1);
    __syncthreads();
    if (threadIdx.x < DIGITS) counts[blockIdx.x * DIGITS + threadIdx.x] = here[threadIdx.x];
}

// counts (tiles, DIGITS) become their exclusive sums, digit by digit.  One block of 512 threads, a digit each.
extern "C" __global__ void __launch_bounds__(DIGITS) scan(int* counts, int tiles) {
    __shared__ int warps[DIGITS / 32];
    int* mine = counts + threadIdx.x;
    int total = 0;
#pragma unroll 8
    for (int i = 0; i < tiles; ++i) total += mine[i * DIGITS];
    int before = total;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        const int left = __shfl_up_sync(~0u, before, offset);
        if (threadIdx.x % 32 >= offset) before += left;
    }
    if (threadIdx.x % 32 == 31) warps[threadIdx.x / 32] = before;
    __syncthreads();
    before -= total;
    for (int i = 0; i < threadIdx.x / 32; ++i) before += warps[i];
#pragma unroll 8
    for (int i = 0; i < tiles; ++i) {
        const int count = mine[i * DIGITS];
        mine[i * DIGITS] = before;
        before += count;
    }
}

// Keys and positions to their places by one digit.  `positions` null: a key's position is its index.
extern "C" __global__ void __launch_bounds__(TILE)
scatter(const int* keys, const int* positions, int n, int shift, const int* offsets, int* keys_out,
        int* positions_out) {
    __shared__ unsigned short counts[TILE / 32][DIGITS];
    const int i = blockIdx.x * TILE + threadIdx.x, warp = threadIdx.x / 32;
    if (threadIdx.x < DIGITS)
        for (int k = 0; k < TILE / 32; ++k) counts[k][threadIdx.x] = 0;
    __syncthreads();
    const int key = i < n ? keys[i] : -1;
    const int digit = i < n ? digit_of(key, shift) : -1;
    const unsigned equal = __match_any_sync(~0u, digit);
    int rank = __popc(equal & ((1u << threadIdx.x % 32) - 1));
    if (i < n && rank == 0) counts[warp][digit] = __popc(equal);
    __syncthreads();
    if (i >= n) return;
    for (int k = 0; k < warp; ++k) rank += counts[k][digit];
    const int at = offsets[blockIdx.x * DIGITS + digit] + rank;
    keys_out[at] = key;
    positions_out[at] = positions ? positions[i] : i;
}

template <class G>
__device__ __forceinline__ void put(G* d_table, int row, unsigned vocabulary, int column, float (&sum)[W]) {
    if (unsigned(row) >= vocabulary) return;
    G* at = d_table + long(row) * D + column;
    if (ACCUMULATE) {
        float there[W];
        load(there, at);
#pragma unroll
        for (int j = 0; j < W; ++j) sum[j] += there[j];
    }
    store(at, sum);
}

// Block (x, y): sorted positions [32 x, 32 x + 32), columns from y blockDim.x W.  edges (gridDim.x, 2, D): the
// sums of a run that comes from the block before (0), and of one that starts here and goes on (1).  The keys of the
// table's rows begin at `begin`.
extern "C" __global__ void sum_runs(const T* __restrict__ d_out, const int* __restrict__ keys,
                                    const int* __restrict__ positions, int n, GRADIENT* __restrict__ d_table,
                                    int begin, unsigned vocabulary, float* __restrict__ edges) {
    __shared__ int key[RUN + 2], position[RUN];  // with the keys before and after
    const int first = blockIdx.x * RUN, count = min(RUN, n - first);
    if (keys[first] - begin >= int(vocabulary) || keys[first + count - 1] < begin) return;  // none is in the table
    if (threadIdx.x < RUN && threadIdx.x < count) position[threadIdx.x] = positions[first + threadIdx.x];
    for (int i = threadIdx.x; i < count + 2; i += blockDim.x) {
        const int at = first + i - 1;
        key[i] = at >= 0 && at < n ? keys[at] : -1;
    }
    __syncthreads();
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (column >= D) return;
    float sum[W] = {};
    bool from_before = key[0] == key[1] && first > 0;
    for (int start = 0; start < count; start += AHEAD) {
        Raw<W, T> raw[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k)
            if (start + k < count) raw[k].load(d_out + long(position[start + k]) * D + column);
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int i = start + k;
            if (i >= count) break;
            float x[W];
            raw[k].floats(x);
#pragma unroll
            for (int j = 0; j < W; ++j) sum[j] += x[j];
            const bool goes_on = key[i + 1] == key[i + 2] && first + i + 1 < n;
            if (goes_on && i + 1 < count) continue;
            if (from_before)
                store(edges + long(blockIdx.x) * 2 * D + column, sum);
            else if (goes_on)
                store(edges + (long(blockIdx.x) * 2 + 1) * D + column, sum);
            else
                put(d_table, key[i + 1] - begin, vocabulary, column, sum);
            from_before = false;
#pragma unroll
            for (int j = 0; j < W; ++j) sum[j] = 0;
        }
    }
}

// A run that starts in block x and goes on: its partial sums, in order.
extern "C" __global__ void join_runs(const int* __restrict__ keys, int n, GRADIENT* __restrict__ d_table, int begin,
                                     unsigned vocabulary, const float* __restrict__ edges) {
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    const int last = (blockIdx.x + 1) * RUN - 1;
    if (last + 1 >= n || keys[last] != keys[last + 1]) return;
    const int key = keys[last], first = blockIdx.x * RUN;
    if (unsigned(key - begin) >= vocabulary) return;
    if (first > 0 && keys[first] == key && keys[first - 1] == key) return;  // it started earlier
    int blocks = 0;  // that it goes on through
    for (int found = blockDim.x; found == blockDim.x; blocks += found) {
        const long at = long(blockIdx.x + 1 + blocks + threadIdx.x) * RUN;
        found = __syncthreads_count(at < n && keys[at] == key);
    }
    if (column >= D) return;
    float sum[W];
    load(sum, edges + (long(blockIdx.x) * 2 + 1) * D + column);
    const float* at = edges + long(blockIdx.x + 1) * 2 * D + column;
#pragma unroll 8
    for (int i = 0; i < blocks; ++i) {
        float x[W];
        load(x, at + long(i) * 2 * D);
#pragma unroll
        for (int j = 0; j < W; ++j) sum[j] += x[j];
    }
    put(d_table, key - begin, vocabulary, column, sum);
}
