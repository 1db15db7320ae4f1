// The pieces of an exchange: one of any size and alignment to each rank, and one from each.  Small pieces travel as
// packets, by ``exchange_packets``.
//
// Each ordered pair of ranks has its own queues in the receiver's slab.  No third rank is involved, so the queues serve
// messages between two ranks as well as collectives.  Only the rank that owns a buffer accesses it, so neither entry
// nor exit needs a barrier.  How a piece travels depends only on its size.  So ranks may take part in different
// exchanges, as long as the pieces of each pair have the same order on both sides.
//
// A packet carries its own flag (as in packets.cuh): 8 bytes of data and a tag, in one .b128 access.  The tag holds the
// number of the piece in its queue, its size in bytes and its kind.  So an older or unexpected piece is never taken for
// the expected one.
//
// A queue alternates between two boxes, so calls can follow one another without a barrier.  Only the sender writes to
// them.  Piece n goes into the box of piece n - 2, once the receiver has reported that it has read that piece.  The
// receiver reports a piece when it begins to receive the next one.  By then the kernel that read the piece has ended.
// So no kernel ends with a write to another rank, and a sender is at most two pieces ahead.
#pragma once

#include "channel.cuh"

#ifndef WHOLE
#define WHOLE 0 /* addresses and sizes of all pieces are multiples of 8 */
#endif
#ifndef SEVERAL
#define SEVERAL 0 /* there are more packets than threads: all are sent before any is awaited */
#endif
#ifndef LARGE
#define LARGE 0 /* there may be large pieces */
#endif

#define BOX_PACKETS 1024
#define BOX_BYTES (BOX_PACKETS * 16)
#if LARGE
#define INLINE_IF_SMALL __noinline__
#else
#define INLINE_IF_SMALL __forceinline__
#endif
#define EACH_RANK _Pragma("unroll") for (unsigned r = 0; r < RANKS; r++)

#define PARAMETERS(r) , u64 send##r, u64 sending##r, u64 by##r, u64 recv##r, u64 receiving##r, u64 per##r
struct Piece {
    u64 send, sending, send_share, recv, receiving, recv_share;  // addresses and bytes; a share is a channel's
};

// Counters in a channel's second line, for batches: own counts by rank, counts that the other ranks write here, and the
// piece to which the batch in a slot belongs, at LENGTH + 64 * slot.  In its third line, for packets: own counts
// (64 bits), and how many of this rank's pieces each other rank has read.
enum Count { SENT = 0, GOT = 64, ARRIVED_BATCHES = 128, TAKEN_BATCHES = 192, LENGTH = 32 };
enum Post { POSTED = 0, READ = 64, TAKEN_PIECES = 128 };

// The identity of a piece for other ranks: its bytes modulo 2^31 and, in the highest bit, whether it is a message.
__device__ __forceinline__ unsigned known_as(u64 bytes, unsigned message) {
    return unsigned(bytes) & ~(1u << 31) | message << 31;
}
// The tag of a small piece: kind (1 bit), bytes (21 bits) and number in its queue (42 bits, enough for weeks).
#define NUMBER 42
__device__ __forceinline__ u64 tag_of(unsigned known, u64 number) {
    return u64(known >> 31) << 63 | u64(known & ~(1u << 31)) << NUMBER | number & (1ull << NUMBER) - 1;
}
__device__ __forceinline__ unsigned known_from(u64 tag) {
    return unsigned(tag >> 63) << 31 | unsigned(tag << 1 >> (NUMBER + 1));
}

// Reduce a piece to the part that goes through this channel.
template <class Bytes>
__device__ __forceinline__ void cut(u64& address, Bytes& bytes, Bytes share, unsigned channel) {
    const Bytes begin = min(channel * share, bytes);
    address += begin;
    bytes = min(share, bytes - begin);
}

// Up to 8 of the ``left`` bytes at an address of any alignment.
__device__ __noinline__ u64 fetch_slowly(u64 from, unsigned left) {
    if (from % 4 == 0 && left >= 8) return u64(load_element<unsigned>(from + 4)) << 32 | load_element<unsigned>(from);
    u64 x = 0;
    for (unsigned b = 0; b < 8 && b < left; b++) x |= u64(load_element<unsigned char>(from + b)) << 8 * b;
    return x;
}
__device__ __noinline__ void put_slowly(u64 to, u64 x, unsigned left) {
    if (to % 4 == 0 && left >= 8) return store_element(to, unsigned(x)), store_element(to + 4, unsigned(x >> 32));
    for (unsigned b = 0; b < 8 && b < left; b++) store_element(to + b, (unsigned char)(x >> 8 * b));
}
__device__ __forceinline__ u64 fetch(u64 from, unsigned left) {
    return WHOLE || from % 8 == 0 && left >= 8 ? load_element<u64>(from) : fetch_slowly(from, left);
}
__device__ __forceinline__ void put(u64 to, u64 x, unsigned left) {
    if (WHOLE || to % 8 == 0 && left >= 8) store_element(to, x);
    else put_slowly(to, x, left);
}

