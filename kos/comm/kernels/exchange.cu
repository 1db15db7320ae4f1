// Everything that only moves: a piece of any size and alignment to each rank, and one from each, in one launch.
//
// A pair of ranks is a queue of its own: the sender writes a piece batch by batch into two slots of the receiver's
// slab, turn and turn about, and the receiver copies them out.  Two counters for each pair and channel, which only go
// up: "sent" (in the receiver's slab) and "taken" (in the sender's).  Nobody else is needed, so this carries messages
// between two ranks as well as collectives; and buffers are touched by their own rank alone, so neither entry nor
// exit needs a barrier.  How a piece is cut depends on its bytes alone: the ranks may take part in different
// exchanges, as long as the pieces of each pair come in the same order on both sides.
//
// A block sends batch b to every rank and then takes batch b - 1 from every rank.  The rank that is furthest behind
// never waits for a later batch than its own, so all go on.
#include "channel.cuh"

#ifndef THREADS
#define THREADS 512
#endif
#define SHARE 8192 /* bytes; of a piece, for a channel of its own */

// Pieces of the 8 ranks that there may be.
#define RANKS_8(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define PARAMETERS(r) , u64 send##r, u64 sending##r, u64 recv##r, u64 receiving##r
#define PIECE(r) pieces[r] = {send##r, sending##r, recv##r, receiving##r};
struct Piece {
    u64 send, sending, recv, receiving;  // addresses and bytes
};

// Words of a channel's second line: own counts by rank, what the others count here, and of what piece the batch in a
// slot is, at LENGTH + 64 * slot: its bytes modulo 2^31 and, in the highest bit, whether it is a message.
enum Count { SENT = 0, GOT = 64, ARRIVED_BATCHES = 128, TAKEN_BATCHES = 192, LENGTH = 32 };

template <class V> struct Move {
    static __device__ __forceinline__ V load(u64 from) { return load_element<V>(from); }
    static __device__ __forceinline__ void store(u64 to, const V& v) { store_element(to, v); }
};
template <> struct Move<Vector> {
    static __device__ __forceinline__ Vector load(u64 from) {
        Vector v;
        ::load(v, from);
        return v;
    }
    static __device__ __forceinline__ void store(u64 to, const Vector& v) { ::store(to, v); }
};

// n elements by ``threads`` threads, this one being number ``first``.
template <class V> __device__ __forceinline__ void move(u64 to, u64 from, u64 n, u64 first, u64 threads) {
    constexpr int UNROLL = 4;
    for (u64 i = first; i < n; i += UNROLL * threads) {
        V v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + u * threads < n) v[u] = Move<V>::load(from + (i + u * threads) * sizeof(V));
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + u * threads < n) Move<V>::store(to + (i + u * threads) * sizeof(V), v[u]);
    }
}

// ``bytes`` bytes of any alignment.
__device__ void copy(u64 to, u64 from, u64 bytes, u64 first, u64 threads) {
    u64 done = 0;
    if ((to | from) % 16 == 0) move<Vector>(to, from, bytes / 16, first, threads), done = bytes / 16 * 16;
    else if ((to | from) % 4 == 0) move<unsigned>(to, from, bytes / 4, first, threads), done = bytes / 4 * 4;
    move<unsigned char>(to + done, from + done, bytes - done, first, threads);
}

