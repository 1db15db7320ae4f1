// The calls that need no Python: an operation of a communicator on NumPy arrays whose signature is known.
//
// An Operation stands where the method of the communicator was.  It compares its arguments with those of earlier calls:
// arrays by dtype, shape and flags, integers and lists of them by value, all others by identity.  A call that it knows
// is numbered, recorded and started here.  If the call completes while the GIL is held, no Python code runs.  Otherwise
// Prepared.start completes it.  If the core knows a call but cannot start it, Operations._start_cached starts it
// without checks.  Operations._start_uncached starts all other calls, and returns for each a CoreCall
// (kos/comm/prepared.py), by which the core can repeat it.
//
// Many functions of Python's C API can run Python code: releasing an object, reading an attribute, and, up to Python
// 3.11, any allocation that collects garbage.  That code may make the same call, set a timeout, or close the
// communicator, all of which can free cached calls.  Such steps therefore come before the cache lookup, or after the
// call has begun and is recorded.  Between these two points nothing here runs Python code.
#include "objects.h"

enum { ARGUMENTS = 8, KNOWN = 2048, MOST_WORDS = 3 * KOS_MAX_RANKS };
#define PLACES(o) ((o)->name ? KNOWN : 2)  // a Persistent has one call

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

// The cache key of a call, in words.  It begins with the number of arguments.  Each argument has its keyword, if any,
// then a value and the kind of the value: an object, an integer, or the length of a list and then its integers.  An
// array has its dtype, its flags and number of dimensions, the index of the first argument that is the same array, and
// its shape.  Objects are compared by identity.
typedef struct {
    size_t words;  // 0: the call cannot be cached
    uint64_t word[MOST_WORDS];
} call_key;
enum { OBJECT, INTEGER, COUNTS };  // kinds but those of arrays, which have 1 + the dimensions << 16

typedef struct {
    PyObject *core_call;  // the CoreCall; it holds references to all objects of this call and of its key
    PyObject *call, *prepared, *description;  // of group_prepare, of kos.comm.prepared, of the recorder
    PyObject *work, *fixed[3];                // the class of its Works; arguments of a Persistent
    const kos_prepared *core;                 // that of `call`; NULL of a call on a GPU, and if `call` is None
    int waits, send, recv, result;            // whether it returns no Work; arguments, or -1
    size_t words;                             // of its key
    uint64_t word[];
} cached_call;

// What stands for one method of a communicator; or the base of CorePersistent, whose arguments are fixed.
typedef struct {
    PyObject_HEAD
    Group *group;
    PyObject *method, *name, *text;  // NULL of a Persistent
    State *last;                     // the last start of a Persistent
    PyMethodDef definition;          // whose strings are those of name and text
    cached_call **calls, **found;    // hash table of PLACES, at most half full; NULL until first used
    int used;
    unsigned generation;  // that of the Group for which the calls are known
} Operation;

static PyTypeObject *ndarray_type;
PyTypeObject *operation_type;
PyObject *s_closed, *s_requires_grad, *s_is_neg, *s_cuda_stream;
static PyObject *s_start, *s_start_cached, *s_start_uncached, *s_interrupted;

// --- What is known ---------------------------------------------------------------------------------------------------

static void forget(Operation *o) {
    cached_call **calls = o->calls;
    o->calls = o->found = NULL;  // before their ends, which may run Python, which may call this
    o->used = 0;
    for (int i = 0; calls && i < PLACES(o); i++) {
        Py_XDECREF(calls[i] ? calls[i]->core_call : NULL);
        PyMem_Free(calls[i]);
    }
    PyMem_Free(calls);
}

static int is_integer(PyObject *x, uint64_t *value) {
    int overflow = 1;
    if (Py_TYPE(x) == &PyLong_Type)
        *value = (uint64_t)PyLong_AsLongLongAndOverflow(x, &overflow);
    return !overflow;
}

// The words of an argument that is no array.  Counts are compared by value: the program may change the list.  NULL: of a
// list that cannot be compared.
static uint64_t *add_plain(uint64_t *word, PyObject *x) {
    const int is_list = Py_TYPE(x) == &PyList_Type, is_tuple = Py_TYPE(x) == &PyTuple_Type;
    const Py_ssize_t length = is_list ? PyList_Size(x) : is_tuple ? PyTuple_Size(x) : 0;
    word[0] = (uintptr_t)x;
    word[1] = is_integer(x, word) ? INTEGER : OBJECT;
    if (!is_list && !is_tuple)
        return word + 2;
    if (length > KOS_MAX_RANKS)
        return NULL;
    for (Py_ssize_t i = 0; i < length; i++)
        if (!is_integer(is_list ? PyList_GetItem(x, i) : PyTuple_GetItem(x, i), &word[2 + i]))
            return NULL;
    word[0] = (uint64_t)length;
    word[1] = COUNTS;
    return word + 2 + length;
}

