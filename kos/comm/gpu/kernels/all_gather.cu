// All-gather and all-to-all by writes into outputs that all ranks map.  Rank r writes to place r of every output: its
// ``bytes`` (all-gather), or its ``bytes`` for the rank of that output (all-to-all).
//
// The first barrier ensures that no rank still reads its output's old contents, the second that all data has arrived.
// Block b moves the same part of every rank's bytes, so a channel's barriers cover the memory that its block accesses.
// No other rank writes to this rank's own bytes, so the first of them are loaded before the barrier.
#include "channel.cuh"

#ifndef THREADS
#define THREADS 512
#endif

// 16 bytes of this rank's own, of any alignment.
__device__ __noinline__ Vector fetch_slowly(u64 from) {
    Vector v = {};
    for (int b = 0; b < 16; b++) v.x[b / 4] |= unsigned(load_element<unsigned char>(from + b)) << b % 4 * 8;
    return v;
}
__device__ __forceinline__ void fetch(Vector& v, u64 from) {
    if (from % 16 == 0) load(v, from);
    else v = fetch_slowly(from);
}

// ``each``: rank r gets part r of the source (all-to-all).  Otherwise all ranks get the same bytes (all-gather).
template <bool each>
__device__ __forceinline__ void write(const Context* context, u64 own, unsigned rank, const u64* out_table,
                                      u64 out_offset, u64 source, u64 bytes) {
    constexpr int SOURCES = each ? RANKS : 1, UNROLL = each && RANKS > 4 ? 2 : 4;
    after_former_large_kernel();
    const u64 vectors = bytes / 16, share = (vectors + gridDim.x - 1) / gridDim.x;
    const u64 end = min((blockIdx.x + 1) * share, vectors);
    Vector v[SOURCES][UNROLL];
    const auto fetch_all = [&](u64 i) {
#pragma unroll
        for (int k = 0; k < SOURCES; k++)
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (i + u * THREADS < end)
                    fetch(v[k][u], source + (each ? (rank + k) % RANKS * bytes : 0) + 16 * (i + u * THREADS));
    };
    u64 i = blockIdx.x * share + threadIdx.x, out[RANKS];
    fetch_all(i);
    Channel channel(context, own, rank);
#pragma unroll
    for (int k = 0; k < RANKS; k++) out[k] = __ldg(out_table + (rank + k) % RANKS) + out_offset + rank * bytes;
    stall(rank, channel.barriers, 0);
    channel.barrier(0);
    stall(rank, channel.barriers, 1);
    for (; i < end; fetch_all(i += UNROLL * THREADS))
#pragma unroll
        for (int k = 0; k < RANKS; k++)
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (i + u * THREADS < end) store(out[k] + 16 * (i + u * THREADS), v[each ? k : 0][u]);
    channel.barrier(1);
    channel.close();
}

#define WRITE(name, each)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                     \
        name(const Context* context, u64 own, unsigned rank, const u64* out_table, u64 out_offset, u64 source, \
             u64 bytes) {                                                                                     \
        write<each>(context, own, rank, out_table, out_offset, source, bytes);                                \
    }
WRITE(all_gather, false)
WRITE(all_to_all, true)
