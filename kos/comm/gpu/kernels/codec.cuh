// The formats of kos.comm.compression, bit for bit: blocks of 64 elements with one scale.
//
// -DDTYPE is the type of the arrays, -DFP8, -DINT8 or -DINT4 the format, -DOP the operation, -DRANKS the contributions.
//
// A warp handles a tile of consecutive blocks.  Eight threads handle a block, each eight of its elements, of UNROLL
// blocks.  Blocks without infinities, NaN or numbers near the dtype's largest take a fast path: a vote of the warp
// decides when encoding, a test of the thread's codes when decoding.  Almost all blocks take it, so the slow path may
// call functions.
#pragma once

#include "reduce.cuh"

using i64 = long long;

#ifdef INT4
constexpr int BITS = 4, TOP = 7;
using Codes = unsigned;  // of a thread's elements of a block
#else
constexpr int BITS = 8;
using Codes = u64;
#ifdef INT8
constexpr int TOP = 127;
#else
constexpr int TOP = 256;
#endif
#endif
constexpr bool FLOATS = TOP == 256;
constexpr unsigned ALL = (1u << BITS) - 1;  // of a code's bits
constexpr unsigned PLUS = FLOATS ? 0x7f : TOP, MINUS = FLOATS ? 0xff : -TOP & ALL, NONE = FLOATS ? 0x80 : ~TOP & ALL;
constexpr int BLOCK = 64, EACH = 8, LANES = BLOCK / EACH, UNROLL = RANKS > 2 ? 2 : 4;  // by registers
constexpr int BLOCKS = 32 / LANES * UNROLL, TILE = BLOCKS * BLOCK;  // of a tile: blocks, elements
constexpr int TILE_CODES = TILE * BITS / 8, SCALE_BYTES = 2;

#define UNROLLED(k, n) _Pragma("unroll") for (int k = 0; k < n; k++)

__device__ __forceinline__ unsigned lane_of() { return threadIdx.x % 32; }
// The block of a tile that this thread's elements u lie in; the first of them.
__device__ __forceinline__ int block_of(int u) { return u * (32 / LANES) + lane_of() / LANES; }
__device__ __forceinline__ int element_of(int u) { return (u * 32 + lane_of()) * EACH; }
__device__ __forceinline__ unsigned short short_of(unsigned w, int k) { return (unsigned short)(w >> 16 * k); }

// What a thread has of a tile: elements, or codes and scale, of UNROLL blocks.
struct Elements { float x[EACH]; };
struct Encoded { u64 codes; unsigned scale; };
template <class V> struct Tile { V of[UNROLL]; };

// Memory of a tile's elements, of which ``left`` exist.
__device__ __noinline__ Tile<Elements> load_slowly(const Bits* in, i64 left) {
    Tile<Elements> tile;
    UNROLLED(u, UNROLL)
        UNROLLED(k, EACH) tile.of[u].x[k] = element_of(u) + k < left ? T::widen(in[element_of(u) + k]) : 0;
    return tile;
}
__device__ __noinline__ void store_slowly(Bits* out, i64 left, Tile<Elements> tile) {
    UNROLLED(u, UNROLL)
        UNROLLED(k, EACH) if (element_of(u) + k < left) out[element_of(u) + k] = T::narrow(tile.of[u].x[k]);
}
constexpr int PER_LOAD = 16 / sizeof(Bits), LOADS = EACH / PER_LOAD;
__device__ __forceinline__ Tile<Elements> load_tile(const Bits* in, i64 left) {
    if (left < TILE || reinterpret_cast<u64>(in) % 16) return load_slowly(in, left);
    Tile<Elements> tile;
    UNROLLED(u, UNROLL)
        UNROLLED(h, LOADS) {
            const uint4 v = reinterpret_cast<const uint4*>(in + element_of(u))[h];
            const unsigned w[4] = {v.x, v.y, v.z, v.w};
            UNROLLED(k, PER_LOAD) tile.of[u].x[h * PER_LOAD + k] = T::widen(get<Bits>(w, k));
        }
    return tile;
}
__device__ __forceinline__ void store_tile(Bits* out, i64 left, const Tile<Elements>& tile) {
    if (left < TILE || reinterpret_cast<u64>(out) % 16) return store_slowly(out, left, tile);
    UNROLLED(u, UNROLL)
        UNROLLED(h, LOADS) {
            unsigned w[4] = {};
            UNROLLED(k, PER_LOAD) set<Bits>(w, k, T::narrow(tile.of[u].x[h * PER_LOAD + k]));
            reinterpret_cast<uint4*>(out + element_of(u))[h] = make_uint4(w[0], w[1], w[2], w[3]);
        }
}

