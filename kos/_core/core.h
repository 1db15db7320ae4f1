// The interface of kos' core: what a call is in C, what it returns, and the layout of the memory that the ranks of one
// host share.  Nothing here depends on Python; module.c is the Python interface.
//
// C handles flags, the failure word and a clock.  Python numbers the calls, checks processes and deadlines, and raises
// errors with a text.  A start publishes the fingerprint of the call, and copies its data.  Every later step may be
// repeated until it returns DONE or FAILED.
//
// Ordering.  Every word of the segment has one writer, except the failure word (compare-and-swap).  A writer stores the
// payload, then the flag with release; a reader loads the flag with acquire, then the payload.  This holds on machines
// that reorder stores (aarch64) as on x86-64.  Where more is needed, a comment gives the reason.
#ifndef KOS_CORE_H
#define KOS_CORE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// Also compiled for AVX2, which the loader chooses where the CPU has it: 10 to 20% faster for 1 to 64 KB.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) \
    && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define KOS_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define KOS_WIDE
#endif

// What each step returns.
enum kos_status {
    KOS_DONE,     // the result is in the caller's array
    KOS_PENDING,  // not yet: step again
    KOS_FAILED,   // code, rank and word describe the failure
};

// Why a call failed.
enum kos_code {
    KOS_MISMATCH = 1,  // `rank` has begun another call with this number
    KOS_REPORTED,     // Python has reported a failure, whose text is in its part of the segment
    KOS_FORKED,       // this process was forked from the one that made the group
    KOS_CLOSED,       // this rank has closed the group
    KOS_COUNTS,       // `rank` sends another number of bytes than its receiver expects: kos_group.counts
    KOS_MESSAGE,      // the message of `rank` and its receive differ in bytes or dtype; only these two ends fail
    KOS_REFUSED_MESSAGE,  // the same, for the sender: `rank` expects other bytes or another dtype
};

// `word` is the failure word for KOS_REPORTED, which is the same on all ranks; for KOS_MISMATCH the number of the call,
// for the two of messages what the other end has: its bytes << 8 | its dtype.
typedef struct {
    uint8_t status, code;
    uint16_t rank;
    uint64_t word;
} kos_result;
#define KOS_RESULT(status) ((kos_result){status, 0, 0, 0})

// The failure word: the rank that reported, and the first call that it concerns.  Python has written the text before.
#define KOS_WORD(rank, sequence) (UINT64_C(1) << 63 | (uint64_t)(rank) << 44 | ((sequence) & KOS_WORD_SEQUENCE))
#define KOS_WORD_SEQUENCE ((UINT64_C(1) << 44) - 1)  // of a message, which every failure ends

// --- The segment ---------------------------------------------------------------------------------------------------
// header | a line of flags per rank | a ring of fingerprints per rank | a ring of resized calls per rank | descriptions
// of calls per rank (Python's) | slots | areas | a mailbox per pair of ranks.  Python makes the memory and maps it; offsets are in kos_layout.

enum {
    KOS_MAX_RANKS = 256,
    KOS_LINE = 128,              // bytes: two cache lines, because prefetchers fetch them in pairs
    KOS_CACHE_LINE = 64,
    KOS_RING = 1024,             // calls of a rank that is further ahead are not compared
    KOS_TEXTS = 2048,            // descriptions of calls per rank
    KOS_TEXT_BYTES = 1024,
    KOS_SLOT_DEPTH = 64,         // slots of a rank: so far it may be ahead, if its payloads are in the slots
    KOS_AREA_DEPTH = 2,          // areas of a rank, for larger payloads: one is filled while the other is read
    KOS_AREA_BYTES = 128 << 10,  // the largest payload of a stage, unless there are many ranks
    KOS_AREAS_BYTES = 16 << 20,  // all areas
    KOS_INLINE_BYTES = 48,       // a payload up to this shares the cache line of its stamp: one line is transferred
    KOS_MARKED_BYTES = 8 << 10,  // kos_mark_written
    KOS_APART = 2048,            // from a page to an area: EPYC copies slowly to 1 to 31 bytes above the source % 4096
    KOS_HEADERS = 64,            // messages of a mailbox that the receiver has not taken
    KOS_ANSWERS = 64 << 10,      // large messages of a mailbox that are not read yet, unless there are many ranks
    KOS_ANSWERS_BYTES = 256 << 20,
    KOS_INLINE_MESSAGE = 40,     // a message up to this shares the cache line of its header
    KOS_ROOM_BYTES = 256 << 10,  // for the data of a mailbox, unless there are many ranks
    KOS_ROOMS_BYTES = 256 << 20,
    KOS_CREDIT_BYTES = 4 << 20,  // of messages that a receiver buffers for each sender until they are received
};
#define KOS_WAIT_NS INT64_C(10000000)  // a wait without progress: then Python polls, and checks processes

