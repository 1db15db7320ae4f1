// What the wires carry: every rank moves ``bytes`` to or from each peer, with nothing else to do.
// MIXED: a thread turns to all peers for each vector; else all blocks finish with one peer before the next one.
typedef unsigned long long u64;

__device__ inline uint4 load(u64 address) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}
__device__ inline void store(u64 address, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

// ``chunk`` bytes for each peer at a time: the whole of ``bytes`` for one peer after the other, or 16 for mixed.
extern "C" __global__ void wire(const u64* table, unsigned rank, unsigned ranks, u64 bytes, u64 chunk, int write,
                                uint4* sink) {
    const u64 thread = (blockIdx.x * u64(blockDim.x) + threadIdx.x) * 16, all = u64(gridDim.x) * blockDim.x * 16;
    uint4 sum = make_uint4(rank, threadIdx.x, 3, 4);
    for (u64 base = 0; base < bytes; base += chunk)
        for (unsigned k = 1; k < ranks; k++) {
            const u64 peer = table[(rank + k) % ranks] + (write ? rank : (rank + k) % ranks) * bytes + base;
            const u64 end = min(chunk, bytes - base);
#pragma unroll 4
            for (u64 i = thread; i < end; i += all) {
                if (write) {
                    store(peer + i, sum);
                } else {
                    const uint4 v = load(peer + i);
                    sum.x ^= v.x, sum.y ^= v.y, sum.z ^= v.z, sum.w ^= v.w;
                }
            }
        }
    if (sum.x == 0x12345678) *sink = sum;
}
