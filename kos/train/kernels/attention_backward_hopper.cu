// Causal attention, backward, on Hopper: two passes, each of which owns what it writes, so that nothing is added
// across blocks: no atomics, every sum in one order, bit-equal from run to run.
//
// attention_backward_kv: a block owns 128 keys of a key/value head (two warpgroups of 64) and streams the queries
//   after them, of all query heads that share the head: S^T = K Q^T, P^T = exp(S^T - lse), dP^T = V dO^T,
//   dS^T = P^T (dP^T - delta); dV += P^T dO, dK += dS^T Q.  Scores are kept transposed, so that P^T and dS^T are in
//   registers as the products want them and never visit shared memory.
// attention_backward_q: a block owns 64 queries a warpgroup and streams the keys before them; dQ += dS K.
//
// S and dP are computed in both: 7 products where one pass with additions across blocks has 5.  One pass whose blocks
// take turns at dQ, so that it is as reproducible, was measured beside this: within 5% at T of 4096 and more (its
// chain of additions is bound by latency), a fifth slower at 1024, with fp32 scratch of dQ's size.
//
// The first warpgroup's first thread issues all TMA loads.
#include "attention_hopper.cuh"

#ifndef STEP
#define STEP 64  // queries of a tile of the first pass
#endif
#ifndef STEP_STAGES
#define STEP_STAGES 2
#endif
#define KEYS 128  // of a tile of the second pass
#ifndef BACKWARD_STAGES
#define BACKWARD_STAGES 2
#endif
#define STAGES BACKWARD_STAGES
#define GROUPS 2
#define OWN (64 * GROUPS)  // rows of a block
#define OWN_BYTES (OWN * HEAD_DIM * 2)
#define THREADS (128 * (GROUPS + 1))
static_assert(PAD % OWN == 0 && OWN % STEP == 0, "statistics are read a whole block at a time");

extern __shared__ char raw[];

struct Shape {
    int samples, T, H, K;
};

// --- keys and values ---

#define STEP_BYTES (STEP * HEAD_DIM * 2)
#define STATISTICS_BYTES (STEP * 2 * 4)
struct SharedKV {
    alignas(1024) char k[OWN_BYTES];  // becomes dK
    alignas(1024) char v[OWN_BYTES];  // becomes dV
    alignas(1024) char q[STEP_STAGES][STEP_BYTES];
    alignas(1024) char d_out[STEP_STAGES][STEP_BYTES];
    alignas(128) float statistics[STEP_STAGES][STEP / 64][2][64];
    u64 own_full, full[STEP_STAGES], empty[STEP_STAGES];
};