// Flags of one rank, which alone writes them.  The first two are the core's, the others Python's.
typedef struct {
    _Atomic uint64_t arrived;  // calls begun: the entries of the ring below this number are valid
    _Atomic uint64_t stages_read;     // stages whose slots this rank has read
    _Atomic uint64_t closed, pid, started;
} kos_line;

// An entry for a call that the core prepared from a call of another size, which Python has described.  The entry
// belongs to the call in the ring of fingerprints if the stamps are equal.  Other calls do not write an entry.
typedef struct {
    _Atomic uint64_t stamp;
    _Atomic uint64_t described;  // the fingerprint of the call that is described
    _Atomic uint64_t count;      // of this call, as in kos_request
    uint64_t unused;
} kos_resized;

// One rank's data of one stage: here, or in an area.  stamp = mark + sequence + (stage of the call << 56); the mark
// stands for this call and all before it.  So one load shows that the rank has arrived, that its calls are the same,
// and that its payload is there.  `stages_read` is a copy of the line's flag, which saves a transfer of the line.
typedef struct {
    _Atomic uint64_t stamp;
    uint64_t stages_read;
    uint8_t small[KOS_INLINE_BYTES];
} kos_slot;

// What a rank offers the others in the first stage of KOS_ANNOUNCED (direct.c).  Then comes data.
typedef struct {
    uint64_t later;  // the most bytes that it sends to a rank by later stages
    struct {
        uint64_t at, bytes;  // an address, or KOS_IN_SLOT + the place in the slot, or KOS_LATER
        uint64_t expects;    // the bytes that it expects from that rank
    } parts[];
} kos_offer;
#define KOS_IN_SLOT (UINT64_C(1) << 63)
#define KOS_LATER UINT64_MAX

// The header of a message.  number = messages of this mailbox before it + 1.
typedef struct {
    _Atomic uint64_t number;
    uint64_t what;   // tag, dtype << KOS_DTYPE_AT, kind << KOS_KIND_AT
    uint64_t bytes;
    union {
        uint8_t small[KOS_INLINE_MESSAGE];
        struct {
            uint64_t where;   // its place in the room, or the address of the data
            uint64_t answer;  // the index of the word that its receiver answers in
        };
    };
} kos_mail;

// Messages from one rank to another.
typedef struct {
    // Written by the receiver: messages taken, and bytes of those that it has received.
    _Atomic uint64_t taken, received;
    uint64_t unused[KOS_LINE / 8 - 2];
    kos_mail mail[KOS_HEADERS];
    _Atomic uint64_t answers[];  // then the room
} kos_mailbox;

typedef struct {
    size_t lines, rings, resized, texts, slots, areas, area_bytes, area_pitch, mailboxes, room_at, room, mailbox_pitch, total;
    uint32_t answers;  // words of a mailbox
} kos_layout;  // bytes; the places from the start, that of the room in its mailbox

// --- Reductions ----------------------------------------------------------------------------------------------------

enum kos_op { KOS_SUM, KOS_PROD, KOS_MIN, KOS_MAX, KOS_AVG, KOS_BAND, KOS_BOR, KOS_BXOR, KOS_OPS };

enum { KOS_FLOAT32 = 1 };  // a dtype; float16 and bfloat16 follow

typedef void (*kos_combine)(void *out, const void *a, const void *b, size_t count);  // out may be a or b

typedef struct {
    kos_combine combine;
    void (*widen)(float *out, const void *in, size_t count);  // to fp32, in which `combine` works; NULL: as they are
    void (*narrow)(void *out, const float *in, size_t count);
    void (*finish)(void *x, size_t count, int ranks);  // of the result: divides an average; makes a boolean 0 or 1
    unsigned bytes, pair;  // of an element; whether it is a pair of numbers
} kos_reduction;

// --- A call --------------------------------------------------------------------------------------------------------

