// Causal attention, forward, on Hopper: FlashAttention-3's plan (Shah et al. 2024, arXiv:2407.08608).
//
// One warpgroup produces (a single thread issues TMA loads into a ring of STAGES key and value tiles), CONSUMERS
// warpgroups each own 64 query rows.  Two overlaps hide the softmax: within a warpgroup the scores of the next key
// tile are multiplied while the probabilities of the last are; between warpgroups named barriers make one multiply
// while the other exponentiates (PINGPONG).
// The tile on the diagonal comes first: it alone needs a mask, and it gives every row a finite maximum.
#include "attention_hopper.cuh"

#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef KEYS
#define KEYS 128
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef PINGPONG
#define PINGPONG 1
#endif
#define QUERIES (64 * CONSUMERS)
#define THREADS (128 * (CONSUMERS + 1))
#define TILE_BYTES (KEYS * HEAD_DIM * 2)

struct Shared {
    alignas(1024) char q[QUERIES * HEAD_DIM * 2];  // becomes the output
    alignas(1024) char k[STAGES][TILE_BYTES];
    alignas(1024) char v[STAGES][TILE_BYTES];
    u64 q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};
extern __shared__ char raw[];

__device__ inline void produce(Shared& s, const TensorMap& qkv, int tiles, int q_column, int k_column, int v_column,
                               int first, int sample) {
    barrier_expect(&s.q_full, sizeof(s.q));
    load_tile<QUERIES>(s.q, qkv, &s.q_full, q_column, first, sample);
    Ring<STAGES> ring;
    for (int tile = tiles - 1; tile >= 0; --tile, ring.next()) {
        const int i = ring.stage;
        barrier_wait(&s.k_empty[i], ring.phase ^ 1);
        barrier_expect(&s.k_full[i], TILE_BYTES);
        load_tile<KEYS>(s.k[i], qkv, &s.k_full[i], k_column, tile * KEYS, sample);
        barrier_wait(&s.v_empty[i], ring.phase ^ 1);
        barrier_expect(&s.v_full[i], TILE_BYTES);
        load_tile<KEYS>(s.v[i], qkv, &s.v_full[i], v_column, tile * KEYS, sample);
    }
}

// Keys after the query get no weight; `row` is the query of the thread's upper row.
__device__ inline void mask(float (&scores)[KEYS / 2], int row, int first_key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i)
        if (first_key + COLUMN_OF(i, lane) > row + LOWER(i) * 8) scores[i] = -INFINITE;
}

// scores become probabilities relative to the new maxima; `factor` is what the old ones were too large by.
__device__ inline void softmax(float (&scores)[KEYS / 2], float (&top)[2], float (&total)[2], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float high = top[half];
#pragma unroll
        for (int i = 2 * half; i < KEYS / 2; i += 4) high = fmaxf(high, fmaxf(scores[i], scores[i + 1]));
        high = quad_max(high);
        // A row that has seen no key yet has no maximum; it can only happen where a block has tiles above its diagonal.
        const float shift = QUERIES > KEYS && high == -INFINITE ? 0 : high * LOG2_SCALE;
        factor[half] = exp2_fast(top[half] * LOG2_SCALE - shift);
        top[half] = high;
        float sum = 0;
#pragma unroll
        for (int i = 2 * half; i < KEYS / 2; i += 4) {
            scores[i] = exp2_fast(scores[i] * LOG2_SCALE - shift);
            scores[i + 1] = exp2_fast(scores[i + 1] * LOG2_SCALE - shift);
            sum += scores[i] + scores[i + 1];
        }
        total[half] = total[half] * factor[half] + sum;
    }
}

__device__ inline void consume(Shared& s, const TensorMap& out, float* log_sum_exp, int tiles, int group, int column,
                               int first, int sample, int length) {
    const int lane = threadIdx.x % 32, row = first + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    char* q = s.q + group * 64 * ROW_BYTES;
    float scores[KEYS / 2], sums[HEAD_DIM / 2];
    u32 probabilities[KEYS / 4];
    float top[2] = {-INFINITE, -INFINITE}, total[2] = {0, 0}, factor[2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] = 0;
    const auto multiply_scores = [&](int stage) { multiply_transposed(scores, q, QUERIES, s.k[stage], KEYS); };
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
    int tile = tiles - 1;
    barrier_wait(&s.q_full, 0);
    barrier_wait(&s.k_full[0], 0);
    my_turn();
    multiply_scores(0);
    your_turn();
    wgmma_wait<0>();
    hold(scores);
    done(&s.k_empty[0]);
    k.next();
    mask(scores, row, tile * KEYS);
    softmax(scores, top, total, factor);
    narrow();
    for (--tile; tile >= 0; --tile) {
        barrier_wait(&s.k_full[k.stage], k.phase);
        my_turn();
        multiply_scores(k.stage);
        barrier_wait(&s.v_full[v.stage], v.phase);
        multiply_add<KEYS>(sums, probabilities, s.v[v.stage]);
        your_turn();
        wgmma_wait<1>();
        hold(scores);
        done(&s.k_empty[k.stage]);
        if ((tile + 1) * KEYS > first) mask(scores, row, tile * KEYS);
        softmax(scores, top, total, factor);
        wgmma_wait<0>();
        hold(sums);
        hold(probabilities);
        done(&s.v_empty[v.stage]);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] *= factor[LOWER(i)];
        narrow();
        k.next();
        v.next();
    }
    barrier_wait(&s.v_full[v.stage], v.phase);
    multiply_add<KEYS>(sums, probabilities, s.v[v.stage]);
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(total[half]);
        inverse[half] = 1 / sum;
        if (lane % 4 == 0 && row + 8 * half < length) log_sum_exp[row + 8 * half] = top[half] * SCALE + __logf(sum);
    }
    wgmma_wait<0>();
    hold(sums);
    store_tile(sums, inverse[0], inverse[1], q, QUERIES, group, out, column, first + group * 64, sample);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_forward(const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap out, float* log_sum_exp,
                      int samples, int T, int H, int K, int section) {
    Shared& s = *(Shared*)(((u64)raw + 1023) & ~1023ull);
    const int blocks = (T + QUERIES - 1) / QUERIES;
    const Place at = place(blockIdx.x, samples * H, blocks, section);
    const int sample = at.head / H, head = at.head % H, kv_head = head / (H / K);
    const int first = (blocks - 1 - at.block) * QUERIES;
    const int tiles = (min(T, first + QUERIES) + KEYS - 1) / KEYS;
    if (threadIdx.x == 0) {
        prefetch_map(qkv);
        barrier_init(&s.q_full, 1);
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
        if (threadIdx.x == 0)
            produce(s, qkv, tiles, head * HEAD_DIM, (H + kv_head) * HEAD_DIM, (H + K + kv_head) * HEAD_DIM, first, sample);
    } else {
        registers_up<CONSUMERS == 2 ? 240 : 160>();
        const int group = threadIdx.x / 128 - 1;
        if (PINGPONG && CONSUMERS > 1 && group == CONSUMERS - 1) named_arrive(1, 256);
        consume(s, out, log_sum_exp + (long)at.head * T, tiles, group, head * HEAD_DIM, first, sample, T);
    }
}
