// What compressed collectives do around their exchanges: encode, decode, and add in rank order.
//
// -DDTYPE is the type of the arrays, -DFP8, -DINT8 or -DINT4 the format, -DOP the operation, -DRANKS the contributions.
// The formats are those of kos.comm.compression, bit for bit: blocks of 64 elements with one scale.
//
// A vector lies encoded as pieces of ``part`` elements (the last ones may have fewer, or none), ``stride`` bytes apart.
// A piece has the codes of its blocks, then their scales.  Eight threads handle a block, each eight of its elements.

#include "reduce.cuh"

using i64 = long long;

#ifdef INT4
constexpr int BITS = 4, TOP = 7;
#elif defined(INT8)
constexpr int BITS = 8, TOP = 127;
#else
constexpr int BITS = 8, TOP = 256;
#endif
constexpr int BLOCK = 64, EACH = 8, LANES = BLOCK / EACH;
constexpr unsigned FINITE = 0x7f7fffff;  // the largest finite magnitude

// The place of this thread's elements: block ``b`` of all blocks of pieces of ``part`` elements.
struct Place {
    unsigned char *codes;
    unsigned short *scale;
    i64 at;
    int some;  // of its elements exist
    __device__ Place(i64 b, unsigned char *data, i64 stride, i64 part, i64 count) {
        const i64 blocks = (part + BLOCK - 1) / BLOCK, piece = b / blocks, block = b % blocks;
        const i64 start = piece * part, left = count - start;
        const i64 elements = left < 0 ? 0 : left < part ? left : part;  // of this piece
        const i64 used = (elements + BLOCK - 1) / BLOCK, first = block * BLOCK + threadIdx.x % LANES * EACH;
        codes = data + piece * stride + first * BITS / 8;
        scale = reinterpret_cast<unsigned short *>(data + piece * stride + used * (BLOCK * BITS / 8)) + block;
        at = start + first;
        some = block >= used ? -1 : elements - first >= EACH ? EACH : elements > first ? int(elements - first) : 0;
    }
};

__device__ inline bool is_aligned(const void *p) { return reinterpret_cast<u64>(p) % 16 == 0; }

__device__ inline void load_elements(const Bits *in, int some, float (&x)[EACH]) {
    constexpr int WORDS = EACH * sizeof(Bits) / 4;
    if (some == EACH && is_aligned(in)) {
        unsigned w[WORDS];
#pragma unroll
        for (int k = 0; k < WORDS; k += 4)
            *reinterpret_cast<uint4 *>(w + k) = reinterpret_cast<const uint4 *>(in)[k / 4];
#pragma unroll
        for (int k = 0; k < EACH; k++) x[k] = T::widen(get<Bits>(w, k));
    } else {
#pragma unroll
        for (int k = 0; k < EACH; k++) x[k] = k < some ? T::widen(in[k]) : 0;
    }
}

__device__ inline void store_elements(Bits *out, int some, const float (&x)[EACH]) {
    constexpr int WORDS = EACH * sizeof(Bits) / 4;
    if (some == EACH && is_aligned(out)) {
        unsigned w[WORDS] = {};
#pragma unroll
        for (int k = 0; k < EACH; k++) set<Bits>(w, k, T::narrow(x[k]));
#pragma unroll
        for (int k = 0; k < WORDS; k += 4)
            reinterpret_cast<uint4 *>(out)[k / 4] = *reinterpret_cast<const uint4 *>(w + k);
    } else {
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (k < some) out[k] = T::narrow(x[k]);
    }
}

// The maximum of the threads of a block.
__device__ inline unsigned block_maximum(unsigned x) {
#pragma unroll
    for (int lane = 1; lane < LANES; lane *= 2) {
        const unsigned other = __shfl_xor_sync(0xffffffff, x, lane);
        x = x < other ? other : x;
    }
    return x;
}

__device__ inline float largest_scale() {
    return __uint_as_float(__float_as_uint(__fdiv_rn(__uint_as_float(FINITE), float(TOP))) & 0xffff0000);
}

