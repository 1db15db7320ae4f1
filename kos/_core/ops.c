// What lies between the matrix products of a training step on CPUs: one pass over memory each, in float32.
//
// kos/train/ops/compiled.py calls these functions.  They return False for arrays that they do not take, and have then
// computed nothing: NumPy does it.  An operation is split into tasks, whose number and order of sums do not depend on
// the number of threads.  The kernels are compiled for AVX-512, AVX2 and what the compiler targets.
#include "objects.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

enum { WIDE = 16, BLOCK = 64, ROWS_OF_TASK = KOS_ROWS_OF_TASK, ELEMENTS = 1 << 14 };

#define vf K(floats)
#define vi K(integers)
#define INLINE inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

// The arrays in the order of the arguments, and what else a kernel needs.
typedef struct {
    void *at[6];
    size_t stride[6], rows[6], columns[6];  // of an array that is no matrix: one row
    size_t count, of_task;                  // elements or rows: of all tasks, of each
    size_t heads, kv_heads, d, wide, length;
    float number[6];
    atomic_int *lacks_memory;  // set by a task without memory
} operation;

// The first of a task, and the one after its last.
#define FIRST(o, task) ((task) * (o)->of_task)
#define LAST(o, task) MIN(FIRST(o, (task) + 1), (o)->count)

typedef struct {
    kos_task rms_norm, rms_norm_backward, cross_entropy, swiglu, swiglu_backward, adamw, rope, attention,
        attention_backward;
} kernels;

// Memory of this thread, for the tasks of one operation; NULL if there is none, which fails the operation.
static float *scratch(const operation *o, size_t count) {
    static _Thread_local float *memory;
    static _Thread_local size_t size;
    if (count > size) {
        free(memory);
        memory = aligned_alloc(64, (4 * count + 63) / 64 * 64);
        size = memory ? count : 0;
    }
    if (!memory)
        atomic_store(o->lacks_memory, 1);
    return memory;
}

#pragma GCC diagnostic ignored "-Wpsabi"  // all functions that take vectors are inlined
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast", "no-math-errno", "no-trapping-math")
#define K(name) name##_plain
#define LANES 4
#include "ops_kernels.h"
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SEVERAL
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define K(name) name##_avx2
#define LANES 8
#include "ops_kernels.h"
#pragma GCC pop_options
#pragma GCC target("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")
#define K(name) name##_avx512
#define LANES 16
#include "ops_kernels.h"
#endif
#pragma GCC pop_options

static const kernels *chosen = &kernels_plain;
static const char *names[] = {"plain", "avx2", "avx512"};

