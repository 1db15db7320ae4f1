// Attention, forward, on Hopper: FlashAttention-3's plan (Shah et al. 2024, arXiv:2407.08608).
//
// One warpgroup produces (a single thread issues TMA loads into a ring of STAGES key and value tiles), CONSUMERS
// warpgroups each own 64 query rows.  Two overlaps hide the softmax: within a warpgroup the scores of the next key
// tile are multiplied while the probabilities of the last are; between warpgroups named barriers make one multiply
// while the other exponentiates (PINGPONG).
// A block stays for many tiles of queries, and loads of the next begin before the last is stored.
// The tile on the diagonal comes first: it alone needs a mask, and it gives every row a finite maximum.  Without CAUSAL it
// is the last keys, which need not be a tile.  With MASKED tiles before the first key of a block's first query are left out,
// and those before the first key of its last query have a mask as well.
//
// Macros: CONSUMERS, KEYS, STAGES.
#include "attention_hopper.cuh"

#ifndef PINGPONG
#define PINGPONG 1
#endif
#define QUERIES (64 * CONSUMERS)
#define THREADS (128 * (CONSUMERS + 1))
#define TILE_BYTES (KEYS * PADDED_DIM * 2)
#define Q_BYTES (QUERIES * PADDED_DIM * 2)

struct Shared {
    alignas(1024) char q[2][Q_BYTES];  // becomes the output
    alignas(1024) char k[STAGES][TILE_BYTES];
    alignas(1024) char v[STAGES][TILE_BYTES];
    u64 q_full[2], q_empty[2], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};
extern __shared__ char raw[];

// What kernels are given to see other keys than causal ones: where the result is merged, keys and tokens of a sample.
#if CAUSAL
#define OTHERS
#else
#define OTHERS , float *merged, int all_keys, int stride
#endif

// The tiles of queries that this block works on: every gridDim-th, there and back again, since the first have most keys.
struct Tiles : Mask {
    int samples, T, H, K, section, all_keys, blocks, total, round = -1, sample, head, kv_head, first, keys;
#if MASKED
    int begin, masked;  // the first tile of keys, and the key before which tiles have a mask
#else
    enum { begin = 0, masked = 0 };
#endif
    __device__ Tiles(int samples, int T, int H, int K, int section, int all_keys, const Mask& mask)
        : Mask(mask), samples(samples), T(T), H(H), K(K), section(section), all_keys(all_keys),
          blocks((T + QUERIES - 1) / QUERIES), total(samples * H * blocks) {}
    __device__ bool next() {
        for (;;) {
            if (++round * gridDim.x >= total) return false;
            const int index = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
            if (index >= total) continue;
            const Place at = place(index, samples * H, blocks, section);
            sample = at.head / H, head = at.head % H, kv_head = head / (H / K);
            first = (blocks - 1 - at.block) * QUERIES;
            keys = ((CAUSAL ? min(T, first + QUERIES) : all_keys) + KEYS - 1) / KEYS;
#if MASKED
            begin = first_key(sample, first) / KEYS;
            if (begin >= keys) continue;  // nothing to add, without CAUSAL
            masked = first_key(sample, min(first + QUERIES, T) - 1);
#endif
            return true;
        }
    }
};

__device__ inline void produce(Shared& s, const TensorMap& qkv, const TensorMap& kv, Tiles work) {
    Ring<STAGES> ring;
    for (Ring<2> own; work.next(); own.next()) {
        barrier_wait(&s.q_empty[own.stage], own.phase ^ 1);
        barrier_expect(&s.q_full[own.stage], Q_BYTES);
        load_tile<QUERIES>(s.q[own.stage], qkv, &s.q_full[own.stage], work.head, work.first, work.sample);
        const int k_head = (CAUSAL ? work.H : 0) + work.kv_head, v_head = k_head + work.K;
        for (int tile = work.keys - 1; tile >= work.begin; --tile, ring.next()) {
            const int i = ring.stage;
            barrier_wait(&s.k_empty[i], ring.phase ^ 1);
            barrier_expect(&s.k_full[i], TILE_BYTES);
            load_tile<KEYS>(s.k[i], kv, &s.k_full[i], k_head, tile * KEYS, work.sample);
            barrier_wait(&s.v_empty[i], ring.phase ^ 1);
            barrier_expect(&s.v_full[i], TILE_BYTES);
            load_tile<KEYS>(s.v[i], kv, &s.v_full[i], v_head, tile * KEYS, work.sample);
        }
    }
}

