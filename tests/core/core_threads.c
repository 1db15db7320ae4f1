// A random program of calls and messages, blocking and as Works, whose ranks are threads: for a build with a sanitizer.
// At its end rank 0 cancels messages, fails the group, and closes it while other threads wait.
// usage: core_threads RANKS CALLS SEED DIRECT; ends with 1 after a wrong result
#include "core.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 60000, IN_FLIGHT = 4 };
static uint8_t *memory;
static int ranks, calls, seed, direct;
static pthread_barrier_t together;

// Elements are uint32_t.  Rank s gives element i of its part for rank r the value of_element(s, r, i).
typedef struct {
    kos_work work;
    kos_prepared *prepared;
    uint32_t *send, *recv;
    size_t count;
    int operation, root, number, dst, src;
} start;

static uint32_t of_element(const start *s, int from, int to, size_t i) {
    return (uint32_t)(s->number * 7919 + from * 31 + to * 17) + (uint32_t)i;
}

static void ended(kos_work *w) { (void)w; }

static void fail(const kos_group *g, const start *s, const char *what, size_t at) {
    fprintf(stderr, "rank %d: call %d, operation %d, %zu elements: %s %zu\n", g->rank, s->number, s->operation,
            s->count, what, at);
    exit(1);
}

static int is_parted(int operation) {
    return operation == KOS_SCATTER || operation == KOS_ALL_TO_ALL || operation == KOS_REDUCE_SCATTER;
}

static int gathers(int operation) {
    return operation == KOS_ALL_GATHER || operation == KOS_GATHER || operation == KOS_ALL_TO_ALL;
}

static int reduces(int operation) {
    return operation == KOS_ALL_REDUCE || operation == KOS_REDUCE || operation == KOS_REDUCE_SCATTER
        || operation == KOS_SCAN || operation == KOS_EXSCAN;
}

static int receives(const kos_group *g, const start *s) {
    if (s->operation == KOS_BARRIER || s->operation == KOS_SEND)
        return 0;
    return (s->operation != KOS_REDUCE && s->operation != KOS_GATHER) || g->rank == s->root;
}

static void check_data(const kos_group *g, const start *s) {
    const int parts = gathers(s->operation) ? ranks : 1;
    for (int part = 0; receives(g, s) && part < parts; part++)
        for (size_t i = 0; i < s->count; i++) {
            int to = is_parted(s->operation) ? g->rank : 0;
            uint32_t expected = of_element(s, parts > 1 ? part : s->root, to, i);
            if (s->operation >= KOS_SEND)
                expected = of_element(s, s->src, 0, i);
            if (reduces(s->operation)) {
                int last = s->operation == KOS_SCAN ? g->rank + 1 : s->operation == KOS_EXSCAN ? g->rank : ranks;
                expected = 0;
                for (int r = 0; r < last; r++)
                    expected += of_element(s, r, to, i);
                if (!last)
                    continue;
            }
            if (s->recv[part * s->count + i] != expected)
                fail(g, s, "wrong element", i);
        }
}

static void check(kos_group *g, start *s) {
    for (int64_t began = kos_clock(); kos_phase_of(&s->work) < KOS_ENDED; kos_rest(began, 0))
        kos_advance(g);
    if (kos_phase_of(&s->work) == KOS_BROKEN)
        fail(g, s, "code", s->work.result.code);
    check_data(g, s);
}

static int dtype_of(const char *name) {
    int dtype = 0;
    while (strcmp(kos_name_of(dtype), name)) dtype++;
    return dtype;
}

