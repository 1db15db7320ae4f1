// The formats of kos.comm.compression, bit for bit: blocks of 64 elements with one scale.
//
// -DDTYPE is the type of the arrays, -DFP8, -DINT8 or -DINT4 the format, -DOP the operation, -DRANKS the contributions.
//
// A warp handles a tile of consecutive blocks.  Eight threads handle a block, each eight of its elements, of UNROLL
// blocks.  Blocks without infinities and NaN have a fast way: one vote of the warp tells when encoding, one test of the
// thread's codes when decoding.  Almost all are such, so that the rest may call functions.
#pragma once

#include "reduce.cuh"

using i64 = long long;

#ifdef INT4
constexpr int BITS = 4, TOP = 7;
constexpr unsigned LARGEST_SCALE = 0x7e120000;  // the largest bfloat16 whose product with TOP is finite
#elif defined(INT8)
constexpr int BITS = 8, TOP = 127;
constexpr unsigned LARGEST_SCALE = 0x7c010000;
#else
constexpr int BITS = 8, TOP = 256;
constexpr unsigned LARGEST_SCALE = 0x7b7f0000;
#endif
constexpr bool FLOATS = TOP == 256;
constexpr int BLOCK = 64, EACH = 8, LANES = BLOCK / EACH, UNROLL = RANKS > 4 ? 2 : 4;  // with 8 ranks registers are few
constexpr int BLOCKS = 32 / LANES * UNROLL, TILE = BLOCKS * BLOCK;  // of a tile: blocks, elements
constexpr int CODE_BYTES = EACH * BITS / 8, TILE_CODES = TILE * BITS / 8, SCALE_BYTES = 2;
constexpr unsigned FINITE = 0x7f7fffff;  // the largest finite magnitude

__device__ __forceinline__ unsigned lane_of() { return threadIdx.x % 32; }
// The block of a tile that this thread's elements u lie in.
__device__ __forceinline__ int block_of(int u) { return u * (32 / LANES) + lane_of() / LANES; }
// Element k of elements u, from the tile's first.
__device__ __forceinline__ int element_of(int u, int k) { return (u * 32 + lane_of()) * EACH + k; }

struct Elements {
    float x[EACH];
};
struct Encoded {
    unsigned codes[CODE_BYTES / 4], scale;
};
template <class V> struct Tile {  // what a thread has of it
    V of[UNROLL];
};

// Memory of a tile's elements, of which ``left`` exist.
__device__ __noinline__ Tile<Elements> load_slowly(const Bits* in, i64 left) {
    Tile<Elements> tile;
    for (int u = 0; u < UNROLL; u++)
        for (int k = 0; k < EACH; k++) {
            const int i = element_of(u, k);
            tile.of[u].x[k] = i < left ? T::widen(in[i]) : 0;
        }
    return tile;
}
__device__ __noinline__ void store_slowly(Bits* out, i64 left, Tile<Elements> tile) {
    for (int u = 0; u < UNROLL; u++)
        for (int k = 0; k < EACH; k++)
            if (element_of(u, k) < left) out[element_of(u, k)] = T::narrow(tile.of[u].x[k]);
}
__device__ __forceinline__ bool is_plain(const Bits* p, i64 left) {
    return left >= TILE && reinterpret_cast<u64>(p) % 16 == 0;
}
constexpr int WORDS = EACH * sizeof(Bits) / 4;
__device__ __forceinline__ void load_tile(Tile<Elements>& tile, const Bits* in, i64 left) {
    if (is_plain(in, left)) {
        unsigned w[UNROLL][WORDS];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int k = 0; k < WORDS; k += 4) {
                const uint4 v = reinterpret_cast<const uint4*>(in + element_of(u, 0))[k / 4];
                w[u][k] = v.x, w[u][k + 1] = v.y, w[u][k + 2] = v.z, w[u][k + 3] = v.w;
            }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int k = 0; k < EACH; k++) tile.of[u].x[k] = T::widen(get<Bits>(w[u], k));
    } else tile = load_slowly(in, left);
}
__device__ __forceinline__ void store_tile(Bits* out, i64 left, const Tile<Elements>& tile) {
    if (!is_plain(out, left)) return store_slowly(out, left, tile);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        unsigned w[WORDS] = {};
#pragma unroll
        for (int k = 0; k < EACH; k++) set<Bits>(w, k, T::narrow(tile.of[u].x[k]));
#pragma unroll
        for (int k = 0; k < WORDS; k += 4)
            reinterpret_cast<uint4*>(out + element_of(u, 0))[k / 4] = make_uint4(w[k], w[k + 1], w[k + 2], w[k + 3]);
    }
}

