// What a call leaves behind: its Work, and its entry in the flight recorder.
//
// State: the base of kos.comm.work.Work, one start of a call.  Its fields are here so that calls that need no Python
// make Works, and so that wait() needs none where the core completes the call.
//
// The steps of a Work are a generator, which is made when Python first needs it.  `core_work` is the part that the core
// has begun.
#include "objects.h"

#include <time.h>

PyTypeObject *state_type;

const PyObject *peek(PyObject *x, PyObject *name, int is_method) {
    PyObject *value = is_method ? PyObject_CallMethodObjArgs(x, name, NULL) : PyObject_GetAttr(x, name);
    if (!value)
        PyErr_Clear();
    Py_XDECREF(value);
    return value;
}

PyObject **slot_of(PyObject *x, const char *name) {
    for (PyTypeObject *type = Py_TYPE(x); type; type = PyType_GetSlot(type, Py_tp_base))
        for (const PyMemberDef *m = PyType_GetSlot(type, Py_tp_members); m && m->name; m++)
            if (m->type == T_OBJECT_EX && !strcmp(m->name, name))
                return (PyObject **)((char *)x + m->offset);
    return NULL;
}

// Return None where memory for the value ran out. This must not raise, because the call has already begun.
static PyObject *or_none(PyObject *value) {
    if (value)
        return value;
    PyErr_Clear();
    return Py_NewRef(Py_None);
}

static int has(const State *s, int field) { return s->fields[field] && s->fields[field] != Py_None; }

void put(PyObject **at, PyObject *value) { Py_XDECREF(swap(at, value)); }

State *new_state(PyObject *type, PyObject *prepared, PyObject *send, PyObject *recv, PyObject *array,
                 PyObject *sequence, PyObject *record) {
    const int collects = PyGC_Disable();  // a collection here, as Python 3.11 makes them, would run Python
    State *s = (State *)((allocfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc))((PyTypeObject *)type, 0);
    if (collects)
        PyGC_Enable();
    PyObject *values[] = {prepared, send, recv, array, sequence, record};
    for (int field = 0; s && field < LEFT; field++)
        s->fields[field] = Py_NewRef(values[field]);
    return s;
}

PyObject *nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return or_none(PyLong_FromLongLong(now.tv_sec * 1000000000LL + now.tv_nsec));
}

PyObject *note(Group *g, PyObject *description, PyObject *sequence, PyObject *frame, PyObject **old) {
    PyObject *slot = PyList_GetItem(g->objects[SLOTS], (Py_ssize_t)(*g->recorded % g->slots));
    PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
    static getter lasti_of;  // the getter itself: looking up f_lasti takes longer
    for (const PyGetSetDef *d = lasti_of ? NULL : PyType_GetSlot(Py_TYPE(frame), Py_tp_getset); d && d->name; d++)
        lasti_of = strcmp(d->name, "f_lasti") ? lasti_of : d->get;
    PyObject *at = or_none(lasti_of ? lasti_of(frame, NULL) : PyObject_GetAttrString(frame, "f_lasti"));
    PyObject *entry[] = {Py_NewRef(description), nanoseconds(), code, at, Py_NewRef(sequence)};
    old[0] = Py_NewRef(PyList_GetItem(slot, 0));
    old[1] = Py_NewRef(PyList_GetItem(slot, CODE));
    ++*g->recorded;
    for (int i = 0; i < 5; i++)
        PyList_SetItem(slot, i, entry[i]);
    PyList_SetItem(slot, FAILED, Py_NewRef(Py_None));
    return slot;
}

// (prepared, send, recv, array)
static int state_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    PyObject *given[] = {NULL, NULL, NULL, NULL}, *number = PyLong_FromLong(-1);
    const int read = PyArg_UnpackTuple(args, "Work", 1, 4, &given[0], &given[1], &given[2], &given[3]);
    for (int field = PREPARED; read && field <= ARRAY; field++)
        put(&((State *)self)->fields[field], given[field]);
    put(&((State *)self)->fields[SEQUENCE], number);
    Py_XDECREF(number);
    return read ? 0 : -1;
}

