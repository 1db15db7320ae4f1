// kos._core.native: the core as Python sees it.
//
// A call that the core completes executes no Python code.  Otherwise the core returns a Work, which Python polls, or
// calls failed(code, rank, word, *counts) of the group's owner, a Python object, which raises.
#include "objects.h"

#include <pthread.h>

// publish(sequence, fingerprint): this rank begins a call that the core does not run.
static PyObject *group_publish(PyObject *self, PyObject *args) {
    kos_group *g = &((Group *)self)->core;
    unsigned long long sequence, fingerprint;
    if (!PyArg_ParseTuple(args, "KK:publish", &sequence, &fingerprint))
        return NULL;
    if (kos_is_over(g))
        return raise_failure((Group *)self, kos_failure(g, 0));
    kos_publish(g, sequence, fingerprint);
    Py_RETURN_NONE;
}

// compare(sequence, fingerprint): compares that call of this rank, and those before it, with the calls of other ranks.
// Returns the first call that differs and the rank that has made it, or None.
static PyObject *group_compare(PyObject *self, PyObject *args) {
    kos_group *g = &((Group *)self)->core;
    unsigned long long sequence, fingerprint;
    const int known = PyArg_ParseTuple(args, "KK:compare", &sequence, &fingerprint), open = known && !kos_is_over(g);
    const kos_result r = open ? kos_compare(g, sequence, fingerprint) : KOS_RESULT(KOS_PENDING);
    return r.status == KOS_FAILED ? Py_BuildValue("Ki", r.word, r.rank) : known ? Py_NewRef(Py_None) : NULL;
}

// fail(sequence): fails that call and later ones on all ranks, unless the failure of an earlier call does.
static PyObject *group_fail(PyObject *self, PyObject *argument) {
    kos_group *g = &((Group *)self)->core;
    const uint64_t sequence = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    if (!kos_is_over(g)) {
        kos_fail(g, sequence);
        kos_advance(g);  // releases the arrays of what has failed
    }
    Py_RETURN_NONE;
}

// failure(): the failure word, after which its text may be read; 0 for none.
static PyObject *group_failure(PyObject *self, PyObject *unused) {
    return PyLong_FromUnsignedLongLong(kos_failure(&((Group *)self)->core, KOS_WORD_SEQUENCE).word);
}

// held(): messages that have arrived without a receive, answers in use, and whether Works are outstanding.
static PyObject *group_held(PyObject *self, PyObject *unused) {
    const kos_group *g = &((Group *)self)->core;
    int arrived = 0, answers = 0;
    for (int r = 0; r < g->size; r++) {
        for (const kos_arrival *each = g->boxes[r].arrived; each; each = each->next)
            arrived++;
        answers += (int)(g->boxes[r].answers - g->boxes[r].free_count);
    }
    return Py_BuildValue("iii", arrived, answers, !kos_alone(g));
}

// arrived(rank, tag): the first message with that tag, or any, from that rank that has no receive: its bytes, dtype and
// tag; None if there is none.
static PyObject *group_arrived(PyObject *self, PyObject *args) {
    kos_group *g = &((Group *)self)->core;
    unsigned long long tag;
    int rank;
    if (!PyArg_ParseTuple(args, "iK:arrived", &rank, &tag))
        return NULL;
    const kos_arrival *first = kos_mail_first(g, rank, tag);
    return first ? Py_BuildValue("KKK", first->bytes, first->what >> KOS_DTYPE_AT & 0xff, kos_tag(first))
                 : Py_NewRef(Py_None);
}

static PyObject *group_close(PyObject *self, PyObject *unused) {
    kos_close(&((Group *)self)->core);
    PyBuffer_Release(&((Group *)self)->memory);
    Py_RETURN_NONE;
}

static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *memory, *owner;
    int rank, size;
    if (!PyArg_ParseTuple(args, "OiiO:Group", &memory, &rank, &size, &owner))
        return NULL;
    Group *g = (Group *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!g)
        return NULL;
    g->core.ended = work_ended;
    g->objects[OWNER] = Py_NewRef(owner);
    if (!PyObject_GetBuffer(memory, &g->memory, PyBUF_WRITABLE)) {
        int error = kos_open(&g->core, g->memory.buf, g->memory.len, rank, size);
        const char *text = "expected the memory of layout(%d) and a rank of it, got %zd bytes and rank %d";
        if (error)
            PyErr_Format(error == -2 ? PyExc_MemoryError : PyExc_ValueError, text, size, g->memory.len, rank);
    }
    if (PyErr_Occurred())
        Py_CLEAR(g);
    return (PyObject *)g;
}

// forget(): all calls; each operation does so when it is called next.
static PyObject *group_forget(PyObject *self, PyObject *unused) {
    ((Group *)self)->generation++;
    Py_RETURN_NONE;
}

static int group_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT((PyObject *)Py_TYPE(self));
    for (int i = 0; i < OBJECTS; i++)
        Py_VISIT(((Group *)self)->objects[i]);
    return 0;
}

static int group_clear(PyObject *self) {
    for (int i = 0; i < OBJECTS; i++)
        Py_CLEAR(((Group *)self)->objects[i]);
    return 0;
}

