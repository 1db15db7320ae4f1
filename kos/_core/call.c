// From a Prepared to a result: start a call, advance it, wait for it.
//
// Collectives use the slots in the order of their start, and end in this order.  A collective puts its first stage when
// all earlier ones have put their last stage.  Messages advance independently of them.
#define _GNU_SOURCE
#include "core.h"

#include <sched.h>
#include <time.h>

enum {
    POLLS = 100,  // between two checks of the clock and the failure word, which other ranks may be writing
    PAUSES = 10,  // between two polls without the GIL
    PAUSES_NS = 50000, YIELDS_NS = 4000000, SLEEP_NS = 100000,  // a long wait: pause, then yield, then sleep
};

static inline void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");  // `yield` returns at once on most cores
#endif
}

static inline int is_message(const kos_work *w) { return w->prepared->algorithm == KOS_POINT_TO_POINT; }

static int has_put_all(const kos_work *w) {
    return w->stages && kos_stage_of(w) + 1 == w->stages && kos_phase_of(w) != KOS_NOT_PUT;
}

static inline kos_result step(kos_group *g, kos_work *w) {
    const int status = is_message(w) ? kos_mail_step(g, w) : kos_step(g, w);
    return status == KOS_FAILED ? w->result : KOS_RESULT((uint8_t)status);
}

int kos_missing(const kos_group *g, const kos_work *w, int rank) {
    if (kos_phase_of(w) >= KOS_ENDED || rank == g->rank)
        return 0;
    if (is_message(w))
        return (kos_is_open(&w->send_end) && w->send_end.peer == rank) * KOS_AWAITS_READ
            + (kos_is_open(&w->recv_end) && w->recv_end.peer == rank) * KOS_AWAITS_MESSAGE;
    return kos_awaits(g, w, rank);
}

// FAILED if this Work cannot complete; else PENDING.
static kos_result check_failure(kos_group *g, const kos_work *w) {
    kos_result result = kos_failure(g, w->sequence);
    if (result.status == KOS_FAILED || is_message(w))
        return result;
    return kos_compare(g, w->sequence, w->prepared->fingerprint);
}

// As check_failure, but first advances a message once more: data that a rank sent before it failed is received.
static kos_result check_and_step(kos_group *g, kos_work *w) {
    kos_result result = check_failure(g, w);
    return result.status == KOS_FAILED && result.code == KOS_REPORTED && is_message(w)
        && kos_mail_step(g, w) == KOS_DONE ? KOS_RESULT(KOS_DONE) : result;
}

// The result of a Work that is not in the queue; ends its message if it has failed.
static kos_result outcome(kos_group *g, kos_work *w, kos_result result) {
    if (result.status == KOS_FAILED && is_message(w))
        kos_mail_cancel(g, w);
    return result;
}

kos_result kos_start(kos_group *g, const kos_prepared *p, uint64_t sequence, const void *send, void *recv,
                     kos_work *w) {
    w->sequence = sequence;
    kos_result result = kos_failure(g, w->sequence);
    const int failed = result.status == KOS_FAILED;
    if (failed && (p->operation != KOS_RECV || result.code != KOS_REPORTED))  // what was sent before is received
        return result;
    w->prepared = p;
    w->send = send;
    w->recv = recv;
    w->stages = p->stages;
    w->unreadable = w->awaits_readers = 0;
    w->next = NULL;
    kos_set(w, 0, KOS_NOT_PUT);
    if (p->algorithm == KOS_POINT_TO_POINT) {
        kos_mail_start(g, w);
        kos_result r = step(g, w);
        return outcome(g, w, r.status == KOS_PENDING && failed ? result : r);
    }
    kos_publish(g, sequence, p->fingerprint);
    w->mark = g->mark = (g->mark * UINT64_C(0x9E3779B97F4A7C15) + p->fingerprint) % (UINT64_C(1) << 56);
    if ((!g->tail || has_put_all(g->tail)) && kos_may_put(g, w))
        kos_put(g, w);
    return result;
}

static const kos_arrival *first_of(kos_group *g, const kos_prepared *p, int *rank) {
    for (int i = 1; i <= g->size; i++) {
        *rank = p->src == KOS_ANY_RANK ? (g->last_source + i) % g->size : p->src;
        const kos_arrival *first = *rank == g->rank ? NULL : kos_mail_first(g, *rank, p->recv_tag);
        if (first || p->src != KOS_ANY_RANK)
            return first;
    }
    return NULL;
}

const kos_arrival *kos_await(kos_group *g, const kos_prepared *p, int64_t most, int *rank) {
    const kos_arrival *first = first_of(g, p, rank);
    for (int64_t start = first || !most ? 0 : kos_clock(); !first && most && kos_clock() - start < most;) {
        if (kos_failure(g, KOS_WORD_SEQUENCE).status == KOS_FAILED)
            return NULL;
        for (int polls = 0; polls < POLLS && !(first = first_of(g, p, rank)); polls++) {
            if (g->yields) {
                sched_yield();
                break;
            }
            pause_core();
        }
    }
    return first;
}

