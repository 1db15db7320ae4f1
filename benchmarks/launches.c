// The floor of a call on a GPU: the launch that the core makes of it, by itself and from C.
#include "core.h"

#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

// Microseconds of one of `calls` launches; -1 after an error.
double time_launches(const kos_launch *l, const uint64_t *sources, int calls) {
    uint64_t w[KOS_MOST_WORDS];
    void *parameters[KOS_MOST_WORDS];
    const kos_patch *patch = (const kos_patch *)(l->data + l->words);
    kos_config config = l->config;
    for (uint64_t i = 0; i < l->words; i++) {
        w[i] = l->data[i];
        parameters[i] = &w[i];
    }
    for (uint64_t i = 0; i < l->patches; i++)
        w[patch[i].word] = sources[patch[i].source] + patch[i].offset;
    config.stream = sources[KOS_STREAM];
    int (*launch)(kos_config *, uint64_t, void **, void **) = (void *)l->function;
    int (*call)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) = (void *)l->function;
    const double began = now();
    int error = 0;
    for (int i = 0; i < calls; i++)
        error |= l->kernel ? launch(&config, l->kernel, parameters, 0)
                           : call(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    return error ? -1 : (now() - began) / calls;
}