static void group_dealloc(PyObject *self) {  // no Work is outstanding: each refers to its group
    Group *g = (Group *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    PyBuffer_Release(&g->memory);
    if (g->spare)
        Py_DECREF((PyObject *)work_type);
    PyObject_Free(g->spare);  // which refers to nothing but its type
    kos_free(&g->core);
    group_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF((PyObject *)type);
}

// --- The module ------------------------------------------------------------------------------------------------------

static PyObject *layout(PyObject *self, PyObject *argument) {
    long size = PyLong_AsLong(argument);
    if (size < 1 || size > KOS_MAX_RANKS)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "expected 1 to 256 ranks, got %ld", size);
    kos_layout at = kos_layout_of(size);
    return Py_BuildValue("nnnnnn", at.lines, at.rings, at.resized, at.texts, at.mailboxes, at.total);
}

static PyMethodDef group_methods[] = {
    {"prepare", group_prepare, METH_VARARGS, NULL},
    {"start", (PyCFunction)(void *)group_start, METH_FASTCALL, NULL},
    {"publish", group_publish, METH_VARARGS, NULL},
    {"compare", group_compare, METH_VARARGS, NULL},
    {"fail", group_fail, METH_O, NULL},
    {"failure", group_failure, METH_NOARGS, NULL},
    {"held", group_held, METH_NOARGS, NULL},
    {"arrived", group_arrived, METH_VARARGS, NULL},
    {"close", group_close, METH_NOARGS, NULL},
    {"bind", (PyCFunction)(void *)group_bind, METH_FASTCALL, NULL},
    {"method", group_method, METH_VARARGS, NULL},
    {"forget", group_forget, METH_NOARGS, NULL},
    {0},
};
static PyMemberDef group_members[] = {
    {"direct", T_ULONGLONG, offsetof(Group, core.direct), 0, NULL},
    {"marks", T_INT, offsetof(Group, core.marks), 0, NULL},
    {"spin_ns", T_LONGLONG, offsetof(Group, core.spin_ns), 0, NULL},
    {"yields", T_INT, offsetof(Group, core.yields), 0, NULL},
    {"parks", T_ULONGLONG, offsetof(Group, parks), READONLY, NULL},
    {"off", T_BOOL, offsetof(Group, off), 0, NULL},
    {"last_source", T_INT, offsetof(Group, core.last_source), 0, NULL},
    {"hits", T_ULONGLONG, offsetof(Group, hits), READONLY, NULL},
    {"compare_at", T_ULONGLONG, offsetof(Group, compare_at), 0, NULL},
    {0},
};
static PyType_Slot group_slots[] = {
    {Py_tp_new, group_new}, {Py_tp_dealloc, group_dealloc}, {Py_tp_traverse, group_traverse},
    {Py_tp_clear, group_clear}, {Py_tp_methods, group_methods}, {Py_tp_members, group_members}, {0},
};
static PyType_Spec group_spec = {"kos._core.native.Group", sizeof(Group), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                 group_slots};

#define CONSTANT(name) {#name, KOS_##name}
static const struct { const char *name; long value; } constants[] = {
    CONSTANT(LINE), CONSTANT(RING), CONSTANT(TEXTS), CONSTANT(TEXT_BYTES), CONSTANT(MAX_RANKS), CONSTANT(MISMATCH),
    CONSTANT(REPORTED), CONSTANT(FORKED), CONSTANT(CLOSED), CONSTANT(COUNTS), CONSTANT(MESSAGE),
    CONSTANT(REFUSED_MESSAGE), CONSTANT(WORD_SEQUENCE), CONSTANT(AWAITS_READ), CONSTANT(AWAITS_MESSAGE),
    CONSTANT(MOST_WORDS), CONSTANT(PLAN_AT), CONSTANT(ROWS_OF_TASK),
};

static PyObject *dtype(PyObject *self, PyObject *code) { return PyUnicode_FromString(kos_name_of(PyLong_AsLong(code))); }

static PyMethodDef functions[] = {
    {"dtype", dtype, METH_O, NULL},
    {"layout", layout, METH_O, NULL},
    {"tensors", take_tensors, METH_O, NULL},
    {"readable", is_readable, METH_O, NULL},
    {"arrays", take_arrays, METH_O, NULL},
    {"windows", take_windows, METH_O, NULL},
    {"factors", take_factors, METH_O, NULL},
    {"encode", codec_encode, METH_VARARGS, NULL},
    {"decode", codec_decode, METH_VARARGS, NULL},
    {0},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "native", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native(void) {
    PyObject *m = PyModule_Create(&module), *group = PyType_FromSpec(&group_spec);
    work_type = (PyTypeObject *)PyType_FromSpec(&work_spec);
    state_type = (PyTypeObject *)PyType_FromSpec(&state_spec);
    operation_type = (PyTypeObject *)PyType_FromSpec(&operation_spec);
    int error = !m || !group || !work_type || PyModule_AddObjectRef(m, "Group", group)
        || !operation_type || PyModule_AddObjectRef(m, "State", (PyObject *)state_type) || eager_init()
        || PyModule_AddFunctions(m, ops_functions) || pthread_atfork(NULL, NULL, kos_forked);
    for (size_t i = 0; !error && i < sizeof constants / sizeof *constants; i++)
        error = PyModule_AddIntConstant(m, constants[i].name, constants[i].value);
    if (error)
        Py_CLEAR(m);
    return m;
}
