// Collectives through the slots, in stages: put, see, take.
//
// In a stage, each rank that sends data copies it to its slot or area, and then stores the stamp.  A rank that sees the
// stamps it needs copies the data to its array, or reduces it there.  Then it counts the stage as read.  When every
// rank has counted a stage, its memory is used again: a slot KOS_SLOT_DEPTH stages later, an area KOS_AREA_DEPTH stages
// later.  The pattern of an operation (prepare.c) says which rank puts and takes what.  The steps are the same for all.
//
// A rank waits for the ranks whose data it takes; in a barrier it waits for all ranks.  So a rank that only sends data,
// such as the root of a broadcast, completes its call before others have begun theirs.  If their calls differ from it,
// no later stamp has the expected value, and kos_compare finds the first published call that differs.
#include "core.h"

#include <string.h>

static inline const kos_pattern *pattern_of(const kos_work *w, uint64_t stage) {
    return w->prepared->patterns[stage & 1];
}

// The ranks whose data this one takes are from *first to below *last.
static inline void sources_of(const kos_group *g, const kos_pattern *pattern, int root, int *first, int *last) {
    *first = pattern->sources == KOS_ROOT ? root : 0;
    *last = pattern->sources == KOS_ROOT ? root + 1 : g->size;
    if (pattern->sources == KOS_UP_TO_ME || pattern->sources == KOS_BELOW_ME)
        *last = g->rank + (pattern->sources == KOS_UP_TO_ME);
    else if (pattern->sources == KOS_NOBODY)
        *last = 0;
}

// The bytes of a part that one stage moves.
static inline kos_part piece_of(const kos_prepared *p, kos_part part, uint64_t stage) {
    if (p->algorithm != KOS_SLOTS)
        stage = p->algorithm == KOS_TWO_SHOT ? stage / 2 : stage - 1;
    const uint64_t done = stage * p->per_stage;
    if (part.bytes <= done)
        return (kos_part){part.at, 0};
    return (kos_part){part.at + done, kos_min(part.bytes - done, p->per_stage)};
}

// Where a rank's payload of a stage of the group is.
static inline uint8_t *payload(const kos_group *g, const kos_prepared *p, uint64_t stage, int rank) {
    return p->small ? kos_slot_of(g, stage, rank)->small : kos_area_of(g, stage, rank);
}

// How many stages a rank may be ahead of another one: as many as there are places for payloads.  A rank that has to
// wait waits until half of the slots are free.  Otherwise two ranks on one CPU core would take turns at every call.
static inline uint64_t depth_of(const kos_prepared *p, int has_waited) {
    return p->small ? KOS_SLOT_DEPTH >> has_waited : KOS_AREA_DEPTH;
}

// The data of a slot with a part for each rank, for one receiver.  In turn, neighbours write the same lines.
static inline uint64_t offset_of(const kos_group *g, const kos_prepared *p, int sender, int receiver) {
    return (uint64_t)((receiver - sender + g->size) % g->size) * p->per_stage;
}

static inline uint64_t stamp_of(const kos_work *w, uint64_t stage) {
    return w->mark + w->sequence + (stage << 56);
}

// Acquire: the payload, and the copy of `stages_read`, were stored before the stamp.
static inline int has_stamped(kos_slot *slot, uint64_t stamp) {
    return atomic_load_explicit(&slot->stamp, memory_order_acquire) == stamp;
}

// Acquire: that rank loaded from the slots before it stored this number, so this rank may write to them now.
static inline uint64_t stages_read_by(const kos_group *g, int rank) {
    return atomic_load_explicit(&kos_line_of(g, rank)->stages_read, memory_order_acquire);
}

