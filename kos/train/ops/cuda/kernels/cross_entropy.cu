// Cross-entropy fused with softmax and its gradient, in place.
//
// A row of logits is read for its maximum and sum of exponentials together, rescaled when the maximum rises (Milakov &
// Gimelshein 2018, arXiv:1805.02867), and again to become (softmax - one_hot) / count.  Meanwhile its packs (16 bytes)
// wait in shared memory, SLOTS of each thread, which no other thread reads; what lies beyond is in the L2 cache.
//
// A block takes row after row.  As the gradient of a pack goes out, the same pack of the next row comes into its slot,
// and joins that row's sum LAG steps later: memory reads and writes all the time, and a row costs one barrier.
//
// -DDTYPE -DWIDTH -DBACKWARD (0: losses only) -DVOCABULARY -DTHREADS -DSLOTS (0 where an access is not 16 bytes)
#include "vectors.cuh"

using T = DTYPE;
constexpr int W = WIDTH;
using Pack = Raw<W, T>;
constexpr int STEP = THREADS * W, CACHED = SLOTS * STEP, LAG = SLOTS / 2;
constexpr float LOWEST = -1e30f;  // finite: the difference of two is 0, not NaN

// exp(x - shift).  In bf16 as one multiply-add and one power of two: its rounding is far below the result's
// where x and shift are logits.
__device__ __forceinline__ float exponential(float x, float shift) {
    if constexpr (sizeof(T) == 4) return expf(x - shift);
    constexpr float log2e = 1.4426950408889634f;
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, log2e, -shift * log2e)));
    return y;
}

struct Sum {  // the maximum so far and the sum of exp(x - top)
    float top, total;

    __device__ __forceinline__ void add(const Pack& pack) {
        float x[W], highest = top, more = 0;
        pack.floats(x);
#pragma unroll
        for (int j = 0; j < W; ++j) highest = fmaxf(highest, x[j]);
#pragma unroll
        for (int j = 0; j < W; ++j) more += exponential(x[j], highest);
        total = fmaf(total, expf(top - highest), more);  // said so: the same bits wherever this is inlined
        top = highest;
    }
    __device__ __forceinline__ Sum of_warp() const {
        float highest = top;
#pragma unroll
        for (int offset = 16; offset; offset >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, offset));
        return {highest, warp_sum(total * expf(top - highest))};
    }
};

// f(column, pack) of this thread's packs of a row beyond those in the ring.
template <class F>
__device__ __forceinline__ void for_rest(const T* row, F f) {
    constexpr int AHEAD = 4;  // loads under way at once
    for (int i = CACHED + threadIdx.x * W; i < VOCABULARY; i += AHEAD * STEP) {
        Pack packs[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k)
            if (i + k * STEP < VOCABULARY) packs[k].load(row + i + k * STEP);
#pragma unroll
        for (int k = 0; k < AHEAD; ++k)
            if (i + k * STEP < VOCABULARY) f(i + k * STEP, packs[k]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
cross_entropy(T* logits, const int* targets, const float* count, float* losses, long rows) {
    __shared__ Sum parts[2][32];
    extern __shared__ __align__(16) unsigned char shared[];
    const int start = threadIdx.x * W;
    T* slots = reinterpret_cast<T*>(shared) + start;
    const float share = BACKWARD ? 1 / count[0] : 0;
    T* last = nullptr;  // the row whose gradient goes out, and what it takes
    bool kept = false;
    int place = -1;
    float top = 0, scale = 0, shift = 0, at_target = 0;
    const auto put = [&](int i, const Pack& pack) {
        float x[W];
        pack.floats(x);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            x[j] = sizeof(T) == 2 ? exponential(x[j], shift) : exponential(x[j], top) * scale;
            if (!kept) x[j] = 0;
        }
        store(last + i, x);
    };
    int turn = 0;
    for (long at = blockIdx.x; at < rows || last; at += gridDim.x, turn ^= 1) {
        const bool more = at < rows;
        T* row = logits + at * VOCABULARY;
        const int target = more ? targets[at] : -1;
        float logit = __int_as_float(0x7fffffff);
        if (target >= 0 && target < VOCABULARY) logit = widen(row[target]);
        Sum sum = {LOWEST, 0};
        if (last) for_rest(last, put);
#pragma unroll 2
        for (int s = 0; s < SLOTS + LAG; ++s) {
            if (s < SLOTS && start + s * STEP < VOCABULARY) {
                Pack pack;
                pack.load(slots + s * STEP);
                if (more) copy_async(slots + s * STEP, row + start + s * STEP);
                if (last) put(start + s * STEP, pack);
            }
            copy_commit();
            copy_wait<LAG>();
            if (s >= LAG && more && start + (s - LAG) * STEP < VOCABULARY) {
                Pack pack;
                pack.load(slots + (s - LAG) * STEP);
                sum.add(pack);
            }
        }
        if (place >= 0) narrow(at_target, last[place]);  // after this thread's own pack
        if (!more) break;
        for_rest(row, [&](int, const Pack& pack) { sum.add(pack); });
        sum = sum.of_warp();
        if (threadIdx.x % 32 == 0) parts[turn][threadIdx.x / 32] = sum;
        __syncthreads();
        sum = (threadIdx.x % 32 < THREADS / 32 ? parts[turn][threadIdx.x % 32] : Sum{LOWEST, 0}).of_warp();
        kept = target >= 0;
        if (threadIdx.x == 0) losses[at] = kept ? sum.top - logit + logf(sum.total) : 0;
        if (BACKWARD) {
            last = row;
            top = sum.top, scale = share / sum.total;
            shift = top - logf(scale);  // so that bf16's gradient is one exponential
            at_target = exponential(logit, top) * scale - share;
            place = target < VOCABULARY && target / W % THREADS == threadIdx.x ? target : -1;
        }
    }
}

// Of a part of a vocabulary, from `first` on: out (3, rows) = each row's maximum, its sum of exp(x - maximum) and the
// target's logit, 0 where that is in another part.  Rows of logits are `stride` elements apart.  A block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
logit_statistics(const T* logits, long stride, const int* targets, int first, float* out) {
    __shared__ Sum parts[32];
    const long at = blockIdx.x, rows = gridDim.x;
    const T* row = logits + at * stride;
    const int target = targets[at] < 0 ? -1 : targets[at] - first;
    const float logit = target >= 0 && target < VOCABULARY ? widen(row[target]) : 0;
    Sum sum = {LOWEST, 0};
    for_rest(row, [&](int, const Pack& pack) { sum.add(pack); });
    sum = sum.of_warp();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = (threadIdx.x < THREADS / 32 ? parts[threadIdx.x] : Sum{LOWEST, 0}).of_warp();
    if (threadIdx.x) return;
    out[at] = sum.top;
    out[rows + at] = sum.total;
    out[2 * rows + at] = logit;
}

// The losses from the statistics (parts, 3, rows) of all parts of a vocabulary; logits are the part from `first` on.
// A block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_of_parts(T* logits, const int* targets, int first, const float* statistics, int parts,
                       const float* count, float* losses) {
    const long at = blockIdx.x, rows = gridDim.x;
    float top = LOWEST, total = 0, logit = 0;
    for (int p = 0; p < parts; ++p) top = fmaxf(top, statistics[3 * p * rows + at]);
    for (int p = 0; p < parts; ++p) {
        const float* of_part = statistics + 3 * p * rows + at;
        total = fmaf(of_part[rows], expf(of_part[0] - top), total);  // the same bits on every rank
        logit += of_part[2 * rows];
    }
    const bool kept = targets[at] >= 0;
    if (threadIdx.x == 0) losses[at] = kept ? top - logit + logf(total) : 0;
    if (!BACKWARD) return;
    const float share = kept ? 1 / count[0] : 0, scale = share / total;
    const int place = kept ? targets[at] - first : -1;
    T* row = logits + at * VOCABULARY;
    for_rest(row, [&](int i, const Pack& pack) {
        float x[W];
        pack.floats(x);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            x[j] = kept ? exponential(x[j], top) * scale : 0;
            if (i + j == place) x[j] -= share;
        }
        store(row + i, x);
    });
}

// x (rows, columns): row i times weights[i] / count[0], 0 where the target is negative; nullptr: ones.  A block a row.
extern "C" __global__ void scale_rows(T* x, const int* targets, const float* weights, const float* count, int columns) {
    const long at = blockIdx.x;
    const bool kept = targets[at] >= 0;
    const float factor = (weights ? weights[at] : 1) / (count ? count[0] : 1);
    T* row = x + at * columns;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) narrow(kept ? widen(row[i]) * factor : 0, row[i]);
}

// out (1,) = how many targets are not negative, at least 1.  One block.
extern "C" __global__ void count_targets(const int* targets, float* out, long n) {
    int kept = 0;
    for (long i = threadIdx.x; i < n; i += blockDim.x) kept += targets[i] >= 0;
    kept = block_sum(kept);
    if (threadIdx.x == 0) out[0] = kept > 1 ? kept : 1;
}

// out (1,) = sum(losses) / count, in double.  One block, so the order is fixed.
extern "C" __global__ void mean_loss(const float* losses, const float* count, double* out, long n) {
    double sum = 0;
    for (long i = threadIdx.x; i < n; i += blockDim.x) sum += losses[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[0] = sum / count[0];
}
