// Copies runs of consecutive bytes, in pieces.  The table has a row for each piece: the address to write, the address to
// read, and the number of bytes.
//
// Each place is in the memory of a GPU, or in pinned host memory.
#include "types.cuh"

template <class T> __device__ void copy_units(T* to, const T* from, u64 count) {
    constexpr int BURST = 8;  // loads of a thread in flight: the memory of another GPU is far away
    const u64 step = blockDim.x;
    u64 i = threadIdx.x;
    for (; i + (BURST - 1) * step < count; i += BURST * step) {
        T held[BURST];
#pragma unroll
        for (int n = 0; n < BURST; ++n) held[n] = from[i + n * step];
#pragma unroll
        for (int n = 0; n < BURST; ++n) to[i + n * step] = held[n];
    }
    for (; i < count; i += step) to[i] = from[i];
}

template <class T> __device__ void copy_piece(u64 to, u64 from, u64 nbytes) {
    using Byte = unsigned char;
    const u64 count = nbytes / sizeof(T), done = count * sizeof(T);
    copy_units(reinterpret_cast<T*>(to), reinterpret_cast<const T*>(from), count);
    copy_units(reinterpret_cast<Byte*>(to + done), reinterpret_cast<const Byte*>(from + done), nbytes - done);
}

extern "C" __global__ void copy_runs(u64 table, u64 pieces) {
    const auto* const rows = reinterpret_cast<const u64*>(table);
    for (u64 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        const u64 to = rows[3 * piece], from = rows[3 * piece + 1], nbytes = rows[3 * piece + 2];
        const u64 odd = (to | from) % 16;  // the largest units to which both places are aligned
        if (odd == 0) {
            copy_piece<uint4>(to, from, nbytes);
        } else if (odd % 4 == 0) {
            copy_piece<unsigned>(to, from, nbytes);
        } else if (odd % 2 == 0) {
            copy_piece<unsigned short>(to, from, nbytes);
        } else {
            copy_piece<unsigned char>(to, from, nbytes);
        }
    }
}
