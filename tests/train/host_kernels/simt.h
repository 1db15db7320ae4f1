// CUDA kernels as plain C++ on the host, for tests without a GPU: a thread is a fiber, a block runs at a time.
// Every thread of the host has a GPU of its own.
//
// What is checked is the kernels' own arithmetic, indexing and barriers, not the hardware's memory order or
// speed.  A fiber runs until it waits at a barrier or exchanges values with its warp; exited threads count as
// arrived, as on the GPU.  The few lines of PTX have their meaning written here (see emulator.py).
#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

// What Python calls: see host_compiler.py.
#define EXPORTED __attribute__((visibility("default")))

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __restrict__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define __host__
#define __grid_constant__

struct Index {
    int x, y;
};
struct uint2 {
    unsigned x, y;
};
struct float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
alignas(16) static thread_local unsigned char dynamic_shared[1 << 18];

struct Fiber {
    jmp_buf context;
    char* stack;
    bool done;
    long at_barrier, block_waits, group_waits, warp_waits;
};
static thread_local Fiber fibers[1024];
static thread_local jmp_buf scheduler;
static thread_local int current, votes[1024];
static thread_local unsigned long long slots[1024];
static thread_local void (*kernel_body)(void*);
static thread_local void* kernel_arguments;
static thread_local unsigned seed = 1;  // of the order in which warps run

// To the scheduler, and back when it is this fiber's turn.  Without a system call, as swapcontext has.
[[gnu::noinline]] static void give_turn() {
    if (!_setjmp(fibers[current].context)) _longjmp(scheduler, 1);
}
static void wait_for(int first, int last, long Fiber::*waits) {
    const int me = current;
    const long turn = ++(fibers[me].*waits);
    for (;;) {
        bool all = true;
        for (int i = first; i < last; ++i) all &= fibers[i].done || fibers[i].*waits >= turn;
        if (all) return;
        give_turn();
    }
}
static thread_local int present, gone;  // fibers of the block at the barrier, and at their end
static thread_local long generation = 1;  // of the barrier
static void leave_barrier_if_all_came() {
    if (present && present + gone == blockDim.x) present = 0, ++generation;
}
static void __syncwarp();
static void __syncthreads() {
    Fiber& me = fibers[current];
    me.at_barrier = generation;
    ++me.block_waits;
    ++present;
    leave_barrier_if_all_came();
    while (me.at_barrier == generation) give_turn();
}
static void group_barrier(int threads) {
    const int first = current / threads * threads;
    wait_for(first, first + threads, &Fiber::group_waits);
}
static int __syncthreads_count(int vote) {
    votes[current] = vote;
    __syncthreads();
    int count = 0;
    for (int i = 0; i < blockDim.x; ++i) count += !fibers[i].done && votes[i];
    __syncthreads();
    return count;
}
static void warp_barrier() {
    const int first = current / 32 * 32;
    wait_for(first, first + 32 < blockDim.x ? first + 32 : blockDim.x, &Fiber::warp_waits);
}
static void __syncwarp() { warp_barrier(); }
template <class V>
static V from_lane(V x, int lane) {
    memcpy(&slots[current], &x, sizeof x);
    warp_barrier();
    memcpy(&x, &slots[current / 32 * 32 + lane], sizeof x);
    warp_barrier();
    return x;
}
template <class V>
static V __shfl_xor_sync(unsigned, V x, int mask) { return from_lane(x, current % 32 ^ mask); }
template <class V>
static V __shfl_sync(unsigned, V x, int lane) { return from_lane(x, lane); }
template <class V>
static V __shfl_up_sync(unsigned, V x, int by) {
    const int lane = current % 32;
    return from_lane(x, lane >= by ? lane - by : lane);
}
static unsigned __match_any_sync(unsigned, int x) {
    slots[current] = x;
    warp_barrier();
    unsigned mask = 0;
    for (int i = 0; i < 32; ++i) mask |= unsigned(int(slots[current / 32 * 32 + i]) == x) << i;
    warp_barrier();
    return mask;
}

// cp.async of 16 bytes comes as late as it may: when it is waited for.  Until then there is NaN.
struct Copy {
    void* to;
    const void* from;
    long group;
};
static thread_local struct {
    Copy latest[64];
    long begun, ended, groups;
} late_copies[1024];
static void copy_later(void* to, const void* from) {
    auto& mine = late_copies[current];
    memset(to, 0xff, 16);
    if (mine.begun - mine.ended == 64) abort();
    mine.latest[mine.begun++ % 64] = {to, from, mine.groups};
}
static void commit_copies() { ++late_copies[current].groups; }
static void wait_for_copies(int pending) {
    auto& mine = late_copies[current];
    for (; mine.ended < mine.begun; ++mine.ended) {
        const Copy& copy = mine.latest[mine.ended % 64];
        if (copy.group >= mine.groups - pending) break;
        memcpy(copy.to, copy.from, 16);
    }
}

