// Hopper's own instructions (sm_90a): TMA loads and stores, mbarriers, wgmma, register reallocation.
//
// Tiles in shared memory lie in panels of 64 columns: rows of 128 bytes, the 16-byte chunks of row r permuted by
// xor with r mod 8 (SWIZZLE_128B), as TMA writes them and wgmma reads them.  A tile serves as a K-major operand
// (rows are M or N, columns the inner dimension) and as an MN-major one (rows are the inner dimension).
#pragma once

using u32 = unsigned int;
using u64 = unsigned long long;

#ifndef IS_FLOAT16
#define IS_FLOAT16 0                       // the 16-bit type is bfloat16
#endif

struct alignas(64) TensorMap {
    u64 opaque[16];
};

#define PANEL_COLUMNS 64
#define ROW_BYTES 128

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

// --- TMA: boxes of 64 columns of a head and 64 tokens; what lies beyond a head or a sample is read as 0, not written ---

__device__ inline void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&map) : "memory");
}
__device__ inline void load_box(void* target, const TensorMap& map, u64* barrier, int column, int head, int token,
                                int sample) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            shared_address(target)),
        "l"((u64)&map), "r"(shared_address(barrier)), "r"(column), "r"(head), "r"(token), "r"(sample)
        : "memory");
}
__device__ inline void load_bulk(void* target, const void* source, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
__device__ inline void store_box(const TensorMap& map, const void* source, int column, int head, int token, int sample) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"((u64)&map),
                 "r"(shared_address(source)), "r"(column), "r"(head), "r"(token), "r"(sample)
                 : "memory");
}
__device__ inline void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all committed stores of this thread have read their source.
__device__ inline void store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- 16-bit matrices of 8 x 8 in shared memory, four at once: lane l has the address of row l % 8 of matrix l / 8 ---

__device__ inline void load_four(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ inline void store_four(const void* at, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(at)), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// --- wgmma: D (64 x N fp32, in registers of a warpgroup) += A B, inner dimension 16 ---

// The lower half of an operand's descriptor; the upper half says: 128-byte swizzle, 1024 bytes from one group of 8 rows
// to the next.  `leading` is the distance in bytes between the panels of an MN-major operand wider than one.
// The empty statement keeps the compiler from computing all descriptors before a loop, where they would use up the registers.
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
#define D40 D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define D48 D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define D64 D48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define EACH4(how, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3])
#define EACH8(how, i) EACH4(how, i), EACH4(how, i + 4)
#define EACH16(how, i) EACH8(how, i), EACH8(how, i + 8)
#define ADDED(x) "+f"(x)
#define WRITTEN(x) "=f"(x)  // the old value is not read, so it needs no registers

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
#define FROM_REGISTERS(VALUES, N, D, A, B, ...)                                                                      \
    __device__ inline void wgmma(float (&d)[VALUES], const u32* a, u32 b) {                                      \
        asm volatile("{.reg .b64 b; mov.b64 b, {" B ", " UPPER "};\n" WGMMA(N) "{" D "}, {" A "}, b, 1, 1, 1, 1;}" \
                     : __VA_ARGS__                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                                      \
    }
FROM_REGISTERS(32, 64, D32, "%32, %33, %34, %35", "%36", EACH16(ADDED, 0), EACH16(ADDED, 16))
FROM_REGISTERS(40, 80, D40, "%40, %41, %42, %43", "%44", EACH16(ADDED, 0), EACH16(ADDED, 16), EACH8(ADDED, 32))
FROM_REGISTERS(48, 96, D48, "%48, %49, %50, %51", "%52", EACH16(ADDED, 0), EACH16(ADDED, 16), EACH16(ADDED, 32))
FROM_REGISTERS(64, 128, D64, "%64, %65, %66, %67", "%68", EACH16(ADDED, 0), EACH16(ADDED, 16), EACH16(ADDED, 32), EACH16(ADDED, 48))
// A and B from shared memory, A K-major and B MN-major; adds.
__device__ inline void wgmma_b_crossed(float (&d)[64], u32 a, u32 b) {
    asm volatile("{.reg .b64 a, b; mov.b64 a, {%64, " UPPER "}; mov.b64 b, {%65, " UPPER "};\n" WGMMA(128) "{" D64
                 "}, a, b, 1, 1, 1, 0, 1;}"
                 : EACH16(ADDED, 0), EACH16(ADDED, 16), EACH16(ADDED, 32), EACH16(ADDED, 48)
                 : "r"(a), "r"(b));
}
#define D128 \
    D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
        ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define EACH32(how, i) EACH16(how, i), EACH16(how, i + 16)
#define EACH64(how, i) EACH32(how, i), EACH32(how, i + 32)
// A and B from shared memory, A K-major and B MN-major.  Adds to d if `add`, else overwrites it.
__device__ inline void wgmma(float (&d)[128], u32 a, u32 b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %130, 0;\n.reg .b64 a, b; mov.b64 a, {%128, " UPPER "}; mov.b64 b, {%129, " UPPER
                 "};\n" WGMMA(256) "{" D128 "}, a, b, p, 1, 1, 0, 1;}"
                 : EACH64(ADDED, 0), EACH64(ADDED, 64)
                 : "r"(a), "r"(b), "r"(add));
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING groups are in flight.
template <int PENDING>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Pins registers that a wgmma in flight reads or writes: the compiler may not move accesses to them across this.
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

template <int REGISTERS>
__device__ inline void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ inline void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