// Keys after the query, or after all that there are, get no weight, nor do those before the query's first; `row` is the
// query of the thread's upper row.
__device__ inline void mask(float (&scores)[KEYS / 2], int row, int first_key, const Tiles& work) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i)
        if (first_key + COLUMN_OF(i, lane) > (CAUSAL ? row + LOWER(i) * 8 : work.all_keys - 1)) scores[i] = -INFINITE;
#if MASKED
    const int low[2] = {work.first_key(work.sample, min(row, work.T - 1)),
                        work.first_key(work.sample, min(row + 8, work.T - 1))};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i)
        if (first_key + COLUMN_OF(i, lane) < low[LOWER(i)]) scores[i] = -INFINITE;
#endif
}

// scores become probabilities relative to the new maxima; `factor` is what the old ones were too large by.
__device__ inline void softmax(float (&scores)[KEYS / 2], float (&top)[2], float (&total)[2], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float high = top[half];
#pragma unroll
        for (int i = 2 * half; i < KEYS / 2; i += 4) high = fmaxf(high, fmaxf(scores[i], scores[i + 1]));
        high = quad_max(high);
        // A row that has seen no key yet has no maximum; it can only happen where a block has tiles above its diagonal, or
        // where its mask leaves it no keys.
        const float shift = (CAUSAL ? QUERIES > KEYS : MASKED) && high == -INFINITE ? 0 : high * LOG2_SCALE;
        factor[half] = exp2_fast(top[half] * LOG2_SCALE - shift);
        top[half] = high;
        float sum = 0;
#pragma unroll
        for (int i = 2 * half; i < KEYS / 2; i += 4) {
            scores[i] = exponential(scores[i], shift);
            scores[i + 1] = exponential(scores[i + 1], shift);
            sum += scores[i] + scores[i + 1];
        }
        total[half] = total[half] * factor[half] + sum;
    }
}