// The key of a call, and where its arrays are.
static void make_key(call_key *key, char **data, PyObject *const *args, Py_ssize_t positional, PyObject *names) {
    const Py_ssize_t count = positional + (names ? PyTuple_Size(names) : 0);
    uint64_t *word = key->word;
    int asked = 0;
    key->words = 0;
    if (count > ARGUMENTS)
        return;
    *word++ = (uint64_t)(positional << 8 | count);
    for (Py_ssize_t a = 0, first; a < count; a++) {
        tensor t;
        array_words array;
        int64_t shape[DIMENSIONS];
        if (key->word + MOST_WORDS - word < 3 + KOS_MAX_RANKS)
            return;
        if (a >= positional)
            *word++ = (uintptr_t)PyTuple_GetItem(names, a - positional);
        if (Py_TYPE(args[a]) == ndarray_type) {
            const ndarray *x = (ndarray *)args[a];
            t.data = x->data;
            t.device = CPU;
            t.nd = x->nd;
            t.shape = (const int64_t *)x->dimensions;
            array = (array_words){.what = (uintptr_t)x->descr, .kind = x->flags & FLAGS};
        } else if (Py_TYPE(args[a]) != tensor_type && Py_TYPE(args[a]) != array_type) {
            if (!(word = add_plain(word, args[a])))
                return;
            continue;
        } else {
            const int read = Py_TYPE(args[a]) == array_type ? read_array(args[a], &array, &t, shape)
                : asked ? read_tensor(args[a], &array, &t) : ASK;
            if (!read)
                return;
            if (read == ASK && !asked) {  // which may run Python: what was read before may be another then
                for (asked = 1; a < count; a++)
                    if (!is_plain(args[a]))
                        return;
                word = key->word + 1;
                a = -1;
                continue;
            }
        }
        if (t.nd > DIMENSIONS)
            return;
        for (first = 0; args[first] != args[a];)
            first++;
        *word++ = array.what;
        *word++ = array.kind | (uint64_t)(t.nd + 1) << 16 | (uint64_t)first << 56;
        if (t.device == CUDA) {
            *word++ = array.stream;
            *word++ = key_of(t.data);
        }
        for (int d = 0; d < t.nd; d++)
            *word++ = (uint64_t)t.shape[d];
        data[a] = t.data;
    }
    key->words = (size_t)(word - key->word);
}

// The objects that the key has of an array.
static uint64_t identity_of(PyObject *x) {
    array_words words = {0};
    tensor t;
    int64_t shape[DIMENSIONS];
    if (Py_TYPE(x) == array_type)
        read_array(x, &words, &t, shape);
    return Py_TYPE(x) == ndarray_type ? (uintptr_t)((ndarray *)x)->descr : words.what ^ words.stream;
}

static int is_same(const cached_call *k, const call_key *key) {
    return k->words == key->words && !memcmp(k->word, key->word, key->words * sizeof *key->word);
}

// The place of the call with this key in the hash table; it is empty if the call is not known.
static cached_call **find(Operation *o, const call_key *key) {
    if (o->found && *o->found && is_same(*o->found, key))
        return o->found;
    uint64_t hash = 0;
    for (size_t w = 0; w < key->words; w++)
        hash = (hash ^ key->word[w]) * UINT64_C(0xC2B2AE3D27D4EB4F);
    unsigned at = (unsigned)(hash >> 40) % PLACES(o);
    while (o->calls[at] && !is_same(o->calls[at], key))
        at = (at + 1) % PLACES(o);
    return o->found = &o->calls[at];
}

