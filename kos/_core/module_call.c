// The path of a call from Python: its arrays, a start, the wait, and the Work if it does not complete at once.
#include "module.h"

PyTypeObject *work_type, *prepared_type;

static uint8_t nothing[64];  // the memory of no array: C forbids copies of no bytes to NULL

// --- Works -----------------------------------------------------------------------------------------------------------

static void release(arrays *a) {
    if (a->send.obj)
        PyBuffer_Release(&a->send);
    if (a->recv.obj)
        PyBuffer_Release(&a->recv);
}

void work_ended(kos_work *w) {
    Work *work = (Work *)((char *)w - offsetof(Work, core));
    release(&work->held);
    Py_DECREF((PyObject *)work);  // the reference of the queue
}

// The Work of a call that has begun, with this result; takes over the arrays.  One that is pending joins the queue.
static PyObject *work_of(Group *g, Prepared *p, const kos_work *w, kos_result r, arrays *a) {
    Work *work = PyObject_New(Work, work_type);
    if (!work) {
        release(a);
        return NULL;
    }
    work->core = *w;
    work->held = *a;
    work->group = Py_NewRef((PyObject *)g);
    work->prepared = Py_NewRef((PyObject *)p);
    if (r.status == KOS_PENDING) {
        Py_INCREF((PyObject *)work);
        kos_enqueue(&g->core, &work->core);
    } else {
        work->core.result = r;
        kos_set(&work->core, 0, KOS_BROKEN);
    }
    return (PyObject *)work;
}

PyObject *raise_failure(Group *g, kos_result r) {
    unsigned long long word = r.word;
    PyObject *raised = PyObject_CallMethod(g->objects[OWNER], "failed", "iiK", r.code, r.rank, word);
    if (raised)
        PyErr_SetString(PyExc_RuntimeError, "expected the owner's failed() to raise");
    Py_XDECREF(raised);
    return NULL;
}

static int is_only(const kos_group *g, const kos_work *w) {
    return ((g->head == w && !g->messages) || (g->messages == w && !g->head)) && !w->next;
}

// Advances a Work for KOS_WAIT_NS at most, and not while there are others, which Python advances too.  Returns a new
// reference to None if it is complete, or to the Work; NULL with an exception, which may be that of a signal: nobody
// would have the Work of a message then, so it is cancelled.
static PyObject *wait_briefly(Group *g, PyObject *work) {
    kos_work *w = &((Work *)work)->core;
    const int64_t start = kos_clock();
    const int yields = g->core.yields || !g->core.spin_ns;
    for (int polls = 0;; polls++) {
        kos_advance(&g->core);
        const int phase = kos_phase_of(w);
        if (phase == KOS_BROKEN)
            return raise_failure(g, w->result);
        if (phase == KOS_ENDED)
            return Py_NewRef(Py_None);
        if (!is_only(&g->core, w) || kos_clock() - start >= KOS_WAIT_NS)
            break;
        g->parks += !polls;
        Py_BEGIN_ALLOW_THREADS
        kos_rest(start, yields);
        Py_END_ALLOW_THREADS
    }
    if (!PyErr_CheckSignals())
        return Py_NewRef(work);
    kos_abandon(&g->core, w);
    return NULL;
}

int is_pending(PyObject *work) { return kos_phase_of(&((Work *)work)->core) < KOS_ENDED; }

int spin_only(Work *work) {
    Group *g = (Group *)work->group;
    if (is_pending((PyObject *)work) && is_only(&g->core, &work->core))
        kos_spin_queued(&g->core, &work->core);
    return kos_phase_of(&work->core) == KOS_ENDED;
}

static PyObject *work_done(PyObject *self, PyObject *unused) {
    Work *work = (Work *)self;
    Group *g = (Group *)work->group;
    kos_advance(&g->core);
    int phase = kos_phase_of(&work->core);
    if (phase == KOS_BROKEN)
        return raise_failure(g, work->core.result);
    return PyBool_FromLong(phase == KOS_ENDED);
}

