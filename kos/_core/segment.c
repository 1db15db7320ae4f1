// The segment of a host: its layout, the calls that each rank publishes in its ring, and the failure word.
#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>
#include <time.h>

int kos_forks;

kos_layout kos_layout_of(int size) {
    const size_t page = 4096;
    kos_layout at;
    at.lines = KOS_LINE;
    at.rings = at.lines + (size_t)size * KOS_LINE;
    at.resized = kos_up(at.rings + (size_t)size * KOS_RING * sizeof(uint64_t), KOS_LINE);
    at.texts = at.resized + (size_t)size * KOS_RING * sizeof(kos_resized);
    at.slots = kos_up(at.texts + (size_t)size * KOS_TEXTS * KOS_TEXT_BYTES, KOS_LINE);
    at.areas = kos_up(at.slots + (size_t)size * KOS_SLOT_DEPTH * KOS_LINE, page) + KOS_APART;
    at.area_bytes = kos_min(KOS_AREA_BYTES, KOS_AREAS_BYTES / KOS_AREA_DEPTH / (size_t)size);
    at.area_pitch = kos_up(at.area_bytes + 1, page);
    at.mailboxes = at.areas - KOS_APART + kos_up((size_t)size * KOS_AREA_DEPTH * at.area_pitch, page);
    at.room = kos_min(KOS_ROOM_BYTES, KOS_ROOMS_BYTES / ((size_t)size * size)) / page * page;
    const size_t answers = KOS_ANSWERS_BYTES / sizeof(uint64_t) / ((size_t)size * size);
    at.answers = (uint32_t)kos_min(KOS_ANSWERS, answers / 512 * 512);
    at.room_at = sizeof(kos_mailbox) + at.answers * sizeof(uint64_t);
    at.mailbox_pitch = kos_up(at.room_at + at.room, page);
    at.total = at.mailboxes + (size_t)size * size * at.mailbox_pitch;
    return at;
}

static _Atomic uint64_t *ring_of(const kos_group *g, int rank) {
    return (_Atomic uint64_t *)(g->memory + g->layout.rings) + (size_t)rank * KOS_RING;
}

static kos_mailbox *mailbox(const kos_group *g, int from, int to) {
    return (kos_mailbox *)(g->memory + g->layout.mailboxes + ((size_t)from * g->size + to) * g->layout.mailbox_pitch);
}

void kos_forked(void) { kos_forks++; }

// The places of all ranks, each of which has `depth`, for twice as many stages.
static void fill(uint8_t **places, uint8_t *first, size_t pitch, int depth, int size) {
    for (int stage = 0; stage < 2 * depth; stage++)
        for (int r = 0; r < size; r++)
            *places++ = first + pitch * (size_t)((r + stage / depth) % size * depth + stage % depth);
}

int kos_open(kos_group *g, uint8_t *memory, size_t bytes, int rank, int size) {
    if (size < 1 || size > KOS_MAX_RANKS || rank < 0 || rank >= size || (uintptr_t)memory % KOS_LINE)
        return -1;
    g->layout = kos_layout_of(size);
    if (bytes < g->layout.total)
        return -1;
    g->boxes = calloc(size, sizeof *g->boxes);
    g->scratch = aligned_alloc(KOS_CACHE_LINE, KOS_AREA_BYTES);
    g->slots = calloc(2 * (KOS_SLOT_DEPTH + KOS_AREA_DEPTH) * size, sizeof *g->slots);
    if (!g->boxes || !g->scratch || !g->slots)
        return -2;
    g->memory = memory;
    g->failure = (_Atomic uint64_t *)memory;
    g->rank = g->last_source = rank;
    g->size = size;
    g->line = kos_line_of(g, rank);
    g->generation = kos_forks;
    g->areas = g->slots + 2 * KOS_SLOT_DEPTH * size;
    fill(g->slots, memory + g->layout.slots, KOS_LINE, KOS_SLOT_DEPTH, size);
    fill(g->areas, memory + g->layout.areas, g->layout.area_pitch, KOS_AREA_DEPTH, size);
    for (int r = 0; r < size; r++) {
        kos_box *box = &g->boxes[r];
        box->out = mailbox(g, rank, r);
        box->in = mailbox(g, r, rank);
        box->out_room = (uint8_t *)box->out + g->layout.room_at;
        box->in_room = (uint8_t *)box->in + g->layout.room_at;
        box->arrived_end = &box->arrived;
        box->queued.end = &box->queued.first;
        box->expected.end = &box->expected.first;
        box->streamed.end = &box->streamed.first;
    }
    return 0;
}

