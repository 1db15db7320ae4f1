// A matrix in 8 bits, and transposed, each 128 x 128 of it with one scale: the power of two that brings its largest
// magnitude into range.
//
// One pass: a block of threads has a tile of 128 x 128 in registers, whose largest magnitude is found on the way to
// memory.  Magnitudes are compared as integers: so the order is exact, and infinity and NaN are the largest.  A thread
// has 8 neighbours of 4 rows: it writes rows as they are, and columns through shared memory, 4 rows to a word.  The
// outputs of RMSNorm and SwiGLU, and the latter's gradient, are computed here, and are not in memory in 16 bits.
//
// -DSOURCE (0: x. 1: SwiGLU of `more`, gate_up. 2: the gradient of that, x that of SwiGLU's output. 3: the RMSNorm of x,
// by `rstd` and the weights in `more`) -DE5M2 (0: E4M3) -DROWS -DCOLUMNS (0: not written. 1: the first operand of a
// product, a scale for each row of a tile. 2: the second, a scale for each tile. 3: one scale for all, for GPUs that
// multiply no other: then `largest` reads everything before).
// `f` are the columns of x, or of SwiGLU's output; with SOURCE 2 a multiple of 128.
#include "swiglu.cuh"

constexpr int TILE = 128, THREADS = 512, W = 8;
constexpr int HALVES = SOURCE == 2 ? 2 : 1;  // gradients of gate, and of up
constexpr int CHUNKS = TILE / 16;  // of 16 rows: 16 bytes of a column
constexpr int EXPONENT = E5M2 ? 15 : 8;  // the largest number is 1.75 times two to this power
constexpr int LEAST_SCALE = -100;  // its exponent
constexpr unsigned INFINITE = 0x7f800000u, LAST_MANTISSA = 0x600000u;

using Tile = Quad[4][HALVES];  // a thread's 4 rows of 8 neighbours

// The largest over a block of THREADS, in all of them.
__device__ __forceinline__ void block_max(unsigned (&x)[HALVES]) {
    constexpr int WARPS = THREADS / 32;
    __shared__ unsigned parts[HALVES][WARPS];
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        x[half] = __reduce_max_sync(~0u, x[half]);
        if (threadIdx.x % 32 == 0) parts[half][threadIdx.x / 32] = x[half];
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < HALVES; ++half) x[half] = __reduce_max_sync(~0u, parts[half][threadIdx.x % WARPS]);
}

// The magnitudes of two numbers of bfloat16, as bits of float.
__device__ __forceinline__ unsigned larger(unsigned two) { return max(two << 16 & 0x7fffffffu, two & 0x7fff0000u); }
__device__ __forceinline__ unsigned largest_of(Quad q) {
    return max(max(larger(q.x), larger(q.y)), max(larger(q.z), larger(q.w)));
}

