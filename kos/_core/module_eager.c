// The calls that need no Python: an operation of a communicator on NumPy arrays whose signature is known.
//
// An Operation stands where the method of the communicator was.  It compares its arguments with those of earlier calls:
// arrays by dtype, shape and flags, all others by identity.  A call that it knows is numbered, recorded and started
// here.  If that completes while it holds the GIL, nothing else runs; what is left goes to Communicator._finish.  All
// other calls go to the method, and after that to Node.remember, which says how the next such call runs.
#include "module.h"

#include <string.h>
#include <time.h>

enum { ARGUMENTS = 8, DIMENSIONS = 4, KNOWN = 64 };

// The start of NumPy's PyArrayObject, which is the same in all versions; eager_init checks it.
typedef struct {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions, *strides;
    PyObject *base, *descr;
    int flags;
} ndarray;

enum { FLAGS = 0x1 | 0x100 | 0x400 };  // of NumPy: contiguous, aligned, writable

typedef struct {
    PyObject *object;  // of an array its dtype
    int dimensions;    // -1: no array
    int flags;
    Py_ssize_t shape[DIMENSIONS];
} argument;

typedef struct {
    argument arguments[ARGUMENTS];
    PyObject *keywords[ARGUMENTS];
    Py_ssize_t positional, count;
    Prepared *call;
    PyObject *prepared, *description;  // kos.comm.prepared.Prepared, and what the recorder has of it
    int send, recv, result;            // arguments, or -1
} known;

// What all operations of a communicator share.
typedef struct {
    PyObject_HEAD
    Group *group;
    PyObject *comm, *backend, *node, *board, *active;  // active: the engine's list of Works
    PyObject *recorder, *slots, *collectives, *messages;
    char off;             // in a batch
    unsigned generation;  // how often all calls were forgotten
    unsigned long long hits;  // calls that were started here
} Eager;

typedef struct {
    PyObject_HEAD
    Eager *eager;
    PyObject *method, *name, *text;
    PyMethodDef definition;  // whose strings are those of name and text
    known *calls[KNOWN];
    known *last;
    int used;
    unsigned generation;  // that of the Eager for which the calls are known
} Operation;

enum { SHARED = 10 };  // objects of an Eager

static PyTypeObject *ndarray_type, *operation_type;
static PyObject *s_active, *s_broken, *s_last, *s_count, *s_lasti, *s_remember, *s_finish, *s_asked;

static inline int is_array(PyObject *x) { return Py_TYPE(x) == ndarray_type; }

// --- What is known ---------------------------------------------------------------------------------------------------

static void forget(Operation *o) {
    for (int i = 0; i < KNOWN; i++) {
        known *k = o->calls[i];
        o->calls[i] = NULL;
        if (!k)
            continue;
        for (Py_ssize_t a = 0; a < k->count; a++) {
            Py_XDECREF(k->arguments[a].object);
            Py_XDECREF(k->keywords[a]);
        }
        Py_XDECREF((PyObject *)k->call);
        Py_XDECREF(k->prepared);
        Py_XDECREF(k->description);
        PyMem_Free(k);
    }
    o->last = NULL;
    o->used = 0;
}

static int matches(const argument *a, PyObject *x) {
    if (a->dimensions < 0)
        return a->object == x;
    if (!is_array(x))
        return 0;
    const ndarray *array = (ndarray *)x;
    if (array->descr != a->object || array->nd != a->dimensions || (array->flags & FLAGS) != a->flags)
        return 0;
    for (int d = 0; d < a->dimensions; d++)
        if (array->dimensions[d] != a->shape[d])
            return 0;
    return 1;
}

static int is_call(const known *k, PyObject *const *args, Py_ssize_t positional, Py_ssize_t count, PyObject *names) {
    if (k->positional != positional || k->count != count)
        return 0;
    for (Py_ssize_t a = 0; a < count; a++)
        if (!matches(&k->arguments[a], args[a])
            || (a >= positional && k->keywords[a] != PyTuple_GetItem(names, a - positional)))
            return 0;
    return 1;
}