// Whether this rank needs what `rank` puts in that stage.  Offers are never partial: their later stages are rare.
static inline int needs(const kos_group *g, const kos_work *w, uint64_t stage, int rank) {
    const kos_prepared *p = w->prepared;
    const kos_pattern *pattern = pattern_of(w, stage);
    int first, last;
    if (p->synchronizes)
        return 1;
    if (rank == g->rank || !kos_is_in(pattern->takers, g->rank, p->root))
        return 0;
    sources_of(g, pattern, p->root, &first, &last);
    return rank >= first && rank < last
        && (!stage || piece_of(p, p->parts[g->size + (pattern->reduces ? g->rank : rank)], stage).bytes > 0);
}

int kos_may_put(kos_group *g, const kos_work *w) {
    const uint64_t stage = kos_stage_in_group(g, w);
    if (stage < g->read + depth_of(w->prepared, 0))
        return 1;
    uint64_t least = stage;
    for (int r = 0; r < g->size; r++)
        least = kos_min(least, stages_read_by(g, r));
    if (stage >= least + depth_of(w->prepared, 1))
        return 0;
    g->read = least;
    return 1;
}

static void put_data(kos_group *g, kos_work *w, uint64_t stage) {
    const kos_prepared *p = w->prepared;
    const kos_pattern *pattern = pattern_of(w, stage);
    const uint8_t *from = w->send;
    uint8_t *to = payload(g, p, w->first + stage, g->rank);
    kos_part piece = piece_of(p, p->parts[g->rank], stage);
    if (p->algorithm == KOS_TWO_SHOT && stage & 1) {  // what this rank has reduced
        from = w->recv;
        if (!from) {
            from = g->scratch;
            piece.at = 0;
        }
    }
    if (!pattern->per_rank)
        memcpy(to, from + piece.at, piece.bytes);
    else
        for (int r = 0; r < g->size; r++) {
            piece = piece_of(p, p->parts[r], stage);
            if (r != g->rank)
                memcpy(to + offset_of(g, p, g->rank, r), from + piece.at, piece.bytes);
        }
}

void kos_put(kos_group *g, kos_work *w) {
    const kos_prepared *p = w->prepared;
    const uint64_t stage = kos_stage_of(w);
    if (!stage) {
        w->first = g->stage;
        g->stage += w->stages ? w->stages : 1;
    }
    kos_slot *slot = kos_slot_of(g, w->first + stage, g->rank);
    const int puts = g->size > 1 && kos_is_in(pattern_of(w, stage)->putters, g->rank, p->root);
    if (p->algorithm == KOS_ANNOUNCED && !stage)
        kos_put_offer(g, w);
    else if (puts)
        put_data(g, w, stage);
    if (puts || p->synchronizes) {
        slot->stages_read = atomic_load_explicit(&g->line->stages_read, memory_order_relaxed);
        KOS_POINT(KOS_AT_PUT);
        // Release: whoever acquires the stamp finds the payload.
        atomic_store_explicit(&slot->stamp, stamp_of(w, stage), memory_order_release);
        KOS_POINT(KOS_AT_STAMPED);
    }
    w->peer = 0;
    kos_set(w, stage, KOS_PUT);
}

static void take_data(kos_group *g, kos_work *w, uint64_t stage) {
    const kos_prepared *p = w->prepared;
    const kos_pattern *pattern = pattern_of(w, stage);
    const void *in[KOS_MAX_RANKS];
    int first, last, inputs = 0;
    sources_of(g, pattern, p->root, &first, &last);
    kos_part piece = piece_of(p, p->parts[g->size + g->rank], stage);
    for (int r = first; r < last; r++) {
        const uint8_t *from = payload(g, p, w->first + stage, r) + (pattern->per_rank ? offset_of(g, p, r, g->rank) : 0);
        // This rank's own data is still in its array, where reading it takes a third of the time (64 KB).
        if (r == g->rank)
            from = w->send + piece_of(p, p->parts[r], stage).at;
        if (pattern->reduces) {
            in[inputs++] = from;
            continue;
        }
        piece = piece_of(p, p->parts[g->size + r], stage);
        if (r != g->rank) {
            memcpy(w->recv + piece.at, from, piece.bytes);
            if (pattern->putters != KOS_EVERYBODY && (g->size == 2 || pattern->per_rank || pattern->takers == KOS_ROOT))
                kos_mark_written(g, from, piece.bytes);
        } else if (p->algorithm != KOS_TWO_SHOT && w->recv && from != w->recv + piece.at)
            memmove(w->recv + piece.at, from, piece.bytes);
    }
    if (inputs) {
        uint8_t *out = w->recv ? w->recv + piece.at : g->scratch;
        kos_reduce(&p->reduction, out, in, inputs, piece.bytes / p->reduction.bytes, g->size);
    }
}

