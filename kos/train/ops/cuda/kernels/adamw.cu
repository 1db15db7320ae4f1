// AdamW: 28 bytes an element with bf16 gradients and a bf16 copy, 30 with fp32 gradients, 24 of weights without a copy.
//
// -DMASTER -DGRADIENT -DWEIGHT -DCOPY as in optimizers.cuh
#include "optimizers.cuh"

extern "C" __global__ void __launch_bounds__(256)
adamw(MASTER* weights, const GRADIENT* gradients, float* exp_avg, float* exp_avg_sq, WEIGHT* copy,
      const Chunk* chunks, const Group* groups, const State* state, float beta1, float beta2, float eps, long seed) {
    auto rule = [=](const Rates& at, float& w, float g, float& m, float& v) {
        m = fmaf(beta1, m, (1 - beta1) * g);
        v = fmaf(beta2, v, (1 - beta2) * (g * g));
        w = fmaf(w, at.shrink, -at.step_size * (m / fmaf(sqrtf(v), at.root, eps)));
    };
    update_chunk(weights, gradients, copy, chunks, groups, state, seed, rule, exp_avg, exp_avg_sq);
}
