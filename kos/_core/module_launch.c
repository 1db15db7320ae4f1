// Calls on GPUs that need no Python: an operation on arrays of a GPU whose signature and stream are known.
//
// Python has queued such a call before (kos/comm/gpu/eager.py), and has recorded the state under which the call needs
// no event, no wait for another stream, and no change of the route.  While this state is unchanged, the core numbers,
// records, publishes and queues the call.  In every other case, Python does so.
#include "objects.h"

// A cached call; its launches follow.  EagerCalls leaves KOS_PLAN_AT bytes for the objects, which find_slots fills in.
typedef struct {
    PyObject *description, *work, **last_of_backend, **last;  // slots of the last Work
    PyObject **current, **last_route;  // slots: the owner of the stream of the last call, and the route of that call
    PyObject *owner, *route;      // what these must be
    PyObject *handle;             // of the stream, while its owner has not closed it; None if the owner cannot close it
    uint64_t launches;
    uint64_t fingerprint;           // 0 of a message
    uint64_t stream;                // a handle
    uint64_t failed;                // the address of a word that is not 0 once a kernel has ended early, or 0
    uint64_t room, blocks, blocks_per_sm;  // an address of two words, or 0: the most blocks, the least blocks_per_sm
    uint64_t context, get_context;  // the context that must be current (0: any), and the driver's function
    uint64_t is_captured;           // the driver's function, for a call that runs otherwise in a graph; or 0
    uint64_t send_bytes, recv_bytes, distance;  // from output to input if they overlap
} queued_call;
_Static_assert(offsetof(queued_call, launches) == KOS_PLAN_AT, "KOS_PLAN_AT: expected the bytes of the objects");

// What must hold: the Streams of the communicator, whose last call must have had this owner and route; the handle that
// the owner must still have, or None.  The launches, from which errors are made.  Two objects that hold the last Work.
enum { STREAMS, OWNER_OF_STREAM, PARTY, HANDLE, LAUNCHES, BACKEND, SHARED };

// --- A call ----------------------------------------------------------------------------------------------------------

// Whether the stream is still open.  This asks its owner, which may run Python code.  0 with an exception if that raises.
static int is_open(const queued_call *q) {
    if (q->handle == Py_None)
        return 1;
    PyObject *handle = PyObject_CallMethodObjArgs(q->owner, s_cuda_stream, NULL);
    const int same = handle && PyObject_RichCompareBool(handle, q->handle, Py_EQ) == 1;
    Py_XDECREF(handle);
    return same;
}

// Whether Python would queue the call at once.  At every 64th collective, Python compares the calls since the last
// comparison with those of the other ranks.
static int may_queue(Group *g, const queued_call *q, const char *send, const char *recv) {
    int (*get_context)(uint64_t *) = (int (*)(uint64_t *))(uintptr_t)q->get_context;
    int (*is_captured)(uint64_t, int *) = (int (*)(uint64_t, int *))(uintptr_t)q->is_captured;
    const volatile uint64_t *failed = (uint64_t *)(uintptr_t)q->failed, *room = (uint64_t *)(uintptr_t)q->room;
    uint64_t context = 0;
    int captured = 0;
    if (!is_open(q) || *q->current != q->owner || *q->last_route != q->route || *g->first != Py_None || g->off
        || kos_failure(&g->core, KOS_WORD_SEQUENCE).status == KOS_FAILED || (failed && *failed)
        || (room && (q->blocks > room[0] || q->blocks_per_sm < room[1]))
        || !is_as_far(send, recv, q->send_bytes, q->recv_bytes, q->distance)
        || (q->fingerprint && (*g->active != Py_None
            || atomic_load_explicit(&g->core.line->arrived, memory_order_relaxed) >= g->compare_at)))
        return 0;
    return (!q->context || (!get_context(&context) && context == q->context))
        && (!q->is_captured || (!is_captured(q->stream, &captured) && !captured));
}

int find_slots(PyObject *core_call) {
    queued_call *q = (queued_call *)PyByteArray_AsString(PyTuple_GetItem(core_call, CALL));
    PyObject *guards = PyTuple_GetItem(core_call, GUARDS);
    q->description = PyTuple_GetItem(core_call, DESCRIPTION);
    q->work = PyTuple_GetItem(core_call, EXAMPLE);
    q->last_of_backend = slot_of(PyTuple_GetItem(guards, BACKEND), "_last");
    q->last = slot_of(PyTuple_GetItem(guards, SHARED), "last");
    q->current = slot_of(PyTuple_GetItem(guards, STREAMS), "current");
    q->last_route = slot_of(PyTuple_GetItem(guards, STREAMS), "route");
    q->owner = PyTuple_GetItem(guards, OWNER_OF_STREAM);
    q->route = PyTuple_GetItem(guards, PARTY);
    q->handle = PyTuple_GetItem(guards, HANDLE);
    return q->last_of_backend && q->last && q->current && q->last_route;
}

PyObject *queue_call(Group *g, PyObject *core_call, PyObject *frame, PyObject *result, char *send, char *recv) {
    const queued_call *q = (const queued_call *)PyByteArray_AsString(PyTuple_GetItem(core_call, CALL));
    PyObject *work = q->work, *sequence = NULL, *old[4] = {NULL};
    const unsigned generation = g->generation;
    Py_INCREF(core_call);  // another thread may clear the cache while a stream is asked, and while the GIL is released
    if (may_queue(g, q, send, recv) && g->generation == generation)
        sequence = PyIter_Next(g->objects[q->fingerprint ? COLLECTIVES : MESSAGES]);
    if (!sequence) {
        Py_DECREF(core_call);
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
    uint64_t failed = 0;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = kos_queue_launches((const kos_launch *)(q + 1), q->launches, sources, &failed);
    Py_END_ALLOW_THREADS
    if (error) {
        PyObject *launches = PyTuple_GetItem(PyTuple_GetItem(core_call, GUARDS), LAUNCHES);
        Py_XDECREF(result);
        result = PyObject_CallMethod(g->objects[NODE], "launch_failed", "OOi", work,
                                     PyList_GetItem(launches, (Py_ssize_t)failed), error);  // raises
    }
    if (q->fingerprint)
        put(g->active, Py_None);
    for (int i = 0; i < 4; i++)  // now that the call is queued: their ends may run Python
        Py_XDECREF(old[i]);
    Py_DECREF(core_call);
    return result;
}