// wait(): for a short time; None if the call is then complete, else this Work.
static PyObject *work_wait(PyObject *self, PyObject *unused) {
    return wait_briefly((Group *)((Work *)self)->group, self);
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

// Begins a call whose memory is `from` and `to`, NULL for none; if it is the only one it advances, and spins if it
// `waits`.
static kos_result begin(Group *g, Prepared *p, uint64_t sequence, const void *from, void *to, int waits, kos_work *w) {
    kos_result r = kos_start(&g->core, p->core, sequence, from ? from : to ? to : nothing, to, w);
    return r.status == KOS_PENDING && kos_alone(&g->core) ? kos_spin(&g->core, w, waits ? g->core.spin_ns : 0) : r;
}

// Starts a call whose arrays are held; waits briefly if it `waits`.  Returns None if it is complete, or a Work.
static PyObject *start(Group *g, Prepared *p, uint64_t sequence, arrays *a, int waits) {
    kos_work w;
    kos_result r = begin(g, p, sequence, a->send.obj ? a->send.buf : NULL, a->recv.obj ? a->recv.buf : NULL, waits, &w);
    if (r.status != KOS_PENDING) {
        release(a);
        return r.status == KOS_FAILED ? raise_failure(g, r) : Py_NewRef(Py_None);
    }
    PyObject *work = work_of(g, p, &w, r, a);
    if (!work)
        return NULL;
    if (!waits) {
        kos_advance(&g->core);
        return work;
    }
    PyObject *result = wait_briefly(g, work);
    Py_DECREF(work);
    return result;
}

// Keeps the memory of an array or a tensor; -1 with an exception.
static int keep(PyObject *x, Py_buffer *array) {
    if (PyObject_CheckBuffer(x))
        return PyObject_GetBuffer(x, array, PyBUF_SIMPLE);
    array->obj = PyObject_CallMethod(x, "detach", NULL);  // another tensor: x may be given other memory
    return array->obj ? 0 : -1;
}

PyObject *start_now(Group *g, Prepared *p, uint64_t sequence, PyObject *send, PyObject *recv, void *from, void *to,
                    int waits) {
    kos_work w;
    kos_result r = begin(g, p, sequence, from, to, waits, &w);
    if (r.status == KOS_DONE)
        return Py_NewRef(Py_None);
    arrays a;
    a.send.obj = a.recv.obj = NULL;
    if (r.status == KOS_PENDING && ((from && from != to && keep(send, &a.send)) || (to && keep(recv, &a.recv)))) {
        release(&a);
        return NULL;
    }
    return work_of(g, p, &w, r, &a);
}

// Raises, for an array of a call; returns -1.  `got` NULL: it has no memory.
static int refuse(const Prepared *p, const char *which, uint64_t bytes, const Py_buffer *got) {
    const char *text = got ? "%s: expected %llu contiguous bytes aligned to %u, got %zd at %p"
                           : "%s: expected %llu contiguous bytes aligned to %u, got no such memory";
    PyErr_Format(PyExc_ValueError, text, which, (unsigned long long)bytes, p->core->alignment, got ? got->len : 0,
                 got ? got->buf : NULL);
    return -1;
}

// Holds one array of a call; returns 0, or -1 with an exception.
static int hold(const Prepared *p, const char *which, PyObject *x, uint64_t bytes, int flags, Py_buffer *array) {
    if (PyObject_GetBuffer(x, array, flags)) {
        PyErr_Clear();
        array->obj = NULL;
        return refuse(p, which, bytes, NULL);
    }
    if ((uint64_t)array->len == bytes && !((uintptr_t)array->buf & (p->core->alignment - 1)))
        return 0;
    refuse(p, which, bytes, array);
    PyBuffer_Release(array);
    return -1;
}

// start(sequence, waits, send, recv); None where this rank has no such array, twice the same array in place.
static PyObject *prepared_start(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Prepared *p = (Prepared *)self;
    Group *g = (Group *)p->group;
    const kos_prepared *core = p->core;
    arrays a;
    a.send.obj = a.recv.obj = NULL;
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "start: expected a number, a flag and two arrays, got %zd", count);
    const uint64_t sequence = PyLong_AsUnsignedLongLong(args[0]);
    const int waits = PyObject_IsTrue(args[1]);
    PyObject *send = args[2], *recv = args[3];
    if (PyErr_Occurred())
        return NULL;
    if (send == recv && send != Py_None) {
        const uint64_t bytes = core->recv_bytes ? core->recv_bytes : core->send_bytes;
        if (hold(p, "x", send, bytes, core->recv_bytes ? PyBUF_WRITABLE : PyBUF_SIMPLE, &a.recv))
            return NULL;
        if (core->recv_bytes && core->send_bytes && core->recv_bytes != core->send_bytes) {
            refuse(p, "x", core->send_bytes, &a.recv);
            release(&a);
            return NULL;
        }
        return start(g, p, sequence, &a, waits);
    }
    const int copies = core->operation == KOS_BROADCAST && core->root == g->core.rank;
    if ((send != Py_None || core->send_bytes) && hold(p, "x", send, core->send_bytes, PyBUF_SIMPLE, &a.send))
        return NULL;
    if ((recv != Py_None || (core->recv_bytes && !copies))
        && hold(p, "out", recv, core->recv_bytes, PyBUF_WRITABLE, &a.recv)) {
        release(&a);
        return NULL;
    }
    return start(g, p, sequence, &a, waits);
}