template <class V>
static V min(V a, V b) { return a < b ? a : b; }
template <class V>
static V max(V a, V b) { return a > b ? a : b; }
static unsigned __reduce_max_sync(unsigned, unsigned x) {
    for (int offset = 16; offset; offset >>= 1) x = max(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static int __float2int_rn(float x) { return lrintf(x); }
#define __logf logf
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int atomicAdd(int* p, int x) { return (*p += x) - x; }
static void atomicMax(int* p, int x) { *p = *p > x ? *p : x; }
static float __uint_as_float(unsigned x) { return memcpy(&x, &x, 4), *(float*)&x; }
static float __int_as_float(int x) { return __uint_as_float(x); }
static unsigned __float_as_uint(float x) { return *(unsigned*)&x; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
#define __expf expf
static float __fdividef(float x, float y) { return x / y; }
static double cospi(double x) { return cos(M_PI * x); }

static unsigned short to_bfloat16(float x) {  // to nearest even
    const unsigned bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// To nearest even, in 8 bits with so many of mantissa; what is larger than the largest number becomes it.
static unsigned to_8_bits(float x, int mantissa, int bias, float most, unsigned nan) {
    if (x != x) return nan;
    const unsigned sign = __float_as_uint(x) >> 31 << 7;
    float size = fabsf(x);
    int exponent = size == 0 ? 0 : ilogbf(fminf(size, most));
    if (exponent < 1 - bias) exponent = 1 - bias;
    size = fminf(ldexpf(rintf(ldexpf(fminf(size, 2 * most), mantissa - exponent)), exponent - mantissa), most);
    if (size < ldexpf(1, 1 - bias)) return sign | unsigned(ldexpf(size, mantissa + bias - 1));
    exponent = ilogbf(size);
    return sign | unsigned(exponent + bias) << mantissa | unsigned(ldexpf(size, mantissa - exponent)) - (1u << mantissa);
}
static unsigned to_e4m3(float x) { return to_8_bits(x, 3, 7, 448, 0x7f); }
static unsigned to_e5m2(float x) { return to_8_bits(x, 2, 15, 57344, 0x7f); }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = a | (unsigned long long)b << 32;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= unsigned(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}

#include "tensor_cores.h"

static void fiber_main() {
    for (;;) {  // each time for another block
        kernel_body(kernel_arguments);
        fibers[current].done = true;
        ++gone;
        leave_barrier_if_all_came();
        give_turn();
    }
}
[[gnu::noinline]] static void run_fiber() {
    Fiber& fiber = fibers[current];
    if (_setjmp(scheduler)) return;
    if (fiber.stack) _longjmp(fiber.context, 1);
    constexpr int size = 64 << 10;
    ucontext_t first;
    getcontext(&first);
    first.uc_stack.ss_sp = fiber.stack = (char*)malloc(size);
    first.uc_stack.ss_size = size;
    makecontext(&first, fiber_main, 0);
    setcontext(&first);
}

static void run_block(int block, int grid_x, int grid_y, int threads) {
    blockDim = {threads, 1};
    gridDim = {grid_x, grid_y};
    blockIdx = {block % grid_x, block / grid_x};
    present = gone = 0;
    for (auto& barrier : named_barriers) barrier = {};
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.done = false;
        fiber.at_barrier = fiber.block_waits = fiber.group_waits = fiber.warp_waits = 0;
    }
    // Warps at random, each for a while: some run far ahead, up to the next barrier.
    for (int left = threads; left;) {
        seed = seed * 1664525u + 1013904223u;
        const int first = seed / 65536 % ((threads + 31) / 32) * 32;
        for (int turn = seed >> 29; turn >= 0; --turn)
            for (int i = first; i < first + 32 && i < threads; ++i)
                if (!fibers[i].done && fibers[i].at_barrier != generation) {
                    current = i;
                    threadIdx = {i, 0};
                    run_fiber();
                    left -= fibers[i].done;
                }
    }
}

static void run_grid(int grid_x, int grid_y, int threads) {
    for (int block = 0; block < grid_x * grid_y; ++block) run_block(block, grid_x, grid_y, threads);
}
