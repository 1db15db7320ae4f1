// The objects of kos._core.native: a Group, its Prepared calls, and the Works in flight.
#ifndef KOS_OBJECTS_H
#define KOS_OBJECTS_H

// Formats with "#", which need PY_SSIZE_T_CLEAN, must not be used: a wheel that is built by Python 3.13 or newer, whose
// headers ignore that macro, would fail on 3.11 and 3.12.  Without the macro, such formats fail there in every build.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include "core.h"

typedef struct {
    PyObject_HEAD
    kos_work core;
    PyObject *group, *prepared, *send, *recv;
} Work;

// What a Group refers to.  All but its owner are those of the communicator that it is bound to; ACTIVE: the Works of
// the engine, SLOTS: of the recorder.
enum { OWNER, COMM, FAILURES, NODE, STATUS, ACTIVE, COUNTER, SLOTS, COLLECTIVES, MESSAGES, OBJECTS };

typedef struct {
    PyObject_HEAD
    kos_group core;
    PyObject *objects[OBJECTS];
    Py_buffer memory;
    Work *spare;               // the next call begins in it.  A call that does not complete at once keeps it
    unsigned long long parks;  // waits without the GIL
    // Of module_eager.c.
    PyObject **active, **first, **last;  // addresses of comm._active, failures.first and status.last
    size_t slots;             // entries of the recorder
    char off;                 // in a batch
    unsigned generation;      // how often all calls were forgotten
    unsigned long long hits;  // calls that were started there
    uint64_t *recorded;       // entries of the recorder so far: the memory of COUNTER
    uint64_t compare_at;      // the collective on a GPU at which Python compares calls again
} Group;

// Of module_state.c.  CONVERT: makes the result of the array.
enum { PREPARED, SEND, RECV, ARRAY, SEQUENCE, RECORD, LEFT, STEPS, ERROR, CONVERT, FIELDS };
typedef struct {
    PyObject_HEAD
    PyObject *fields[FIELDS];  // NULL is None
    char reported;             // whether the program has the outcome
} State;

// Whether two arrays overlap in the same way as those of an earlier call.  In that call, the output began `distance`
// bytes before the input, or the arrays did not overlap (UINT64_MAX).
static inline int is_as_far(const char *send, const char *recv, uint64_t send_bytes, uint64_t recv_bytes,
                            uint64_t distance) {
    const int apart = !send || !recv || send + send_bytes <= recv || recv + recv_bytes <= send;
    return apart ? distance == UINT64_MAX : distance == (uint64_t)(send - recv);
}

// A cached call, as Operations._core_call describes it by a tuple.  read_call reads it.
// - the capsule of Group.prepare; on a GPU, the packed launches; None if the core cannot start such calls
// - the Prepared; its description, which the recorder stores; a Work of such a call, which the core starts on a GPU, and
//   of which it uses only the class in host memory; the object that keeps the stream alive, or None
// - whether the call waits and returns its result; if not, it returns a Work
// - arguments of the call, or -1: the array that the core reads, and the one that it writes; the operation's input, and
//   its output, which is the result of the call
// - the bytes from the output to the input if these overlap, else UINT64_MAX; the bytes of both
// - objects that must stay alive, because the core compares them by identity
// - on a GPU, the conditions under which the launches are valid (module_launch.c)
enum { CALL, CALL_PREPARED, DESCRIPTION, EXAMPLE, STREAM, INPUT = 8, OUTPUT, DISTANCE, GUARDS = 14 };

enum { CODE = 2, NUMBER = 4, COMPLETED, FAILED };  // of an entry of the recorder
PyObject *nanoseconds(void);  // for it
// Writes the next entry, like kos.comm.prepared.record_start, but as COMPLETED.  Returns a borrowed reference.  `old`
// gets two objects of the overwritten entry.  Their destructors may run Python code, so the caller releases them after
// its call has begun.
PyObject *note(Group *g, PyObject *description, PyObject *sequence, PyObject *frame, PyObject **old);

