// Attention, forward and backward, for every GPU since Ampere: FlashAttention-2's plan (Dao 2023,
// arXiv:2307.08691) with mma.sync.
//
// A block owns 128 rows (queries, or keys in the first backward pass), 16 a warp, and streams tiles of the other side
// through two buffers filled by cp.async.  The backward is two passes that each own what they write, so that nothing is
// added across blocks and every sum has one order; see attention_backward_hopper.cu, whose mathematics this shares.
//
// Macros: WARPS; KEYS of a tile of the forward; STEP: rows of a tile of the backward, two of which a buffer holds.
#include "attention_mma.cuh"

#define PARTS (HEAD_DIM > 128 ? 2 : 1)  // no thread has registers for both dK and dV of more columns

struct Shape {
    int samples, T, H, K;
    __device__ long width() const { return (long)(H + 2 * K) * HEAD_DIM; }
    __device__ long out_width() const { return (long)H * HEAD_DIM; }
};
extern __shared__ char raw[];

// What kernels are given to see other keys than causal ones.
#if CAUSAL
using Output = u16;
#define OTHERS
#else
using Output = float;
#define OTHERS , const u16 *kv, int keys, int stride
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_forward(const u16* qkv, Output* out, float* log_sum_exp, int samples, int T, int H, int K, int section OTHERS MASK) {
    const Shape shape{samples, T, H, K};
    const int blocks = (T + OWN - 1) / OWN, lane = threadIdx.x % 32;
    const Place at = place(blockIdx.x, samples * H, blocks, section);
    const int sample = at.head / H, head = at.head % H, kv_head = head / (H / K);
    const int first = (blocks - 1 - at.block) * OWN, own = threadIdx.x / 32 * 16, row = first + own + lane / 4;
    const long width = shape.width();
#if CAUSAL
    const int tiles = (min(T, first + OWN) + KEYS - 1) / KEYS, keys = T, stride = T;
    const u16* heads = qkv + sample * T * width;
    const u16 *k = heads + (H + kv_head) * HEAD_DIM, *v = k + K * HEAD_DIM;
    const long kv_width = width;
#else
    const int tiles = (keys + KEYS - 1) / KEYS;
    const long kv_width = 2 * K * HEAD_DIM;
    const u16 *heads = qkv + sample * stride * width, *k = kv + sample * stride * kv_width + kv_head * HEAD_DIM;
    const u16* v = k + K * HEAD_DIM;
#endif
    const Mask mask MASK_OF(stride);
    const int begin = mask.first_key(sample, first) / KEYS, masked = mask.first_key(sample, min(first + OWN, T) - 1);
    const int low[2] = {mask.first_key(sample, min(row, T - 1)), mask.first_key(sample, min(row + 8, T - 1))};
    if (MASKED && begin >= tiles) return;  // nothing to add, without CAUSAL
    const u32 q_tile = shared_address(raw), ring = q_tile + TILE_BYTES(OWN);
    const auto load = [&](int tile) {
        const u32 buffer = ring + tile % 2 * 2 * TILE_BYTES(KEYS);
        load_tile<KEYS>(buffer, k, kv_width, tile * KEYS, keys);
        load_tile<KEYS>(buffer + TILE_BYTES(KEYS), v, kv_width, tile * KEYS, keys);
        load_commit();
    };

    float scores[KEYS / 2], sums[HEAD_DIM / 2], top[2] = {-INFINITE, -INFINITE}, total[2] = {0, 0};
    u32 probabilities[KEYS / 4];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] = 0;
    load_tile<OWN>(q_tile, heads + head * HEAD_DIM, width, first, T);
    load(begin);
    for (int tile = begin; tile < tiles; ++tile) {
        const u32 buffer = ring + tile % 2 * 2 * TILE_BYTES(KEYS);
        if (tile + 1 < tiles)
            load(tile + 1), load_wait<1>();
        else
            load_wait<0>();
        __syncthreads();
        multiply_transposed<KEYS>(scores, q_tile, own, buffer);
        to_scores(scores);
        if ((tile + 1) * KEYS > (CAUSAL ? first : keys) || MASKED && tile * KEYS < masked)
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) {
                const int key = tile * KEYS + COLUMN_OF(i, lane);
                if (key > (CAUSAL ? row + LOWER(i) * 8 : keys - 1) || MASKED && key < low[LOWER(i)]) scores[i] = -INFINITE;
            }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float high = top[half];  // without MASKED finite from the first tile on, which holds key 0
