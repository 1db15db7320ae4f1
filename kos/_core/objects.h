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

// Fields of kos.comm.prepared.CoreCall, which describes a cached call.
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

extern PyTypeObject *work_type, *state_type, *operation_type, *array_type, *tensor_type;
extern PyType_Spec work_spec, state_spec, operation_spec;

void work_ended(kos_work *w);
PyObject *raise_failure(Group *g, kos_result r);
PyObject *group_prepare(PyObject *g, PyObject *args);
const kos_prepared *prepared_of(PyObject *capsule);  // of group_prepare
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
// Of module_arrays.c.
PyObject *take_arrays(PyObject *self, PyObject *example);
PyObject *take_tensors(PyObject *self, PyObject *type);
PyObject *take_windows(PyObject *self, PyObject *ranges);
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
int find_slots(PyObject *core_call);  // completes a CoreCall for queue_call; 0 if queue_call cannot make such calls
// Queues the call that a CoreCall describes, and returns `result`.  Returns NULL without an exception if Python must
// make the call.
PyObject *queue_call(Group *g, PyObject *core_call, PyObject *frame, PyObject *result, char *send, char *recv);
// A new Work.
State *new_state(PyObject *type, PyObject *prepared, PyObject *send, PyObject *recv, PyObject *array,
                 PyObject *sequence, PyObject *record);
int eager_init(void);
// Of codec.c.
PyObject *codec_encode(PyObject *self, PyObject *args);
PyObject *codec_decode(PyObject *self, PyObject *args);
// Makes a tuple and a dict of the arguments of a vectorcall.  The caller owns both.  Returns 0, or sets an exception.
int unpack(PyObject *const *args, Py_ssize_t positional, PyObject *names, PyObject **given, PyObject **options);

#endif