// A tile in memory that ranks may share: where its codes and its scales lie, and how many blocks exist.
struct Place {
    u64 codes, scales;
    int blocks;
    __device__ __forceinline__ u64 codes_of(int u) const { return codes + (u * 32 + lane_of()) * CODE_BYTES; }
    __device__ __forceinline__ void store(const Tile<Encoded>& tile) const {
        unsigned scale = 0;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const Encoded& e = tile.of[u];
            if (lane_of() % LANES == u) scale = e.scale;
            if (block_of(u) >= blocks) continue;
            if constexpr (BITS == 4) store_element<unsigned>(codes_of(u), e.codes[0]);
            else store_element<u64>(codes_of(u), e.codes[0] | u64(e.codes[CODE_BYTES / 4 - 1]) << 32);
        }
        const int u = lane_of() % LANES;  // all scales of the warp at once
        if (u < UNROLL && block_of(u) < blocks)
            store_element<unsigned short>(scales + SCALE_BYTES * block_of(u), (unsigned short)scale);
    }
    __device__ __forceinline__ void load(Tile<Encoded>& tile) const {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            Encoded& e = tile.of[u] = {};
            if (block_of(u) >= blocks) continue;
            if constexpr (BITS == 4) e.codes[0] = load_element<unsigned>(codes_of(u));
            else {
                const u64 both = load_element<u64>(codes_of(u));
                e.codes[0] = unsigned(both), e.codes[CODE_BYTES / 4 - 1] = unsigned(both >> 32);
            }
            e.scale = load_element<unsigned short>(scales + SCALE_BYTES * block_of(u));
        }
    }
};

// The maximum of the threads of a block, NaN if there is one.
__device__ __forceinline__ float block_maximum(float x) {
#pragma unroll
    for (int lane = 1; lane < LANES; lane *= 2) x = max_or_nan(x, __shfl_xor_sync(0xffffffff, x, lane));
    return x;
}
__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7fffffff) <= FINITE; }

// The scale of a block whose largest magnitude is ``quotient`` times as large as the largest code.
__device__ __forceinline__ float scale_of(float quotient) {
    const float scale = __uint_as_float(unsigned(to_bfloat16(quotient)) << 16);
    return fminf(fmaxf(scale, __uint_as_float(0x00800000)), __uint_as_float(LARGEST_SCALE));
}
// x / TOP and 1 / scale, rounded to nearest: a remainder corrects what may be off by one.  (Where x / TOP is less than
// the least scale its last bit does not matter.)
__device__ __forceinline__ float of_top(float x) {
    constexpr float inverse = 1.f / TOP;
    const float y = multiply(x, inverse);
    return FLOATS ? y : __fmaf_rn(__fmaf_rn(-y, float(TOP), x), inverse, y);
}
__device__ __forceinline__ float inverse_of(float scale) {
    const float y = approximate_inverse(scale);
    return __fmaf_rn(__fmaf_rn(-scale, y, 1.f), y, y);
}
// The low bytes of four words.
__device__ __forceinline__ unsigned low_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

