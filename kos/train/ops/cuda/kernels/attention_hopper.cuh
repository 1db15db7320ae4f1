// Hopper's own instructions (sm_90a): TMA loads and stores, mbarriers, wgmma, register reallocation.
//
// Tiles in shared memory lie in panels of 64 columns: rows of 128 bytes, the 16-byte chunks of row r permuted by
// xor with r mod 8 (SWIZZLE_128B), as TMA writes them and wgmma reads them.  A tile serves as a K-major operand
// (rows are M or N, columns the inner dimension) and as an MN-major one (rows are the inner dimension).
#pragma once
#include "attention.cuh"

struct alignas(64) TensorMap {
    u64 opaque[16];
};

#define PANEL_COLUMNS 64
#define PANELS (HEAD_DIM / PANEL_COLUMNS)
#define ROW_BYTES 128
#define BOX_ROWS 64                        // rows that one TMA instruction moves

__device__ inline u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// --- mbarriers: phases alternate, a fresh barrier is in phase 0 and its phase 1 counts as passed ---

__device__ inline void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void barrier_expect(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
__device__ inline void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void barrier_wait(u64* barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}\n" ::"r"(shared_address(barrier)), "r"(phase)
        : "memory");
}

// Stage and phase of a ring of shared-memory buffers.
template <int DEPTH>
struct Ring {
    int stage = 0, phase = 0;
    __device__ void next() {
        if (++stage == DEPTH) stage = 0, phase ^= 1;
    }
    __device__ Ring before() const { return stage ? Ring{stage - 1, phase} : Ring{DEPTH - 1, phase ^ 1}; }
};

// Barriers 1..15 of the block, for `threads` threads.
__device__ inline void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ inline void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// --- TMA ---

__device__ inline void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&map) : "memory");
}
__device__ inline void load_box(void* target, const TensorMap& map, u64* barrier, int column, int token, int sample) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            shared_address(target)),
        "l"((u64)&map), "r"(shared_address(barrier)), "r"(column), "r"(token), "r"(sample)
        : "memory");
}
// A tile of ROWS rows and HEAD_DIM columns; rows beyond the sample arrive as zeros.
template <int ROWS>
__device__ inline void load_tile(char* target, const TensorMap& map, u64* barrier, int column, int token, int sample) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
        for (int row = 0; row < ROWS; row += BOX_ROWS)
            load_box(target + (panel * ROWS + row) * ROW_BYTES, map, barrier, column + panel * PANEL_COLUMNS, token + row,
                     sample);
}
__device__ inline void load_bulk(void* target, const void* source, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
__device__ inline void store_box(const TensorMap& map, const void* source, int column, int token, int sample) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"((u64)&map),
                 "r"(shared_address(source)), "r"(column), "r"(token), "r"(sample)
                 : "memory");
}
__device__ inline void store_commit_and_wait() {
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- wgmma: D (64 x N fp32, in registers of a warpgroup) += A B, inner dimension 16 ---

// The lower half of an operand's descriptor; the upper half says: 128-byte swizzle, 1024 bytes from one group of 8 rows
// to the next.  `leading` is the distance in bytes between the panels of an MN-major operand wider than one.
// The compiler is kept from computing all descriptors of a loop ahead of it: they would take the registers.
#define UPPER "0x40000040"
__device__ inline u32 operand(const void* tile, int leading = 16) {
    u32 lower = (shared_address(tile) >> 4 & 0x3fff) | (leading >> 4) << 16;
    asm volatile("" : "+r"(lower));
    return lower;
}

#if IS_FLOAT16
#define WGMMA(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 "
#else
#define WGMMA(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "
#endif
#define D32                                                                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define D64                                                                                                           \
    D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
        "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define EACH4(how, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3])
#define EACH16(how, i) EACH4(how, i), EACH4(how, i + 4), EACH4(how, i + 8), EACH4(how, i + 12)
#define ADDED(x) "+f"(x)
#define WRITTEN(x) "=f"(x)  // what was there before is dead: it costs no registers

// A and B from shared memory, both K-major.
#define SHARED32(how, add)                                                                                  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " #add ", 0;\n.reg .b64 a, b; mov.b64 a, {%32, " UPPER      \
                 "}; mov.b64 b, {%33, " UPPER "};\n" WGMMA(64) "{" D32 "}, a, b, p, 1, 1, 0, 0;}"           \
                 : EACH16(how, 0), EACH16(how, 16)                                                          \
                 : "r"(a), "r"(b))
#define SHARED64(how, add)                                                                                  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " #add ", 0;\n.reg .b64 a, b; mov.b64 a, {%64, " UPPER      \
                 "}; mov.b64 b, {%65, " UPPER "};\n" WGMMA(128) "{" D64 "}, a, b, p, 1, 1, 0, 0;}"          \
                 : EACH16(how, 0), EACH16(how, 16), EACH16(how, 32), EACH16(how, 48)                        \
                 : "r"(a), "r"(b))
