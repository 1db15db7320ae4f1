// What takes PTX to say: accesses to memory that ranks share, and conversions of floats.
#pragma once

using u64 = unsigned long long;

// Launched while the kernel before it in the stream still runs (programmatic dependent launch): the blocks are in
// place when that one ends.  Lets the next kernel do the same, as soon as all blocks of this one are in place.
__device__ __forceinline__ void after_former_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
#endif
}

// The same for kernels that move megabytes.  The next kernel becomes resident only when the kernel before this one has
// ended, so at most two kernels share the multiprocessors.  16 MB between 2 H100 take 54.1 instead of 57.0 us, but 1 KB
// takes 2.4 instead of 2.2 us.
__device__ __forceinline__ void after_former_large_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A barrier of a part of the block: ``threads`` threads, whole warps.
__device__ __forceinline__ void part_barrier(unsigned part, unsigned threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(part + 1), "r"(threads) : "memory");
}

__device__ inline unsigned load_relaxed(u64 address) {
    unsigned value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
__device__ inline void store_relaxed(u64 address, unsigned value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ inline unsigned load_acquire(u64 address) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
__device__ inline void store_release(u64 address, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Of what only this GPU reads.
__device__ inline void store_release_gpu(u64 address, unsigned value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// 16 bytes of memory that other ranks read or write.
struct Vector {
    unsigned x[4];
};
__device__ __forceinline__ void load(Vector& v, u64 address) {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
                 : "l"(address));
}
__device__ __forceinline__ void store(u64 address, const Vector& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x[0]), "r"(v.x[1]),
                 "r"(v.x[2]), "r"(v.x[3])
                 : "memory");
}

__device__ inline u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// One element, wherever it lies.
template <class V> __device__ __forceinline__ V load_element(u64 address) {
    return *reinterpret_cast<const volatile V*>(address);
}
template <class V> __device__ __forceinline__ void store_element(u64 address, V value) {
    *reinterpret_cast<volatile V*>(address) = value;
}

// 16 bytes in one access, which is single-copy atomic.  The load is volatile, because ptxas narrows a relaxed one to
// the words that are used, and reads them one by one.
__device__ __forceinline__ void store_whole(u64 address, u64 low, u64 high) {
    asm volatile("{ .reg .b128 x; mov.b128 x, {%1, %2}; st.relaxed.sys.global.b128 [%0], x; }" ::"l"(address), "l"(low),
                 "l"(high)
                 : "memory");
}
__device__ __forceinline__ void load_whole(u64 address, u64& low, u64& high) {
    asm volatile("{ .reg .b128 x; ld.volatile.global.b128 x, [%2]; mov.b128 {%0, %1}, x; }"
                 : "=l"(low), "=l"(high)
                 : "l"(address)
                 : "memory");
}

__device__ __forceinline__ float from_half(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ unsigned short to_half(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ unsigned short to_bfloat16(float x) {
    unsigned short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
// Pairs, the first in the low bits.
__device__ __forceinline__ unsigned to_halves(float low, float high) {
    unsigned halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
    return halves;
}
__device__ __forceinline__ unsigned short halves_to_e4m3(unsigned halves) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(pair) : "r"(halves));
    return pair;
}
__device__ __forceinline__ unsigned e4m3_to_halves(unsigned short pair) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
__device__ __forceinline__ unsigned short e4m3_to_half(unsigned char x) { return (unsigned short)e4m3_to_halves(x); }
// To nearest, what is too large to the largest number.
__device__ __forceinline__ unsigned char to_e4m3(float x) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
    return (unsigned char)pair;
}
__device__ __forceinline__ unsigned char to_e5m2(float x) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
    return (unsigned char)pair;
}
// NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
// 1 / x with an error of at most one in the last place.
__device__ __forceinline__ float approximate_inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