// The owner of a group keeps its Prepareds: a cycle, which the clear of the group breaks.
static int prepared_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT((PyObject *)Py_TYPE(self));
    Py_VISIT(((Prepared *)self)->group);
    return 0;
}

static void prepared_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_DECREF(((Prepared *)self)->group);
    PyMem_Free(((Prepared *)self)->core);
    PyObject_GC_Del(self);
    Py_DECREF((PyObject *)type);
}

// The counts are bytes: a uint64_t for each rank.
PyObject *group_prepare(PyObject *self, PyObject *args) {
    Group *g = (Group *)self;
    kos_request q = {0};
    const Py_ssize_t bytes = g->core.size * (Py_ssize_t)sizeof(uint64_t);
    Py_ssize_t sent = bytes, received = bytes;
    unsigned long long count, fingerprint, tag, recv_tag;
    if (!PyArg_ParseTuple(args, "iiiiKpz#z#iiKKK:prepare", &q.operation, &q.dtype, &q.op, &q.root, &count, &q.varies,
                          &q.send_counts, &sent, &q.recv_counts, &received, &q.dst, &q.src, &tag, &recv_tag,
                          &fingerprint))
        return NULL;
    if ((q.send_counts && sent != bytes) || (q.recv_counts && received != bytes))
        return PyErr_Format(PyExc_ValueError, "expected counts of %zd bytes or None, got %zd and %zd", bytes, sent,
                            received);
    q.count = count;
    q.fingerprint = fingerprint;
    q.tag = tag;
    q.recv_tag = recv_tag;
    kos_prepared *core = PyMem_Malloc(kos_prepared_bytes(g->core.size));
    if (!core)
        return PyErr_NoMemory();
    Prepared *p = kos_prepare(&g->core, &q, core) ? NULL : PyObject_GC_New(Prepared, prepared_type);
    if (!p) {
        PyMem_Free(core);
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    p->core = core;
    p->group = Py_NewRef(self);
    PyObject_GC_Track((PyObject *)p);
    return (PyObject *)p;
}

// --- The types -------------------------------------------------------------------------------------------------------

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

static PyMethodDef prepared_methods[] = {
    {"start", (PyCFunction)(void *)prepared_start, METH_FASTCALL, NULL},
    {0},
};
static PyType_Slot prepared_slots[] = {
    {Py_tp_dealloc, prepared_dealloc}, {Py_tp_traverse, prepared_traverse}, {Py_tp_methods, prepared_methods}, {0},
};
PyType_Spec prepared_spec = {"kos._core.native.Prepared", sizeof(Prepared), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             prepared_slots};