__device__ inline void wgmma_first(float (&d)[32], u32 a, u32 b) { SHARED32(WRITTEN, 0); }
__device__ inline void wgmma(float (&d)[32], u32 a, u32 b) { SHARED32(ADDED, 1); }
__device__ inline void wgmma_first(float (&d)[64], u32 a, u32 b) { SHARED64(WRITTEN, 0); }
__device__ inline void wgmma(float (&d)[64], u32 a, u32 b) { SHARED64(ADDED, 1); }
// A and B from shared memory, both MN-major.
#define CROSSED32(how, add)                                                                                 \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " #add ", 0;\n.reg .b64 a, b; mov.b64 a, {%32, " UPPER      \
                 "}; mov.b64 b, {%33, " UPPER "};\n" WGMMA(64) "{" D32 "}, a, b, p, 1, 1, 1, 1;}"           \
                 : EACH16(how, 0), EACH16(how, 16)                                                          \
                 : "r"(a), "r"(b))
__device__ inline void wgmma_crossed_first(float (&d)[32], u32 a, u32 b) { CROSSED32(WRITTEN, 0); }
__device__ inline void wgmma_crossed(float (&d)[32], u32 a, u32 b) { CROSSED32(ADDED, 1); }
// A from registers, B from shared memory, MN-major; adds.
__device__ inline void wgmma(float (&d)[32], const u32* a, u32 b) {
    asm volatile("{.reg .b64 b; mov.b64 b, {%36, " UPPER "};\n" WGMMA(64) "{" D32 "}, {%32, %33, %34, %35}, b, 1, 1, 1, 1;}"
                 : EACH16(ADDED, 0), EACH16(ADDED, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
__device__ inline void wgmma(float (&d)[64], const u32* a, u32 b) {
    asm volatile("{.reg .b64 b; mov.b64 b, {%68, " UPPER "};\n" WGMMA(128) "{" D64 "}, {%64, %65, %66, %67}, b, 1, 1, 1, 1;}"
                 : EACH16(ADDED, 0), EACH16(ADDED, 16), EACH16(ADDED, 32), EACH16(ADDED, 48)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most PENDING groups are in flight.
template <int PENDING>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Registers that a wgmma in flight reads or writes: nothing that touches them may move across this.
template <int N>
__device__ inline void hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ inline void hold(u32 (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// d (64 x columns) = a (64 x HEAD_DIM) b (columns x HEAD_DIM)^T.  A tile's panels are *_rows apart.
template <int N>
__device__ inline void multiply_transposed(float (&d)[N], const char* a, int a_rows, const char* b, int b_rows) {
    const u32 a0 = operand(a), b0 = operand(b);
    wgmma_fence();
    wgmma_first(d, a0, b0);
#pragma unroll
    for (int k = 1; k < HEAD_DIM / 16; ++k) {
        const int panel = k / 4, inside = k % 4 * 32;
        wgmma(d, a0 + ((panel * a_rows * ROW_BYTES + inside) >> 4), b0 + ((panel * b_rows * ROW_BYTES + inside) >> 4));
    }
    wgmma_commit();
}
// d (64 x 64) = a (ROWS x 64)^T b (ROWS x 64), a panel each.
template <int ROWS>
__device__ inline void multiply_crossed(float (&d)[32], const char* a, const char* b) {
    const u32 a0 = operand(a), b0 = operand(b);
    wgmma_fence();
    wgmma_crossed_first(d, a0, b0);
#pragma unroll
    for (int k = 1; k < ROWS / 16; ++k) wgmma_crossed(d, a0 + (k * 16 * ROW_BYTES >> 4), b0 + (k * 16 * ROW_BYTES >> 4));
    wgmma_commit();
}
// d (64 x HEAD_DIM) += a (64 x ROWS) b (ROWS x HEAD_DIM), a as packed pairs.
template <int ROWS>
__device__ inline void multiply_add(float (&d)[HEAD_DIM / 2], u32 (&a)[ROWS / 4], const char* b) {
    const u32 b0 = operand(b, ROWS * ROW_BYTES);
    hold(d);
    hold(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < ROWS / 16; ++k) wgmma(d, a + 4 * k, b0 + (k * 16 * ROW_BYTES >> 4));
    wgmma_commit();
}

// Writes d, times `factor` (one for the upper and one for the lower row of the thread), as 64 rows of a swizzled tile
// with panels `rows` apart, and from there to `map`.  All threads of the warpgroup `group` call it.
__device__ inline void store_tile(const float (&d)[HEAD_DIM / 2], float upper, float lower, char* tile, int rows, int group,
                                  const TensorMap& map, int column, int token, int sample) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int chunk = 0; chunk < HEAD_DIM / 8; ++chunk) {
        char* at = tile + (chunk / 8 * rows + row) * ROW_BYTES + (chunk % 8 ^ row % 8) * 16 + lane % 4 * 4;
        *(u32*)at = pack(d[4 * chunk] * upper, d[4 * chunk + 1] * upper);
        *(u32*)(at + 8 * ROW_BYTES) = pack(d[4 * chunk + 2] * lower, d[4 * chunk + 3] * lower);
    }
    fence_async();
    named_sync(8 + group, 128);
    if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            store_box(map, tile + panel * rows * ROW_BYTES, column + panel * PANEL_COLUMNS, token, sample);
        store_commit_and_wait();
    }
}

template <int REGISTERS>
__device__ inline void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ inline void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
