// Compressed all-reduce and reduce-scatter in one kernel, by writes alone; see codec.cuh, and all_reduce_push.cu for
// the same without compression.
//
// Rank r adds part r.  A channel has a share of each part, which passes in batches of tiles.  Half of a block encodes
// the other parts into the staging memory of the ranks that add them.  The other half adds batch g of its own part,
// encodes the sum, writes it to the results of all ranks and decodes it to its own output; then it decodes batch g - 1
// of the other parts from its results.  Its own contribution and its own sum, too, are decoded from the codes that the
// others get: so the bits are the same everywhere.  A reduce-scatter omits what follows the sum.
//
// Each pair of ranks has two monotonic counters: "pushed" (a batch is complete in staging) and "added" (its sum is
// complete in the results).  Both memories have SLOTS slots.  A batch is pushed when the one SLOTS before it was added.
// The results need no counter: a rank writes the sum of batch g when all have added g - 1, hence have decoded g - 3.
//
// In place, this rank has read what it overwrites: a batch is added only after all have pushed it.  A barrier at the
// end ensures that all have read what is here.
#include "channel.cuh"
#include "codec.cuh"

constexpr int SLOTS = 4, PEERS = RANKS - 1;
enum Area { STAGING, RESULTS };

struct Share {
    const Bits* in;
    Bits* out;
    i64 count, part;  // elements: of all parts, of each part but for the last ones
    u64 staging;  // offset in the slabs
    unsigned batch, rank, tiles;  // tiles: of a batch, and of this channel in each part
    unsigned t, threads;  // this thread of half of the block
    const u64* slabs;

    // From tile i of this channel in part r on: elements that exist, and the first one.
    __device__ __forceinline__ i64 first(unsigned r, unsigned i) const {
        return r * part + (i64(blockIdx.x) * tiles + i) * TILE;
    }
    __device__ __forceinline__ i64 left(unsigned r, unsigned i) const {
        return i < tiles ? min((r + 1) * part, count) - first(r, i) : 0;
    }
    // What rank ``from`` writes to rank ``to`` of tile i, in any batch.
    __device__ __forceinline__ Place place(Area area, unsigned to, unsigned from, unsigned i) const {
        const u64 codes = u64(batch) * TILE_CODES, slot = i / batch % SLOTS, k = i % batch;
        const u64 at = ((u64(area) * gridDim.x + blockIdx.x) * SLOTS + slot) * RANKS + from;
        const u64 base = slabs[to] + staging + at * batch * (TILE_CODES + BLOCKS * SCALE_BYTES);
        return {base + k * TILE_CODES, base + codes + k * BLOCKS * SCALE_BYTES, BLOCKS};
    }

    // The tiles of batch g for this warp: of the other parts in turn, or of its own.
    template <bool OTHERS, class Handle> __device__ __forceinline__ void each(unsigned g, Handle handle) const {
        constexpr unsigned n = OTHERS ? PEERS : 1;
        for (unsigned j = t / 32; j < n * batch; j += threads / 32) {
            const unsigned r = (rank + OTHERS + j % n) % RANKS, i = g * batch + j / n;
            if (left(r, i) > 0) handle(r, i);
        }
    }
    // Tile i of part r to the rank that adds it.
    __device__ __forceinline__ void push(unsigned r, unsigned i) const {
        place(STAGING, r, rank, i).store(encode_tile(load_tile(in + first(r, i), left(r, i))));
    }
    // Tile i of this rank's part.
    __device__ __forceinline__ void add(unsigned i, bool spread) const {
        Tile<Elements> sum = load_tile(in + first(rank, i), left(rank, i));
        Tile<Encoded> codes[RANKS];
        UNROLLED(r, RANKS)
            if (r != rank) codes[r] = place(STAGING, rank, r, i).load();
        Tile<Encoded> own = encode_tile(sum);
        UNROLLED(r, RANKS) {
            Tile<Encoded> one = codes[r];
            if (r == rank) one = own;
            add_tile(sum, one, r);
        }
        if (spread) {
            own = encode_tile(sum);
            UNROLLED(k, PEERS) place(RESULTS, (rank + 1 + k) % RANKS, rank, i).store(own);
            sum = decode_tile(own);
        }
        store_tile(out + first(rank, i), left(rank, i), sum);
    }
    // Tile i of the sum of part r.
    __device__ __forceinline__ void decode(unsigned r, unsigned i) const {
        store_tile(out + first(r, i), left(r, i), decode_tile(place(RESULTS, rank, r, i).load()));
    }
};

// ``part``: elements of each rank's part, but for the last ones; whole tiles unless all parts are equal.  ``spread``:
// an all-reduce; otherwise ``target`` is of this rank's part alone.
extern "C" __global__ void __launch_bounds__(512)
    all_reduce_compressed(const Context* context, u64 own_slab, unsigned own_rank, i64 staging, unsigned batch,
                          const Bits* source, Bits* target, i64 count, i64 part, int spread) {
    __shared__ u64 slabs[RANKS];
    after_former_large_kernel();
    Channel channel(context, own_slab, own_rank);
    const unsigned before = channel.batches, threads = blockDim.x / 2, half = threadIdx.x / threads;
    const unsigned t = threadIdx.x % threads;
    if (threadIdx.x < RANKS) {
        slabs[t] = context->slab[t];
        // Other kernels count batches without it.  No rank has written it since: none has received a batch.
        store_relaxed(own_slab + channel.line() + ADDED + 4 * t, before);
    }
    __syncthreads();
    const unsigned tiles = unsigned((part + gridDim.x * TILE - 1) / (gridDim.x * TILE));
    const unsigned batches = (tiles + batch - 1) / batch;
    Bits* out = spread ? target : target - own_rank * part;
    const Share s{source, out, count, part, u64(staging), batch, own_rank, tiles, t, threads, slabs};

    for (unsigned g = 0; half == 0 && g < batches; g++) {
        if (g >= SLOTS) {
            channel.await(ADDED, before + g - SLOTS + 1, t, 0);
            part_barrier(half, threads);
        }
        stall(own_rank, before + g, 0);
        s.each<true>(g, [&](unsigned r, unsigned i) { s.push(r, i); });
        part_barrier(half, threads);
        channel.notify(PUSHED, before + g + 1, t);
    }
    for (unsigned g = 0; half == 1 && g <= batches; g++) {
        if (g < batches) channel.await(PUSHED, before + g + 1, t, 1);
        if (g > 0) channel.await(ADDED, before + g, t, 2);
        part_barrier(half, threads);
        stall(own_rank, before + g, 1);
        if (g < batches) {
            s.each<false>(g, [&](unsigned, unsigned i) { s.add(i, spread); });
            part_barrier(half, threads);
            channel.notify(ADDED, before + g + 1, t);
        }
        if (spread && g > 0) s.each<true>(g - 1, [&](unsigned r, unsigned i) { s.decode(r, i); });
    }
    channel.batches += batches;
    channel.barrier(3);
    channel.close();
}
