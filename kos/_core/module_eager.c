// The calls that need no Python: an operation of a communicator on NumPy arrays whose signature is known.
//
// An Operation stands where the method of the communicator was.  It compares its arguments with those of earlier calls:
// arrays by dtype, shape and flags, all others by identity.  A call that it knows is numbered, recorded and started
// here.  If that completes while it holds the GIL, nothing else runs; what is left goes to Communicator._finish.  All
// other calls go to the method, and after that to Node.remember, which says how the next such call runs.
#include "module.h"

#include <string.h>
#include <time.h>

enum { ARGUMENTS = 8, DIMENSIONS = 4, KNOWN = 64, MOST_WORDS = 1 + ARGUMENTS * (3 + DIMENSIONS) };

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

// What makes calls the same, in words: how many arguments there are; of each its keyword, if it has one, then the
// object, or of an array the dtype, the dimensions and flags, and the shape.  Objects are compared by identity.
typedef struct {
    size_t words;  // 0: of a call that cannot be known
    uint64_t word[MOST_WORDS];
} call_key;

typedef struct {
    call_key key;
    PyObject *how;  // what Node.remember has said of it, which keeps all objects of this call and of its key
    Prepared *call;
    PyObject *prepared, *description;  // kos.comm.prepared.Prepared, and what the recorder has of it
    int send, recv, result;            // arguments, or -1
} known;

// What stands for one method of a communicator.
typedef struct {
    PyObject_HEAD
    Group *group;
    PyObject *method, *name, *text;
    PyMethodDef definition;  // whose strings are those of name and text
    known *calls[KNOWN], **last;
    int used;
    unsigned generation;  // that of the Group for which the calls are known
} Operation;

static PyTypeObject *ndarray_type, *operation_type;
static PyObject *s_active, *s_first, *s_last, *s_count, *s_lasti, *s_remember, *s_finish, *s_asked;

// --- What is known ---------------------------------------------------------------------------------------------------

static void forget(Operation *o) {
    for (int i = 0; i < KNOWN; i++) {
        known *k = o->calls[i];
        o->calls[i] = NULL;
        if (k)
            Py_DECREF(k->how);
        PyMem_Free(k);
    }
    o->last = o->calls;
    o->used = 0;
}

static void make_key(call_key *key, PyObject *const *args, Py_ssize_t positional, Py_ssize_t count, PyObject *names) {
    uint64_t *word = key->word;
    key->words = 0;
    if (count > ARGUMENTS)
        return;
    *word++ = (uint64_t)(positional << 8 | count);
    for (Py_ssize_t a = 0; a < count; a++) {
        const ndarray *array = Py_TYPE(args[a]) == ndarray_type ? (ndarray *)args[a] : NULL;
        if (a >= positional)
            *word++ = (uintptr_t)PyTuple_GetItem(names, a - positional);
        if (array && array->nd > DIMENSIONS)
            return;
        *word++ = (uintptr_t)(array ? array->descr : args[a]);
        *word++ = array ? (uint64_t)(array->nd + 1) << 16 | (array->flags & FLAGS) : 0;
        for (int d = 0; array && d < array->nd; d++)
            *word++ = (uint64_t)array->dimensions[d];
    }
    key->words = (size_t)(word - key->word);
}

static int is_same(const call_key *a, const call_key *b) {
    return a->words == b->words && !memcmp(a->word, b->word, a->words * sizeof *a->word);
}

// The place of the call with this key; it is empty if the call is not known.
static known **find(Operation *o, const call_key *key) {
    if (*o->last && is_same(&(*o->last)->key, key))
        return o->last;
    uint64_t hash = 0;
    for (size_t w = 0; w < key->words; w++)
        hash = (hash ^ key->word[w]) * UINT64_C(0xC2B2AE3D27D4EB4F);
    unsigned at = (unsigned)(hash >> 40) % KNOWN;
    while (o->calls[at] && !is_same(&o->calls[at]->key, key))
        at = (at + 1) % KNOWN;
    return o->last = &o->calls[at];
}

