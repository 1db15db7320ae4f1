// The cache of calls of an operation: their keys, and a hash table.
//
// A call is first looked up by a key that contains the shapes of its arrays.  If this key is not in the cache, a second
// key without sizes may find a call that differs only in its sizes.  The core then prepares the new call from that one,
// so calls whose sizes always change need no Python either.  There are two hash tables, a current and an older one.  A
// full current table becomes the older one, and the calls of the previous older table are dropped.  A call that is
// found in the older table moves to the current one.
#include "objects.h"

enum { MOST_CALLS = KNOWN_CALLS / 2, SHAPE_AT = 16, ANY_SHAPE = 0xff };

static PyTypeObject *ndarray_type;
static cached_call moved;  // in the older table, where a call was

// --- Keys ------------------------------------------------------------------------------------------------------------

static int is_integer(PyObject *x, uint64_t *value) {
    int overflow = 1;
    if (Py_TYPE(x) == &PyLong_Type)
        *value = (uint64_t)PyLong_AsLongLongAndOverflow(x, &overflow);
    return !overflow;
}

// The words of a float, or of an object that is compared by its factor; 0 if the factor is no number.
static __attribute__((noinline)) int add_number(uint64_t *word, PyObject *x) {
    PyObject **factor = Py_TYPE(x) == factor_type ? slot_of(x, "factor") : NULL;
    const uint64_t kind = factor ? FACTOR : 0;
    x = factor ? *factor : x;
    word[1] = INTEGER | kind;
    if (x && Py_TYPE(x) == &PyFloat_Type) {
        const double value = PyFloat_AsDouble(x);
        memcpy(word, &value, sizeof value);
        word[1] = FLOAT | kind;
        return 1;
    }
    return x && is_integer(x, word);
}

// Writes the words of an argument that is not an array of NumPy, kos or torch, and returns where the next ones begin.
// Numbers are compared by value.  So are counts, because the program may change the list.  Returns NULL for what cannot
// be compared.
static uint64_t *add_plain(uint64_t *word, PyObject *x, char **data) {
    const PyTypeObject *type = Py_TYPE(x);
    word[0] = (uintptr_t)x;
    word[1] = OBJECT;
    if (type == &PyLong_Type) {
        int overflow;
        const long long number = PyLong_AsLongLongAndOverflow(x, &overflow);
        if (!overflow) {
            word[0] = (uint64_t)number;
            word[1] = INTEGER;
        }
        return word + 2;
    }
    const int is_list = type == &PyList_Type;
    if (is_list || type == &PyTuple_Type) {
        const Py_ssize_t length = is_list ? PyList_Size(x) : PyTuple_Size(x);
        if (length > KOS_MAX_RANKS)
            return NULL;
        for (Py_ssize_t i = 0; i < length; i++)
            if (!is_integer(is_list ? PyList_GetItem(x, i) : PyTuple_GetItem(x, i), &word[2 + i]))
                return NULL;
        word[0] = (uint64_t)length;
        word[1] = COUNTS;
        return word + 2 + length;
    }
    if (type == &PyBytes_Type) {  // an array to send
        word[0] = (uintptr_t)&PyBytes_Type;
        word[1] = UINT64_C(2) << SHAPE_AT;
        word[2] = (uint64_t)PyBytes_Size(x);
        *data = PyBytes_AsString(x);
        return word + 3;
    }
    if (type == &PyFloat_Type || type == factor_type)
        return add_number(word, x) ? word + 2 : NULL;
    return word + 2;
}

