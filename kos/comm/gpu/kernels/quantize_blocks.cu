// Quantizes a matrix of bfloat16 to float8_e4m3fn, with a float32 scale for each block: x = scale * quantized.
//
// A warp quantizes one block of height x width elements; blocks at the ends of the matrix are smaller.  The scale is
// the largest magnitude / 448, or 1 if that is 0.  NaN does not count for the scale.  If a block contains an infinity,
// all of its results are 0 or NaN.
#include "types.cuh"

extern "C" __global__ void quantize_blocks(u64 target, u64 scales, u64 source, u64 rows, u64 columns, u64 height,
                                           u64 width) {
    const auto* const x = reinterpret_cast<const bfloat16::Bits*>(source);
    auto* const quantized = reinterpret_cast<float8_e4m3fn::Bits*>(target);
    const u64 across = (columns + width - 1) / width, blocks = (rows + height - 1) / height * across;
    const u64 warps = u64(gridDim.x) * blockDim.x / 32, first = (blockIdx.x * u64(blockDim.x) + threadIdx.x) / 32;
    const unsigned lane = threadIdx.x % 32;
    for (u64 block = first; block < blocks; block += warps) {
        const u64 top = block / across * height, left = block % across * width;
        const u64 bottom = top + height < rows ? top + height : rows;
        const u64 right = left + width < columns ? left + width : columns;
        float largest = 0;
        for (u64 row = top; row < bottom; ++row)
            for (u64 i = row * columns + left + lane; i < row * columns + right; i += 32)
                largest = fmaxf(largest, fabsf(bfloat16::widen(x[i])));
        for (int offset = 16; offset; offset >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
        const float scale = largest > 0 ? __fdiv_rn(largest, 448) : 1;
        if (lane == 0) reinterpret_cast<float*>(scales)[block] = scale;
        for (u64 row = top; row < bottom; ++row)
            for (u64 i = row * columns + left + lane; i < row * columns + right; i += 32)
                quantized[i] = float8_e4m3fn::narrow(__fdiv_rn(bfloat16::widen(x[i]), scale));
    }
}