// kernels(name): use these; returns the names that this CPU has, the fastest last.
static PyObject *ops_kernels(PyObject *self, PyObject *name) {
    int count = 1;
    const kernels *has[3] = {&kernels_plain};
#ifdef SEVERAL
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        has[count++] = &kernels_avx2;
    if (count == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        has[count++] = &kernels_avx512;
#endif
    PyObject *found = PyTuple_New(count);
    for (int i = 0; found && i < count; i++) {
        PyTuple_SetItem(found, i, PyUnicode_FromString(names[i]));
        if (PyUnicode_CompareWithASCIIString(name, names[i]) == 0)
            chosen = has[i];
    }
    return found;
}

static PyObject *ops_threads(PyObject *self, PyObject *count) {
    kos_pool_threads((int)PyLong_AsLong(count));
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

// --- Arguments -------------------------------------------------------------------------------------------------------

typedef struct {
    Py_buffer of[6];
    int count;
} arrays;

static void give_back(arrays *a) {
    while (a->count) PyBuffer_Release(a->of + --a->count);
}

// Takes the first arguments, one a letter: a matrix of floats with contiguous rows (m), a contiguous array of floats
// (f) or of int32 (i); upper case: it is written.  The numbers after them go to `number`.  Others: returns 0.
static int take(PyObject *args, const char *kinds, arrays *a, operation *o) {
    *o = (operation){0};
    for (a->count = 0; *kinds; kinds++) {
        const int i = a->count;
        PyObject *x = PyTuple_GetItem(args, i);
        Py_buffer *b = a->of + i;
        const char kind = (char)(*kinds | 32);
        if (!x || PyObject_GetBuffer(x, b, PyBUF_STRIDES | PyBUF_FORMAT | (*kinds == kind ? 0 : PyBUF_WRITABLE)))
            return PyErr_Clear(), give_back(a), 0;
        a->count++;
        const int right = b->itemsize == 4 && strcmp(b->format, kind == 'i' ? "i" : "f") == 0, matrix = kind == 'm';
        if (!right || !(matrix ? b->ndim == 2 && (b->strides[1] == 4 || b->shape[1] < 2) && b->strides[0] % 4 == 0
                               && b->strides[0] >= 0 : PyBuffer_IsContiguous(b, 'C')))
            return give_back(a), 0;
        o->at[i] = b->buf;
        o->stride[i] = matrix ? (size_t)b->strides[0] / 4 : 0;
        o->rows[i] = matrix ? (size_t)b->shape[0] : 1;
        o->columns[i] = matrix ? (size_t)b->shape[1] : (size_t)b->len / 4;
    }
    for (int i = 0; i < 6 && a->count + i < PyTuple_Size(args); i++)
        o->number[i] = (float)PyFloat_AsDouble(PyTuple_GetItem(args, a->count + i));
    return 1;
}

#define TAKE(kinds) \
    arrays a; \
    operation o; \
    if (!take(args, kinds, &a, &o)) \
        Py_RETURN_FALSE

#define SAME(i, j) (o.rows[i] == o.rows[j] && o.columns[i] == o.columns[j])

// Runs the tasks if the arrays fit, and gives them back.
static PyObject *run(arrays *a, int fit, kos_task task, operation *o) {
    atomic_int lacks_memory = 0;
    o->lacks_memory = &lacks_memory;
    if (fit && !PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        kos_pool_run(task, o, (o->count + o->of_task - 1) / o->of_task);
        Py_END_ALLOW_THREADS
    }
    give_back(a);
    return lacks_memory ? PyErr_NoMemory() : PyErr_Occurred() ? NULL : PyBool_FromLong(fit);
}

// rms_norm(x, scale, out, rstd, eps)
static PyObject *ops_rms_norm(PyObject *self, PyObject *args) {
    TAKE("mfMF");
    o.count = o.rows[0], o.of_task = ROWS_OF_TASK;
    return run(&a, SAME(0, 2) && o.columns[3] == o.count && o.columns[1] == o.columns[0], chosen->rms_norm, &o);
}

// rms_norm_backward(d_out, x, scale, rstd, dx, sums): `sums` has a row for each task.
static PyObject *ops_rms_norm_backward(PyObject *self, PyObject *args) {
    TAKE("mmffMM");
    o.count = o.rows[0], o.of_task = ROWS_OF_TASK;
    const int fit = SAME(0, 1) && SAME(0, 4) && o.columns[3] == o.count && o.columns[2] == o.columns[0]
        && o.columns[5] == o.columns[0] && o.rows[5] * o.of_task >= o.count;
    return run(&a, fit, chosen->rms_norm_backward, &o);
}

// cross_entropy(logits, targets, losses, share, backward)
static PyObject *ops_cross_entropy(PyObject *self, PyObject *args) {
    TAKE("MiF");
    o.count = o.rows[0], o.of_task = ROWS_OF_TASK;
    int fit = o.columns[1] == o.count && o.columns[2] == o.count && o.columns[0];
    for (size_t i = 0; fit && i < o.count; i++) {
        const int32_t target = ((int32_t *)o.at[1])[i];
        fit = target >= -1 && target < (long)o.columns[0];
    }
    return run(&a, fit, chosen->cross_entropy, &o);
}

// An operation on arrays of one size.
static PyObject *of_elements(PyObject *args, const char *kinds, kos_task task) {
    TAKE(kinds);
    int fit = 1;
    for (int i = 1; i < a.count; i++) fit &= o.columns[i] == o.columns[0];
    o.count = o.columns[0], o.of_task = ELEMENTS;
    return run(&a, fit, task, &o);
}

// swiglu(gate, up, out); swiglu_backward(gate, up, d_out, d_gate, d_up); adamw(gradient, weights, first moment, second
// moment, six numbers)
static PyObject *ops_swiglu(PyObject *self, PyObject *args) { return of_elements(args, "ffF", chosen->swiglu); }
static PyObject *ops_swiglu_backward(PyObject *self, PyObject *args) {
    return of_elements(args, "fffFF", chosen->swiglu_backward);
}
static PyObject *ops_adamw(PyObject *self, PyObject *args) { return of_elements(args, "fFFF", chosen->adamw); }

// rope(x, cos, sin, heads, sign): x (features, tokens), cos and sin (d / 2, tokens of a sample)
static PyObject *ops_rope(PyObject *self, PyObject *args) {
    TAKE("Mmm");
    o.length = o.columns[1], o.count = o.rows[1] * (size_t)o.number[0], o.of_task = 1;
    const int fit = SAME(1, 2) && o.length && o.columns[0] % o.length == 0 && o.rows[0] >= 2 * o.count;
    return run(&a, fit, chosen->rope, &o);
}

// attention(qkv, out, lse (B, H, T), first_key, heads, kv_heads, scale), qkv and out (features, tokens); an empty
// first_key is none.  attention_backward(qkv, out, lse, first_key, d_out, d_qkv, heads, kv_heads, scale)
static PyObject *attention(PyObject *args, const char *kinds, kos_task task) {
    TAKE(kinds);
    const size_t heads = o.heads = (size_t)o.number[0], kv = o.kv_heads = (size_t)o.number[1], tokens = o.columns[0];
    const Py_ssize_t *shape = a.of[2].shape;
    if (a.of[2].ndim != 3 || !kv || heads % kv || !tokens || (size_t)(shape[0] * shape[2]) != tokens)
        return run(&a, 0, task, &o);
    o.d = o.rows[0] / (heads + 2 * kv), o.wide = (o.d + WIDE - 1) / WIDE * WIDE;
    o.length = (size_t)shape[2], o.count = (size_t)shape[0] * kv, o.of_task = 1;
    const int fit = o.rows[0] == o.d * (heads + 2 * kv) && (size_t)shape[1] == heads && o.rows[1] == o.d * heads
        && o.columns[1] == tokens && (!o.columns[3] || o.columns[3] == tokens)
        && (a.count == 4 || (SAME(1, 4) && SAME(0, 5)));
    return run(&a, fit, task, &o);
}

static PyObject *ops_attention(PyObject *self, PyObject *args) { return attention(args, "mMFi", chosen->attention); }
static PyObject *ops_attention_backward(PyObject *self, PyObject *args) {
    return attention(args, "mmfimM", chosen->attention_backward);
}

#define OF(name) {#name, ops_##name, METH_VARARGS, NULL}
PyMethodDef ops_functions[] = {
    OF(rms_norm), OF(rms_norm_backward), OF(cross_entropy), OF(swiglu), OF(swiglu_backward), OF(adamw), OF(rope),
    OF(attention), OF(attention_backward),
    {"kernels", ops_kernels, METH_O, NULL}, {"threads", ops_threads, METH_O, NULL}, {0},
};
