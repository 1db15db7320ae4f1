// What lies between the matrix products of a training step on CPUs: one pass over memory each, in float32.
//
// kos/train/ops/compiled.py calls these functions.  They return False for arrays that they do not take, and have then
// computed nothing: NumPy does it.  An operation is split into tasks, whose number and order of sums do not depend on
// the number of threads.  The kernels are compiled for AVX-512, AVX2 and what the compiler targets.
#include "objects.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "pool.h"

enum { LANES = 16, BLOCK = 64, ROW_BYTES = 1 << 16, ELEMENTS = 1 << 14 };

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
#define INLINE inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

typedef struct {
    const float *x, *scale, *d_out;
    float *out, *rstd, *sums;
    size_t x_stride, d_out_stride, out_stride, count, width, rows;
    float eps;
} norm;
typedef struct {
    float *logits, *losses, share;
    const int32_t *targets;
    size_t stride, count, width, rows;
    int backward;
} entropy;
typedef struct {
    const float *in[3];
    float *out[3], factors[6];
    size_t count, most;
} elements;
typedef struct {
    float *x, sign;
    const float *cos, *sin;
    size_t stride, cos_stride, sin_stride, half, tokens, length;
} rotation;
typedef struct {
    const float *qkv, *d_out;
    float *out, *lse, *d_qkv, scale;
    const int32_t *first;
    size_t stride, out_stride, d_out_stride, d_stride, heads, kv_heads, d, wide, length;
} attend;
typedef struct {
    kos_task rms_norm, rms_norm_backward, cross_entropy, swiglu, swiglu_backward, adamw, rope, attention,
        attention_backward;
} kernels;

// Memory of this thread, for the tasks of one operation.
static float *scratch(size_t count) {
    static _Thread_local float *memory;
    static _Thread_local size_t size;
    if (count > size) {
        free(memory);
        memory = aligned_alloc(64, (4 * count + 63) / 64 * 64);
        size = count;
    }
    return memory;
}

#pragma GCC diagnostic ignored "-Wpsabi"  // all functions that take vectors are inlined
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast", "no-math-errno", "no-trapping-math")
#define K(name) name##_plain
#define ROWS 4
#define VECTORS 1
#include "ops_kernels.h"
#undef K
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SEVERAL
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define K(name) name##_avx2
#include "ops_kernels.h"
#undef K
#pragma GCC pop_options
#pragma GCC target("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")
#define K(name) name##_avx512
#undef ROWS
#undef VECTORS
#define ROWS 8
#define VECTORS 2
#include "ops_kernels.h"
#undef K
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
    const long threads = PyLong_AsLong(count);
    if (threads == -1 && PyErr_Occurred())
        return NULL;
    kos_pool_threads((int)threads);
    Py_RETURN_NONE;
}

// --- Arguments -------------------------------------------------------------------------------------------------------

typedef struct {
    Py_buffer of[8];
    int count;
} arrays;

static void give_back(arrays *a) {
    while (a->count) PyBuffer_Release(a->of + --a->count);
}

// Takes the first arguments, one a letter: a matrix of floats with contiguous rows (m), a contiguous array of floats (f)
// or of int32 (i); upper case: it is written.  Others: returns 0.
static int take(PyObject *args, const char *kinds, arrays *a) {
    a->count = 0;
    for (; *kinds; kinds++) {
        PyObject *x = PyTuple_GetItem(args, a->count);
        Py_buffer *b = a->of + a->count;
        const char kind = (char)(*kinds | 32);
        if (!x || PyObject_GetBuffer(x, b, PyBUF_STRIDES | PyBUF_FORMAT | (*kinds == kind ? 0 : PyBUF_WRITABLE))) {
            PyErr_Clear();
            return give_back(a), 0;
        }
        a->count++;
        int fits = b->itemsize == 4 && strcmp(b->format, kind == 'i' ? "i" : "f") == 0 && (kind != 'm' || b->ndim == 2);
        if (kind == 'm')
            fits = fits && (b->strides[1] == 4 || b->shape[1] <= 1) && b->strides[0] % 4 == 0 && b->strides[0] >= 0;
        else
            fits = fits && PyBuffer_IsContiguous(b, 'C');
        if (!fits)
            return give_back(a), 0;
    }
    return 1;
}

