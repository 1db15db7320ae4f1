// The arrays of calls: of kos (kos.memory.Array) and of torch, or whatever has DLPack's C exchange API.  Also the type of
// factors.
#include "objects.h"

// The start of kos.memory.Array, whose slots are in alphabetical order; take_arrays checks it.
typedef struct {
    PyObject_HEAD
    PyObject *device, *dtype, *owner, *pointer, *readonly, *shape, *stream;
} device_array;

// The start of DLPack's C exchange API of version 1.
typedef struct {
    uint32_t major, minor;
    const void *former, *functions[3];
    int (*read)(void *, tensor *);
    int (*current_stream)(int32_t device, int32_t index, uint64_t *stream);
} exchange_api;

enum { COMPLEX = 5 };  // of DLPack

PyTypeObject *array_type, *tensor_type, *factor_type;
static const exchange_api *tensor_api;  // of that type
static PyObject *windows;

int is_plain(PyObject *x) {
    if (Py_TYPE(x) == tensor_type)
        return peek(x, s_requires_grad, 0) == Py_False && peek(x, s_is_neg, 1) == Py_False;
    PyObject *owner = Py_TYPE(x) == array_type ? Py_NewRef(((device_array *)x)->owner) : NULL;
    const int plain = !owner || peek(owner, s_closed, 0) != Py_True;
    Py_XDECREF(owner);
    return plain;
}

// --- Of kos ----------------------------------------------------------------------------------------------------------

// arrays(example): arrays of that type, kos.memory.Array, may be those of calls; False if its layout is another one.
PyObject *take_arrays(PyObject *self, PyObject *example) {
    const char *names[] = {"device", "dtype", "owner", "pointer", "readonly", "shape", "stream"};
    int same = 1;
    for (int i = 0; i < 7; i++) {
        PyObject *value = PyObject_GetAttrString(example, names[i]);
        same = same && value == (&((device_array *)example)->device)[i];
        Py_XDECREF(value);
    }
    if (same && array_type != Py_TYPE(example))
        array_type = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(example));
    return PyErr_Occurred() ? NULL : PyBool_FromLong(same);
}

// windows(ranges): the windows of this process, as pairs of an address and a number of bytes.
PyObject *take_windows(PyObject *self, PyObject *ranges) {
    put(&windows, ranges);
    Py_RETURN_NONE;
}

uint64_t key_of(const char *data) {
    const uint64_t at = (uintptr_t)data, *pair = windows ? (const uint64_t *)PyBytes_AsString(windows) : NULL;
    for (Py_ssize_t left = windows ? PyBytes_Size(windows) / 16 : 0; left; left--, pair += 2)
        if (at - pair[0] < pair[1])
            return at;
    return at & 15;
}

int read_array(PyObject *x, array_words *words, tensor *t, int64_t *shape) {
    const device_array *array = (device_array *)x;
    const Py_ssize_t nd = PyTuple_Size(array->shape);
    PyObject **closed = slot_of(array->owner, "closed");
    if (nd > DIMENSIONS || (closed && *closed == Py_True))
        return 0;
    for (Py_ssize_t d = 0; d < nd; d++)
        shape[d] = PyLong_AsLongLong(PyTuple_GetItem(array->shape, d));
    *t = (tensor){.data = PyLong_AsVoidPtr(array->pointer), .device = CUDA, .nd = (int32_t)nd, .shape = shape};
    words->what = (uintptr_t)array->dtype;
    words->kind = (uint64_t)PyLong_AsLong(array->device) << 1 | (PyObject_IsTrue(array->readonly) == 1);
    words->stream = (uintptr_t)array->stream;
    const int error = PyErr_Occurred() != NULL;
    PyErr_Clear();
    return error ? 0 : closed ? 1 : ASK;
}

// --- Of torch --------------------------------------------------------------------------------------------------------

// Reads one that is contiguous, and as Python takes it; returns 0 for any other.
int read_tensor(PyObject *x, array_words *words, tensor *t) {
    int64_t stride = 1;
    if (tensor_api->read(x, t) || (t->device != CPU && t->device != CUDA) || t->code == COMPLEX
        || (t->device == CUDA && tensor_api->current_stream(CUDA, t->index, &words->stream))) {
        PyErr_Clear();
        return 0;
    }
    for (int d = t->nd - 1; d >= 0; stride *= t->shape[d--])
        if (t->strides && t->shape[d] != 1 && t->strides[d] != stride)
            return 0;
    t->data += t->offset;
    words->what = (uintptr_t)tensor_type;
    words->kind = (uint64_t)t->code << 48 | (uint64_t)t->bits << 40 | (uint64_t)t->lanes << 24 | (uint16_t)t->index;
    return (t->data || !stride) && (t->bits < 8 || (uintptr_t)t->data % (t->bits / 8) == 0);  // no elements: no memory
}

// tensors(type): arrays of that type, which has DLPack's C exchange API, may be those of calls; False if they may not.
PyObject *take_tensors(PyObject *self, PyObject *type) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const exchange_api *api = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule);
    PyErr_Clear();
    if (!tensor_type && api && api->major == 1 && api->read) {
        tensor_api = api;
        tensor_type = (PyTypeObject *)Py_NewRef(type);
    }
    return PyBool_FromLong((PyObject *)tensor_type == type);
}

// readable(x): whether calls take the tensor ``x`` without conversion.
PyObject *is_readable(PyObject *self, PyObject *x) {
    array_words words;
    tensor t;
    return PyBool_FromLong(Py_TYPE(x) == tensor_type && is_plain(x) && read_tensor(x, &words, &t));
}

// factors(type): objects of that type, kos.PremulSum, are compared by their field ``factor``.
PyObject *take_factors(PyObject *self, PyObject *type) {
    if (!factor_type)
        factor_type = (PyTypeObject *)Py_NewRef(type);
    Py_RETURN_NONE;
}
