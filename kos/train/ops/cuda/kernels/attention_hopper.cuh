// Tiles of attention by Hopper's own instructions (hopper.cuh): PADDED_DIM columns wide.
#pragma once
#include "attention.cuh"
#include "hopper.cuh"

#define PANELS (PADDED_DIM / PANEL_COLUMNS)
#define BOX_ROWS 64                        // rows that one TMA instruction moves
#define SUMMED (HEAD_DIM == 80 || HEAD_DIM == 96 ? HEAD_DIM : PADDED_DIM)  // columns of a sum in registers

// A tile of ROWS rows of a head; rows beyond the sample and columns beyond the head arrive as zeros.
template <int ROWS>
__device__ inline void load_tile(char* target, const TensorMap& map, u64* barrier, int head, int token, int sample) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
        for (int row = 0; row < ROWS; row += BOX_ROWS)
            load_box(target + (panel * ROWS + row) * ROW_BYTES, map, barrier, panel * PANEL_COLUMNS, head, token + row, sample);
}

// d (64 x columns) = a (64 x HEAD_DIM) b (columns x HEAD_DIM)^T.  A tile's panels are *_rows apart.
template <int N>
__device__ inline void multiply_transposed(float (&d)[N], const char* a, int a_rows, const char* b, int b_rows) {
    const u32 a0 = operand(a), b0 = operand(b);
    wgmma_fence();
    wgmma_first(d, a0, b0);
#pragma unroll
    for (int k = 1; k < HEAD_DIM / 16; ++k) {
        const int panel = k / 4, inside = k % 4 * 32;
        wgmma(d, a0 + ((panel * a_rows * ROW_BYTES + inside) >> 4), b0 + ((panel * b_rows * ROW_BYTES + inside) >> 4));
    }
    wgmma_commit();
}
// d (64 x 64) = a (ROWS x 64)^T b (ROWS x 64), a panel each.
template <int ROWS>
__device__ inline void multiply_crossed(float (&d)[32], const char* a, const char* b) {
    const u32 a0 = operand(a), b0 = operand(b);
    wgmma_fence();
    wgmma_crossed_first(d, a0, b0);
#pragma unroll
    for (int k = 1; k < ROWS / 16; ++k) wgmma_crossed(d, a0 + (k * 16 * ROW_BYTES >> 4), b0 + (k * 16 * ROW_BYTES >> 4));
    wgmma_commit();
}
// d (64 x SUMMED) += a (64 x ROWS) b (ROWS x HEAD_DIM), a as packed pairs.
template <int ROWS>
__device__ inline void multiply_add(float (&d)[SUMMED / 2], u32 (&a)[ROWS / 4], const char* b) {
    const u32 b0 = operand(b, ROWS * ROW_BYTES);
    hold(d);
    hold(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < ROWS / 16; ++k) wgmma(d, a + 4 * k, b0 + (k * 16 * ROW_BYTES >> 4));
    wgmma_commit();
}

// Writes d, times `factor` (one for the upper and one for the lower row of the thread), as 64 rows of a swizzled tile
// with panels `rows` apart, and from there to `map`.  All threads of the warpgroup `group` call it.
__device__ inline void store_tile(const float (&d)[SUMMED / 2], float upper, float lower, char* tile, int rows, int group,
                                  const TensorMap& map, int head, int token, int sample) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int chunk = 0; chunk < SUMMED / 8; ++chunk) {
        char* at = tile + (chunk / 8 * rows + row) * ROW_BYTES + (chunk % 8 ^ row % 8) * 16 + lane % 4 * 4;
        *(u32*)at = pack(d[4 * chunk] * upper, d[4 * chunk + 1] * upper);
        *(u32*)(at + 8 * ROW_BYTES) = pack(d[4 * chunk + 2] * lower, d[4 * chunk + 3] * lower);
    }
    fence_async();
    named_sync(8 + group, 128);
    if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            store_box(map, tile + panel * rows * ROW_BYTES, panel * PANEL_COLUMNS, head, token, sample);
        store_commit();
        store_wait();
    }
}