static size_t stride_of(const arrays *a, int i) { return (size_t)a->of[i].strides[0] / 4; }
static size_t size_of(const arrays *a, int i) { return (size_t)a->of[i].len / 4; }
static int same_shape(const arrays *a, int i, int j) {
    return a->of[i].shape[0] == a->of[j].shape[0] && a->of[i].shape[1] == a->of[j].shape[1];
}
static double number(PyObject *args, int i) { return PyFloat_AsDouble(PyTuple_GetItem(args, i)); }
static size_t whole(PyObject *args, int i) { return PyLong_AsSize_t(PyTuple_GetItem(args, i)); }

// Runs the tasks unless `wrong`, and gives the arrays back.
static PyObject *run(arrays *a, int wrong, kos_task task, const void *arguments, size_t tasks) {
    if (!wrong && !PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        kos_pool_run(task, arguments, tasks);
        Py_END_ALLOW_THREADS
    }
    give_back(a);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(!wrong);
}

static size_t rows_of(size_t width) { return MIN(64, ROW_BYTES / 4 / (width + 1) + 1); }
#define TASKS(count, of_task) (((count) + (of_task) - 1) / (of_task))

// rms_norm(x, scale, out, rstd, eps)
static PyObject *ops_rms_norm(PyObject *self, PyObject *args) {
    arrays a;
    if (!take(args, "mfMF", &a))
        Py_RETURN_FALSE;
    norm n = {.x = a.of[0].buf, .scale = a.of[1].buf, .out = a.of[2].buf, .rstd = a.of[3].buf,
              .x_stride = stride_of(&a, 0), .out_stride = stride_of(&a, 2), .count = size_of(&a, 3),
              .width = size_of(&a, 1), .eps = (float)number(args, 4)};
    n.rows = rows_of(n.width);
    const int wrong = !same_shape(&a, 0, 2) || (size_t)a.of[0].shape[0] != n.count || (size_t)a.of[0].shape[1] != n.width;
    return run(&a, wrong, chosen->rms_norm, &n, TASKS(n.count, n.rows));
}

// rms_norm_backward(d_out, x, scale, rstd, dx, sums): `sums` has a row for each task, of `rows_of_task` rows.
static PyObject *ops_rms_norm_backward(PyObject *self, PyObject *args) {
    arrays a;
    if (!take(args, "mmffMF", &a))
        Py_RETURN_FALSE;
    norm n = {.d_out = a.of[0].buf, .x = a.of[1].buf, .scale = a.of[2].buf, .rstd = a.of[3].buf, .out = a.of[4].buf,
              .sums = a.of[5].buf, .d_out_stride = stride_of(&a, 0), .x_stride = stride_of(&a, 1),
              .out_stride = stride_of(&a, 4), .count = size_of(&a, 3), .width = size_of(&a, 2)};
    n.rows = rows_of(n.width);
    const size_t tasks = TASKS(n.count, n.rows);
    const int wrong = !same_shape(&a, 0, 1) || !same_shape(&a, 0, 4) || (size_t)a.of[0].shape[0] != n.count
        || (size_t)a.of[0].shape[1] != n.width || size_of(&a, 5) != tasks * n.width;
    return run(&a, wrong, chosen->rms_norm_backward, &n, tasks);
}

// rows_of_task(width): the rows that a task of an operation over rows has.
static PyObject *ops_rows(PyObject *self, PyObject *width) { return PyLong_FromSize_t(rows_of(PyLong_AsSize_t(width))); }