__device__ __noinline__ Encoded encode_slowly(Elements e) {
    float largest = 0, special = 0;
    for (float x : e.x) {
        if (is_finite(x)) largest = fmaxf(largest, fabsf(x));
        else special = 1;
    }
    largest = block_maximum(largest), special = block_maximum(special);
    const float levels = float(FLOATS ? TOP : TOP - int(special));
    const float scale = scale_of(__fdiv_rn(largest, levels)), inverse = __fdiv_rn(1.f, scale);
    u64 codes = 0;
    for (int k = 0; k < EACH; k++) {
        const float x = e.x[k], q = multiply(x, inverse);
        unsigned code;
        if (FLOATS) {
            const unsigned half = to_half(q), magnitude = half & 0x7fff;
            code = to_e4m3(from_half((unsigned short)half));
            if (code == 0x80) code = 0;
            if (magnitude >= 0x7c00) code = magnitude > 0x7c00 ? 0x80 : half == magnitude ? 0x7f : 0xff;
        } else {
            code = unsigned(int(fminf(fmaxf(rintf(q), -levels), levels)));
            if (!is_finite(x)) code = unsigned(x != x ? -TOP - 1 : x > 0 ? TOP : -TOP);
        }
        codes |= u64(code & ((1u << BITS) - 1)) << BITS * k;
    }
    Encoded result = {{unsigned(codes)}, __float_as_uint(scale) >> 16};
    if (BITS == 8) result.codes[CODE_BYTES / 4 - 1] = unsigned(codes >> 32);
    if (!FLOATS && special > 0) result.scale |= 0x8000;
    return result;
}
// Of a block without infinities and NaN: no code needs a limit.
__device__ __forceinline__ Encoded encode_finite(const Elements& e, float largest) {
    const float scale = scale_of(of_top(largest)), inverse = inverse_of(scale);
    Encoded result = {{}, __float_as_uint(scale) >> 16};
    float q[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) q[k] = multiply(e.x[k], inverse);
    if constexpr (FLOATS) {
#pragma unroll
        for (int h = 0; h < EACH; h += 4) {
            const unsigned low = halves_to_e4m3(to_halves(q[h], q[h + 1]));
            const unsigned high = halves_to_e4m3(to_halves(q[h + 2], q[h + 3]));
            const unsigned codes = low | high << 16;
            result.codes[h / 4] = codes & (((codes & 0x7f7f7f7f) + 0x7f7f7f7f) | 0x7f7f7f7f);  // -0 becomes 0
        }
    } else {
        unsigned i[EACH];  // with the nearest integer in the low bits: the others do not matter
#pragma unroll
        for (int k = 0; k < EACH; k++) i[k] = __float_as_uint(add(q[k], 12582912.f));
        if constexpr (BITS == 8) {
            result.codes[0] = low_bytes(i[0], i[1], i[2], i[3]);
            result.codes[CODE_BYTES / 4 - 1] = low_bytes(i[4], i[5], i[6], i[7]);
        } else {
            const unsigned even = low_bytes(i[0], i[2], i[4], i[6]), odd = low_bytes(i[1], i[3], i[5], i[7]);
            result.codes[0] = (even & 0x0f0f0f0f) | (odd << 4 & 0xf0f0f0f0);
        }
    }
    return result;
}
// All threads of a warp come here together.
__device__ __forceinline__ void encode_tile(Tile<Encoded>& to, const Tile<Elements>& tile) {
    float largest[UNROLL], most = 0;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const float(&x)[EACH] = tile.of[u].x;
        largest[u] = fabsf(x[0]);
#pragma unroll
        for (int k = 1; k < EACH; k++) largest[u] = max_or_nan(largest[u], fabsf(x[k]));
        largest[u] = block_maximum(largest[u]);
        most = max_or_nan(most, largest[u]);
    }
    const bool finite = !__any_sync(0xffffffff, !is_finite(most));
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        to.of[u] = finite ? encode_finite(tile.of[u], largest[u]) : encode_slowly(tile.of[u]);
}

