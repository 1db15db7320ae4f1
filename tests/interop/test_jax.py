"""Collectives on JAX's arrays, on the CPU: values, no copies, within jit, and the data parallel example."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kos
import kos.interop.jax as collectives
from kos.errors import InvalidArgument
from kos.testing import spawn
from tests.comm.ranks import on_each_rank
from tests.comm.test_jobs import environment
from tests.launcher import MPIRUN, needs_mpirun, run_program

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
ROOT = Path(__file__).resolve().parents[2]
SHAPES = ((5,), (), (0,), (2, 3))
LOSS = re.compile(r"step \d+: loss \S+")


@pytest.fixture(autouse=True)
def jax(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))
    return pytest.importorskip("jax")


@pytest.mark.parametrize("size", [1, 3])
def test_every_operation_returns_new_arrays(jax, size):
    def body(comm):
        n, r = comm.size, comm.rank
        x = jax.numpy.arange(2 * n, dtype=jax.numpy.float32).reshape(2 * n, 1) + r
        everyone = np.arange(2 * n)[:, None] + np.arange(n)[:, None, None]  # [rank, row, 0]
        results = {
            "all_reduce": (collectives.all_reduce(comm, x), everyone.sum(0)),
            "max": (collectives.all_reduce(comm, x, kos.ReduceOp.MAX), everyone.max(0)),
            "broadcast": (collectives.broadcast(comm, x, n - 1), everyone[n - 1]),
            "all_gather": (collectives.all_gather(comm, x), everyone),
            "reduce_scatter": (collectives.reduce_scatter(comm, x), everyone.sum(0)[2 * r : 2 * r + 2]),
            "all_to_all": (collectives.all_to_all(comm, x), everyone[:, 2 * r : 2 * r + 2].reshape(2 * n, 1)),
        }
        for name, (result, expected) in results.items():
            assert isinstance(result, jax.Array) and result.dtype == x.dtype, name
            assert result.shape == expected.shape and (np.asarray(result) == expected).all(), name
        assert (np.asarray(x) == everyone[r]).all()

    spawn(body, size)


def test_a_pytree_of_any_shapes_and_dtypes(jax):
    dtypes = (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
              np.int8, np.uint16)  # fmt: skip
    names = {np.dtype(dtype).name: dtype for dtype in dtypes}

    def body(comm):
        tree = {name: [jax.numpy.full(shape, comm.rank, kind) for shape in SHAPES] for name, kind in names.items()}
        result = collectives.all_reduce(comm, tree, kos.ReduceOp.MAX)
        assert jax.tree.structure(result) == jax.tree.structure(tree)
        for got, given in zip(jax.tree.leaves(result), jax.tree.leaves(tree), strict=True):
            assert (got.shape, got.dtype) == (given.shape, given.dtype)
            assert (np.asarray(got).astype(np.float32) == 1).all()

    spawn(body, 2)


def test_memory_is_shared_and_not_copied(jax, monkeypatch):
    addresses, all_gather = [], kos.Communicator.all_gather

    def spy(comm, x, out):
        addresses.append((x.unsafe_buffer_pointer(), out.ctypes.data))
        return all_gather(comm, x, out=out)

    monkeypatch.setattr(kos.Communicator, "all_gather", spy)

    def body(comm):
        for dtype in (np.float32, ml_dtypes.bfloat16):
            x = jax.numpy.ones(1001, dtype)
            y = collectives.all_gather(comm, x)
            assert addresses.pop() == (x.unsafe_buffer_pointer(), y.unsafe_buffer_pointer())

    spawn(body, 1)


@on_each_rank(spawn, 2)
def test_wrong_arguments_are_refused(comm, /, jax):
    x = jax.numpy.ones((3, 2))
    with pytest.raises(InvalidArgument, match=r"expected a first axis that 2 ranks divide, got shape \(3, 2\)"):
        collectives.reduce_scatter(comm, x)
    for option in ("async_op", "out"):
        with pytest.raises(InvalidArgument, match=f"{option}: expected none, as calls return new arrays"):
            collectives.all_reduce(comm, x, **{option: x})
    for call in (collectives.broadcast, jax.jit(collectives.broadcast, static_argnums=0)):
        with pytest.raises(InvalidArgument, match="got a PRNG key: pass jax.random.key_data"):
            call(comm, {"key": jax.random.key(0)})
    with pytest.raises(InvalidArgument, match="x: expected a writable array"):
        comm.all_reduce(x)
    (donated := x + 1).delete()
    with pytest.raises(InvalidArgument, match="tree: expected arrays with memory, got one that was deleted"):
        collectives.all_reduce(comm, donated)
    assert (np.asarray(collectives.all_reduce(comm, x)) == 2).all()  # the communicator is intact


def run(tmp_path: Path, ranks: int, text: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(text)
    return run_ranks(ranks, str(path))


def run_ranks(ranks: int, path: str) -> str:
    command = [MPIRUN, "-n", str(ranks), sys.executable, path] if ranks > 1 else [sys.executable, path]
    done = run_program(*command, env={**environment(), "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@needs_mpirun
def test_within_jit(tmp_path):
    """In order, in loops, with large arrays; a failure is raised, and then raised again by kos."""
    print(
        run(
            tmp_path,
            2,
            """
