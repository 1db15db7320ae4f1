// The calls that need no Python: an operation of a communicator on NumPy arrays whose signature is known.
//
// An Operation stands where the method of the communicator was.  It compares its arguments with those of earlier calls:
// arrays by dtype, shape and flags, integers and lists of them by value, all others by identity.  A call that it knows
// is numbered, recorded and started here.  If the call completes while the GIL is held, no Python code runs.  Otherwise
// Operations._start_work completes it.  If the core knows a call but cannot start it, Operations._start_cached starts it
// without checks.  Operations._start_uncached starts all other calls, and returns for each what the core must
// know to repeat it.
//
// Many functions of Python's C API can run Python code: releasing an object, reading an attribute, and, up to Python
// 3.11, any allocation that collects garbage.  That code may make the same call, set a timeout, or close the
// communicator, all of which can free cached calls.  Such steps therefore come before the cache lookup, or after the
// call has begun and is recorded.  Between these two points nothing here runs Python code.
#include "objects.h"

// What stands for one method of a communicator.
typedef struct {
    PyObject_HEAD
    Group *group;
    PyObject *method, *name, *text;
    PyMethodDef definition;          // whose strings are those of name and text
    call_cache cache;
    unsigned generation;  // that of the Group for which the calls are known
} Operation;

PyTypeObject *operation_type;
PyObject *s_closed, *s_requires_grad, *s_is_neg, *s_cuda_stream;
static PyObject *s_start_work, *s_start_cached, *s_resize, *s_interrupted;

// --- A call ----------------------------------------------------------------------------------------------------------

static int apart(const cached_call *k, char *const *data) {
    if (k->send < 0 || k->recv < 0 || k->send == k->recv)
        return 1;
    const char *send = data[k->send], *recv = data[k->recv];
    return send + k->core->send_bytes <= recv || recv + k->core->recv_bytes <= send;
}

// The Work of a call.  If it is not complete, it joins those that the engine advances.
static PyObject *in_flight(Group *g, const cached_call *k, PyObject *send, PyObject *recv, PyObject *result,
                           PyObject *sequence, PyObject *slot, PyObject *left) {
    State *s = new_state(k->work, k->prepared, send, recv, result, sequence, slot);
    if (s && left != Py_None) {
        PyList_SetItem(slot, COMPLETED, PyLong_FromLong(0));  // in progress
        s->fields[LEFT] = Py_NewRef(left);
        if (PyList_Append(g->objects[ACTIVE], (PyObject *)s))
            Py_CLEAR(s);
    }
    return (PyObject *)s;
}

// Has Python prepare a call of another size, whose Work the program gets.  Returns 0, or -1 with an exception.
static int prepare_work(Operation *o, Group *g, const call_key *key, PyObject *work, PyObject *known) {
    PyObject *description = PyObject_CallMethodObjArgs(g->objects[COMM], s_resize, work, known, NULL);
    if (description && description != Py_None && o->generation == g->generation)
        cache_adopt(&o->cache, key, ((State *)work)->fields[PREPARED], description);
    Py_XDECREF(description);
    return description ? 0 : -1;
}

// Whether the core may start a call: nothing is in flight or has failed, and no batch is open.
static int is_free(Group *g) {
    return !g->off && kos_alone(&g->core) && !PyList_Size(g->objects[ACTIVE])
        && kos_failure(&g->core, KOS_WORD_SEQUENCE).status != KOS_FAILED && *g->active == Py_None && *g->last == Py_None
        && *g->first == Py_None && has_spare(g);
}

