// SwiGLU of one element, and its gradients: the same arithmetic where it is written in 16 bits and in 8.
#pragma once
#include "vectors.cuh"

// 1 / (1 + exp(-x)): goes to 0 and 1 at the ends, without overflow of what it multiplies.
template <class T>
__device__ __forceinline__ float sigmoid(float x) {
    if constexpr (sizeof(T) == 2) return __fdividef(1.0f, 1.0f + __expf(-x));
    return 1.0f / (1.0f + expf(-x));
}

// gate becomes gate sigmoid(gate) up.
template <class T, int W>
__device__ __forceinline__ void apply_swiglu(float (&gate)[W], const float (&up)[W]) {
#pragma unroll
    for (int j = 0; j < W; ++j) gate[j] *= sigmoid<T>(gate[j]) * up[j];
}

// With s = sigmoid(gate): up becomes d_up = d gate s, gate becomes d_gate = d up s (1 + gate (1 - s)).
template <class T, int W>
__device__ __forceinline__ void apply_swiglu_backward(const float (&d)[W], float (&gate)[W], float (&up)[W]) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
        const float s = sigmoid<T>(gate[j]);
        const float d_up = d[j] * gate[j] * s;
        gate[j] = d[j] * up[j] * s * (1.0f + gate[j] * (1.0f - s));
        up[j] = d_up;
    }
}
