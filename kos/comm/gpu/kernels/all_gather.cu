// All-gather by writes into outputs that all ranks map: rank r writes its ``bytes`` to place r of every output.
//
// The first barrier ensures that no rank still reads its output's old contents, the second that all data has arrived.
// Block b moves the same part of every rank's bytes, so a channel's barriers cover the memory that its block accesses.
#include "channel.cuh"

#ifndef THREADS
#define THREADS 512
#endif

// 16 bytes of this rank's own, of any alignment.
__device__ __forceinline__ void fetch(Vector& v, u64 from) {
    if (from % 16 == 0) return load(v, from);
    for (int k = 0; k < 4; k++) {
        v.x[k] = 0;
        for (int b = 0; b < 4; b++) v.x[k] |= unsigned(load_element<unsigned char>(from + 4 * k + b)) << 8 * b;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    all_gather(const Context* context, u64 own, unsigned rank, const u64* out_table, u64 out_offset, u64 source,
               u64 bytes) {
    constexpr int UNROLL = 4;
    after_former_kernel();
    Channel channel(context, own, rank);
    u64 out[RANKS];
#pragma unroll
    for (int k = 0; k < RANKS; k++) out[k] = __ldg(out_table + (rank + k) % RANKS) + out_offset + rank * bytes;
    const u64 vectors = bytes / 16, share = (vectors + gridDim.x - 1) / gridDim.x;
    const u64 end = min((blockIdx.x + 1) * share, vectors);
    stall(rank, channel.barriers, 0);
    channel.barrier(0);
    stall(rank, channel.barriers, 1);
    for (u64 i = blockIdx.x * share + threadIdx.x; i < end; i += UNROLL * THREADS) {
        Vector v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + u * THREADS < end) fetch(v[u], source + 16 * (i + u * THREADS));
#pragma unroll
        for (int k = 0; k < RANKS; k++)
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (i + u * THREADS < end) store(out[k] + 16 * (i + u * THREADS), v[u]);
    }
    channel.barrier(1);
    channel.close();
}
