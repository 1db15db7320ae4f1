// The threads that share the tasks of an operation.
#define _GNU_SOURCE
#include "core.h"

#include <pthread.h>
#include <signal.h>

typedef struct {
    kos_task task;
    const void *arguments;
    size_t count;
    unsigned long number;
} job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;
static atomic_flag taken = ATOMIC_FLAG_INIT;  // by the thread whose operation it is
static atomic_size_t next;
static int threads = 1, started = 1, watched;
// Under the lock: the operation, whether threads may still begin it, and how many of them have begun and not ended it.
static job now;
static int open, running;

static void work(const job *j) {
    for (size_t i; (i = atomic_fetch_add_explicit(&next, 1, memory_order_relaxed)) < j->count;) j->task(j->arguments, i);
}

static void *serve(void *index) {
    pthread_mutex_lock(&lock);
    for (job mine = {0};;) {
        while (!open || now.number == mine.number || (long)index >= threads) pthread_cond_wait(&begun, &lock);
        mine = now;
        running++;
        pthread_mutex_unlock(&lock);
        work(&mine);
        pthread_mutex_lock(&lock);
        if (--running == 0)
            pthread_cond_signal(&ended);
    }
    return NULL;
}

// A child has none of the threads.
static void forked(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&begun, NULL);
    pthread_cond_init(&ended, NULL);
    atomic_flag_clear(&taken);
    open = running = 0, started = 1;
}

void kos_pool_threads(int count) { threads = count < 1 ? 1 : count; }

// Signals go to the threads of Python.
static void start(void) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (!watched)
        watched = pthread_atfork(NULL, NULL, forked) == 0;
    pthread_t thread;
    while (watched && started < threads && pthread_create(&thread, NULL, serve, (void *)(long)started) == 0) {
        pthread_detach(thread);
        started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void kos_pool_run(kos_task task, const void *arguments, size_t count) {
    if (threads == 1 || count == 1 || atomic_flag_test_and_set(&taken)) {
        for (size_t i = 0; i < count; i++) task(arguments, i);
        return;
    }
    if (started < threads)
        start();
    pthread_mutex_lock(&lock);
    now = (job){task, arguments, count, now.number + 1};
    open = 1;
    atomic_store(&next, 0);
    pthread_cond_broadcast(&begun);
    pthread_mutex_unlock(&lock);
    work(&now);
    pthread_mutex_lock(&lock);
    open = 0;
    while (running) pthread_cond_wait(&ended, &lock);
    pthread_mutex_unlock(&lock);
    atomic_flag_clear(&taken);
}
