// Copies the elements of a box from one place to another: with other strides, and as another type.
//
// Compiled for -DFROM=float32 -DTO=bfloat16 -DAXES=2; FROM == TO copies bits, of uint8 to uint64 or of bytes16.
// Axis 0 is the innermost.  Strides are in elements.  Each place is in the memory of a GPU, or in pinned host memory.
#include "types.cuh"

struct bytes16 {
    using Bits = uint4;
};

template <class From, class To> struct Convert {
    static __device__ typename To::Bits apply(typename From::Bits x) {
        return To::narrow(typename To::Wide(From::widen(x)));
    }
};
template <class Same> struct Convert<Same, Same> {
    static __device__ typename Same::Bits apply(typename Same::Bits x) { return x; }
};

extern "C" __global__ void copy_box(u64 target, u64 source, u64 count, u64 n0, u64 n1, u64 n2, u64 t0, u64 t1, u64 t2,
                                    u64 t3, u64 s0, u64 s1, u64 s2, u64 s3) {
    const u64 sizes[] = {n0, n1, n2}, into[] = {t0, t1, t2, t3}, from[] = {s0, s1, s2, s3};
    auto* const to = reinterpret_cast<TO::Bits*>(target);
    const auto* const of = reinterpret_cast<const FROM::Bits*>(source);
    for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
        u64 rest = i, t = 0, s = 0;
#pragma unroll
        for (int axis = 0; axis < AXES; ++axis) {
            const u64 index = axis + 1 < AXES ? rest % sizes[axis] : rest;
            if (axis + 1 < AXES) rest /= sizes[axis];
            t += index * into[axis];
            s += index * from[axis];
        }
        to[t] = Convert<FROM, TO>::apply(of[s]);
    }
}
