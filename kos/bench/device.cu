// What the benchmark of collectives runs on a GPU beside them: inputs, comparison of outputs, physical limits.
//
// Element i of an array is element (start + i) % period of its table, which holds one period.

typedef unsigned long long u64;

#define EACH(i, count) \
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x)

template <typename Word>
__device__ void fill(Word *out, const Word *table, u64 count, unsigned start, unsigned period) {
    EACH(i, count) out[i] = table[(start + i) % period];
}

// Elements whose bits differ from the table's.
template <typename Word>
__device__ u64 differing(const Word *got, const Word *table, u64 count, unsigned start, unsigned period) {
    u64 wrong = 0;
    EACH(i, count) wrong += got[i] != table[(start + i) % period];
    return wrong;
}

// Elements of `size` bytes: 1, 2, 4 or 8.
extern "C" __global__ void repeat(void *out, const void *table, u64 count, u64 size, u64 start, u64 period) {
    size == 1   ? fill((unsigned char *)out, (const unsigned char *)table, count, start, period)
    : size == 2 ? fill((unsigned short *)out, (const unsigned short *)table, count, start, period)
    : size == 4 ? fill((unsigned *)out, (const unsigned *)table, count, start, period)
                : fill((u64 *)out, (const u64 *)table, count, start, period);
}

extern "C" __global__ void count_wrong(const void *got, const void *table, u64 count, u64 size, u64 start, u64 period,
                                       u64 *wrong) {
    u64 mine = size == 1   ? differing((const unsigned char *)got, (const unsigned char *)table, count, start, period)
               : size == 2 ? differing((const unsigned short *)got, (const unsigned short *)table, count, start, period)
               : size == 4 ? differing((const unsigned *)got, (const unsigned *)table, count, start, period)
                           : differing((const u64 *)got, (const u64 *)table, count, start, period);
    if (mine) atomicAdd(wrong, mine);
}

extern "C" __global__ void empty() {}

// A flag there and back, `rounds` times: one thread on each of two GPUs. `first` begins. The deadline in clock
// cycles ends a wait for a peer that does not come.
extern "C" __global__ void ping_pong(unsigned *mine, unsigned *theirs, unsigned rounds, int first, u64 deadline) {
    u64 began = clock64();
    for (unsigned round = 1; round <= rounds; round++) {
        if (first) asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(round) : "memory");
        unsigned seen = 0;
        while (seen != round && clock64() - began < deadline)
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
        if (!first) asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(round) : "memory");
    }
}
