// Tensor cores of every GPU since Ampere (sm_80): cp.async, ldmatrix, mma.sync.
//
// Tiles in shared memory: rows of HEAD_DIM elements.  The eight rows that an ldmatrix reads lie in different banks: the
// 16-byte chunks of a row are permuted by xor with the row mod 8, or the rows are an odd number of chunks apart.  A warp
// owns 16 rows of every product's left side.
#pragma once
#include "attention.cuh"

#define OWN (16 * WARPS)  // rows of a block
#define THREADS (32 * WARPS)
#define CHUNKS (HEAD_DIM / 8)
#define PERMUTED (CHUNKS % 8 == 0)
#define ROW_BYTES ((PERMUTED ? CHUNKS : CHUNKS + 1) * 16)
#define TILE_BYTES(rows) ((rows) * ROW_BYTES)

__device__ inline u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
__device__ inline u32 chunk_at(u32 tile, int row, int chunk) {
    return tile + row * ROW_BYTES + (PERMUTED ? chunk ^ row % 8 : chunk) * 16;
}

// Rows first.. of one head, `stride` elements apart, those from `rows` on as zeros.
template <int ROWS>
__device__ inline void load_tile(u32 tile, const u16* head, long stride, int first, int rows) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool exists = first + row < rows;
        const u16* source = head + (exists ? first + row : 0) * stride + chunk * 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(chunk_at(tile, row, chunk)), "l"(source),
                     "r"(exists ? 16 : 0)
                     : "memory");
    }
}
__device__ inline void load_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void load_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ inline void matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ inline void matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ inline void mma(float* d, const u32* a, u32 b0, u32 b1) {
#if IS_FLOAT16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
    asm volatile(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d (16 x COLUMNS) = rows row.. of a, times b (COLUMNS x HEAD_DIM)^T
template <int COLUMNS>
__device__ inline void multiply_transposed(float (&d)[COLUMNS / 2], u32 a, int row, u32 b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) d[i] = 0;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        u32 left[4], right[4];
        matrices(left, chunk_at(a, row + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; ++n) {
            matrices(right, chunk_at(b, n * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            mma(d + 8 * n, left, right[0], right[1]);
            mma(d + 8 * n + 4, left, right[2], right[3]);
        }
    }
}
// d (16 x HEAD_DIM) += a (16 x ROWS, packed) b (ROWS x HEAD_DIM)
template <int ROWS>
__device__ inline void multiply_add(float (&d)[HEAD_DIM / 2], const u32 (&a)[ROWS / 4], u32 b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < ROWS / 16; ++k)
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; ++n) {
            u32 right[4];
            matrices_transposed(right, chunk_at(b, k * 16 + lane % 16, 2 * n + lane / 16));
            mma(d + 8 * n, a + 4 * k, right[0], right[1]);
            mma(d + 8 * n + 4, a + 4 * k, right[2], right[3]);
        }
}

// Writes the rows of d that exist, times a factor for the thread's upper and one for its lower row.
__device__ inline void store_rows(const float (&d)[HEAD_DIM / 2], float upper, float lower, u16* head, long stride, int row,
                                  int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i += 2) {
        const int at = row + LOWER(i) * 8;
        const float factor = LOWER(i) ? lower : upper;
        if (at < rows) *(u32*)(head + at * stride + COLUMN_OF(i, lane)) = pack(d[i] * factor, d[i + 1] * factor);
    }
}