// A receive from any rank or of any length, if its message arrives soon and is complete then; NULL without an exception
// if Python must start it.  Returns what the receive returns: the array or bytes, and the source if that may be any rank.
static PyObject *receive(Group *g, const cached_call *k, PyObject *const *args, char *const *data, PyObject *frame) {
    const int any_rank = k->core->src == KOS_ANY_RANK, collects = PyGC_Disable();  // a collection would run Python
    int rank;
    const kos_arrival *first = kos_await(&g->core, k->core, g->core.spin_ns, &rank);
    kos_prepared message = *k->core;
    PyObject *result = NULL, *value = NULL, *sequence = NULL, *old[2];
    if (first && kos_is_kept(first) && (first->what >> KOS_DTYPE_AT & 0xff) == message.recv_tag >> KOS_DTYPE_AT
        && (message.any_length || first->bytes == message.recv_bytes)) {
        message.src = rank;
        message.recv_bytes = first->bytes;
        value = message.any_length ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)first->bytes)
            : Py_NewRef(args[k->result]);
        result = any_rank && value ? Py_BuildValue("Oi", value, rank) : Py_XNewRef(value);
        sequence = result ? PyIter_Next(g->objects[MESSAGES]) : NULL;
    }
    if (collects)
        PyGC_Enable();
    if (sequence) {
        g->hits++;
        if (any_rank)
            g->core.last_source = rank;
        begin(g, &message, KOS_WORD_SEQUENCE, NULL, message.any_length ? PyBytes_AsString(value) : data[k->recv]);
        PyObject *slot = note(g, k->description, sequence, frame, old);
        PyList_SetItem(slot, COMPLETED, nanoseconds());
        Py_DECREF(old[0]);
        Py_DECREF(old[1]);
        Py_DECREF(sequence);
    }
    Py_XDECREF(value);
    if (!sequence)
        Py_CLEAR(result);
    return result;
}

// Starts a known call.  Returns NULL without an exception if Python must start it.
static PyObject *run(Operation *o, Group *g, const cached_call *k, const call_key *key, PyObject *const *args,
                     char *const *data, PyObject *frame) {
    PyObject *const *objects = g->objects;
    if (!k->core)
        return k->call == Py_None ? NULL
            : queue_call(g, k->core_call, frame, k->result < 0 ? Py_None : args[k->result],
                         k->send < 0 ? NULL : data[k->send], k->recv < 0 ? NULL : data[k->recv]);
    const int message = k->core->algorithm == KOS_POINT_TO_POINT, waits = k->waits;  // Python code may free k
    if (!apart(k, data) || !is_free(g))
        return NULL;
    if (k->core->any_length || k->core->src == KOS_ANY_RANK)
        return waits ? receive(g, k, args, data, frame) : NULL;
    PyObject *sequence = PyIter_Next(objects[message ? MESSAGES : COLLECTIVES]);
    if (!sequence)
        return NULL;
    PyObject *send = k->send < 0 ? Py_None : args[k->send], *recv = k->recv < 0 ? Py_None : args[k->recv];
    PyObject *result = k->result < 0 ? Py_None : args[k->result], *core_call = Py_NewRef(k->core_call), *old[2];
    void *from = k->send < 0 ? NULL : data[k->send], *to = k->recv < 0 ? NULL : data[k->recv];
    g->hits++;
    const uint64_t number = message ? KOS_WORD_SEQUENCE : PyLong_AsUnsignedLongLong(sequence);
    const int is_resized = k->own_call && !k->own_prepared;
    if (is_resized && !message)
        kos_publish_resized(&g->core, number, k->core->fingerprint, k->described, k->published);
    const kos_result r = begin(g, k->core, number, from, to);
    PyObject *slot = note(g, k->description, sequence, frame, old);  // while the data is on its way
    PyObject *left = go_on(g, k->call, r, send, recv, waits);
    PyList_SetItem(slot, COMPLETED, left == Py_None ? nanoseconds() : Py_NewRef(Py_None));
    PyObject *value = left == Py_None && waits ? Py_NewRef(result)
        : in_flight(g, k, send, recv, result, sequence, slot, left);
    PyObject *resized = value && is_resized && !waits ? value : NULL;
    if (resized && prepare_work(o, g, key, resized, k->description)) {
        value = NULL;
        Py_DECREF(resized);
    }
    if (value && left != Py_None && (waits || !is_pending(left))) {
        PyObject *work = value;
        value = PyObject_CallMethodObjArgs(objects[COMM], s_start_work, work, Py_True, NULL);
        PyObject *prepared = ((State *)work)->fields[PREPARED];
        if (value && is_resized && waits && prepared != PyTuple_GetItem(core_call, CALL_PREPARED)
            && o->generation == g->generation) {  // Python has prepared it, because it was in flight for long
            PyObject *description = PyObject_GetAttrString(prepared, "description");
            if (description)
                cache_adopt(&o->cache, key, prepared, description);
            PyErr_Clear();
            Py_XDECREF(description);
        }
        Py_DECREF(work);
    }
    PyObject *used[] = {left, old[0], old[1], core_call, sequence};
    for (int i = 0; i < 5; i++)
        Py_DECREF(used[i]);
    return value;
}

