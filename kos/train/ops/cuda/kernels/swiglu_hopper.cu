// SwiGLU's backward within the matmul before it, on Hopper's tensor cores (sm_90a), in bfloat16 with sums in fp32.
//
// Computes d_gate_up (M, 2N) from gate_up (M, 2N) and d_inner = a (M, K) b (K, N).  d_inner is never written to memory.
// Values are rounded as by a separate matmul and SwiGLU, so equal sums give bitwise equal results.
//
// The kernel is persistent: each thread block computes tiles of BM x BN of d_inner one after another.  A warp of the
// third warpgroup is the producer.  It loads tiles of a and b, BK deep, by TMA into a ring of STAGES in shared memory.
// Two warpgroups are the consumers.  Each has 64 rows of the tile, and multiplies the tiles in the ring (wgmma).  One
// multiplication is in flight while the next begins, so a stage becomes free for the producer one step later.
//
// After the last multiplication of a tile, each of the next stages of the ring holds gate and up of 64 of its columns.
// They are loaded while the tensor cores are still busy.  Consumers replace gate and up by their gradients, and TMA
// writes these from the stage to memory.  Such a stage becomes free when the next one is written.  The last one of a
// tile becomes free during the block's next tile.
//
// Rows must begin at multiples of 16 bytes, and N must be a multiple of 64.
//
// The matmul has the design of DeepGEMM (github.com/deepseek-ai/DeepGEMM), of CUTLASS's cooperative kernel, and of the
// example that github.com/pranjalssh published.
#include "matmul_hopper.cuh"
#include "swiglu.cuh"

constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4, GROUP = 16;
constexpr int CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);
constexpr int PANELS = (BM + BN) / 64, STAGE_BYTES = PANELS * PANEL_BYTES;
constexpr int A_BYTES = BM / 64 * PANEL_BYTES, UP = CONSUMERS * PANEL_BYTES;  // where b begins, and where up does

struct Shared {
    u64 full[STAGES], empty[STAGES];
};

struct Size {
    int M, N, K;
};

__device__ inline void produce(char* ring_memory, Shared& shared, const TensorMap& map_a, const TensorMap& map_b,
                               const TensorMap& map_gate_up, const Size& size) {
    Ring<STAGES> ring;
    // Waits for memory, and announces `panels`.
    auto next = [&](int panels) {
        barrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
        barrier_expect(&shared.full[ring.stage], panels * PANEL_BYTES);
        return ring_memory + ring.stage * STAGE_BYTES;
    };
    auto load = [&](char* at, const TensorMap& map, int column, int row) {
        load_box(at, map, &shared.full[ring.stage], column, 0, row, 0);
    };
    for_each_tile<BM, BN, GROUP>(size.M, size.N, [&](int m, int n) {
        for (int k = 0; k < size.K; k += BK, ring.next()) {
            char *a = next(PANELS), *b = a + A_BYTES;
            load(a, map_a, k, m);
            load(a + PANEL_BYTES, map_a, k, m + 64);
#pragma unroll
            for (int i = 0; i < BN / 64; ++i) load(b + i * PANEL_BYTES, map_b, n + i * 64, k);
        }
        for (int column = n; column < min(n + BN, size.N); column += 64, ring.next()) {
            char* at = next(4);
#pragma unroll
            for (int i = 0; i < 4; ++i) load(at + i * PANEL_BYTES, map_gate_up, column + i / 2 * size.N, m + i % 2 * 64);
        }
    });
}

// Loads and stores the 8 elements of 16 neighbouring columns that a thread has after wgmma, from and to shared memory.
__device__ inline void load_8(float (&y)[8], const char* at) {
    u32 r[4];
    load_four(r, shared_address(at));
    unpack(y, Quad{r[0], r[1], r[2], r[3]}, bfloat16());
}
__device__ inline void store_8(const char* at, const float (&y)[8]) {
    const Quad q = packed(y, bfloat16());
    const u32 x[4] = {q.x, q.y, q.z, q.w};
    store_four(at, x);
}