// Caches a call.  The objects of a Persistent are its arrays, or on a GPU their addresses.
static void store(Operation *o, const call_key *key, PyObject *core_call, unsigned generation) {
    while (o->used == PLACES(o) / 2 && !*find(o, key))
        forget(o);
    if (o->generation != generation || (!o->calls && !(o->calls = PyMem_Calloc(PLACES(o), sizeof *o->calls)))
        || *find(o, key))
        return;  // the cache was cleared meanwhile, there is no memory, or a call within this one is stored already
    PyObject *objects, *unused;
    unsigned long long number;
    int input;
    cached_call **place = find(o, key), *k = PyMem_Calloc(1, sizeof *k + key->words * sizeof *k->word);
    if (!k || !PyArg_ParseTuple(core_call, "OOOOOpiiiiKKKOO", &k->call, &k->prepared, &k->description, &k->work,
                                &unused, &k->waits, &k->send, &k->recv, &input, &k->result, &number, &number, &number,
                                &objects, &unused)) {
        PyMem_Free(k);
        return;
    }
    if (PyByteArray_Check(k->call) && !find_slots(core_call))
        k->call = Py_None;
    for (int i = 0; !o->name && i < 3; i++)
        k->fixed[i] = k->call == Py_None ? Py_None : PyTuple_GetItem(objects, i);
    k->words = key->words;
    memcpy(k->word, key->word, key->words * sizeof *k->word);
    k->core = k->call == Py_None || PyByteArray_Check(k->call) ? NULL : prepared_of(k->call);
    k->work = (PyObject *)Py_TYPE(k->work);
    k->core_call = Py_NewRef(core_call);
    *place = k;
    o->used++;
}

// --- A call ----------------------------------------------------------------------------------------------------------

static int apart(const cached_call *k, char *const *data) {
    if (k->send < 0 || k->recv < 0 || k->send == k->recv)
        return 1;
    const char *send = data[k->send], *recv = data[k->recv];
    return send + k->core->send_bytes <= recv || recv + k->core->recv_bytes <= send;
}

// The Work of a call.  If it is not complete, it joins those that the engine advances.
static PyObject *in_flight(Operation *o, const cached_call *k, PyObject *send, PyObject *recv, PyObject *result,
                           PyObject *sequence, PyObject *slot, PyObject *left) {
    State *s = new_state(o->last, k->work, k->prepared, send, recv, result, sequence, slot);
    if (s && left != Py_None) {
        PyList_SetItem(slot, COMPLETED, PyLong_FromLong(0));  // in progress
        s->fields[LEFT] = Py_NewRef(left);
        if (PyList_Append(o->group->objects[ACTIVE], (PyObject *)s))
            Py_CLEAR(s);
    }
    return (PyObject *)s;
}

// Returns the result of a start; of a Persistent it is the last one.
static PyObject *keep(Operation *o, PyObject *value) {
    if (!o->name && value) {
        State *old = o->last;
        o->last = (State *)Py_NewRef(value);
        Py_XDECREF((PyObject *)old);
    }
    return value;
}

