// Attention, backward, on Hopper: one pass of five products (Dao 2023, arXiv:2307.08691; Shah et al. 2024,
// arXiv:2407.08608), as reproducible as two passes of seven.
//
// attention_backward: a block owns 128 keys of a key/value head (two warpgroups of 64) and streams the queries that see
//   them (without CAUSAL all), of all query heads that share the head: S^T = K Q^T, P^T = exp(S^T - lse), dP^T = V dO^T,
//   dS^T = P^T (dP^T - delta); dV += P^T dO, dK += dS^T Q, dQ += dS K.  Scores are kept transposed, so that P^T and
//   dS^T are in registers as dV's and dK's products want them; for dQ's the two warpgroups put dS^T together in shared
//   memory, and multiply a tile later, so that neither waits long for the other: each has a half of the tile's dQ.
// attention_finish: what was added up of dQ, rounded to 16 bits.
//
// Blocks add to dQ in any order and yet get the same bits each time: they add integers.  attention_statistics has given
// each query a power of two that takes the largest sum there can be to 2^30, and a tile's share is rounded by 2^-31 of
// that at most.  For numbers of one size, and 4096 keys, that is a two-hundredth of what rounding to bfloat16 is.  (A key and
// a value of 20 times the size of all others, which no later query attends to, would make it as much.)
//
// The first warpgroup's first thread issues all TMA loads.
//
// Macros: STAGES.
#include "attention_hopper.cuh"

#define STEP (8192 / PADDED_DIM)  // queries of a tile: two pieces of dQ, 64 queries by 64 columns each
#define PIECE 4096
#define DONE 1  // named barriers; from MY_TURN on one of each warpgroup
#define MY_TURN 2
#define GROUPS 2
#define OWN (64 * GROUPS)  // keys of a block
#define OWN_BYTES (OWN * PADDED_DIM * 2)
#define STEP_BYTES (STEP * PADDED_DIM * 2)
#define STATISTICS_BYTES (STEP * STATISTICS * 4)
#define SLOPE_BYTES (OWN * STEP * 2)
#define THREADS (128 * (GROUPS + 1))
#define AT_ONCE (STEP == 64)  // there are enough registers for S^T and dP^T of a tile
#define TAKE_TURNS (AT_ONCE || !CAUSAL)  // the warpgroups take turns to begin a tile; slower with CAUSAL and 64 columns
// Buffers of dS^T: a warpgroup that writes to one knows that the other has multiplied its previous content.  If dQ of a
// tile comes first in the next tile, that content is of two tiles before, since the other's dS^T of the tile before is
// there.  If dQ comes last, it is of three tiles before, since the other has begun the tile before.
#define TURNS (AT_ONCE ? 3 : 2)
static_assert(PAD % STEP == 0, "statistics are read a whole tile at a time");

// What kernels are given to see other keys than causal ones: where dk and dv are added up, keys and tokens of a sample.
#if CAUSAL
#define OTHERS
#else
#define OTHERS , float *d_kv, int keys, int stride
#endif
extern __shared__ char raw[];

struct Shared {
    alignas(1024) char k[OWN_BYTES];  // becomes dK
    alignas(1024) char v[OWN_BYTES];  // becomes dV
    alignas(1024) char q[STAGES][STEP_BYTES];
    alignas(1024) char d_out[STAGES][STEP_BYTES];
    alignas(1024) char slopes[TURNS][SLOPE_BYTES];  // dS^T
    alignas(128) float statistics[STAGES][STEP / 64][STATISTICS][64];
    u64 own_full, full[STAGES], empty[STAGES], slopes_full[TURNS];
};

// The part of dS^T that this warp has, 16 keys, as rows of panels of 64 queries.
__device__ inline void store_slopes(char* tile, const u32 (&slopes)[STEP / 4], int first_row) {
    const int lane = threadIdx.x % 32, row = first_row + lane % 16;
#pragma unroll
    for (int chunk = 0; chunk < STEP / 8; chunk += 2) {
        const int here = chunk + lane / 16;
        const char* at = tile + (here / 8 * OWN + row) * ROW_BYTES + (here % 8 ^ row % 8) * 16;
        const u32* x = slopes + 2 * chunk;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(at)), "r"(x[0]),
                     "r"(x[1]), "r"(x[2]), "r"(x[3])
                     : "memory");
    }
}

// The i-th of a group's heads that a block works on without CAUSAL.  All blocks begin with the first query, at the same
// time.  If they also began with the same head, they would add to the same places of dQ in step, which is a sixth slower
// with 128 columns.
__device__ inline int head_of(int i, int first_key, int heads) { return (i + first_key / OWN) % heads; }