// What is quantized, rounded to bfloat16: W neighbours of a row, of gate and of up if there are HALVES.
__device__ __forceinline__ void read(Quad (&out)[HALVES], const bfloat16* x, const bfloat16* more, const float* rstd,
                                     long row, int column, int f) {
    if constexpr (SOURCE == 0) {
        out[0] = *reinterpret_cast<const Quad*>(x + row * f + column);
    } else if constexpr (SOURCE == 3) {
        float v[W], weight[W];
        load(v, x + row * f + column);
        load(weight, more + column);
        const float r = rstd[row];
#pragma unroll
        for (int j = 0; j < W; ++j) v[j] = v[j] * r * weight[j];
        out[0] = packed(v, bfloat16());
    } else {
        float gate[W], up[W];
        load(gate, more + row * 2 * f + column);
        load(up, more + row * 2 * f + f + column);
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

__device__ __forceinline__ int group() { return threadIdx.x % 256 / 8; }  // of 4 rows
__device__ __forceinline__ int column_of_tile() { return threadIdx.x / 256 * 64 + threadIdx.x % 8 * W; }

// This thread's part of the tile, and the largest magnitude of all parts of each half.
__device__ __forceinline__ void read_tile(Tile& q, unsigned (&most)[HALVES], const bfloat16* x, const bfloat16* more,
                                          const float* rstd, int n, int f) {
    const int row = blockIdx.y * TILE + group() * 4, column = blockIdx.x * TILE + column_of_tile();
    if (row < n && column < f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) read(q[i], x, more, rstd, row + i, column, f);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int half = 0; half < HALVES; ++half) most[half] = max(most[half], largest_of(q[i][half]));
    block_max(most);
}

// all (tiles,): the largest magnitude of each.
extern "C" __global__ void __launch_bounds__(512)
largest(const bfloat16* x, const bfloat16* more, const float* rstd, unsigned* all, int n, int f) {
    Tile q = {};
    unsigned most[HALVES] = {};
    read_tile(q, most, x, more, rstd, n, f);
    if (threadIdx.x == 0) all[blockIdx.y * gridDim.x + blockIdx.x] = max(most[0], most[HALVES - 1]);
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
__device__ __forceinline__ void transpose(Quad (&tile)[TILE][CHUNKS], const unsigned (&r)[4], int column) {
    const int chunk = group() / 4 ^ column / 8 % 8;
    const unsigned a = __byte_perm(r[0], r[1], 0x5140), b = __byte_perm(r[2], r[3], 0x5140);  // rows 0, 1 of two columns
    const unsigned c = __byte_perm(r[0], r[1], 0x7362), d = __byte_perm(r[2], r[3], 0x7362);
    const unsigned word[4] = {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                              __byte_perm(c, d, 0x7632)};
#pragma unroll
    for (int j = 0; j < 4; ++j) reinterpret_cast<unsigned*>(&tile[column + j][chunk])[group() % 4] = word[j];
}

// The scale of a tile of a second operand, `along` of `blocks` along the sum.  Their row is filled up with 1.
__device__ __forceinline__ void put(float* scales, int across, int along, int blocks, float scale) {
    const int stride = (blocks + 3) / 4 * 4;
    scales += long(across) * stride;
    scales[along] = scale;
    for (int i = blocks; along == blocks - 1 && i < stride; ++i) scales[i] = 1;
}

// The scale of this tile, or of its half, for each copy.
__device__ __forceinline__ void put_scales(float* row_scales, float* column_scales, int half, float scale, int n, int f,
                                           int part) {
    const int tile_x = half * (f / TILE) + blockIdx.x, tile_y = blockIdx.y;
    const int tiles_x = (HALVES * f + TILE - 1) / TILE, tiles_y = (n + TILE - 1) / TILE;
    const int row = tile_y * TILE + threadIdx.x, column = blockIdx.x * TILE + threadIdx.x;
    if (ROWS == 1 && threadIdx.x < TILE && row < n)
        row_scales[(long(row / part) * tiles_x + tile_x) * part + row % part] = scale;
    if (COLUMNS == 1 && threadIdx.x < TILE && column < f)
        column_scales[long(tile_y) * HALVES * f + half * f + column] = scale;
    if (threadIdx.x) return;
    if (ROWS == 2) put(row_scales, tile_y, tile_x, tiles_x, scale);
    if (COLUMNS == 2) put(column_scales, tile_x, tile_y, tiles_y, scale);
    if (ROWS == 3) *row_scales = scale;
    if (COLUMNS == 3) *column_scales = scale;
}

// rows (n, HALVES f) = what is read / scale, and columns the same transposed; n and f are multiples of 16.  A part of
// `part` rows has the scales of a first operand of its own.
extern "C" __global__ void __launch_bounds__(512, SOURCE == 2 ? 2 : 3)
quantize(const bfloat16* x, const bfloat16* more, const float* rstd, unsigned char* rows, float* row_scales, unsigned char* columns,
         float* column_scales, const unsigned* all, int tiles, int n, int f, int part) {
    __shared__ Quad tile[TILE][CHUNKS];
    const int row = blockIdx.y * TILE + group() * 4, column = blockIdx.x * TILE + column_of_tile();
    const bool inside = row < n && column < f;
    Tile q = {};
    unsigned most[HALVES] = {};
    read_tile(q, most, x, more, rstd, n, f);
    if (ROWS == 3 || COLUMNS == 3) {
        __syncthreads();
        for (int i = threadIdx.x; i < tiles; i += THREADS) most[0] = max(most[0], all[i]);
        most[HALVES - 1] = most[0];
        block_max(most);
    }
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const bool finite = most[half] < INFINITE;
        const int exponent = finite ? exponent_of(most[half]) : 0;
        const float nan = __uint_as_float(0x7fffffffu), factor = finite ? power_of_two(-exponent) : nan;
        const float scale = finite ? power_of_two(exponent) : nan;
        unsigned left[4], right[4];  // of each row, its first and last four columns
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            left[i] = four8(q[i][half].x, q[i][half].y, factor);
            right[i] = four8(q[i][half].z, q[i][half].w, factor);
            if (ROWS && inside)
                *reinterpret_cast<uint2*>(rows + long(row + i) * HALVES * f + half * f + column) =
                    make_uint2(left[i], right[i]);
        }
        if (COLUMNS) {
            if (half) __syncthreads();  // the tile has been read
            transpose(tile, left, column_of_tile());
            transpose(tile, right, column_of_tile() + 4);
            __syncthreads();
#pragma unroll
            for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
                const int from = i / CHUNKS, chunk = i % CHUNKS;
                const int to_row = blockIdx.y * TILE + chunk * 16, to_column = blockIdx.x * TILE + from;
                if (to_row < n && to_column < f)
                    *reinterpret_cast<Quad*>(columns + long(half * f + to_column) * n + to_row) =
                        tile[from][chunk ^ from / 8 % 8];
            }
        }
        put_scales(row_scales, column_scales, half, scale, n, f, part);
    }
}