// Starts a known call.  Returns NULL without an exception if Python must start it.
static PyObject *run(Operation *o, Group *g, const cached_call *k, PyObject *const *args, char *const *data,
                     PyObject *frame) {
    PyObject *const *objects = g->objects;
    if (!k->core)
        return k->call == Py_None ? NULL
            : keep(o, queue_call(g, k->core_call, frame, k->result < 0 ? Py_None : args[k->result],
                                 k->send < 0 ? NULL : data[k->send], k->recv < 0 ? NULL : data[k->recv]));
    const int message = k->core->algorithm == KOS_MAIL, waits = k->waits;  // Python code may free k
    if (g->off || (o->last && !o->last->reported) || !kos_alone(&g->core) || PyList_Size(objects[ACTIVE])
        || kos_failure(&g->core, KOS_WORD_SEQUENCE).status == KOS_FAILED || !apart(k, data)
        || *g->active != Py_None || *g->last != Py_None || *g->first != Py_None
        || !has_spare(g))
        return NULL;
    PyObject *sequence = PyIter_Next(objects[message ? MESSAGES : COLLECTIVES]);
    if (!sequence)
        return NULL;
    PyObject *send = k->send < 0 ? Py_None : args[k->send], *recv = k->recv < 0 ? Py_None : args[k->recv];
    PyObject *result = k->result < 0 ? Py_None : args[k->result], *core_call = Py_NewRef(k->core_call), *old[2];
    void *from = k->send < 0 ? NULL : data[k->send], *to = k->recv < 0 ? NULL : data[k->recv];
    g->hits++;
    const uint64_t number = message ? KOS_WORD_SEQUENCE : PyLong_AsUnsignedLongLong(sequence);
    const kos_result r = begin(g, k->core, number, from, to);
    PyObject *slot = note(g, k->description, sequence, frame, old);  // while the data is on its way
    PyObject *left = go_on(g, k->call, r, send, recv, waits);
    PyList_SetItem(slot, COMPLETED, left == Py_None ? nanoseconds() : Py_NewRef(Py_None));
    PyObject *value = left == Py_None && waits ? Py_NewRef(result)
        : keep(o, in_flight(o, k, send, recv, result, sequence, slot, left));
    if (value && left != Py_None && (waits || !is_pending(left))) {
        PyObject *work = value;
        value = PyObject_CallMethodObjArgs(PyTuple_GetItem(core_call, CALL_PREPARED), s_start, objects[COMM], work,
                                           waits ? Py_True : Py_False, Py_True, NULL);
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
    const cached_call *k = o->calls && o->generation == g->generation ? *find(o, key) : NULL;  // run() may clear it
    if (!k)
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
    PyObject *start = o->method ? Py_NewRef(o->method) : PyObject_GetAttr((PyObject *)o, s_start_uncached);
    if (!unpack(args, positional, names, &given, &options) && start)
        both = PyObject_CallFunctionObjArgs(start, given, options, key->words ? Py_True : Py_False, NULL);
    if (both && PyArg_ParseTuple(both, "OO", &result, &core_call)) {
        Py_INCREF(result);
        for (Py_ssize_t a = 0; a < count; a++)
            if (identity_of(args[a]) != identities[a])
                core_call = Py_None;  // the argument has changed, and `core_call` holds the new objects
        if (core_call != Py_None)
            store(o, key, core_call, generation);
        PyErr_Clear();  // the call itself has succeeded
    }
    PyObject *used[] = {both, start, given, options};
    for (int i = 0; i < 4; i++)
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
    PyObject *none = PyObject_CallMethodObjArgs(g->objects[COMM], s_interrupted, name ? name : s_start, error, NULL);
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
        forget(o);
    }
    // A Persistent has one call.
    const cached_call *k = !o->name && !positional && !names && o->found ? *o->found : NULL;
    if (!k) {
        make_key(&key, data, args, positional, names);
        k = key.words && o->calls && o->generation == g->generation ? *find(o, &key) : NULL;
    }
    for (int i = 0; k && !o->name && i < 2; i++)
        data[i] = k->fixed[i] == Py_None ? NULL
            : k->core ? ((ndarray *)k->fixed[i])->data : PyLong_AsVoidPtr(k->fixed[i]);
    PyObject *result = k && frame ? run(o, g, k, o->name ? args : k->fixed, data, frame) : NULL;
    if (k && !result && o->name && !PyErr_Occurred())
        result = start_cached(o, g, &key, args, data);
    if (k)
        key.words = 0;  // nothing to store
    if (!result && !PyErr_Occurred())
        result = start_uncached(o, g, &key, args, positional, names);
    if (!result)
        end_if_interrupted(g, o->name);
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
    if (ndarray_type != Py_TYPE(args[0]))
        ndarray_type = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(args[0]));
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
    Py_VISIT((PyObject *)o->last);
    Py_VISIT(o->method);
    for (int i = 0; o->calls && i < PLACES(o); i++)
        if (o->calls[i])
            Py_VISIT(o->calls[i]->core_call);
    return 0;
}

static int operation_clear(PyObject *self) {
    Operation *o = (Operation *)self;
    forget(o);
    Py_CLEAR(o->group);
    Py_CLEAR(o->last);
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

static PyMethodDef operation_methods[] = {
    {"start", (PyCFunction)(void *)call, METH_FASTCALL | METH_KEYWORDS, NULL},
    {0},
};
static PyMemberDef operation_members[] = {
    {"_group", T_OBJECT, offsetof(Operation, group), 0, NULL}, {"_last", T_OBJECT, offsetof(Operation, last), 0, NULL},
    {0},
};
static PyType_Slot operation_slots[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, operation_dealloc}, {Py_tp_traverse, operation_traverse},
    {Py_tp_clear, operation_clear}, {Py_tp_methods, operation_methods}, {Py_tp_members, operation_members}, {0},
};
PyType_Spec operation_spec = {"kos._core.native.Operation", sizeof(Operation), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, operation_slots};

int eager_init(void) {
    const struct { PyObject **to; const char *name; } names[] = {
        {&s_closed, "closed"}, {&s_start, "start"}, {&s_start_cached, "_start_cached"},
        {&s_start_uncached, "_start_uncached"}, {&s_requires_grad, "requires_grad"}, {&s_is_neg, "is_neg"},
        {&s_cuda_stream, "__cuda_stream__"}, {&s_interrupted, "_interrupted"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].to = PyUnicode_InternFromString(names[i].name)))
            return -1;
    return 0;
}
