// What normalized rows are multiplied by, in norms.cu, head_norm.cu and fp8.cu. -D: as in Normalize.macros of
// kos/train/ops/norm.py; a kernel without a norm has none of these macros.
#pragma once

__device__ __forceinline__ float scale_of(float weight) { return weight; }
