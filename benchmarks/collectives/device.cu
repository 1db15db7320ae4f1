// What the benchmark of collectives runs on a GPU beside them: comparison of outputs, and two physical limits.

typedef unsigned long long u64;

// Elements of `size` bytes (1, 2, 4 or 8) whose bits differ between the two arrays, added to *wrong.
template <typename Word>
__device__ u64 differing(const Word *got, const Word *expected, u64 count) {
    u64 wrong = 0;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x)
        wrong += got[i] != expected[i];
    return wrong;
}

extern "C" __global__ void count_wrong(const void *got, const void *expected, u64 count, u64 size, u64 *wrong) {
    u64 mine = size == 1   ? differing((const unsigned char *)got, (const unsigned char *)expected, count)
               : size == 2 ? differing((const unsigned short *)got, (const unsigned short *)expected, count)
               : size == 4 ? differing((const unsigned int *)got, (const unsigned int *)expected, count)
                           : differing((const u64 *)got, (const u64 *)expected, count);
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
