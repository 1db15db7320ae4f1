// Data movement: a piece of any size and alignment to each rank, and one from each, in one launch; see pieces.cuh.
//
// Compiled in two forms.  Without LARGE all pieces are small.  Each channel has a block, and each thread sends and
// receives: one round of loads, one of stores and one of waiting, for low latency.
//
// With LARGE, large pieces travel in batches through two slots in turn, with two counters for each pair: "sent" (in the
// receiver's slab) and "taken" (in the sender's).  Half of a block sends and the other half receives, each through all
// channels of the block.  So the links carry both directions all the time, and no direction waits for the other.  A
// channel is not bound to a block: if there are fewer blocks than channels, each block serves several in turn.  A piece
// is cut into BATCHES batches or more, so that its receiver works on the first while the others are on their way.
//
// With ``relay``, this rank sends what it receives from that rank: each packet and batch goes on to the others as soon
// as it arrives, by all threads.  So a broadcast's root sends each byte once (scatter and all-gather at the same time).
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
#ifndef BATCHES
#define BATCHES 4
#endif
#ifndef SMALLEST_BATCH
#define SMALLEST_BATCH 8192
#endif

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

// ``bytes`` bytes from one place to several, 0 where there is none.
__device__ __noinline__ void spread(const u64* to, u64 from, u64 bytes, u64 first, u64 threads) {
    constexpr int UNROLL = 4;
    u64 places = from;
    EACH_RANK places |= to[r];
    const u64 n = places % 16 ? 0 : bytes / 16;
    for (u64 i = first; i < n; i += UNROLL * threads) {
        Vector v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + u * threads < n) load(v[u], from + 16 * (i + u * threads));
        EACH_RANK {
            const u64 there = to[r];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (there && i + u * threads < n) store(there + 16 * (i + u * threads), v[u]);
        }
    }
#pragma unroll 1
    for (unsigned r = 0; r < RANKS; r++)
        if (to[r]) copy(to[r] + 16 * n, from + 16 * n, bytes - 16 * n, first, threads);
}

// What the threads of a part of a block share of a channel.
struct Shared {
    Small small;                        // pieces that travel as packets
    Piece pieces[RANKS];                // pieces that travel in batches, and this rank's own; a share is a batch's
    u64 to[RANKS];                      // where a batch that is relayed goes
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

    // Bytes of a whole batch, of a piece of which a channel carries ``share`` bytes.
    __device__ __forceinline__ u64 batch(u64 share) const {
        return min(u64(slot), max(u64(SMALLEST_BATCH), (share / BATCHES + 127) / 128 * 128));
    }
    // Bytes of a batch.
    __device__ __forceinline__ static u64 length(u64 bytes, u64 batch, unsigned b) {
        const u64 begin = b * batch;
        return begin < bytes ? min(bytes - begin, batch) : 0;
    }
    // Bytes of the next batch to rank r, and of the next one from it.
    __device__ __forceinline__ u64 going(unsigned r) const {
        return length(s.pieces[r].sending, s.pieces[r].send_share, s.out[r]);
    }
    __device__ __forceinline__ u64 coming(unsigned r) const {
        return length(s.pieces[r].receiving, s.pieces[r].recv_share, s.in[r]);
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
            can = q == rank || !going(q) || has_room(q, room);
        return can;
    }
    template <bool takes>
    __device__ __forceinline__ unsigned turn(unsigned t, Wait& wait) {
        if (dead || !(takes ? coming(t) : going(t))) return 0;
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
                    copy(place(r, rank, s.sent[r]), s.pieces[r].send + s.out[r] * s.pieces[r].send_share, going(r), t,
                         threads);
            }
            part_barrier(false, threads);
            if (t < RANKS && s.turns[t] == READY) announce(t);
        }
    }
    __device__ __forceinline__ void take(unsigned t, unsigned threads) {
        Wait wait;
        for (unsigned pass = 0;; pass++) {
            if (t < RANKS) {
                s.turns[t] = turn<true>(t, wait);
                const Piece& relayed = s.pieces[relay % RANKS];
                s.to[t] = t == rank ? relayed.recv + s.in[relay % RANKS] * relayed.recv_share
                          : going(t) ? place(t, rank, s.sent[t]) : 0;
            }
            part_barrier(true, threads);
            unsigned left = 0;
            for (unsigned r = 0; r < RANKS; r++) left |= s.turns[r];
            if (!left) break;
            stall(rank, pass, 1);
#pragma unroll 1
            for (unsigned k = 0; k < RANKS; k++) {
                const unsigned r = (rank + RANKS - k) % RANKS;
                if (s.turns[r] != READY) continue;
                const u64 n = coming(r), done = s.in[r] * s.pieces[r].recv_share;
                const u64 from = r == rank ? s.pieces[r].send + done : place(rank, r, s.got[r]);
                if (r == relay) spread(s.to, from, n, t, threads);
                else copy(s.pieces[r].recv + done, from, n, t, threads);
            }
            const bool relayed = relays() && s.turns[relay] == READY;
            part_barrier(true, threads);
            if (t < RANKS && t != rank && relayed && going(t)) announce(t);
            if (t < RANKS && s.turns[t] == READY) {
                s.in[t]++;
                if (t != rank) store_release(context->slab[t] + line + TAKEN_BATCHES + 4 * rank, ++s.got[t]);
            }
            __syncwarp();  // one of these threads may look at the others' counts
        }
    }
};

// A part of a block: what it sends, or takes, through all channels of the block.
template <bool takes>
__device__ __forceinline__ void run(Shared& s, Exchange x, const Piece& whole, unsigned small, unsigned all_channels,
                                    unsigned message, unsigned t, unsigned threads) {
    const unsigned rank = x.rank;
    const bool other = t < RANKS && t != rank, sends = !takes || x.relays();
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
            piece.send_share = x.batch(piece.send_share), piece.recv_share = x.batch(piece.recv_share);
            s.pieces[t] = piece;
            s.sent[t] = load_relaxed(counts + SENT), s.got[t] = load_relaxed(counts + GOT);
            s.out[t] = s.in[t] = 0, s.ended = x.dead;
            if (takes && s.small.receiving[t]) x.packets().report(x.context->slab[t], x.packets().count(READ, t));
        }
        part_barrier(takes, threads);
        if constexpr (takes) x.take(t, threads);
        x.dead = exchange_packets(x.packets(), s.small, x.relay, sends, takes, x.dead, takes, t, threads);
        if constexpr (!takes) x.send(t, threads);
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
    const unsigned part = relay < RANKS ? blockDim.x : blockDim.x / 2, t = threadIdx.x % part;
    const bool takes = relay < RANKS || threadIdx.x >= part;
    Piece piece;  // of the rank that this thread looks after, if any
    RANKS_8(CHOICE)
    const Exchange x{s[takes], context, own, 0, slots, posts, boxes, rank, 0, slot, relay};
    if (takes) run<true>(s[1], x, piece, small, all_channels, message, t, part);
    else run<false>(s[0], x, piece, small, all_channels, message, t, part);
}
#endif
