// What every backward of attention reads of the forward, prepared once: per head and token the log2-sum-exp of the
// scores and delta = sum(d_out out), which is what the softmax's gradient subtracts (Dao 2023, arXiv:2307.08691).
//
// A group of HEAD_DIM / 8 lanes reads one head of one token, 16 bytes a lane; memory-bound.
#include "attention.cuh"

#define LANES (HEAD_DIM / 8)
#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_statistics(const uint4* d_out, const uint4* out, const float* log_sum_exp, float* statistics, int samples,
                         int T, int H) {
    const long index = ((long)blockIdx.x * THREADS + threadIdx.x) / LANES;
    const int lane = threadIdx.x % LANES, head = index % H;
    const long place = index / H;  // of the token, in padded samples
    const int token = place % padded(T), sample = place / padded(T);
    if (sample >= samples) return;  // LANES divides 32 and the whole group leaves
    float sum = 0;
    if (token < T) {
        const long at = (((long)sample * T + token) * H + head) * LANES + lane;
        const uint4 a = d_out[at], b = out[at];
        const u32 as[] = {a.x, a.y, a.z, a.w}, bs[] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 x = unpack(as[i]), y = unpack(bs[i]);
            sum += x.x * y.x + x.y * y.y;
        }
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) sum += __shfl_xor_sync(__activemask(), sum, step);
    if (lane) return;
    float* target = statistics + statistics_at(sample * H + head, token, T);
    target[0] = token < T ? log_sum_exp[((long)sample * H + head) * T + token] * LOG2_E : INFINITE;
    target[64] = sum;
}
