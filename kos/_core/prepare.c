// From a request to a Prepared: which algorithm runs it, which part of which array goes where, and in how many stages.
//
// All ranks must find the same algorithm and number of stages, so these follow from what all ranks know.  If only some
// ranks know the counts of a v-form, the first stage tells the others how many stages follow (KOS_ANNOUNCED).
#include "core.h"

#include <string.h>

// Up to this size, every rank reduces the whole of an all_reduce, which saves one wait.  The limit falls with the
// number of ranks, because each rank reads the data of all.
enum { ONE_SHOT_BYTES = 128 << 10 };

static const kos_pattern patterns[] = {
    [KOS_BARRIER] = {KOS_NOBODY, KOS_NOBODY, KOS_NOBODY, 0, 0},
    [KOS_BROADCAST] = {KOS_ROOT, KOS_EVERYBODY, KOS_ROOT, 0, 0},
    [KOS_REDUCE] = {KOS_OTHERS, KOS_ROOT, KOS_EVERYBODY, 0, 1},
    [KOS_ALL_REDUCE] = {KOS_EVERYBODY, KOS_EVERYBODY, KOS_EVERYBODY, 0, 1},
    [KOS_ALL_GATHER] = {KOS_EVERYBODY, KOS_EVERYBODY, KOS_EVERYBODY, 0, 0},
    [KOS_GATHER] = {KOS_OTHERS, KOS_ROOT, KOS_EVERYBODY, 0, 0},
    [KOS_SCATTER] = {KOS_ROOT, KOS_EVERYBODY, KOS_ROOT, 1, 0},
    [KOS_ALL_TO_ALL] = {KOS_EVERYBODY, KOS_EVERYBODY, KOS_EVERYBODY, 1, 0},
    [KOS_REDUCE_SCATTER] = {KOS_EVERYBODY, KOS_EVERYBODY, KOS_EVERYBODY, 1, 1},
    [KOS_SCAN] = {KOS_OTHERS, KOS_EVERYBODY, KOS_UP_TO_ME, 0, 1},  // the root is the last rank
    [KOS_EXSCAN] = {KOS_OTHERS, KOS_EVERYBODY, KOS_BELOW_ME, 0, 1},
};

size_t kos_prepared_bytes(int size) { return sizeof(kos_prepared) + 2 * (size_t)size * sizeof(kos_part); }

// Fills the parts of one array, which is `counts` one after another, or `size` parts of `bytes`, or one such part that
// goes to or comes from every rank.  Returns the bytes of the array.
static uint64_t fill(kos_part *parts, int size, const uint64_t *counts, unsigned item, uint64_t bytes, int apart) {
    uint64_t at = 0;
    for (int r = 0; r < size; r++) {
        parts[r] = (kos_part){at, counts ? counts[r] * item : bytes};
        if (counts || apart)
            at += parts[r].bytes;
    }
    return counts || apart ? at : bytes;
}

static uint64_t largest_of(const kos_part *parts, int count) {
    uint64_t most = 0;
    for (int r = 0; r < count; r++)
        most = parts[r].bytes > most ? parts[r].bytes : most;
    return most;
}

// Each rank reduces one part of an all_reduce or a reduce, and then the other ranks, or the root, get it.
static void prepare_two_shot(const kos_group *g, kos_prepared *p, uint64_t bytes) {
    const uint64_t step = kos_up((bytes + g->size - 1) / g->size, KOS_CACHE_LINE);
    for (int r = 0; r < g->size; r++) {
        uint64_t at = r * step < bytes ? r * step : bytes;
        p->parts[r] = p->parts[g->size + r] = (kos_part){at, bytes - at < step ? bytes - at : step};
    }
    p->algorithm = KOS_TWO_SHOT;
    p->patterns[0] = &patterns[KOS_REDUCE_SCATTER];
    p->patterns[1] = &patterns[p->operation == KOS_REDUCE ? KOS_GATHER : KOS_ALL_GATHER];
    p->per_stage = g->layout.area_bytes / g->size / KOS_CACHE_LINE * KOS_CACHE_LINE;
    p->stages = 2 * ((step + p->per_stage - 1) / p->per_stage);
}

