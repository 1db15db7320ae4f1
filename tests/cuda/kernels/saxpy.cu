// y[i] = OP(a * x[i], y[i]) for i < n.  Macros: DTYPE (element type), OP (function of two values).
#include "convert.cuh"

__device__ inline float sum(float a, float b) { return a + b; }
__device__ inline float larger(float a, float b) { return a > b ? a : b; }

extern "C" __global__ void saxpy(const DTYPE* x, DTYPE* y, float a, long long n) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
        y[i] = from_float<DTYPE>(OP(a * to_float(x[i]), to_float(y[i])));
}

// y[i] = x[n - 1 - i] for i < n, through n elements of dynamic shared memory; one block.
extern "C" __global__ void reverse(const DTYPE* x, DTYPE* y, long long n) {
    extern __shared__ unsigned char storage[];
    DTYPE* shared = reinterpret_cast<DTYPE*>(storage);
    for (long long i = threadIdx.x; i < n; i += blockDim.x) shared[i] = x[i];
    __syncthreads();
    for (long long i = threadIdx.x; i < n; i += blockDim.x) y[i] = shared[n - 1 - i];
}
