"""nvidia-cudnn-frontend on host memory: the calls of it that kos makes, computed by einsum in float64.

Signatures are those of 1.18 to 1.32.  It reads and writes through the strides that a graph's tensors were given,
fills all of the workspace with NaN, and queues on the emulated device as the real one does on its stream.
"""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import numpy as np

from kos.dtypes import DTYPES
from tests.train.host_kernels.engine import on_device

NUMPY = {"BFLOAT16": DTYPES["bfloat16"].numpy, "HALF": np.dtype(np.float16), "FLOAT": np.dtype(np.float32)}
STAGES = ["validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"]


class NotSupported(Exception):
    pass


class Tensor:
    output = False

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __getattr__(self, name):
        attribute = name.removeprefix("set_")
        assert attribute in ("output", "uid", "dim", "stride", "data_type"), name
        return lambda value: self.__dict__.update({attribute: value}) or self

    def view(self, pointer):
        """The memory at ``pointer`` as this tensor describes it."""
        dtype = NUMPY[self.data_type]
        assert pointer % 16 == 0 and len(self.dim) == len(self.stride) == 4
        span = 1 + sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True))
        memory = np.frombuffer((ctypes.c_byte * (span * dtype.itemsize)).from_address(pointer), dtype)
        return np.lib.stride_tricks.as_strided(memory, self.dim, [n * dtype.itemsize for n in self.stride])


class Graph:
    built, threads = 0, set()

    def __init__(self, *, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert (intermediate_data_type, compute_data_type) == ("FLOAT", "FLOAT") and io_data_type != "FLOAT"
        self.handle, self.stages, self.tensors = handle, [], []

    def __getattr__(self, stage):
        assert stage in STAGES, stage
        return lambda *arguments: self.stages.append(stage)

    def tensor(self, *, dim, stride, data_type, uid):
        self.tensors.append(Tensor(dim=dim, stride=stride, data_type=data_type, uid=uid))
        return self.tensors[-1]

    def sdpa(self, q, k, v, *, attn_scale, generate_stats, diagonal_band_right_bound, diagonal_alignment):
        assert generate_stats and (diagonal_band_right_bound, diagonal_alignment) == (0, "TOP_LEFT")
        return self._node((q, k, v), attn_scale, 2)

    def sdpa_backward(
        self, q, k, v, o, dO, stats, *, attn_scale, use_deterministic_algorithm, diagonal_band_right_bound,
        diagonal_alignment,
    ):  # fmt: skip
        assert use_deterministic_algorithm and (diagonal_band_right_bound, diagonal_alignment) == (0, "TOP_LEFT")
        return self._node((q, k, v, o, dO, stats), attn_scale, 3)

    def _node(self, inputs, scale, outputs):
        self.inputs, self.scale = inputs, scale
        self.outputs = [Tensor() for _ in range(outputs)]
        _, _, length, d = inputs[0].dim
        if length == 1:
            raise NotSupported("s_q = s_kv = 1 is not supported.")
        if d % 8:
            raise ValueError("hidden_dim should be\nmultiple of 8")
        return self.outputs

    def get_workspace_size(self):
        assert self.stages == STAGES and all(x.output for x in self.outputs)
        Graph.built += 1
        samples, heads, length, _ = self.inputs[0].dim
        return 256 if len(self.outputs) == 2 else 2 * samples * heads * length**2

    def execute(self, pointers, workspace, handle):
        assert handle is self.handle and handle.stream == STREAM
        Graph.threads.add(threading.get_ident())
        everything = [*self.inputs, *self.outputs]
        assert sorted(pointers) == sorted(x.uid for x in everything)
        views = [x.view(pointers[x.uid]) for x in everything]
        size = self.get_workspace_size()
        Graph.built -= 1
        on_device(lambda: ctypes.memset(workspace, 255, size))
        on_device(lambda: (_backward if len(self.outputs) == 3 else _forward)(*views, self.scale))


def _scores(q, k, scale):
    s = scale * np.einsum("bhid,bhjd->bhij", q, k)
    return np.where(np.tri(s.shape[-1], dtype=bool), s, -np.inf)


def _repeated(q, *others):
    q, others = q.astype(np.float64), [x.astype(np.float64) for x in others]
    return q, *(np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in others)


def _forward(q, k, v, out, lse, scale):
    q, k, v = _repeated(q, k, v)
    s = _scores(q, k, scale)
    top = s.max(-1, keepdims=True)
    exact = top + np.log(np.exp(s - top).sum(-1, keepdims=True))
    lse[...] = exact
    out[...] = np.einsum("bhij,bhjd->bhid", np.exp(s - exact), v)


def _backward(q, k, v, o, d_out, lse, dq, dk, dv, scale):
    q, k, v, o, d_out, lse = _repeated(q, k, v, o, d_out, lse)
    p = np.exp(_scores(q, k, scale) - lse)
    ds = scale * p * (np.einsum("bhid,bhjd->bhij", d_out, v) - (d_out * o).sum(-1, keepdims=True))
    dq[...] = np.einsum("bhij,bhjd->bhid", ds, k)
    for target, gradient in ((dk, np.einsum("bhij,bhid->bhjd", ds, q)), (dv, np.einsum("bhij,bhid->bhjd", p, d_out))):
        samples, heads, length, d = target.shape
        target[...] = gradient.reshape(samples, heads, -1, length, d).sum(2)


STREAM = 77


def fake_cudnn(version=91900):
    """The module ``cudnn``."""

    def set_stream(handle, stream):
        handle.stream = stream

    return SimpleNamespace(
        backend_version=lambda: version,
        create_handle=SimpleNamespace,
        set_stream=set_stream,
        pygraph=Graph,
        data_type=SimpleNamespace(**{name: name for name in NUMPY}),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="TOP_LEFT"),
        heur_mode=SimpleNamespace(A="A"),
        cudnnGraphNotSupportedError=NotSupported,
    )
