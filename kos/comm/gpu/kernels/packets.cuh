// Packets: data that carries its own flag, so that one store both delivers and announces it ("LL" in NCCL).
//
// A packet is 16 bytes: 12 of data (8 where elements have 8) and the epoch in the last word, moved by one
// .b128 access, which the PTX memory model makes single-copy atomic: a reader that sees the epoch sees the data.
// (Lines of 120 + 8 bytes, NCCL's LL128, move fewer bytes but were slower up to 2 MB on 8 H200.)
//
// Inbox of a rank: [channel][epoch & 1][slot][CAPACITY packets]; a slot has one writer per launch.
//
// Two buffers suffice, without a barrier.  A channel's block enters epoch e + 1 only after all its threads have
// received all packets of epoch e (the __syncthreads in next()).  No block finishes an epoch before every rank's block
// of that channel has begun it: each result depends on packets of every rank in that epoch (every channel of every
// chunk has at least one packet, which may be empty).  So a rank that writes in epoch e + 2 has finished e + 1; hence
// all have begun e + 1, and have received the packets of e, whose slots it overwrites.  A reader in epoch e finds
// either the packet of e or an older one.  Comparing for equality is safe, because epochs do not repeat: at
// RENEW_EPOCH the channel runs a barrier, clears its inbox and counts from 1 again.
#pragma once

#include "channel.cuh"
#include "reduce.cuh"

#define CAPACITY 512 /* packets in a slot */
#define SLOTS (2 * RANKS)