// Try to finish this Work in C. Valid only if it is the only one in flight. Releasing its arrays may run Python code,
// which may complete or cancel this Work and begin others.
static int completes(State *s) {
    Work *left = (Work *)Py_NewRef(s->fields[LEFT]);
    PyObject *active = ((Group *)left->group)->objects[ACTIVE];
    int complete = PyList_Size(active) == 1 && PyList_GetItem(active, 0) == (PyObject *)s && spin_only(left)
        && s->fields[LEFT] == (PyObject *)left && PyList_Size(active) && PyList_GetItem(active, 0) == (PyObject *)s;
    if (complete) {
        if (PyList_GetItem(s->fields[RECORD], NUMBER) == s->fields[SEQUENCE])  // else it is that of a later call
            PyList_SetItem(s->fields[RECORD], COMPLETED, nanoseconds());
        put(&s->fields[LEFT], NULL);
        complete = !PyList_SetSlice(active, 0, 1, NULL);
    }
    Py_DECREF((PyObject *)left);
    return complete;
}

int unpack(PyObject *const *args, Py_ssize_t positional, PyObject *names, PyObject **given, PyObject **options) {
    int error = !(*given = PyTuple_New(positional)) | !(*options = PyDict_New());
    for (Py_ssize_t a = 0; !error && a < positional; a++)
        PyTuple_SetItem(*given, a, Py_NewRef(args[a]));
    for (Py_ssize_t a = 0; !error && names && a < PyTuple_Size(names); a++)
        error = PyDict_SetItem(*options, PyTuple_GetItem(names, a), args[positional + a]);
    return error;
}

static PyObject *state_wait(PyObject *self, PyObject *const *args, Py_ssize_t positional, PyObject *names) {
    State *s = (State *)self;
    if (!positional && !names && !has(s, STEPS) && !has(s, ERROR) && !has(s, CONVERT)
        && (!has(s, LEFT) || completes(s))) {
        s->reported = 1;
        return Py_NewRef(s->fields[ARRAY] ? s->fields[ARRAY] : Py_None);
    }
    PyObject *given, *options, *wait = PyObject_GetAttrString(self, "_wait_in_python"), *result = NULL;
    if (!unpack(args, positional, names, &given, &options) && wait)
        result = PyObject_Call(wait, given, options);
    Py_XDECREF(wait);
    Py_XDECREF(given);
    Py_XDECREF(options);
    return result;
}

static int state_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT((PyObject *)Py_TYPE(self));
    for (int field = 0; field < FIELDS; field++)
        Py_VISIT(((State *)self)->fields[field]);
    return 0;
}

static int state_clear(PyObject *self) {
    for (int field = 0; field < FIELDS; field++)
        Py_CLEAR(((State *)self)->fields[field]);
    return 0;
}

static void state_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    state_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF((PyObject *)type);
}

#define FIELD(name, field) {name, T_OBJECT, offsetof(State, fields) + field * sizeof(PyObject *), 0, NULL}
static PyMemberDef state_members[] = {
    FIELD("prepared", PREPARED), FIELD("send", SEND), FIELD("recv", RECV), FIELD("array", ARRAY),
    FIELD("sequence", SEQUENCE), FIELD("record", RECORD), FIELD("core_work", LEFT), FIELD("steps", STEPS),
    FIELD("_error", ERROR), FIELD("convert", CONVERT), {"reported", T_BOOL, offsetof(State, reported), 0, NULL}, {0},
};
static PyMethodDef state_methods[] = {
    {"wait", (PyCFunction)(void *)state_wait, METH_FASTCALL | METH_KEYWORDS,
     "wait($self, timeout=None)\n--\n\nWait for the operation, ``timeout`` seconds at most; returns its output array."},
    {0},
};
static PyType_Slot state_slots[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_init, state_init}, {Py_tp_dealloc, state_dealloc},
    {Py_tp_traverse, state_traverse}, {Py_tp_clear, state_clear}, {Py_tp_members, state_members},
    {Py_tp_methods, state_methods}, {0},
};
PyType_Spec state_spec = {"kos._core.native.State", sizeof(State), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, state_slots};