int kos_alone(const kos_group *g) { return !g->head && !g->messages; }

kos_result kos_spin(kos_group *g, kos_work *w, int64_t most) {
    kos_result result = step(g, w);
    if (result.status != KOS_PENDING || !most)
        return outcome(g, w, result);
    int64_t start = kos_clock();
    uint64_t progress = w->progress;
    while (result.status == KOS_PENDING) {
        int64_t now = kos_clock();
        if (w->progress != progress)  // it has copied meanwhile: the other ranks do the same
            start = now;
        progress = w->progress;
        if (now - start >= most)
            break;
        for (int polls = 0; polls < POLLS && (result = step(g, w)).status == KOS_PENDING; polls++) {
            if (g->yields) {
                sched_yield();
                break;
            }
            pause_core();
        }
        if (result.status == KOS_PENDING)
            result = check_and_step(g, w);
    }
    return outcome(g, w, result);
}

// --- The outstanding Works -----------------------------------------------------------------------------------------

void kos_enqueue(kos_group *g, kos_work *w) {
    if (is_message(w)) {
        w->next = g->messages;
        g->messages = w;
        return;
    }
    if (g->tail)
        g->tail->next = w;
    else
        g->head = w;
    g->tail = w;
}

// Moves a Work from its queue to those that are over.
static void end(kos_group *g, kos_work **at) {
    kos_work *w = *at;
    *at = w->next;
    w->next = g->over;
    g->over = w;
}

static void end_first(kos_group *g) {
    end(g, &g->head);
    if (!g->head)
        g->tail = NULL;
}

// Calls `ended` for the Works that are over.  This comes last, because it may free arrays, whose destructors may call
// the core.
static void report_ends(kos_group *g) {
    for (kos_work *w; (w = g->over);) {
        g->over = w->next;
        w->next = NULL;
        g->ended(w);
    }
}

static void break_work(kos_work *w, kos_result result) {
    w->result = result;
    kos_set(w, kos_stage_of(w), KOS_BROKEN);
}

void kos_spin_queued(kos_group *g, kos_work *w) {
    const kos_result result = kos_spin(g, w, g->spin_ns);
    if (result.status == KOS_FAILED)
        break_work(w, result);
    if (result.status != KOS_PENDING)
        is_message(w) ? end(g, &g->messages) : end_first(g);
    report_ends(g);
}

static void fail_collectives(kos_group *g, kos_result result) {
    while (g->head) {
        break_work(g->head, result);
        end_first(g);
    }
}

static void fail_message(kos_group *g, kos_work **at, kos_result result) {
    kos_mail_cancel(g, *at);
    break_work(*at, result);
    end(g, at);
}

static void fail_all(kos_group *g, kos_result result) {
    fail_collectives(g, result);
    while (g->messages)
        fail_message(g, &g->messages, result);
}

void kos_close(kos_group *g) {
    fail_all(g, (kos_result){KOS_FAILED, KOS_CLOSED, (uint16_t)g->rank, 0});
    g->closed = 1;
    report_ends(g);
}

void kos_abandon(kos_group *g, kos_work *w) {
    for (kos_work **at = &g->messages; *at; at = &(*at)->next)
        if (*at == w) {
            fail_message(g, at, KOS_RESULT(KOS_FAILED));
            break;
        }
    report_ends(g);
}

static void advance_messages(kos_group *g) {
    kos_mail_advance(g);
    for (kos_work **at = &g->messages, *w; (w = *at);) {
        kos_result result = step(g, w);
        if (result.status == KOS_PENDING)
            result = check_and_step(g, w);
        if (result.status == KOS_FAILED)
            fail_message(g, at, result);
        else if (result.status == KOS_DONE)
            end(g, at);
        else
            at = &w->next;
    }
}

static void advance_collectives(kos_group *g) {
    while (g->head) {
        for (kos_work *w = g->head; w; w = w->next) {
            if (kos_phase_of(w) == KOS_NOT_PUT && kos_may_put(g, w))
                kos_put(g, w);
            if (!has_put_all(w))
                break;
        }
        int status = kos_step(g, g->head);
        if (status == KOS_FAILED)
            fail_collectives(g, g->head->result);
        if (status != KOS_DONE)
            break;
        end_first(g);
    }
    if (!g->head)
        return;
    kos_result result = check_failure(g, g->head);
    if (result.status == KOS_FAILED)
        fail_collectives(g, result);
}

void kos_advance(kos_group *g) {
    if (kos_is_over(g))
        fail_all(g, kos_failure(g, 0));
    else {
        advance_messages(g);
        advance_collectives(g);
    }
    report_ends(g);
}

void kos_rest(int64_t start, int yields) {
    const int64_t waited = kos_clock() - start;
    if (waited > YIELDS_NS)
        nanosleep(&(struct timespec){0, SLEEP_NS}, NULL);
    else if (yields || waited > PAUSES_NS)
        sched_yield();
    else
        for (int pauses = 0; pauses < PAUSES; pauses++)
            pause_core();
}