#if CAUSAL
__device__ inline void consume(Shared& s, const TensorMap& out, float* log_sum_exp, Tiles work, int group) {
#else
__device__ inline void consume(Shared& s, float* out, float* log_sum_exp, Tiles work, int group, int stride) {
#endif
    const int lane = threadIdx.x % 32;
    float scores[KEYS / 2], sums[SUMMED / 2], top[2], total[2], factor[2];
    u32 probabilities[KEYS / 4];
    const auto narrow = [&] {
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) probabilities[i] = pack(scores[2 * i], scores[2 * i + 1]);
    };
    const auto done = [&](u64* barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };
    const auto my_turn = [&] {
        if (PINGPONG && CONSUMERS > 1) named_sync(1 + group, 256);
    };
    const auto your_turn = [&] {
        if (PINGPONG && CONSUMERS > 1) named_arrive(1 + (group + 1) % CONSUMERS, 256);
    };

    Ring<STAGES> k, v;
    for (Ring<2> own; work.next(); own.next()) {
        const int row = work.first + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
        char* q = s.q[own.stage] + group * 64 * ROW_BYTES;
        top[0] = top[1] = -INFINITE, total[0] = total[1] = 0;
#pragma unroll
        for (int i = 0; i < SUMMED / 2; ++i) sums[i] = 0;
        int tile = work.keys - 1;
        barrier_wait(&s.q_full[own.stage], own.phase);
        barrier_wait(&s.k_full[k.stage], k.phase);
        my_turn();
        multiply_transposed(scores, q, QUERIES, s.k[k.stage], KEYS);
        your_turn();
        wgmma_wait<0>();
        hold(scores);
        done(&s.k_empty[k.stage]);
        k.next();
        to_scores(scores);
        mask(scores, row, tile * KEYS, work);
        softmax(scores, top, total, factor);
        narrow();
        for (--tile; tile >= work.begin; --tile) {
            barrier_wait(&s.k_full[k.stage], k.phase);
            my_turn();
            multiply_transposed(scores, q, QUERIES, s.k[k.stage], KEYS);
            barrier_wait(&s.v_full[v.stage], v.phase);
            multiply_add<KEYS>(sums, probabilities, s.v[v.stage]);
            your_turn();
            wgmma_wait<1>();
            hold(scores);
            done(&s.k_empty[k.stage]);
            to_scores(scores);
            if (CAUSAL && (tile + 1) * KEYS > work.first || MASKED && tile * KEYS < work.masked)
                mask(scores, row, tile * KEYS, work);
            softmax(scores, top, total, factor);
            wgmma_wait<0>();
            hold(sums);
            hold(probabilities);
            done(&s.v_empty[v.stage]);
#pragma unroll
            for (int i = 0; i < SUMMED / 2; ++i) sums[i] *= factor[LOWER(i)];
            narrow();
            k.next();
            v.next();
        }
        barrier_wait(&s.v_full[v.stage], v.phase);
        multiply_add<KEYS>(sums, probabilities, s.v[v.stage]);
#if CAUSAL
        float* lse = log_sum_exp + ((long)work.sample * work.H + work.head) * work.T;
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(total[half]);
            inverse[half] = 1 / sum;
            if (lane % 4 == 0 && row + 8 * half < work.T) lse[row + 8 * half] = top[half] * SCALE + __logf(sum);
        }
#else
        float* lse = log_sum_exp + ((long)work.sample * work.H + work.head) * stride + row;
        const Merge upper(row < work.T ? lse[0] : 0, top[0], quad_sum(total[0]));
        const Merge lower(row + 8 < work.T ? lse[8] : 0, top[1], quad_sum(total[1]));
        __syncwarp();  // all lanes of a row have read what the first writes
        if (lane % 4 == 0 && row < work.T) lse[0] = upper.log_sum_exp;
        if (lane % 4 == 0 && row + 8 < work.T) lse[8] = lower.log_sum_exp;
#endif
        wgmma_wait<0>();
        hold(sums);
        hold(probabilities);
        done(&s.v_empty[v.stage]);
        v.next();
#if CAUSAL
        store_tile(sums, inverse[0], inverse[1], q, QUERIES, group, out, work.head, work.first + group * 64, work.sample);
        if (threadIdx.x % 128 == 0) barrier_arrive(&s.q_empty[own.stage]);
#else
        named_sync(8 + group, 128);  // nobody of the group reads its queries any more
        if (threadIdx.x % 128 == 0) barrier_arrive(&s.q_empty[own.stage]);
        add_rows(sums, upper.now, lower.now, out + ((long)work.sample * stride * work.H + work.head) * HEAD_DIM,
                 work.H * HEAD_DIM, row, work.T, upper.old, lower.old);
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_forward(const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap other, float* log_sum_exp,
                      int samples, int T, int H, int K, int section OTHERS MASK) {
    Shared& s = *(Shared*)(raw + (0 - shared_address(raw) & 1023));
#if CAUSAL
    const TensorMap &kv = qkv, &out = other;
    const Tiles work(samples, T, H, K, section, T, MASK_OF(T));
#else
    const TensorMap& kv = other;
    const Tiles work(samples, T, H, K, section, all_keys, MASK_OF(stride));
#endif
    if (threadIdx.x == 0) {
        prefetch_map(qkv);
        for (int i = 0; i < 2; ++i) {
            barrier_init(&s.q_full[i], 1);
            barrier_init(&s.q_empty[i], CONSUMERS);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.k_full[i], 1);
            barrier_init(&s.v_full[i], 1);
            barrier_init(&s.k_empty[i], 4 * CONSUMERS);
            barrier_init(&s.v_empty[i], 4 * CONSUMERS);
        }
        fence_async();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<CONSUMERS == 2 ? 24 : 32>();
        if (threadIdx.x == 0) produce(s, qkv, kv, work);
    } else {
        registers_up<CONSUMERS == 2 ? 240 : 160>();
        const int group = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);
        if (PINGPONG && CONSUMERS > 1 && group == CONSUMERS - 1) named_arrive(1, 256);
#if CAUSAL
        consume(s, out, log_sum_exp, work, group);
#else
        consume(s, merged, log_sum_exp, work, group, stride);
#endif
    }
}
