// Data movement: a piece of any size and alignment to each rank, and one from each, in one launch; see pieces.cuh.
//
// Compiled in two forms.  Without LARGE all pieces are small.  Each channel has a block, and each thread sends and
// receives: one round of loads, one of stores and one of waiting, for low latency.  With SEVERAL there are more packets
// than threads.  Then all packets are sent before any is awaited: the other rank may receive them all before it sends.
//
// With LARGE, large pieces travel in batches through two slots in turn, with two counters for each pair: "sent" (in the
// receiver's slab) and "taken" (in the sender's).  Half of a block sends and the other half receives, each through all
// channels of the block.  So the links carry both directions all the time, and no direction waits for the other.  A
// channel is not bound to a block: if there are fewer blocks than channels, each block serves several in turn.
//
// With ``relay``, this rank sends what it receives from that rank: each packet and batch goes on to the others as soon
// as it arrives.  So a broadcast's root sends each byte once (scatter and all-gather at the same time).
#include "pieces.cuh"

#ifndef THREADS
#define THREADS (LARGE ? 1024 : RANKS > 4 ? 256 : 512) /* a thread's registers grow with RANKS */
#endif
#define KERNEL                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                     \
        exchange(const Context* context, u64 own, unsigned rank, u64 slots, unsigned slot, u64 posts, u64 boxes, \
                 unsigned small, unsigned all_channels, unsigned message, unsigned relay RANKS_8(PARAMETERS))
#define PIECE(r) {send##r, sending##r, by##r, recv##r, receiving##r, per##r}
#define ENTRY(r) PIECE(r),
#define CHOICE(r) \
    if (t == r) piece = PIECE(r);

#if !LARGE
KERNEL {
    after_former_kernel();
    const Piece pieces[] = {RANKS_8(ENTRY)};
    Small s;
    EACH_RANK {
        const Piece& piece = pieces[r];
        s.send[r] = piece.send, s.sending[r] = unsigned(piece.sending);
        s.recv[r] = piece.recv, s.receiving[r] = unsigned(piece.receiving);
        s.goes[r] = known_as(piece.sending, message), s.comes[r] = known_as(piece.receiving, message);
        cut(s.send[r], s.sending[r], unsigned(piece.send_share), blockIdx.x);
        cut(s.recv[r], s.receiving[r], unsigned(piece.recv_share), blockIdx.x);
        s.receiving[r] = r == rank && piece.send == piece.recv ? 0 : s.receiving[r];  // in place
    }
    const Boxes b(context, own, rank, posts, boxes, blockIdx.x);
    exchange_packets(b, s, relay, true, true, false, 0, threadIdx.x, blockDim.x);
}
#else
#define PATIENCE 16 /* looks, of a microsecond or less */

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
__device__ __noinline__ void copy(u64 to, u64 from, u64 bytes, u64 first, u64 threads) {
    u64 done = 0;
    if ((to | from) % 16 == 0) move<Vector>(to, from, bytes / 16, first, threads), done = bytes / 16 * 16;
    else if ((to | from) % 4 == 0) move<unsigned>(to, from, bytes / 4, first, threads), done = bytes / 4 * 4;
    move<unsigned char>(to + done, from + done, bytes - done, first, threads);
}

// What the threads of half a block share of a channel.
struct Shared {
    Small small;                        // pieces that travel as packets
    Piece pieces[RANKS];                // pieces that travel in batches, and this rank's own
    unsigned sent[RANKS], got[RANKS];   // batches of this pair and channel, of all launches
    unsigned out[RANKS], in[RANKS];     // batches of these pieces
    unsigned turns[RANKS];              // what can be done now
    volatile bool ended;                // a thread has given up its wait
};
enum Turn { READY = 1, WAITS = 2 };

// One thread's view of a channel.
struct Exchange {
    Shared& s;
    const Context* context;
    u64 own, line, slots, posts, boxes;  // this rank's slab, and offsets
    unsigned rank, channel, slot, relay;
    bool dead = false;

    __device__ __forceinline__ Boxes packets() const { return {context, own, rank, posts, boxes, channel}; }
    __device__ __forceinline__ bool relays() const { return relay < RANKS; }
    __device__ __forceinline__ u64 sending(unsigned r) const { return s.pieces[r].sending; }
    __device__ __forceinline__ u64 receiving(unsigned r) const { return s.pieces[r].receiving; }