void kos_free(kos_group *g) {
    for (int r = 0; g->boxes && r < g->size; r++) {
        kos_arrival *next;
        for (kos_arrival *each = g->boxes[r].arrived; each; each = next) {
            next = each->next;
            free(each);
        }
        free(g->boxes[r].free);
    }
    free(g->boxes);
    free(g->scratch);
    free(g->slots);
}

void kos_publish(kos_group *g, uint64_t sequence, uint64_t fingerprint) {
    KOS_POINT(KOS_AT_BEGIN);
    // Release for the entry too: the `arrived` of the call before is then visible before this entry.  So a reader that
    // finds an entry overwritten also finds `arrived` KOS_RING calls later (kos_compare).
    atomic_store_explicit(&ring_of(g, g->rank)[sequence % KOS_RING], fingerprint + sequence, memory_order_release);
    atomic_store_explicit(&g->line->arrived, sequence + 1, memory_order_release);
    KOS_POINT(KOS_AT_PUBLISHED);
}

void kos_publish_resized(kos_group *g, uint64_t sequence, uint64_t fingerprint, uint64_t described, uint64_t count) {
    kos_resized *r = (kos_resized *)(g->memory + g->layout.resized) + (size_t)g->rank * KOS_RING + sequence % KOS_RING;
    atomic_store_explicit(&r->described, described, memory_order_relaxed);
    atomic_store_explicit(&r->count, count, memory_order_relaxed);
    atomic_store_explicit(&r->stamp, fingerprint + sequence, memory_order_relaxed);  // kos_publish releases it
}

// The entry of a call in the ring of a rank that has begun it; `expected` if a later call has overwritten it.
static uint64_t entry_of(const kos_group *g, int rank, uint64_t call, uint64_t expected) {
    const uint64_t entry = atomic_load_explicit(&ring_of(g, rank)[call % KOS_RING], memory_order_acquire);
    const uint64_t arrived = atomic_load_explicit(&kos_line_of(g, rank)->arrived, memory_order_acquire);
    return arrived < call + KOS_RING ? entry : expected;
}

kos_result kos_compare(kos_group *g, uint64_t sequence, uint64_t fingerprint) {
    uint64_t same = sequence + 1;
    for (int r = 0; r < g->size; r++) {
        const uint64_t arrived = atomic_load_explicit(&kos_line_of(g, r)->arrived, memory_order_acquire);
        const uint64_t end = kos_min(arrived, sequence + 1);
        same = kos_min(end, same);
        for (uint64_t call = end > g->same + KOS_RING ? end - KOS_RING : g->same; call < end; call++) {
            const uint64_t entry = entry_of(g, r, call, 0);
            const uint64_t mine = call == sequence ? fingerprint + sequence : entry_of(g, g->rank, call, entry);
            if (entry && entry != mine)
                return (kos_result){KOS_FAILED, KOS_MISMATCH, (uint16_t)r, call};
        }
    }
    g->same = same > g->same ? same : g->same;
    return KOS_RESULT(KOS_PENDING);
}

void kos_fail(const kos_group *g, uint64_t sequence) {
    // Release: whoever acquires the word finds its text.
    for (uint64_t known = 0; (!known || sequence < (known & KOS_WORD_SEQUENCE))
         && !atomic_compare_exchange_weak(g->failure, &known, KOS_WORD(g->rank, sequence));) {}
}

kos_result kos_failure(const kos_group *g, uint64_t sequence) {
    if (kos_is_over(g))
        return (kos_result){KOS_FAILED, g->closed ? KOS_CLOSED : KOS_FORKED, (uint16_t)g->rank, 0};
    uint64_t word = atomic_load_explicit(g->failure, memory_order_acquire);
    if (!word || (word & KOS_WORD_SEQUENCE) > sequence)
        return KOS_RESULT(KOS_PENDING);
    return (kos_result){KOS_FAILED, KOS_REPORTED, word >> 44 & 0xff, word};
}

int64_t kos_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}