#if !defined(INT4) && !defined(INT8)
__device__ inline unsigned to_code(float q) {
    const unsigned short half = to_half(q);
    const unsigned magnitude = half & 0x7fff;
    if (magnitude > 0x7c00) return 0x80;
    if (magnitude == 0x7c00) return half == magnitude ? 0x7f : 0xff;
    const unsigned code = to_e4m3(from_half(half));
    return code == 0x80 ? 0 : code;
}
__device__ inline float from_code(unsigned code, float scale) {
    if (code == 0x80) return __uint_as_float(0x7fc00000);
    if ((code & 0x7f) == 0x7f) return __uint_as_float(code == 0x7f ? 0x7f800000 : 0xff800000);
    return multiply(from_half(e4m3_to_half((unsigned char)code)), scale);
}
#else
__device__ inline float from_code(int code, float scale) {
    if (scale < 0) {
        if (code == TOP) return __uint_as_float(0x7f800000);
        if (code == -TOP) return __uint_as_float(0xff800000);
        if (code == -TOP - 1) return __uint_as_float(0x7fc00000);
    }
    return multiply(float(code), fabsf(scale));
}
#endif

// The codes of a thread's elements, and the scale of their block.
struct Encoded {
    u64 codes = 0;
    unsigned short scale = 0;
    __device__ void store(const Place &place) const {
        if (place.some < 0) return;
        if constexpr (BITS == 4) *reinterpret_cast<unsigned *>(place.codes) = unsigned(codes);
        else *reinterpret_cast<u64 *>(place.codes) = codes;
        if (threadIdx.x % LANES == 0) *place.scale = scale;
    }
    __device__ void load(const Place &place) {
        if constexpr (BITS == 4) codes = *reinterpret_cast<const unsigned *>(place.codes);
        else codes = *reinterpret_cast<const u64 *>(place.codes);
        scale = *place.scale;
    }
};

// All threads of a warp come here together, those without elements too.
__device__ inline Encoded encoded(const float (&x)[EACH]) {
    unsigned largest = 0, infinite = 0;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const unsigned magnitude = __float_as_uint(x[k]) & 0x7fffffff;
        if (magnitude > FINITE) infinite = 1;
        else largest = largest < magnitude ? magnitude : largest;
    }
    largest = block_maximum(largest);
#if defined(INT4) || defined(INT8)
    infinite = block_maximum(infinite);
    const float levels = float(TOP - int(infinite));
#else
    const float levels = float(TOP);
#endif
    unsigned bits = __float_as_uint(__fdiv_rn(__uint_as_float(largest), levels));
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    const float scale = fminf(fmaxf(__uint_as_float(bits), __uint_as_float(0x00800000)), largest_scale());
    const float inverse = __fdiv_rn(1.f, scale);
    Encoded result;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const float q = multiply(x[k], inverse);
#if defined(INT4) || defined(INT8)
        const unsigned magnitude = __float_as_uint(x[k]) & 0x7fffffff;
        int code = int(fminf(fmaxf(rintf(q), -levels), levels));
        if (magnitude > FINITE) code = x[k] != x[k] ? -TOP - 1 : x[k] > 0 ? TOP : -TOP;
        result.codes |= u64(unsigned(code) & ((1u << BITS) - 1)) << BITS * k;
#else
        result.codes |= u64(to_code(q)) << 8 * k;
#endif
    }
    result.scale = (unsigned short)(__float_as_uint(scale) >> 16);
#if defined(INT4) || defined(INT8)
    result.scale |= (unsigned short)(infinite << 15);
#endif
    return result;
}

__device__ inline void decode_elements(float (&x)[EACH], const Encoded &from) {
    const float scale = __uint_as_float(unsigned(from.scale) << 16);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
#if defined(INT4) || defined(INT8)
        x[k] = from_code(int(unsigned(from.codes >> BITS * k) << (32 - BITS)) >> (32 - BITS), scale);
#else
        x[k] = from_code(unsigned(from.codes >> 8 * k) & 0xff, scale);
#endif
    }
}