static void prepare_collective(const kos_group *g, const kos_request *q, kos_prepared *p) {
    const kos_pattern *pattern = &patterns[q->operation];
    const int size = g->size;
    const int apart = !pattern->reduces && pattern->sources != KOS_ROOT;
    const unsigned item = p->reduction.bytes;
    const uint64_t bytes = q->count * item;
    kos_part *send = p->parts, *recv = p->parts + size;
    p->patterns[0] = p->patterns[1] = pattern;
    uint64_t sent = fill(send, size, q->send_counts, item, bytes, pattern->per_rank);
    uint64_t received = fill(recv, size, q->recv_counts, item, bytes, apart);
    const uint64_t largest = largest_of(p->parts, 2 * size);
    p->send_bytes = kos_is_in(pattern->putters, g->rank, q->root) || pattern->reduces
            || (q->operation == KOS_GATHER && g->rank == q->root) ? sent : 0;
    const int takes = kos_is_in(pattern->takers, g->rank, q->root) && (q->operation != KOS_EXSCAN || g->rank);
    p->recv_bytes = takes ? received : 0;
    p->alignment = !pattern->reduces ? 1 : item >> p->reduction.pair;
    if ((q->operation == KOS_ALL_REDUCE || (q->operation == KOS_REDUCE && size > 2))
        && bytes * (size - 1) > ONE_SHOT_BYTES) {
        prepare_two_shot(g, p, bytes);
        return;
    }
    // What one rank puts in a slot: its data, or a part for every rank.
    const uint64_t places = pattern->per_rank ? size : 1;
    p->small = places * largest <= KOS_INLINE_BYTES;
    p->per_stage = p->small ? largest : g->layout.area_bytes / places / KOS_CACHE_LINE * KOS_CACHE_LINE;
    p->stages = p->per_stage && largest ? (largest + p->per_stage - 1) / p->per_stage : 1;
    if ((q->varies && q->operation == KOS_ALL_TO_ALL)
        || (g->direct && largest > g->direct && pattern->per_rank && !pattern->reduces)) {
        p->algorithm = KOS_ANNOUNCED;
        p->per_stage = g->layout.area_bytes / places / KOS_CACHE_LINE * KOS_CACHE_LINE;
        p->stages = p->small = 0;
    }
}

static int has_counts(const kos_request *q, int size) {
    const uint64_t limit = UINT64_C(1) << 40;
    uint64_t sum = 0, bits;
    for (int r = 0; r < size; r++) {
        bits = (q->send_counts ? q->send_counts[r] : 0) | (q->recv_counts ? q->recv_counts[r] : 0) | q->count;
        sum += kos_min(bits, limit);  // cannot wrap
    }
    return sum < limit;
}

uint64_t kos_sized(uint64_t sizeless, uint64_t count) {
    uint64_t h = sizeless ^ count * UINT64_C(0x9E3779B97F4A7C15);
    for (int i = 0; i < 2; i++) {
        h ^= h >> 32;
        h *= UINT64_C(0xD6E8FEB86659FD93);
    }
    return (h >> 8) + 1;
}

int kos_prepare(const kos_group *g, const kos_request *q, kos_prepared *p) {
    const int messages = q->operation >= KOS_SEND;
    const unsigned item = kos_bytes_of(q->dtype);
    memset(p, 0, kos_prepared_bytes(g->size));
    if (q->operation < 0 || q->operation >= KOS_OPERATIONS || !item || q->root < 0 || q->root >= g->size
        || !has_counts(q, g->size) || (!messages && !q->fingerprint))
        return -1;
    if (!messages && patterns[q->operation].reduces && kos_reduction_of(q->dtype, q->op, &p->reduction))
        return -1;
    p->reduction.bytes = item;
    p->operation = (uint8_t)q->operation;
    p->fingerprint = q->fingerprint;
    p->root = q->root;
    if (!messages) {
        if (q->operation == KOS_SCAN || q->operation == KOS_EXSCAN)
            p->root = g->size - 1;
        prepare_collective(g, q, p);
        p->synchronizes = p->algorithm == KOS_ANNOUNCED || q->operation == KOS_BARRIER;
        p->awaits_all = p->synchronizes || (p->patterns[0]->sources == KOS_EVERYBODY
                                   && kos_is_in(p->patterns[0]->takers, g->rank, p->root));
        return 0;
    }
    const int any = q->operation == KOS_RECV && q->src == KOS_ANY_RANK;
    if (q->dst < 0 || q->dst >= g->size || (q->src < 0 && !any) || q->src >= g->size || (q->tag | q->recv_tag) >> KOS_DTYPE_AT)
        return -1;
    p->algorithm = KOS_POINT_TO_POINT;
    p->alignment = 1;
    p->dst = q->dst;
    p->src = q->src;
    p->any_length = q->operation == KOS_RECV && q->varies;
    p->tag = q->tag | (uint64_t)q->dtype << KOS_DTYPE_AT;
    p->recv_tag = q->recv_tag | (uint64_t)q->dtype << KOS_DTYPE_AT;
    p->send_bytes = q->operation == KOS_RECV ? 0 : q->count * item;
    p->recv_bytes = q->operation == KOS_SEND ? 0 : q->recv_counts ? q->recv_counts[0] * item : q->count * item;
    return 0;
}
