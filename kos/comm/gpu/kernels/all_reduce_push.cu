// All-reduce and reduce-scatter by writes alone, for bandwidth: on NVLink they are faster than reads.
//
// Rank r adds chunk r.  Its peers write their parts into its staging memory; it adds them to its own in rank order
// and writes the sum into every output.  A channel's part of a chunk passes in batches through two slots: while one is
// added the next is in flight.  Each pair of ranks has two monotonic counters: "pushed" (a batch is complete in
// staging) and "taken" (it was added, its slot is free).  Only its own rank reads an input, which may lie anywhere.
//
// No barrier is needed at the start: staging is free, since the previous call ended in a barrier.  A sum is written
// only when all ranks have pushed, so they have started; in place, they have read the input that it overwrites.  A
// barrier at the end ensures that all sums have arrived.  An output that is not symmetric is collected in staging
// memory, ``piece`` elements at a time, and copied by its own rank.  A reduce-scatter omits the last step: a sum stays
// on the rank that added it.  Half of a block pushes and the other half adds, so that the links are busy all the time.
// In a reduce_scatter_v the chunks have different sizes.
#include "channel.cuh"
#include "reduce.cuh"

// -DONLY=PUSH compiles that one alone.
#define PUSH 1
#define REDUCE_SCATTER 2
#define REDUCE_SCATTER_V 3
#ifdef ONLY
#define COMPILED(name) (ONLY == name)
#else
#define COMPILED(name) 1
#endif

#ifndef THREADS
#define THREADS 512 /* that push; the same threads add, or as many others */
#endif

constexpr int PER_VECTOR = 16 / sizeof(Bits);
// Whether unaligned vectors are moved in words of 4 bytes if possible.  Parts of different sizes are mostly unaligned.
// The other kernels would need more registers: ``push`` of bfloat16 between 2 ranks 106 instead of 64.
constexpr bool BY_WORDS = COMPILED(REDUCE_SCATTER_V);

// Vector i of ``count`` elements that are not aligned, or that end within it.
__device__ __noinline__ Vector fetch_slowly(const char* in, long long i, long long count) {
    Vector v = {};
    if (BY_WORDS && reinterpret_cast<u64>(in) % 4 == 0 && (i + 1) * PER_VECTOR <= count) {
#pragma unroll
        for (int k = 0; k < 4; k++) v.x[k] = reinterpret_cast<const unsigned*>(in)[4 * i + k];
        return v;
    }
#pragma unroll
    for (int k = 0; k < PER_VECTOR; k++)
        if (i * PER_VECTOR + k < count) set<Bits>(v.x, k, reinterpret_cast<const Bits*>(in)[i * PER_VECTOR + k]);
    return v;
}
__device__ __noinline__ void put_slowly(Vector v, u64 out, long long i, long long count) {
    if (BY_WORDS && out % 4 == 0 && (i + 1) * PER_VECTOR <= count) {
#pragma unroll
        for (int k = 0; k < 4; k++) store_element<unsigned>(out + 16 * i + 4 * k, v.x[k]);
        return;
    }
#pragma unroll
    for (int k = 0; k < PER_VECTOR; k++)
        if (i * PER_VECTOR + k < count)
            store_element<Bits>(out + (i * PER_VECTOR + k) * sizeof(Bits), get<Bits>(v.x, k));
}
template <bool plain>
__device__ __forceinline__ Vector fetch(const char* in, long long i, long long count) {
    if constexpr (!plain) return fetch_slowly(in, i, count);
    const uint4 x = reinterpret_cast<const uint4*>(in)[i];
    return {x.x, x.y, x.z, x.w};
}
template <bool plain>
__device__ __forceinline__ void put(const Vector& v, u64 out, long long i, long long count) {
    if constexpr (!plain) put_slowly(v, out, i, count);
    else store(out + 16 * i, v);
}
// How a piece of the message is split: into a chunk for each rank, a chunk into channels' shares, a share into batches.
// Pieces are split alike: a channel has copied what it collected in one piece before others write there again.
struct Even {
    const char* in;
    long long count, vectors, chunk, share;
    int batch;

    // Where the vectors of chunk r are counted from, and the elements from there on.
    __device__ __forceinline__ const char* source(unsigned) const { return in; }
    __device__ __forceinline__ long long elements(unsigned) const { return count; }
    // Vectors of batch g of chunk r: the first, and how many.
    __device__ __forceinline__ long long first(unsigned g, unsigned r) const {
        return r * chunk + blockIdx.x * share + (long long)g * batch;
    }
    __device__ __forceinline__ int length(unsigned g, unsigned r) const {
        const long long end = min(min(first(0, r) + share, (r + 1) * chunk), vectors);
        return int(max(min((long long)batch, end - first(g, r)), 0ll));
    }
};
// A part of the message, of any size, for one rank.
struct Part {
    const char* in;
    long long count, vectors, share;
};
// The same split with a part of any size as the chunk of each rank.
struct Uneven {
    const Part* parts;
    int batch;
    __device__ __forceinline__ const char* source(unsigned r) const { return parts[r].in; }
    __device__ __forceinline__ long long elements(unsigned r) const { return parts[r].count; }
    __device__ __forceinline__ long long first(unsigned g, unsigned r) const {
        return blockIdx.x * parts[r].share + (long long)g * batch;
    }
    __device__ __forceinline__ int length(unsigned g, unsigned r) const {
        const long long end = min(first(0, r) + parts[r].share, parts[r].vectors);
        return int(max(min((long long)batch, end - first(g, r)), 0ll));
    }
};