// Takes the data of a stage, and goes on to the next one.
static int take(kos_group *g, kos_work *w) {
    const kos_prepared *p = w->prepared;
    const uint64_t stage = kos_stage_of(w), read = w->first + stage + 1;
    if (p->algorithm == KOS_ANNOUNCED && !stage) {
        int status = kos_take_offers(g, w);
        if (status != KOS_DONE)
            return status;
    } else if (kos_is_in(pattern_of(w, stage)->takers, g->rank, p->root))
        take_data(g, w, stage);
    if (!stage && p->awaits_all) {
        g->read = read;
        for (int r = 0; r < g->size; r++)
            if (r != g->rank)
                g->read = kos_min(g->read, kos_slot_of(g, w->first, r)->stages_read);
    }
    KOS_POINT(KOS_AT_TAKEN);
    // Release: a rank that acquires this, here or in a slot, writes to these slots only after the loads above.
    atomic_store_explicit(&g->line->stages_read, read, memory_order_release);
    if (stage + 1 < w->stages)
        kos_set(w, stage + 1, KOS_NOT_PUT);
    else if (w->awaits_readers)
        kos_set(w, stage, KOS_DRAIN);
    else {
        kos_set(w, stage, KOS_ENDED);
        return KOS_DONE;
    }
    return KOS_PENDING;
}

static inline int has_seen(kos_group *g, kos_work *w) {
    const uint64_t stage = kos_stage_of(w), stamp = stamp_of(w, stage);
    const int all = !stage && w->prepared->awaits_all;
    while (w->peer < g->size
           && (w->peer == g->rank || (!all && !needs(g, w, stage, w->peer))
               || has_stamped(kos_slot_of(g, w->first + stage, w->peer), stamp)))
        w->peer++;
    return w->peer == g->size;
}

int kos_step(kos_group *g, kos_work *w) {
    for (;;) {
        int phase = kos_phase_of(w), status;
        if (phase == KOS_NOT_PUT) {
            if (!kos_may_put(g, w))
                return KOS_PENDING;
            kos_put(g, w);
        } else if (phase == KOS_PUT) {
            if (!has_seen(g, w))
                return KOS_PENDING;
            KOS_POINT(KOS_AT_SEEN);
            uint64_t progress = w->progress;
            status = take(g, w);
            if (status != KOS_PENDING || w->progress == progress)
                return status;
        } else {
            KOS_POINT(KOS_AT_DRAIN);
            for (int r = 0; r < g->size; r++)
                if (stages_read_by(g, r) <= w->first)
                    return KOS_PENDING;
            kos_set(w, kos_stage_of(w), KOS_ENDED);
            return KOS_DONE;
        }
    }
}

int kos_awaits(const kos_group *g, const kos_work *w, int rank) {
    const uint64_t stage = kos_stage_of(w), number = kos_stage_in_group(g, w);
    const int phase = kos_phase_of(w);
    if (phase == KOS_NOT_PUT)
        return stages_read_by(g, rank) + depth_of(w->prepared, 1) <= number;
    if (phase == KOS_PUT)
        return rank + 1 == w->unreadable
            || (needs(g, w, stage, rank) && !has_stamped(kos_slot_of(g, number, rank), stamp_of(w, stage)));
    return phase == KOS_DRAIN && stages_read_by(g, rank) <= w->first;
}