enum kos_operation {
    KOS_BARRIER, KOS_BROADCAST, KOS_REDUCE, KOS_ALL_REDUCE, KOS_ALL_GATHER, KOS_GATHER, KOS_SCATTER, KOS_ALL_TO_ALL,
    KOS_REDUCE_SCATTER, KOS_SCAN, KOS_EXSCAN, KOS_SEND, KOS_RECV, KOS_SEND_RECV, KOS_OPERATIONS,
};

enum kos_algorithm {
    KOS_SLOTS,     // through the slots, in as many stages as the largest part needs
    KOS_TWO_SHOT,  // a reduction in which each rank reduces its part: stages of reduce_scatter and of gather alternate
    KOS_ANNOUNCED,  // the first stage says where the data is: in the slot, in the rank's memory, or in later stages
    KOS_POINT_TO_POINT,  // messages
};

// The part of an array that goes to, or comes from, one rank.
typedef struct {
    uint64_t at, bytes;
} kos_part;

// Who puts data, who takes it, and from whom: rank sets, relative to the root or this rank.
enum kos_who { KOS_NOBODY, KOS_EVERYBODY, KOS_ROOT, KOS_OTHERS, KOS_UP_TO_ME, KOS_BELOW_ME };
typedef struct {
    uint8_t putters, takers, sources;
    uint8_t per_rank;  // a slot has a part for each rank, else all ranks read the same data
    uint8_t reduces;  // what is taken is reduced, else copied
} kos_pattern;

// What a call is, as Python knows it.
typedef struct {
    uint64_t fingerprint;  // equal on two ranks exactly if their calls match; 56 bits
    uint64_t sizeless;     // the fingerprint of the call without its count, from which kos_sized makes others; 0: unknown
    int operation, dtype, op, root;
    uint64_t count;  // elements: of the part of one rank in all_gather, reduce_scatter and the like
    int varies;      // a v-form, or a receive of any length
    const uint64_t *send_counts, *recv_counts;  // of a v-form, in elements by rank; NULL where this rank has none
    int dst, src;    // of messages; KOS_ANY_RANK: a receive from any rank
    uint64_t tag, recv_tag;
} kos_request;

// How a call runs on this rank: immutable, and the same for every array.
typedef struct {
    uint64_t fingerprint;
    kos_reduction reduction;
    const kos_pattern *patterns[2];  // of the stages, by number % 2
    uint64_t send_bytes, recv_bytes;  // of the arrays
    uint64_t per_stage, stages;      // bytes of a part in one stage; stages, 0: known after the first one
    unsigned alignment;
    uint8_t operation, algorithm;
    uint8_t small;                   // the payload shares the cache line of the stamp
    uint8_t synchronizes;            // all ranks wait for all
    uint8_t awaits_all;              // this rank waits for all in its first stage
    uint8_t any_length;              // a receive of bytes
    int root, dst, src;
    uint64_t tag, recv_tag;          // of messages, with the dtype
    kos_part parts[];                // send parts by rank, then those received
} kos_prepared;

enum { KOS_ANY_RANK = -1 };

enum kos_phase { KOS_NOT_PUT, KOS_PUT, KOS_DRAIN, KOS_ENDED, KOS_BROKEN };

// One end of a message.
enum kos_end { KOS_COMPLETE, KOS_QUEUED, KOS_EXPECTED, KOS_STREAMED, KOS_UNANSWERED, KOS_REFUSED };
typedef struct kos_message {
    uint8_t *data;
    uint64_t what, bytes, moved;  // moved: bytes, of a message in pieces
    uint64_t sequence;            // of the collective that it belongs to; KOS_WORD_SEQUENCE: none
    int peer, state;
    uint32_t answer;
    uint64_t refusal;             // what the other end has
    struct kos_message *next;     // of the same state and peer
} kos_message;

// One start in flight: everything that differs between two starts of one Prepared.
typedef struct kos_work {
    const kos_prepared *prepared;  // lives as long as the Work
    const uint8_t *send;
    uint8_t *recv;
    uint64_t sequence, mark;     // of its stamps
    uint64_t first, stages;      // the number of its first stage, and how many there are; 0: not known yet
    uint64_t progress;           // stage of the call << 3 | phase
    int peer;                    // the first rank whose payload has not been seen
    int unreadable;              // 1 + a rank whose memory could not be read, or 0
    uint8_t awaits_readers;      // ends when all ranks have read
    kos_result result;           // of a KOS_BROKEN one
    struct kos_work *next;
    kos_message send_end, recv_end;
} kos_work;