static void begin(kos_group *g, start *s, int number, unsigned *shared, unsigned *mine) {
    const uint64_t kind = (uint64_t)rand_r(shared);
    s->number = number;
    s->operation = (int)(kind % KOS_OPERATIONS);
    s->root = rand_r(shared) % ranks;
    s->count = rand_r(shared) % 2 ? rand_r(shared) % 12 : rand_r(shared) % (rand_r(shared) % 2 ? MOST : 3000);
    int shift = 1 + rand_r(shared) % (ranks > 1 ? ranks - 1 : 1);
    s->dst = (g->rank + shift) % ranks;
    s->src = (g->rank - shift + ranks) % ranks;
    if (s->operation == KOS_SEND || s->operation == KOS_RECV)
        s->operation = KOS_SEND_RECV;
    for (int part = 0; part < (is_parted(s->operation) ? ranks : 1); part++)
        for (size_t i = 0; i < s->count; i++)
            s->send[part * s->count + i] = of_element(s, g->rank, part, i);
    memset(s->recv, 0, sizeof *s->recv * s->count * ranks);
    const uint64_t what = ((uint64_t)s->operation << 40 | (uint64_t)s->root << 32 | s->count) + 1;
    const kos_request request = {
        .fingerprint = what * UINT64_C(0x9E3779B97F4A7C15) >> 8,
        .operation = s->operation, .dtype = dtype_of("uint32"), .op = KOS_SUM, .root = s->root, .count = s->count,
        .dst = s->dst, .src = s->src, .tag = 5, .recv_tag = 5,
    };
    if (kos_prepare(g, &request, s->prepared))
        fail(g, s, "not prepared", 0);
    void *recv = receives(g, s) ? s->recv : NULL;
    int blocks = rand_r(mine) % 2;
    const uint64_t sequence = s->operation < KOS_SEND ? atomic_load(&g->line->arrived) : KOS_WORD_SEQUENCE;
    kos_result r = kos_start(g, s->prepared, sequence, s->send, recv, &s->work);
    if (r.status == KOS_PENDING && blocks && kos_alone(g))
        r = kos_spin(g, &s->work, g->spin_ns);
    if (r.status == KOS_FAILED)
        fail(g, s, "code", r.code);
    if (r.status != KOS_DONE)
        kos_enqueue(g, &s->work);
    if (blocks)
        check(g, s);
}

// A call that does not complete: a barrier that rank 0 does not begin, or a message.
static void begin_hopeless(kos_group *g, start *s, int operation, uint64_t sequence) {
    const int peer = (g->rank + 1) % ranks;
    const kos_request request = {.fingerprint = 1, .operation = operation, .dtype = dtype_of("uint8"), .count = MOST * 4,
                                 .dst = peer, .src = peer, .tag = 7, .recv_tag = 8};
    memset(&s->work, 0, sizeof s->work);
    if (kos_prepare(g, &request, s->prepared)
        || kos_start(g, s->prepared, sequence, s->send, s->recv, &s->work).status != KOS_PENDING)
        fail(g, s, "completes", operation);
    kos_enqueue(g, &s->work);
}

static int ends(kos_group *g, start *s, int code) {
    for (int64_t began = kos_clock(); kos_phase_of(&s->work) < KOS_ENDED; kos_rest(began, 0))
        kos_advance(g);
    return kos_phase_of(&s->work) == KOS_BROKEN && s->work.result.code == code;
}

// A wait as module_call.c has it: the mutex stands for the GIL.
typedef struct {
    kos_group *g;
    kos_work *work;
    pthread_mutex_t gil;
} waiting;

static void *wait_main(void *argument) {
    waiting *w = argument;
    pthread_mutex_lock(&w->gil);
    for (int64_t began = kos_clock(); kos_phase_of(w->work) < KOS_ENDED; kos_advance(w->g)) {
        pthread_mutex_unlock(&w->gil);
        kos_rest(began, 0);
        pthread_mutex_lock(&w->gil);
    }
    pthread_mutex_unlock(&w->gil);
    return NULL;
}

static void close_beside_a_wait(kos_group *g, start *s) {
    pthread_t thread;
    waiting w = {.g = g, .work = &s->work, .gil = PTHREAD_MUTEX_INITIALIZER};
    pthread_create(&thread, NULL, wait_main, &w);
    usleep(2000);
    pthread_mutex_lock(&w.gil);
    kos_close(g);
    pthread_mutex_unlock(&w.gil);
    pthread_join(thread, NULL);
    if (!ends(g, s, KOS_CLOSED) || g->head || g->messages)
        fail(g, s, "code", s->work.result.code);
}

