// What the matmuls on Hopper's tensor cores share: the order of tiles.
#pragma once
#include "hopper.cuh"

constexpr int PANEL_BYTES = 64 * ROW_BYTES;

// Calls what(row, column) for each tile of BM x BN of an output (M, N) that this block computes, one after another.
// GROUP rows of tiles go together, column after column, so that blocks that run at the same time share operands in L2.
template <int BM, int BN, int GROUP, typename What>
__device__ inline void for_each_tile(int M, int N, What what) {
    const int rows = (M + BM - 1) / BM, columns = (N + BN - 1) / BN;
    for (int unit = blockIdx.x; unit < rows * columns; unit += gridDim.x) {
        const int begin = unit / (GROUP * columns) * GROUP, high = min(GROUP, rows - begin);
        const int inside = unit - begin * columns;
        what((begin + inside % high) * BM, inside / high * BN);
    }
}
