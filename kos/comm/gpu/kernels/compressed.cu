// What compressed collectives do around their exchanges: encode, decode, and add in rank order; see codec.cuh.
//
// A vector lies encoded as pieces of ``part`` elements (the last ones may have fewer, or none), ``stride`` bytes apart.
// A piece has the codes of its blocks, then their scales.
#include "codec.cuh"

// Tile t of ``tiles`` in each piece of a vector of ``count`` elements.
struct OfPiece {
    i64 at, left;  // its first element, and how many exist from there on in the piece
    Place place;
    __device__ __forceinline__ OfPiece(unsigned t, unsigned tiles, void* data, i64 stride, i64 part, i64 count) {
        const unsigned piece = t / tiles;
        const i64 first = i64(t % tiles) * TILE, elements = max(min(part, count - piece * part), 0ll);
        const i64 blocks = (elements + BLOCK - 1) / BLOCK, base = reinterpret_cast<i64>(data) + piece * stride;
        at = piece * part + first, left = elements - first;
        place.codes = base + first * BITS / 8;
        place.scales = base + blocks * (BLOCK * BITS / 8) + first / BLOCK * SCALE_BYTES;
        place.blocks = int(max(min(i64(BLOCKS), blocks - first / BLOCK), 0ll));
    }
};
__device__ __forceinline__ unsigned tiles_of(i64 part) { return unsigned((part + TILE - 1) / TILE); }

// The tiles that this warp handles.
#define EACH_TILE(t, tiles)                                                        \
    for (unsigned t = (blockIdx.x * blockDim.x + threadIdx.x) / 32; t < (tiles);   \
         t += gridDim.x * blockDim.x / 32)

extern "C" __global__ void encode(const Bits* in, i64 count, i64 part, int pieces, unsigned char* out, i64 stride) {
    const unsigned tiles = tiles_of(part);
    EACH_TILE(t, tiles * pieces) {
        const OfPiece tile(t, tiles, out, stride, part, count);
        if (tile.left > 0) tile.place.store(encode_tile(load_tile(in + tile.at, tile.left)));
    }
}

extern "C" __global__ void decode(unsigned char* in, i64 stride, i64 part, int pieces, Bits* out, i64 count) {
    const unsigned tiles = tiles_of(part);
    EACH_TILE(t, tiles * pieces) {
        const OfPiece tile(t, tiles, in, stride, part, count);
        if (tile.left > 0) store_tile(out + tile.at, tile.left, decode_tile(tile.place.load()));
    }
}

// The sum of RANKS encoded vectors of ``count`` elements, encoded again or not.
extern "C" __global__ void add_encoded(unsigned char* in, i64 stride, void* out, i64 count, int again) {
    const unsigned tiles = tiles_of(count);
    EACH_TILE(t, tiles) {
        Tile<Elements> sum;
        UNROLLED(r, RANKS) add_tile(sum, OfPiece(t, tiles, in + r * stride, 0, count, count).place.load(), r);
        const OfPiece tile(t, tiles, out, 0, count, count);
        if (again) tile.place.store(encode_tile(sum));  // what is beyond the end is 0, as it was encoded
        else store_tile(static_cast<Bits*>(out) + tile.at, tile.left, sum);
    }
}

// x += residual, where a finite x stays finite; then the residual becomes what x loses when it is encoded, 0 for
// infinities and NaN.
extern "C" __global__ void feed_back(Bits* x, Bits* residual, i64 count) {
    EACH_TILE(t, tiles_of(count)) {
        const i64 at = i64(t) * TILE, left = count - at;
        Tile<Elements> mine = load_tile(x + at, left), lost = load_tile(residual + at, left);
        UNROLLED(u, UNROLL)
            UNROLLED(k, EACH) {
                float& x = mine.of[u].x[k];
                const float sum = add(x, lost.of[u].x[k]);
                x = T::widen(T::narrow(is_finite(x) ? fminf(fmaxf(sum, -T::max_finite), T::max_finite) : sum));
            }
        lost = decode_tile(encode_tile(mine));
        UNROLLED(u, UNROLL)
            UNROLLED(k, EACH) {
                const float difference = add(mine.of[u].x[k], -lost.of[u].x[k]);
                lost.of[u].x[k] = is_finite(difference) ? difference : 0;
            }
        store_tile(x + at, left, mine);
        store_tile(residual + at, left, lost);
    }
}
