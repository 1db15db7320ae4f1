// Matmuls whose sums are added part by part, in a fixed order, on Hopper's tensor cores (sm_90a), in bfloat16.
//
// Computes out (M, N) = a (M, K) b, where b is (N, K) with -DB_ROWS=1, and (K, N) with -DB_ROWS=0.  K is split in PARTS
// parts.  The terms of a part are added one after another in fp32.  The sums of the parts are added as a binary tree,
// ((p0 + p1) + (p2 + p3)) + ..., and the result is rounded once to OUT.  So a rank that has half of the parts computes a
// subtree, and its sum has the bits that the same parts have on one rank.
//
// If an output has fewer tiles than the GPU has multiprocessors, the sum of each of APART parts is computed by itself, to
// out (APART, M, N) in float32; `add_tree` adds them.  PARTS is 1 then.
//
// A part has the same share of each member, one after another: of member i, the columns of a from start[i] + part
// length[i] on, length[i] of them.  Each length must be a multiple of 64.  Members that do not exist have length 0.
//
// The kernel has the design of swiglu_hopper.cu: a producer warp loads tiles by TMA into a ring of STAGES, and two
// warpgroups multiply them, each for 64 rows of a tile of 128 x 128.  A tile of this size leaves registers for the sums
// that wait for others: one for each level of the tree.  With 4 or 8 parts, that of the highest level waits in shared
// memory.
//
// -DPARTS (1, 2, 4 or 8) -DAPART -DSTAGES -DB_ROWS -DOUT (float32 or bfloat16)
#include "matmul_hopper.cuh"
#include "vectors.cuh"

constexpr int BM = 128, BN = 128, BK = 64, GROUP = 16;
constexpr int CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1), MEMBERS = 3;
constexpr int B = BM / 64 * PANEL_BYTES, STAGE_BYTES = (BM + BN) / 64 * PANEL_BYTES;  // B: where b begins in a stage
constexpr int WAITING_BYTES = PARTS >= 4 ? 4 * BM * BN : 0, OUT_BYTES = sizeof(OUT) == 2 ? 2 * BM * BN : 0;

struct Shared {
    u64 full[STAGES], empty[STAGES];
};

struct Members {
    int start[MEMBERS], length[MEMBERS];
    __device__ int steps() const { return (length[0] + length[1] + length[2]) / BK; }  // of a part
};

// Calls what(part, row, column) for each tile of this block: the first of its parts, and where it lies.
template <typename What>
__device__ inline void for_each_output(int M, int N, What what) {
    const int rows = (M + BM - 1) / BM * BM;
    for_each_tile<BM, BN, GROUP>(APART * rows, N, [&](int m, int n) { what(m / rows, m % rows, n); });
}

__device__ inline void produce(char* ring_memory, Shared& shared, const TensorMap& map_a, const TensorMap& map_b, int M,
                               int N, const Members& members) {
    Ring<STAGES> ring;
    for_each_output(M, N, [&](int first, int m, int n) {
        auto load = [&](int k) {
            char *a = ring_memory + ring.stage * STAGE_BYTES, *b = a + B;
            u64* full = &shared.full[ring.stage];
            barrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
            barrier_expect(full, STAGE_BYTES);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                load_box(a + i * PANEL_BYTES, map_a, full, k, 0, m + i * 64, 0);
                if (B_ROWS)
                    load_box(b + i * PANEL_BYTES, map_b, full, k, 0, n + i * 64, 0);
                else
                    load_box(b + i * PANEL_BYTES, map_b, full, n + i * 64, 0, k, 0);
            }
            ring.next();
        };
        for (int part = first; part < first + PARTS; ++part)
#pragma unroll
            for (int i = 0; i < MEMBERS; ++i)
                for (int k = 0; k < members.length[i]; k += BK) load(members.start[i] + part * members.length[i] + k);
    });
}

// A warpgroup that multiplies.
struct Consumer {
    Shared& shared;
    u32 a0, b0;  // its rows of a, and b, in the first stage
    int steps;
    float* waiting;  // this thread's column of sums that wait in shared memory
    Ring<STAGES> ring = {};