__device__ __noinline__ Elements decode_slowly(Encoded e) {
    const float scale = __uint_as_float((e.scale & 0x7fff) << 16);
    const u64 codes = e.codes[0] | u64(e.codes[CODE_BYTES / 4 - 1]) << 32;
    Elements result;
    for (int k = 0; k < EACH; k++) {
        const unsigned code = unsigned(codes >> BITS * k) & ((1u << BITS) - 1);
        const int number = int(code << (32 - BITS)) >> (32 - BITS);
        const float value = FLOATS ? from_half((unsigned short)e4m3_to_halves((unsigned short)code)) : float(number);
        const bool some = FLOATS || e.scale & 0x8000;  // of the codes are no numbers
        float& x = result.x[k] = multiply(value, scale);
        if (some && code == (FLOATS ? 0x7f : TOP)) x = __uint_as_float(0x7f800000);
        if (some && (FLOATS ? code == 0xff : number == -TOP)) x = __uint_as_float(0xff800000);
        if (some && (FLOATS ? code == 0x80 : number == -TOP - 1)) x = __uint_as_float(0x7fc00000);
    }
    return result;
}
// Whether codes stand for infinities or NaN.
__device__ __forceinline__ bool is_special(const Encoded& e) {
    if constexpr (!FLOATS) return e.scale & 0x8000;
    unsigned found = 0;
#pragma unroll
    for (unsigned c : e.codes) {
        const unsigned magnitudes = c & 0x7f7f7f7f;
        found |= (magnitudes + 0x01010101) | (c & ~(magnitudes + 0x7f7f7f7f));  // 0x7f, 0xff or 0x80
    }
    return found & 0x80808080;
}
__device__ __forceinline__ void decode_finite(Elements& to, const Encoded& e) {
    const float scale = __uint_as_float(e.scale << 16);
    if constexpr (FLOATS) {
#pragma unroll
        for (int k = 0; k < EACH; k += 2) {
            const unsigned pair = e4m3_to_halves((unsigned short)(e.codes[k / 4] >> 8 * (k % 4)));
            to.x[k] = multiply(from_half((unsigned short)pair), scale);
            to.x[k + 1] = multiply(from_half((unsigned short)(pair >> 16)), scale);
        }
    } else {
        constexpr int BIAS = 1 << (BITS - 1);
        unsigned w[2];  // codes and BIAS, in bytes
        if constexpr (BITS == 8) w[0] = e.codes[0] ^ 0x80808080, w[1] = e.codes[CODE_BYTES / 4 - 1] ^ 0x80808080;
        else {
            const unsigned codes = e.codes[0] ^ 0x88888888;
            w[0] = codes & 0x0f0f0f0f, w[1] = codes >> 4 & 0x0f0f0f0f;
        }
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int word = BITS == 8 ? k / 4 : k % 2, byte = BITS == 8 ? k % 4 : k / 2;
            const float biased = __uint_as_float(__byte_perm(w[word], 0x4b000000, 0x7440 + byte));  // from 2^23 on
            to.x[k] = multiply(add(biased, -8388608.f - BIAS), scale);
        }
    }
}
__device__ __forceinline__ void decode_tile(Tile<Elements>& to, const Tile<Encoded>& tile) {
    bool special = false;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) special |= is_special(tile.of[u]);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        if (special) to.of[u] = decode_slowly(tile.of[u]);
        else decode_finite(to.of[u], tile.of[u]);
}
// Adds contribution r, or begins with it.
__device__ __forceinline__ void add_tile(Tile<Elements>& sum, const Tile<Encoded>& tile, int r) {
    Tile<Elements> part;
    decode_tile(part, tile);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            float &x = sum.of[u].x[k], y = part.of[u].x[k];
            x = r ? Op::combine(x, y) : y;
            if (r == RANKS - 1) x = Op::finish(x);
        }
}
