// Data movement: a piece of any size and alignment to each rank, and one from each, in one launch.
//
// Each pair of ranks has its own queues in the receiver's slab.  No third rank is involved, so this serves messages
// between two ranks as well as collectives.  Only its own rank accesses a buffer, so neither entry nor exit needs a
// barrier.  How a piece travels depends only on its size: ranks may take part in different exchanges, as long as the
// pieces of each pair have the same order on both sides.
//
// Small pieces travel as packets, which carry their own flag (as in packets.cuh): 8 bytes of data and a tag, in one
// .b128 access.  The tag is the number of the piece in its queue with the piece's bytes and kind, so that a piece that
// was not expected is never taken for another.  A queue has two boxes in turn.  A sender fills a box once the piece
// that was in it has been taken.  The receiver reports that when it begins to receive the next piece, so that no kernel
// ends with a write to another rank.
//
// Large pieces travel in batches through two slots in turn, with two counters for each pair: "sent" (in the receiver's
// slab) and "taken" (in the sender's).
//
// Half of a block sends, the other half receives, each through all channels of the block: so the links carry both
// directions all the time, and no direction waits for the other.
//
// With ``relay``, what this rank sends is what it receives from that rank: each packet and batch goes on to the others
// as soon as it has come.  So a broadcast's root sends each byte once (scatter and all-gather at the same time).
//
// A channel is not bound to a block: fewer blocks than channels take them in turn.
#include "channel.cuh"

#ifndef THREADS
#define THREADS 1024
#endif
#define BOX_PACKETS 512
#define PATIENCE 16 /* looks, of a microsecond or less */

