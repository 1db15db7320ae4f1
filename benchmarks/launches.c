// The lower bound of a call on a GPU: the core's launch alone, in a loop in C or called from Python.
#include "core.h"

#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static struct {
    const kos_launch *l;
    kos_config config;
    uint64_t w[KOS_MOST_WORDS];
    void *parameters[KOS_MOST_WORDS];
} bare;

// Sets the launch that time_launches and launch_function make.
void prepare_launches(const kos_launch *l, const uint64_t *sources) {
    const kos_patch *patch = (const kos_patch *)(l->data + l->words);
    bare.l = l;
    bare.config = l->config;
    bare.config.stream = sources[KOS_STREAM];
    for (uint64_t i = 0; i < l->words; i++) {
        bare.w[i] = l->data[i];
        bare.parameters[i] = &bare.w[i];
    }
    for (uint64_t i = 0; i < l->patches; i++)
        bare.w[patch[i].word] = sources[patch[i].source] + patch[i].offset;
}

static int launch(void) {
    int (*kernel)(kos_config *, uint64_t, void **, void **) = (void *)bare.l->function;
    int (*function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) = (void *)kernel;
    const uint64_t *w = bare.w;
    return bare.l->kernel ? kernel(&bare.config, bare.l->kernel, bare.parameters, 0)
                          : function(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
}

// The mean time of `calls` launches in microseconds; -1 after an error.
double time_launches(int calls) {
    const double began = now();
    int error = 0;
    for (int i = 0; i < calls; i++)
        error |= launch();
    return error ? -1 : (now() - began) / calls;
}

// Declarations from Python.h, which may not be installed.
typedef struct { const char *name; void *(*function)(void *, void *); int flags; const char *text; } method;
extern void *PyCFunction_NewEx(method *, void *, void *);
extern void Py_IncRef(void *);
extern char _Py_NoneStruct[];

static void *launch_once(void *self, void *unused) {
    launch();
    Py_IncRef(_Py_NoneStruct);
    return _Py_NoneStruct;
}

// Returns a Python function that only makes the launch.
void *launch_function(void) {
    static method definition = {"launch", launch_once, 4, 0};  // METH_NOARGS
    return PyCFunction_NewEx(&definition, 0, 0);
}
