// The objects of kos._core.native: a Group, its Prepared calls, and the Works in flight.
#ifndef KOS_MODULE_H
#define KOS_MODULE_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "core.h"

typedef struct {
    PyObject_HEAD
    PyObject *group;
    kos_prepared *core;
} Prepared;

typedef struct {
    PyObject_HEAD
    kos_group core;
    PyObject *owner;
    Py_buffer memory;
    int parked;                // threads that wait without the GIL
    unsigned long long parks;  // how many such waits began
} Group;

// The arrays of a call; `obj` NULL: none.
typedef struct {
    Py_buffer send, recv;
} arrays;

typedef struct {
    PyObject_HEAD
    kos_work core;
    PyObject *group, *prepared;
    arrays held;
} Work;

extern PyTypeObject *work_type, *prepared_type;
extern PyType_Spec work_spec, prepared_spec;

void work_ended(kos_work *w);
PyObject *raise_failure(Group *g, kos_result r);
PyObject *group_prepare(PyObject *g, PyObject *args);
// Starts a call on these arrays, or None, whose memory is `from` and `to`.  Returns None if it is complete while this
// thread holds the GIL, or a Work, perhaps of a call that has failed.
PyObject *start_now(Group *g, Prepared *p, uint64_t sequence, PyObject *send, PyObject *recv, void *from, void *to);
PyObject *eager_arrays(PyObject *self, PyObject *args);
int eager_init(PyObject *m);

#endif
