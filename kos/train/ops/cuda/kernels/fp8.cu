// A matrix in 8 bits, and transposed, with one scale: the power of two that brings its largest magnitude into range.
//
// Two passes, for the scale is that of the whole: `largest` leaves the largest magnitude that each block has seen, and
// every block of `quantize` finds the largest of those while its tile is on the way.  The first pass goes from the end
// to the beginning: of what the kernel before wrote the end may be in the L2, and then the beginning for the second.
// Magnitudes are compared as integers: so the order is exact, and infinity and NaN are the largest.  A tile is 128 rows
// x 64 columns.  A thread has 8 neighbours of 4 rows: it writes rows as they are, and columns through shared memory, 4
// rows to a word.
//
// -DE5M2 (0: E4M3) -DROWS -DCOLUMNS (whether they are written)
#include "vectors.cuh"

constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64, THREADS = 256;
constexpr int CHUNKS = TILE_ROWS / 16;  // of 16 rows: 16 bytes of a column
constexpr int EXPONENT = E5M2 ? 15 : 8;  // the largest number is 1.75 times two to this power
constexpr int LEAST_SCALE = -100;  // its exponent
constexpr unsigned INFINITE = 0x7f800000u, LAST_MANTISSA = 0x600000u;

__device__ __forceinline__ unsigned warp_max(unsigned x) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) x = max(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}

// The largest over a block of THREADS, in all of them.
__device__ __forceinline__ unsigned block_max(unsigned x) {
    __shared__ unsigned parts[THREADS / 32];
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
#pragma unroll
    for (int i = 1; i < THREADS / 32; ++i) x = max(x, parts[i]);
    return x;
}

// The magnitudes of two numbers of bfloat16, as bits of float.
__device__ __forceinline__ unsigned larger(unsigned two) { return max(two << 16 & 0x7fffffffu, two & 0x7fff0000u); }

// partial (gridDim.x,): the bits of the largest magnitude of a block's share of x, which has `packs` of 8.
extern "C" __global__ void __launch_bounds__(256) largest(const bfloat16* x, unsigned* partial, long packs) {
    const Quad* at = reinterpret_cast<const Quad*>(x);
    unsigned most = 0;
#pragma unroll 4
    for (long i = packs - 1 - long(blockIdx.x) * THREADS - threadIdx.x; i >= 0; i -= long(gridDim.x) * THREADS) {
        const Quad q = at[i];
        most = max(most, max(max(larger(q.x), larger(q.y)), max(larger(q.z), larger(q.w))));
    }
    most = block_max(most);
    if (threadIdx.x == 0) partial[blockIdx.x] = most;
}

// The exponent of the scale for a largest magnitude with these bits, which is finite.
__device__ __forceinline__ int exponent_of(unsigned bits) {
    if (!bits) return 0;
    return max(int(bits >> 23) - 127 + ((bits & 0x7fffffu) > LAST_MANTISSA) - EXPONENT, LEAST_SCALE);
}
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(unsigned(exponent + 127) << 23); }

__device__ __forceinline__ unsigned pair8(float low, float high) {
    unsigned short out;
#if E5M2
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
#else
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
#endif
    return out;
}
// Four numbers, two words of bfloat16, in 8 bits.
__device__ __forceinline__ unsigned four8(unsigned first, unsigned second, float factor) {
    const unsigned low = pair8(__uint_as_float(first << 16) * factor, __uint_as_float(first & 0xffff0000u) * factor);
    const unsigned high = pair8(__uint_as_float(second << 16) * factor, __uint_as_float(second & 0xffff0000u) * factor);
    return low | high << 16;
}

// rows (n, f) = x / scale, and columns (f, n); n and f are multiples of 16.
extern "C" __global__ void __launch_bounds__(256)
quantize(const bfloat16* x, unsigned char* rows, unsigned char* columns, float* scale, const unsigned* partial,
         int partials, int n, int f) {
    __shared__ Quad tile[TILE_COLUMNS][CHUNKS];
    const int row = blockIdx.y * TILE_ROWS + threadIdx.x / 8 * 4, column = blockIdx.x * TILE_COLUMNS + threadIdx.x % 8 * 8;
    const bool inside = row < n && column < f;
    Quad q[4] = {};
    if (inside) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = *reinterpret_cast<const Quad*>(x + long(row + i) * f + column);
    }
    unsigned most = 0;
    for (int i = threadIdx.x; i < partials; i += THREADS) most = max(most, partial[i]);
    most = block_max(most);
    const bool finite = most < INFINITE;
    const int exponent = finite ? exponent_of(most) : 0;
    const float nan = __uint_as_float(0x7fffffffu), factor = finite ? power_of_two(-exponent) : nan;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *scale = finite ? power_of_two(exponent) : nan;
    unsigned left[4], right[4];  // of each row, its first and last four columns
#pragma unroll
    for (int i = 0; i < 4; ++i) left[i] = four8(q[i].x, q[i].y, factor), right[i] = four8(q[i].z, q[i].w, factor);
    if (ROWS && inside) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint2*>(rows + long(row + i) * f + column) = make_uint2(left[i], right[i]);
    }
    if (!COLUMNS) return;
    // Chunks of a column lie in an order of the column's own, so that the columns of a warp lie in different banks.
    const int group = threadIdx.x / 8, chunk = group / 4 ^ threadIdx.x % 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned* const r = half ? right : left;
        const unsigned a = __byte_perm(r[0], r[1], 0x5140), b = __byte_perm(r[2], r[3], 0x5140);  // r0 r1 of two columns
        const unsigned c = __byte_perm(r[0], r[1], 0x7362), d = __byte_perm(r[2], r[3], 0x7362);
        const unsigned word[4] = {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                                  __byte_perm(c, d, 0x7632)};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            reinterpret_cast<unsigned*>(&tile[threadIdx.x % 8 * 8 + half * 4 + j][chunk])[group % 4] = word[j];
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < TILE_COLUMNS * CHUNKS; i += THREADS) {
        const int of_tile = i / CHUNKS, part = i % CHUNKS;
        const int to_row = blockIdx.y * TILE_ROWS + part * 16, to_column = blockIdx.x * TILE_COLUMNS + of_tile;
        if (to_row < n && to_column < f)
            *reinterpret_cast<Quad*>(columns + long(to_column) * n + to_row) = tile[of_tile][part ^ of_tile / 8];
    }
}
