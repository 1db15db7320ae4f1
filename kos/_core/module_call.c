// The path of a call from Python: its arrays, a start, the wait, and the Work if it does not complete at once.
#include "objects.h"

PyTypeObject *work_type;

static uint8_t nothing[64];  // the memory of no array: C forbids copies of no bytes to NULL

// --- Works -----------------------------------------------------------------------------------------------------------

void work_ended(kos_work *w) {
    Work *work = (Work *)((char *)w - offsetof(Work, core));
    Py_CLEAR(work->send);
    Py_CLEAR(work->recv);
    Py_DECREF((PyObject *)work);  // the reference of the queue
}

PyObject *raise_failure(Group *g, kos_result r) {
    const uint64_t *counts = g->core.counts;
    PyObject *raised = PyObject_CallMethod(g->objects[OWNER], "failed", "iiKKKK", r.code, r.rank, r.word, counts[0],
                                           counts[1], counts[2]);
    if (raised)
        PyErr_SetString(PyExc_RuntimeError, "expected the owner's failed() to raise");
    Py_XDECREF(raised);
    return NULL;
}

static int is_only(const kos_group *g, const kos_work *w) {
    return ((g->head == w && !g->messages) || (g->messages == w && !g->head)) && !w->next;
}

// Advances all Works; returns whether this one is complete, or -1 with an exception.
static int advance(Work *work) {
    Group *g = (Group *)work->group;
    kos_advance(&g->core);
    if (kos_phase_of(&work->core) == KOS_BROKEN)
        raise_failure(g, work->core.result);
    return kos_phase_of(&work->core) == KOS_BROKEN ? -1 : kos_phase_of(&work->core) == KOS_ENDED;
}

// wait(): advances a Work until it is complete (returns None) or has made no progress for KOS_WAIT_NS (returns the
// Work).  If there are other Works, it returns at once, because Python must advance all of them.  Raises what the
// handler of a signal raises.
static PyObject *work_wait(PyObject *work, PyObject *unused) {
    Group *g = (Group *)((Work *)work)->group;
    kos_work *w = &((Work *)work)->core;
    int64_t start = kos_clock();
    uint64_t progress = w->progress;
    for (int polls = 0, ended;; polls++) {
        if ((ended = advance((Work *)work)))
            return ended < 0 ? NULL : Py_NewRef(Py_None);
        if (PyErr_CheckSignals())
            return NULL;
        if (w->progress != progress)  // it has copied meanwhile: the other ranks do the same
            start = kos_clock();
        progress = w->progress;
        if (!is_only(&g->core, w) || kos_clock() - start >= KOS_WAIT_NS)
            return Py_NewRef(work);
        g->parks += !polls;
        Py_BEGIN_ALLOW_THREADS
        kos_rest(start, g->core.yields || !g->core.spin_ns);
        Py_END_ALLOW_THREADS
    }
}

int is_pending(PyObject *work) { return kos_phase_of(&((Work *)work)->core) < KOS_ENDED; }

int spin_only(Work *work) {
    Group *g = (Group *)work->group;
    if (is_pending((PyObject *)work) && is_only(&g->core, &work->core))
        kos_spin_queued(&g->core, &work->core);
    return kos_phase_of(&work->core) == KOS_ENDED;
}

static PyObject *work_done(PyObject *self, PyObject *unused) {
    const int ended = advance((Work *)self);
    return ended < 0 ? NULL : PyBool_FromLong(ended);
}

static PyObject *work_cancel(PyObject *self, PyObject *unused) {
    kos_abandon(&((Group *)((Work *)self)->group)->core, &((Work *)self)->core);
    Py_RETURN_NONE;
}

static PyObject *work_missing(PyObject *self, PyObject *argument) {
    const kos_group *g = &((Group *)((Work *)self)->group)->core;
    long rank = PyLong_AsLong(argument);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(rank < 0 || rank >= g->size ? 0 : kos_missing(g, &((Work *)self)->core, (int)rank));
}

