#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

enum { MOST = 256, SPIN_NS = 20000 };  // for the last task of another thread, before the caller sleeps

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;
static atomic_flag taken = ATOMIC_FLAG_INIT;
static atomic_size_t next;
static atomic_int running;  // threads of the pool that are within the operation
static int threads = 1, started = 1, watched;
// The operation; without one, `open` is 0.
static struct { kos_task task; const void *arguments; size_t count; unsigned long number; int open; } now;

static void work(kos_task task, const void *arguments, size_t count) {
    for (size_t i; (i = atomic_fetch_add_explicit(&next, 1, memory_order_relaxed)) < count;) task(arguments, i);
}

static void *serve(void *index) {
    unsigned long seen = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!now.open || now.number == seen || (long)index >= threads) pthread_cond_wait(&begun, &lock);
        seen = now.number;
        const kos_task task = now.task;
        const void *arguments = now.arguments;
        const size_t count = now.count;
        atomic_fetch_add(&running, 1);
        pthread_mutex_unlock(&lock);
        work(task, arguments, count);
        pthread_mutex_lock(&lock);
        if (atomic_fetch_sub(&running, 1) == 1)
            pthread_cond_signal(&ended);
    }
    return NULL;
}

// A child has none of the threads, and the state that the fork found.
static void forked(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&begun, NULL);
    pthread_cond_init(&ended, NULL);
    atomic_flag_clear(&taken);
    atomic_store(&running, 0);
    now.open = 0;
    started = 1;
}

void kos_pool_threads(int count) {
    pthread_mutex_lock(&lock);
    threads = count < 1 ? 1 : count > MOST ? MOST : count;
    pthread_mutex_unlock(&lock);
}

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

static long nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

void kos_pool_run(kos_task task, const void *arguments, size_t count) {
    if (threads == 1 || count == 1 || atomic_flag_test_and_set(&taken)) {
        for (size_t i = 0; i < count; i++) task(arguments, i);
        return;
    }
    if (started < threads)
        start();
    pthread_mutex_lock(&lock);
    now.task = task, now.arguments = arguments, now.count = count, now.open = 1;
    now.number++;
    atomic_store(&next, 0);
    pthread_cond_broadcast(&begun);
    pthread_mutex_unlock(&lock);
    work(task, arguments, count);
    for (long until = nanoseconds() + SPIN_NS; atomic_load(&running) && nanoseconds() < until;) {}
    pthread_mutex_lock(&lock);
    now.open = 0;
    while (atomic_load(&running)) pthread_cond_wait(&ended, &lock);
    pthread_mutex_unlock(&lock);
    atomic_flag_clear(&taken);
}
