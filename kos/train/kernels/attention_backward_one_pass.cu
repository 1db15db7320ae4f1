// Causal attention, backward, on Hopper, in one pass: five products a tile.
//
// A block owns 128 keys of a key/value head, a warpgroup 64, and streams the queries after them, of all query heads that
// share the head.  Scores are kept transposed, so that P^T and dS^T are in registers as the products want them:
//   S^T = K Q^T, P^T = exp(S^T - lse), dP^T = V dO^T, dS^T = P^T (dP^T - delta); dV += P^T dO, dK += dS^T Q.
// dQ = dS K alone needs all keys of the block: dS goes through shared memory, each warpgroup multiplies half of the
// tile (64 columns of one head size, 64 queries of the other), and does so a step late, so that neither waits for the
// other and the product runs while dS of this step is computed.
//
// dQ is a sum over blocks.  A tile of it leaves by one bulk addition into fp32 scratch memory, and blocks take turns
// at a tile in the order of their keys (``turns``): every sum has one order and is bit-equal from run to run.  Nobody
// waits long: blocks start in that order too, and all go through the queries from the last to the first, so they pass
// the same tiles one behind the other.  A block waits only for blocks that started before it: no deadlock.
// attention_backward_dq narrows the scratch to dQ.  It lies as the registers of the warpgroups: see chunk_of.
//
// The first warpgroup serves: one thread issues the loads, another the additions.
#include "attention_hopper.cuh"

#ifndef BACKWARD_STAGES
#define BACKWARD_STAGES 2
#endif
#define STAGES BACKWARD_STAGES
#define STEP (HEAD_DIM == 64 ? 128 : 64)  // queries of a tile: dQ of it is two panels of 64 x 64
#define GROUPS 2
#define OWN (64 * GROUPS)  // keys of a block
#define OWN_BYTES (OWN * HEAD_DIM * 2)
#define THREADS (128 * (GROUPS + 1))
#define STEP_BYTES (STEP * HEAD_DIM * 2)
#define STATISTICS_BYTES (STEP * 2 * 4)
#define CHUNK_FLOATS (64 * 64)
#define SLOPE_BYTES (OWN * STEP * 2)
static_assert(PAD % OWN == 0 && OWN % STEP == 0, "tiles are read and written whole");

extern __shared__ char raw[];

struct Shared {
    alignas(1024) char k[OWN_BYTES];  // becomes dK
    alignas(1024) char v[OWN_BYTES];  // becomes dV
    alignas(1024) char q[STAGES][STEP_BYTES];
    alignas(1024) char d_out[STAGES][STEP_BYTES];
    alignas(1024) char slopes[2][SLOPE_BYTES];  // dS^T: panels of 64 queries, rows are keys
    alignas(1024) float dq[2 * CHUNK_FLOATS];
    alignas(128) float statistics[STAGES][STEP / 64][2][64];
    u64 own_full, full[STAGES], empty[STAGES], slopes_full[2], slopes_empty[2], dq_full, dq_empty;
};

// The 64 x 64 chunks of the scratch for dQ: for each head and 64 tokens one for each panel of columns.
__device__ inline long chunk_of(int head, int token, int T) { return ((long)head * (padded(T) / 64) + token / 64) * PANELS; }

// The steps of a block: of each query head, tiles of queries from the last to that on the diagonal.
struct Steps {
    int head, token, last_head, first, last;
    __device__ Steps(int kv_head, int group, int first, int T)
        : head(kv_head * group), last_head(head + group), first(first), last((T - 1) / STEP * STEP) {
        token = last;
    }
    __device__ bool more() const { return head < last_head; }
    __device__ void next() {
        token -= STEP;
        if (token < first) token = last, ++head;
    }
};

__device__ inline void load(Shared& s, const TensorMap& qkv, const TensorMap& d_out, const float* statistics, Steps step,
                            int kv_head, int sample, int T, int H, int K) {
    barrier_expect(&s.own_full, 2 * OWN_BYTES);
    load_tile<OWN>(s.k, qkv, &s.own_full, (H + kv_head) * HEAD_DIM, step.first, sample);
    load_tile<OWN>(s.v, qkv, &s.own_full, (H + K + kv_head) * HEAD_DIM, step.first, sample);
    for (Ring<STAGES> ring; step.more(); step.next(), ring.next()) {
        const int i = ring.stage;
        u64* full = &s.full[i];
        barrier_wait(&s.empty[i], ring.phase ^ 1);
        barrier_expect(full, 2 * STEP_BYTES + STATISTICS_BYTES);
        load_tile<STEP>(s.q[i], qkv, full, step.head * HEAD_DIM, step.token, sample);
        load_bulk(s.statistics[i], statistics + statistics_at(sample * H + step.head, step.token, T), STATISTICS_BYTES, full);
        load_tile<STEP>(s.d_out[i], d_out, full, step.head * HEAD_DIM, step.token, sample);
    }
}