// A message that has arrived before its receive.
typedef struct kos_arrival {
    uint64_t what, bytes, where, answer;
    struct kos_arrival *next;
    uint8_t data[];
} kos_arrival;

typedef struct {
    kos_message *first, **end;  // the pointer to the next one
} kos_queue;

// The messages between this rank and another one.
typedef struct {
    kos_mailbox *out, *in;
    uint8_t *out_room, *in_room;
    uint64_t sent, taken;       // messages
    uint64_t room_at, ends[KOS_HEADERS];  // bytes of the room ever used: at all, and through each message
    uint64_t eager;             // bytes ever sent that count against KOS_CREDIT_BYTES
    uint32_t answers;           // words in use at least once
    uint32_t free_count;
    uint32_t *free;             // words that are free again
    kos_queue queued, expected;  // sends without a header, receives without a message
    kos_queue streamed;         // receives in pieces
    kos_arrival *arrived, **arrived_end;
    int64_t checked;            // when the process of that rank was last checked (direct.c)
} kos_box;

// One rank's end of a segment.  One thread at a time may call any function but kos_rest: under Python, the GIL.
typedef struct {
    uint8_t *memory;
    kos_layout layout;
    _Atomic uint64_t *failure;  // 0, or the first failure of the group: the only word with several writers
    kos_line *line;    // this rank's
    int rank, size;
    int generation;    // kos_forks when it was made
    int closed;
    uint64_t direct;   // a part above so many bytes is read from another rank's memory; 0: that cannot be done
    int marks;         // whether ranks write to what they have read (kos_mark_written)
    int64_t spin_ns;   // a wait holds the GIL for so long; 0 where ranks are threads
    int yields;        // whether ranks exceed the cores: a wait leaves its core to others
    uint64_t counts[3];  // of the last KOS_COUNTS: the receiver, the bytes that it expects, those that are sent
    uint64_t stage;    // of the next call that uses slots
    uint64_t read;     // stages that all ranks have read, as far as this one knows
    uint64_t mark;     // of the last call
    uint64_t same;     // the calls below this are the same on all ranks
    kos_work *head, *tail;     // the outstanding collectives, in the order of their start
    kos_work *messages;        // the outstanding messages
    kos_work *over;            // Works of which `ended` is not called yet
    void (*ended)(kos_work *);  // called once for each Work when it is no longer outstanding; may call the core
    kos_box *boxes;            // by rank
    int last_source;           // the last rank from which a receive from any rank has got a message
    uint8_t *scratch;          // KOS_AREA_BYTES
    // The slots of all ranks for stages 0, 1, ..., 2 * KOS_SLOT_DEPTH - 1, and their areas, alike.  The place of rank r
    // is that of rank r - 1 KOS_SLOT_DEPTH stages later: a CPU core writes cache lines that it has read faster than
    // lines that others have read.
    uint8_t **slots, **areas;
} kos_group;

// --- Launches on a GPU ---------------------------------------------------------------------------------------------
// The launches that one start of a call queues: kernels (by the driver's cuLaunchKernelEx), copies, and functions of
// NCCL.  Python loads both libraries, passes the addresses of their functions, and packs these structures.

// As CUDA's CUlaunchConfig.
typedef struct {
    uint32_t grid[3], block[3], shared, unused;
    uint64_t stream, attributes, count;
} kos_config;

enum kos_source { KOS_SEND_ADDRESS, KOS_RECV_ADDRESS, KOS_STREAM, KOS_SOURCES };
enum { KOS_MOST_WORDS = 128, KOS_PLAN_AT = 72 };  // PLAN_AT: bytes of objects before the numbers of a queued_call

// The words are the parameters of a kernel, or the arguments of a function.  Patches follow them.  They say which words
// differ between two starts: such a word is a source plus an offset.
typedef struct {
    uint64_t function;  // an address
    uint64_t kernel;    // a CUfunction, or 0
    uint64_t words, patches;
    uint64_t closes;    // ncclGroupEnd is called even if one of the `closes` launches before it has failed
    kos_config config;  // of a kernel
    uint64_t data[];
} kos_launch;
typedef struct {
    uint64_t word, source, offset;
} kos_patch;

enum { KOS_DTYPE_AT = 48, KOS_KIND_AT = 56 };
#define KOS_ANY_TAG UINT64_MAX
#define KOS_COLLECTIVE_TAGS (UINT64_C(1) << 20)  // the tags of collectives, which KOS_ANY_TAG excludes, begin here