template <class Split> struct Share : Split {
    using Split::batch, Split::source, Split::elements, Split::first, Split::length;
    unsigned rank;
    const u64 *staging, *out;  // of every rank
    bool collected;            // the output is staging memory, with room for whole vectors

    // Where rank ``from`` writes batch g for rank ``to``.
    __device__ __forceinline__ u64 place(unsigned g, unsigned to, unsigned from) const {
        return staging[to] + 16ull * batch * ((blockIdx.x * 2 + g % 2) * RANKS + from);
    }

    template <bool plain>
    __device__ __forceinline__ void push(unsigned g, int t) const {
        for (int i = t; i < batch; i += THREADS) {
            Vector v[RANKS];
#pragma unroll
            for (int k = 1; k < RANKS; k++) {
                const unsigned r = (rank + k) % RANKS;
                if (i < length(g, r)) v[k] = fetch<plain>(source(r), first(g, r) + i, elements(r));
            }
#pragma unroll
            for (int k = 1; k < RANKS; k++) {
                const unsigned r = (rank + k) % RANKS;
                if (i < length(g, r)) store(place(g, r, rank) + 16 * i, v[k]);
            }
        }
    }

    // Add batch g and write the sums to so many ranks, this one first.
    template <bool plain, int TARGETS>
    __device__ __forceinline__ void add(unsigned g, int t) const {
        const int n = length(g, rank);
        for (int i = t; i < n; i += THREADS) {
            const long long at = first(g, rank) + i;
            Vector v[RANKS];
#pragma unroll
            for (int r = 0; r < RANKS; r++) {
                if (r == rank) v[r] = fetch<plain>(source(rank), at, elements(rank));
                else load(v[r], place(g, rank, r) + 16 * i);
            }
            Sum<4> sum;
            sum.first(v[0].x);
#pragma unroll
            for (int r = 1; r < RANKS; r++) sum.combine(v[r].x);
            sum.finish(v[0].x);
#pragma unroll
            for (int k = 0; k < TARGETS; k++) {
                const u64 to = out[(rank + k) % RANKS];
                if (collected) store(to + 16 * at, v[0]);
                else put<plain>(v[0], to, at, elements(rank));
            }
        }
    }

    // Copy this channel's part of all chunks out of staging memory.
    __device__ __forceinline__ void copy_to(char* user) const {
        const bool plain = reinterpret_cast<u64>(user) % 16 == 0 && this->count % PER_VECTOR == 0;
        for (int r = 0; r < RANKS; r++) {
            const long long end = min(min(first(0, r) + this->share, (r + 1) * this->chunk), this->vectors);
            for (long long i = first(0, r) + threadIdx.x; i < end; i += THREADS) {
                Vector v;
                load(v, out[rank] + 16 * i);
                if (plain) *reinterpret_cast<uint4*>(user + 16 * i) = make_uint4(v.x[0], v.x[1], v.x[2], v.x[3]);
                else put_slowly(v, reinterpret_cast<u64>(user), i, this->count);
            }
        }
    }
};

// All batches.  While one is added, the next one is sent: by the same threads, or by the other half of the block.
template <int TARGETS, bool HALVES, class Split>
__device__ __forceinline__ void push_and_add(Channel& channel, const Share<Split>& s, unsigned batches, bool plain) {
    const unsigned before = channel.batches, t = threadIdx.x % THREADS, half = threadIdx.x / THREADS;
    for (unsigned g = 0; g <= batches; g++) {
        if (half == 0 && g < batches) {
            if (g >= 2) channel.await(TAKEN, before + g - 1, t, 0);
            part_barrier(half, THREADS);
            stall(s.rank, before + g, 0);
            if (plain) s.template push<true>(g, t);
            else s.template push<false>(g, t);
            part_barrier(half, THREADS);
            channel.notify(PUSHED, before + g + 1, t);
        }
        if (half != HALVES || g == 0) continue;
        channel.await(PUSHED, before + g, t, 1);
        part_barrier(half, THREADS);
        stall(s.rank, before + g, 1);
        if (plain) s.template add<true, TARGETS>(g - 1, t);
        else s.template add<false, TARGETS>(g - 1, t);
        if (g + 1 >= batches) continue;
        part_barrier(half, THREADS);
        channel.notify(TAKEN, before + g, t);
    }
    channel.batches += batches;
    channel.barrier(2);
}