// The key of a call, and where its arrays are.
void make_key(call_key *key, char **data, PyObject *const *args, Py_ssize_t positional, PyObject *names) {
    const Py_ssize_t count = positional + (names ? PyTuple_Size(names) : 0);
    uint64_t *word = key->word;
    int asked = 0;
    key->words = 0;
    key->on_gpu = 0;
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
            if (!(word = add_plain(word, args[a], &data[a])))
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
            key->on_gpu = 1;
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
uint64_t identity_of(PyObject *x) {
    array_words words = {0};
    tensor t;
    int64_t shape[DIMENSIONS];
    if (Py_TYPE(x) == array_type)
        read_array(x, &words, &t, shape);
    return Py_TYPE(x) == ndarray_type ? (uintptr_t)((ndarray *)x)->descr : words.what ^ words.stream;
}

// --- The table -------------------------------------------------------------------------------------------------------

static int is_same(const cached_call *k, const call_key *key) {
    return k->words == key->words && !memcmp(k->word, key->word, key->words * sizeof *key->word);
}

static void free_call(cached_call *k) {
    if (!k || k == &moved)
        return;
    Py_XDECREF(k->core_call);
    Py_XDECREF(k->own_call);
    Py_XDECREF(k->own_prepared);
    Py_XDECREF(k->own_description);
    PyMem_Free(k);
}

static void free_table(cached_call **calls) {
    for (int i = 0; calls && i < KNOWN_CALLS; i++)
        free_call(calls[i]);
    PyMem_Free(calls);
}

void cache_tidy(call_cache *c) {
    cached_call **dropped = c->dropped;
    c->dropped = NULL;  // before their ends, which may run Python, which may call this
    free_table(dropped);
}

void cache_forget(call_cache *c) {
    cached_call **calls[] = {c->calls, c->older, c->dropped};
    *c = (call_cache){0};
    for (int i = 0; i < 3; i++)
        free_table(calls[i]);
}

int cache_traverse(const call_cache *c, visitproc visit, void *arg) {
    cached_call **calls[] = {c->calls, c->older, c->dropped};
    for (int t = 0; t < 3; t++)
        for (int i = 0; calls[t] && i < KNOWN_CALLS; i++)
            if (calls[t][i]) {
                Py_VISIT(calls[t][i]->core_call);
                Py_VISIT(calls[t][i]->own_prepared);
                Py_VISIT(calls[t][i]->own_description);
            }
    return 0;
}

// Where the call with this key is in a table, or would be.
static cached_call **entry_of(cached_call **calls, const call_key *key) {
    uint64_t hash = 0;
    for (size_t w = 0; w < key->words; w++)
        hash = (hash ^ key->word[w]) * UINT64_C(0xC2B2AE3D27D4EB4F);
    unsigned at = (unsigned)(hash >> 40) % KNOWN_CALLS;
    while (calls[at] && !is_same(calls[at], key))
        at = (at + 1) % KNOWN_CALLS;
    return &calls[at];
}

// Adds a call that is not in the table.  Runs no Python.  Returns 0 without memory.
static int insert(call_cache *c, const call_key *key, cached_call *k) {
    if (c->used == MOST_CALLS && !c->dropped) {
        c->dropped = c->older;
        c->older = c->calls;
        c->calls = NULL;
        c->found = NULL;
        c->used = 0;
    }
    if (c->used == MOST_CALLS || (!c->calls && !(c->calls = PyMem_Calloc(KNOWN_CALLS, sizeof *c->calls))))
        return 0;
    *entry_of(c->calls, key) = k;
    c->used++;
    c->found = k;
    return 1;
}

cached_call *cache_find(call_cache *c, const call_key *key) {
    if (c->found && is_same(c->found, key))
        return c->found;
    cached_call *k = c->calls ? *entry_of(c->calls, key) : NULL;
    if (k)
        return c->found = k;
    cached_call **old = c->older ? entry_of(c->older, key) : NULL;
    if (!old || !*old)
        return NULL;
    k = *old;
    *old = &moved;
    if (insert(c, key, k))
        return k;
    *old = k;
    return NULL;
}

static cached_call *new_call(const call_key *key) {
    cached_call *k = PyMem_Calloc(1, sizeof *k + key->words * sizeof *k->word);
    if (k) {
        k->words = key->words;
        memcpy(k->word, key->word, key->words * sizeof *k->word);
    }
    return k;
}

// --- Calls of another size -------------------------------------------------------------------------------------------

// The numbers in a key: the shapes of arrays, and lists of counts.
typedef struct {
    const uint64_t *shape[ARGUMENTS], *counts[2];
    int dimensions[ARGUMENTS];  // -1: no array
    size_t length[2];           // of the lists
    int lists;
} key_numbers;

// The key without sizes, and the numbers.  Returns 0 if the order of its lists is not known.
static int strip(const call_key *key, call_key *bare, key_numbers *numbers) {
    const uint64_t *from = key->word;
    uint64_t *to = bare->word;
    const Py_ssize_t count = (Py_ssize_t)(*from & 0xff), positional = (Py_ssize_t)(*from >> 8);
    *to++ = *from++;
    numbers->lists = 0;
    for (Py_ssize_t a = 0; a < count; a++) {
        if (a >= positional)
            *to++ = *from++;
        const int dimensions = numbers->dimensions[a] = (int)(from[1] >> SHAPE_AT & ANY_SHAPE) - 1;
        size_t skipped = dimensions < 0 ? 0 : (size_t)dimensions;
        to[0] = from[0];
        to[1] = from[1] | (dimensions < 0 ? 0 : (uint64_t)ANY_SHAPE << SHAPE_AT);
        numbers->shape[a] = from + 2;
        if (from[1] == COUNTS) {
            if (numbers->lists == 2 || a >= positional)
                return 0;
            numbers->counts[numbers->lists] = from + 2;
            numbers->length[numbers->lists++] = skipped = (size_t)from[0];
        }
        to += 2;
        from += 2 + skipped;
    }
    bare->words = (size_t)(to - bare->word);
    return 1;
}

static uint64_t elements(const key_numbers *numbers, int array) {
    uint64_t count = array >= 0;
    for (int d = 0; array >= 0 && d < numbers->dimensions[array]; d++)
        count *= numbers->shape[array][d];
    return count;
}

// Whether calls of other sizes may be made like this one: it has no arrays but its input and its output, which are the
// same array or apart, and gives all counts.
static int is_template(const cached_call *k, const key_numbers *numbers, Py_ssize_t count, uint64_t distance) {
    const kos_request *q = request_of(k->call);
    if ((q->operation < KOS_SEND && !q->sizeless) || k->core->any_length
        || (k->input != k->result && distance != UINT64_MAX))
        return 0;
    for (int a = 0; a < count; a++)
        if (numbers->dimensions[a] >= 0 && a != k->input && a != k->result)
            return 0;
    const int lists = q->varies ? (q->send_counts != NULL) + (q->recv_counts != NULL) : 0;
    return numbers->lists == lists && (q->varies || q->count);
}

// The sum of a list of counts, one for each rank; UINT64_MAX if it is not such a list.
static uint64_t sum_of(const key_numbers *numbers, int list, int size) {
    uint64_t sum = 0;
    if (numbers->length[list] != (size_t)size)
        return UINT64_MAX;
    for (int r = 0; r < size; r++) {
        if (numbers->counts[list][r] >> 48)
            return UINT64_MAX;
        sum += numbers->counts[list][r];
    }
    return sum;
}

// The sizes of a v-form; 0 if its arrays and counts do not fit together, or an array is empty.
static int fit_counts(const kos_request *q, const key_numbers *numbers, const kos_group *g, uint64_t in, uint64_t out,
                      call_sizes *sizes) {
    const uint64_t *counts = numbers->counts[0], sum = sum_of(numbers, 0, g->size);
    if (sum == UINT64_MAX)
        return 0;
    const uint64_t own = counts[g->rank];
    sizes->first = in ? in : out;
    sizes->send_counts = q->send_counts ? counts : NULL;
    sizes->recv_counts = q->recv_counts ? numbers->counts[numbers->lists - 1] : NULL;
    switch (q->operation) {
    case KOS_ALL_TO_ALL:
        return in && out && sum == in && sum_of(numbers, 1, g->size) == out && own == numbers->counts[1][g->rank];
    case KOS_ALL_GATHER: case KOS_GATHER:
        sizes->count = in;
        return in && own == in && (sum == out || (q->operation == KOS_GATHER && q->root != g->rank));
    default:  // scatter_v and reduce_scatter_v
        sizes->count = out;
        return out && own == out && (sum == in || (q->operation == KOS_SCATTER && q->root != g->rank));
    }
}

// The sizes of a call like another one; 0 as in fit_counts.  `received` has room for a count of each rank.
static int fit(const cached_call *like, const key_numbers *numbers, const kos_group *g, uint64_t *received,
               call_sizes *sizes) {
    const kos_request *q = request_of(like->call);
    const int a = like->input, b = like->result;
    const uint64_t in = elements(numbers, a), out = elements(numbers, b), size = (uint64_t)g->size;
    *sizes = (call_sizes){.count = a < 0 ? out : in};
    if (q->varies)
        return fit_counts(q, numbers, g, in, out, sizes);
    switch (q->operation) {
    case KOS_ALL_GATHER: case KOS_GATHER:
        return in && (b < 0 || out == size * in);
    case KOS_SCATTER: case KOS_REDUCE_SCATTER:
        sizes->count = out;
        return out && (a < 0 || in == size * out);
    case KOS_ALL_TO_ALL:
        sizes->count = in / size;
        return in && in == out && in % size == 0;
    case KOS_SEND_RECV:
        for (int r = 0; r < g->size; r++)
            received[r] = out;
        sizes->recv_counts = received;
        return in && out;
    default:  // the shapes of input and output are the same
        return sizes->count && (a < 0 || b < 0
            || (numbers->dimensions[a] == numbers->dimensions[b] && !memcmp(numbers->shape[a], numbers->shape[b],
                (size_t)numbers->dimensions[a] * sizeof(uint64_t))));
    }
}

static PyObject *tuple_of(const uint64_t *numbers, size_t count) {
    PyObject *made = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; made && i < count; i++)
        PyTuple_SetItem(made, (Py_ssize_t)i, PyLong_FromUnsignedLongLong(numbers[i]));
    if (PyErr_Occurred())  // a number is missing, for lack of memory
        Py_CLEAR(made);
    return made;
}