// What a thread of a warpgroup has: 64 keys of dK and dV, and the half of dQ's last tile that is still to be multiplied.
struct Worker {
    Shared& s;
    const int group, lane, row, key, keys;  // row: of 64 queries or keys
    const int unmasked, last[2];  // the last query that sees all keys of the warpgroup, and those that see the thread's
    float dk[SUMMED / 2] = {}, dv[SUMMED / 2] = {}, scales[2];
    int* target;
    Ring<STAGES> ring;
    Ring<TURNS> turn, turn_before;

    // Of a tile's dQ a warpgroup has the columns of a panel, or 64 of the queries.
    __device__ int piece() const { return PANELS == 1 ? group : 0; }
    __device__ int panel() const { return PANELS == 1 ? 0 : group; }

    // Of the tile before this, if there is one.
    template <bool FIRST>
    __device__ __forceinline__ void multiply_queries(float (&dq)[32]) {
        if (FIRST) return wgmma_commit();
        const char* slopes = s.slopes[turn_before.stage] + piece() * OWN * ROW_BYTES;
        barrier_wait(&s.slopes_full[turn_before.stage], turn_before.phase);
        multiply_crossed<OWN>(dq, slopes, s.k + panel() * OWN * ROW_BYTES);
    }
    template <bool FIRST>
    __device__ __forceinline__ void add_queries(float (&dq)[32]) const {
        if (FIRST) return;
        hold(dq);
#pragma unroll
        for (int j = 0; j < 32; ++j) atomicAdd(target + j * 128, __float2int_rn(dq[j] * scales[LOWER(j)]));
    }

    // A tile of queries; `sums` is where its dQ goes.
    template <bool FIRST>
    __device__ __forceinline__ void work(int token, int* sums) {
        // Recomputed, they take fewer registers than if they were kept: measured faster without CAUSAL, slower with it.
        if (!CAUSAL) {
            if (TURNS == STAGES) turn = {ring.stage, ring.phase};
            turn_before = turn.before();
        }
        const int i = ring.stage;
        const auto& statistics = s.statistics[i];
        char *k = s.k + group * 64 * ROW_BYTES, *v = s.v + group * 64 * ROW_BYTES;
        float scores[STEP / 2], slopes[STEP / 2], dq[32];
        u32 probabilities[STEP / 4], narrow_slopes[STEP / 4];
        barrier_wait(&s.full[i], ring.phase);
        if (TAKE_TURNS) named_sync(MY_TURN + group, 128 * GROUPS);
        multiply_transposed(scores, k, OWN, s.q[i], STEP);
        if (AT_ONCE) {
            multiply_transposed(slopes, v, OWN, s.d_out[i], STEP);
            named_arrive(MY_TURN + (group ^ 1), 128 * GROUPS);
        } else {
            multiply_queries<FIRST>(dq);
        }
        wgmma_wait<1>();
        hold(scores);
        // All statistics are read before the fence below: TMA writes the next tile's over them once all warps have arrived,
        // and only the fence orders its writes after our reads.
        const float upper = statistics[piece()][2][row], lower = statistics[piece()][2][row + 8];
#pragma unroll
        for (int j = 0; j < STEP / 2; j += 4) {
            const int query = j * 2 + lane % 4 * 2;
            const float2 lse = *(const float2*)&statistics[query / 64][0][query % 64];
#pragma unroll
            for (int i = j; i < j + 4; ++i) scores[i] = exponential(score_of(scores[i]), i % 2 ? lse.y : lse.x);
        }
        // Keys beyond the last are 0, but their probabilities may be inf, and dQ the sum of NaN.
        if ((CAUSAL ? token < key - row + 64 : keys < key - row + 64) || MASKED && token + STEP - 1 > unmasked)
#pragma unroll
            for (int j = 0; j < STEP / 2; ++j) {
                const int query = token + COLUMN_OF(j, lane), at = key + LOWER(j) * 8;
                if ((CAUSAL ? query < at : keys <= at) || MASKED && query > last[LOWER(j)]) scores[j] = 0;
            }
        if (!AT_ONCE) {
            if (TAKE_TURNS) named_arrive(MY_TURN + (group ^ 1), 128 * GROUPS);
            wgmma_wait<0>();
            add_queries<FIRST>(dq);
            multiply_transposed(slopes, v, OWN, s.d_out[i], STEP);
        }
#pragma unroll
        for (int j = 0; j < STEP / 4; ++j) probabilities[j] = pack(scores[2 * j], scores[2 * j + 1]);
        multiply_add<STEP>(dv, probabilities, s.d_out[i]);
        wgmma_wait<1>();
        hold(slopes);
#pragma unroll
        for (int j = 0; j < STEP / 2; j += 4) {
            const int query = j * 2 + lane % 4 * 2;
            const float2 delta = *(const float2*)&statistics[query / 64][1][query % 64];
            const float2 lse = *(const float2*)&statistics[query / 64][0][query % 64];
#pragma unroll
            for (int i = j; i < j + 4; i += 2)
                narrow_slopes[i / 2] = pack(product_gradient(scores[i], slopes[i], delta.x, lse.x),
                                            product_gradient(scores[i + 1], slopes[i + 1], delta.y, lse.y));
        }
        wgmma_wait<0>();
        hold(dv);
        hold(probabilities);
        store_slopes(s.slopes[turn.stage], narrow_slopes, group * 64 + row / 16 * 16);
        fence_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.slopes_full[turn.stage]);
        multiply_add<STEP>(dk, narrow_slopes, s.q[i]);
        if (AT_ONCE) {
            multiply_queries<FIRST>(dq);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        hold(dk);
        hold(narrow_slopes);
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.empty[i]);
        if (AT_ONCE) {
            wgmma_wait<0>();
            add_queries<FIRST>(dq);
        }
        target = sums + (piece() * PANELS + panel()) * PIECE + threadIdx.x % 128;
        scales[0] = upper, scales[1] = lower;
        turn_before = turn;
        ring.next(), turn.next();
    }

    __device__ __forceinline__ void finish() {
        float dq[32];
        multiply_queries<false>(dq);
        wgmma_wait<0>();
        add_queries<false>(dq);
        if (TAKE_TURNS && group == 0) named_sync(MY_TURN, 128 * GROUPS);  // for the other's last arrival there
        named_sync(DONE, 128 * GROUPS);  // no thread reads K after this
    }
};

