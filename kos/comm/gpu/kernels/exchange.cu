// Data movement: a piece of any size and alignment to each rank, and one from each, in one launch.
//
// Each pair of ranks has its own queue: the sender writes a piece batch by batch into two alternating slots of the
// receiver's slab, and the receiver copies them out.  Each pair and channel has two monotonic counters: "sent" (in the
// receiver's slab) and "taken" (in the sender's).  No third rank is involved, so this serves messages between two ranks
// as well as collectives.  Only its own rank accesses a buffer, so neither entry nor exit needs a barrier.  The batches
// of a piece depend only on its size: ranks may take part in different exchanges, as long as the pieces of each pair
// have the same order on both sides.
//
// A block waits until it can send the next batch to every rank and receive one from every rank, but not for long: then
// it continues with the ready ones, since one direction between two ranks may have to finish before the other (a
// receive and then a send on the peer, both at once here).
//
// A channel is not bound to a block: fewer blocks than channels take them in turn.
#include "channel.cuh"

#ifndef THREADS
#define THREADS 512
#endif
#define SHARE 8192 /* bytes; of a piece, for a channel of its own */
#define PATIENCE 64 /* looks, of a microsecond or two */

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
__device__ void cut(u64& address, u64& bytes, unsigned channel, unsigned most) {
    const u64 channels = max(min((bytes + SHARE - 1) / SHARE, u64(most)), 1ull);
    const u64 share = ((bytes + channels - 1) / channels + 127) / 128 * 128, begin = min(channel * share, bytes);
    address += begin;
    bytes = min(share, bytes - begin);
}

// What a thread finds of the rank that it looks after.
enum Turn { SENDS = 1, TAKES = 2, WAITS = 4 };

extern "C" __global__ void __launch_bounds__(THREADS)
    exchange(const Context* context, u64 own, unsigned rank, u64 slots, unsigned slot,
             unsigned most, unsigned all_channels, unsigned message RANKS_8(PARAMETERS)) {
    __shared__ Piece pieces[8];
    __shared__ unsigned sent[RANKS], got[RANKS];  // batches of this pair and channel, ever
    __shared__ unsigned out[RANKS], in[RANKS];    // and of these pieces
    __shared__ unsigned turns[RANKS];
    after_former_kernel();
    const unsigned t = threadIdx.x;
    const bool other = t < RANKS && t != rank;
    bool dead = false;
    for (unsigned channel = blockIdx.x; channel < all_channels; channel += gridDim.x) {
        const u64 line = PAIRS_OFFSET + u64(channel) * LINE_BYTES;
        unsigned goes = 0, comes = 0;  // what is said of the whole pieces
        if (t == 0) {
            RANKS_8(PIECE)
        }
        __syncthreads();
        if (t < RANKS) {
            goes = unsigned(pieces[t].sending) & ~(1u << 31) | message << 31;
            comes = unsigned(pieces[t].receiving) & ~(1u << 31) | message << 31;
            cut(pieces[t].send, pieces[t].sending, channel, most);
            cut(pieces[t].recv, pieces[t].receiving, channel, most);
            out[t] = in[t] = turns[t] = 0;
        }
        if (other) {
            sent[t] = load_relaxed(own + line + SENT + 4 * t);
            got[t] = load_relaxed(own + line + GOT + 4 * t);
        }
        __syncthreads();

        // Bytes of batch b of a piece.
        auto length = [&](u64 bytes, unsigned b) {
            const u64 begin = u64(b) * slot;
            return begin < bytes ? min(bytes - begin, u64(slot)) : 0;
        };
        auto place = [&](unsigned to, unsigned from, unsigned count) {
            return context->slab[to] + slots + ((u64(channel) * 2 + count % 2) * RANKS + from) * slot;
        };
        Wait wait;
        // What can be done with rank t now; 0 when nothing is left to do.
        auto turn = [&]() {
            const bool sends = length(pieces[t].sending, out[t]), takes = length(pieces[t].receiving, in[t]);
            const unsigned wanted = sends * SENDS | takes * TAKES;
#ifdef BROKEN
            return wanted;
#else
            // What comes is not waited for before as much has gone: the other rank may wait for that.
            const unsigned enough = sends && in[t] >= out[t] ? unsigned(SENDS) : wanted;
            const u64 counters = own + line + 4 * t;
            unsigned ready = 0;
            for (unsigned looks = 0; (ready & enough) != enough && looks < PATIENCE && !dead; looks++) {
                for (unsigned phase = 0; phase < 2; phase++) {
                    const unsigned way = phase ? TAKES : SENDS, count = phase ? got[t] + 1 : sent[t] - 1;
                    if (!(wanted & ~ready & way) || (ready & enough) == enough) continue;
                    const unsigned seen = load_acquire(counters + (phase ? ARRIVED_BATCHES : TAKEN_BATCHES));
                    if (int(seen - count) >= 0) ready |= way;
                    else wait.again(context, rank, dead, t, count, seen, phase);
                }
            }
            if (ready & TAKES && !dead) {
                const unsigned announced = load_relaxed(own + line + LENGTH + 64 * (got[t] % 2) + 4 * t);
                if (announced != comes) dead = give_up(context, rank, UNEQUAL, t, comes, announced, 1);
            }
            if (ready) wait = Wait();
            return dead ? 0 : ready ? ready : wanted ? unsigned(WAITS) : 0;
#endif
        };

        if (pieces[rank].send != pieces[rank].recv)
            copy(pieces[rank].recv, pieces[rank].send, pieces[rank].sending, t, blockDim.x);
        for (unsigned pass = 0;; pass++) {
            if (other) turns[t] = turn();
            __syncthreads();
            unsigned left = 0;
            for (unsigned r = 0; r < RANKS; r++) left |= turns[r];
            if (!left) break;
            stall(rank, pass, 0);
            for (unsigned k = 1; k < RANKS && left & SENDS; k++) {
                const unsigned r = (rank + k) % RANKS;
                if (turns[r] & SENDS)
                    copy(place(r, rank, sent[r]), pieces[r].send + u64(out[r]) * slot, length(pieces[r].sending, out[r]), t,
                         blockDim.x);
            }
            __syncthreads();
            if (other && turns[t] & SENDS) {
                store_relaxed(context->slab[t] + line + LENGTH + 64 * (sent[t] % 2) + 4 * rank, goes);
                store_release(context->slab[t] + line + ARRIVED_BATCHES + 4 * rank, ++sent[t]);
                out[t]++;
            }
            stall(rank, pass, 1);
            for (unsigned k = 1; k < RANKS && left & TAKES; k++) {
                const unsigned r = (rank + RANKS - k) % RANKS;
                if (turns[r] & TAKES)
                    copy(pieces[r].recv + u64(in[r]) * slot, place(rank, r, got[r]), length(pieces[r].receiving, in[r]), t,
                         blockDim.x);
            }
            __syncthreads();
            if (other && turns[t] & TAKES) {
                store_release(context->slab[t] + line + TAKEN_BATCHES + 4 * rank, ++got[t]);
                in[t]++;
            }
        }
        if (other) {
            store_relaxed(own + line + SENT + 4 * t, sent[t]);
            store_relaxed(own + line + GOT + 4 * t, got[t]);
        }
        __syncthreads();
    }
}