// Adds tile after tile of dQ to the scratch, when it is this block's turn: as many came before it as keys did.
__device__ inline void add(Shared& s, float* scratch, int* turns, Steps step, int block, int sample, int T, int H) {
    for (int phase = 0; step.more(); step.next(), phase ^= 1) {
        const long chunk = chunk_of(sample * H + step.head, step.token, T);
        int* turn = turns + chunk / PANELS;
        float* target = scratch + chunk * CHUNK_FLOATS;
        barrier_wait(&s.dq_full, phase);
        if (block == 0)
            store_bulk(target, s.dq, sizeof(s.dq));
        else {
            int now;
            do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
            while (now != block);
            asm volatile("fence.proxy.async;" ::: "memory");
            add_bulk(target, s.dq, sizeof(s.dq));
        }
        asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
        barrier_arrive(&s.dq_empty);
        asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async;" ::: "memory");
        asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(block + 1) : "memory");
    }
}

__device__ inline void store_matrices(const u32* r, const char* at) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(at)), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// What a warpgroup of consumers keeps from step to step.
struct Consumer {
    Shared& s;
    Steps step;
    const int group, lane, warp_row, first_key, key;
    char *const k, *const v;
    const char* const k_panel;
    const int slope_panel;
    float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];
    Ring<STAGES> ring;
    Ring<2> now, before;  // buffers of dS: of this step and of the last
    int dq_phase = 0;

    __device__ Consumer(Shared& s, const Steps& step, int group)
        : s(s), step(step), group(group), lane(threadIdx.x % 32), warp_row(group * 64 + threadIdx.x / 32 % 4 * 16),
          first_key(step.first + group * 64), key(step.first + warp_row + lane / 4), k(s.k + group * 64 * ROW_BYTES),
          v(s.v + group * 64 * ROW_BYTES), k_panel(s.k + (HEAD_DIM == 64 ? 0 : group) * OWN * ROW_BYTES),
          slope_panel((HEAD_DIM == 64 ? group : 0) * OWN * ROW_BYTES) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = dv[i] = 0;
    }
    __device__ void done(u64* barrier) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    }
    __device__ void multiply_dq(float (&dq)[32]) const {
        barrier_wait(&s.slopes_full[before.stage], before.phase);
        multiply_panels<OWN>(dq, s.slopes[before.stage] + slope_panel, k_panel);
    }
    __device__ void write_dq(const float (&dq)[32]) {
        barrier_wait(&s.dq_empty, dq_phase ^ 1);
        float4* target = (float4*)(s.dq + group * CHUNK_FLOATS) + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < 8; ++i) target[i * 128] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
        fence_async();
        done(&s.dq_full);
        dq_phase ^= 1;
    }

    template <bool FIRST>  // the first step has no dQ of a step before it
    __device__ void work() {
        const int i = ring.stage;
        float scores[STEP / 2], d_probabilities[STEP / 2], dq[32];
        u32 probabilities[STEP / 4], slopes[STEP / 4];
        barrier_wait(&s.full[i], ring.phase);
        multiply_transposed(scores, k, OWN, s.q[i], STEP);
        if constexpr (!FIRST) multiply_dq(dq);
        wgmma_wait<FIRST ? 0 : 1>();
        hold(scores);
#pragma unroll
        for (int j = 0; j < STEP / 2; j += 4) {
            const int query = j * 2 + lane % 4 * 2;
            const float2 lse = *(const float2*)&s.statistics[i][query / 64][0][query % 64];
            scores[j] = exp2_fast(scores[j] * LOG2_SCALE - lse.x);
            scores[j + 1] = exp2_fast(scores[j + 1] * LOG2_SCALE - lse.y);
            scores[j + 2] = exp2_fast(scores[j + 2] * LOG2_SCALE - lse.x);
            scores[j + 3] = exp2_fast(scores[j + 3] * LOG2_SCALE - lse.y);
        }
        if (step.token < first_key + 64)
#pragma unroll
            for (int j = 0; j < STEP / 2; ++j)
                if (step.token + COLUMN_OF(j, lane) < key + LOWER(j) * 8) scores[j] = 0;
#pragma unroll
        for (int j = 0; j < STEP / 4; ++j) probabilities[j] = pack(scores[2 * j], scores[2 * j + 1]);
        if constexpr (!FIRST) {
            wgmma_wait<0>();
            hold(dq);
            done(&s.slopes_empty[before.stage]);
            write_dq(dq);
        }
        multiply_transposed(d_probabilities, v, OWN, s.d_out[i], STEP);
        multiply_add<STEP>(dv, probabilities, s.d_out[i]);
        wgmma_wait<1>();
        hold(d_probabilities);
        barrier_wait(&s.slopes_empty[now.stage], now.phase ^ 1);
#pragma unroll
        for (int j = 0; j < STEP / 2; j += 4) {
            const int query = j * 2 + lane % 4 * 2;
            const float2 delta = *(const float2*)&s.statistics[i][query / 64][1][query % 64];
            const float2 upper = unpack(probabilities[j / 2]), lower = unpack(probabilities[j / 2 + 1]);
            slopes[j / 2] = pack(upper.x * (d_probabilities[j] - delta.x), upper.y * (d_probabilities[j + 1] - delta.y));
            slopes[j / 2 + 1] = pack(lower.x * (d_probabilities[j + 2] - delta.x), lower.y * (d_probabilities[j + 3] - delta.y));
        }
#pragma unroll
        for (int j = 0; j < STEP / 16; ++j) {
            const int row = warp_row + lane % 16, chunk = 2 * j + lane / 16;
            store_matrices(slopes + 4 * j,
                           s.slopes[now.stage] + (chunk / 8 * OWN + row) * ROW_BYTES + (chunk % 8 ^ row % 8) * 16);
        }
        fence_async();
        done(&s.slopes_full[now.stage]);
        multiply_add<STEP>(dk, slopes, s.q[i]);
        wgmma_wait<0>();
        hold(slopes);
        hold(probabilities);
        hold(dk);
        hold(dv);
        done(&s.empty[i]);
        before = now;
        step.next();
        ring.next();
        now.next();
    }

    __device__ void run(const TensorMap& d_qkv, int k_column, int v_column, int sample) {
        barrier_wait(&s.own_full, 0);
        work<true>();
        while (step.more()) work<false>();
        float dq[32];
        multiply_dq(dq);
        wgmma_wait<0>();
        hold(dq);
        write_dq(dq);
        named_sync(1, 128 * GROUPS);  // K is not read any more
        store_tile(dv, 1, 1, v, OWN, group, d_qkv, v_column, first_key, sample);
        store_tile(dk, SCALE, SCALE, k, OWN, group, d_qkv, k_column, first_key, sample);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward(const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap d_out,
                       const __grid_constant__ TensorMap d_qkv, const float* statistics, float* scratch, int* turns,
                       int samples, int T, int H, int K, int section) {
    Shared& s = *(Shared*)(((u64)raw + 1023) & ~1023ull);
    const Place at = place(blockIdx.x, samples * K, (T + OWN - 1) / OWN, section);
    const int sample = at.head / K, kv_head = at.head % K;
    const Steps steps(kv_head, H / K, at.block * OWN, T);
    if (threadIdx.x == 0) {
        prefetch_map(qkv);
        prefetch_map(d_out);
        barrier_init(&s.own_full, 1);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 4 * GROUPS);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(&s.slopes_full[i], 4 * GROUPS);
            barrier_init(&s.slopes_empty[i], 4 * GROUPS);
        }
        barrier_init(&s.dq_full, 4 * GROUPS);
        barrier_init(&s.dq_empty, 1);
        fence_async();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<24>();
        if (threadIdx.x == 0)
            load(s, qkv, d_out, statistics, steps, kv_head, sample, T, H, K);
        else if (threadIdx.x == 32)
            add(s, scratch, turns, steps, at.block, sample, T, H);
    } else {
        registers_up<240>();
        Consumer consumer(s, steps, __shfl_sync(~0u, threadIdx.x / 128 - 1, 0));
        consumer.run(d_qkv, (H + kv_head) * HEAD_DIM, (H + K + kv_head) * HEAD_DIM, sample);
    }
}

// dQ from the scratch: a block for each chunk, threads as in the warpgroup that computed it.
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_dq(const float4* scratch, u16* d_qkv, int samples, int T, int H, int K) {
    const int lane = threadIdx.x % 32, panel = blockIdx.x % PANELS, blocks = padded(T) / 64;
    const int head = blockIdx.x / PANELS / blocks, row = threadIdx.x / 32 * 16 + lane / 4;
    const int token = blockIdx.x / PANELS % blocks * 64 + row;
    const long width = (long)(H + 2 * K) * HEAD_DIM;
    u16* target = d_qkv + ((long)(head / H) * T + token) * width + head % H * HEAD_DIM + panel * 64 + lane % 4 * 2;
    const float4* source = scratch + (long)blockIdx.x * (CHUNK_FLOATS / 4) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (token >= T) break;
        const float4 x = source[i * 128];
        *(u32*)(target + 8 * i) = pack(x.x * SCALE, x.y * SCALE);
        if (token + 8 < T) *(u32*)(target + 8 * width + 8 * i) = pack(x.z * SCALE, x.w * SCALE);
    }
}