#if CAUSAL
__device__ inline void consume(Shared& s, const TensorMap& d_qkv, int* sums, int T, int H, int K, int group, int kv_head,
                               int first, int sample, int end, const Mask& mask) {
    const int start = first, keys = T;
#else
__device__ inline void consume(Shared& s, float* d_kv, int* sums, int T, int H, int K, int group, int kv_head, int first,
                               int sample, int end, const Mask& mask, int keys, int stride) {
    const int start = 0;
#endif
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, first_key = first + group * 64;
    const int heads = H / K, of_head = padded(T) * PADDED_DIM;
    const auto last = [&](int key) { return mask.last_query(sample, min(key, keys - 1)); };
    Worker worker{s, group, lane, row, first_key + row, keys, last(first_key), {last(first_key + row), last(first_key + row + 8)}};
#if CAUSAL
    sums += (long)(sample * H + kv_head * heads) * of_head;
#else
    int head = head_of(0, first, heads);
    sums += (long)(sample * H + kv_head * heads + head) * of_head;
#endif
    if (TAKE_TURNS && group == 1) named_arrive(MY_TURN, 128 * GROUPS);
    barrier_wait(&s.own_full, 0);
    worker.work<true>(start, sums + start * PADDED_DIM);
    for (int i = 0, token = start + STEP; i < heads; ++i, token = start) {
        for (; token < end; token += STEP) worker.work<false>(token, sums + token * PADDED_DIM);
        sums += of_head;
#if !CAUSAL
        if (++head == heads) head = 0, sums -= (long)heads * of_head;
#endif
    }
    worker.finish();
#if CAUSAL
    char *k = s.k + group * 64 * ROW_BYTES, *v = s.v + group * 64 * ROW_BYTES;
    store_tile(worker.dv, 1, 1, v, OWN, group, d_qkv, H + K + kv_head, first_key, sample);
    store_tile(worker.dk, SCALE, SCALE, k, OWN, group, d_qkv, H + kv_head, first_key, sample);
#else
    float *dk = d_kv + ((long)sample * stride * 2 * K + kv_head) * HEAD_DIM, *dv = dk + K * HEAD_DIM;
    add_rows(worker.dv, 1, 1, dv, 2 * K * HEAD_DIM, worker.key, keys);
    add_rows(worker.dk, SCALE, SCALE, dk, 2 * K * HEAD_DIM, worker.key, keys);
#endif
}

// sums: dQ as integers, (samples, H, padded(T) / 64, PANELS) pieces of 64 queries by 64 columns: element j of thread t of
// the warpgroup that multiplied a piece is at j * 128 + t.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward(const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap d_out,
                       const __grid_constant__ TensorMap other, const float* statistics, int* sums, int samples, int T, int H,
                       int K, int section OTHERS MASK) {
    Shared& s = *(Shared*)(raw + (0 - shared_address(raw) & 1023));
#if CAUSAL
    const TensorMap &kv = qkv, &d_qkv = other;
    const int keys = T, stride = T;
#else
    const TensorMap& kv = other;
#endif
    const Place at = place(blockIdx.x, samples * K, (keys + OWN - 1) / OWN, section);
    const int sample = at.head / K, kv_head = at.head % K, first = at.block * OWN, start = CAUSAL ? first : 0;
    const Mask mask MASK_OF(stride);
    const int end = MASKED ? mask.last_query(sample, min(first + OWN, keys) - 1) + 1 : T;  // of the queries that see these keys
    if (MASKED && end <= start) return;  // nothing to add, without CAUSAL
    if (threadIdx.x == 0) {
        prefetch_map(qkv);
        prefetch_map(d_out);
        barrier_init(&s.own_full, 1);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 4 * GROUPS);
        }
        for (int i = 0; i < TURNS; ++i) barrier_init(&s.slopes_full[i], 4 * GROUPS);
        fence_async();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<24>();
        if (threadIdx.x == 0) {
            barrier_expect(&s.own_full, 2 * OWN_BYTES);
            load_tile<OWN>(s.k, kv, &s.own_full, (CAUSAL ? H : 0) + kv_head, first, sample);
            load_tile<OWN>(s.v, kv, &s.own_full, (CAUSAL ? H : 0) + K + kv_head, first, sample);
            Ring<STAGES> ring;
#if CAUSAL
            for (int head = kv_head * (H / K); head < (kv_head + 1) * (H / K); ++head) {
#else
            for (int n = 0; n < H / K; ++n) {
                const int head = kv_head * (H / K) + head_of(n, first, H / K);
#endif
                for (int token = start; token < end; token += STEP, ring.next()) {
                    const int i = ring.stage;
                    u64* full = &s.full[i];
                    barrier_wait(&s.empty[i], ring.phase ^ 1);
                    barrier_expect(full, 2 * STEP_BYTES + STATISTICS_BYTES);
                    load_tile<STEP>(s.q[i], qkv, full, head, token, sample);
                    load_bulk(s.statistics[i], statistics + statistics_at(sample * H + head, token, T), STATISTICS_BYTES, full);
                    load_tile<STEP>(s.d_out[i], d_out, full, head, token, sample);
                }
            }
        }
    } else {
        registers_up<240>();
        const int group = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);
