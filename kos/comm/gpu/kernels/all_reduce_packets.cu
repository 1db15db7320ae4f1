// All-reduce by packets, for latency: one_shot, two_shot, ring, tree.  reduce_scatter is the first half of two_shot,
// reduce_scatter_v the same with parts of different sizes.  scan and exscan are one_shot with fewer additions.
// Without ``out`` a rank gets no result: so one_shot and two_shot also reduce to one rank.
//
// None has a barrier; packets.cuh says why that is safe.  ``count`` elements of any number and alignment,
// ``out`` may be ``in``: an element's own packet is the only thing written over it, after it was read.
// The message is cut into chunks (one for each rank, or a single one), a chunk into channels of ``per_channel``
// packets, a channel into epochs of CAPACITY packets.
#include "packets.cuh"

// -DONLY=TREE compiles that one alone, in a quarter of the time.
#define ONE_SHOT 1
#define TWO_SHOT 2
#define RING 3
#define TREE 4
#define REDUCE_SCATTER 5
#define REDUCE_SCATTER_V 6
#define SCAN 7
#define EXSCAN 8
#ifdef ONLY
#define COMPILED(name) (ONLY == name)
#else
#define COMPILED(name) 1
#endif

#ifndef THREADS
#define THREADS 512
#endif
#define ALL_REDUCE(name)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                    \
    name(const Context* context, u64 own_slab, unsigned own_rank, const char* in, char* out, long long count, \
         unsigned per_channel, double factor)
#define EPOCHS(base, n)                                                        \
    for (unsigned base = 0; base < per_channel; base += CAPACITY, box.next()) \
        if (const unsigned n = min(CAPACITY, per_channel - base); true)
#define PACKETS(i, n) for (unsigned i = threadIdx.x; i < n; i += blockDim.x)

__device__ __forceinline__ long long packet_of(int chunk, unsigned per_channel, unsigned i) {
    return ((long long)chunk * gridDim.x + blockIdx.x) * per_channel + i;
}

// w[rank] is ``own``.  Adds the words of the ranks up to ``last`` in rank order, and rounds the sum into ``own``.
__device__ __forceinline__ void reduce_in_rank_order(Words (&w)[RANKS], Words& own, int rank, int last = RANKS - 1) {
    Reduction sum;
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
#pragma unroll
        for (int k = 0; k < WORDS; k++) w[r][k] = r == rank ? own[k] : w[r][k];
        if (r == 0) sum.first(w[0]);
        else if (r <= last) sum.combine(w[r]);
    }
    sum.finish(own);
}

// Every rank sends its whole vector to all others, and adds the vectors of the ranks up to ``last``.  One exchange.
__device__ __forceinline__ void send_to_all(const Context* context, u64 own_slab, unsigned own_rank, const char* in,
                                            char* out, long long count, unsigned per_channel, double factor, int last) {
    after_former_kernel();
    Mailbox box(context, own_slab, own_rank);
    const int rank = box.rank;
    const bool once = per_channel <= blockDim.x;  // each thread has one packet, and keeps it
    Words own = fetch(in, packet_of(0, per_channel, threadIdx.x), count, factor);
    box.open();
    EPOCHS(base, n) {
        stall(rank, box.epoch, 0);
        PACKETS(i, n) {
            if (!once) own = fetch(in, packet_of(0, per_channel, base + i), count, factor);
#pragma unroll
            for (int k = 1; k < RANKS; k++) send(box.at(k, rank, i), own, box.epoch);
        }
        PACKETS(i, n) {
            Words w[RANKS];
            if (!once) own = fetch(in, packet_of(0, per_channel, base + i), count, factor);
            box.receive_all(0, w, i, 0);
            reduce_in_rank_order(w, own, rank, last);
            put(own, out, packet_of(0, per_channel, base + i), count);
        }
    }
    box.close();
}
#define SEND_TO_ALL(name, last) \
    ALL_REDUCE(name) { send_to_all(context, own_slab, own_rank, in, out, count, per_channel, factor, last); }