// A channel's parts of the small pieces, by rank: addresses and bytes.  ``goes``, ``comes``: whole pieces (known_as).
struct Small {
    u64 send[RANKS], recv[RANKS];
    unsigned sending[RANKS], receiving[RANKS], goes[RANKS], comes[RANKS];
};

// The memory of a channel's packets: this rank's slab, and the offsets of the channel's lines and boxes.
struct Boxes {
    const Context* context;
    u64 own, line, counts, boxes;
    unsigned rank;
    __device__ __forceinline__ Boxes(const Context* context, u64 own, unsigned rank, u64 posts, u64 boxes,
                                     unsigned channel)
        : context(context), own(own), line(PAIRS_OFFSET + u64(channel) * LINE_BYTES),
          counts(posts + u64(channel) * LINE_BYTES), boxes(boxes + u64(channel) * (2 * RANKS * BOX_BYTES)),
          rank(rank) {}

    // Offset, in the receiver's slab, of the box for piece ``number`` (from 0) of rank ``from``.
    __device__ __forceinline__ u64 box(unsigned from, u64 number) const {
        return boxes + (unsigned(number) % 2 * RANKS + from) * BOX_BYTES;
    }
    __device__ __forceinline__ u64 count(Post kind, unsigned r) const {  // POSTED or READ, before this launch
        return load_element<u64>(own + counts + kind + 8 * r);
    }
    __device__ __forceinline__ unsigned taken_by(unsigned r) const {
        return load_relaxed(own + counts + TAKEN_PIECES + 4 * r);
    }
    // Report to the rank of ``slab`` that its pieces up to this number were read.
    __device__ __forceinline__ void report(u64 slab, u64 number) const {
        store_relaxed(slab + counts + TAKEN_PIECES + 4 * rank, unsigned(number));
    }
};

// Called in a long wait for rank r: whether it has sent an unexpected piece, small or large, which ends the wait.
// ``comes`` is the expected piece; ``got`` counts the batches received from rank r.  The expected piece
// is looked for last, since others may follow it.
__device__ __noinline__ bool is_other_piece(Boxes b, unsigned r, unsigned comes, unsigned got) {
    const auto batch_or = [&](unsigned known) {
        const unsigned arrived = load_acquire(b.own + b.line + ARRIVED_BATCHES + 4 * r);
        return int(arrived - got - 1) < 0 ? known : load_relaxed(b.own + b.line + LENGTH + 64 * (got % 2) + 4 * r);
    };
    const u64 number = b.count(READ, r);
    unsigned known = batch_or(comes);
    stall(b.rank, unsigned(number), 2);
    u64 low, tag;
    load_whole(b.own + b.box(r, number), low, tag);
    if (tag == tag_of(known_from(tag), number + 1)) known = known_from(tag);
    if (known != comes) known = batch_or(known);
    return known != comes && give_up(b.context, b.rank, UNEQUAL, r, comes, known, 1);
}

// As ``check_wait`` of channel.cuh: for packets from rank r (``comes``), or for a box of rank r that is not free.
__device__ __noinline__ u64 check_packets(Boxes b, unsigned r, bool comes, unsigned known, u64 since) {
    if (comes && is_other_piece(b, r, known, load_relaxed(b.own + b.line + GOT + 4 * r))) return GIVEN_UP;
    const unsigned wanted = comes ? b.count(READ, r) + 1 : b.count(POSTED, r) - 1;
    return check_wait(b.context, b.rank, since, r + (comes << 8), wanted, comes ? wanted - 1 : b.taken_by(r));
}

