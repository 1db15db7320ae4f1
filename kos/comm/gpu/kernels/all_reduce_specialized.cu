// All-reduce by writes alone between symmetric outputs, with specialized blocks: faster than push, whose blocks each
// do all work for all ranks.
//
// Rank r adds chunk r.  A chunk is split into tiles; pusher j % pushers of each peer and adder j % adders handle tile
// j.  A pusher writes to one peer only.  It first writes this rank's contributions to the peer's chunk into the peer's
// staging memory, which holds all of them, so that it never waits.  Then it writes the sums of this rank's chunk from
// its own output into the peer's.  An adder waits for all contributions to a tile, adds them in rank order and writes
// the sum into its own output.
//
// Blocks of a grid wait for one another, so all of them must be resident at once.
//
// In place, a sum overwrites a peer's input only after the adder has received that peer's contribution to this tile,
// hence after it was read.  A pusher ends when all sums of its pair have arrived, each added from staging memory: so
// staging is free for the next call.  Only its own rank reads an input.
//
// Counters are this kernel's own words of the channels' lines.  All blocks of all launches, whose grids are alike,
// count on from the same ``before``, which every block keeps for itself.
#include "channel.cuh"
#include "reduce.cuh"

#ifndef THREADS
#define THREADS 512
#endif
constexpr int UNROLL = 4, PEERS = RANKS - 1;

// Line b: where pusher b and adder b began counting, what adder b has done; of pusher b of rank r, at 4 * r: tiles
// contributed to this rank's chunk, one more when it has brought all sums.
enum Word { PUSHER = 16, ADDER = 20, SUMMED = 32, CONTRIBUTED = 96 };

__device__ __forceinline__ unsigned contributed_at(unsigned by, unsigned pusher) {
    return pusher * LINE_BYTES + CONTRIBUTED + 4 * by;
}

// An adder of this rank is late: a rank, then, that has not contributed so much, which it waits for.
__device__ __noinline__ unsigned who_is_late(u64 own, unsigned rank, unsigned pushers, unsigned counter) {
    for (unsigned k = 0; k < pushers; k++)
        for (unsigned r = 0; r < RANKS; r++)
            if (r != rank && int(load_relaxed(own + contributed_at(r, k)) - counter) < 0) return r;
    return rank;
}

// n vectors by the block.
__device__ __forceinline__ void copy(u64 from, u64 to, int n) {
    for (int i = threadIdx.x; i < n; i += UNROLL * THREADS) {
        Vector v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + u * THREADS < n) load(v[u], from + 16 * (i + u * THREADS));
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + u * THREADS < n) store(to + 16 * (i + u * THREADS), v[u]);
    }
}

// A block's view of a launch; ``chunk``, ``tile``: vectors.
struct Roles {
    const Context* context;
    u64 own, staging;
    unsigned rank, pushers, adders;
    long long tile, chunk, vectors;
    unsigned rounds, before;  // rounds: tiles of a pusher
    bool dead = false;

    __device__ __forceinline__ u64 contributed(unsigned by, unsigned to, unsigned pusher) const {
        return context->slab[to] + contributed_at(by, pusher);
    }
    // Where tile j that rank ``by`` contributes to the chunk of rank ``to`` is staged.
    __device__ __forceinline__ u64 staged(unsigned by, unsigned to, unsigned j) const {
        return context->slab[to] + staging + 16 * ((to + RANKS - by - 1) % RANKS * chunk + j * tile);
    }
    // Offset in input and output of tile j of a rank's chunk; its vectors.
    __device__ __forceinline__ long long at(unsigned r, unsigned j) const { return 16 * (r * chunk + j * tile); }
    __device__ __forceinline__ int length(unsigned r, unsigned j) const {
        const long long left = min(chunk, vectors - r * chunk) - j * tile;
        return int(max(min(tile, left), 0ll));
    }

    __device__ __forceinline__ bool reached(u64 flag, unsigned counter, unsigned& seen) const {
#ifdef BROKEN
        return true;
#endif
        return dead || int((seen = load_acquire(flag)) - counter) >= 0;
    }
    __device__ __forceinline__ void await(u64 flag, unsigned counter, unsigned peer, int phase) {
        Wait wait;
        unsigned seen = 0;
        while (!reached(flag, counter, seen)) wait.again(context, rank, dead, peer, counter, seen, phase);
    }