// A tile in memory that ranks may share: where its codes and its scales lie, and how many blocks exist.
struct Place {
    u64 codes, scales;
    int blocks;
    __device__ __forceinline__ u64 codes_of(int u) const { return codes + (u * 32 + lane_of()) * sizeof(Codes); }
    __device__ __forceinline__ u64 scale_of(int u) const { return scales + SCALE_BYTES * block_of(u); }
    __device__ __forceinline__ void store(const Tile<Encoded>& tile) const {
        const int mine = lane_of() % LANES;  // a thread stores one of its scales: a warp all at once
        unsigned scale = 0;
        UNROLLED(u, UNROLL) {
            if (u == mine) scale = tile.of[u].scale;
            if (block_of(u) < blocks) store_element<Codes>(codes_of(u), Codes(tile.of[u].codes));
        }
        if (mine < UNROLL && block_of(mine) < blocks)
            store_element<unsigned short>(scale_of(mine), (unsigned short)scale);
    }
    __device__ __forceinline__ Tile<Encoded> load() const {
        Tile<Encoded> tile;
        UNROLLED(u, UNROLL) {
            const bool some = block_of(u) < blocks;
            tile.of[u].codes = some ? load_element<Codes>(codes_of(u)) : 0;
            tile.of[u].scale = some ? load_element<unsigned short>(scale_of(u)) : 0;
        }
        return tile;
    }
};

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7fffffff) < 0x7f800000; }
// The maximum of the threads of a block, NaN if there is one.
__device__ __forceinline__ float block_maximum(float x) {
    UNROLLED(i, 3) x = max_or_nan(x, __shfl_xor_sync(0xffffffff, x, 1 << i));
    return x;
}

