// Messages.  A mailbox has a ring of headers and room for data.
//
// A short message is eager: its sender copies it to the header or to the room, and is done.  A message that is long, or
// exceeds the credits, uses the rendezvous protocol: its header has the address of the data.  The receiver reads the
// data in one copy, and answers.  If it cannot read the memory, it answers that it is ready, and the data comes in
// pieces.
//
// A rank takes all messages that have arrived, and keeps those without a receive.  So messages of one tag are received
// in order, and a program may receive different tags in any order.
#include "core.h"

#include <stdlib.h>
#include <string.h>

enum kind { INLINE, ROOM, ADDRESS, STREAM, PIECE };
// The sender writes CANCELLED; a refusal is REFUSED + what was expected.  DROPPED: the receiver has found CANCELLED, so
// the word may be used again.
enum answer { READ = 1, CANCELLED, READY, DROPPED };
enum { OVERHEAD_BYTES = 256 };               // of an eager message, that counts against the credits
#define NO_ANSWER UINT32_MAX
#define REFUSED (UINT64_C(1) << 63)
#define WHAT (((UINT64_C(1) << KOS_KIND_AT) - 1))

static void push(kos_queue *q, kos_message *m) {
    m->next = NULL;
    *q->end = m;
    q->end = &m->next;
}

static void drop(kos_queue *q, kos_message *m) {
    kos_message **at = &q->first;
    while (*at && *at != m)
        at = &(*at)->next;
    if (!*at)
        return;
    *at = m->next;
    if (q->end == &m->next)
        q->end = at;
    m->next = NULL;
}

static uint64_t end_of(const kos_message *m) { return m->bytes << 8 | (m->what >> KOS_DTYPE_AT & 0xff); }

// --- The sender ----------------------------------------------------------------------------------------------------

// A place in the room, or UINT64_MAX.  Places are freed in order, as messages are taken.
static uint64_t reserve(const kos_group *g, kos_box *box, uint64_t bytes, uint64_t taken) {
    const uint64_t room = g->layout.room, length = kos_up(bytes, KOS_CACHE_LINE);
    uint64_t at = box->room_at, free = taken ? box->ends[(taken - 1) % KOS_HEADERS] : 0;
    if (at % room + length > room || (taken == box->sent && (g->marks || bytes < KOS_MARKED_BYTES)))
        at += (room - at % room) % room;  // to the start, which the caches hold
    if (taken == box->sent)
        free = at;
    if (length > room || at + length - free > room)
        return UINT64_MAX;
    box->room_at = at + length;
    return at % room;
}

static uint32_t new_answer(const kos_group *g, kos_box *box) {
    const uint32_t most = g->layout.answers;
    if (box->free_count)
        return box->free[--box->free_count];
    if (!box->free && !(box->free = malloc(most * sizeof *box->free)))
        return most;
    if (box->answers < most)
        return box->answers++;
    uint32_t index = 0;  // of a cancelled message
    while (index < most && atomic_load_explicit(&box->out->answers[index], memory_order_acquire) != DROPPED)
        index++;
    return index;
}

static void free_answer(kos_box *box, kos_message *m) {
    atomic_store_explicit(&box->out->answers[m->answer], 0, memory_order_relaxed);
    box->free[box->free_count++] = m->answer;
}

// Replaces an answer; or returns the one that is there instead.  Acquire and release: loads and stores of the data come
// before, and neither side sees its own state change before the answer.
static uint64_t replace(_Atomic uint64_t *answer, uint64_t old, uint64_t new) {
    atomic_compare_exchange_strong_explicit(answer, &old, new, memory_order_acq_rel, memory_order_acquire);
    return old;
}