    // Pusher k of peer q.
    __device__ __forceinline__ void push(unsigned k, unsigned q, u64 source, u64 out, u64 others_out) {
        __shared__ bool ready[2];  // of each second turn: looked at in the one before, by the last thread
        const bool looks = threadIdx.x == THREADS - 1;
        for (unsigned turn = 0; turn < 2 * rounds; turn++) {
            const unsigned t = turn % rounds, j = t * pushers + k;
            auto summed = [&](unsigned t, unsigned& seen) {
                const unsigned j = t * pushers + k;
                return reached(own + j % adders * LINE_BYTES + SUMMED, before + j / adders + 1, seen);
            };
            unsigned seen = 0;
            if (turn >= rounds && !ready[turn % 2]) {
                Wait wait;
                while (looks && !summed(t, seen)) {
                    const bool tells = wait.looks % 1024 == 1023;
                    wait.again(context, rank, dead, tells ? who_is_late(own, rank, pushers, before + t + 1) : rank,
                               before + j / adders + 1, seen, 3);
                }
                __syncthreads();
            }
            const unsigned next = turn + 1;
            if (looks && next >= rounds && next < 2 * rounds) ready[next % 2] = summed(next % rounds, seen);
            stall(rank, before + turn, 0);
            if (turn < rounds) copy(source + at(q, j), staged(rank, q, j), length(q, j));
            else copy(out + at(rank, j), others_out + at(rank, j), length(rank, j));
            __syncthreads();
            if (turn < rounds && threadIdx.x == t * 32 % THREADS)  // warps take turns: a release lasts
                store_release(contributed(rank, q, k), before + t + 1);
        }
        if (looks) {
            const unsigned other = (2 * rank + RANKS - q) % RANKS;  // whose pusher of the same number writes here
            store_release(contributed(rank, q, k), before + rounds + 1);
            await(contributed(other, rank, k), before + rounds + 1, other, 2);
        }
    }

    __device__ __forceinline__ void add(unsigned adder, u64 source, u64 out) {
        unsigned done = before;
        for (unsigned j = adder; j < rounds * pushers; j += adders) {
            if (threadIdx.x < RANKS && threadIdx.x != rank)
                await(contributed(threadIdx.x, rank, j % pushers), before + j / pushers + 1, threadIdx.x, 1);
            __syncthreads();
            stall(rank, before + j, 1);
            const int n = length(rank, j);
            for (int i = threadIdx.x; i < n; i += THREADS) {
                Vector v[RANKS];
#pragma unroll
                for (int r = 0; r < RANKS; r++)
                    load(v[r], (r == rank ? source + at(rank, j) : staged(r, rank, j)) + 16 * i);
                Sum<4> sum;
                sum.first(v[0].x);
#pragma unroll
                for (int r = 1; r < RANKS; r++) sum.combine(v[r].x);
                sum.finish(v[0].x);
                store(out + at(rank, j) + 16 * i, v[0]);
            }
            __syncthreads();
            ++done;
            if (threadIdx.x == 0) store_release_gpu(own + adder * LINE_BYTES + SUMMED, done);
        }
    }
};

// Blocks: ``pushers`` for each peer, side by side those of one number, and the adders.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    specialized(const Context* context, u64 own_slab, unsigned own_rank, u64 staging, unsigned pushers, long long tile,
                long long chunk, long long vectors, const u64* out_table, u64 out_offset, u64 source) {
    after_former_kernel();
    const bool adds = blockIdx.x >= pushers * PEERS;
    const unsigned number = blockIdx.x - (adds ? pushers * PEERS : 0), adders = gridDim.x - pushers * PEERS;
    const u64 counts = own_slab + number * LINE_BYTES + (adds ? ADDER : PUSHER), out = out_table[own_rank] + out_offset;
    const unsigned rounds = unsigned((chunk + tile * pushers - 1) / (tile * pushers)), before = load_relaxed(counts);
    Roles roles{context, own_slab, staging, own_rank, pushers, adders, tile, chunk, vectors, rounds, before};
    if (adds) {
        roles.add(number, source, out);
    } else {
        const unsigned q = (own_rank + 1 + number % PEERS) % RANKS;
        roles.push(number / PEERS, q, source, out, out_table[q] + out_offset);
    }
    __syncthreads();
    if (threadIdx.x == 0) store_relaxed(counts, before + max(rounds + 1, (rounds * pushers + adders - 1) / adders));
}
