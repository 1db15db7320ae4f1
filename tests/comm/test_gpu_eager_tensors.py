"""Calls on GPUs that the compiled core makes on tensors of torch, which it reads through DLPack's C exchange API."""

import sys
from pathlib import Path

from tests.comm.shared_ranks import needs_core
from tests.launcher import OUTSIDE, run_program

pytestmark = needs_core
ROOT = Path(__file__).parents[2]
TORCH = """
import ctypes, sys, types
import numpy as np
import pytest

class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("index", ctypes.c_int32),
                ("nd", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64)]

now = {"stream": 0}

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
def read(x, out):
    out[0] = Tensor(x.data_ptr(), 2, 0, 1, 2, 32, 1, x.sizes.ctypes.data, x.steps.ctypes.data, 0)
    return 0

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))
def stream(device, index, out):
    out[0] = now["stream"]
    return 0

class API(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("former", ctypes.c_void_p * 4),
                ("read", type(read)), ("stream", type(stream))]

api = API(1, 3, (ctypes.c_void_p * 4)(), read, stream)
capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

class FakeTensor:
    __dlpack_c_exchange_api__ = capsule(ctypes.addressof(api), b"dlpack_exchange_api", None)
    is_cuda, layout, requires_grad, dtype, negated = True, "strided", False, "torch.float32", False
    def __init__(self, values, stride=1):
        self.values = np.array(values, np.float32)
        self.sizes, self.steps = np.array([self.values.size], np.int64), np.array([stride], np.int64)
        self.shape = (self.values.size,)
    def data_ptr(self): return self.values.ctypes.data
    def get_device(self): return 0
    def is_contiguous(self): return True
    def __index__(self): return int(self.values[0])
    def is_neg(self): return self.negated

FakeTensor.__module__, FakeTensor.__name__ = "torch", "Tensor"
class CurrentStream:
    stream_id = -1
torch = types.ModuleType("torch")
torch.Tensor, torch.strided = FakeTensor, "strided"
torch._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: now["stream"])
torch.cuda = types.SimpleNamespace(current_stream=lambda device: CurrentStream)
sys.modules["torch"] = torch

from kos.comm import watchdog
from kos.comm import collectives
from tests.comm.fake_nccl import FakeRanks, no_gpu
from tests.comm.gpu_eager import by, known

assert not collectives._is_readable(type("Parameter", (FakeTensor,), {"__module__": "torch"})([1]))

def body(gpu):
    comm = gpu.comm
    def meet(): comm.rendezvous.barrier()
    x, y = FakeTensor([1, 2]), FakeTensor([3, 4])
    known(comm, x)
    with by(comm, 1):
        assert comm.all_reduce(y) is y
    assert (y.values == [6, 8]).all()
    meet()
    now["stream"] = 80
    meet()
    with by(comm, 0):
        comm.all_reduce(y)
    with by(comm, 1):
        comm.all_reduce(y)
    for strange in ("negated", "requires_grad", "strided"):
        tensor = FakeTensor([1, 2], stride=2 if strange == "strided" else 1)
        setattr(tensor, strange, True)
        with by(comm, 0):
            try:
                comm.all_reduce(tensor)
            except Exception as error:  # a stand-in has no __dlpack__
                print(error, file=sys.stderr)
    with by(comm, 1):
        comm.all_reduce(FakeTensor([5, 6]))
    for root in (1, 1, 0):  # passed as a tensor: the values count, also where the rank has no result
        x = FakeTensor([1, 2])
        got = comm.reduce(x, FakeTensor([root]))
        assert (got is x) == (comm.rank == root)
        meet()
    print("done", flush=True)

with pytest.MonkeyPatch.context() as patch, no_gpu(patch):
    watchdog.TICK = 1000.0
    FakeRanks(2).run(body)
"""


def test_tensors_of_torch_and_its_stream(tmp_path):
    """In a process of its own: the core reads the tensors of one type."""
    program = tmp_path / "program.py"
    program.write_text(TORCH)
    done = run_program(sys.executable, str(program), env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr
