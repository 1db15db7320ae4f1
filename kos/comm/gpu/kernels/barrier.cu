// A barrier of all ranks' streams: work queued after it on any rank begins after all ranks have reached it.
#include "channel.cuh"

extern "C" __global__ void barrier(const Context* context, u64 own_slab, unsigned own_rank) {
    after_former_kernel();
    Channel channel(context, own_slab, own_rank);
    channel.barrier(0);
    channel.close();
}