// The index of a call in the table: the same for calls that match.
static unsigned place_of(PyObject *const *args, Py_ssize_t count) {
    uint64_t hash = (uint64_t)count;
    for (Py_ssize_t a = 0; a < count; a++) {
        const ndarray *array = (ndarray *)args[a];
        uint64_t part = (uint64_t)(uintptr_t)(is_array(args[a]) ? array->descr : args[a]);
        if (is_array(args[a]) && array->nd)
            part += (uint64_t)array->dimensions[array->nd - 1] * UINT64_C(0x9E3779B97F4A7C15);
        hash = (hash ^ part) * UINT64_C(0xC2B2AE3D27D4EB4F);
    }
    return (unsigned)(hash >> 40) % KNOWN;
}

static known *find(Operation *o, PyObject *const *args, Py_ssize_t positional, Py_ssize_t count, PyObject *names) {
    if (o->last && is_call(o->last, args, positional, count, names))
        return o->last;
    if (!o->used)
        return NULL;
    for (unsigned at = place_of(args, count); o->calls[at]; at = (at + 1) % KNOWN)
        if (is_call(o->calls[at], args, positional, count, names))
            return o->last = o->calls[at];
    return NULL;
}

// Keeps a call as Node.remember describes it: (native Prepared, Prepared, description, send, recv, result).
static int remember(Operation *o, PyObject *const *args, Py_ssize_t positional, Py_ssize_t count, PyObject *names,
                    PyObject *how) {
    if (o->used == KNOWN / 2)
        forget(o);
    known *k = PyMem_Calloc(1, sizeof *k);
    PyObject *call;
    if (!k || !PyArg_ParseTuple(how, "OOOiii", &call, &k->prepared, &k->description, &k->send, &k->recv, &k->result)) {
        PyMem_Free(k);
        return -1;
    }
    k->call = (Prepared *)Py_NewRef(call);
    Py_INCREF(k->prepared);
    Py_INCREF(k->description);
    k->positional = positional;
    k->count = count;
    for (Py_ssize_t a = 0; a < count; a++) {
        argument *mine = &k->arguments[a];
        const ndarray *array = (ndarray *)args[a];
        const int is = is_array(args[a]);
        mine->object = Py_NewRef(is ? array->descr : args[a]);
        mine->dimensions = is ? array->nd : -1;
        mine->flags = is ? array->flags & FLAGS : 0;
        for (int d = 0; is && d < array->nd; d++)
            mine->shape[d] = array->dimensions[d];
        k->keywords[a] = a < positional ? NULL : Py_NewRef(PyTuple_GetItem(names, a - positional));
    }
    unsigned at = place_of(args, count);
    while (o->calls[at])
        at = (at + 1) % KNOWN;
    o->calls[at] = o->last = k;
    o->used++;
    return 0;
}

// --- A call ----------------------------------------------------------------------------------------------------------

// Whether an attribute is None; on an error too.
static int is_none(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value)
        PyErr_Clear();
    Py_XDECREF(value);
    return !value || value == Py_None;
}

static PyObject *nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return PyLong_FromLongLong(now.tv_sec * 1000000000LL + now.tv_nsec);
}