// What the recorder has of such a call: its group, the operation of the call that it is like, the shapes of its input
// and output, and lists of counts.
static PyObject *describe(const cached_call *k, const key_numbers *numbers) {
    const int collects = PyGC_Disable(), arrays[] = {k->input, k->result};  // a collection here would run Python
    PyObject *made = PyTuple_New(4 + numbers->lists);
    for (int i = 0; made && i < 4 + numbers->lists; i++) {
        const int array = i == 2 || i == 3 ? arrays[i - 2] : -1;
        PyObject *part = i < 2 ? Py_NewRef(PyTuple_GetItem(k->description, i))
            : i >= 4 ? tuple_of(numbers->counts[i - 4], numbers->length[i - 4])
            : array < 0 ? Py_NewRef(Py_None) : tuple_of(numbers->shape[array], (size_t)numbers->dimensions[array]);
        if (part)
            PyTuple_SetItem(made, i, part);
        else
            Py_CLEAR(made);
    }
    if (collects)
        PyGC_Enable();
    PyErr_Clear();
    return made;
}

cached_call *cache_resize(call_cache *c, const Group *g, const call_key *key) {
    call_key bare;
    key_numbers numbers;
    call_sizes sizes;
    uint64_t received[KOS_MAX_RANKS];
    if (!c->templates || key->on_gpu || !strip(key, &bare, &numbers))
        return NULL;
    const cached_call *like = cache_find(c, &bare);
    cached_call *k = like && fit(like, &numbers, &g->core, received, &sizes) ? new_call(key) : NULL;
    if (!k)
        return NULL;
    *k = *like;  // without the words
    k->words = key->words;
    k->core_call = Py_NewRef(like->core_call);
    k->own_prepared = NULL;
    k->own_call = k->call = resized(g, like->call, &sizes, &k->published);
    k->own_description = k->description = k->call ? describe(like, &numbers) : NULL;
    k->described = like->core->fingerprint;
    if (k->description && insert(c, key, k)) {
        k->core = prepared_of(k->call);
        return k;
    }
    Py_DECREF(k->core_call);  // not the last reference
    Py_XDECREF(k->own_call);
    Py_XDECREF(k->own_description);
    PyMem_Free(k);
    return NULL;
}