#pragma unroll
            for (int i = 2 * half; i < KEYS / 2; i += 4) high = fmaxf(high, fmaxf(scores[i], scores[i + 1]));
            high = quad_max(high);
            const float shift = MASKED && high == -INFINITE ? 0 : high * LOG2_SCALE, factor = exp2_fast(top[half] * LOG2_SCALE - shift);
            top[half] = high;
            total[half] *= factor;
#pragma unroll
            for (int i = 2 * half; i < KEYS / 2; i += 4) {
                scores[i] = exponential(scores[i], shift);
                scores[i + 1] = exponential(scores[i + 1], shift);
                total[half] += scores[i] + scores[i + 1];
            }
#pragma unroll
            for (int i = 2 * half; i < HEAD_DIM / 2; i += 4) sums[i] *= factor, sums[i + 1] *= factor;
        }
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) probabilities[i] = pack(scores[2 * i], scores[2 * i + 1]);
        multiply_add<KEYS>(sums, probabilities, buffer + TILE_BYTES(KEYS));
        __syncthreads();
    }
    const float sum[2] = {quad_sum(total[0]), quad_sum(total[1])};
#if CAUSAL
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (lane % 4 == 0 && row + 8 * half < T)
            log_sum_exp[(long)at.head * T + row + 8 * half] = top[half] * SCALE + __logf(sum[half]);
    store_rows(sums, 1 / sum[0], 1 / sum[1], out + sample * T * shape.out_width() + head * HEAD_DIM, shape.out_width(), row, T);