// Writes the next entry of the flight recorder, as kos.comm.prepared.note does; returns it, borrowed.
static PyObject *note(Eager *e, const known *k, PyObject *sequence, PyObject *frame) {
    PyObject *count = PyObject_GetAttr(e->recorder, s_count);
    if (!count)
        return NULL;
    const long long number = PyLong_AsLongLong(count);
    Py_DECREF(count);
    PyObject *slot = PyList_GetItem(e->slots, number % PyList_Size(e->slots)), *next = PyLong_FromLongLong(number + 1);
    PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame), *at = PyObject_GetAttr(frame, s_lasti);
    PyObject *now = nanoseconds();
    const int error = !slot || !next || !at || !now || PyObject_SetAttr(e->recorder, s_count, next);
    Py_XDECREF(next);
    if (error) {
        Py_XDECREF(code);
        Py_XDECREF(at);
        Py_XDECREF(now);
        return NULL;
    }
    PyObject *entry[] = {Py_NewRef(k->description), now, code, at, Py_NewRef(sequence), Py_NewRef(Py_None),
                         Py_NewRef(Py_None)};
    for (int i = 0; i < 7; i++)
        PyList_SetItem(slot, i, entry[i]);
    return slot;
}

enum { COMPLETED = 5 };  // of an entry of the recorder

static int apart(const known *k, PyObject *const *args) {
    if (k->send < 0 || k->recv < 0 || k->send == k->recv)
        return 1;
    const char *send = ((ndarray *)args[k->send])->data, *recv = ((ndarray *)args[k->recv])->data;
    const kos_prepared *p = k->call->core;
    return send + p->send_bytes <= recv || recv + p->recv_bytes <= send;
}

// A call that is known; NULL without an exception: the method must make it.
static PyObject *run(Operation *o, const known *k, PyObject *const *args) {
    Eager *e = o->eager;
    kos_group *g = &e->group->core;
    Prepared *p = k->call;
    const int message = p->core->algorithm == KOS_MAIL;
    PyObject *frame;
    if (e->off || !kos_alone(g) || PyList_Size(e->active) || kos_failure(g, KOS_WORD_SEQUENCE).status == KOS_FAILED
        || !apart(k, args) || !is_none(e->comm, s_active) || !is_none(e->board, s_last)
        || !is_none(e->backend, s_broken) || !(frame = (PyObject *)PyEval_GetFrame()))
        return NULL;
    PyObject *sequence = PyIter_Next(message ? e->messages : e->collectives);
    PyObject *slot = sequence ? note(e, k, sequence, frame) : NULL;
    if (!slot) {
        Py_XDECREF(sequence);
        return NULL;
    }
    PyObject *send = k->send < 0 ? Py_None : args[k->send], *recv = k->recv < 0 ? Py_None : args[k->recv];
    PyObject *result = k->result < 0 ? Py_None : args[k->result], *prepared = Py_NewRef(k->prepared), *value = NULL;
    void *from = k->send < 0 ? NULL : ((ndarray *)send)->data, *to = k->recv < 0 ? NULL : ((ndarray *)recv)->data;
    const uint64_t number = message ? KOS_WORD_SEQUENCE : PyLong_AsUnsignedLongLong(sequence);
    e->hits++;
    PyObject *left = start_now(e->group, p, number, send, recv, from, to);
    if (left == Py_None) {
        PyList_SetItem(slot, COMPLETED, nanoseconds());
        value = Py_NewRef(result);
    } else if (left)
        value = PyObject_CallMethodObjArgs(e->comm, s_finish, prepared, send, recv, result, sequence, slot, left, NULL);
    Py_XDECREF(left);
    Py_DECREF(prepared);
    Py_DECREF(sequence);
    return value;
}

