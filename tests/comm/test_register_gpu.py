"""``comm.register`` with memory of torch and of NCCL, and options of NCCL, on ranks with a GPU each.

mpirun -n 2 python -m pytest --with-mpi -m "mpi and gpu" tests/comm/test_register_gpu.py
"""

import pytest

import kos
from kos.errors import KosError, RendezvousError

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]
COUNT = 1 << 20
REFUSED = {
    ("nccl", "torch"): "expected memory of ncclMemAlloc or cuMemCreate",
    ("peer", "ncclMemAlloc"): "IPC|cudaMalloc",
}


@pytest.fixture(scope="module")
def other(mpi_world):
    """A communicator whose ``allocate`` gives memory of ncclMemAlloc."""
    if mpi_world.size == 1 or not mpi_world.probes["nccl"].usable:
        pytest.skip("needs two ranks or more with a GPU each")
    with kos.init("nccl", timeout=20.0) as comm:
        yield comm


@pytest.mark.parametrize("source", ["torch", "ncclMemAlloc"])
def test_memory_of_the_program_is_moved_where_it_lies(world, other, source):
    torch = pytest.importorskip("torch")
    torch.cuda.set_device(world.device)
    if source == "torch":
        x = torch.zeros(COUNT, device="cuda")
    else:
        x = torch.from_dlpack(other.allocate((COUNT,), "float32"))
    if refusal := REFUSED.get((world.backend_name, source)):
        with pytest.raises(KosError, match=refusal):
            world.register(x)
        world.barrier()  # no rank has registered anything, and all go on
        return
    buffer = world.register(x)
    assert (buffer.pointer, buffer.shape) == (x.data_ptr(), (COUNT,))
    size, whole = world.size, torch.empty(COUNT * world.size, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.all_reduce(x)
        world.all_gather(x, whole)

    def eager():
        world.all_reduce(x)
        world.all_gather(x, whole)

    for step, call in enumerate((eager, graph.replay, graph.replay, eager)):
        x.copy_(torch.arange(COUNT, device="cuda") % 1000 + world.rank + step)
        whole.fill_(-1)
        call()
        expected = (torch.arange(COUNT, device="cuda") % 1000 + step) * size + size * (size - 1) / 2
        assert torch.equal(x, expected) and torch.equal(whole, expected.repeat(size)), f"call {step}"
    torch.cuda.synchronize()
    del graph, buffer
    world.all_reduce(x.fill_(1.0))
    world.barrier()
    assert x.min().item() == x.max().item() == size


def test_expandable_segments_are_refused_by_name(world):
    torch = pytest.importorskip("torch")
    torch.cuda.set_device(world.device)
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        x = torch.zeros(COUNT * 16 + 5, device="cuda")
        with pytest.raises(KosError, match="expandable segment of torch"):
            world.register(x)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_options_of_nccl_are_used_and_compared(other):
    torch = pytest.importorskip("torch")
    torch.cuda.set_device(other.device)

    def total(comm):
        x = torch.full((COUNT,), comm.rank + 1.0, device="cuda")
        comm.all_reduce(x)
        return x.sum().item() / COUNT

    with kos.init("nccl", timeout=20.0, nccl={"min_ctas": 1, "max_ctas": 2}) as comm:
        assert total(comm) == comm.size * (comm.size + 1) / 2
        part = comm.split(0, nccl={"max_ctas": 1})
        assert part is not None and total(part) == comm.size * (comm.size + 1) / 2
    with pytest.raises(RendezvousError, match="max_ctas"):
        kos.init("nccl", timeout=20.0, nccl={"max_ctas": 8 + other.rank})