extern PyObject *s_closed, *s_requires_grad, *s_is_neg, *s_cuda_stream;
// An attribute, or what a method returns, to be compared with a constant: NULL on an error.
const PyObject *peek(PyObject *x, PyObject *name, int is_method);
// The address of an attribute that is in the ``__slots__`` of a class of the object; NULL for other attributes.
PyObject **slot_of(PyObject *x, const char *name);
// Replaces the reference in a slot or a field; `swap` returns the old one, whose end may run Python.
void put(PyObject **at, PyObject *value);
static inline PyObject *swap(PyObject **at, PyObject *value) {
    PyObject *old = *at;
    *at = Py_XNewRef(value);
    return old;
}

// DLPack's DLTensor.
enum { CPU = 1, CUDA, DIMENSIONS = 4 };
typedef struct {
    char *data;
    int32_t device, index, nd;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t offset;
} tensor;

// An array in the key of a call: what its elements are, all else that is no number of elements, and the stream that it
// is used on.
typedef struct {
    uint64_t what, kind, stream;
} array_words;

extern PyTypeObject *work_type, *state_type, *operation_type, *array_type, *tensor_type, *factor_type;
extern PyType_Spec work_spec, state_spec, operation_spec;

void work_ended(kos_work *w);
PyObject *raise_failure(Group *g, kos_result r);
PyObject *group_prepare(PyObject *g, PyObject *args);
const kos_prepared *prepared_of(PyObject *capsule);  // of group_prepare
// The sizes of a call: `count` and the counts as in kos_request, and the elements of the first of its input and output,
// which the ranks of a v-form publish.
typedef struct {
    uint64_t count, first;
    const uint64_t *send_counts, *recv_counts;
} call_sizes;
// The same call of other sizes.  Returns a new capsule; NULL, without an exception, if the core cannot make such calls
// or has no memory.  `published` gets what kos_publish_resized needs.
PyObject *resized(const Group *g, PyObject *capsule, const call_sizes *sizes, uint64_t *published);
const kos_request *request_of(PyObject *capsule);  // of its counts, only whether they are NULL is valid
PyObject *group_start(PyObject *g, PyObject *const *args, Py_ssize_t count);
// A call has three parts. has_spare allocates everything first, so that a started call cannot fail half-way for lack of
// memory. begin starts the call on the memory `from` and `to`. go_on advances it, and spins if it `waits`. go_on
// returns None if the call is complete while this thread holds the GIL, else its Work.  The call may have failed.
int has_spare(Group *g);
kos_result begin(Group *g, const kos_prepared *p, uint64_t sequence, const void *from, void *to);
PyObject *go_on(Group *g, PyObject *prepared, kos_result r, PyObject *send, PyObject *recv, int waits);
int is_pending(PyObject *work);
int spin_only(Work *work);  // spins for some microseconds if this is the only Work; returns whether it is complete
PyObject *group_bind(PyObject *g, PyObject *const *args, Py_ssize_t count);
PyObject *group_method(PyObject *g, PyObject *args);
// Of module_cache.c.
enum { ARGUMENTS = 8, KNOWN_CALLS = 2048, MOST_WORDS = 3 * KOS_MAX_RANKS };

// The start of NumPy's PyArrayObject, which is the same in all versions; group_bind checks it.
typedef struct {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions, *strides;
    PyObject *base, *descr;
    int flags;
} ndarray;
enum { FLAGS = 0x1 | 0x100 | 0x400 };  // of NumPy: contiguous, aligned, writable

// The cache key of a call, in words.  It begins with the number of arguments.  Each argument has its keyword, if any,
// then a value and the kind of the value: an object, an integer, or the length of a list and then its integers.  An
// array has its dtype, its flags and number of dimensions, the index of the first argument that is the same array, and
// its shape.  Objects are compared by identity.
typedef struct {
    size_t words;  // 0: the call cannot be cached
    int on_gpu;    // whether it has an array on a GPU
    uint64_t word[MOST_WORDS];
} call_key;
enum { OBJECT, INTEGER, FLOAT, COUNTS, FACTOR };  // kinds but those of arrays, which have 1 + the dimensions << 16;
                                                  // FACTOR is added to that of a number