#else
    float* lse = log_sum_exp + (long)at.head * stride + row;
    const Merge upper(row < T ? lse[0] : 0, top[0], sum[0]), lower(row + 8 < T ? lse[8] : 0, top[1], sum[1]);
    __syncwarp();  // all lanes of a row have read what the first writes
    if (lane % 4 == 0 && row < T) lse[0] = upper.log_sum_exp;
    if (lane % 4 == 0 && row + 8 < T) lse[8] = lower.log_sum_exp;
    add_rows(sums, upper.now, lower.now, out + sample * stride * shape.out_width() + head * HEAD_DIM, shape.out_width(), row, T,
             upper.old, lower.old);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_kv(const u16* qkv, const u16* d_out, Output* gradient, const float* statistics, int samples, int T, int H,
                          int K, int section OTHERS MASK) {
    const Shape shape{samples, T, H, K};
    const int lane = threadIdx.x % 32, group = H / K;
#if CAUSAL
    const int keys = T, stride = T;
#endif
    const Mask mask MASK_OF(stride);
    const bool makes_dv = PARTS == 1 || blockIdx.x % PARTS, makes_dk = PARTS == 1 || !makes_dv;
    const Place at = place(blockIdx.x / PARTS, samples * K, (keys + OWN - 1) / OWN, section);
    const int sample = at.head / K, kv_head = at.head % K;
    const int first = at.block * OWN, own = threadIdx.x / 32 * 16, key = first + own + lane / 4;
    const long width = shape.width(), out_width = shape.out_width();
#if CAUSAL
    const u16 *heads = qkv + sample * T * width, *d_outs = d_out + sample * T * out_width;
    const long k_at = (long)(H + kv_head) * HEAD_DIM, v_at = k_at + K * HEAD_DIM;
    const int start = first;  // of the queries that see these keys
#else
    const u16 *heads = qkv + sample * stride * width, *d_outs = d_out + sample * stride * out_width;
    const long kv_width = 2 * K * HEAD_DIM, k_at = sample * stride * kv_width + kv_head * HEAD_DIM, v_at = k_at + K * HEAD_DIM;
    const int start = 0;
#endif
    const int end = MASKED ? mask.last_query(sample, min(first + OWN, keys) - 1) + 1 : T;
    const int last[2] = {mask.last_query(sample, min(key, keys - 1)), mask.last_query(sample, min(key + 8, keys - 1))};
    if (MASKED && end <= start) return;  // nothing to add, without CAUSAL
    const u32 k_tile = shared_address(raw), v_tile = k_tile + TILE_BYTES(OWN), ring = v_tile + TILE_BYTES(OWN);
    const int steps = (end - start + STEP - 1) / STEP;  // of each query head
    const auto load = [&](int i) {
        const u32 buffer = ring + i % 2 * 2 * TILE_BYTES(STEP);
        const int head = kv_head * group + i / steps, token = start + i % steps * STEP;
        load_tile<STEP>(buffer, heads + head * HEAD_DIM, width, token, T);
        load_tile<STEP>(buffer + TILE_BYTES(STEP), d_outs + head * HEAD_DIM, out_width, token, T);
        load_commit();
    };

    float scores[STEP / 2], slopes[STEP / 2], sums[3 - PARTS][HEAD_DIM / 2];
    auto &dk = sums[0], &dv = sums[2 - PARTS];
    u32 narrow[STEP / 4];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = dv[i] = 0;
#if CAUSAL
    load_tile<OWN>(k_tile, heads + k_at, width, first, T);
    load_tile<OWN>(v_tile, heads + v_at, width, first, T);
#else
    load_tile<OWN>(k_tile, kv + k_at, kv_width, first, keys);
    load_tile<OWN>(v_tile, kv + v_at, kv_width, first, keys);
#endif
    load(0);
    for (int i = 0; i < group * steps; ++i) {
        const u32 q = ring + i % 2 * 2 * TILE_BYTES(STEP), dout = q + TILE_BYTES(STEP);
        const int head = sample * H + kv_head * group + i / steps, token = start + i % steps * STEP;
        if (i + 1 < group * steps)
            load(i + 1), load_wait<1>();
        else
            load_wait<0>();
        __syncthreads();
        if (!CAUSAL || token + STEP > first + own) {
            multiply_transposed<STEP>(scores, k_tile, own, q);
            if (makes_dk) multiply_transposed<STEP>(slopes, v_tile, own, dout);
            const float* statistic = statistics + statistics_at(head, token, T);
#pragma unroll
            for (int j = 0; j < STEP / 2; ++j) {
                const int column = COLUMN_OF(j, lane);
                scores[j] = exponential(score_of(scores[j]), statistic[column]);
                if (CAUSAL && token + column < key + LOWER(j) * 8 || MASKED && token + column > last[LOWER(j)]) scores[j] = 0;
                if (makes_dk) slopes[j] = product_gradient(scores[j], slopes[j], statistic[64 + column], statistic[column]);
            }
            if (makes_dv) {
#pragma unroll
                for (int j = 0; j < STEP / 4; ++j) narrow[j] = pack(scores[2 * j], scores[2 * j + 1]);
                multiply_add<STEP>(dv, narrow, dout);
            }
            if (makes_dk) {
#pragma unroll
                for (int j = 0; j < STEP / 4; ++j) narrow[j] = pack(slopes[2 * j], slopes[2 * j + 1]);
                multiply_add<STEP>(dk, narrow, q);
            }
        }
        __syncthreads();
    }
#if CAUSAL
    u16* target = gradient + sample * T * width;
    if (makes_dk) store_rows(dk, SCALE, SCALE, target + k_at, width, key, T);
    if (makes_dv) store_rows(dv, 1, 1, target + v_at, width, key, T);
#else
    if (makes_dk) add_rows(dk, SCALE, SCALE, gradient + k_at, kv_width, key, keys);
    if (makes_dv) add_rows(dv, 1, 1, gradient + v_at, kv_width, key, keys);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_q(const u16* qkv, const u16* d_out, Output* d_qkv, const float* statistics, int samples, int T, int H, int K,
                         int section OTHERS MASK) {
    const Shape shape{samples, T, H, K};
    const int blocks = (T + OWN - 1) / OWN, lane = threadIdx.x % 32;
    const Place at = place(blockIdx.x, samples * H, blocks, section);
    const int sample = at.head / H, head = at.head % H, kv_head = head / (H / K);
    const int first = (blocks - 1 - at.block) * OWN, own = threadIdx.x / 32 * 16, row = first + own + lane / 4;
    const long width = shape.width(), out_width = shape.out_width();
#if CAUSAL
    const int tiles = (min(T, first + OWN) + STEP - 1) / STEP, keys = T, stride = T;
    const u16* heads = qkv + sample * T * width;
    const u16 *k = heads + (H + kv_head) * HEAD_DIM, *v = k + K * HEAD_DIM;
    const long kv_width = width;
#else
    const int tiles = (keys + STEP - 1) / STEP;
    const long kv_width = 2 * K * HEAD_DIM;
    const u16 *heads = qkv + sample * stride * width, *k = kv + sample * stride * kv_width + kv_head * HEAD_DIM;
    const u16* v = k + K * HEAD_DIM;
#endif
    const Mask mask MASK_OF(stride);
    const int begin = mask.first_key(sample, first) / STEP;
    const int low[2] = {mask.first_key(sample, min(row, T - 1)), mask.first_key(sample, min(row + 8, T - 1))};
    if (MASKED && begin >= tiles) return;  // nothing to add, without CAUSAL
    const u32 q_tile = shared_address(raw), dout_tile = q_tile + TILE_BYTES(OWN), ring = dout_tile + TILE_BYTES(OWN);
    const auto load = [&](int tile) {
        const u32 buffer = ring + tile % 2 * 2 * TILE_BYTES(STEP);
        load_tile<STEP>(buffer, k, kv_width, tile * STEP, keys);
        load_tile<STEP>(buffer + TILE_BYTES(STEP), v, kv_width, tile * STEP, keys);
        load_commit();
    };

    float scores[STEP / 2], slopes[STEP / 2], dq[HEAD_DIM / 2];
    u32 narrow[STEP / 4];
    const float* statistic = statistics + statistics_at(at.head, row, T);
    const float lse[2] = {statistic[0], statistic[8]}, delta[2] = {statistic[64], statistic[72]};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) dq[i] = 0;
    load_tile<OWN>(q_tile, heads + head * HEAD_DIM, width, first, T);
    load_tile<OWN>(dout_tile, d_out + sample * stride * out_width + head * HEAD_DIM, out_width, first, T);
    load(begin);
    for (int tile = begin; tile < tiles; ++tile) {
        const u32 k_tile = ring + tile % 2 * 2 * TILE_BYTES(STEP), v_tile = k_tile + TILE_BYTES(STEP);
        if (tile + 1 < tiles)
            load(tile + 1), load_wait<1>();
        else
            load_wait<0>();
        __syncthreads();
        if (!CAUSAL || tile * STEP < first + own + 16) {
            multiply_transposed<STEP>(scores, q_tile, own, k_tile);
            multiply_transposed<STEP>(slopes, dout_tile, own, v_tile);
#pragma unroll
            for (int j = 0; j < STEP / 2; ++j) {
                const int half = LOWER(j);
                scores[j] = exponential(score_of(scores[j]), lse[half]);
                if (tile * STEP + COLUMN_OF(j, lane) > (CAUSAL ? row + half * 8 : keys - 1)) scores[j] = 0;
                if (MASKED && tile * STEP + COLUMN_OF(j, lane) < low[half]) scores[j] = 0;
                slopes[j] = product_gradient(scores[j], slopes[j], delta[half], lse[half]);
            }
#pragma unroll
            for (int j = 0; j < STEP / 4; ++j) narrow[j] = pack(slopes[2 * j], slopes[2 * j + 1]);
            multiply_add<STEP>(dq, narrow, k_tile);
        }
        __syncthreads();
    }
#if CAUSAL
    store_rows(dq, SCALE, SCALE, d_qkv + sample * T * width + head * HEAD_DIM, width, row, T);
#else
    add_rows(dq, SCALE, SCALE, d_qkv + sample * stride * width + head * HEAD_DIM, width, row, T);
#endif
}
