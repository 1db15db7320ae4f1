// Every rank writes value[i] to slot `rank` of every peer's slab: peers[p] + offset, slots of n elements.
// Flags travel after the data: system-scope release on the writer's side, acquire on the reader's.
__device__ inline void release(unsigned* flag, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

extern "C" __global__ void push(const unsigned long long* peers, long long offset, const float* value, long long n,
                                int rank, int size, long long flags, unsigned epoch) {
    float* slots = reinterpret_cast<float*>(peers[blockIdx.x] + offset);
    for (long long i = threadIdx.x; i < n; i += blockDim.x) slots[rank * n + i] = value[i];
    __syncthreads();
    if (threadIdx.x == 0) release(reinterpret_cast<unsigned*>(peers[blockIdx.x] + flags) + rank, epoch);
}