    __device__ void release(int stage) {  // each warp by itself, because it waits for its own rows only
        if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[stage]);
    }

    // d = the sum of the next part.
    __device__ void multiply(float (&d)[64]) {
#pragma unroll
        for (int i = 0; i < 64; ++i) d[i] = 0;  // says that the registers are free: otherwise the compiler needs more
        for (int step = 0; step < steps; ++step, ring.next()) {
            barrier_wait(&shared.full[ring.stage], ring.phase);
            const u32 a = a0 + ring.stage * (STAGE_BYTES >> 4), b = b0 + ring.stage * (STAGE_BYTES >> 4);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BK / 16; ++i)
                if (B_ROWS)
                    wgmma(d, a + i * (32 >> 4), b + i * (32 >> 4));
                else
                    wgmma_b_crossed(d, a + i * (32 >> 4), b + i * (16 * ROW_BYTES >> 4));
            wgmma_commit();
            if (step > 0) {
                wgmma_wait<1>();
                release(ring.before().stage);
            }
        }
        wgmma_wait<0>();
        hold(d);
        release(ring.before().stage);
    }

    // d = the sum of the next COUNT parts, as a binary tree.
    template <int COUNT>
    __device__ void add_parts(float (&d)[64]) {
        if constexpr (COUNT == 1) {
            multiply(d);
        } else {
            constexpr bool IN_MEMORY = COUNT == PARTS && WAITING_BYTES;
            add_parts<COUNT / 2>(d);
            float left[64];
#pragma unroll
            for (int i = 0; i < 64; ++i)
                if (IN_MEMORY)
                    waiting[i * 128 * CONSUMERS] = d[i];
                else
                    left[i] = d[i];
            add_parts<COUNT / 2>(d);
#pragma unroll
            for (int i = 0; i < 64; ++i) d[i] = (IN_MEMORY ? waiting[i * 128 * CONSUMERS] : left[i]) + d[i];
        }
    }
};

// Writes 64 rows of a tile, from row m and column n of out on, by way of `memory`.
__device__ inline void write(const float (&d)[64], char* memory, const TensorMap& map_out, int m, int n) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16, group = threadIdx.x / 128;
    const bool first = threadIdx.x % 128 == 0;
    if (first) store_wait();
    named_sync(1 + group, 128);
#pragma unroll
    for (int i = 0; i < BN / 16; ++i) {
        const Quad q = packed(d + i * 8, bfloat16());
        const u32 x[4] = {q.x, q.y, q.z, q.w};
        store_four(memory + i / 4 * PANEL_BYTES + row * ROW_BYTES + ((i % 4 * 2 + lane / 16) ^ row % 8) * 16, x);
    }
    fence_async();
    named_sync(1 + group, 128);
    if (first) {
#pragma unroll
        for (int i = 0; i < BN / 64; ++i) store_box(map_out, memory + i * PANEL_BYTES, n + i * 64, 0, m, 0);
        store_commit();
    }
}

struct __align__(8) Pair {
    float x, y;
};
// Writes 64 rows of a tile from registers.
__device__ inline void write(const float (&d)[64], float* out, int M, int N, int m, int n) {
    const int lane = threadIdx.x % 32, row = m + threadIdx.x / 32 % 4 * 16 + lane / 4, column = n + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
        const int r = row + i % 4 / 2 * 8, c = column + i / 4 * 8;
        if (r < M && c < N) *(Pair*)(out + long(r) * N + c) = {d[i], d[i + 1]};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
linear_parts(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
             const __grid_constant__ TensorMap map_out, OUT* out, int M, int N, int start0, int length0, int start1,
             int length1, int start2, int length2) {
    extern __shared__ char raw[];
    char* ring_memory = raw + (-shared_address(raw) & 1023);
    char* out_memory = ring_memory + STAGES * STAGE_BYTES;
    float* waiting = (float*)(out_memory + OUT_BYTES);
    Shared& shared = *(Shared*)(out_memory + OUT_BYTES + WAITING_BYTES);
    const Members members = {{start0, start1, start2}, {length0, length1, length2}};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(&shared.full[stage], 1);
            barrier_init(&shared.empty[stage], CONSUMERS * 4);
        }
        fence_async();
        prefetch_map(map_a), prefetch_map(map_b);
    }
    __syncthreads();
    const int group = threadIdx.x / 128;
    if (group == CONSUMERS) {
        registers_down<40>();
        if (threadIdx.x == 128 * CONSUMERS) produce(ring_memory, shared, map_a, map_b, M, N, members);
        return;
    }
    registers_up<232>();
    Consumer consumer = {shared, operand(ring_memory + group * PANEL_BYTES),
                         operand(ring_memory + B, B_ROWS ? 16 : PANEL_BYTES), members.steps(), waiting + threadIdx.x};
    for_each_output(M, N, [&](int part, int m, int n) {
        float d[64];
        consumer.add_parts<PARTS>(d);
        if constexpr (sizeof(OUT) == 2)
            write(d, out_memory + group * (BN / 64) * PANEL_BYTES, map_out, m + group * 64, n);
        else
            write(d, (float*)out + long(part) * M * N, M, N, m + group * 64, n);
    });
    if (sizeof(OUT) == 2 && threadIdx.x % 128 == 0) store_wait();
}