// How ``vectors`` are cut: into a chunk for each rank, of whole 128-byte lines, and a chunk into channels.
__device__ __forceinline__ long long chunk_of(long long vectors) { return ((vectors + RANKS - 1) / RANKS + 7) / 8 * 8; }
__device__ __forceinline__ long long share_of(long long chunk) {
    return ((chunk + gridDim.x - 1) / gridDim.x + 7) / 8 * 8;
}

#if COMPILED(PUSH)
extern "C" __global__ void __launch_bounds__(THREADS)
    push(const Context* context, u64 own_slab, unsigned own_rank, long long staging_offset, int batch,
         const u64* out_table, long long out_offset, const char* source, char* target, long long count,
         long long piece) {
    __shared__ u64 staging[RANKS], out[RANKS];
    after_former_large_kernel();
    Channel channel(context, own_slab, own_rank);
    if (threadIdx.x < RANKS) {
        staging[threadIdx.x] = context->slab[threadIdx.x] + staging_offset;
        out[threadIdx.x] = out_table[threadIdx.x] + out_offset;
    }
    __syncthreads();
    const long long chunk = chunk_of((piece + PER_VECTOR - 1) / PER_VECTOR), share = share_of(chunk);
    const unsigned batches = unsigned((share + batch - 1) / batch);

    for (long long base = 0; base < count; base += piece) {
        const char* in = source + base * sizeof(Bits);
        const long long n = min(piece, count - base);
        const Share<Even> s{{in, n, (n + PER_VECTOR - 1) / PER_VECTOR, chunk, share, batch}, own_rank, staging, out,
                            target != nullptr};
        const bool plain = reinterpret_cast<u64>(in) % 16 == 0 && n % PER_VECTOR == 0;
        push_and_add<RANKS, false>(channel, s, batches, plain);
        if (target) s.copy_to(target + base * sizeof(Bits));
    }
    channel.close();
}
#endif

#if COMPILED(REDUCE_SCATTER)
// ``count`` elements for each rank, whole vectors; ``target`` may be this rank's part of ``source``.
extern "C" __global__ void __launch_bounds__(2 * THREADS)
    reduce_scatter(const Context* context, u64 own_slab, unsigned own_rank, long long staging_offset, int batch,
                   const char* source, char* target, long long count) {
    __shared__ u64 staging[RANKS], out[RANKS];
    after_former_large_kernel();
    Channel channel(context, own_slab, own_rank);
    const long long chunk = count / PER_VECTOR, share = share_of(chunk);
    if (threadIdx.x < RANKS) {
        staging[threadIdx.x] = context->slab[threadIdx.x] + staging_offset;
        out[threadIdx.x] = reinterpret_cast<u64>(target) - 16 * own_rank * chunk;  // only this rank's entry is used
    }
    __syncthreads();
    const Share<Even> s{{source, RANKS * count, RANKS * chunk, chunk, share, batch}, own_rank, staging, out, false};
    const bool plain = (reinterpret_cast<u64>(source) | reinterpret_cast<u64>(target)) % 16 == 0;
    push_and_add<1, true>(channel, s, unsigned((share + batch - 1) / batch), plain);
    channel.close();
}
#endif

#if COMPILED(REDUCE_SCATTER_V)
// Part r ends at element ``end<r>``; ``target`` does not overlap ``source``, or is exactly this rank's part of it.
#define END(r) , long long end##r
#define ENTRY(r) end##r,
extern "C" __global__ void __launch_bounds__(2 * THREADS)
    reduce_scatter_v(const Context* context, u64 own_slab, unsigned own_rank, long long staging_offset, int batch,
                     const char* source, char* target RANKS_8(END)) {
    __shared__ u64 staging[RANKS], out[RANKS];
    __shared__ Part parts[RANKS];
    after_former_large_kernel();
    Channel channel(context, own_slab, own_rank);
    const long long ends[] = {0, RANKS_8(ENTRY)};
    if (threadIdx.x < RANKS) {
        const long long begin = ends[threadIdx.x], count = ends[threadIdx.x + 1] - begin;
        const long long vectors = (count + PER_VECTOR - 1) / PER_VECTOR;
        parts[threadIdx.x] = {source + begin * (long long)sizeof(Bits), count, vectors, share_of(vectors)};
        staging[threadIdx.x] = context->slab[threadIdx.x] + staging_offset;
        out[threadIdx.x] = reinterpret_cast<u64>(target);  // only this rank's entry is used
    }
    __syncthreads();
    long long longest = 0;
    u64 odd = reinterpret_cast<u64>(source) | reinterpret_cast<u64>(target);
    for (int r = 0; r < RANKS; r++) {
        longest = max(longest, parts[r].share);
        odd |= parts[r].count * sizeof(Bits);
    }
    const Share<Uneven> s{{parts, batch}, own_rank, staging, out, false};
    push_and_add<1, true>(channel, s, unsigned((longest + batch - 1) / batch), odd % 16 == 0);
    channel.close();
}
#endif