__device__ inline void consume_kv(SharedKV& s, const TensorMap& d_qkv, const Shape& shape, int group, int kv_head, int first,
                                  int sample) {
    const int lane = threadIdx.x % 32, first_key = first + group * 64, key = first_key + threadIdx.x / 32 % 4 * 16 + lane / 4;
    char *k = s.k + group * 64 * ROW_BYTES, *v = s.v + group * 64 * ROW_BYTES;
    float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = dv[i] = 0;
    Ring<STEP_STAGES> ring;
    barrier_wait(&s.own_full, 0);
    for (int head = 0; head < shape.H / shape.K; ++head)
        for (int token = first; token < shape.T; token += STEP, ring.next()) {
            const int i = ring.stage;
            barrier_wait(&s.full[i], ring.phase);
            if (token + STEP > first_key) {
                float scores[STEP / 2], slopes[STEP / 2];
                u32 probabilities[STEP / 4], narrow_slopes[STEP / 4];
                multiply_transposed(scores, k, OWN, s.q[i], STEP);
                multiply_transposed(slopes, v, OWN, s.d_out[i], STEP);
                wgmma_wait<1>();
                hold(scores);
                const bool diagonal = token < first_key + 64;
#pragma unroll
                for (int j = 0; j < STEP / 2; j += 4) {
                    const int query = j * 2 + lane % 4 * 2;
                    const float2 lse = *(const float2*)&s.statistics[i][query / 64][0][query % 64];
                    scores[j] = exp2_fast(scores[j] * LOG2_SCALE - lse.x);
                    scores[j + 1] = exp2_fast(scores[j + 1] * LOG2_SCALE - lse.y);
                    scores[j + 2] = exp2_fast(scores[j + 2] * LOG2_SCALE - lse.x);
                    scores[j + 3] = exp2_fast(scores[j + 3] * LOG2_SCALE - lse.y);
                }
                if (diagonal)
#pragma unroll
                    for (int j = 0; j < STEP / 2; ++j)
                        if (token + COLUMN_OF(j, lane) < key + LOWER(j) * 8) scores[j] = 0;
#pragma unroll
                for (int j = 0; j < STEP / 4; ++j) probabilities[j] = pack(scores[2 * j], scores[2 * j + 1]);
                multiply_add<STEP>(dv, probabilities, s.d_out[i]);
                wgmma_wait<1>();
                hold(slopes);
#pragma unroll
                for (int j = 0; j < STEP / 2; j += 4) {
                    const int query = j * 2 + lane % 4 * 2;
                    const float2 delta = *(const float2*)&s.statistics[i][query / 64][1][query % 64];
                    narrow_slopes[j / 2] = pack(scores[j] * (slopes[j] - delta.x), scores[j + 1] * (slopes[j + 1] - delta.y));
                    narrow_slopes[j / 2 + 1] =
                        pack(scores[j + 2] * (slopes[j + 2] - delta.x), scores[j + 3] * (slopes[j + 3] - delta.y));
                }
                multiply_add<STEP>(dk, narrow_slopes, s.q[i]);
                wgmma_wait<0>();
                hold(dk);
                hold(dv);
                hold(probabilities);
                hold(narrow_slopes);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&s.empty[i]);
        }
    const int k_column = (shape.H + kv_head) * HEAD_DIM, v_column = k_column + shape.K * HEAD_DIM;
    store_tile(dv, 1, 1, v, OWN, group, d_qkv, v_column, first_key, sample);
    store_tile(dk, SCALE, SCALE, k, OWN, group, d_qkv, k_column, first_key, sample);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_kv(const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap d_out,
                          const __grid_constant__ TensorMap d_qkv, const float* statistics, int samples, int T, int H, int K,
                          int section) {
    SharedKV& s = *(SharedKV*)(((u64)raw + 1023) & ~1023ull);
    const Place at = place(blockIdx.x, samples * K, (T + OWN - 1) / OWN, section);
    const int sample = at.head / K, kv_head = at.head % K, first = at.block * OWN;
    if (threadIdx.x == 0) {
        prefetch_map(qkv);
        prefetch_map(d_out);
        barrier_init(&s.own_full, 1);
        for (int i = 0; i < STEP_STAGES; ++i) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 4 * GROUPS);
        }
        fence_async();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<24>();
        if (threadIdx.x == 0) {
            barrier_expect(&s.own_full, 2 * OWN_BYTES);
            load_tile<OWN>(s.k, qkv, &s.own_full, (H + kv_head) * HEAD_DIM, first, sample);
            load_tile<OWN>(s.v, qkv, &s.own_full, (H + K + kv_head) * HEAD_DIM, first, sample);
            Ring<STEP_STAGES> ring;
            for (int head = kv_head * (H / K); head < (kv_head + 1) * (H / K); ++head)
                for (int token = first; token < T; token += STEP, ring.next()) {
                    const int i = ring.stage;
                    u64* full = &s.full[i];
                    barrier_wait(&s.empty[i], ring.phase ^ 1);
                    barrier_expect(full, 2 * STEP_BYTES + STATISTICS_BYTES);
                    load_tile<STEP>(s.q[i], qkv, full, head * HEAD_DIM, token, sample);
                    load_bulk(s.statistics[i], statistics + statistics_at(sample * H + head, token, T), STATISTICS_BYTES, full);
                    load_tile<STEP>(s.d_out[i], d_out, full, head * HEAD_DIM, token, sample);
                }
        }
    } else {
        registers_up<240>();
        consume_kv(s, d_qkv, {samples, T, H, K}, __shfl_sync(~0u, threadIdx.x / 128 - 1, 0), kv_head, first, sample);
    }
}

// --- queries ---

