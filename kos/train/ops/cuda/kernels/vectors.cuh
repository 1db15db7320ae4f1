// Element types, wide accesses and warp sums: what every kernel here stands on.
//
// A thread moves WIDTH neighbours at once: 16 bytes of the activations' dtype, or 1 element where a row's
// length or an address does not allow that.  Arithmetic is fp32; bf16 is widened by a shift and rounded to
// nearest even, two at a time, by one instruction.
#pragma once

struct __align__(2) bfloat16 {
    unsigned short bits;
};
using float32 = float;

struct __align__(16) Quad {
    unsigned x, y, z, w;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }

__device__ __forceinline__ void narrow(float x, float& out) { out = x; }
__device__ __forceinline__ void narrow(float x, bfloat16& out) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
}

__device__ __forceinline__ unsigned pair(float low, float high) {
    unsigned out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ void unpack(float* x, Quad q, float) {
    x[0] = __uint_as_float(q.x), x[1] = __uint_as_float(q.y);
    x[2] = __uint_as_float(q.z), x[3] = __uint_as_float(q.w);
}
__device__ __forceinline__ void unpack(float* x, Quad q, bfloat16) {
    const unsigned words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}
__device__ __forceinline__ Quad packed(const float* x, float) {
    return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
}
__device__ __forceinline__ Quad packed(const float* x, bfloat16) {
    return {pair(x[0], x[1]), pair(x[2], x[3]), pair(x[4], x[5]), pair(x[6], x[7])};
}

// W elements at p as floats, and back.  p is 16-byte aligned where W elements are a multiple of 16 bytes.
template <int W, class T>
__device__ __forceinline__ void load(float (&x)[W], const T* p) {
    constexpr int each = 16 / sizeof(T);
    if constexpr (W % each == 0) {
#pragma unroll
        for (int i = 0; i < W; i += each) unpack(x + i, *reinterpret_cast<const Quad*>(p + i), T());
    } else {
#pragma unroll
        for (int i = 0; i < W; ++i) x[i] = widen(p[i]);
    }
}
template <int W, class T>
__device__ __forceinline__ void store(T* p, const float (&x)[W]) {
    constexpr int each = 16 / sizeof(T);
    if constexpr (W % each == 0) {
#pragma unroll
        for (int i = 0; i < W; i += each) *reinterpret_cast<Quad*>(p + i) = packed(x + i, T());
    } else {
#pragma unroll
        for (int i = 0; i < W; ++i) narrow(x[i], p[i]);
    }
}

// W elements as they lie in memory: half the registers of floats in bf16, so that a thread can hold the next
// row while it works on this one.
template <int W, class T>
struct Raw {
    static constexpr int quads = W * sizeof(T) / 16;
    Quad wide[quads ? quads : 1];
    T single;

    __device__ __forceinline__ void load(const T* p) {
        if constexpr (quads) {
#pragma unroll
            for (int i = 0; i < quads; ++i) wide[i] = reinterpret_cast<const Quad*>(p)[i];
        } else {
            single = *p;
        }
    }
    __device__ __forceinline__ void store(T* p) const {
        if constexpr (quads) {
#pragma unroll
            for (int i = 0; i < quads; ++i) reinterpret_cast<Quad*>(p)[i] = wide[i];
        } else {
            *p = single;
        }
    }
    __device__ __forceinline__ void floats(float (&x)[W]) const {
        if constexpr (quads) {
#pragma unroll
            for (int i = 0; i < quads; ++i) unpack(x + i * (16 / sizeof(T)), wide[i], T());
        } else {
            x[0] = widen(single);
        }
    }
};

// Four elements in one access, whatever their size.
__device__ __forceinline__ void load_few(float (&x)[4], const float* p) { load(x, p); }
__device__ __forceinline__ void load_few(float (&x)[4], const bfloat16* p) {
    const uint2 q = *reinterpret_cast<const uint2*>(p);
    x[0] = __uint_as_float(q.x << 16), x[1] = __uint_as_float(q.x & 0xffff0000u);
    x[2] = __uint_as_float(q.y << 16), x[3] = __uint_as_float(q.y & 0xffff0000u);
}
__device__ __forceinline__ void store_few(float* p, const float (&x)[4]) { store(p, x); }
__device__ __forceinline__ void store_few(bfloat16* p, const float (&x)[4]) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pair(x[0], x[1]), pair(x[2], x[3]));
}

// 16 bytes to shared memory while the thread goes on; it sees them once it has waited for all but its PENDING last
// commits, others after a barrier.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

template <class V>
__device__ __forceinline__ V warp_sum(V x) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}

// The sum over a block of up to 1024 threads, in all of them; the same order every time.
template <class V>
__device__ __forceinline__ V block_sum(V x) {
    __shared__ V parts[33];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
        V all = warp_sum(threadIdx.x < (blockDim.x + 31) / 32 ? parts[threadIdx.x] : V(0));
        if (threadIdx.x == 0) parts[32] = all;
    }
    __syncthreads();
    x = parts[32];
    __syncthreads();
    return x;
}
