// Calls on GPUs that need no Python: an operation on arrays of a GPU whose signature and stream are known.
//
// Python has queued such a call before (kos/comm/gpu/eager.py).  It listed the state from which it concluded that the
// call needs no event, no wait for another stream, and no turn of another library.  While this state is unchanged, the
// core numbers, records, publishes and queues the call.  In every other case Python does.
#include "module.h"

// State that is compared before a call: the attribute at `at`, or the result of a method if `at` is NULL.
typedef struct { PyObject **at, *object, *name, *value; } guard;
enum { MOST_GUARDS = 8 };

// A cached call; its launch follows.  EagerCalls leaves KOS_PLAN_AT bytes for the objects, which find_slots fills in.
typedef struct {
    PyObject *description, *works[2], **last_of_backend, **last;  // works[1]: of a Persistent; slots of the last Work
    Py_ssize_t guards;
    guard guard[MOST_GUARDS];
    uint64_t fingerprint;           // 0 of a message
    uint64_t stream;                // a handle
    uint64_t failed;                // the address of a word that is not 0 once a kernel has ended early, or 0
    uint64_t context, get_context;  // that must be current, and the driver's function; 0: any may be
    uint64_t is_captured;           // the driver's function, for a call that runs otherwise in a graph; or 0
    uint64_t send_bytes, recv_bytes, distance;  // from output to input if they overlap
} queued_call;
_Static_assert(offsetof(queued_call, fingerprint) == KOS_PLAN_AT, "KOS_PLAN_AT: expected the bytes of the objects");

enum { PLAN, DESCRIPTION = 2, WORK, GUARDS = 9, BACKEND, SHARED };  // of what EagerCalls.remember returns

// --- A call ----------------------------------------------------------------------------------------------------------

static long long number_at(PyObject *tuple, Py_ssize_t at) { return PyLong_AsLongLong(PyTuple_GetItem(tuple, at)); }

// Whether a guard holds.  An attribute must be the same object or an equal number.  For kernels, (blocks, blocks of a
// multiprocessor) must leave as much room as before.  A method must return what it returned before: this is
// __cuda_stream__, which raises if the stream was closed.
static int is_still(const guard *g) {
    PyObject *value = g->at ? *g->at : PyObject_CallMethodObjArgs(g->object, g->name, NULL), *expected = g->value;
    int same = value == expected;
    if (value && !same && g->at && PyTuple_Check(value) && PyTuple_Check(expected))
        same = number_at(value, 0) >= number_at(expected, 0) && number_at(value, 1) <= number_at(expected, 1);
    else if (value && !same && (!g->at || PyLong_CheckExact(value)))
        same = PyObject_RichCompareBool(value, expected, Py_EQ) == 1;
    if (g->at)
        return same;
    Py_XDECREF(value);
    PyErr_Clear();
    return same;
}

static int is_as_far(const queued_call *q, const char *send, const char *recv) {
    const int apart = !send || !recv || send + q->send_bytes <= recv || recv + q->recv_bytes <= send;
    return apart ? q->distance == UINT64_MAX : q->distance == (uint64_t)(send - recv);
}

// Whether Python would queue the call at once.  At every 64th collective, Python compares the calls since the last
// comparison with those of the other ranks.
static int may_queue(Group *g, const queued_call *q, const char *send, const char *recv) {
    int (*get_context)(uint64_t *) = (int (*)(uint64_t *))(uintptr_t)q->get_context;
    int (*is_captured)(uint64_t, int *) = (int (*)(uint64_t, int *))(uintptr_t)q->is_captured;
    uint64_t context = 0;
    int captured = 0;
    for (const guard *each = q->guard; each < q->guard + q->guards; each++)
        if (!is_still(each))
            return 0;
    if (g->off || kos_failure(&g->core, KOS_WORD_SEQUENCE).status == KOS_FAILED
        || (q->failed && *(volatile uint64_t *)(uintptr_t)q->failed) || !is_as_far(q, send, recv)
        || (q->fingerprint && atomic_load_explicit(&g->core.line->arrived, memory_order_relaxed) >= g->compare_at))
        return 0;
    return (!q->context || (!get_context(&context) && context == q->context))
        && (!q->is_captured || (!is_captured(q->stream, &captured) && !captured));
}

int find_slots(PyObject *how) {
    queued_call *q = (queued_call *)PyByteArray_AsString(PyTuple_GetItem(how, PLAN));
    PyObject *guards = PyTuple_GetItem(how, GUARDS), *work = PyTuple_GetItem(how, WORK);
    q->description = PyTuple_GetItem(how, DESCRIPTION);
    for (int i = 0; i < 2; i++)
        q->works[i] = PyTuple_Check(work) ? PyTuple_GetItem(work, i) : i ? NULL : work;
    q->last_of_backend = slot_of(PyTuple_GetItem(how, BACKEND), "_last");
    q->last = slot_of(PyTuple_GetItem(how, SHARED), "last");
    q->guards = PyList_Size(guards);
    guard *each = q->guard;
    for (Py_ssize_t i = 0; i < q->guards && i < MOST_GUARDS; i++, each++)
        if (PyArg_ParseTuple(PyList_GetItem(guards, i), "OUO", &each->object, &each->name, &each->value))
            each->at = slot_of(each->object, PyUnicode_AsUTF8AndSize(each->name, NULL));
    return q->last_of_backend && q->last && q->guards <= MOST_GUARDS && !PyErr_Occurred();
}

PyObject *queue_call(Group *g, PyObject *how, PyObject *frame, PyObject *result, char *send, char *recv) {
    const queued_call *q = (const queued_call *)PyByteArray_AsString(PyTuple_GetItem(how, PLAN));
    PyObject *work = q->works[0], *sequence = NULL, *old[4] = {NULL};
    const unsigned generation = g->generation;
    Py_INCREF(how);  // another thread may make this forgotten while a stream is asked, and while the GIL is released
    if (may_queue(g, q, send, recv) && g->generation == generation) {
        // A Persistent returns the one of its two Works that the program does not hold.
        if (q->works[1])
            result = work = q->works[Py_REFCNT(work) > 1];
        if (!q->works[1] || Py_REFCNT(work) == 1)
            sequence = PyIter_Next(g->objects[q->fingerprint ? COLLECTIVES : MESSAGES]);
    }
    if (!sequence) {
        Py_DECREF(how);
        return NULL;
    }
    Py_XINCREF(result);
    g->hits++;
    if (q->fingerprint)
        put(g->active, work);  // before anything that might let another thread run
    PyObject *record = note(g, q->description, sequence, frame, old);
    PyList_SetItem(record, COMPLETED, Py_NewRef(Py_None));
    put(&((State *)work)->fields[RECORD], record);
    put(&((State *)work)->fields[SEQUENCE], sequence);
    old[2] = swap(q->last_of_backend, work);
    if (q->fingerprint) {
        kos_publish(&g->core, PyLong_AsUnsignedLongLong(sequence), q->fingerprint);
        old[3] = swap(q->last, work);
    }
    Py_DECREF(sequence);
    const uint64_t sources[] = {(uintptr_t)send, (uintptr_t)recv, q->stream};
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = kos_queue_launch((const kos_launch *)(q + 1), sources);
    Py_END_ALLOW_THREADS
    if (error) {
        Py_XDECREF(result);
        result = PyObject_CallMethod(g->objects[NODE], "launch_failed", "Oi", work, error);  // raises
    }
    if (q->fingerprint)
        put(g->active, Py_None);
    for (int i = 0; i < 4; i++)  // now that the call is queued: their ends may run Python
        Py_XDECREF(old[i]);
    Py_DECREF(how);
    return result;
}