extern int kos_forks;  // counts the forks that led to this process; a group of another one is refused
void kos_forked(void);

static inline kos_line *kos_line_of(const kos_group *g, int rank) {
    return (kos_line *)(g->memory + g->layout.lines + (size_t)rank * KOS_LINE);
}

static inline kos_slot *kos_slot_of(const kos_group *g, uint64_t stage, int rank) {
    return (kos_slot *)g->slots[stage % (2 * KOS_SLOT_DEPTH) * (uint64_t)g->size + (uint64_t)rank];
}

static inline uint8_t *kos_area_of(const kos_group *g, uint64_t stage, int rank) {
    return g->areas[stage % (2 * KOS_AREA_DEPTH) * (uint64_t)g->size + (uint64_t)rank];
}

// Whether this process must not use the memory, because the group is closed or another process made it.
static inline int kos_is_over(const kos_group *g) { return g->closed || g->generation != kos_forks; }

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline uint64_t kos_min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline size_t kos_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

static inline int kos_is_in(int who, int rank, int root) {
    return who == KOS_OTHERS ? rank != root : who == KOS_ROOT ? rank == root : who != KOS_NOBODY;
}

// Writes to each cache line of data that only this rank has read.  The sender always writes to this memory next.  On
// EPYC, a core writes to a line three times as fast if another core wrote to it last as if another core only read it.
static inline void kos_mark_written(const kos_group *g, const uint8_t *data, size_t bytes) {
    volatile uint8_t *lines = (volatile uint8_t *)(uintptr_t)data;
    for (size_t at = 0; g->marks && bytes >= KOS_MARKED_BYTES && at < bytes; at += KOS_CACHE_LINE)
        lines[at] = 0;
}

// Whether this end of a message waits for the other end.
static inline int kos_is_open(const kos_message *m) { return m->state != KOS_COMPLETE && m->state != KOS_REFUSED; }

static inline int kos_phase_of(const kos_work *w) { return w->progress & 7; }
static inline uint64_t kos_stage_of(const kos_work *w) { return w->progress >> 3; }
static inline uint64_t kos_stage_in_group(const kos_group *g, const kos_work *w) {
    const uint64_t stage = kos_stage_of(w);
    return stage || kos_phase_of(w) != KOS_NOT_PUT ? w->first + stage : g->stage;
}

static inline void kos_set(kos_work *w, uint64_t stage, int phase) { w->progress = stage << 3 | (unsigned)phase; }

// Places in a call where a test stops or kills this process: a build with -DKOS_POINTS and tests/core/points.c.
enum kos_point {
    KOS_AT_BEGIN, KOS_AT_PUBLISHED, KOS_AT_PUT, KOS_AT_STAMPED, KOS_AT_SEEN, KOS_AT_TAKEN, KOS_AT_DRAIN, KOS_AT_SEND,
    KOS_AT_SENT, KOS_AT_DELIVER, KOS_AT_TAKE,
};
#ifdef KOS_POINTS
void kos_pass(int point);
#define KOS_POINT(point) kos_pass(point)
#else
#define KOS_POINT(point) ((void)0)
#endif

// segment.c
kos_layout kos_layout_of(int size);
int kos_open(kos_group *g, uint8_t *memory, size_t bytes, int rank, int size);  // 0, -1: unfit memory, -2: no memory
void kos_free(kos_group *g);  // what kos_open has allocated
void kos_publish(kos_group *g, uint64_t sequence, uint64_t fingerprint);  // that this rank begins that call
// Publishes, before kos_publish, that the call equals the one with the fingerprint `described`, apart from its count.
void kos_publish_resized(kos_group *g, uint64_t sequence, uint64_t fingerprint, uint64_t described, uint64_t count);
// FAILED if a rank has begun another call with this number or an earlier one; else PENDING.
kos_result kos_compare(kos_group *g, uint64_t sequence, uint64_t fingerprint);
void kos_fail(const kos_group *g, uint64_t sequence);  // sets the failure word, unless that of an earlier call is
kos_result kos_failure(const kos_group *g, uint64_t sequence);  // FAILED if that call cannot go on, or PENDING
int64_t kos_clock(void);

// reduce.c
unsigned kos_bytes_of(int dtype);  // of an element; 0: no dtype
const char *kos_name_of(int dtype);  // that in kos/dtypes.py; "": no dtype
int kos_reduction_of(int dtype, int op, kos_reduction *r);  // 0, or -1: the dtype has no such operation
// Reduces the inputs in their order; `out` may be one of them.  `ranks` divides an average.
void kos_reduce(const kos_reduction *r, void *out, const void *const *in, int inputs, size_t count, int ranks);

