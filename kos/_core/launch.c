// Launches a CUDA kernel by the address of cuLaunchKernelEx, which Python gets from the loaded driver.
//
// The parameters are one block of bytes with the kernel's own offsets.  A launch copies it and replaces its first
// 8-byte words (addresses, the sequence number), so launches of several threads share no state.
#include "core.h"

#include <string.h>

// CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END of cuda.h.
#define BUFFER_POINTER ((void *)1)
#define BUFFER_SIZE ((void *)2)
#define END ((void *)0)

int kos_launch(const kos_kernel *k, void *stream, const uint64_t *words, size_t count) {
    _Alignas(16) uint8_t parameters[KOS_PARAMETER_BYTES];
    size_t bytes = k->bytes;
    void *extra[] = {BUFFER_POINTER, parameters, BUFFER_SIZE, &bytes, END};
    kos_launch_config config = k->config;
    config.stream = stream;
    memcpy(parameters, k->parameters, bytes);
    memcpy(parameters, words, count * sizeof *words);
    return k->launch(&config, k->kernel, NULL, bytes ? extra : NULL);
}