typedef struct {
    PyObject *core_call;  // the tuple; it holds references to all objects of this call and of its key
    PyObject *call, *prepared, *description;  // of group_prepare, of kos.comm.prepared, of the recorder
    PyObject *work;                           // the class of its Works
    const kos_prepared *core;                 // that of `call`; NULL of a call on a GPU, and if `call` is None
    int waits, send, recv;                    // whether it returns no Work; arguments, or -1
    int input, result;                        // the same for the operation's input and output
    // Of a call that was made from one of another size: what is published of it, and what it owns.  `described` is
    // the fingerprint of the call that it was made from.  `prepared` is that of this call until cache_adopt.
    PyObject *own_call, *own_prepared, *own_description;  // NULL of other calls
    uint64_t published, described;
    size_t words;  // of its key
    uint64_t word[];
} cached_call;

typedef struct {
    cached_call **calls, **older;  // hash tables, at most half full; NULL until first used
    cached_call **dropped;         // a table that cache_tidy frees
    cached_call *found;            // the last one
    int used, templates;           // calls in the table; whether a key without sizes was stored
} call_cache;

void take_ndarrays(PyTypeObject *type);  // the type of NumPy's arrays
// The key of a call, and where its arrays are.
void make_key(call_key *key, char **data, PyObject *const *args, Py_ssize_t positional, PyObject *names);
uint64_t identity_of(PyObject *x);  // the objects that the key has of an array
// The call with this key, or NULL.  This and the next one run no Python.
cached_call *cache_find(call_cache *c, const call_key *key);
// Adds a call that differs in its sizes only from one that is known; NULL if there is none.
cached_call *cache_resize(call_cache *c, const Group *g, const call_key *key);
// Python has prepared this call of another size.
void cache_adopt(call_cache *c, const call_key *key, PyObject *prepared, PyObject *description);
void cache_store(call_cache *c, const call_key *key, PyObject *core_call);
void cache_tidy(call_cache *c);    // frees what was dropped, which may run Python
void cache_forget(call_cache *c);  // drops all
int cache_traverse(const call_cache *c, visitproc visit, void *arg);
// Of module_arrays.c.
PyObject *take_arrays(PyObject *self, PyObject *example);
PyObject *take_tensors(PyObject *self, PyObject *type);
PyObject *take_windows(PyObject *self, PyObject *ranges);
PyObject *take_factors(PyObject *self, PyObject *type);
PyObject *is_readable(PyObject *self, PyObject *x);
// Whether calls may use an array (which must not be freed) or a tensor (see readable()).  May run Python code.
int is_plain(PyObject *x);
// Fills in the words of an array or tensor for the key of a call, and its memory.  `shape` has room for DIMENSIONS.
// Returns 0 if Python must make the call, and ASK if the caller must call is_plain.
enum { ASK = 2 };
int read_array(PyObject *x, array_words *words, tensor *t, int64_t *shape);
int read_tensor(PyObject *x, array_words *words, tensor *t);
uint64_t key_of(const char *data);  // the property of an address on which a call depends: kos.memory.windows.place
// Of module_launch.c.
int find_slots(PyObject *core_call);  // completes a cached call for queue_call; 0 if queue_call cannot make such calls
// Queues a cached call, and returns `result`.  Returns NULL without an exception if Python must
// make the call.
PyObject *queue_call(Group *g, PyObject *core_call, PyObject *frame, PyObject *result, char *send, char *recv);
// A new Work.
State *new_state(PyObject *type, PyObject *prepared, PyObject *send, PyObject *recv, PyObject *array,
                 PyObject *sequence, PyObject *record);
int eager_init(void);
// Of codec.c.
enum { KOS_ROWS_OF_TASK = 64 };  // of an operation on rows in ops.c
extern PyMethodDef ops_functions[];
PyObject *codec_encode(PyObject *self, PyObject *args);
PyObject *codec_decode(PyObject *self, PyObject *args);
// Makes a tuple and a dict of the arguments of a vectorcall.  The caller owns both.  Returns 0, or sets an exception.
int unpack(PyObject *const *args, Py_ssize_t positional, PyObject *names, PyObject **given, PyObject **options);

#endif