// The element that byte j of word h of codes stands for.  4 bits are taken apart into bytes: low ones, then high ones.
__device__ __forceinline__ constexpr int of_byte(int h, int j) { return BITS == 8 ? 4 * h + j : 2 * j + h; }
// The largest number that a block can encode: ``levels`` times the largest bfloat16 with a product within the dtype.
__device__ __forceinline__ float largest_encoded(float levels) {
    return levels * __uint_as_float(__float_as_uint(T::max_finite / levels) & 0xffff0000);
}
// Of a block of numbers alone, whose largest magnitude divided by the largest code is ``quotient``.
__device__ __forceinline__ Encoded encode_finite(const Elements& e, float quotient) {
    const unsigned bits = __float_as_uint(quotient);
    const float near = __uint_as_float((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);  // the nearest bfloat16
    const float scale = fmaxf(near, __uint_as_float(0x00800000));
    // To nearest, as the quotient in encode_tile is: a remainder corrects what may be off by one.
    const float about = approximate_inverse(scale), inverse = __fmaf_rn(__fmaf_rn(-scale, about, 1.f), about, about);
    unsigned w[2];
    UNROLLED(h, 2) {
        float q[4];
        UNROLLED(j, 4) q[j] = multiply(e.x[of_byte(h, j)], inverse);
        if constexpr (FLOATS) {
            w[h] = halves_to_e4m3(to_halves(q[0], q[1])) | halves_to_e4m3(to_halves(q[2], q[3])) << 16;
            w[h] &= ((w[h] & 0x7f7f7f7f) + 0x7f7f7f7f) | 0x7f7f7f7f;  // -0 becomes 0
        } else {
            unsigned i[4];  // with the nearest integer in the low bits
            UNROLLED(j, 4) i[j] = __float_as_uint(add(q[j], 12582912.f));
            w[h] = __byte_perm(__byte_perm(i[0], i[1], 0x0040), __byte_perm(i[2], i[3], 0x0040), 0x5410);
        }
    }
    if (BITS == 4) w[0] = (w[0] & 0x0f0f0f0f) | (w[1] << 4 & 0xf0f0f0f0);
    return {BITS == 4 ? w[0] : w[0] | u64(w[1]) << 32, __float_as_uint(scale) >> 16};
}
__device__ __noinline__ Encoded encode_slowly(Elements e) {
    Elements finite;
    float largest = 0, special = 0;
    UNROLLED(k, EACH) if (!is_finite(e.x[k])) special = 1;
    special = block_maximum(special);
    const float levels = FLOATS ? TOP : TOP - special, limit = largest_encoded(levels);
    UNROLLED(k, EACH) {
        finite.x[k] = is_finite(e.x[k]) ? fminf(fmaxf(e.x[k], -limit), limit) : 0;
        largest = fmaxf(largest, fabsf(finite.x[k]));
    }
    Encoded result = encode_finite(finite, __fdiv_rn(block_maximum(largest), levels));
    UNROLLED(k, EACH) {
        const float x = e.x[k];
        if (!is_finite(x)) result.codes |= u64(x != x ? NONE : x > 0 ? PLUS : MINUS) << BITS * k;
    }
    if (!FLOATS && special > 0) result.scale |= 0x8000;
    return result;
}
// All threads of a warp come here together.
__device__ __forceinline__ Tile<Encoded> encode_tile(const Tile<Elements>& tile) {
    Tile<Encoded> to;
    float largest[UNROLL] = {}, most = 0;
    UNROLLED(u, UNROLL) {
        UNROLLED(k, EACH) largest[u] = max_or_nan(largest[u], fabsf(tile.of[u].x[k]));
        largest[u] = block_maximum(largest[u]);
        most = max_or_nan(most, largest[u]);
    }
    const bool slow = !(most <= largest_encoded(TOP));  // for NaN too; the limit is a constant
    if (__any_sync(0xffffffff, slow)) UNROLLED(u, UNROLL) to.of[u] = encode_slowly(tile.of[u]);
    else
        UNROLLED(u, UNROLL) {
            float quotient = multiply(largest[u], 1.f / TOP);  // less than the least scale its last bit may be wrong
            if (!FLOATS) quotient = __fmaf_rn(__fmaf_rn(-quotient, float(TOP), largest[u]), 1.f / TOP, quotient);
            to.of[u] = encode_finite(tile.of[u], quotient);
        }
    return to;
}

__device__ __forceinline__ Elements decode_finite(const Encoded& e) {
    Elements to;
    // Integers with their sign bit turned: as low bits of 2^23.
    const u64 codes = FLOATS ? e.codes : e.codes ^ (BITS == 8 ? 0x8080808080808080 : 0x88888888);
    UNROLLED(h, 2) {
        const unsigned w = BITS == 8 ? unsigned(codes >> 32 * h) : unsigned(codes) >> 4 * h & 0x0f0f0f0f;
        UNROLLED(j, 4) {
            float x;
            if constexpr (FLOATS) x = from_half(short_of(e4m3_to_halves(short_of(w, j / 2)), j % 2));
            else x = add(__uint_as_float(__byte_perm(w, 0x4b000000, 0x7440 + j)), -8388608.f - (1 << (BITS - 1)));
            to.x[of_byte(h, j)] = multiply(x, __uint_as_float(e.scale << 16));
        }
    }
    return to;
}
__device__ __noinline__ Elements decode_slowly(Encoded e) {
    Elements result = decode_finite({e.codes, e.scale & 0x7fff});
    UNROLLED(k, EACH) {
        const unsigned code = unsigned(e.codes >> BITS * k) & ALL;
        const unsigned bits = code == PLUS ? 0x7f800000 : code == MINUS ? 0xff800000 : code == NONE ? 0x7fc00000 : 0;
        if (bits && (FLOATS || e.scale & 0x8000)) result.x[k] = __uint_as_float(bits);
    }
    return result;
}
__device__ __forceinline__ Tile<Elements> decode_tile(const Tile<Encoded>& tile) {
    Tile<Elements> to;
    unsigned special = 0;
    UNROLLED(u, UNROLL)
        UNROLLED(h, 2) {
            const unsigned codes = unsigned(tile.of[u].codes >> 32 * h), magnitudes = codes & 0x7f7f7f7f;
            if (FLOATS) special |= (magnitudes + 0x01010101) | (codes & ~(magnitudes + 0x7f7f7f7f));
            else special |= tile.of[u].scale;
        }
    if (special & (FLOATS ? 0x80808080 : 0x8000)) UNROLLED(u, UNROLL) to.of[u] = decode_slowly(tile.of[u]);
    else UNROLLED(u, UNROLL) to.of[u] = decode_finite(tile.of[u]);
    return to;
}
// Adds contribution r, or begins with it; the last one rounds the sum to the dtype.
__device__ __forceinline__ void add_tile(Tile<Elements>& sum, const Tile<Encoded>& tile, int r) {
    const Tile<Elements> part = decode_tile(tile);
    UNROLLED(u, UNROLL)
        UNROLLED(k, EACH) {
            float& x = sum.of[u].x[k];
            x = r ? Op::combine(x, part.of[u].x[k]) : part.of[u].x[k];
            if (r == RANKS - 1) x = T::widen(T::narrow(Op::finish(x)));
        }
}
