// Scores of attention, in all kernels: those of training and that of a KV cache (cache.cu).
//
// `score_of` makes a score of a product q k, before any mask.  `product_gradient` makes the gradient of that product from dP,
// the gradient of the probability.  What changes scores changes these two functions alone.
#pragma once

// The softmax multiplies scores by `factor`, and products too where they are kept as scores.
__device__ inline float score_of(float product, float factor = SCALE) { return product; }
// A score is not kept for the backward: it follows from its probability and its row's log2-sum-exp.
__device__ inline float product_gradient(float probability, float d_probability, float delta, float log2_sum_exp) {
    return probability * (d_probability - delta);
}
