// The segment of a host: its layout, the calls that each rank publishes in its ring, and the failure word.
#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>
#include <time.h>

int kos_forks;

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

kos_layout kos_layout_of(int size) {
    const size_t page = 4096;
    kos_layout at;
    at.lines = KOS_LINE;
    at.rings = at.lines + (size_t)size * KOS_LINE;
    at.texts = at.rings + (size_t)size * KOS_RING * sizeof(uint64_t);
    at.slots = kos_up(at.texts + (size_t)size * KOS_TEXTS * KOS_TEXT_BYTES, page) + KOS_APART;
    at.slot_bytes = least(KOS_SLOT_BYTES, KOS_SLOTS_BYTES / KOS_DEPTH / (size_t)size);
    at.slot_pitch = kos_up(sizeof(kos_slot) + at.slot_bytes, page);
    at.mailboxes = at.slots - KOS_APART + kos_up((size_t)size * KOS_DEPTH * at.slot_pitch, page);
    at.room = least(KOS_ROOM_BYTES, KOS_ROOMS_BYTES / ((size_t)size * size)) / page * page;
    at.answers = (uint32_t)least(KOS_ANSWERS, KOS_ANSWERS_BYTES / sizeof(uint64_t) / ((size_t)size * size) / 512 * 512);
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

int kos_open(kos_group *g, uint8_t *memory, size_t bytes, int rank, int size) {
    if (size < 1 || size > KOS_MAX_RANKS || rank < 0 || rank >= size || (uintptr_t)memory % KOS_LINE)
        return -1;
    g->layout = kos_layout_of(size);
    if (bytes < g->layout.total)
        return -1;
    g->boxes = calloc(size, sizeof *g->boxes);
    g->scratch = aligned_alloc(KOS_CACHE_LINE, KOS_SCRATCH_BYTES);
    if (!g->boxes || !g->scratch)
        return -2;
    g->memory = memory;
    g->failure = (_Atomic uint64_t *)memory;
    g->rank = rank;
    g->size = size;
    g->line = kos_line_of(g, rank);
    g->generation = kos_forks;
    g->free = KOS_DEPTH;
    for (int stage = 0; stage < KOS_SLOT_PERIOD; stage++)
        for (int r = 0; r < size; r++) {
            size_t place = (size_t)((r + stage / KOS_DEPTH) % size) * KOS_DEPTH + stage % KOS_DEPTH;
            g->slots[stage][r] = (kos_slot *)(memory + g->layout.slots + place * g->layout.slot_pitch);
        }
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
}

void kos_publish(kos_group *g, uint64_t sequence, uint64_t fingerprint) {
    KOS_POINT(KOS_AT_BEGIN);
    // Release for the entry too: the `arrived` of the call before is then visible before this entry.  So a reader that
    // finds an entry overwritten also finds `arrived` KOS_RING calls later (kos_compare).
    atomic_store_explicit(&ring_of(g, g->rank)[sequence % KOS_RING], fingerprint + sequence, memory_order_release);
    atomic_store_explicit(&g->line->arrived, sequence + 1, memory_order_release);
    KOS_POINT(KOS_AT_PUBLISHED);
}

int kos_compare(const kos_group *g, uint64_t sequence, uint64_t fingerprint) {
    for (int r = 0; r < g->size; r++) {
        kos_line *line = kos_line_of(g, r);
        if (atomic_load_explicit(&line->arrived, memory_order_acquire) <= sequence)
            continue;
        uint64_t entry = atomic_load_explicit(&ring_of(g, r)[sequence % KOS_RING], memory_order_acquire);
        if (entry != fingerprint + sequence
            && atomic_load_explicit(&line->arrived, memory_order_acquire) < sequence + KOS_RING)
            return r;
    }
    return -1;
}

void kos_fail(const kos_group *g, uint64_t sequence) {
    // Release: whoever acquires the word finds its text.
    for (uint64_t known = 0; (!known || sequence < (known & KOS_WORD_SEQUENCE))
         && !atomic_compare_exchange_weak(g->failure, &known, KOS_WORD(g->rank, sequence));) {}
}

kos_result kos_failure(const kos_group *g, uint64_t sequence) {
    if (g->closed || g->generation != kos_forks)
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
