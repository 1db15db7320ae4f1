// Flag latency between two GPUs: each raises the other's flag once it has seen its own.
// mine[0]: the flag; mine[1]: nanoseconds from the first round to the last; mine[2]: the round that did not come.
typedef unsigned long long u64;

__device__ inline u64 now() {
    u64 time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

extern "C" __global__ void ping(u64* mine, u64* theirs, int first, u64 rounds, u64 nanoseconds) {
    const u64 launched = now();
    u64 begin = 0;
    for (u64 round = 1; round <= rounds; round++) {
        if (first) asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(theirs), "l"(round) : "memory");
        for (u64 seen = 0; seen < round;) {
            asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(mine) : "memory");
            if (seen < round && now() - launched > nanoseconds) {
                mine[2] = round;
                return;
            }
        }
        if (!first) asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(theirs), "l"(round) : "memory");
        if (round == 1) begin = now();
    }
    mine[1] = now() - begin;
}