// Pieces of the 8 ranks that there may be.
#define RANKS_8(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define PARAMETERS(r) , u64 send##r, u64 sending##r, u64 by##r, u64 recv##r, u64 receiving##r, u64 per##r
#define PIECE(r) \
    if ((t < half ? t : t - half) == r) piece = {send##r, sending##r, by##r, recv##r, receiving##r, per##r};
struct Piece {
    u64 send, sending, send_share, recv, receiving, recv_share;  // addresses and bytes; shares: of a channel
};

// Words of a channel's second line, for batches: own counts by rank, what the others count here, and the piece that the
// batch in a slot belongs to, at LENGTH + 64 * slot.  Of its third line, for packets: own counts (64 bits), and how many
// of this rank's pieces the others have taken.
enum Count { SENT = 0, GOT = 64, ARRIVED_BATCHES = 128, TAKEN_BATCHES = 192, LENGTH = 32 };
enum Post { POSTED = 0, READ = 64, TAKEN_PIECES = 128 };

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

// How other ranks know a piece: its bytes modulo 2^31 and, in the highest bit, whether it is a message.
__device__ __forceinline__ unsigned known_as(u64 bytes, unsigned message) {
    return unsigned(bytes) & ~(1u << 31) | message << 31;
}
// The tag of a small piece: kind, bytes (19 bits) and the number in its queue (44 bits, which last for months).
#define NUMBER 44
__device__ __forceinline__ u64 tag_of(unsigned known, u64 number) {
    return u64(known >> 31) << 63 | u64(known & ~(1u << 31)) << NUMBER | number & (1ull << NUMBER) - 1;
}
__device__ __forceinline__ unsigned known_from(u64 tag) {
    return unsigned(tag >> 63) << 31 | unsigned(tag << 1 >> (NUMBER + 1));
}

// Keep of a piece what goes through this channel.
__device__ __forceinline__ void cut(u64& address, u64& bytes, u64 share, unsigned channel) {
    const u64 begin = min(channel * share, bytes);
    address += begin;
    bytes = min(share, bytes - begin);
}

// 8 bytes of the ``left`` bytes at an address of any alignment.
__device__ __noinline__ u64 fetch_slowly(u64 from, u64 left) {
    if (from % 4 == 0 && left >= 8) return u64(load_element<unsigned>(from + 4)) << 32 | load_element<unsigned>(from);
    u64 x = 0;
    for (unsigned b = 0; b < 8 && b < left; b++) x |= u64(load_element<unsigned char>(from + b)) << 8 * b;
    return x;
}
__device__ __noinline__ void put_slowly(u64 to, u64 x, u64 left) {
    if (to % 4 == 0 && left >= 8) return store_element(to, unsigned(x)), store_element(to + 4, unsigned(x >> 32));
    for (unsigned b = 0; b < 8 && b < left; b++) store_element(to + b, (unsigned char)(x >> 8 * b));
}
__device__ __forceinline__ u64 fetch(u64 from, u64 left) {
    return from % 8 == 0 && left >= 8 ? load_element<u64>(from) : fetch_slowly(from, left);
}
__device__ __forceinline__ void put(u64 to, u64 x, u64 left) {
    if (to % 8 == 0 && left >= 8) store_element(to, x);
    else put_slowly(to, x, left);
}

// What the threads of half a block share of a channel.
struct Shared {
    Piece pieces[RANKS];                     // of which this channel carries its part
    unsigned goes[RANKS], comes[RANKS];      // the whole pieces, as they are known
    bool small_out[RANKS], small_in[RANKS];  // travel as packets
    u64 to[RANKS], from[RANKS];              // boxes
    u64 tag_out[RANKS], tag_in[RANKS];
    unsigned sent[RANKS], got[RANKS];        // batches of this pair and channel, ever
    unsigned out[RANKS], in[RANKS];          // and of these pieces
    unsigned turns[RANKS];                   // what can be done now
    volatile bool ended;                     // a thread has given up
};
enum Turn { READY = 1, WAITS = 2 };

// A wait for rank r has lasted: a piece that was not expected may have come from it, of either size.
__device__ __noinline__ bool is_other_piece(const Shared* s, const Context* context, unsigned rank, u64 line,
                                            unsigned r) {
    u64 low, tag;
    load_whole(s->from[r], low, tag);
    unsigned known = s->comes[r];
    if (tag == tag_of(known_from(tag), s->tag_in[r])) known = known_from(tag);
    const unsigned got = s->got[r], arrived = load_acquire(line + ARRIVED_BATCHES + 4 * r);
    if (int(arrived - got - 1) >= 0) known = load_relaxed(line + LENGTH + 64 * (got % 2) + 4 * r);
    return known != s->comes[r] && give_up(context, rank, UNEQUAL, r, s->comes[r], known, 1);
}

// One thread's view of a channel.
struct Exchange {
    Shared& s;
    const Context* context;
    u64 own, line, posts, slots;  // this rank's slab; offsets of lines and slots
    unsigned rank, channel, slot, relay;
    bool dead = false;
    u64 posted, read_before;  // pieces that passed between this rank and rank t

    __device__ __forceinline__ bool relays() const { return relay < RANKS; }
    __device__ __forceinline__ u64 posting(unsigned r) const { return s.small_out[r] ? s.pieces[r].sending : 0; }
    __device__ __forceinline__ u64 reading(unsigned r) const { return s.small_in[r] ? s.pieces[r].receiving : 0; }
    __device__ __forceinline__ u64 sending(unsigned r) const { return s.small_out[r] ? 0 : s.pieces[r].sending; }
    __device__ __forceinline__ u64 receiving(unsigned r) const { return s.small_in[r] ? 0 : s.pieces[r].receiving; }

    // Bytes of batch b of a piece.
    __device__ __forceinline__ u64 length(u64 bytes, unsigned b) const {
        const u64 begin = u64(b) * slot;
        return begin < bytes ? min(bytes - begin, u64(slot)) : 0;
    }
    __device__ __forceinline__ u64 place(unsigned to, unsigned from, unsigned count) const {
        return context->slab[to] + slots + ((u64(channel) * 2 + count % 2) * RANKS + from) * slot;
    }

    __device__ __forceinline__ void again(Wait& wait, unsigned r, unsigned wanted, unsigned seen, int phase) {
        if (phase && wait.looks % 1024 == 1023 && is_other_piece(&s, context, rank, own + line, r)) dead = true;
        else wait.again(context, rank, dead, r, wanted, seen, phase);
        if (dead) s.ended = true;
        else if (wait.looks % 32 == 0) dead = s.ended;
    }

    // Thread t finds the boxes to and from rank t, and waits until it may fill the one.  What it needs from memory is
    // loaded at once.  ``taken`` needs no acquire: what is stored depends on it, and the reads that it reports are over.
    template <bool takes>
    __device__ __forceinline__ void open_boxes(unsigned t, u64 boxes) {
        const u64 counts = own + posts, slab = context->slab[t];
        const unsigned sent = load_relaxed(own + line + SENT + 4 * t), got = load_relaxed(own + line + GOT + 4 * t);
        unsigned taken = load_relaxed(counts + TAKEN_PIECES + 4 * t);
        posted = load_element<u64>(counts + POSTED + 8 * t), read_before = load_element<u64>(counts + READ + 8 * t);
        if (takes && reading(t)) store_relaxed(slab + posts + TAKEN_PIECES + 4 * rank, unsigned(read_before));
        const u64 of_channel = boxes + u64(channel) * (2 * RANKS * BOX_PACKETS * 16);
        s.to[t] = slab + of_channel + (posted % 2 * RANKS + rank) * (BOX_PACKETS * 16);
        s.from[t] = own + of_channel + (read_before % 2 * RANKS + t) * (BOX_PACKETS * 16);
        s.tag_out[t] = tag_of(s.goes[t], posted + 1);
        s.tag_in[t] = tag_of(s.comes[t], read_before + 1);
        s.sent[t] = sent, s.got[t] = got;
#ifndef BROKEN
        const unsigned least = unsigned(posted) - 1;
        for (Wait wait; takes == relays() && posting(t) && !dead && int(taken - least) < 0;
             taken = load_acquire(counts + TAKEN_PIECES + 4 * t))
            again(wait, t, least, taken, 0);
#endif
    }

    __device__ __forceinline__ void post(unsigned t, unsigned threads, const u64 (&first)[RANKS]) const {
        stall(rank, unsigned(s.tag_out[!rank]), 0);
#pragma unroll
        for (unsigned k = 1; k < RANKS; k++) {
            const unsigned r = (rank + k) % RANKS;
            if (8 * t < posting(r)) store_whole(s.to[r] + 16 * t, first[k], s.tag_out[r]);
        }
#pragma unroll 1
        for (unsigned k = 1; k < RANKS; k++) {
            const unsigned r = (rank + k) % RANKS;
            const u64 bytes = posting(r);
            for (unsigned i = t + threads; 8 * i < bytes; i += threads)
                store_whole(s.to[r] + 16 * i, fetch(s.pieces[r].send + 8 * i, bytes - 8 * i), s.tag_out[r]);
        }
    }

    __device__ __forceinline__ void read(unsigned t, unsigned threads) {
        stall(rank, unsigned(s.tag_out[!rank]), 1);
        u64 longest = 0;
        for (unsigned r = 0; r < RANKS; r++)
            if (r != rank) longest = max(longest, reading(r));
        for (unsigned i = t; 8 * i < longest; i += threads) {
            unsigned missing = 0;
            for (unsigned r = 0; r < RANKS; r++) missing |= unsigned(r != rank && 8 * i < reading(r)) << r;
            Wait wait;
            while (missing && !dead) {
                u64 x[RANKS], tag[RANKS];
                unsigned late = rank, seen = 0;
#pragma unroll
                for (unsigned r = 0; r < RANKS; r++)
                    if (missing >> r & 1) load_whole(s.from[r] + 16 * i, x[r], tag[r]);
#pragma unroll
                for (unsigned r = 0; r < RANKS; r++) {
                    if (!(missing >> r & 1)) continue;
#ifndef BROKEN
                    if (tag[r] != s.tag_in[r]) {
                        late = r, seen = unsigned(tag[r]);
                        continue;
                    }
#endif
                    missing &= ~(1u << r);
                    put(s.pieces[r].recv + 8 * i, x[r], reading(r) - 8 * i);
#pragma unroll 1
                    for (unsigned q = 0; r == relay && q < RANKS; q++)
                        if (q != rank && posting(q)) store_whole(s.to[q] + 16 * i, x[r], s.tag_out[q]);
                }
                if (missing) again(wait, late, unsigned(s.tag_in[late]), seen, 1);
            }
        }
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
                if (known == s.comes[t]) return READY;
                dead = give_up(context, rank, UNEQUAL, t, s.comes[t], known, 1);
            } else {
                again(wait, t, takes ? s.got[t] + 1 : s.sent[t] - 1, seen, takes);
            }
        }
        return dead ? 0 : WAITS;
    }
    // Announce the batch that was written into rank t's slot.
    __device__ __forceinline__ void announce(unsigned t) {
        store_relaxed(context->slab[t] + line + LENGTH + 64 * (s.sent[t] % 2) + 4 * rank, s.goes[t]);
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
__device__ __forceinline__ void run(Shared& s, Exchange x, const Piece& whole, u64 posts, u64 boxes, unsigned small,
                                    unsigned all_channels, unsigned message, bool large, unsigned t,
                                    unsigned threads) {
    const unsigned rank = x.rank;
    const bool other = t < RANKS && t != rank, sends = takes == x.relays();
    for (x.channel = blockIdx.x; x.channel < all_channels; x.channel += gridDim.x) {
        x.line = PAIRS_OFFSET + u64(x.channel) * LINE_BYTES, x.posts = posts + u64(x.channel) * LINE_BYTES;
        const u64 counts = x.own + x.line + 4 * t;
        if (t < RANKS) {
            Piece piece = whole;
            s.goes[t] = known_as(piece.sending, message), s.comes[t] = known_as(piece.receiving, message);
            s.small_out[t] = other && piece.sending <= small, s.small_in[t] = other && piece.receiving <= small;
            cut(piece.send, piece.sending, piece.send_share, x.channel);
            cut(piece.recv, piece.receiving, piece.recv_share, x.channel);
            if (!other && piece.send == piece.recv) piece.receiving = 0;  // it is there
            s.pieces[t] = piece;
            s.out[t] = s.in[t] = 0, s.ended = x.dead;
        }
        part_barrier(takes, threads);
        u64 first[RANKS];
#pragma unroll
        for (unsigned k = 1; k < RANKS && !takes; k++) {
            const unsigned r = (rank + k) % RANKS;
            if (sends && 8 * t < x.posting(r)) first[k] = fetch(s.pieces[r].send + 8 * t, x.posting(r) - 8 * t);
        }
        if (other) x.open_boxes<takes>(t, boxes);
        part_barrier(takes, threads);
        if constexpr (takes) {
            if (large) x.take(t, threads);
            x.read(t, threads);
        } else {
            if (sends) x.post(t, threads, first);
            if (sends && large) x.send(t, threads);
            if (!large) copy(s.pieces[rank].recv, s.pieces[rank].send, s.pieces[rank].receiving, t, threads);
        }
        if (other) {
            if (sends && large) store_relaxed(counts + SENT, s.sent[t]);
            if (sends && x.posting(t)) store_element(x.own + x.posts + POSTED + 8 * t, x.posted + 1);
            if (takes && large) store_relaxed(counts + GOT, s.got[t]);
            if (takes && x.reading(t)) store_element(x.own + x.posts + READ + 8 * t, x.read_before + 1);
        }
        if (x.channel + gridDim.x < all_channels) part_barrier(takes, threads);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    exchange(const Context* context, u64 own, unsigned rank, u64 slots, unsigned slot, u64 posts, u64 boxes,
             unsigned small, unsigned all_channels, unsigned message, unsigned relay,
             unsigned large RANKS_8(PARAMETERS)) {
    __shared__ Shared s[2];
    after_former_kernel();
    const unsigned half = blockDim.x / 2, t = threadIdx.x;
    Piece piece;  // of the rank that this thread looks after, if any
    RANKS_8(PIECE)
    if (t < half) {
        const Exchange x{s[0], context, own, 0, 0, slots, rank, 0, slot, relay};
        run<false>(s[0], x, piece, posts, boxes, small, all_channels, message, large, t, half);
    } else {
        const Exchange x{s[1], context, own, 0, 0, slots, rank, 0, slot, relay};
        run<true>(s[1], x, piece, posts, boxes, small, all_channels, message, large, t - half, half);
    }
}