// Replaces gate and up by their gradients, in 64 columns of this warpgroup's rows.
__device__ inline void replace(const float* d, char* memory) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        char* at = memory + row * ROW_BYTES + ((pair * 2 + lane / 16) ^ row % 8) * 16;
        float d_inner[8], gate[8], up[8];
        unpack(d_inner, packed(d + pair * 8, bfloat16()), bfloat16());
        load_8(gate, at);
        load_8(up, at + UP);
        apply_swiglu_backward<bfloat16>(d_inner, gate, up);
        store_8(at, gate);
        store_8(at + UP, up);
    }
}

__device__ inline void consume(char* ring_memory, Shared& shared, const TensorMap& map_d_gate_up, const Size& size) {
    const int consumer = threadIdx.x / 128;
    const bool first = threadIdx.x % 128 == 0;
    const u32 a0 = operand(ring_memory + consumer * PANEL_BYTES), b0 = operand(ring_memory + A_BYTES, PANEL_BYTES);
    // Each warp frees a stage by itself, because it waits for its own rows only.
    auto release = [&](int stage) {
        if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[stage]);
    };
    Ring<STAGES> ring;
    bool writing = false;  // whether TMA still reads the previous stage
    for_each_tile<BM, BN, GROUP>(size.M, size.N, [&](int m, int n) {
        float d[BN / 2];
        for (int k = 0; k < size.K; k += BK, ring.next()) {
            barrier_wait(&shared.full[ring.stage], ring.phase);
            const u32 a = a0 + ring.stage * (STAGE_BYTES >> 4), b = b0 + ring.stage * (STAGE_BYTES >> 4);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BK / 16; ++i)
                wgmma(d, a + i * (32 >> 4), b + i * (16 * ROW_BYTES >> 4), i > 0 || k > 0);
            wgmma_commit();
            if (k > 0) {
                wgmma_wait<1>();
            } else if (writing) {
                if (first) store_wait();
                named_sync(1 + consumer, 128);
            }
            if (k > 0 || writing) release(ring.before().stage);
        }
        wgmma_wait<0>();
        hold(d);
        release(ring.before().stage);
#pragma unroll 1
        for (int column = n; column < min(n + BN, size.N); column += 64, ring.next()) {
            char* memory = ring_memory + ring.stage * STAGE_BYTES + consumer * PANEL_BYTES;
            barrier_wait(&shared.full[ring.stage], ring.phase);
            replace(d, memory);
            fence_async();
            if (first) store_wait();
            named_sync(1 + consumer, 128);
            if (first) {
                store_box(map_d_gate_up, memory, column, 0, m + consumer * 64, 0);
                store_box(map_d_gate_up, memory + UP, size.N + column, 0, m + consumer * 64, 0);
                store_commit();
            }
            if (column > n) release(ring.before().stage);
            // Moves the next columns to the same registers, so that the kernel has their code once.  It compiles in
            // half the time.
#pragma unroll
            for (int i = 32; i < BN / 2; ++i) d[i - 32] = d[i];
        }
        writing = true;
    });
    if (first) store_wait();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
linear_swiglu_backward(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                       const __grid_constant__ TensorMap map_gate_up, const __grid_constant__ TensorMap map_d_gate_up,
                       int M, int N, int K) {
    extern __shared__ char raw[];
    char* ring_memory = raw + (-shared_address(raw) & 1023);
    Shared& shared = *(Shared*)(ring_memory + STAGES * STAGE_BYTES);
    const Size size{M, N, K};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(&shared.full[stage], 1);
            barrier_init(&shared.empty[stage], CONSUMERS * 4);
        }
        fence_async();
        prefetch_map(map_a), prefetch_map(map_b), prefetch_map(map_gate_up), prefetch_map(map_d_gate_up);
    }
    __syncthreads();
    if (threadIdx.x / 128 == CONSUMERS) {
        registers_down<40>();
        if (threadIdx.x == 128 * CONSUMERS) produce(ring_memory, shared, map_a, map_b, map_gate_up, size);
    } else {
        registers_up<232>();
        consume(ring_memory, shared, map_d_gate_up, size);
    }
}
