// All-reduce by packets, for latency: one_shot, two_shot, ring, tree.  And reduce_scatter, the first half of two_shot.
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

// w[rank] is ``own``; all are added in rank order and the sum is rounded into ``own``.
__device__ __forceinline__ void reduce_in_rank_order(Words (&w)[RANKS], Words& own, int rank) {
    Reduction sum;
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
#pragma unroll
        for (int k = 0; k < WORDS; k++) w[r][k] = r == rank ? own[k] : w[r][k];
        if (r == 0) sum.first(w[0]);
        else sum.combine(w[r]);
    }
    sum.finish(own);
}

#if !defined(ONLY) || ONLY == ONE_SHOT
// Every rank sends its whole vector to all others; each adds in rank order.  One exchange.
ALL_REDUCE(one_shot) {
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
            reduce_in_rank_order(w, own, rank);
            put(own, out, packet_of(0, per_channel, base + i), count);
        }
    }
    box.close();
}
#endif

#if !defined(ONLY) || ONLY == TWO_SHOT
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

#if !defined(ONLY) || ONLY == REDUCE_SCATTER
// Rank r receives part r, of ``count`` elements, of all ranks and adds in rank order.  One exchange.
ALL_REDUCE(reduce_scatter) {
    after_former_kernel();
    const int rank = own_rank;
    const bool once = per_channel <= blockDim.x;
    const auto part = [&](int k) { return in + (rank + k) % RANKS * count * (long long)sizeof(Bits); };
    const auto fetch_part = [&](int k, unsigned i) {
        return fetch(part(k), packet_of(0, per_channel, i), count, factor);
    };
    Words w[RANKS];
    fetch_all(w, part, packet_of(0, per_channel, threadIdx.x), count, factor);
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
            put(own, out, packet_of(0, per_channel, base + i), count);
        }
    }
    box.close();
}
#endif

#if !defined(ONLY) || ONLY == RING
// schedules/reducing.py, ring_all_reduce: chunk b is added from rank b on; slot s is for what step s sends.
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

#if !defined(ONLY) || ONLY == TREE
// schedules/reducing.py, tree_all_reduce: up a binary tree in heap order and down again.
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
