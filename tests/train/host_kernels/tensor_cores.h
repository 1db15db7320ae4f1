// Tensor cores, matrices in shared memory, TMA and its barriers, for simt.h: bfloat16 alone.
//
// What the GPU does while a thread goes on is done at once.  An address of shared memory is an offset into it.
#pragma once

#define __cvta_generic_to_shared(pointer) ((const unsigned char*)(pointer) - dynamic_shared)
static char* at_shared(unsigned address) { return (char*)dynamic_shared + address; }
static float bfloat16_at(const void* p) { return __uint_as_float(unsigned(*(const unsigned short*)p) << 16); }
static float half_of(unsigned pair, int upper) { return __uint_as_float(upper ? pair & 0xffff0000u : pair << 16); }
static const char zeros[16] = {};

// What each thread shows to the others of its warp.
static thread_local unsigned shown[1024][6];
static const unsigned* of_lane(int lane) { return shown[current / 32 * 32 + lane]; }

// ldmatrix and stmatrix, x4: a lane has the address of row lane % 8 of matrix lane / 8.
static void load_matrices(unsigned (&r)[4], unsigned address, bool transposed) {
    const int lane = current % 32;
    shown[current][0] = address;
    warp_barrier();
    for (int m = 0; m < 4; ++m) {
        unsigned short pair[2];
        for (int i = 0; i < 2; ++i) {
            const int row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
            pair[i] = ((unsigned short*)at_shared(of_lane(8 * m + row)[0]))[column];
        }
        r[m] = pair[0] | unsigned(pair[1]) << 16;
    }
    warp_barrier();
}
static void store_matrices(unsigned address, const unsigned* x) {
    const int lane = current % 32;
    shown[current][0] = address;
    warp_barrier();
    for (int m = 0; m < 4; ++m) ((unsigned*)at_shared(of_lane(8 * m + lane / 4)[0]))[lane % 4] = x[m];
    warp_barrier();
}

// The row lane / 4, or that 8 below, of a left operand (16 x 16) that is in the registers of a warp; after a barrier.
static void left_row(float (&row)[16], int below) {
    for (int k = 0; k < 16; ++k) row[k] = half_of(of_lane(current % 32 / 4 * 4 + k % 8 / 2)[k / 8 * 2 + below], k % 2);
}
// d (16 x 8) += a (16 x 16) b (16 x 8)
static void multiply_matrices(float* d, const unsigned* a, unsigned b0, unsigned b1) {
    const int lane = current % 32;
    memcpy(shown[current], a, 16);
    shown[current][4] = b0, shown[current][5] = b1;
    warp_barrier();
    for (int i = 0; i < 4; ++i) {
        float row[16], sum = d[i];
        left_row(row, i / 2);
        for (int k = 0; k < 16; ++k) sum += row[k] * half_of(of_lane((lane % 4 * 2 + i % 2) * 4 + k % 8 / 2)[4 + k / 8], k % 2);
        d[i] = sum;
    }
    warp_barrier();
}