void cache_adopt(call_cache *c, const call_key *key, PyObject *prepared, PyObject *description) {
    cached_call *k = cache_find(c, key);
    if (!k || !k->own_call || k->own_prepared)
        return;
    PyObject *old = swap(&k->own_description, description);
    k->own_prepared = Py_NewRef(prepared);
    k->prepared = prepared;
    k->description = description;
    Py_DECREF(old);
}

// Fills in a call from its description.  Returns 0 if it cannot be read.
static int read_call(cached_call *k, PyObject *core_call, uint64_t *distance) {
    PyObject *unused;
    unsigned long long number, far;
    if (!PyArg_ParseTuple(core_call, "OOOOOpiiiiKKKOO", &k->call, &k->prepared, &k->description, &k->work, &unused,
                          &k->waits, &k->send, &k->recv, &k->input, &k->result, &far, &number, &number, &unused,
                          &unused))
        return 0;
    if (PyByteArray_Check(k->call) && !find_slots(core_call))
        k->call = Py_None;
    k->core = k->call == Py_None || PyByteArray_Check(k->call) ? NULL : prepared_of(k->call);
    k->work = (PyObject *)Py_TYPE(k->work);
    *distance = far;
    return 1;
}

void cache_store(call_cache *c, const call_key *key, PyObject *core_call) {
    call_key bare;
    key_numbers numbers;
    uint64_t distance;
    cached_call *known = cache_find(c, key), *k = known && !known->own_call ? NULL : new_call(key), *like = NULL;
    if (!k || !read_call(k, core_call, &distance)) {  // a call within this one is stored already
        PyMem_Free(k);
        return;
    }
    k->core_call = Py_NewRef(core_call);
    if (known)
        *entry_of(c->calls, key) = c->found = k;
    else if (!insert(c, key, k)) {
        free_call(k);
        return;
    }
    if (!key->on_gpu && k->core && strip(key, &bare, &numbers)) {
        if (is_template(k, &numbers, (Py_ssize_t)(*key->word & 0xff), distance) && !cache_find(c, &bare)
            && (like = new_call(&bare)) && read_call(like, core_call, &distance)) {
            like->core_call = Py_NewRef(core_call);
            if (insert(c, &bare, like))
                c->templates = 1;
            else
                free_call(like);
        }
    }
    free_call(known);
    cache_tidy(c);
}

void take_ndarrays(PyTypeObject *type) {
    if (ndarray_type != type)
        ndarray_type = (PyTypeObject *)Py_NewRef((PyObject *)type);
}