// cross_entropy(logits, targets, losses, share, backward)
static PyObject *ops_cross_entropy(PyObject *self, PyObject *args) {
    arrays a;
    if (!take(args, "MiF", &a))
        Py_RETURN_FALSE;
    entropy e = {.logits = a.of[0].buf, .targets = a.of[1].buf, .losses = a.of[2].buf, .share = (float)number(args, 3),
                 .stride = stride_of(&a, 0), .count = size_of(&a, 1), .width = (size_t)a.of[0].shape[1],
                 .backward = PyObject_IsTrue(PyTuple_GetItem(args, 4))};
    e.rows = rows_of(e.width);
    int wrong = (size_t)a.of[0].shape[0] != e.count || size_of(&a, 2) != e.count || !e.width;
    for (size_t i = 0; !wrong && i < e.count; i++) wrong = e.targets[i] < -1 || (e.targets[i] >= 0 && (size_t)e.targets[i] >= e.width);
    return run(&a, wrong, chosen->cross_entropy, &e, TASKS(e.count, e.rows));
}

// An operation on `inputs` arrays and then on outputs, all of the same size.
static PyObject *of_elements(arrays *a, int inputs, kos_task task, const float *factors) {
    elements e = {.count = size_of(a, 0), .most = ELEMENTS};
    int wrong = 0;
    for (int i = 0; i < a->count; i++) {
        wrong = wrong || size_of(a, i) != e.count;
        if (i < inputs)
            e.in[i] = a->of[i].buf;
        else
            e.out[i - inputs] = a->of[i].buf;
    }
    if (factors)
        memcpy(e.factors, factors, sizeof e.factors);
    return run(a, wrong, task, &e, TASKS(e.count, e.most));
}

// swiglu(gate, up, out)
static PyObject *ops_swiglu(PyObject *self, PyObject *args) {
    arrays a;
    return take(args, "ffF", &a) ? of_elements(&a, 2, chosen->swiglu, NULL) : Py_NewRef(Py_False);
}

// swiglu_backward(gate, up, d_out, d_gate, d_up)
static PyObject *ops_swiglu_backward(PyObject *self, PyObject *args) {
    arrays a;
    return take(args, "fffFF", &a) ? of_elements(&a, 3, chosen->swiglu_backward, NULL) : Py_NewRef(Py_False);
}

// adamw(gradient, weights, first moment, second moment, six factors)
static PyObject *ops_adamw(PyObject *self, PyObject *args) {
    arrays a;
    float factors[6];
    for (int i = 0; i < 6; i++) factors[i] = (float)number(args, 4 + i);
    if (PyErr_Occurred())
        return NULL;
    return take(args, "fFFF", &a) ? of_elements(&a, 1, chosen->adamw, factors) : Py_NewRef(Py_False);
}

// rope(x, cos, sin, half, heads, sign): x (features, tokens), cos and sin (half, tokens of a sample)
static PyObject *ops_rope(PyObject *self, PyObject *args) {
    arrays a;
    if (!take(args, "Mmm", &a))
        Py_RETURN_FALSE;
    const size_t half = whole(args, 3), heads = whole(args, 4);
    rotation r = {.x = a.of[0].buf, .cos = a.of[1].buf, .sin = a.of[2].buf, .sign = (float)number(args, 5), .half = half,
                  .stride = stride_of(&a, 0), .cos_stride = stride_of(&a, 1), .sin_stride = stride_of(&a, 2),
                  .tokens = (size_t)a.of[0].shape[1], .length = (size_t)a.of[1].shape[1]};
    const int wrong = !same_shape(&a, 1, 2) || (size_t)a.of[1].shape[0] != half || !r.length || r.tokens % r.length
        || (size_t)a.of[0].shape[0] < 2 * half * heads;
    return run(&a, wrong, chosen->rope, &r, half * heads);
}