static void publish(kos_box *box, kos_mail *mail, uint64_t what, uint64_t bytes) {
    mail->what = what;
    mail->bytes = bytes;
    box->ends[box->sent % KOS_HEADERS] = box->room_at;
    box->sent++;
    KOS_POINT(KOS_AT_SEND);
    // Release: whoever acquires the number finds the header, the data, and the cleared answer.
    atomic_store_explicit(&mail->number, box->sent, memory_order_release);
    KOS_POINT(KOS_AT_SENT);
}

// The next header; NULL if none is free.  Acquire: the receiver has read what this rank may now write.
static kos_mail *header_of(kos_box *box, uint64_t *taken) {
    *taken = atomic_load_explicit(&box->out->taken, memory_order_acquire);
    return box->sent - *taken < KOS_HEADERS ? &box->out->mail[box->sent % KOS_HEADERS] : NULL;
}

static int send(kos_group *g, kos_box *box, kos_message *m) {
    uint64_t taken, at, credit = box->eager + m->bytes + OVERHEAD_BYTES;
    kos_mail *mail = header_of(box, &taken);
    if (!mail)
        return 0;
    // Relaxed: the number bounds what the receiver keeps, and orders no data.
    const int eager = credit - atomic_load_explicit(&box->out->received, memory_order_relaxed) <= KOS_CREDIT_BYTES;
    if (eager && m->bytes <= KOS_INLINE_MESSAGE) {
        memcpy(mail->small, m->data, m->bytes);
        box->eager = credit;
        publish(box, mail, m->what | (uint64_t)INLINE << KOS_KIND_AT, m->bytes);
    } else if (eager && m->bytes <= g->layout.room / 4) {
        if ((at = reserve(g, box, m->bytes, taken)) == UINT64_MAX)
            return 0;  // the receiver makes room, whatever it waits for
        memcpy(box->out_room + at, m->data, m->bytes);
        mail->where = at;
        box->eager = credit;
        publish(box, mail, m->what | (uint64_t)ROOM << KOS_KIND_AT, m->bytes);
    } else {
        if ((m->answer = new_answer(g, box)) == g->layout.answers)
            return 0;
        const int kind = g->direct ? ADDRESS : STREAM;
        mail->where = (uint64_t)(uintptr_t)m->data;
        mail->answer = m->answer;
        atomic_store_explicit(&box->out->answers[m->answer], 0, memory_order_relaxed);
        publish(box, mail, m->what | (uint64_t)kind << KOS_KIND_AT, m->bytes);
        m->state = KOS_UNANSWERED;
        return 1;
    }
    m->state = KOS_COMPLETE;
    return 1;
}

static void send_pieces(kos_group *g, kos_box *box, kos_message *m) {
    const uint64_t most = g->layout.room / 4;
    uint64_t taken, at;
    kos_mail *mail;
    while (m->moved < m->bytes && (mail = header_of(box, &taken))) {
        uint64_t bytes = m->bytes - m->moved < most ? m->bytes - m->moved : most;
        if ((at = reserve(g, box, bytes, taken)) == UINT64_MAX)
            return;
        memcpy(box->out_room + at, m->data + m->moved, bytes);
        mail->where = at;
        mail->answer = m->answer;
        publish(box, mail, (uint64_t)PIECE << KOS_KIND_AT, bytes);
        m->moved += bytes;
    }
}

static void step_send(kos_group *g, kos_box *box, kos_message *m) {
    if (m->state == KOS_QUEUED && (!box->queued.first || box->queued.first == m) && send(g, box, m))
        drop(&box->queued, m);
    if (m->state != KOS_UNANSWERED)
        return;
    // Acquire: the receiver has read the data before it answered, so the program may change it.
    uint64_t answer = atomic_load_explicit(&box->out->answers[m->answer], memory_order_acquire);
    if (answer == READY) {
        send_pieces(g, box, m);
        if (m->moved < m->bytes)
            return;
    } else if (!answer)
        return;
    m->state = answer & REFUSED ? KOS_REFUSED : KOS_COMPLETE;
    m->refusal = answer & ~REFUSED;
    free_answer(box, m);
}