static void work_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(((Work *)self)->group);
    Py_DECREF(((Work *)self)->prepared);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

// --- Calls -----------------------------------------------------------------------------------------------------------

static const char NAME[] = "kos_prepared";

// What a capsule of group_prepare has.
typedef struct {
    kos_request request;  // whose counts are gone: only whether they are NULL is valid
    kos_prepared prepared;
} plan;

static plan *plan_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, NAME); }

const kos_prepared *prepared_of(PyObject *capsule) { return &plan_of(capsule)->prepared; }

const kos_request *request_of(PyObject *capsule) { return &plan_of(capsule)->request; }

static void free_prepared(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, NAME)); }

int has_spare(Group *g) { return g->spare || (g->spare = PyObject_New(Work, work_type)); }

kos_result begin(Group *g, const kos_prepared *p, uint64_t sequence, const void *from, void *to) {
    return kos_start(&g->core, p, sequence, from ? from : to ? to : nothing, to, &g->spare->core);
}

PyObject *go_on(Group *g, PyObject *prepared, kos_result r, PyObject *send, PyObject *recv, int waits) {
    Work *work = g->spare;
    if (r.status == KOS_PENDING && kos_alone(&g->core))
        r = kos_spin(&g->core, &work->core, waits ? g->core.spin_ns : 0);
    if (r.status == KOS_DONE)
        return Py_NewRef(Py_None);
    g->spare = NULL;
    work->group = Py_NewRef((PyObject *)g);
    work->prepared = Py_NewRef(prepared);
    work->send = work->recv = NULL;
    if (r.status == KOS_FAILED) {
        work->core.result = r;
        kos_set(&work->core, 0, KOS_BROKEN);
        return (PyObject *)work;
    }
    work->send = Py_NewRef(send);
    work->recv = Py_NewRef(recv);
    kos_enqueue(&g->core, &work->core);
    return Py_NewRef((PyObject *)work);  // the queue has the other reference
}

// Where an array of a call is, in `at`; returns 0, or -1 with an exception.
static int locate(const kos_prepared *p, const char *which, PyObject *x, uint64_t bytes, int flags, void **at) {
    Py_buffer array;
    if (PyObject_GetBuffer(x, &array, flags))
        return -1;
    *at = array.buf;
    const int fits = (uint64_t)array.len == bytes && !((uintptr_t)array.buf & (p->alignment - 1));
    if (!fits)
        PyErr_Format(PyExc_ValueError, "%s: expected %llu contiguous bytes aligned to %u, got %zd at %p", which,
                     (unsigned long long)bytes, p->alignment, array.len, array.buf);
    PyBuffer_Release(&array);
    return fits ? 0 : -1;
}

// start(prepared, sequence, waits, send, recv): None where this rank has no such array, twice the same array in place.
// Returns None if the call is complete, or a Work.
PyObject *group_start(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Group *g = (Group *)self;
    void *from = NULL, *to = NULL;
    if (count != 5)
        return PyErr_Format(PyExc_TypeError, "start: expected a call, a number, a flag and two arrays, got %zd", count);
    const kos_prepared *p = prepared_of(args[0]);
    const uint64_t sequence = PyLong_AsUnsignedLongLong(args[1]);
    const int waits = PyObject_IsTrue(args[2]);
    PyObject *send = args[3], *recv = args[4];
    if (PyErr_Occurred())
        return NULL;
    const int in_place = send == recv && send != Py_None;
    const int copies = p->operation == KOS_BROADCAST && p->root == g->core.rank;
    if ((in_place ? p->send_bytes || !p->recv_bytes : send != Py_None || p->send_bytes)
        && locate(p, "x", send, p->send_bytes, PyBUF_SIMPLE, &from))
        return NULL;
    if ((in_place ? p->recv_bytes > 0 : recv != Py_None || (p->recv_bytes && !copies))
        && locate(p, in_place ? "x" : "out", recv, p->recv_bytes, PyBUF_WRITABLE, &to))
        return NULL;
    if (!has_spare(g))
        return NULL;
    PyObject *left = go_on(g, args[0], begin(g, p, sequence, from, to), send, recv, waits);
    if (left == Py_None)
        return left;
    if (is_pending(left) && !waits) {
        kos_advance(&g->core);
        return left;
    }
    PyObject *result = work_wait(left, NULL);  // raises if it has failed
    Py_DECREF(left);
    return result;
}

