// The KV cache of a layer, and attention of one query a sequence to it.
//
// cache is (B, 2, K, capacity, D): the keys of a head one after another, then its values, so that a block reads one
// contiguous run.  A block attends from one query head to CHUNK keys and writes the maximum of its scores, the sum of
// their exponentials and the unscaled output; `merge` adds up the chunks of a head in their order (flash-decoding:
// Dao et al. 2023, pytorch.org/blog/flash-decoding).  The chunks of a sequence depend on its length alone, so the bits of
// its result do not depend on the batch.  Grids have the chunks of the whole capacity, for a graph that is replayed: a
// block without keys ends at once.
//
// -DDTYPE -DWIDTH (of a copy) -DHEAD_DIM (D) -DROW (elements of a row of qkv) -DSCALE -DCHUNK (also the threads of a block)
#include "attention_scores.cuh"
#include "vectors.cuh"

using T = DTYPE;
constexpr int W = WIDTH, D = HEAD_DIM, EACH = (D + 31) / 32, WARPS = CHUNK / 32;

// kv: the first key in the rows of qkv.  Token n of `length` tokens of sequence b goes to place positions[b] + n.
extern "C" __global__ void append(const T* kv, T* cache, const int* positions, int kv_heads, int length, int capacity,
                                  long packs) {
    const long item = long(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= packs) return;
    const int column = item % (2 * kv_heads * D / W) * W;
    const long token = item / (2 * kv_heads * D / W), b = token / length;
    const long place = positions[b] + token % length;
    if (place >= capacity) return;
    float x[W];
    load(x, kv + token * ROW + column);
    store(cache + ((b * 2 * kv_heads + column / D) * capacity + place) * D + column % D, x);
}

// The keys that the query of a sequence sees in a chunk.
struct Keys {
    int first, end;
    __device__ Keys(int position, int window, int chunk) {
        const int least = window && position + 1 > window ? position + 1 - window : 0;
        first = chunk * CHUNK > least ? chunk * CHUNK : least;
        end = (chunk + 1) * CHUNK < position + 1 ? (chunk + 1) * CHUNK : position + 1;
    }
};

// partial (B, H, chunks, D + 2).
extern "C" __global__ void attend(const T* qkv, const T* cache, const int* positions, float* partial, int heads,
                                  int kv_heads, int capacity, int window) {
    __shared__ float scores[CHUNK], sums[WARPS][EACH * 32];
    const int b = blockIdx.y / heads, head = blockIdx.y % heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Keys keys(positions[b], window, blockIdx.x);
    const int count = keys.end - keys.first;
    if (count <= 0) return;
    const T* k = cache + ((long(b) * 2 * kv_heads + head / (heads / kv_heads)) * capacity + keys.first) * D;
    const T* v = k + long(kv_heads) * capacity * D;
    const T* query = qkv + long(b) * ROW + head * D;
    float q[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) q[j] = lane + 32 * j < D ? widen(query[lane + 32 * j]) * SCALE : 0;
    for (int t = warp; t < count; t += WARPS) {
        float dot = 0;
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            if (lane + 32 * j < D) dot = fmaf(q[j], widen(k[long(t) * D + lane + 32 * j]), dot);
        dot = warp_sum(dot);
        if (lane == 0) scores[t] = score_of(dot, 1);  // the query is scaled
    }
    __syncthreads();
    float top = scores[0];
    for (int t = lane; t < count; t += 32) top = fmaxf(top, scores[t]);
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    __syncthreads();
    float p = 0;
    if (threadIdx.x < count) scores[threadIdx.x] = p = expf(scores[threadIdx.x] - top);
    const float total = block_sum(p);
    float out[EACH] = {};
    for (int t = warp; t < count; t += WARPS)
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            if (lane + 32 * j < D) out[j] = fmaf(scores[t], widen(v[long(t) * D + lane + 32 * j]), out[j]);
#pragma unroll
    for (int j = 0; j < EACH; ++j) sums[warp][lane + 32 * j] = out[j];
    __syncthreads();
    float* to = partial + (long(blockIdx.y) * gridDim.x + blockIdx.x) * (D + 2);
    for (int i = threadIdx.x; i < D; i += CHUNK) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += sums[w][i];
        to[2 + i] = sum;
    }
    if (threadIdx.x == 0) to[0] = top, to[1] = total;
}

// A block for each query head of each sequence; out (B, H D).
extern "C" __global__ void merge(const float* partial, const int* positions, T* out, int heads, int chunks, int window) {
    const int position = positions[blockIdx.x / heads];
    const int first = Keys(position, window, 0).first / CHUNK, last = position / CHUNK;
    const float* parts = partial + long(blockIdx.x) * chunks * (D + 2);
    float top = parts[first * (D + 2)];
    for (int chunk = first + 1; chunk <= last; ++chunk) top = fmaxf(top, parts[chunk * (D + 2)]);
    for (int i = threadIdx.x; i < D; i += blockDim.x) {
        float sum = 0, total = 0;
        for (int chunk = first; chunk <= last; ++chunk) {
            const float* part = parts + chunk * (D + 2);
            const float scale = expf(part[0] - top);
            sum = fmaf(scale, part[2 + i], sum);
            total = fmaf(scale, part[1], total);
        }
        narrow(sum / total, out[long(blockIdx.x) * D + i]);
    }
}