// attention(qkv, out, lse, first_key or None, heads, kv_heads, scale), of (features, tokens) and lse (B, H, T);
// attention_backward(…, d_out, d_qkv)
static PyObject *attention(PyObject *args, int backward) {
    arrays a;
    PyObject *mask = PyTuple_GetItem(args, 3);
    const int masked = mask && mask != Py_None;
    PyObject *given = PyTuple_New(3 + 2 * backward + masked);
    if (!given || !mask)
        return NULL;
    for (int i = 0; i < 3; i++) PyTuple_SetItem(given, i, Py_NewRef(PyTuple_GetItem(args, i)));
    for (int i = 0; i < 2 * backward; i++) PyTuple_SetItem(given, 3 + i, Py_NewRef(PyTuple_GetItem(args, 7 + i)));
    if (masked)
        PyTuple_SetItem(given, 3 + 2 * backward, Py_NewRef(mask));
    const int taken = take(given, backward ? masked ? "mmfmMi" : "mmfmM" : masked ? "mMFi" : "mMF", &a);
    Py_DECREF(given);
    if (!taken)
        Py_RETURN_FALSE;
    attend t = {.qkv = a.of[0].buf, .out = a.of[1].buf, .lse = a.of[2].buf, .stride = stride_of(&a, 0),
                .out_stride = stride_of(&a, 1), .heads = whole(args, 4), .kv_heads = whole(args, 5),
                .scale = (float)number(args, 6), .first = masked ? a.of[a.count - 1].buf : NULL};
    const Py_ssize_t *shape = a.of[2].shape;
    int wrong = PyErr_Occurred() || a.of[2].ndim != 3 || !t.kv_heads || t.heads % t.kv_heads || !shape[0] || !shape[2];
    if (!wrong) {
        const size_t tokens = (size_t)(shape[0] * shape[2]), features = (size_t)a.of[0].shape[0];
        t.length = (size_t)shape[2];
        t.d = features / (t.heads + 2 * t.kv_heads);
        t.wide = (t.d + LANES - 1) / LANES * LANES;
        wrong = (size_t)shape[1] != t.heads || (size_t)a.of[0].shape[1] != tokens || (size_t)a.of[1].shape[1] != tokens
            || features != t.d * (t.heads + 2 * t.kv_heads) || (size_t)a.of[1].shape[0] != t.d * t.heads
            || (masked && size_of(&a, a.count - 1) != tokens) || (backward && !same_shape(&a, 1, 3))
            || (backward && !same_shape(&a, 0, 4));
    }
    if (backward) {
        t.d_out = a.of[3].buf, t.d_out_stride = stride_of(&a, 3);
        t.d_qkv = a.of[4].buf, t.d_stride = stride_of(&a, 4);
    }
    return run(&a, wrong, backward ? chosen->attention_backward : chosen->attention, &t, wrong ? 0 : shape[0] * t.kv_heads);
}

static PyObject *ops_attention(PyObject *self, PyObject *args) { return attention(args, 0); }
static PyObject *ops_attention_backward(PyObject *self, PyObject *args) { return attention(args, 1); }

PyMethodDef ops_functions[] = {
    {"rms_norm", ops_rms_norm, METH_VARARGS, NULL},
    {"rms_norm_backward", ops_rms_norm_backward, METH_VARARGS, NULL},
    {"cross_entropy", ops_cross_entropy, METH_VARARGS, NULL},
    {"swiglu", ops_swiglu, METH_VARARGS, NULL},
    {"swiglu_backward", ops_swiglu_backward, METH_VARARGS, NULL},
    {"adamw", ops_adamw, METH_VARARGS, NULL},
    {"rope", ops_rope, METH_VARARGS, NULL},
    {"attention", ops_attention, METH_VARARGS, NULL},
    {"attention_backward", ops_attention_backward, METH_VARARGS, NULL},
    {"kernels", ops_kernels, METH_O, NULL},
    {"threads", ops_threads, METH_O, NULL},
    {"rows_of_task", ops_rows, METH_O, NULL},
    {0},
};