// Keeps a call as Node.remember describes it: (native Prepared, Prepared, description, send, recv, result, objects).
static void remember(Operation *o, const call_key *key, PyObject *how) {
    if (*find(o, key))
        return;  // a call within this one has been kept
    if (o->used == KNOWN / 2)
        forget(o);
    PyObject *objects;
    known **place = find(o, key), *k = PyMem_Calloc(1, sizeof *k);
    if (!k || !PyArg_ParseTuple(how, "OOOiiiO", &k->call, &k->prepared, &k->description, &k->send, &k->recv, &k->result,
                                &objects)) {
        PyMem_Free(k);
        return;
    }
    k->key = *key;
    k->how = Py_NewRef(how);
    *place = k;
    o->used++;
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
static PyObject *note(PyObject *const *objects, const known *k, PyObject *sequence, PyObject *frame) {
    PyObject *count = PyObject_GetAttr(objects[RECORDER], s_count), *slots = objects[SLOTS];
    if (!count)
        return NULL;
    const long long number = PyLong_AsLongLong(count);
    Py_DECREF(count);
    PyObject *slot = PyList_GetItem(slots, number % PyList_Size(slots)), *next = PyLong_FromLongLong(number + 1);
    PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame), *at = PyObject_GetAttr(frame, s_lasti);
    PyObject *entry[] = {Py_NewRef(k->description), nanoseconds(), code, at, Py_NewRef(sequence), Py_NewRef(Py_None),
                         Py_NewRef(Py_None)};
    const int error = !slot || !next || !at || !entry[1] || PyObject_SetAttr(objects[RECORDER], s_count, next);
    Py_XDECREF(next);
    for (int i = 0; i < 7; i++)
        if (error)
            Py_XDECREF(entry[i]);
        else
            PyList_SetItem(slot, i, entry[i]);
    return error ? NULL : slot;
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
static PyObject *run(Group *g, const known *k, PyObject *const *args) {
    PyObject *const *objects = g->objects;
    const int message = k->call->core->algorithm == KOS_MAIL;
    PyObject *frame;
    if (g->off || !kos_alone(&g->core) || PyList_Size(objects[ACTIVE])
        || kos_failure(&g->core, KOS_WORD_SEQUENCE).status == KOS_FAILED || !apart(k, args)
        || !is_none(objects[COMM], s_active) || !is_none(objects[STATUS], s_last) || !is_none(objects[FAILURES], s_first)
        || !(frame = (PyObject *)PyEval_GetFrame()))
        return NULL;
    PyObject *sequence = PyIter_Next(objects[message ? MESSAGES : COLLECTIVES]);
    PyObject *slot = sequence ? note(objects, k, sequence, frame) : NULL;
    if (!slot) {
        Py_XDECREF(sequence);
        return NULL;
    }
    PyObject *send = k->send < 0 ? Py_None : args[k->send], *recv = k->recv < 0 ? Py_None : args[k->recv];
    PyObject *result = k->result < 0 ? Py_None : args[k->result], *prepared = Py_NewRef(k->prepared), *value = NULL;
    void *from = k->send < 0 ? NULL : ((ndarray *)send)->data, *to = k->recv < 0 ? NULL : ((ndarray *)recv)->data;
    const uint64_t number = message ? KOS_WORD_SEQUENCE : PyLong_AsUnsignedLongLong(sequence);
    g->hits++;
    PyObject *left = start_now(g, k->call, number, send, recv, from, to);
    if (left == Py_None) {
        PyList_SetItem(slot, COMPLETED, nanoseconds());
        value = Py_NewRef(result);
    } else if (left)
        value = PyObject_CallMethodObjArgs(objects[COMM], s_finish, prepared, send, recv, result, sequence, slot, left,
                                           NULL);
    Py_XDECREF(left);
    Py_DECREF(prepared);
    Py_DECREF(sequence);
    return value;
}

// Calls the method, and remembers how it went if the call has a key.  ``asked`` is the thread that waits for this.
static PyObject *ask(Operation *o, const call_key *key, PyObject *const *args, Py_ssize_t positional, PyObject *names) {
    PyObject *given = PyTuple_New(positional), *options = PyDict_New(), *result = NULL;
    PyObject *node = Py_NewRef(o->group->objects[NODE]);
    PyObject *asked = PyLong_FromUnsignedLong(key->words ? PyThread_get_thread_ident() : 0);
    int error = !given || !options || !asked || PyObject_SetAttr(node, s_asked, asked);
    Py_XDECREF(asked);
    for (Py_ssize_t a = 0; !error && a < positional; a++)
        PyTuple_SetItem(given, a, Py_NewRef(args[a]));
    for (Py_ssize_t a = 0; !error && names && a < PyTuple_Size(names); a++)
        error = PyDict_SetItem(options, PyTuple_GetItem(names, a), args[positional + a]);
    if (!error)
        result = PyObject_Call(o->method, given, options);
    if (result && key->words) {
        PyObject *how = PyObject_CallMethodObjArgs(node, s_remember, o->name, given, options, result, NULL);
        if (how && how != Py_None)
            remember(o, key, how);
        if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception))
            PyErr_Clear();  // the call itself has succeeded
        else if (PyErr_Occurred())
            Py_CLEAR(result);  // a signal's handler has raised
        Py_XDECREF(how);
    }
    Py_DECREF(node);
    Py_XDECREF(given);
    Py_XDECREF(options);
    return result;
}

static PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t positional, PyObject *names) {
    Operation *o = (Operation *)self;
    if (!o->group || !o->group->objects[COMM])
        return PyErr_Format(PyExc_RuntimeError, "expected a communicator in use, got one that is freed");
    if (o->generation != o->group->generation) {
        forget(o);
        o->generation = o->group->generation;
    }
    call_key key;
    make_key(&key, args, positional, positional + (names ? PyTuple_Size(names) : 0), names);
    const known *k = key.words ? *find(o, &key) : NULL;
    PyObject *result = k ? run(o->group, k, args) : NULL;
    if (k || o->group->off)
        key.words = 0;  // nothing to remember
    return result || PyErr_Occurred() ? result : ask(o, &key, args, positional, names);
}

// --- The operations of a group ---------------------------------------------------------------------------------------

// bind(example, address, comm, failures, node, status, active, recorder, slots, collectives, messages): to what the
// operations use.  ``example`` is an array of float64, 2 x 3.  False if NumPy's layout of arrays is another one, or the
// group is bound.
PyObject *group_bind(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    PyObject **objects = ((Group *)self)->objects;
    if (count != OBJECTS + 1)
        return PyErr_Format(PyExc_TypeError, "bind: expected %d arguments, got %zd", OBJECTS + 1, count);
    const ndarray *x = (ndarray *)args[0];
    const void *address = PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (objects[COMM] || x->data != address || x->nd != 2 || x->dimensions[0] != 2 || x->dimensions[1] != 3
        || (x->flags & FLAGS) != FLAGS)
        Py_RETURN_FALSE;
    ndarray_type = Py_TYPE(args[0]);
    for (int i = COMM; i < OBJECTS; i++)
        objects[i] = Py_NewRef(args[i + 1]);
    Py_RETURN_TRUE;
}

// method(name, method, docstring): what stands in for that method of the communicator.
PyObject *group_method(PyObject *self, PyObject *args) {
    PyObject *name, *method, *text;
    if (!PyArg_ParseTuple(args, "UOU:method", &name, &method, &text))
        return NULL;
    Operation *o = (Operation *)((allocfunc)PyType_GetSlot(operation_type, Py_tp_alloc))(operation_type, 0);
    if (!o)
        return NULL;
    o->group = (Group *)Py_NewRef(self);
    o->name = Py_NewRef(name);
    o->method = Py_NewRef(method);
    o->text = Py_NewRef(text);
    o->last = o->calls;
    o->definition = (PyMethodDef){PyUnicode_AsUTF8AndSize(name, NULL), (PyCFunction)(void *)call,
                                  METH_FASTCALL | METH_KEYWORDS, PyUnicode_AsUTF8AndSize(text, NULL)};
    PyObject *function = PyErr_Occurred() ? NULL : PyCFunction_New(&o->definition, (PyObject *)o);
    Py_DECREF((PyObject *)o);
    return function;
}

static int operation_traverse(PyObject *self, visitproc visit, void *arg) {
    Operation *o = (Operation *)self;
    Py_VISIT((PyObject *)Py_TYPE(self));
    Py_VISIT((PyObject *)o->group);
    Py_VISIT(o->method);
    for (int i = 0; i < KNOWN; i++)
        if (o->calls[i])
            Py_VISIT(o->calls[i]->how);
    return 0;
}

static int operation_clear(PyObject *self) {
    Operation *o = (Operation *)self;
    forget(o);
    Py_CLEAR(o->group);
    Py_CLEAR(o->method);
    return 0;
}

static void operation_dealloc(PyObject *self) {
    Operation *o = (Operation *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(o->name);  // not before: the function has their strings
    Py_XDECREF(o->text);
    operation_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF((PyObject *)type);
}

static PyType_Slot operation_slots[] = {
    {Py_tp_dealloc, operation_dealloc}, {Py_tp_traverse, operation_traverse}, {Py_tp_clear, operation_clear}, {0},
};
static PyType_Spec operation_spec = {"kos._core.native.Operation", sizeof(Operation), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                     operation_slots};

int eager_init(void) {
    const struct { PyObject **to; const char *name; } names[] = {
        {&s_active, "_active"}, {&s_first, "first"}, {&s_last, "last"}, {&s_count, "count"}, {&s_lasti, "f_lasti"},
        {&s_remember, "remember"}, {&s_finish, "_finish"}, {&s_asked, "asked"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].to = PyUnicode_InternFromString(names[i].name)))
            return -1;
    operation_type = (PyTypeObject *)PyType_FromSpec(&operation_spec);
    return operation_type ? 0 : -1;
}
