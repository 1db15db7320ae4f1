// What ptx.cuh says, on the host: memory that ranks share is weakly ordered, as a GPU's is.
//
// A store stays with its block for a while and reaches memory in any order, except that
// - a release comes after what its thread has stored, and what its block had stored before its last barrier;
// - a block sees its own stores, of other threads after a barrier; stores to one place keep their order;
// - the end of a thread, and __threadfence_system, let out what the thread has stored.
// Whatever waits lets other threads, and other ranks, run.
#include <pthread.h>  // <thread>, <utility> and <emmintrin.h> take longer to compile than all the rest
#include <sched.h>
#include <time.h>
#include <unistd.h>

#define __noinline__ __attribute__((noinline))
using u64 = unsigned long long;
using Whole = long long __attribute__((vector_size(16), may_alias));  // read and written by one instruction

static unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
template <class V> static V __ldg(const V* p) { return *p; }
static unsigned atomicMax(unsigned* p, unsigned x) { return *p = max(*p, x); }
static unsigned atomicCAS(unsigned* p, unsigned old, unsigned x) { return __sync_val_compare_and_swap(p, old, x); }
template <class To, class From> static To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static double __longlong_as_double(u64 x) { return same_bits<double>(x); }
static long long __double_as_longlong(double x) { return same_bits<long long>(x); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __ddiv_rn(double a, double b) { return a / b; }

// Stores on their way to memory.
struct Store {
    u64 address;
    int bytes, fiber;
    long barriers, part_barriers;  // that its thread had passed
    alignas(16) unsigned char data[16];
    bool overlaps(u64 at, u64 n) const { return address < at + n && at < address + bytes; }
    void arrive() const {
        if (bytes == 16) *(volatile Whole*)address = *(const Whole*)data;
        else if (bytes == 8) __atomic_store_n((u64*)address, *(const u64*)data, __ATOMIC_RELEASE);
        else if (bytes == 4) __atomic_store_n((unsigned*)address, *(const unsigned*)data, __ATOMIC_RELEASE);
        else memcpy((void*)address, data, bytes);
    }
};
constexpr int MOST = 64;
static thread_local Store on_their_way[MOST];
static thread_local int stores;
static thread_local unsigned dice = 12345;
static unsigned draw() { return (dice = dice * 1664525u + 1013904223u) >> 8; }

template <class Chosen> static void let_out(Chosen chosen) {
    int kept = 0;
    for (int i = 0; i < stores; ++i) {
        if (chosen(on_their_way[i])) on_their_way[i].arrive();
        else if (kept++ != i) on_their_way[kept - 1] = on_their_way[i];
    }
    stores = kept;
}
static void let_one_out() {
    if (!stores) return;
    const Store picked = on_their_way[draw() % stores];
    let_out([&](const Store& s) { return s.overlaps(picked.address, picked.bytes); });
}
static thread_local int part_threads = 1;
static bool seen_here(const Store& s) {
    const bool of_part = s.fiber / part_threads == current / part_threads;
    return s.fiber == current || s.barriers < fibers[current].block_waits ||
           of_part && s.part_barriers < fibers[current].group_waits;
}
static void part_barrier(unsigned, unsigned threads) {
    part_threads = threads;
    group_barrier(threads);
}
static thread_local int in_vain;  // times that this block gave way since it last stored
static void give_way() {
    if (draw() % 4 == 0) let_one_out();
#ifndef BROKEN  // no look is repeated then; on a busy machine each of thousands of yields costs a turn of all others
    if (draw() % 8 == 0) sched_yield();
    if (draw() % 256 == 0 || ++in_vain % 256 == 0) usleep(in_vain < 2000 ? 100 : 1000);
#endif
    give_turn();
}
static void put(u64 address, const void* data, int bytes) {
    in_vain = 0;
    if (stores == MOST || draw() % 8 == 0) let_one_out();
    Store& s = on_their_way[stores++];
    s.address = address, s.bytes = bytes, s.fiber = current, s.barriers = fibers[current].block_waits,
    s.part_barriers = fibers[current].group_waits;
    memcpy(s.data, data, bytes);
}
static void see(u64 address, int bytes) {
    let_out([&](const Store& s) { return s.overlaps(address, bytes) && seen_here(s); });
}

static void after_former_kernel() {}
static void after_former_large_kernel() {}
static unsigned load_relaxed(u64 address) {
    see(address, 4);
    return __atomic_load_n((unsigned*)address, __ATOMIC_ACQUIRE);
}
static void store_relaxed(u64 address, unsigned value) { put(address, &value, 4); }
static unsigned load_acquire(u64 address) {
    give_way();
    return load_relaxed(address);
}
static void store_release(u64 address, unsigned value) {
    let_out(seen_here);
    put(address, &value, 4);
}
static void __threadfence_system() {
    let_out([](const Store& s) { return s.fiber == current; });
}
static void store_release_gpu(u64 address, unsigned value) { store_release(address, value); }
struct Vector {
    unsigned x[4];
};
static void load(Vector& v, u64 address) {
    see(address, 16);
    for (int k = 0; k < 4; ++k) v.x[k] = __atomic_load_n((unsigned*)address + k, __ATOMIC_RELAXED);
}
static void store(u64 address, const Vector& v) { put(address, &v, 16); }
template <class V> static V load_element(u64 address) {
    see(address, sizeof(V));
    return *(const volatile V*)address;
}
template <class V> static void store_element(u64 address, V value) { put(address, &value, sizeof(V)); }
static void store_whole(u64 address, u64 low, u64 high) {
    const u64 both[2] = {low, high};
    put(address, both, 16);
}
static void load_whole(u64 address, u64& low, u64& high) {
    if (draw() % 2) give_way();
    see(address, 16);
    const Whole both = *(const volatile Whole*)address;
    low = both[0], high = both[1];
}
static u64 nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static float from_half(unsigned short x) { return float(same_bits<_Float16>(x)); }
static unsigned short to_half(float x) { return same_bits<unsigned short>(_Float16(x)); }
static unsigned short e4m3_to_half(unsigned char x) {
    const int exponent = x >> 3 & 15, fraction = x & 7;
    const float y = exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
    return (x & 0x7f) == 0x7f ? 0x7fff : to_half(x & 0x80 ? -y : y);
}
static unsigned to_halves(float low, float high) { return to_half(low) | unsigned(to_half(high)) << 16; }
static unsigned short halves_to_e4m3(unsigned x) {
    return to_e4m3(from_half((unsigned short)x)) | to_e4m3(from_half((unsigned short)(x >> 16))) << 8;
}
static unsigned e4m3_to_halves(unsigned short x) {
    return e4m3_to_half((unsigned char)x) | unsigned(e4m3_to_half((unsigned char)(x >> 8))) << 16;
}
static float max_or_nan(float a, float b) {
    if (a != a || b != b) return __uint_as_float(0x7fffffff);
    return a > b ? a : b;
}
static float approximate_inverse(float x) { return nextafterf(1 / x, draw() % 2 ? 0 : 1e38f); }  // off by one
static bool __any_sync(unsigned, bool x) {
    bool any = false;
    for (int lane = 0; lane < 32; ++lane) any |= __shfl_sync(0, x, lane);
    return any;
}

// A launch: its arguments as 64-bit words, as the kernel's parameters want them.
template <class A> static A from_word(u64 word) {
    if constexpr (sizeof(A) == 8) return same_bits<A>(word);
    else return A(word);
}
template <class... A> struct Call {
    Call(void (*kernel)(A...), A... arguments) { kernel(arguments...); }
};
template <class... A> static void call_with(void (*kernel)(A...), const u64* words) {
    Call<A...>{kernel, from_word<A>(*words++)...};  // braces: evaluated from left to right
    __threadfence_system();
}

#ifndef AT_ONCE
#define AT_ONCE 0
#endif
template <class... A> static constexpr int parameters_of(void (*)(A...)) { return sizeof...(A); }

// The blocks of a grid that wait for one another: each a thread of the host.
struct Block {
    pthread_t thread;
    void (*body)(void*);
    void* words;
    unsigned shuffle;
    int block, blocks, threads;
};
static void* run_one(void* given) {
    const Block& me = *(const Block*)given;
    kernel_body = me.body, kernel_arguments = me.words, seed = dice = me.shuffle + 7919 * me.block;
    run_block(me.block, me.blocks, 1, me.threads);
    for (int i = 0; i < me.threads; ++i) free(fibers[i].stack);
    return nullptr;
}
static void run_at_once(int blocks, int threads) {
    Block running[64];
    if (blocks > 64) abort();
    for (int i = 0; i < blocks; ++i) {
        running[i] = {0, kernel_body, kernel_arguments, seed, i, blocks, threads};
        if (pthread_create(&running[i].thread, nullptr, run_one, &running[i])) abort();
    }
    for (int i = 0; i < blocks; ++i) pthread_join(running[i].thread, nullptr);
}

#define RUN(kernel)                                                                                  \
    extern "C" EXPORTED void run_##kernel(int blocks, int threads, unsigned shuffle, const u64* words) { \
        seed = dice = shuffle;                                                                       \
        kernel_body = [](void* words) { call_with(kernel, (const u64*)words); };                     \
        kernel_arguments = (void*)words;                                                             \
        if (AT_ONCE) run_at_once(blocks, threads);                                                   \
        else run_grid(blocks, 1, threads);                                                           \
    } \
    extern "C" EXPORTED const int parameters_##kernel = parameters_of(kernel);