// Has Python start a known call that the core cannot start.  Returns NULL without an exception if the call must be
// checked, for example because its arrays overlap in another way than those of the first such call.
static PyObject *start_cached(Operation *o, Group *g, const call_key *key, PyObject *const *args, char *const *data) {
    const cached_call *k = o->generation == g->generation ? cache_find(&o->cache, key) : NULL;  // run() may clear it
    if (!k || k->own_call)
        return NULL;
    PyObject *core_call = Py_NewRef(k->core_call);
    const long x = PyLong_AsLong(PyTuple_GetItem(core_call, INPUT));
    const long out = PyLong_AsLong(PyTuple_GetItem(core_call, OUTPUT));
    uint64_t number[3];
    for (int i = 0; i < 3; i++)
        number[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(core_call, DISTANCE + i));
    PyObject *result = NULL;
    if (is_as_far(x < 0 ? NULL : data[x], out < 0 ? NULL : data[out], number[1], number[2], number[0]))
        result = PyObject_CallMethodObjArgs(g->objects[COMM], s_start_cached, PyTuple_GetItem(core_call, CALL_PREPARED),
                                            PyTuple_GetItem(core_call, STREAM), x < 0 ? Py_None : args[x],
                                            out < 0 ? Py_None : args[out], NULL);
    Py_DECREF(core_call);
    if (result == Py_NotImplemented)
        Py_CLEAR(result);
    return result;
}

// Has Python check and start a call, and stores the call if it has a key.
static PyObject *start_uncached(Operation *o, Group *g, const call_key *key, PyObject *const *args,
                                Py_ssize_t positional, PyObject *names) {
    const unsigned generation = g->generation;
    const Py_ssize_t count = key->words ? positional + (names ? PyTuple_Size(names) : 0) : 0;
    uint64_t identities[ARGUMENTS];
    for (Py_ssize_t a = 0; a < count; a++)
        identities[a] = identity_of(args[a]);
    PyObject *given, *options, *result = NULL, *core_call = NULL, *both = NULL;
    if (!unpack(args, positional, names, &given, &options))
        both = PyObject_CallFunctionObjArgs(o->method, given, options, key->words ? Py_True : Py_False, NULL);
    if (both && PyArg_ParseTuple(both, "OO", &result, &core_call)) {
        Py_INCREF(result);
        for (Py_ssize_t a = 0; a < count; a++)
            if (identity_of(args[a]) != identities[a])
                core_call = Py_None;  // the argument has changed, and `core_call` holds the new objects
        if (core_call != Py_None && o->generation == generation)  // else the cache was cleared meanwhile
            cache_store(&o->cache, key, core_call);
        PyErr_Clear();  // the call itself has succeeded
    }
    PyObject *used[] = {both, given, options};
    for (int i = 0; i < 3; i++)
        Py_XDECREF(used[i]);
    return result;
}

// A call has raised: the communicator is aborted if the handler of a signal did.
static void end_if_interrupted(Group *g, PyObject *name) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace)
        PyException_SetTraceback(error, trace);
    PyObject *none = PyObject_CallMethodObjArgs(g->objects[COMM], s_interrupted, name, error, NULL);
    if (none) {
        PyErr_Restore(type, error, trace);
        Py_DECREF(none);
        return;
    }
    PyObject *used[] = {type, error, trace};
    for (int i = 0; i < 3; i++)
        Py_XDECREF(used[i]);
}

static PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t positional, PyObject *names) {
    Operation *o = (Operation *)self;
    Group *g = o->group;
    if (!g || !g->objects[COMM])
        return PyErr_Format(PyExc_RuntimeError, "expected a communicator in use, got one that is freed");
    Py_INCREF((PyObject *)g);
    call_key key;
    char *data[ARGUMENTS];
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    while (o->generation != g->generation) {
        o->generation = g->generation;
        cache_forget(&o->cache);
    }
    make_key(&key, data, args, positional, names);
    const cached_call *k = key.words && o->generation == g->generation ? cache_find(&o->cache, &key) : NULL;
    if (!k && key.words && o->generation == g->generation)
        k = cache_resize(&o->cache, g, &key);
    const int is_stored = k && !k->own_call;
    PyObject *result = k && frame ? run(o, g, k, &key, args, data, frame) : NULL;
    if (k && !result && !PyErr_Occurred())
        result = start_cached(o, g, &key, args, data);
    if (is_stored)
        key.words = 0;
    if (!result && !PyErr_Occurred())
        result = start_uncached(o, g, &key, args, positional, names);
    if (!result)
        end_if_interrupted(g, o->name);
    if (o->cache.dropped)
        cache_tidy(&o->cache);
    Py_DECREF((PyObject *)g);
    return result;
}

// --- The operations of a group ---------------------------------------------------------------------------------------

// bind(example, address, comm, backend, node, board, active, counter, slots, collectives, messages): to what the
// operations use.  ``example`` is an array of float64, 2 x 3.  False if NumPy's layout of arrays is another one, or the
// group is bound.
PyObject *group_bind(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Group *g = (Group *)self;
    PyObject **objects = g->objects;
    if (count != OBJECTS + 1)
        return PyErr_Format(PyExc_TypeError, "bind: expected %d arguments, got %zd", OBJECTS + 1, count);
    const ndarray *x = (ndarray *)args[0];
    const void *address = PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (objects[COMM] || !(g->active = slot_of(args[COMM + 1], "_active"))
        || !(g->first = slot_of(args[FAILURES + 1], "first")) || !(g->last = slot_of(args[STATUS + 1], "last"))
        || x->data != address || x->nd != 2 || x->dimensions[0] != 2 || x->dimensions[1] != 3
        || (x->flags & FLAGS) != FLAGS)
        Py_RETURN_FALSE;
    Py_buffer counter;  // its memory does not move: nothing is added to that array
    if (PyObject_GetBuffer(args[COUNTER + 1], &counter, PyBUF_WRITABLE))
        return NULL;
    g->recorded = counter.buf;
    g->slots = (size_t)PyList_Size(args[SLOTS + 1]);
    PyBuffer_Release(&counter);
    take_ndarrays(Py_TYPE(args[0]));
    for (int i = COMM; i < OBJECTS; i++)
        objects[i] = Py_NewRef(args[i + 1]);
    Py_RETURN_TRUE;
}

// method(name, start, docstring): the object that replaces that method of the communicator.  `start` is like
// Operations._start_uncached.
PyObject *group_method(PyObject *self, PyObject *args) {
    PyObject *name, *method, *text;
    if (!PyArg_ParseTuple(args, "UOU:method", &name, &method, &text))
        return NULL;
    Operation *o = (Operation *)PyType_GenericNew(operation_type, NULL, NULL);
    if (!o)
        return NULL;
    o->group = (Group *)Py_NewRef(self);
    o->name = Py_NewRef(name);
    o->method = Py_NewRef(method);
    o->text = Py_NewRef(text);
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
    return cache_traverse(&o->cache, visit, arg);
}

static int operation_clear(PyObject *self) {
    Operation *o = (Operation *)self;
    cache_forget(&o->cache);
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
PyType_Spec operation_spec = {
    "kos._core.native.Operation", sizeof(Operation), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, operation_slots,
};

int eager_init(void) {
    const struct { PyObject **to; const char *name; } names[] = {
        {&s_closed, "closed"}, {&s_start_work, "_start_work"}, {&s_start_cached, "_start_cached"}, {&s_resize, "_resize"},
        {&s_interrupted, "_interrupted"}, {&s_requires_grad, "requires_grad"}, {&s_is_neg, "is_neg"},
        {&s_cuda_stream, "__cuda_stream__"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].to = PyUnicode_InternFromString(names[i].name)))
            return -1;
    return 0;
}
