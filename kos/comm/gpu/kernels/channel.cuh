// The base of all kernels over peer memory: slabs, channels, epochs, barriers, and aborts.
//
// Every rank has one slab, mapped by all.  Block b of a launch is channel b: it communicates only with block b of the
// other ranks, so blocks of a grid need not wait for one another (except in all_reduce_specialized.cu).  Channel state
// lives in the slab, and only kernels advance it, never the host: so a graph can be replayed.
//
//   LINES   per channel 256 bytes: [0] last epoch of packets, [1] barriers passed, [2] batches pushed,
//           and flags of rank r: [16 + r] barrier, [32 + r] pushed, [40 + r] added, [48 + r] taken;
//           [4], [5], [8] and [24 + r]: see all_reduce_specialized.cu
//   FAILED  [0] the failed rank + 1 (written by any rank), [1] claim on the record (own kernels only)
//   PAIRS   a second line per channel, see pieces.cuh
//   INBOX   packets, see packets.cuh
//
// Every flag has one writer.  A barrier flag counts up and is compared as a difference, so a rank may be one
// ahead.  Payload is written before its flag: st.release.sys after a __syncthreads is cumulative over the whole block.
//
// A long wait periodically checks for another rank's failure, and the host's abort word and the deadline, both in host
// memory.  The first thread to abort writes the awaited flag to the record and notifies all ranks, and every wait of
// the launch ends; the output of the launch is undefined.
#pragma once

#include "ptx.cuh"

#ifndef CHANNELS
#define CHANNELS 128
#endif
#define LINE_BYTES 256
#define RANKS_8(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) /* one parameter for each of up to 8 ranks */
#define FAILED_OFFSET (CHANNELS * LINE_BYTES)
#define PAIRS_OFFSET (FAILED_OFFSET + 256)
#define INBOX_OFFSET (PAIRS_OFFSET + CHANNELS * LINE_BYTES)
#ifndef RENEW_EPOCH
#define RENEW_EPOCH 0x80000000u
#endif

// Host memory, mapped: the first two words are the host's, the rest the device's.
struct Record {
    volatile u64 abort, timeout_ns;
    volatile u64 failed, cause, peer, channel, wanted, seen, phase, limit_ns;
    volatile u64 waits;  // time of a wait of a millisecond or more with the rank in its last four bits
};
enum Cause { TIMEOUT = 1, ABORTED = 2, TOLD = 3, UNEQUAL = 4 };

struct Context {
    u64 slab[RANKS];  // every rank's slab, as this rank sees it
    Record* record;
    u64 rank;
    volatile u64* timeout_ns;  // the record's, or that of launches with a deadline of their own
};

// Record the reason, unless one is recorded, and notify all ranks; returns true.
__device__ __noinline__ bool give_up(const Context* context, unsigned rank, Cause cause, unsigned peer, unsigned wanted,
                                     unsigned seen, int phase) {
    Record* record = context->record;
    if (atomicCAS(reinterpret_cast<unsigned*>(context->slab[rank] + FAILED_OFFSET + 4), 0u, 1u) == 0) {
        record->cause = cause;
        record->peer = peer;
        record->channel = blockIdx.x;
        record->wanted = wanted;
        record->seen = seen;
        record->phase = phase;
        record->limit_ns = *context->timeout_ns;
        __threadfence_system();
        record->failed = 1;
        for (int r = 0; r < RANKS; r++) store_relaxed(context->slab[r] + FAILED_OFFSET, rank + 1);
    }
    return true;
}

