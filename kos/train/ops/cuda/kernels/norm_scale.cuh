// The factor by which normalized rows are multiplied. The kernels of norms, head norms and fp8 include this file. -D: as
// in Normalize.macros of kos/train/ops/norm.py; a kernel without a norm has none of these macros.
#pragma once

__device__ __forceinline__ float scale_of(float weight) { return weight; }