import jax, jax.numpy as jnp, numpy as np, kos
from kos.interop.jax import all_gather, all_reduce
from kos.errors import CollectiveMismatch

with kos.init(timeout=30) as comm:
    @jax.jit
    def sums(x):
        total = all_reduce(comm, x * 2)
        rows = all_gather(comm, {"a": total + comm.rank, "b": jnp.int32(comm.rank)})
        return rows, jax.lax.fori_loop(0, 5, lambda i, y: all_reduce(comm, y, kos.ReduceOp.AVG) + 1, x)

    for count in (10, 1 << 20):
        rows, looped = sums(jnp.full(count, comm.rank + 1, jnp.float32))
        assert (np.asarray(rows["a"]) == [[6.0], [7.0]]).all() and rows["a"].shape == (2, count)
        assert rows["b"].tolist() == [0, 1] and (np.asarray(looped) == 6.5).all(), looped

    wrong = jax.jit(lambda x: all_reduce(comm, x))
    try:
        wrong(jnp.ones(3 + comm.rank)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        assert "they differ in count 3 against 4" in str(error), error
    else:
        raise AssertionError("expected a mismatch")
    try:
        all_reduce(comm, jnp.ones(3))
    except CollectiveMismatch as error:
        assert "they differ in count 3 against 4" in str(error), error
    else:
        raise AssertionError("expected the failure again")
    comm.abort(0)
""",
        )
    )


SHARD_MAP = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax_data_parallel as example
from jax.sharding import Mesh, PartitionSpec as P

def step(weights, x, y):
    loss, gradients = jax.lax.pmean(jax.value_and_grad(example.loss_of)(weights, x, y), "data")
    return loss, example.update(weights, gradients)

mesh = Mesh(jax.devices(), ("data",))
step = jax.jit(jax.shard_map(
    step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()), check_vma=False))
weights = example.initial_weights()
for number in range(example.STEPS):
    loss, weights = step(weights, *example.batch_of(number))
    print(f"step {number}: loss {float(loss):.9g}")
"""


@needs_mpirun
def test_the_example_has_the_losses_of_shard_map(tmp_path):
    """Two kos ranks beside JAX's two devices of the CPU: the same bits, as float32 has nine digits."""
    example = ROOT / "examples" / "jax_data_parallel.py"
    ours = LOSS.findall(run_ranks(2, str(example)))
    theirs = LOSS.findall(run(tmp_path, 1, f"import sys; sys.path.insert(0, {str(example.parent)!r})\n{SHARD_MAP}"))
    assert len(ours) == 5 and ours == theirs, (ours, theirs)