#if CAUSAL
        consume(s, d_qkv, sums, T, H, K, group, kv_head, first, sample, end, mask);
#else
        consume(s, d_kv, sums, T, H, K, group, kv_head, first, sample, end, mask, keys, stride);
#endif
    }
}

// A block a piece; a thread has 8 columns of a query at a time.  A sample of d_qkv has `stride` rows of W.
extern "C" __global__ void __launch_bounds__(256)
    attention_finish(const int4* sums, const float* statistics, void* d_qkv, int T, int H, int W, int stride) {
    const int panel = blockIdx.x % PANELS, tiles = padded(T) / 64, tile = blockIdx.x / PANELS % tiles;
    const int head = blockIdx.x / (PANELS * tiles), sample = head / H;
    const float* scales = statistics + statistics_at(head, tile * 64, T) + 128;
#pragma unroll
    for (int item = threadIdx.x; item < 512; item += 256) {
        const int row = item / 8, chunk = item % 8, token = tile * 64 + row;
        if (token >= T || panel * PANEL_COLUMNS + chunk * 8 >= HEAD_DIM) continue;
        const long at = blockIdx.x * 1024l + (chunk * 4 + row / 8 % 2 * 2) * 32 + row / 16 * 8 + row % 8;
        const int4 even = sums[at], odd = sums[at + 32];
        const float factor = SCALE / scales[row];
        const long target = (((long)sample * stride + token) * W + head % H * HEAD_DIM) / 8 + panel * 8 + chunk;
#if CAUSAL
        ((uint4*)d_qkv)[target] =
            make_uint4(pack(even.x * factor, odd.x * factor), pack(even.y * factor, odd.y * factor),
                       pack(even.z * factor, odd.z * factor), pack(even.w * factor, odd.w * factor));
#else
        float4* const sum = (float4*)d_qkv + 2 * target;
        const float4 low = sum[0], high = sum[1];
        sum[0] = {low.x + even.x * factor, low.y + odd.x * factor, low.z + even.y * factor, low.w + odd.y * factor};
        sum[1] = {high.x + even.z * factor, high.y + odd.z * factor, high.z + even.w * factor, high.w + odd.w * factor};
#endif
    }
}