// What travels before the reduction: T's own bits, or the widened values where a rank's contribution is
// scaled (PREMUL_SUM) or is already a partial sum (-DPARTIALS=1: ring and tree).
#ifndef PARTIALS
#define PARTIALS 0
#endif
template <class V> struct Raw { using type = u64; };
template <> struct Raw<int> { using type = unsigned; };
template <> struct Raw<unsigned> { using type = unsigned; };
template <> struct Raw<float> { using type = unsigned; };
__device__ __forceinline__ unsigned raw(int x) { return unsigned(x); }
__device__ __forceinline__ unsigned raw(unsigned x) { return x; }
__device__ __forceinline__ unsigned raw(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u64 raw(long long x) { return u64(x); }
__device__ __forceinline__ u64 raw(u64 x) { return x; }
__device__ __forceinline__ u64 raw(double x) { return u64(__double_as_longlong(x)); }
__device__ __forceinline__ void cook(unsigned x, int& y) { y = int(x); }
__device__ __forceinline__ void cook(unsigned x, unsigned& y) { y = x; }
__device__ __forceinline__ void cook(unsigned x, float& y) { y = __uint_as_float(x); }
__device__ __forceinline__ void cook(u64 x, long long& y) { y = (long long)x; }
__device__ __forceinline__ void cook(u64 x, u64& y) { y = x; }
__device__ __forceinline__ void cook(u64 x, double& y) { y = __longlong_as_double((long long)x); }

constexpr bool widened = PARTIALS || Op::staged;
template <bool widened> struct Wire { using type = Raw<Wide>::type; };
template <> struct Wire<false> { using type = Bits; };
using WireBits = Wire<widened>::type;

constexpr int WORDS = sizeof(WireBits) == 8 ? 2 : 3;  // of data in a packet
constexpr int ELEMENTS = 4 * WORDS / sizeof(WireBits);

struct Words {
    unsigned x[WORDS];
    __device__ unsigned& operator[](int k) { return x[k]; }
    __device__ unsigned operator[](int k) const { return x[k]; }
};

__device__ __forceinline__ void send(u64 address, const Words& w, unsigned epoch) {
    store_whole(address, u64(w[1]) << 32 | w[0], u64(epoch) << 32 | (WORDS > 2 ? w[WORDS - 1] : 0));
}

// Read a packet; returns its flag.
__device__ __forceinline__ unsigned look(u64 address, Words& w) {
    u64 low, high;
    load_whole(address, low, high);
    w[0] = unsigned(low);
    w[1] = unsigned(low >> 32);
    if constexpr (WORDS > 2) w[WORDS - 1] = unsigned(high);
    return unsigned(high >> 32);
}

__device__ __forceinline__ bool arrived(unsigned flag, unsigned epoch) {
#ifdef BROKEN
    return true;
#else
    return flag == epoch;
#endif
}

// Restart the epochs: after a barrier all packets have been received; clear them, and notify all ranks.
__device__ __noinline__ unsigned renew(const Context* context, u64 own, unsigned rank) {
    Channel channel(context, own, rank);
    channel.barrier(-1);
    u64 bytes = u64(2) * SLOTS * CAPACITY * 16;
    const u64 mine = own + INBOX_OFFSET + blockIdx.x * bytes;
    for (u64 at = 4 * threadIdx.x; at < bytes; at += 4 * blockDim.x) store_relaxed(mine + at, 0);
    channel.barrier(-2);
    return channel.barriers;
}

struct Mailbox : Channel {
    u64 peers[RANKS];  // inbox of this channel at rank + k

    __device__ __forceinline__ Mailbox(const Context* context, u64 own, unsigned rank) : Channel(context, own, rank) {
        u64 channel = INBOX_OFFSET + u64(blockIdx.x) * (2 * SLOTS * CAPACITY * 16);
        peers[0] = own + channel;
#pragma unroll
        for (int k = 1; k < RANKS; k++) peers[k] = __ldg(&context->slab[(rank + k) % RANKS]) + channel;
    }

    // Enter the first epoch.  Apart from the constructor, so that the input's first loads are under way before.
    __device__ __forceinline__ void open() {
        if (epoch >= RENEW_EPOCH) {
            barriers = renew(context, own, rank);
            epoch = 0;
        }
        epoch++;
    }

    // Packet i of slot ``slot`` of rank (this rank + k), in this epoch.
    __device__ __forceinline__ u64 at(int k, int slot, unsigned i) const {
        return peers[k] + (((epoch & 1) * SLOTS + slot) * CAPACITY + i) * 16;
    }

    // The same of rank ``r``: for algorithms in which few ranks are written to.
    __device__ __forceinline__ u64 to(unsigned r, int slot, unsigned i) const {
        return at(0, slot, i) - own + context->slab[r];
    }

    // Wait for a packet in one of this rank's slots.
    __device__ __forceinline__ void receive(int slot, Words& w, unsigned i, unsigned peer, int phase) {
        const u64 address = at(0, slot, i);
        Wait wait;
        unsigned flag;
        while (!arrived(flag = look(address, w), epoch) && wait.again(context, rank, dead, peer, epoch, flag, phase)) {
        }
    }

    // Wait for packet i in the slots first + r of all other ranks r; w[rank] is left alone.
    __device__ __forceinline__ void receive_all(int first, Words (&w)[RANKS], unsigned i, int phase) {
        const u64 address = at(0, first, i);
        Wait wait;
        for (;;) {
            unsigned missing = RANKS, seen = 0;
#pragma unroll
            for (int r = 0; r < RANKS; r++) {
                if (r == rank) continue;
                unsigned flag = look(address + r * (CAPACITY * 16), w[r]);
                if (!arrived(flag, epoch)) missing = r, seen = flag;
            }
            if (missing == RANKS || !wait.again(context, rank, dead, missing, epoch, seen, phase)) return;
        }
    }

    __device__ __forceinline__ void next() {
        __syncthreads();
        epoch++;
    }

    // The end of a kernel; next() has counted one too far.
    __device__ __forceinline__ void close() {
        epoch--;
        Channel::close();
    }
};

// Element by element: where the end of the message, its alignment or a change of type asks for it.
__device__ __noinline__ Words fetch_slowly(const char* in, long long packet, long long count, double factor) {
    long long at = packet * ELEMENTS;
    Words w = {};
#pragma unroll
    for (int k = 0; k < ELEMENTS; k++) {
        if (at + k >= count) break;
        Bits x = reinterpret_cast<const Bits*>(in)[at + k];
        if constexpr (widened) set<WireBits>(w.x, k, raw(Op::stage(T::widen(x), factor)));
        else set<Bits>(w.x, k, x);
    }
    return w;
}
__device__ __noinline__ void put_slowly(Words w, char* out, long long packet, long long count) {
    long long at = packet * ELEMENTS;
#pragma unroll
    for (int k = 0; k < ELEMENTS; k++)
        if (at + k < count) reinterpret_cast<Bits*>(out)[at + k] = get<Bits>(w.x, k);
}

constexpr int ACCESS = WORDS == 2 ? 8 : 4;  // bytes

// A rank's own contribution as it travels: elements of packet ``packet`` of the input, zeros beyond its end.
__device__ __forceinline__ Words fetch(const char* in, long long packet, long long count, double factor) {
    long long at = packet * ELEMENTS;
    if (widened || at + ELEMENTS > count || reinterpret_cast<u64>(in) % ACCESS)
        return fetch_slowly(in, packet, count, factor);
    const char* from = in + at * sizeof(Bits);
    Words w;
    if constexpr (ACCESS == 8) {
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        w[0] = x.x, w[1] = x.y;
    } else {
#pragma unroll
        for (int k = 0; k < WORDS; k++) w[k] = *reinterpret_cast<const unsigned*>(from + 4 * k);
    }
    return w;
}

// The same of RANKS inputs ``in(k)``, all loads at once: of the last packet too, which else would wait for each input.
template <class In>
__device__ __forceinline__ void fetch_all(Words (&w)[RANKS], In in, long long packet, long long count, double factor) {
    const long long left = (count - packet * ELEMENTS) * (long long)sizeof(Bits);  // bytes
    const u64 at = packet * ELEMENTS * sizeof(Bits), all = reinterpret_cast<u64>(in(0)) | count * sizeof(Bits);
    if (widened || ACCESS == 8 || sizeof(Bits) == 1 || all % 4) {
#pragma unroll
        for (int k = 0; k < RANKS; k++) w[k] = fetch(in(k), packet, count, factor);
        return;
    }
#pragma unroll
    for (int k = 0; k < RANKS; k++)
#pragma unroll
        for (int j = 0; j < WORDS; j++)
            w[k][j] = left >= 4 * j + 4 ? load_element<unsigned>(reinterpret_cast<u64>(in(k)) + at + 4 * j) : 0;
}

// Result words (T's own bits) to packet ``packet`` of the output.
__device__ __forceinline__ void put(const Words& w, char* out, long long packet, long long count) {
    long long at = packet * ELEMENTS;
    if (!out) return;
    if (widened || at + ELEMENTS > count || reinterpret_cast<u64>(out) % ACCESS) return put_slowly(w, out, packet, count);
    char* to = out + at * sizeof(Bits);
    if constexpr (ACCESS == 8) {
        *reinterpret_cast<uint2*>(to) = make_uint2(w[0], w[1]);
    } else {
#pragma unroll
        for (int k = 0; k < WORDS; k++) *reinterpret_cast<unsigned*>(to + 4 * k) = w[k];
    }
}

// Elements of a packet while they are reduced.
struct Reduction {
    Wide x[ELEMENTS];
    static __device__ __forceinline__ Wide value(const Words& w, int k) {
        if constexpr (widened) {
            Wide y;
            cook(get<WireBits>(w.x, k), y);
            return y;
        } else {
            return T::widen(get<Bits>(w.x, k));
        }
    }
    __device__ __forceinline__ void first(const Words& w) {
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++) x[k] = value(w, k);
    }
    __device__ __forceinline__ void combine(const Words& w) {
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++) x[k] = Op::combine(x[k], value(w, k));
    }
    // The partial result as it travels.
    __device__ __forceinline__ void partial(Words& w) const {
#pragma unroll
        for (int k = 0; k < WORDS; k++) w[k] = 0;
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++) set<WireBits>(w.x, k, WireBits(raw(x[k])));
    }
    // The whole result, rounded, in T's own bits.
    __device__ __forceinline__ void finish(Words& w) const {
#pragma unroll
        for (int k = 0; k < WORDS; k++) w[k] = 0;
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++) set<Bits>(w.x, k, T::narrow(Op::finish(x[k])));
    }
};