// wgmma: an operand in shared memory by its descriptor's lower half, in panels of 128 bytes whose chunks are permuted.
static const char* permuted(unsigned address) { return at_shared(address ^ (address >> 7 & 7) << 4); }
static float operand_at(unsigned descriptor, bool inner_last, int i, int k) {
    const unsigned start = (descriptor & 0x3fff) << 4, leading = descriptor >> 16 << 4;
    return bfloat16_at(permuted(inner_last ? start + i / 8 * 1024 + i % 8 * 128 + k * 2
                                           : start + i / 64 * leading + k / 8 * 1024 + k % 8 * 128 + i % 64 * 2));
}
template <int Values>
static void multiply_groups(float (&d)[Values], const float (&rows)[2][16], unsigned b, bool inner_last) {
    for (int i = 0; i < Values; ++i) {
        const int column = i / 4 * 8 + current % 4 * 2 + i % 2;
        if (i % 4 >= 2) continue;
        for (int k = 0; k < 16; ++k) {
            const float right = operand_at(b, inner_last, column, k);
            d[i] += rows[0][k] * right, d[i + 2] += rows[1][k] * right;
        }
    }
}
template <int Values>
static void multiply_shared(float (&d)[Values], unsigned a, unsigned b, bool a_inner_last, bool inner_last, bool add) {
    float rows[2][16];
    const int row = current / 32 % 4 * 16 + current % 32 / 4;
    for (int k = 0; k < 16; ++k)
        for (int below = 0; below < 2; ++below) rows[below][k] = operand_at(a, a_inner_last, row + 8 * below, k);
    if (!add) memset(d, 0, sizeof d);
    multiply_groups(d, rows, b, inner_last);
}
template <int Values>
static void wgmma_first(float (&d)[Values], unsigned a, unsigned b) { multiply_shared(d, a, b, true, true, false); }
template <int Values>
static void wgmma(float (&d)[Values], unsigned a, unsigned b) { multiply_shared(d, a, b, true, true, true); }
template <int Values>
static void wgmma_crossed_first(float (&d)[Values], unsigned a, unsigned b) { multiply_shared(d, a, b, false, false, false); }
template <int Values>
static void wgmma_crossed(float (&d)[Values], unsigned a, unsigned b) { multiply_shared(d, a, b, false, false, true); }
// A and B from shared memory, A K-major and B MN-major.
template <int Values>
static void wgmma(float (&d)[Values], unsigned a, unsigned b, int add) {
    multiply_shared(d, a, b, true, false, add);
}
template <int Values>
static void wgmma_b_crossed(float (&d)[Values], unsigned a, unsigned b) { multiply_shared(d, a, b, true, false, true); }
template <int Values>
static void wgmma(float (&d)[Values], const unsigned* a, unsigned b) {
    float rows[2][16];
    memcpy(shown[current], a, 16);
    warp_barrier();
    for (int below = 0; below < 2; ++below) left_row(rows[below], below);
    warp_barrier();
    multiply_groups(d, rows, b, false);
}

// Barriers 1..15 of the block: threads that wait, and threads that only arrive.
static thread_local struct {
    int arrived;
    long generation;
} named_barriers[16];
static void arrive_named(int id, int threads) {
    if (++named_barriers[id].arrived == threads) named_barriers[id].arrived = 0, ++named_barriers[id].generation;
}
static void wait_named(int id, int threads) {
    const long before = named_barriers[id].generation;
    arrive_named(id, threads);
    while (named_barriers[id].generation == before) give_turn();
}

// mbarrier
struct Arrivals {
    unsigned char phase, expected;
    short left;
    int bytes;
    void check() {
        if (!left && !bytes) phase ^= 1, left = expected;
    }
};
static void init_arrivals(void* at, int arrivals) { *(Arrivals*)at = {0, (unsigned char)arrivals, (short)arrivals, 0}; }
static void arrive(void* at, int bytes = 0) {
    Arrivals& barrier = *(Arrivals*)at;
    barrier.bytes += bytes;
    --barrier.left;
    barrier.check();
}
static void bytes_came(void* at, int bytes) {
    Arrivals& barrier = *(Arrivals*)at;
    barrier.bytes -= bytes;
    barrier.check();
}
static void wait_for_phase(void* at, int phase) {
    while (((Arrivals*)at)->phase == phase) give_turn();
}

// TMA: boxes of 64 tokens and 64 columns of a head, of 16 bits.  A tensor map is what emulator.py makes of it.
struct HostMap {
    char* pointer;
    long tokens, stride, columns, head_dim;
    bool has(int column, int token) const { return token < tokens && column < head_dim; }
    char* at(int column, int head, int token, int sample) const {
        return pointer + ((sample * stride + token) * columns + head * head_dim + column) * 2;
    }
};
static void load_a_box(void* target, const void* map, void* barrier, int column, int head, int token, int sample) {
    const HostMap& from = *(const HostMap*)map;
    const unsigned address = __cvta_generic_to_shared(target);
    for (int row = 0; row < 64; ++row)
        for (int chunk = 0; chunk < 8; ++chunk)
            memcpy((void*)permuted(address + row * 128 + chunk * 16),
                   from.has(column + 8 * chunk, token + row)
                       ? from.at(column + 8 * chunk, head, token + row, sample) : zeros, 16);
    bytes_came(barrier, 64 * 128);
}
static void store_a_box(const void* map, const void* source, int column, int head, int token, int sample) {
    const HostMap& to = *(const HostMap*)map;
    const unsigned address = __cvta_generic_to_shared(source);
    for (int row = 0; row < 64; ++row)
        for (int chunk = 0; chunk < 8; ++chunk)
            if (to.has(column + 8 * chunk, token + row))
                memcpy(to.at(column + 8 * chunk, head, token + row, sample), permuted(address + row * 128 + chunk * 16), 16);
}