// --- The receiver --------------------------------------------------------------------------------------------------

// Answers, or returns 0 if the sender has cancelled the message.
static int reply(kos_box *box, uint64_t index, uint64_t answer) {
    if (!replace(&box->in->answers[index], 0, answer))
        return 1;
    atomic_store_explicit(&box->in->answers[index], DROPPED, memory_order_release);
    return 0;
}

// Counts an eager message as received.  Only this rank writes the number.
static void give_credit(kos_box *box, uint64_t bytes) {
    uint64_t received = atomic_load_explicit(&box->in->received, memory_order_relaxed);
    atomic_store_explicit(&box->in->received, received + bytes + OVERHEAD_BYTES, memory_order_release);
}

// Receives a message; 0 if its sender has cancelled it, so that the receive waits for another one.
static int deliver(kos_group *g, kos_box *box, kos_message *m, const kos_arrival *from, const uint8_t *data) {
    const int kind = (int)(from->what >> KOS_KIND_AT), same = (from->what & WHAT) == m->what && from->bytes == m->bytes;
    m->refusal = from->bytes << 8 | (from->what >> KOS_DTYPE_AT & 0xff);
    if (kind <= ROOM) {
        give_credit(box, from->bytes);
        if (same)
            memcpy(m->data, data, m->bytes);
        kos_mark_written(g, data, from->bytes);
    } else if (!same) {
        if (!reply(box, from->answer, REFUSED | end_of(m)))
            return 0;
    } else {
        if (atomic_load_explicit(&box->in->answers[from->answer], memory_order_acquire))
            return reply(box, from->answer, READ);
        // An error: the memory is a device's, and the data comes in pieces; or the sender has ended, which the checks
        // find, or has freed its memory after a failure.
        const int read = !m->bytes || (kind == ADDRESS && !kos_read(g, m->peer, m->data, from->where, m->bytes));
        KOS_POINT(KOS_AT_DELIVER);
        if (!reply(box, from->answer, read ? READ : READY))
            return 0;
        m->answer = read ? NO_ANSWER : (uint32_t)from->answer;
        m->moved = 0;
        // A rank that has failed may have changed the data while it was read.
        m->state = read && kos_failure(g, m->sequence).status == KOS_PENDING ? KOS_COMPLETE : KOS_STREAMED;
        return 1;
    }
    m->state = same ? KOS_COMPLETE : KOS_REFUSED;
    return 1;
}

static int keep(kos_box *box, const kos_arrival *a, const uint8_t *data) {
    const uint64_t bytes = a->what >> KOS_KIND_AT <= ROOM ? a->bytes : 0;
    kos_arrival *kept = malloc(sizeof *kept + bytes);
    if (!kept)
        return -1;  // the message stays in the mailbox
    *kept = *a;
    memcpy(kept->data, data, bytes);
    *box->arrived_end = kept;
    box->arrived_end = &kept->next;
    return 0;
}

// A piece of a message.  If its receive was cancelled it is dropped.
static void take_piece(const kos_group *g, kos_box *box, const kos_mail *mail) {
    kos_message *m = box->streamed.first;
    while (m && m->answer != mail->answer)
        m = m->next;
    if (!m || m->moved + mail->bytes > m->bytes)
        return;
    memcpy(m->data + m->moved, box->in_room + mail->where, mail->bytes);
    kos_mark_written(g, box->in_room + mail->where, mail->bytes);
    m->moved += mail->bytes;
    if (m->moved == m->bytes) {
        m->state = KOS_COMPLETE;
        drop(&box->streamed, m);
    }
}

static const kos_mail *next_mail(const kos_box *box, uint64_t taken) {
    const kos_mail *mail = &box->in->mail[taken % KOS_HEADERS];
    // Acquire: the header and the data were stored before the number.
    return atomic_load_explicit(&mail->number, memory_order_acquire) == taken + 1 ? mail : NULL;
}