// Blocks that this group of eight threads handles; the same number of rounds for all threads of a CUDA block.
#define EACH_BLOCK(b, blocks)                                                                        \
    for (i64 first = blockIdx.x * i64(blockDim.x / LANES), b = first + threadIdx.x / LANES; first < blocks; \
         first += gridDim.x * i64(blockDim.x / LANES), b = first + threadIdx.x / LANES)

extern "C" __global__ void encode(const Bits *in, i64 count, i64 part, i64 blocks, unsigned char *out, i64 stride) {
    EACH_BLOCK(b, blocks) {
        Place place(b, out, stride, part, count);
        if (b >= blocks) place.some = -1;
        float x[EACH];
        load_elements(in + place.at, place.some, x);
        encoded(x).store(place);
    }
}

extern "C" __global__ void decode(unsigned char *in, i64 stride, i64 part, i64 blocks, Bits *out, i64 count) {
    EACH_BLOCK(b, blocks) {
        const Place place(b, in, stride, part, count);
        if (b >= blocks || place.some <= 0) continue;
        float x[EACH];
        Encoded from;
        from.load(place);
        decode_elements(x, from);
        store_elements(out + place.at, place.some, x);
    }
}

// The sum of RANKS encoded vectors of ``count`` elements.
__device__ inline void add_all(float (&sum)[EACH], i64 b, unsigned char *in, i64 stride, i64 count) {
#pragma unroll
    for (int k = 0; k < EACH; k++) sum[k] = 0;
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
        const Place place(b, in + r * stride, 0, count, count);
        if (place.some < 0) return;
        float x[EACH];
        Encoded from;
        from.load(place);
        decode_elements(x, from);
#pragma unroll
        for (int k = 0; k < EACH; k++) sum[k] = r ? Op::combine(sum[k], x[k]) : x[k];
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) sum[k] = Op::finish(sum[k]);
}

extern "C" __global__ void add_decode(unsigned char *in, i64 stride, i64 blocks, Bits *out, i64 count) {
    EACH_BLOCK(b, blocks) {
        if (b >= blocks) continue;
        float sum[EACH];
        add_all(sum, b, in, stride, count);
        const Place place(b, in, 0, count, count);
        if (place.some > 0) store_elements(out + place.at, place.some, sum);
    }
}

extern "C" __global__ void add_encode(unsigned char *in, i64 stride, i64 blocks, unsigned char *out, i64 count) {
    EACH_BLOCK(b, blocks) {
        float sum[EACH] = {};
        Place place(b, out, 0, count, count);
        if (b < blocks) add_all(sum, b, in, stride, count);
        else place.some = -1;
        encoded(sum).store(place);  // the sum of what is beyond the end is 0, as it was encoded
    }
}

// x += residual; then the residual becomes what x loses when it is encoded, 0 for infinities and NaN.
extern "C" __global__ void feed_back(Bits *x, Bits *residual, i64 count, i64 blocks) {
    EACH_BLOCK(b, blocks) {
        Place place(b, nullptr, 0, count, count);
        if (b >= blocks) place.some = -1;
        float mine[EACH], lost[EACH];
        load_elements(x + place.at, place.some, mine);
        load_elements(residual + place.at, place.some, lost);
#pragma unroll
        for (int k = 0; k < EACH; k++) mine[k] = T::widen(T::narrow(add(mine[k], lost[k])));
        const Encoded codes = encoded(mine);
        decode_elements(lost, codes);
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const float difference = add(mine[k], -lost[k]);
            lost[k] = (__float_as_uint(difference) & 0x7fffffff) > FINITE ? 0 : difference;
        }
        if (place.some <= 0) continue;
        store_elements(x + place.at, place.some, mine);
        store_elements(residual + place.at, place.some, lost);
    }
}