    // Bytes of batch b of a piece.
    __device__ __forceinline__ u64 length(u64 bytes, unsigned b) const {
        const u64 begin = u64(b) * slot;
        return begin < bytes ? min(bytes - begin, u64(slot)) : 0;
    }
    __device__ __forceinline__ u64 place(unsigned to, unsigned from, unsigned count) const {
        return context->slab[to] + slots + ((u64(channel) * 2 + count % 2) * RANKS + from) * slot;
    }

    __device__ __forceinline__ void again(Wait& wait, unsigned r, unsigned wanted, unsigned seen, int phase) {
        if (phase && wait.looks % 1024 == 1023 && is_other_piece(packets(), r, s.small.comes[r], s.got[r])) dead = true;
        else wait.again(context, rank, dead, r, wanted, seen, phase);
        if (dead) s.ended = true;
        else if (wait.looks % 32 == 0) dead = s.ended;
    }

    // What can be done now with rank t, once it has moved so many batches; 0 when nothing is left to do.
    __device__ __forceinline__ bool has_room(unsigned t, unsigned& seen) const {
        seen = load_acquire(own + line + TAKEN_BATCHES + 4 * t);
        return int(seen - s.sent[t] + 1) >= 0;
    }
    __device__ __forceinline__ bool can_take(unsigned t, unsigned& seen) const {
        seen = load_acquire(own + line + ARRIVED_BATCHES + 4 * t);
        bool can = int(seen - s.got[t] - 1) >= 0;
        unsigned room;
#pragma unroll 1
        for (unsigned q = 0; t == relay && can && q < RANKS; q++)
            can = q == rank || !length(sending(q), s.out[q]) || has_room(q, room);
        return can;
    }
    template <bool takes>
    __device__ __forceinline__ unsigned turn(unsigned t, Wait& wait) {
        if (dead || !(takes ? length(receiving(t), s.in[t]) : relays() ? 0 : length(sending(t), s.out[t]))) return 0;
        if (takes && t == rank) return READY;
#ifdef BROKEN
        return READY;
#endif
        unsigned seen = 0;
        for (unsigned looks = 0; looks < PATIENCE && !dead; looks++) {
            if (takes ? can_take(t, seen) : has_room(t, seen)) {
                wait = Wait();
                if (!takes) return READY;
                const unsigned known = load_relaxed(own + line + LENGTH + 64 * (s.got[t] % 2) + 4 * t);
                if (known == s.small.comes[t]) return READY;
                dead = give_up(context, rank, UNEQUAL, t, s.small.comes[t], known, 1);
            } else {
                again(wait, t, takes ? s.got[t] + 1 : s.sent[t] - 1, seen, takes);
            }
        }
        return dead ? 0 : WAITS;
    }
    // Announce the batch that was written into rank t's slot.
    __device__ __forceinline__ void announce(unsigned t) {
        store_relaxed(context->slab[t] + line + LENGTH + 64 * (s.sent[t] % 2) + 4 * rank, s.small.goes[t]);
        store_release(context->slab[t] + line + ARRIVED_BATCHES + 4 * rank, ++s.sent[t]);
        s.out[t]++;
    }