static int is_for(const kos_message *m, uint64_t what) { return !((m->what ^ what) << (64 - KOS_DTYPE_AT)); }

// Takes what has arrived, until that receive is complete, if one is given.
static void take(kos_group *g, kos_box *box, const kos_message *last) {
    const kos_mail *mail;
    while ((!last || last->state != KOS_COMPLETE) && (mail = next_mail(box, box->taken))) {
        const int kind = (int)(mail->what >> KOS_KIND_AT);
        const uint8_t *data = kind == ROOM || kind == PIECE ? box->in_room + mail->where : mail->small;
        if (kind == PIECE)
            take_piece(g, box, mail);
        else {
            kos_arrival a = {.what = mail->what, .bytes = mail->bytes};
            if (kind != INLINE) {
                a.where = mail->where;
                a.answer = mail->answer;
            }
            kos_message *m = box->expected.first;
            while (m && !is_for(m, mail->what))
                m = m->next;
            if (!m) {
                if (keep(box, &a, data))
                    return;
            } else if (deliver(g, box, m, &a, data)) {
                drop(&box->expected, m);
                if (m->state == KOS_STREAMED)
                    push(&box->streamed, m);
            }
        }
        KOS_POINT(KOS_AT_TAKE);
        box->taken++;
        // Release: the sender writes to the header and the room only after the loads above.
        atomic_store_explicit(&box->in->taken, box->taken, memory_order_release);
    }
}

// Receives a message that has arrived before: then no other receive expects it.
static void find_arrival(kos_group *g, kos_box *box, kos_message *m) {
    for (kos_arrival **at = &box->arrived, *each; (each = *at) && m->state == KOS_EXPECTED;) {
        if (!is_for(m, each->what)) {
            at = &each->next;
            continue;
        }
        deliver(g, box, m, each, each->data);
        *at = each->next;
        if (box->arrived_end == &each->next)
            box->arrived_end = at;
        free(each);
    }
}

// --- Works ---------------------------------------------------------------------------------------------------------

void kos_mail_start(kos_group *g, kos_work *w) {
    const kos_prepared *p = w->prepared;
    w->send_end = w->recv_end = (kos_message){.state = KOS_COMPLETE, .peer = g->rank};
    if (p->operation != KOS_RECV) {
        w->send_end = (kos_message){.data = (uint8_t *)(uintptr_t)w->send, .what = p->tag, .bytes = p->send_bytes,
                                    .sequence = w->sequence, .peer = p->dst, .state = KOS_QUEUED};
        step_send(g, &g->boxes[p->dst], &w->send_end);
        if (w->send_end.state == KOS_QUEUED)
            push(&g->boxes[p->dst].queued, &w->send_end);
    }
    if (p->operation != KOS_SEND) {
        kos_box *from = &g->boxes[p->src];
        kos_message *r = &w->recv_end;
        *r = (kos_message){.data = w->recv, .what = p->recv_tag, .bytes = p->recv_bytes, .sequence = w->sequence,
                           .peer = p->src, .state = KOS_EXPECTED};
        find_arrival(g, from, r);
        if (kos_is_open(r))
            push(r->state == KOS_EXPECTED ? &from->expected : &from->streamed, r);
    }
}

// Receives the next message instead of one in pieces, which is cancelled.
static void receive_next(kos_group *g, kos_box *box, kos_message *m) {
    drop(&box->streamed, m);
    atomic_store_explicit(&box->in->answers[m->answer], DROPPED, memory_order_release);
    m->state = KOS_EXPECTED;
    find_arrival(g, box, m);
    if (m->state == KOS_EXPECTED) {  // before those of this tag that were posted later
        m->next = box->expected.first;
        box->expected.first = m;
        if (!m->next)
            box->expected.end = &m->next;
    } else if (m->state == KOS_STREAMED)
        push(&box->streamed, m);
}