// Calls the method, and remembers how it went.
static PyObject *ask(Operation *o, PyObject *const *args, Py_ssize_t positional, Py_ssize_t count, PyObject *names) {
    PyObject *given = PyTuple_New(positional), *options = names ? PyDict_New() : NULL, *result = NULL;
    PyObject *node = Py_NewRef(o->eager->node);
    if (!given || (names && !options))
        goto end;
    for (Py_ssize_t a = 0; a < positional; a++)
        PyTuple_SetItem(given, a, Py_NewRef(args[a]));
    for (Py_ssize_t a = positional; a < count; a++)
        if (PyDict_SetItem(options, PyTuple_GetItem(names, a - positional), args[a]))
            goto end;
    if (PyObject_SetAttr(node, s_asked, count <= ARGUMENTS ? Py_True : Py_False))
        goto end;
    result = PyObject_Call(o->method, given, options);
    if (result && count <= ARGUMENTS) {
        PyObject *arguments = PyTuple_New(count), *how = NULL;
        for (Py_ssize_t a = 0; arguments && a < count; a++)
            PyTuple_SetItem(arguments, a, Py_NewRef(args[a]));
        if (arguments)
            how = PyObject_CallMethodObjArgs(node, s_remember, o->name, arguments, result, NULL);
        if (how && how != Py_None)
            remember(o, args, positional, count, names, how);
        PyErr_Clear();  // the call itself has succeeded
        Py_XDECREF(how);
        Py_XDECREF(arguments);
    }
end:
    Py_DECREF(node);
    Py_XDECREF(given);
    Py_XDECREF(options);
    return result;
}

static PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t positional, PyObject *names) {
    Operation *o = (Operation *)self;
    const Py_ssize_t count = positional + (names ? PyTuple_Size(names) : 0);
    if (!o->eager)
        return PyErr_Format(PyExc_RuntimeError, "expected a communicator in use, got one that is freed");
    if (o->generation != o->eager->generation) {
        forget(o);
        o->generation = o->eager->generation;
    }
    const known *k = find(o, args, positional, count, names);
    PyObject *result = k ? run(o, k, args) : NULL;
    return result || PyErr_Occurred() ? result : ask(o, args, positional, count, names);
}

// --- The types -------------------------------------------------------------------------------------------------------

// Eager(group, comm, backend, node, board, active, recorder, slots, collectives, messages)
static PyObject *eager_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Eager *e = (Eager *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!e)
        return NULL;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOO:Eager", &e->group, &e->comm, &e->backend, &e->node, &e->board, &e->active,
                          &e->recorder, &e->slots, &e->collectives, &e->messages)) {
        memset(&e->group, 0, SHARED * sizeof(PyObject *));
        Py_DECREF((PyObject *)e);
        return NULL;
    }
    PyObject **fields = (PyObject **)&e->group;
    for (size_t i = 0; i < SHARED; i++)
        Py_INCREF(fields[i]);
    return (PyObject *)e;
}

static int eager_traverse(PyObject *self, visitproc visit, void *arg) {
    PyObject **fields = (PyObject **)&((Eager *)self)->group;
    Py_VISIT((PyObject *)Py_TYPE(self));
    for (size_t i = 0; i < SHARED; i++)
        Py_VISIT(fields[i]);
    return 0;
}

static int eager_clear(PyObject *self) {
    PyObject **fields = (PyObject **)&((Eager *)self)->group;
    for (size_t i = 0; i < SHARED; i++)
        Py_CLEAR(fields[i]);
    return 0;
}

// method(name, method, docstring): what stands in for that method of the communicator.
static PyObject *eager_method(PyObject *self, PyObject *args) {
    PyObject *name, *method, *text;
    if (!PyArg_ParseTuple(args, "UOU:method", &name, &method, &text))
        return NULL;
    Operation *o = (Operation *)((allocfunc)PyType_GetSlot(operation_type, Py_tp_alloc))(operation_type, 0);
    if (!o)
        return NULL;
    o->eager = (Eager *)Py_NewRef(self);
    o->name = Py_NewRef(name);
    o->method = Py_NewRef(method);
    o->text = Py_NewRef(text);
    o->definition = (PyMethodDef){PyUnicode_AsUTF8AndSize(name, NULL), (PyCFunction)(void *)call,
                                  METH_FASTCALL | METH_KEYWORDS, PyUnicode_AsUTF8AndSize(text, NULL)};
    PyObject *function = PyErr_Occurred() ? NULL : PyCFunction_New(&o->definition, (PyObject *)o);
    Py_DECREF((PyObject *)o);
    return function;
}