// The ranks come here after their last call.
static void end_with_failures(kos_group *g, start *s) {
    const uint64_t next = atomic_load(&g->line->arrived);
    for (int i = 0; i < 3; i++) {
        begin_hopeless(g, s, i == 1 ? KOS_RECV : KOS_SEND, KOS_WORD_SEQUENCE);
        kos_abandon(g, &s->work);
        if (g->messages)
            fail(g, s, "is not cancelled", i);
    }
    if (g->rank)
        begin_hopeless(g, s, g->rank == 1 ? KOS_RECV : KOS_BARRIER, next + 1);
    pthread_barrier_wait(&together);
    if (g->rank == 0) {
        usleep(2000);
        kos_fail(g, next + 1);
        if (kos_failure(g, next).status == KOS_FAILED)
            fail(g, s, "an earlier call fails", 0);
    } else if (!ends(g, s, KOS_REPORTED))
        fail(g, s, "code", s->work.result.code);
    begin_hopeless(g, s, KOS_RECV, next);  // the failure is one of a later call
    close_beside_a_wait(g, s);
}

// Every reduction on memory of exactly its size, with random bits: test_core_reduce.py checks the results.
static void reduce_all(unsigned state) {
    for (int dtype = 0; kos_bytes_of(dtype); dtype++)
        for (int op = 0; op < KOS_OPS; op++)
            for (size_t count = 0; count < 70; count += 1 + count / 8) {
                kos_reduction r;
                const void *in[3];
                uint8_t *memory[4];
                if (kos_reduction_of(dtype, op, &r))
                    continue;
                for (int i = 0; i < 4; i++) {
                    memory[i] = malloc(count * r.bytes + !count);
                    for (size_t at = 0; at < count * r.bytes; at++)
                        memory[i][at] = (uint8_t)(rand_r(&state) >> 8);
                    in[i % 3] = memory[i];
                }
                for (int inputs = 1; inputs <= 3; inputs++)
                    kos_reduce(&r, memory[inputs % 2 ? 3 : 1], in, inputs, count, inputs);
                for (int i = 0; i < 4; i++)
                    free(memory[i]);
            }
}

static void *rank_main(void *argument) {
    int rank = (int)(intptr_t)argument;
    kos_group *g = calloc(1, sizeof *g);
    start *starts = calloc(IN_FLIGHT, sizeof *starts);
    unsigned shared = seed, mine = seed * 31 + rank;
    g->ended = ended;
    g->spin_ns = 2000;
    if (kos_open(g, memory, kos_layout_of(ranks).total, rank, ranks))
        exit(2);
    g->direct = direct ? seed % 2 ? 1000 : 512 << 10 : 0;
    g->marks = rank % 2;
    atomic_store(&g->line->started, kos_started(getpid()));
    atomic_store(&g->line->pid, getpid());
    for (int i = 0; i < IN_FLIGHT; i++) {
        starts[i].prepared = malloc(kos_prepared_bytes(ranks));
        starts[i].send = malloc(sizeof(uint32_t) * MOST * ranks);
        starts[i].recv = malloc(sizeof(uint32_t) * MOST * ranks);
    }
    for (int call = 0; call < calls; call++) {
        if (call >= IN_FLIGHT)
            check(g, &starts[call % IN_FLIGHT]);
        begin(g, &starts[call % IN_FLIGHT], call, &shared, &mine);
    }
    for (int call = calls < IN_FLIGHT ? 0 : calls - IN_FLIGHT; call < calls; call++)
        check(g, &starts[call % IN_FLIGHT]);
    end_with_failures(g, starts);
    for (int i = 0; i < IN_FLIGHT; i++) {
        free(starts[i].prepared);
        free(starts[i].send);
        free(starts[i].recv);
    }
    kos_free(g);
    free(starts);
    free(g);
    return NULL;
}

int main(int count, char **arguments) {
    pthread_t threads[KOS_MAX_RANKS];
    if (count != 5)
        return 2;
    ranks = atoi(arguments[1]);
    calls = atoi(arguments[2]);
    seed = atoi(arguments[3]);
    direct = atoi(arguments[4]);
    reduce_all(seed);
    memory = aligned_alloc(4096, kos_layout_of(ranks).total / 4096 * 4096 + 4096);
    memset(memory, 0, kos_layout_of(ranks).total);
    pthread_barrier_init(&together, NULL, (unsigned)ranks);
    for (int rank = 0; rank < ranks; rank++)
        pthread_create(&threads[rank], NULL, rank_main, (void *)(intptr_t)rank);
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    free(memory);
    return 0;
}
