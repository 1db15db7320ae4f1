// All-reduce straight between the ranks' buffers, for bandwidth.
//
// Rank r fetches chunk r of every rank, adds in rank order and writes the sum to every rank: 2 (n - 1) / n of the
// bytes over each link, each way.  Barrier, work, barrier: no input is read before it is complete, and no rank returns
// before all have read and written.  Tile t of every chunk belongs to channel t mod grid on all ranks, so a channel's
// barrier covers the memory that its block accesses.
//
// in_table[r] + in_offset is rank r's input as this rank sees it, 16-byte aligned; the same for the output, which
// may be the input.  If the users' buffers are not symmetric, ``source`` and ``target`` are theirs, and the message
// passes through the tables' buffers (padded to whole vectors) ``piece`` elements at a time.  A piece's first barrier
// then also ensures that all ranks have copied out the previous piece, so all pieces have the same layout.
#include "channel.cuh"
#include "reduce.cuh"

#ifndef THREADS
#define THREADS 512
#endif
#ifndef UNROLL
#define UNROLL 1
#endif

#define ALL_REDUCE(name)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                        \
    name(const Context* context, u64 own_slab, unsigned own_rank, const u64* in_table, long long in_offset,      \
         const u64* out_table, long long out_offset, const char* source, char* target, long long count,          \
         long long piece)

constexpr int PER_VECTOR = 16 / sizeof(Bits);

// How ``count`` elements, of ``piece`` at most, are cut: vectors into one chunk a rank, a chunk into tiles.
struct Cut {
    long long count, vectors, chunk;
    __device__ Cut(long long count, long long piece, bool padded)
        : count(count), vectors((count + (padded ? PER_VECTOR - 1 : 0)) / PER_VECTOR) {
        chunk = ((piece + PER_VECTOR - 1) / PER_VECTOR + RANKS - 1) / RANKS;
        chunk = (chunk + 7) / 8 * 8;  // 128-byte lines
    }
    __device__ long long begin(int r) const { return min(r * chunk, vectors); }
    __device__ long long end(int r) const { return min((r + 1) * chunk, vectors); }
};

// Copy this channel's tiles of all chunks.
__device__ void copy_share(char* to, const char* from, const Cut& cut, int tile) {
    const bool aligned = (reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from)) % 16 == 0;
    for (int r = 0; r < RANKS; r++) {
        const long long begin = cut.begin(r), end = cut.end(r);
        for (long long t = begin + (long long)blockIdx.x * tile; t < end; t += (long long)gridDim.x * tile) {
            const long long stop = min(t + tile, end);
            if (aligned && stop * PER_VECTOR <= cut.count) {
                for (long long i = t + threadIdx.x; i < stop; i += blockDim.x)
                    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
            } else {
                const long long last = min(stop * PER_VECTOR, cut.count);
                for (long long i = t * PER_VECTOR + threadIdx.x; i < last; i += blockDim.x)
                    reinterpret_cast<Bits*>(to)[i] = reinterpret_cast<const Bits*>(from)[i];
            }
        }
    }
}

// The elements after the last whole vector: the last rank's channel 0 adds them.
__device__ __noinline__ void reduce_rest(const u64* in_table, long long in_offset, const u64* out_table,
                                         long long out_offset, long long vectors, long long count, unsigned rank) {
    const long long i = vectors * PER_VECTOR + threadIdx.x;
    if (rank != RANKS - 1 || blockIdx.x != 0 || i >= count) return;
    Wide sum = {};
    for (int r = 0; r < RANKS; r++) {
        Wide x = T::widen(load_element<Bits>(in_table[r] + in_offset + i * sizeof(Bits)));
        sum = r == 0 ? x : Op::combine(sum, x);
    }
    for (int r = 0; r < RANKS; r++)
        store_element<Bits>(out_table[r] + out_offset + i * sizeof(Bits), T::narrow(Op::finish(sum)));
}

// v[k] is of rank (rank + k): rotate so that v[r] is of rank r, with indices known to the compiler.
__device__ __forceinline__ void into_rank_order(Vector (&v)[RANKS], unsigned rank) {
#pragma unroll
    for (int bit = 1; bit < RANKS; bit *= 2) {
        if (!(rank & bit)) continue;
        Vector u[RANKS];
#pragma unroll
        for (int k = 0; k < RANKS; k++) u[(k + bit) % RANKS] = v[k];
#pragma unroll
        for (int k = 0; k < RANKS; k++) v[k] = u[k];
    }
}

// What is done around the work on a piece; ``tile`` in vectors.
template <class Work>
__device__ __forceinline__ void each_piece(Channel& channel, const u64* in_table, long long in_offset,
                                           const u64* out_table, long long out_offset, const char* source,
                                           char* target, long long count, long long piece, int tile, Work work) {
    const unsigned rank = channel.rank;
    for (long long base = 0; base < count; base += piece) {
        const Cut cut(min(piece, count - base), piece, source);
        if (source)
            copy_share(reinterpret_cast<char*>(in_table[rank] + in_offset), source + base * sizeof(Bits), cut, tile);
        stall(rank, channel.barriers, 0);
        channel.barrier(0);
        stall(rank, channel.barriers, 1);
        work(cut);
        if (!source) reduce_rest(in_table, in_offset, out_table, out_offset, cut.vectors, cut.count, rank);
        channel.barrier(1);
        if (target)
            copy_share(target + base * sizeof(Bits), reinterpret_cast<char*>(out_table[rank] + out_offset), cut, tile);
    }
}
#define EACH_PIECE(tile, work)                                                                                      \
    each_piece(channel, in_table, in_offset, out_table, out_offset, source, target, count, piece, tile, work)

ALL_REDUCE(direct) {
    after_former_kernel();
    Channel channel(context, own_slab, own_rank);
    const unsigned rank = own_rank;
    u64 in[RANKS], out[RANKS];
#pragma unroll
    for (int k = 0; k < RANKS; k++) {
        in[k] = __ldg(in_table + (rank + k) % RANKS) + in_offset;
        out[k] = __ldg(out_table + (rank + k) % RANKS) + out_offset;
    }
    auto work = [&](const Cut& cut) {
        const long long end = cut.end(rank), step = (long long)gridDim.x * THREADS * UNROLL;
        for (long long t = cut.begin(rank) + (long long)blockIdx.x * THREADS * UNROLL + threadIdx.x; t < end; t += step) {
            Vector v[UNROLL][RANKS];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (t + u * THREADS < end) {
#pragma unroll
                    for (int k = 0; k < RANKS; k++) load(v[u][k], in[k] + 16 * (t + u * THREADS));
                }
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (t + u * THREADS < end) {
                    into_rank_order(v[u], rank);
                    Sum<4> sum;
                    sum.first(v[u][0].x);
#pragma unroll
                    for (int r = 1; r < RANKS; r++) sum.combine(v[u][r].x);
                    sum.finish(v[u][0].x);
#pragma unroll
                    for (int k = 0; k < RANKS; k++) store(out[k] + 16 * (t + u * THREADS), v[u][0]);
                }
        }
    };
    EACH_PIECE(THREADS * UNROLL, work);
    channel.close();
}