// Called in a long wait: returns the time at which it began, or GIVEN_UP.  All arguments are by value, so that callers
// keep registers; ``place`` is the rank and, from bit 8 on, the phase: with one argument more, or a condition for the
// record of long waits, one_shot spills three registers, 6% of the time of 1 KB.
#define GIVEN_UP (~0ull)
__device__ __noinline__ u64 check_wait(const Context* context, unsigned rank, u64 since, unsigned place,
                                       unsigned wanted, unsigned seen) {
    Record* record = context->record;
    u64 own = context->slab[rank], now = nanoseconds();
    unsigned told = load_relaxed(own + FAILED_OFFSET);
    Cause cause = told ? TOLD : record->abort ? ABORTED : TIMEOUT;
    if (cause == TIMEOUT && (!since || now - since < *context->timeout_ns)) {
        record->waits = now / 16 * 16 + place % 16;
        return since ? since : now;
    }
    give_up(context, rank, cause, cause == TOLD ? told - 1 : place % 256, wanted, seen, place >> 8);
    return GIVEN_UP;
}

// One wait of one thread; ``dead`` once it was aborted: later waits of this thread return at once.
struct Wait {
    unsigned looks = 0;
    u64 since = 0;
    __device__ __forceinline__ bool again(const Context* context, unsigned rank, bool& dead, unsigned peer,
                                          unsigned wanted, unsigned seen, int phase) {
        if (++looks % 1024 == 0) {
            since = check_wait(context, rank, since, peer + (phase << 8), wanted, seen);
            dead = since == GIVEN_UP;
        }
        return !dead;
    }
};

// The counters between ranks, as offsets in a channel's line.
enum Flag { ARRIVED = 64, PUSHED = 128, ADDED = 160, TAKEN = 192 };

struct Channel {
    const Context* context;
    u64 own;  // this rank's slab
    unsigned rank;
    unsigned epoch, barriers, batches;  // the last ones of this channel
    bool dead = false;

    __device__ __forceinline__ Channel(const Context* context, u64 own, unsigned rank)
        : context(context), own(own), rank(rank) {
        Vector v;
        load(v, own + line());
        epoch = v.x[0], barriers = v.x[1], batches = v.x[2];
    }

    // Offset of the channel's line in any slab.
    __device__ __forceinline__ u64 line() const { return u64(blockIdx.x) * LINE_BYTES; }

    // Release, by thread t after a barrier of its part of the block: all reads and writes of that part precede its
    // counter in the other ranks' slabs.
    __device__ __forceinline__ void notify(Flag flag, unsigned counter, unsigned t) const {
        if (t < RANKS && t != rank) store_release(context->slab[t] + line() + flag + 4 * rank, counter);
    }

    // Acquire, by thread t before a barrier of its part of the block: the counter of rank t has arrived, and that part
    // sees its earlier writes.
    __device__ __forceinline__ void await(Flag flag, unsigned counter, unsigned t, int phase) {
#ifndef BROKEN
        if (t >= RANKS || t == rank) return;
        Wait wait;
        unsigned seen;
        const u64 address = own + line() + flag + 4 * t;
        while (!dead && int((seen = load_acquire(address)) - counter) < 0)
            wait.again(context, rank, dead, t, counter, seen, phase);
#endif
    }

    // A barrier of all ranks' blocks of this channel.
    __device__ __forceinline__ void barrier(int phase) {
        ++barriers;
        __syncthreads();
        notify(ARRIVED, barriers, threadIdx.x);
        await(ARRIVED, barriers, threadIdx.x, phase);
        __syncthreads();
    }

    // The end of a kernel: no thread of this block reads the counters any more.
    __device__ __forceinline__ void close() {
        __syncthreads();
        if (threadIdx.x == 0) store(own + line(), Vector{epoch, barriers, batches, 0});
    }
};

// Debug builds let ranks and blocks run apart by up to STALL nanoseconds, differently each time.
__device__ inline void stall(unsigned rank, unsigned epoch, int where) {
#ifdef STALL
    unsigned h = (rank * 0x9e3779b9u) ^ (epoch * 0x85ebca6bu) ^ (blockIdx.x * 0xc2b2ae35u) ^ (where * 0x27d4eb2fu);
    h = (h ^ h >> 15) * 0x2c1b3c6du;
    h = (h ^ h >> 12) * 0x297a2d39u;
    u64 until = nanoseconds() + (h ^ h >> 15) % STALL;
    while (nanoseconds() < until) {}
#endif
}
