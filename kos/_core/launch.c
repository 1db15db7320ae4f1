// What a call queues on a GPU.  The GPU does the rest: the core never waits for it.
#include "core.h"

typedef int (*launch_kernel)(const kos_config *config, void *kernel, void **parameters, void **extra);
// All arguments are integers or addresses: a function reads as many of them as it has.
typedef int (*any_function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

static int queue(const kos_launch *l, const uint64_t sources[KOS_SOURCES]) {
    uint64_t w[KOS_MOST_WORDS];  // a copy: several threads may queue a launch
    memcpy(w, l->data, l->words * sizeof *w);
    const kos_patch *patch = (const kos_patch *)(l->data + l->words);
    for (uint64_t i = 0; i < l->patches; i++)
        w[patch[i].word] = sources[patch[i].source] + patch[i].offset;
    if (!l->kernel)
        return ((any_function)(uintptr_t)l->function)(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    void *parameters[KOS_MOST_WORDS];
    for (uint64_t i = 0; i < l->words; i++)
        parameters[i] = &w[i];
    kos_config config = l->config;
    config.stream = sources[KOS_STREAM];
    return ((launch_kernel)(uintptr_t)l->function)(&config, (void *)(uintptr_t)l->kernel, parameters, NULL);
}

int kos_queue_launches(const kos_launch *l, uint64_t count, const uint64_t sources[KOS_SOURCES], uint64_t *failed) {
    int error = 0;
    for (uint64_t i = 0; i < count; i++) {
        const int status = !error || i - *failed <= l->closes ? queue(l, sources) : 0;
        if (status && !error) {
            error = status;
            *failed = i;
        }
        l = (const kos_launch *)((const kos_patch *)(l->data + l->words) + l->patches);
    }
    return error;
}
