// What the kernels of optimizers have in common: the scalars of a step, rounding at random, the update of a chunk.
//
// -DMASTER (dtype of the weights: float32, or bfloat16, which is rounded at random) -DGRADIENT -DWEIGHT (dtype of the
// copy; -DCOPY=0: there is none)
#pragma once
#include "vectors.cuh"

constexpr int W = 4;

struct State {  // doubles, read by the host by index
    double step, updates, lr, norm, scale, step_size, root, finite, sum_of_squares, rest, halted;
};

struct Chunk {
    long start, local;  // in gradients and copy; in what this rank holds of weights
    int length, group;
    long index;  // among the chunks of all ranks
    long place;  // in the layout of the whole model
    long kept;   // in what is kept of the weights
};

struct Group {
    double decay, lr_scale;
};

// Of a step and a group: learning rate and weight decay; what a decoupled decay multiplies weights by; and of Adam's
// corrected moments, for the betas of the rule and update t, lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t).
struct Rates {
    float lr, decay, shrink, step_size, root;
};

__device__ __forceinline__ bool wide(const void* p, int bytes) { return (unsigned long long)p % bytes == 0; }

// Weights that have no fp32 copy are rounded up as often as they are near it: updates far below bf16's spacing are not
// lost, on average.  The bits are a hash (C. Wellons' lowbias32) of seed, step and the element's place in the layout of
// the whole model.
__device__ __forceinline__ unsigned mixed(unsigned bits) {
    bits = (bits ^ bits >> 16) * 0x7feb352du;
    bits = (bits ^ bits >> 15) * 0x846ca68bu;
    return bits ^ bits >> 16;
}
__device__ __forceinline__ float rounded(float x, unsigned key, long place) {
    if (sizeof(MASTER) == 4 || !isfinite(x)) return x;  // the sum would carry the GPU's NaN, 0x7fffffff, over to -0
    const unsigned of_place = mixed(key ^ mixed(place >> 32) ^ unsigned(place));
    return __uint_as_float(__float_as_uint(x) + (of_place & 0xffffu) & 0xffff0000u);
}

__device__ __forceinline__ unsigned key_of(long seed, const State* state) {
    return mixed(mixed(mixed(seed) ^ seed >> 32) ^ unsigned(state->step));
}

template <class T>
struct Few {
    T* at;
    T x[W];
};

// One pack of an update, at these addresses; a function, for NVRTC 13.0 takes no generic lambda.
template <class Rule, class... Kept>
__device__ __forceinline__ void update_pack(MASTER* weights, const GRADIENT* gradients, WEIGHT* copy, const Rates& at,
                                            float scale, unsigned key, long place, const Rule& rule,
                                            Few<Kept>... kept) {
    float w[W], g[W];
    load_few(w, weights);
    load_few(g, gradients);
    (load(kept.x, kept.at), ...);
#pragma unroll
    for (int j = 0; j < W; ++j) {
        rule(at, w[j], g[j] * scale, kept.x[j]...);
        w[j] = rounded(w[j], key, place + j);
    }
    store_few(weights, w);
    (store(kept.at, kept.x), ...);
    if (COPY) store_few(copy, w);
}

// The update of a block's chunk, whose elements are all of one parameter group; none if the step is not finite.
// `rule(at, w, g, kept...)` changes a weight and what is `kept` of it, by its averaged and clipped gradient.  It says
// what is fused (fmaf): so an element has the same bits in a pack and alone.  Weights and copy are written in one pass.
template <class Rule, class... Kept>
__device__ __forceinline__ void update_chunk(MASTER* weights, const GRADIENT* gradients, WEIGHT* copy,
                                             const Chunk* chunks, const Group* groups, const State* state, long seed,
                                             const Rule& rule, Kept*... kept) {
    if (!state->finite) return;
    const Chunk chunk = chunks[blockIdx.x];
    const Group group = groups[chunk.group];
    const float scale = state->scale;
    const Rates at = {float(state->lr * group.lr_scale), float(group.decay),
                      float(1 - state->lr * group.lr_scale * group.decay),
                      float(state->step_size * group.lr_scale), float(state->root)};
    const unsigned key = key_of(seed, state);
    weights += chunk.local, gradients += chunk.start, copy += chunk.start;
    ((kept += chunk.kept), ...);

    // 16 bytes of fp32, 8 of bf16.
    const bool aligned = wide(weights, W * sizeof(MASTER)) && (wide(kept, W * sizeof(Kept)) && ...) &&
                         wide(gradients, W * sizeof(GRADIENT)) && wide(copy, W * sizeof(WEIGHT));
    const int packs = aligned ? chunk.length / W : 0;
#pragma unroll 2
    for (int pack = threadIdx.x; pack < packs; pack += 256) {
        const long i = pack * W;
        update_pack(weights + i, gradients + i, copy + i, at, scale, key, chunk.place + i, rule, Few<Kept>{kept + i}...);
    }
    for (int i = packs * W + threadIdx.x; i < chunk.length; i += 256) {
        float w = widen(weights[i]);
        rule(at, w, widen(gradients[i]) * scale, kept[i]...);
        w = rounded(w, key, chunk.place + i);
        narrow(w, weights[i]);
        if (COPY) narrow(w, copy[i]);
    }
}