// Send and receive small pieces by part ``part`` of the block: ``threads`` threads in whole warps, of which this is
// number t.  A piece to this rank itself is copied.  With ``relay``, the data sent is that received from that rank.  A
// packet that waits for its box does not delay the others.  The loads for the first packets are issued before any of
// their results is used, because a load that depends on another adds its latency.  Arrays are indexed by constants, so
// that they stay in registers.  With SEVERAL, what was read is reported before anything is sent: two ranks that each sent
// a piece ahead would otherwise wait for each other.  Returns whether this thread has given up, here or before
// (``dead``).
__device__ INLINE_IF_SMALL bool exchange_packets(const Boxes& b, const Small& s, unsigned relay, bool sends,
                                                 bool takes, bool dead, unsigned part, unsigned t, unsigned threads) {
    const unsigned rank = b.rank;
    u64 slab[RANKS], posted[RANKS], read[RANKS];
    unsigned taken[RANKS], longest = 0;
    EACH_RANK longest = max(longest, max(sends ? s.sending[r] : 0, takes ? s.receiving[r] : 0));
    if (LARGE && !longest) return dead;
    u64 x[RANKS];
    const auto fetch_all = [&](unsigned i, bool sends, bool takes) {
        EACH_RANK if (relay >= RANKS && (SEVERAL && r == rank ? takes : sends) && 8 * i < s.sending[r])
            x[r] = fetch(s.send[r] + 8 * i, s.sending[r] - 8 * i);
    };
    fetch_all(t, sends, !SEVERAL && takes);
    EACH_RANK {
        slab[r] = load_element<u64>(reinterpret_cast<u64>(&b.context->slab[r])), taken[r] = b.taken_by(r);
        posted[r] = b.count(POSTED, r), read[r] = b.count(READ, r);
    }
#if SEVERAL
    EACH_RANK if (!t && takes && r != rank && s.receiving[r]) b.report(slab[r], read[r]);
#endif
#pragma unroll
    for (unsigned pass = 0; pass <= SEVERAL; pass++) {
        const bool sending = sends && pass == 0, taking = takes && pass == SEVERAL;
        if (pass) fetch_all(t, sending, taking);
        for (unsigned i = t; 8 * i < longest && !dead; fetch_all(i += threads, sending, taking)) {
            unsigned unsent = 0, missing = 0, looks = 0;
            u64 y = 0, since = 0;
            bool has = relay >= RANKS;
            EACH_RANK {
                unsent |= unsigned(sending && r != rank && 8 * i < s.sending[r]) << r;
                missing |= unsigned(taking && 8 * i < s.receiving[r]) << r;
            }
            const auto send_all = [&] {
                EACH_RANK {
#ifndef BROKEN
                    if (int(taken[r] - (unsigned(posted[r]) - 1)) < 0) continue;
#endif
                    if (!has || !(unsent >> r & 1)) continue;
                    const u64 tag = tag_of(s.goes[r], posted[r] + 1);
                    store_whole(slab[r] + b.box(rank, posted[r]) + 16 * i, relay < RANKS ? y : x[r], tag);
                    unsent &= ~(1u << r);
                }
            };
            stall(rank, unsigned(posted[0] + posted[RANKS - 1]), 0);
            send_all();
            EACH_RANK if (!i && taking && r != rank && s.receiving[r]) b.report(slab[r], read[r]);
            stall(rank, unsigned(posted[0] + posted[RANKS - 1]), 1);
            while (!SEVERAL || unsent | missing) {
                u64 v[RANKS], tag[RANKS];  // loaded even if not missing, so that no load waits for another
                EACH_RANK load_whole(b.own + b.box(r, read[r]) + 16 * i, v[r], tag[r]);
                EACH_RANK {
                    const u64 mine = -u64(r == rank), data = (x[r] & mine) | (v[r] & ~mine);
#ifdef BROKEN
                    if (!(missing >> r & 1)) continue;
#else
                    if (!(missing >> r & 1) || (tag[r] != tag_of(s.comes[r], read[r] + 1) && !mine)) continue;
#endif
                    put(s.recv[r] + 8 * i, data, s.receiving[r] - 8 * i);
                    missing &= ~(1u << r);
                    has |= r == relay, y |= data & -u64(r == relay);
                }
                if (!(unsent | missing)) break;
                if (unsent) {
                    EACH_RANK taken[r] = b.taken_by(r);
                    send_all();
                }
                if (++looks % 1024) continue;
                unsigned late = 0, known = 0;
                EACH_RANK if ((missing ? missing : unsent) >> r & 1) late = r, known = s.comes[r];
                since = check_packets(b, late, missing, known, since);
                if (since == GIVEN_UP) dead = true;
                if (dead) break;
            }
        }
    }
    part_barrier(part, threads);  // no thread reads the counts any more
    EACH_RANK {
        if (t || r == rank) continue;
        if (sends && s.sending[r]) store_element(b.own + b.counts + POSTED + 8 * r, posted[r] + 1);
        if (takes && s.receiving[r]) store_element(b.own + b.counts + READ + 8 * r, read[r] + 1);
    }
    return dead;
}