// Keep of a piece what goes through this channel.
__device__ void cut(u64& address, u64& bytes, unsigned most) {
    const u64 channels = max(min((bytes + SHARE - 1) / SHARE, u64(most)), 1ull);
    const u64 share = ((bytes + channels - 1) / channels + 127) / 128 * 128, begin = min(blockIdx.x * share, bytes);
    address += begin;
    bytes = min(share, bytes - begin);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    exchange(const Context* context, u64 own, unsigned rank, u64 slots, unsigned slot,
             unsigned most, unsigned message RANKS_8(PARAMETERS)) {
    __shared__ Piece pieces[8];
    __shared__ unsigned sent[RANKS], got[RANKS], batches;
    unsigned goes = 0, comes = 0;  // what is said of the whole pieces
    after_former_kernel();
    const unsigned t = threadIdx.x;
    const u64 line = PAIRS_OFFSET + u64(blockIdx.x) * LINE_BYTES;
    const bool other = t < RANKS && t != rank;
    bool dead = false;
    if (t == 0) {
        RANKS_8(PIECE)
        batches = 0;
    }
    __syncthreads();
    if (t < RANKS) {
        goes = unsigned(pieces[t].sending) & ~(1u << 31) | message << 31;
        comes = unsigned(pieces[t].receiving) & ~(1u << 31) | message << 31;
        cut(pieces[t].send, pieces[t].sending, most);
        cut(pieces[t].recv, pieces[t].receiving, most);
    }
    if (other) {
        sent[t] = load_relaxed(own + line + SENT + 4 * t);
        got[t] = load_relaxed(own + line + GOT + 4 * t);
        atomicMax(&batches, unsigned((max(pieces[t].sending, pieces[t].receiving) + slot - 1) / slot));
    }
    __syncthreads();

    // Bytes of batch b of a piece.
    auto length = [&](u64 bytes, unsigned b) {
        const u64 begin = u64(b) * slot;
        return begin < bytes ? min(bytes - begin, u64(slot)) : 0;
    };
    auto place = [&](unsigned to, unsigned from, unsigned count) {
        return context->slab[to] + slots + ((u64(blockIdx.x) * 2 + count % 2) * RANKS + from) * slot;
    };
    // All threads wait until the counters ``at`` that matter to them have come to ``wanted``.
    auto await = [&](bool mine, u64 at, unsigned wanted, int phase) {
#ifndef BROKEN
        if (mine) {
            Wait wait;
            unsigned seen;
            while (!dead && int((seen = load_acquire(at)) - wanted) < 0)
                wait.again(context, rank, dead, t, wanted, seen, phase);
        }
#endif
        __syncthreads();
    };

    if (pieces[rank].send != pieces[rank].recv)
        copy(pieces[rank].recv, pieces[rank].send, pieces[rank].sending, t, blockDim.x);
    for (unsigned b = 0; b <= batches; b++) {
        const bool sends = other && length(pieces[t].sending, b);
        await(sends, own + line + TAKEN_BATCHES + 4 * t, sends ? sent[t] - 1 : 0, 0);
        stall(rank, b, 0);
        for (unsigned k = 1; k < RANKS; k++) {
            const unsigned r = (rank + k) % RANKS;
            copy(place(r, rank, sent[r]), pieces[r].send + u64(b) * slot, length(pieces[r].sending, b), t, blockDim.x);
        }
        __syncthreads();
        if (sends) {
            store_relaxed(context->slab[t] + line + LENGTH + 64 * (sent[t] % 2) + 4 * rank, goes);
            store_release(context->slab[t] + line + ARRIVED_BATCHES + 4 * rank, ++sent[t]);
        }

        const bool takes = other && b > 0 && length(pieces[t].receiving, b - 1);
        await(takes, own + line + ARRIVED_BATCHES + 4 * t, takes ? got[t] + 1 : 0, 1);
#ifndef BROKEN
        if (takes && !dead) {
            const unsigned announced = load_relaxed(own + line + LENGTH + 64 * (got[t] % 2) + 4 * t);
            if (announced != comes) dead = give_up(context, rank, UNEQUAL, t, comes, announced, 1);
        }
#endif
        stall(rank, b, 1);
        for (unsigned k = 1; k < RANKS && b > 0; k++) {
            const unsigned r = (rank + RANKS - k) % RANKS;
            const u64 to = pieces[r].recv + u64(b - 1) * slot;
            copy(to, place(rank, r, got[r]), length(pieces[r].receiving, b - 1), t, blockDim.x);
        }
        __syncthreads();
        if (takes) store_release(context->slab[t] + line + TAKEN_BATCHES + 4 * rank, ++got[t]);
    }
    if (other) {
        store_relaxed(own + line + SENT + 4 * t, sent[t]);
        store_relaxed(own + line + GOT + 4 * t, got[t]);
    }
}
