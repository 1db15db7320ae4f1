// Threads that share the tasks of an operation, and sleep between operations.
#ifndef KOS_POOL_H
#define KOS_POOL_H

#include <stddef.h>

typedef void (*kos_task)(const void *arguments, size_t index);

// How many threads, the caller's included, an operation may use.
void kos_pool_threads(int threads);

// Runs tasks 0 to count - 1.  The caller takes tasks too, and waits only for those that another thread has begun: it
// never waits for a thread that gets no processor.  While another thread runs tasks, the caller runs its own alone.
void kos_pool_run(kos_task task, const void *arguments, size_t count);

#endif
