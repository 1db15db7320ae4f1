// Conversions by bits, as kernels of kos use no CUDA headers.
#pragma once

struct bfloat16 { unsigned short bits; };

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline int to_float(int x) { return x; }

template <class T> __device__ T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline int from_float<int>(float x) { return (int)x; }
template <> __device__ inline bfloat16 from_float<bfloat16>(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return {bits};
}