int kos_mail_step(kos_group *g, kos_work *w) {
    kos_message *r = &w->recv_end, *s = &w->send_end;
    kos_box *from = &g->boxes[r->peer];
    if (r->state == KOS_EXPECTED || r->state == KOS_STREAMED) {
        // Before what arrives is taken: else the word may be that of a later message.
        const int cancelled = r->state == KOS_STREAMED && r->answer != NO_ANSWER
            && atomic_load_explicit(&from->in->answers[r->answer], memory_order_acquire) == CANCELLED;
        take(g, from, r);
        if (cancelled && r->state == KOS_STREAMED)
            receive_next(g, from, r);
    }
    if (s->state == KOS_QUEUED || s->state == KOS_UNANSWERED)
        step_send(g, &g->boxes[s->peer], s);
    if (r->state == KOS_COMPLETE && s->state == KOS_COMPLETE) {
        kos_set(w, 0, KOS_ENDED);
        return KOS_DONE;
    }
    if (kos_is_open(r) || kos_is_open(s))
        return KOS_PENDING;  // the end that is left completes, even beside a refused one
    const int received = r->state == KOS_REFUSED;
    const kos_message *refused = received ? r : s;
    w->result = (kos_result){KOS_FAILED, received ? KOS_MESSAGE : KOS_REFUSED_MESSAGE, (uint16_t)refused->peer,
                             refused->refusal};
    return KOS_FAILED;
}

// Ends what is not complete.  The receiver of a cancelled message receives the next one.
void kos_mail_cancel(kos_group *g, kos_work *w) {
    kos_message *r = &w->recv_end, *s = &w->send_end;
    kos_box *to = &g->boxes[s->peer], *from = &g->boxes[r->peer];
    const int own = g->generation == kos_forks;  // in a forked process it is the parent's
    if (r->state == KOS_EXPECTED)
        drop(&from->expected, r);
    else if (r->state == KOS_STREAMED)
        drop(&from->streamed, r);
    // If the sender has not cancelled it too, it uses the word until it finds READ.
    if (own && r->state == KOS_STREAMED && r->answer != NO_ANSWER
        && replace(&from->in->answers[r->answer], READY, READ) == CANCELLED)
        atomic_store_explicit(&from->in->answers[r->answer], DROPPED, memory_order_release);
    if (s->state == KOS_QUEUED)
        drop(&to->queued, s);
    if (!own || s->state != KOS_UNANSWERED)
        return;
    _Atomic uint64_t *word = &to->out->answers[s->answer];
    const uint64_t answer = replace(word, 0, CANCELLED);
    if (answer && (answer != READY || replace(word, READY, CANCELLED) != READY))
        free_answer(to, s);
}

// Whether its sender has cancelled a message; a receive that comes to it passes it.
static int is_cancelled(const kos_box *box, const kos_arrival *a) {
    return a->what >> KOS_KIND_AT > ROOM
        && atomic_load_explicit(&box->in->answers[a->answer], memory_order_acquire) == CANCELLED;
}

int kos_is_kept(const kos_arrival *a) { return a->what >> KOS_KIND_AT <= ROOM; }

uint64_t kos_tag(const kos_arrival *a) { return a->what & ((UINT64_C(1) << KOS_DTYPE_AT) - 1); }

const kos_arrival *kos_mail_first(kos_group *g, int rank, uint64_t tag) {
    kos_box *box = &g->boxes[rank];
    if (kos_is_over(g))
        return NULL;
    take(g, box, NULL);
    const kos_arrival *first = box->arrived;
    while (first && ((tag == KOS_ANY_TAG ? kos_tag(first) >= KOS_COLLECTIVE_TAGS
                                         : (first->what ^ tag) << (64 - KOS_DTYPE_AT) != 0)
                     || is_cancelled(box, first)))
        first = first->next;
    return first;
}

void kos_mail_advance(kos_group *g) {
    for (int r = 0; r < g->size; r++)
        take(g, &g->boxes[r], NULL);
}