#if COMPILED(ONE_SHOT)
SEND_TO_ALL(one_shot, RANKS - 1)
#endif
#if COMPILED(SCAN)
SEND_TO_ALL(scan, int(own_rank))
#endif
#if COMPILED(EXSCAN)
SEND_TO_ALL(exscan, int(own_rank) - 1) /* rank 0 has no ``out`` */
#endif

#if COMPILED(TWO_SHOT)
// Rank r receives chunk r of all ranks, adds in rank order and sends the sum to all.  Two exchanges.
ALL_REDUCE(two_shot) {
    after_former_kernel();
    Mailbox box(context, own_slab, own_rank);
    const int rank = box.rank;
    const bool once = per_channel <= blockDim.x;
    Words w[RANKS];
#pragma unroll
    for (int k = 0; k < RANKS; k++)
        w[k] = fetch(in, packet_of((rank + k) % RANKS, per_channel, threadIdx.x), count, factor);
    Words own = w[0];
    box.open();
    EPOCHS(base, n) {
        stall(rank, box.epoch, 0);
        PACKETS(i, n) {
#pragma unroll
            for (int k = 1; k < RANKS; k++)
                if (!once) w[k] = fetch(in, packet_of((rank + k) % RANKS, per_channel, base + i), count, factor);
#pragma unroll
            for (int k = 1; k < RANKS; k++) send(box.at(k, rank, i), w[k], box.epoch);
        }
        PACKETS(i, n) {
            if (!once) own = fetch(in, packet_of(rank, per_channel, base + i), count, factor);
            box.receive_all(0, w, i, 0);
            reduce_in_rank_order(w, own, rank);
            stall(rank, box.epoch, 1);
#pragma unroll
            for (int k = 1; k < RANKS; k++) send(box.at(k, RANKS + rank, i), own, box.epoch);
            put(own, out, packet_of(rank, per_channel, base + i), count);
        }
        PACKETS(i, n) {
            box.receive_all(RANKS, w, i, 1);
#pragma unroll
            for (int r = 0; r < RANKS; r++)
                if (r != rank) put(w[r], out, packet_of(r, per_channel, base + i), count);
        }
    }
    box.close();
}
#endif

// Rank r receives part r of all ranks and adds in rank order.  One exchange.  ``part(k)`` is this rank's part for rank
// (rank + k) % RANKS, of ``size(k)`` elements; ``fetch_parts`` loads packet i of all parts.
template <class Part, class Size, class FetchParts>
__device__ __forceinline__ void scatter_sums(const Context* context, u64 own_slab, unsigned own_rank, Part part,
                                             Size size, FetchParts fetch_parts, char* out, unsigned per_channel,
                                             double factor) {
    const int rank = own_rank;
    const bool once = per_channel <= blockDim.x;
    const auto fetch_part = [&](int k, unsigned i) {
        return fetch(part(k), packet_of(0, per_channel, i), size(k), factor);
    };
    Words w[RANKS];
    fetch_parts(w, packet_of(0, per_channel, threadIdx.x));
    Mailbox box(context, own_slab, own_rank);
    Words own = w[0];
    box.open();
    EPOCHS(base, n) {
        stall(rank, box.epoch, 0);
        PACKETS(i, n) {
#pragma unroll
            for (int k = 1; k < RANKS; k++) {
                if (!once) w[k] = fetch_part(k, base + i);
                send(box.at(k, rank, i), w[k], box.epoch);
            }
        }
        PACKETS(i, n) {
            if (!once) own = fetch_part(0, base + i);
            box.receive_all(0, w, i, 0);
            reduce_in_rank_order(w, own, rank);
            put(own, out, packet_of(0, per_channel, base + i), size(0));
        }
    }
    box.close();
}

#if COMPILED(REDUCE_SCATTER)
// Parts of ``count`` elements.
ALL_REDUCE(reduce_scatter) {
    after_former_kernel();
    const auto part = [&](int k) { return in + (int(own_rank) + k) % RANKS * count * (long long)sizeof(Bits); };
    scatter_sums(
        context, own_slab, own_rank, part, [&](int) { return count; },
        [&](Words(&w)[RANKS], long long i) { fetch_all(w, part, i, count, factor); }, out, per_channel, factor);
}
#endif