// prepare.c
// The fingerprint of a call with this count (kos.comm.prepared.sized does the same).
uint64_t kos_sized(uint64_t sizeless, uint64_t count);
size_t kos_prepared_bytes(int size);
// 0, or -1: not supported.
int kos_prepare(const kos_group *g, const kos_request *request, kos_prepared *p);

// slots.c: the stages of a collective.
int kos_may_put(kos_group *g, const kos_work *w);
void kos_put(kos_group *g, kos_work *w);
int kos_step(kos_group *g, kos_work *w);  // KOS_DONE, KOS_PENDING, KOS_FAILED: w->result
int kos_awaits(const kos_group *g, const kos_work *w, int rank);

// direct.c
uint64_t kos_started(int pid);  // in clock ticks since boot; 0: it has ended or is a zombie, UINT64_MAX: unknown
int kos_read(const kos_group *g, int rank, void *to, uint64_t from, size_t bytes);  // 0, or an errno
void kos_put_offer(kos_group *g, kos_work *w);
int kos_take_offers(kos_group *g, kos_work *w);  // as kos_step

// mailbox.c
void kos_mail_start(kos_group *g, kos_work *w);
int kos_mail_step(kos_group *g, kos_work *w);  // as kos_step
void kos_mail_cancel(kos_group *g, kos_work *w);
void kos_mail_advance(kos_group *g);            // takes what has arrived
int kos_is_kept(const kos_arrival *a);  // whether its data has arrived, so that a receive completes at once
// The first message with that tag from that rank that has arrived and has no receive; NULL: none, or a closed group.
const kos_arrival *kos_mail_first(kos_group *g, int rank, uint64_t tag);
uint64_t kos_tag(const kos_arrival *a);

// call.c
// A Work of a message does not move in memory until it ends.
kos_result kos_start(kos_group *g, const kos_prepared *p, uint64_t sequence, const void *send, void *recv, kos_work *w);
// For a Work that is the only one: advances it once, and then for at most so many nanoseconds.
kos_result kos_spin(kos_group *g, kos_work *w, int64_t most);
void kos_spin_queued(kos_group *g, kos_work *w);  // the same for one that is in the queue
// Waits at most `most` nanoseconds for a message that matches a receive from any rank or of any length.  Returns NULL
// if none has arrived, or if the group has failed.  If several ranks have sent one, they are served in turn.
const kos_arrival *kos_await(kos_group *g, const kos_prepared *p, int64_t most, int *rank);
int kos_alone(const kos_group *g);              // whether no Work is outstanding, so that a wait may spin
void kos_enqueue(kos_group *g, kos_work *w);
void kos_advance(kos_group *g);                 // advances every outstanding Work; never waits
void kos_close(kos_group *g);                   // every outstanding Work is KOS_BROKEN, and no other begins
void kos_abandon(kos_group *g, kos_work *w);    // ends a message that nobody waits for any more
enum { KOS_AWAITS_READ = 1, KOS_AWAITS_MESSAGE = 2 };  // of a message: its receipt by the rank, or one from it
int kos_missing(const kos_group *g, const kos_work *w, int rank);  // whether it waits for that rank, and for what
// Leaves the CPU core to others between two polls of a wait that began at `start`.  Needs no GIL, and reads no memory.
void kos_rest(int64_t start, int yields);

// launch.c
// Queues the launches one after another.  Returns 0, or the status of the first launch that failed; `failed` is then
// its index.  Needs no GIL, and may block until the GPU has run earlier launches.
int kos_queue_launches(const kos_launch *l, uint64_t count, const uint64_t sources[KOS_SOURCES], uint64_t *failed);

// --- Threads (pool.c) ------------------------------------------------------------------------------------------------
// They share the tasks of an operation of training (ops.c), and sleep between operations.

typedef void (*kos_task)(const void *arguments, size_t index);

// How many threads, the caller's included, an operation may use.
void kos_pool_threads(int threads);

// Runs tasks 0 to count - 1.  The caller takes tasks too, and waits only for those that another thread has begun: it
// never waits for a thread that gets no processor.  While another thread runs tasks, the caller runs its own alone.
void kos_pool_run(kos_task task, const void *arguments, size_t count);

#endif