// forget(): all calls; each operation does so when it is called next.
static PyObject *eager_forget(PyObject *self, PyObject *unused) {
    ((Eager *)self)->generation++;
    Py_RETURN_NONE;
}

static int operation_traverse(PyObject *self, visitproc visit, void *arg) {
    Operation *o = (Operation *)self;
    Py_VISIT((PyObject *)Py_TYPE(self));
    Py_VISIT((PyObject *)o->eager);
    Py_VISIT(o->method);
    for (int i = 0; i < KNOWN; i++)
        if (o->calls[i]) {
            Py_VISIT((PyObject *)o->calls[i]->call);
            Py_VISIT(o->calls[i]->prepared);
            Py_VISIT(o->calls[i]->description);
        }
    return 0;
}

static int operation_clear(PyObject *self) {
    Operation *o = (Operation *)self;
    forget(o);
    Py_CLEAR(o->eager);
    Py_CLEAR(o->method);
    return 0;
}

static void dealloc(PyObject *self, inquiry clear) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    PyObject_GC_Del(self);
    Py_DECREF((PyObject *)type);
}

static void eager_dealloc(PyObject *self) { dealloc(self, eager_clear); }
static void operation_dealloc(PyObject *self) {
    Operation *o = (Operation *)self;
    Py_XDECREF(o->name);  // not before: the function has their strings
    Py_XDECREF(o->text);
    dealloc(self, operation_clear);
}

static PyMethodDef eager_methods[] = {
    {"method", eager_method, METH_VARARGS, NULL}, {"forget", eager_forget, METH_NOARGS, NULL}, {0},
};
static PyMemberDef eager_members[] = {
    {"off", T_BOOL, offsetof(Eager, off), 0, NULL}, {"hits", T_ULONGLONG, offsetof(Eager, hits), READONLY, NULL}, {0},
};
static PyType_Slot eager_slots[] = {
    {Py_tp_new, eager_new}, {Py_tp_dealloc, eager_dealloc}, {Py_tp_traverse, eager_traverse},
    {Py_tp_clear, eager_clear}, {Py_tp_methods, eager_methods}, {Py_tp_members, eager_members}, {0},
};
static PyType_Spec eager_spec = {"kos._core.native.Eager", sizeof(Eager), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                 eager_slots};
static PyType_Slot operation_slots[] = {
    {Py_tp_dealloc, operation_dealloc}, {Py_tp_traverse, operation_traverse}, {Py_tp_clear, operation_clear}, {0},
};
static PyType_Spec operation_spec = {"kos._core.native.Operation", sizeof(Operation), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                     operation_slots};

// arrays(example, address): uses the type of that array, float64 of 2 x 3; False if NumPy's layout is another one.
PyObject *eager_arrays(PyObject *self, PyObject *args) {
    PyObject *example;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OK:arrays", &example, &address))
        return NULL;
    const ndarray *x = (ndarray *)example;
    if ((uintptr_t)x->data != address || x->nd != 2 || x->dimensions[0] != 2 || x->dimensions[1] != 3
        || (x->flags & FLAGS) != FLAGS)
        Py_RETURN_FALSE;
    ndarray_type = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(example));
    Py_RETURN_TRUE;
}

int eager_init(PyObject *m) {
    const struct { PyObject **to; const char *name; } names[] = {
        {&s_active, "_active"}, {&s_broken, "broken"}, {&s_last, "last"}, {&s_count, "count"}, {&s_lasti, "f_lasti"},
        {&s_remember, "remember"}, {&s_finish, "_finish"}, {&s_asked, "asked"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].to = PyUnicode_InternFromString(names[i].name)))
            return -1;
    PyObject *type = PyType_FromSpec(&eager_spec);
    operation_type = (PyTypeObject *)PyType_FromSpec(&operation_spec);
    const int error = !type || !operation_type || PyModule_AddObjectRef(m, "Eager", type);
    Py_XDECREF(type);
    return error ? -1 : 0;
}