#if COMPILED(REDUCE_SCATTER_V)
// Part r ends at element ``end<r>``.  Every part has as many packets as the largest; those beyond its end are empty.
#define END(r) , long long end##r
#define ENTRY(r) end##r,
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_scatter_v(const Context* context, u64 own_slab, unsigned own_rank, const char* in, char* out,
                     unsigned per_channel, double factor RANKS_8(END)) {
    after_former_kernel();
    const long long ends[] = {0, RANKS_8(ENTRY)};
    const auto part = [&](int k) { return in + ends[(own_rank + k) % RANKS] * (long long)sizeof(Bits); };
    const auto size = [&](int k) { return ends[(own_rank + k) % RANKS + 1] - ends[(own_rank + k) % RANKS]; };
    const auto fetch_parts = [&](Words(&w)[RANKS], long long i) {
#pragma unroll
        for (int k = 0; k < RANKS; k++) w[k] = fetch(part(k), i, size(k), factor);
    };
    scatter_sums(context, own_slab, own_rank, part, size, fetch_parts, out, per_channel, factor);
}
#endif

#if COMPILED(RING)
// comm/schedules/basic.py, ring_all_reduce: chunk b is added from rank b on; slot s is for what step s sends.
ALL_REDUCE(ring) {
    after_former_kernel();
    Mailbox box(context, own_slab, own_rank);
    const int rank = box.rank, before = (rank + RANKS - 1) % RANKS;
    box.open();
    EPOCHS(base, n) {
        for (int step = 0; step < RANKS; step++) {
            stall(rank, box.epoch, step);
            const int chunk = (rank + RANKS - step) % RANKS;
            PACKETS(i, n) {
                Words w, own = fetch(in, packet_of(chunk, per_channel, base + i), count, factor);
                if (step > 0) {
                    box.receive(step - 1, w, i, before, step);
                    Reduction sum;
                    sum.first(own);
                    sum.combine(w);
                    if (step < RANKS - 1) {
                        sum.partial(own);
                    } else {
                        sum.finish(own);
                        put(own, out, packet_of(chunk, per_channel, base + i), count);
                    }
                }
                send(box.at(1, step, i), own, box.epoch);
            }
        }
        for (int step = RANKS; step < 2 * RANKS - 1; step++) {
            const int chunk = (rank + 2 * RANKS - step) % RANKS;
            PACKETS(i, n) {
                Words w;
                box.receive(step - 1, w, i, before, step);
                if (step < 2 * RANKS - 2) send(box.at(1, step, i), w, box.epoch);
                put(w, out, packet_of(chunk, per_channel, base + i), count);
            }
        }
    }
    box.close();
}
#endif

#if COMPILED(TREE)
// comm/schedules/basic.py, binary: up a binary tree in heap order and down again.
// Slots 0 and 1 are for the children, slot 2 for the parent.
ALL_REDUCE(tree) {
    after_former_kernel();
    Mailbox box(context, own_slab, own_rank);
    const int rank = box.rank, parent = (rank - 1) / 2, child = 2 * rank + 1;
    box.open();
    EPOCHS(base, n) {
        stall(rank, box.epoch, 0);
        PACKETS(i, n) {
            Words w, own = fetch(in, packet_of(0, per_channel, base + i), count, factor);
            Reduction sum;
            sum.first(own);
            for (int c = 0; c < 2 && child + c < RANKS; c++) {
                box.receive(c, w, i, child + c, 0);
                sum.combine(w);
            }
            if (rank > 0) {
                sum.partial(own);
                send(box.to(parent, (rank - 1) % 2, i), own, box.epoch);
                continue;
            }
            sum.finish(own);
            for (int c = 0; c < 2 && child + c < RANKS; c++) send(box.to(child + c, 2, i), own, box.epoch);
            put(own, out, packet_of(0, per_channel, base + i), count);
        }
        if (rank > 0) PACKETS(i, n) {
            Words w;
            box.receive(2, w, i, parent, 1);
            for (int c = 0; c < 2 && child + c < RANKS; c++) send(box.to(child + c, 2, i), w, box.epoch);
            put(w, out, packet_of(0, per_channel, base + i), count);
        }
    }
    box.close();
}
#endif
