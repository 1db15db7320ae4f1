// The lower bound of a call on a GPU: the core's launches alone, in a loop in C or called from Python.
#include "core.h"

#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

enum { MOST = 64 };
static _Thread_local struct {
    const kos_launch *l;
    kos_config config;
    uint64_t w[KOS_MOST_WORDS];
    void *parameters[KOS_MOST_WORDS];
} bare[MOST];
static _Thread_local int number;  // of launches

// Sets the launches that time_launches and launch_function make.  There may be at most MOST.
void prepare_launches(const kos_launch *l, int count, const uint64_t *sources) {
    number = count;
    for (int n = 0; n < count; n++) {
        const kos_patch *patch = (const kos_patch *)(l->data + l->words);
        bare[n].l = l;
        bare[n].config = l->config;
        bare[n].config.stream = sources[KOS_STREAM];
        for (uint64_t i = 0; i < l->words; i++) {
            bare[n].w[i] = l->data[i];
            bare[n].parameters[i] = &bare[n].w[i];
        }
        for (uint64_t i = 0; i < l->patches; i++)
            bare[n].w[patch[i].word] = sources[patch[i].source] + patch[i].offset;
        l = (const kos_launch *)(patch + l->patches);
    }
}

static int launch(void) {
    int error = 0;
    for (int n = 0; n < number; n++) {
        int (*kernel)(kos_config *, uint64_t, void **, void **) = (void *)bare[n].l->function;
        int (*function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) = (void *)kernel;
        const uint64_t *w = bare[n].w;
        error |= bare[n].l->kernel ? kernel(&bare[n].config, bare[n].l->kernel, bare[n].parameters, 0)
                                   : function(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    }
    return error;
}

// The mean time of `calls` calls in microseconds; -1 after an error.
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

// Returns a Python function that only makes the launches.
void *launch_function(void) {
    static method definition = {"launch", launch_once, 4, 0};  // METH_NOARGS
    return PyCFunction_NewEx(&definition, 0, 0);
}