// None, or bytes: a uint64_t for each rank.
static int read_counts(const Group *g, PyObject *packed, const uint64_t **counts) {
    const Py_ssize_t bytes = g->core.size * (Py_ssize_t)sizeof(uint64_t);
    const Py_ssize_t got = packed == Py_None ? bytes : PyBytes_Size(packed);  // -1, and an exception, if not bytes
    if (got == bytes)
        *counts = packed == Py_None ? NULL : (const uint64_t *)PyBytes_AsString(packed);
    else if (got >= 0)
        PyErr_Format(PyExc_ValueError, "expected counts of %zd bytes or None, got %zd", bytes, got);
    return got == bytes ? 0 : -1;
}

// A capsule of the plan for a request; NULL without an exception if there is none.
static PyObject *prepare(const Group *g, const kos_request *q) {
    plan *made = PyMem_Malloc(offsetof(plan, prepared) + kos_prepared_bytes(g->core.size));
    PyObject *capsule = NULL;
    if (!made)
        PyErr_NoMemory();
    else if (!kos_prepare(&g->core, q, &made->prepared)) {
        made->request = *q;
        capsule = PyCapsule_New(made, NAME, free_prepared);
    }
    if (!capsule)
        PyMem_Free(made);
    return capsule;
}

PyObject *resized(const Group *g, PyObject *capsule, const call_sizes *sizes, uint64_t *published) {
    kos_request q = *request_of(capsule);
    const uint64_t *compared = q.operation == KOS_ALL_TO_ALL ? NULL  // ranks have different counts
        : q.send_counts ? sizes->send_counts : q.recv_counts ? sizes->recv_counts : NULL;
    q.send_counts = sizes->send_counts;
    q.recv_counts = sizes->recv_counts;
    q.count = sizes->count;
    *published = q.varies ? sizes->first : q.operation == KOS_ALL_TO_ALL ? q.count * (uint64_t)g->core.size : q.count;
    q.fingerprint = q.operation < KOS_SEND ? kos_sized(q.sizeless, q.varies ? 0 : *published) : 0;
    for (int r = 0; q.varies && compared && r < g->core.size; r++)
        q.fingerprint = kos_sized(q.fingerprint, compared[r]);
    PyObject *made = prepare(g, &q);
    PyErr_Clear();
    return made;
}

PyObject *group_prepare(PyObject *self, PyObject *args) {
    Group *g = (Group *)self;
    kos_request q = {0};
    PyObject *sent, *received;
    if (!PyArg_ParseTuple(args, "iiiiKpOOiiKKK|K:prepare", &q.operation, &q.dtype, &q.op, &q.root, &q.count, &q.varies,
                          &sent, &received, &q.dst, &q.src, &q.tag, &q.recv_tag, &q.fingerprint,
                          &q.sizeless)
        || read_counts(g, sent, &q.send_counts) || read_counts(g, received, &q.recv_counts))
        return NULL;
    PyObject *capsule = prepare(g, &q);
    return capsule || PyErr_Occurred() ? capsule : Py_NewRef(Py_None);
}

static PyMethodDef work_methods[] = {
    {"done", work_done, METH_NOARGS, NULL},
    {"wait", work_wait, METH_NOARGS, NULL},
    {"cancel", work_cancel, METH_NOARGS, NULL},
    {"missing", work_missing, METH_O, NULL},
    {0},
};
static PyType_Slot work_slots[] = {{Py_tp_dealloc, work_dealloc}, {Py_tp_methods, work_methods}, {0}};
PyType_Spec work_spec = {"kos._core.native.Work", sizeof(Work), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, work_slots};