    // Batches, until all are sent, or taken.
    __device__ __forceinline__ void send(unsigned t, unsigned threads) {
        Wait wait;
        for (unsigned pass = 0;; pass++) {
            if (t < RANKS) s.turns[t] = t == rank ? 0 : turn<false>(t, wait);
            part_barrier(false, threads);
            unsigned left = 0;
            for (unsigned r = 0; r < RANKS; r++) left |= s.turns[r];
            if (!left) break;
            stall(rank, pass, 0);
#pragma unroll 1
            for (unsigned k = 1; k < RANKS; k++) {
                const unsigned r = (rank + k) % RANKS;
                if (s.turns[r] == READY)
                    copy(place(r, rank, s.sent[r]), s.pieces[r].send + u64(s.out[r]) * slot,
                         length(sending(r), s.out[r]), t, threads);
            }
            part_barrier(false, threads);
            if (t < RANKS && s.turns[t] == READY) announce(t);
        }
    }
    __device__ __forceinline__ void take(unsigned t, unsigned threads) {
        Wait wait;
        for (unsigned pass = 0;; pass++) {
            if (t < RANKS) s.turns[t] = turn<true>(t, wait);
            part_barrier(true, threads);
            unsigned left = 0;
            for (unsigned r = 0; r < RANKS; r++) left |= s.turns[r];
            if (!left) break;
            stall(rank, pass, 1);
#pragma unroll 1
            for (unsigned k = 0; k < RANKS; k++) {
                const unsigned r = (rank + RANKS - k) % RANKS;
                if (s.turns[r] != READY) continue;
                const u64 n = length(receiving(r), s.in[r]), done = u64(s.in[r]) * slot;
                const u64 from = r == rank ? s.pieces[r].send + done : place(rank, r, s.got[r]);
#pragma unroll 1
                for (unsigned q = 0; r == relay && q < RANKS; q++)
                    if (q != rank) copy(place(q, rank, s.sent[q]), from, length(sending(q), s.out[q]), t, threads);
                copy(s.pieces[r].recv + done, from, n, t, threads);
            }
            const bool relayed = relays() && s.turns[relay] == READY;
            part_barrier(true, threads);
            if (t < RANKS && t != rank && relayed && length(sending(t), s.out[t])) announce(t);
            if (t < RANKS && s.turns[t] == READY) {
                s.in[t]++;
                if (t != rank) store_release(context->slab[t] + line + TAKEN_BATCHES + 4 * rank, ++s.got[t]);
            }
            __syncwarp();  // one of these threads may look at the others' counts
        }
    }
};

// One half of a block: what it sends, or takes, through all channels of the block.
template <bool takes>
__device__ __forceinline__ void run(Shared& s, Exchange x, const Piece& whole, unsigned small, unsigned all_channels,
                                    unsigned message, unsigned t, unsigned threads) {
    const unsigned rank = x.rank;
    const bool other = t < RANKS && t != rank, sends = takes == x.relays();
    for (x.channel = blockIdx.x; x.channel < all_channels; x.channel += gridDim.x) {
        x.line = PAIRS_OFFSET + u64(x.channel) * LINE_BYTES;
        const u64 counts = x.own + x.line + 4 * t;
        if (t < RANKS) {
            Piece piece = whole;
            s.small.goes[t] = known_as(piece.sending, message), s.small.comes[t] = known_as(piece.receiving, message);
            cut(piece.send, piece.sending, piece.send_share, x.channel);
            cut(piece.recv, piece.receiving, piece.recv_share, x.channel);
            const bool goes = other && whole.sending <= small, comes = other && whole.receiving <= small;
            s.small.send[t] = piece.send, s.small.sending[t] = goes ? unsigned(piece.sending) : 0;
            s.small.recv[t] = piece.recv, s.small.receiving[t] = comes ? unsigned(piece.receiving) : 0;
            if (goes) piece.sending = 0;
            if (comes) piece.receiving = 0;
            if (!other && piece.send == piece.recv) piece.receiving = 0;  // in place
            s.pieces[t] = piece;
            s.sent[t] = load_relaxed(counts + SENT), s.got[t] = load_relaxed(counts + GOT);
            s.out[t] = s.in[t] = 0, s.ended = x.dead;
            if (takes && s.small.receiving[t]) x.packets().report(x.context->slab[t], x.packets().count(READ, t));
        }
        part_barrier(takes, threads);
        if constexpr (takes) x.take(t, threads);
        x.dead = exchange_packets(x.packets(), s.small, x.relay, sends, takes, x.dead, takes, t, threads);
        if (!takes && sends) x.send(t, threads);
        if (other) {
            if (sends) store_relaxed(counts + SENT, s.sent[t]);
            if (takes) store_relaxed(counts + GOT, s.got[t]);
        }
        if (x.channel + gridDim.x < all_channels) part_barrier(takes, threads);
    }
}

KERNEL {
    __shared__ Shared s[2];
    after_former_kernel();
    const unsigned half = blockDim.x / 2, at = threadIdx.x / half, t = threadIdx.x % half;
    Piece piece;  // of the rank that this thread looks after, if any
    RANKS_8(CHOICE)
    const Exchange x{s[at], context, own, 0, slots, posts, boxes, rank, 0, slot, relay};
    if (at == 0) run<false>(s[0], x, piece, small, all_channels, message, t, half);
    else run<true>(s[1], x, piece, small, all_channels, message, t, half);
}
#endif
