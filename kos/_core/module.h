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

// What a Group refers to.  All but its owner are those of the communicator that it is bound to; ACTIVE: the Works of
// the engine, SLOTS: of the recorder.
enum { OWNER, COMM, FAILURES, NODE, STATUS, ACTIVE, RECORDER, SLOTS, COLLECTIVES, MESSAGES, OBJECTS };

typedef struct {
    PyObject_HEAD
    kos_group core;
    PyObject *objects[OBJECTS];
    Py_buffer memory;
    int parked;                // threads that wait without the GIL
    unsigned long long parks;  // how many such waits began
    // Of module_eager.c.
    char off;                 // in a batch
    unsigned generation;      // how often all calls were forgotten
    unsigned long long hits;  // calls that were started there
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
PyObject *group_bind(PyObject *g, PyObject *const *args, Py_ssize_t count);
PyObject *group_method(PyObject *g, PyObject *args);
int eager_init(void);

#endif
