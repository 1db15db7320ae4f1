// One copy from another process's memory, by process_vm_readv ("cross memory attach"), which Linux allows to processes
// that may debug each other.  Linux pins each page, which takes time.  So for parts up to `direct` bytes (shared/transport.py), two
// copies through a slot, which stays in the caches, are faster.  They are faster at any size if several ranks read the
// data, or if one rank reads from all (prepare.c).
//
// In the first stage of a call each rank offers its data: it writes to its area, for every rank, where the data is.
// Data that fits is in the area; for the rest the offer has its address, or says that it comes in later stages, if the
// memory cannot be read.  A rank whose memory is read ends the call when all ranks have counted the stage as read.
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

// The time between two checks of a process.  Linux uses a PID again only after all others, which takes much longer.
enum { CHECK_NS = 1000000 };
enum { STATE = 3, START = 22 };  // fields of proc(5)'s stat, after the name, which may have any bytes

uint64_t kos_started(int pid) {
    char text[1024];
    snprintf(text, sizeof text, "/proc/%d/stat", pid);
    const int file = open(text, O_RDONLY | O_CLOEXEC);
    const ssize_t bytes = file < 0 ? -1 : read(file, text, sizeof text - 1);
    const int error = errno;
    if (file >= 0)
        close(file);
    if (bytes < 0)
        return error == ENOENT || error == ESRCH ? 0 : UINT64_MAX;
    text[bytes] = 0;
    const char *at = strrchr(text, ')');
    if (!at || strchr("ZX", at[2]))
        return 0;
    for (int field = STATE; field <= START && at; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : UINT64_MAX;
}

// Whether the process with this PID is still the one that joined.  calls.py makes the same check.
static int is_same_process(const kos_group *g, int rank, int pid) {
    kos_box *box = &g->boxes[rank];
    const int64_t now = kos_clock();
    if (rank == g->rank || (box->checked && now - box->checked < CHECK_NS))
        return 1;
    const uint64_t started = kos_started(pid);
    if (started != UINT64_MAX && started != atomic_load_explicit(&kos_line_of(g, rank)->started, memory_order_relaxed))
        return 0;
    box->checked = now;
    return 1;
}

// The kernel's loads come after the acquire that showed the address, and before the release that counts the data as
// read: both are made by this thread.
int kos_read(const kos_group *g, int rank, void *to, uint64_t from, size_t bytes) {
    uint8_t *at = to;
    const pid_t pid = (pid_t)atomic_load_explicit(&kos_line_of(g, rank)->pid, memory_order_relaxed);
    while (bytes) {  // Linux copies at most 2 GiB at a time
        if (!is_same_process(g, rank, pid))
            return ESRCH;
        struct iovec local = {at, bytes}, remote = {(void *)(uintptr_t)from, bytes};
        ssize_t done = process_vm_readv(pid, &local, 1, &remote, 1, 0);
        if (done < 0)
            return errno;
        if (!done)
            return EFAULT;
        at += done;
        from += (uint64_t)done;
        bytes -= (size_t)done;
    }
    return 0;
}

// That of a rank to a call whose first stage is now.
static kos_offer *offer_of(const kos_group *g, const kos_work *w, int rank) {
    return (kos_offer *)kos_area_of(g, w->first, rank);
}

void kos_put_offer(kos_group *g, kos_work *w) {
    const kos_prepared *p = w->prepared;
    kos_offer *offer = offer_of(g, w, g->rank);
    const int puts = kos_is_in(p->patterns[0]->putters, g->rank, p->root);
    size_t end = kos_up(sizeof *offer + g->size * sizeof *offer->parts, KOS_CACHE_LINE);
    uint64_t later = 0;
    int readable = -1;  // not known yet
    for (int r = 0; r < g->size; r++) {
        kos_part mine = p->parts[r];
        uint8_t byte;
        offer->parts[r].bytes = puts ? mine.bytes : 0;
        offer->parts[r].expects = p->parts[g->size + r].bytes;
        if (r == g->rank || !offer->parts[r].bytes)
            offer->parts[r].at = KOS_IN_SLOT;
        else if (end + mine.bytes <= g->layout.area_bytes) {
            memcpy((uint8_t *)offer + end, w->send + mine.at, mine.bytes);
            offer->parts[r].at = KOS_IN_SLOT + end;
            end += kos_up(mine.bytes, KOS_CACHE_LINE);
        } else {
            uint64_t address = (uint64_t)(uintptr_t)(w->send + mine.at);
            if (readable < 0)
                readable = g->direct && !kos_read(g, g->rank, &byte, address, 1);
            offer->parts[r].at = readable ? address : KOS_LATER;
            w->awaits_readers |= readable > 0;
            later = !readable && mine.bytes > later ? mine.bytes : later;
        }
    }
    offer->later = later;
}

// The first rank that sends another number of bytes than its receiver expects, or -1.  Sets the counts of the group.
// Each rank compares all pairs before any rank has read data, so all ranks find the same one.
static int differing(kos_group *g, const kos_work *w) {
    for (int from = 0; from < g->size; from++)
        for (int to = 0; to < g->size; to++) {
            const uint64_t expected = offer_of(g, w, to)->parts[from].expects;
            const uint64_t sent = offer_of(g, w, from)->parts[to].bytes;
            if (sent != expected) {
                memcpy(g->counts, (uint64_t[]){(uint64_t)to, expected, sent}, sizeof g->counts);
                return from;
            }
        }
    return -1;
}

// Copies what rank r offers this one; returns an errno.
static int take_part(kos_group *g, kos_work *w, int r) {
    const kos_part mine = w->prepared->parts[g->size + r];
    const kos_offer *offer = offer_of(g, w, r);
    const uint64_t at = offer->parts[g->rank].at;
    uint8_t *to = w->recv + mine.at;
    if (r == g->rank) {
        const uint8_t *own = w->send ? w->send + w->prepared->parts[r].at : NULL;
        if (own && w->recv && own != to)
            memmove(to, own, mine.bytes);
    } else if (at != KOS_LATER && mine.bytes) {
        if (!(at & KOS_IN_SLOT))
            return kos_read(g, r, to, at, mine.bytes);
        memcpy(to, (const uint8_t *)offer + (at ^ KOS_IN_SLOT), mine.bytes);
    }
    return 0;
}

int kos_take_offers(kos_group *g, kos_work *w) {
    const kos_prepared *p = w->prepared;
    uint64_t later = 0;
    int error = 0;
    w->unreadable = 0;
    for (int r = 0; r < g->size; r++) {
        uint64_t theirs = offer_of(g, w, r)->later;
        later = theirs > later ? theirs : later;
    }
    if (p->operation == KOS_ALL_TO_ALL && (w->unreadable = 1 + differing(g, w)))
        error = -1;
    else
        for (int r = 0; r < g->size && !error; r++)
            if (kos_is_in(p->patterns[0]->sources, r, p->root) && (error = take_part(g, w, r)))
                w->unreadable = r + 1;
    if (error > 0)  // its process has ended, or it has failed and freed its memory: the checks find it
        return KOS_PENDING;
    // A rank that has failed may have changed its memory while it was read.
    w->result = kos_failure(g, w->sequence);
    if (error && w->result.status != KOS_FAILED)
        w->result = (kos_result){KOS_FAILED, KOS_COUNTS, (uint16_t)(w->unreadable - 1), w->sequence};
    if (w->result.status == KOS_FAILED)
        return KOS_FAILED;
    w->stages = 1 + (later + p->per_stage - 1) / p->per_stage;
    g->stage += w->stages - 1;
    return KOS_DONE;
}
