// A matrix in 8 bits, and transposed, with one scale: the power of two that brings its largest magnitude into range.
//
// Two passes, for the scale is that of the whole: `largest` leaves the largest magnitude that each block has seen, and
// every block of `quantize` finds the largest of those while its tile is on the way.  The first pass goes from the end
// to the beginning: of what the kernel before wrote the end may be in the L2, and then the beginning for the second.
// Magnitudes are compared as integers: so the order is exact, and infinity and NaN are the largest.  A tile is 128 rows
// x 64 columns.  A thread has 8 neighbours of 4 rows: it writes rows as they are, and columns through shared memory, 4
// rows to a word.  The output of SwiGLU and its gradient are computed in both passes, and not in memory in 16 bits.
//
// -DSOURCE (0: x. 1: SwiGLU of gate_up. 2: the gradient of gate_up, x that of SwiGLU's output) -DE5M2 (0: E4M3) -DROWS
// -DCOLUMNS (whether they are written).  `f` are the columns of x, or of SwiGLU's output.
#include "swiglu.cuh"

constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64, THREADS = 256, W = 8;
constexpr int HALVES = SOURCE == 2 ? 2 : 1;  // gradients of gate, and of up
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
__device__ __forceinline__ unsigned largest_of(Quad q) {
    return max(max(larger(q.x), larger(q.y)), max(larger(q.z), larger(q.w)));
}

// What is quantized, rounded to bfloat16: W neighbours of a row, of gate and of up if there are HALVES.
__device__ __forceinline__ void read(Quad (&out)[HALVES], const bfloat16* x, const bfloat16* gate_up, long row, int column, int f) {
    if constexpr (SOURCE == 0) {
        out[0] = *reinterpret_cast<const Quad*>(x + row * f + column);
    } else {
        float gate[W], up[W];
        load(gate, gate_up + row * 2 * f + column);
        load(up, gate_up + row * 2 * f + f + column);
        if constexpr (SOURCE == 1) {
            apply_swiglu<bfloat16>(gate, up);
        } else {
            float d[W];
            load(d, x + row * f + column);
            apply_swiglu_backward<bfloat16>(d, gate, up);
        }
        out[0] = packed(gate, bfloat16());
        if constexpr (HALVES == 2) out[1] = packed(up, bfloat16());
    }
}

// partial (gridDim.x,): the bits of the largest magnitude of a block's share, of `packs` of W.
extern "C" __global__ void __launch_bounds__(256)
largest(const bfloat16* x, const bfloat16* gate_up, unsigned* partial, int packs, int f) {
    unsigned most = 0;
    const unsigned of_row = f / W;
#pragma unroll 4
    for (int i = packs - 1 - int(blockIdx.x * THREADS + threadIdx.x); i >= 0; i -= int(gridDim.x * THREADS)) {
        Quad q[HALVES];
        read(q, x, gate_up, unsigned(i) / of_row, unsigned(i) % of_row * W, f);
#pragma unroll
        for (int half = 0; half < HALVES; ++half) most = max(most, largest_of(q[half]));
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

// A thread's 4 words of 4 neighbours each, of 4 rows, to the tile: of each column a word of 4 rows.  Chunks of a column
// lie in an order of the column's own, so that the columns of a warp lie in different banks.
__device__ __forceinline__ void transpose(Quad (&tile)[TILE_COLUMNS][CHUNKS], const unsigned (&r)[4], int column) {
    const int group = threadIdx.x / 8, chunk = group / 4 ^ threadIdx.x % 8;
    const unsigned a = __byte_perm(r[0], r[1], 0x5140), b = __byte_perm(r[2], r[3], 0x5140);  // rows 0, 1 of two columns
    const unsigned c = __byte_perm(r[0], r[1], 0x7362), d = __byte_perm(r[2], r[3], 0x7362);
    const unsigned word[4] = {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                              __byte_perm(c, d, 0x7632)};
#pragma unroll
    for (int j = 0; j < 4; ++j) reinterpret_cast<unsigned*>(&tile[column + j][chunk])[group % 4] = word[j];
}

// rows (n, HALVES f) = what is read / scale, and columns the same transposed; n and f are multiples of 16.
extern "C" __global__ void __launch_bounds__(256)
quantize(const bfloat16* x, const bfloat16* gate_up, unsigned char* rows, unsigned char* columns, float* scale,
         const unsigned* partial, int partials, int n, int f) {
    __shared__ Quad tile[TILE_COLUMNS][CHUNKS];
    const int row = blockIdx.y * TILE_ROWS + threadIdx.x / 8 * 4, column = blockIdx.x * TILE_COLUMNS + threadIdx.x % 8 * W;
    const bool inside = row < n && column < f;
    Quad q[4][HALVES] = {};
    if (inside) {
#pragma unroll
        for (int i = 0; i < 4; ++i) read(q[i], x, gate_up, row + i, column, f);
    }
    unsigned most = 0;
    for (int i = threadIdx.x; i < partials; i += THREADS) most = max(most, partial[i]);
    most = block_max(most);
    const bool finite = most < INFINITE;
    const int exponent = finite ? exponent_of(most) : 0;
    const float nan = __uint_as_float(0x7fffffffu), factor = finite ? power_of_two(-exponent) : nan;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *scale = finite ? power_of_two(exponent) : nan;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        unsigned left[4], right[4];  // of each row, its first and last four columns
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            left[i] = four8(q[i][half].x, q[i][half].y, factor);
            right[i] = four8(q[i][half].z, q[i][half].w, factor);
            if (ROWS && inside)
                *reinterpret_cast<uint2*>(rows + long(row + i) * HALVES * f + half * f + column) =
                    make_uint2(left[i], right[i]);
        }
        if (!COLUMNS) continue;
        if (half) __syncthreads();  // the tile has been read
        transpose(tile, left, threadIdx.x % 8 * W);
        transpose(tile, right, threadIdx.x % 8 * W + 4);
        __syncthreads();
#pragma unroll
        for (int i = threadIdx.x; i < TILE_COLUMNS * CHUNKS; i += THREADS) {
            const int of_tile = i / CHUNKS, part = i % CHUNKS;
            const int to_row = blockIdx.y * TILE_ROWS + part * 16, to_column = blockIdx.x * TILE_COLUMNS + of_tile;
            if (to_row < n && to_column < f)
                *reinterpret_cast<Quad*>(columns + long(half * f + to_column) * n + to_row) = tile[of_tile][part ^ of_tile / 8];
        }
    }
}
