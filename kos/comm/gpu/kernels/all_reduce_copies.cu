// The middle of an all-reduce by copy engines: other ranks' contributions to this rank's chunk have been copied to
// ``staged`` (rank r's at r * stride, aligned like a vector); add them to ``own`` in rank order, into ``out``.
#include "reduce.cuh"

using u64 = unsigned long long;

extern "C" __global__ void __launch_bounds__(THREADS)
    copies(unsigned rank, const char* own, const char* staged, u64 stride, char* out, long long count) {
    constexpr int PER_VECTOR = 16 / sizeof(Bits);
    const long long first = blockIdx.x * (long long)THREADS + threadIdx.x, step = (long long)gridDim.x * THREADS;
    const long long vectors = (reinterpret_cast<u64>(own) | reinterpret_cast<u64>(out)) % 16 ? 0 : count / PER_VECTOR;
    for (long long i = first; i < vectors; i += step) {
        uint4 v[RANKS];
#pragma unroll
        for (int r = 0; r < RANKS; r++)
            v[r] = reinterpret_cast<const uint4*>(r == rank ? own : staged + r * stride)[i];
        Sum<4> sum;
        unsigned w[4];
#pragma unroll
        for (int r = 0; r < RANKS; r++) {
            w[0] = v[r].x, w[1] = v[r].y, w[2] = v[r].z, w[3] = v[r].w;
            if (r == 0) sum.first(w);
            else sum.combine(w);
        }
        sum.finish(w);
        reinterpret_cast<uint4*>(out)[i] = make_uint4(w[0], w[1], w[2], w[3]);
    }
    for (long long i = vectors * PER_VECTOR + first; i < count; i += step) {
        Wide sum = {};
        for (int r = 0; r < RANKS; r++) {
            const Wide x = T::widen(reinterpret_cast<const Bits*>(r == int(rank) ? own : staged + r * stride)[i]);
            sum = r == 0 ? x : Op::combine(sum, x);
        }
        reinterpret_cast<Bits*>(out)[i] = T::narrow(Op::finish(sum));
    }
}