#define TILE_BYTES (KEYS * HEAD_DIM * 2)
struct SharedQ {
    alignas(1024) char q[OWN_BYTES];  // becomes dQ
    alignas(1024) char d_out[OWN_BYTES];
    alignas(1024) char k[STAGES][TILE_BYTES];
    alignas(1024) char v[STAGES][TILE_BYTES];
    u64 own_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

__device__ inline void consume_q(SharedQ& s, const TensorMap& d_qkv, const float* statistics, int tiles, int group, int column,
                                 int first, int sample) {
    const int lane = threadIdx.x % 32, row = first + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    char *q = s.q + group * 64 * ROW_BYTES, *d_out = s.d_out + group * 64 * ROW_BYTES;
    float dq[HEAD_DIM / 2], lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        lse[half] = statistics[row % 64 + 8 * half];
        delta[half] = statistics[64 + row % 64 + 8 * half];
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) dq[i] = 0;
    const auto done = [&](u64* barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };
    Ring<STAGES> ring;
    barrier_wait(&s.own_full, 0);
    for (int tile = tiles - 1; tile >= 0; --tile, ring.next()) {
        const int i = ring.stage;
        float scores[KEYS / 2], slopes[KEYS / 2];
        u32 narrow_slopes[KEYS / 4];
        barrier_wait(&s.k_full[i], ring.phase);
        multiply_transposed(scores, q, OWN, s.k[i], KEYS);
        barrier_wait(&s.v_full[i], ring.phase);
        multiply_transposed(slopes, d_out, OWN, s.v[i], KEYS);
        wgmma_wait<1>();
        hold(scores);
#pragma unroll
        for (int j = 0; j < KEYS / 2; ++j) scores[j] = exp2_fast(scores[j] * LOG2_SCALE - lse[LOWER(j)]);
        if ((tile + 1) * KEYS > first)
#pragma unroll
            for (int j = 0; j < KEYS / 2; ++j)
                if (tile * KEYS + COLUMN_OF(j, lane) > row + LOWER(j) * 8) scores[j] = 0;
        wgmma_wait<0>();
        hold(slopes);
        done(&s.v_empty[i]);
#pragma unroll
        for (int j = 0; j < KEYS / 4; ++j)
            narrow_slopes[j] = pack(scores[2 * j] * (slopes[2 * j] - delta[j % 2]),
                                    scores[2 * j + 1] * (slopes[2 * j + 1] - delta[j % 2]));
        multiply_add<KEYS>(dq, narrow_slopes, s.k[i]);
        wgmma_wait<0>();
        hold(dq);
        hold(narrow_slopes);
        done(&s.k_empty[i]);
    }
    store_tile(dq, SCALE, SCALE, q, OWN, group, d_qkv, column, first + group * 64, sample);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_q(const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap d_out,
                         const __grid_constant__ TensorMap d_qkv, const float* statistics, int samples, int T, int H, int K,
                         int section) {
    SharedQ& s = *(SharedQ*)(((u64)raw + 1023) & ~1023ull);
    const int blocks = (T + OWN - 1) / OWN;
    const Place at = place(blockIdx.x, samples * H, blocks, section);
    const int sample = at.head / H, head = at.head % H, kv_head = head / (H / K);
    const int first = (blocks - 1 - at.block) * OWN;
    const int tiles = (min(T, first + OWN) + KEYS - 1) / KEYS;
    if (threadIdx.x == 0) {
        prefetch_map(qkv);
        prefetch_map(d_out);
        barrier_init(&s.own_full, 1);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.k_full[i], 1);
            barrier_init(&s.v_full[i], 1);
            barrier_init(&s.k_empty[i], 4 * GROUPS);
            barrier_init(&s.v_empty[i], 4 * GROUPS);
        }
        fence_async();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<24>();
        if (threadIdx.x == 0) {
            barrier_expect(&s.own_full, 2 * OWN_BYTES);
            load_tile<OWN>(s.q, qkv, &s.own_full, head * HEAD_DIM, first, sample);
            load_tile<OWN>(s.d_out, d_out, &s.own_full, head * HEAD_DIM, first, sample);
            Ring<STAGES> ring;
            for (int tile = tiles - 1; tile >= 0; --tile, ring.next()) {
                const int i = ring.stage;
                barrier_wait(&s.k_empty[i], ring.phase ^ 1);
                barrier_expect(&s.k_full[i], TILE_BYTES);
                load_tile<KEYS>(s.k[i], qkv, &s.k_full[i], (H + kv_head) * HEAD_DIM, tile * KEYS, sample);
                barrier_wait(&s.v_empty[i], ring.phase ^ 1);
                barrier_expect(&s.v_full[i], TILE_BYTES);
                load_tile<KEYS>(s.v[i], qkv, &s.v_full[i], (H + K + kv_head) * HEAD_DIM, tile * KEYS, sample);
            }
        }
    } else {
        registers_up<240>();
        const int group = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);
        consume_q(s, d_qkv, statistics + statistics_at(at.head, first + group * 64, T), tiles, group, head * HEAD_DIM, first,
                  sample);
    }
}
