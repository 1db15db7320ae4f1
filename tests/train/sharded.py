"""The state of a rank of any layout, in host memory, without the model that computes with it."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from kos.comm.communicator import Communicator
from kos.memory.arena import Arena
from kos.testing import spawn
from kos.train import checkpoint
from kos.train.checkpoint import huggingface
from kos.train.checkpoint.state import ShardedState
from kos.train.data.tokenizers import ByteTokenizer
from kos.train.model.llama import LlamaConfig, Stages
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import OwnedSlices, Parameters
from kos.train.optim import Optimizer
from kos.train.optim.adamw import AdamW
from kos.train.parallel.data import Buckets, DataParallel
from kos.train.parallel.mesh import Layout, Mesh

Whole = dict[str, np.ndarray]
"""The tensors of a whole model: weights by name, moments as ``exp_avg.NAME`` and ``exp_avg_sq.NAME``."""


def whole_state(model: LlamaConfig, seed: int = 0) -> Whole:
    rng = np.random.default_rng(seed)
    shapes = model.parameter_shapes()
    return {
        prefix + name: rng.standard_normal(shape, np.float32)
        for prefix in ("", *(f"{moment}." for moment in AdamW.state))
        for name, shape in shapes.items()
    }


def stages_of(ranks: int, chunks: int = 1, v_shape: bool = False) -> Stages:
    """With ``v_shape`` the second chunk of each rank goes back from the last rank to the first."""
    if v_shape and chunks == 2:
        return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
    return tuple(tuple(range(rank, chunks * ranks, ranks)) for rank in range(ranks))


def make_state(
    comm: Communicator, model: LlamaConfig, layout: Layout | None = None, *, chunks: int = 1, v_shape: bool = False,
    zero: bool = False, master_shards: bool = False, bucket_bytes: int = 4 << 20,
) -> ShardedState:  # fmt: skip
    """A state of zeros. With ``zero`` and ``master_shards``, a rank's weights are OwnedSlices, as on GPUs."""
    mesh = Mesh(comm, layout)
    group, stages = mesh.replicas, stages_of(mesh.layout.pp, chunks, v_shape)
    parts = model.parts(mesh.tp.rank, mesh.tp.size, mesh.pp.rank, stages)
    sharded = zero and group.size > 1
    multiple = 8 * group.size if sharded else 1
    weights = Parameters(model.parameter_shapes(*parts), groups=model.fused_groups(*parts), multiple=multiple)
    parallel = DataParallel(mesh.dense, weights.like(), Buckets(multiple, bucket_bytes, bucket_bytes, sharded))
    optimizer: Any = Optimizer(AdamW(), weights, parts=parallel.parts() if sharded else None)
    if sharded and master_shards:
        optimizer.weights = OwnedSlices(weights, optimizer.state["exp_avg"].slices)
    return ShardedState(mesh, model, stages, optimizer, parallel, numpy_ops, Arena())


def expected_of(state: ShardedState, whole: Whole, name: str) -> np.ndarray:
    """This rank's part of a tensor."""
    tensor, placement = whole[name], state.placements[name.removeprefix("exp_avg.").removeprefix("exp_avg_sq.")]
    if (split := placement.along("tp")) is None:
        return tensor
    return np.split(tensor, split.parts, split.dim)[state.mesh.tp.rank * split.parts // state.mesh.tp.size]


def fill(state: ShardedState, whole: Whole) -> None:
    """Give a rank its part; what it need not hold of the weights is not a number."""
    for prefix, held in _held(state):
        flat = np.full(state.parallel.gradients.flat.size, np.nan, np.float32)
        for name, span in state.parallel.gradients.spans.items():
            flat[span] = expected_of(state, whole, prefix + name).ravel()
        held.flat[:] = np.nan
        parts = held.parts()
        if not isinstance(held, OwnedSlices) and state.parallel.sharded:
            parts = [(part, part) for part in state.parallel.parts()]
        for part, local in parts:
            held.flat[local] = flat[part]


def assert_holds(state: ShardedState, whole: Whole) -> None:
    """Bit by bit; of weights that a rank keeps whole, all."""
    for prefix, held in _held(state):
        flat = np.zeros(state.parallel.gradients.flat.size, np.float32)
        for name, span in state.parallel.gradients.spans.items():
            flat[span] = expected_of(state, whole, prefix + name).ravel()
        for part, local in held.parts():
            assert held.flat[local].tobytes() == flat[part].tobytes(), (prefix, part, state.mesh.layout)


def _held(state: ShardedState) -> list[tuple[str, Any]]:
    optimizer = state.optimizer
    return [("", optimizer.weights), *((f"{name}.", held) for name, held in optimizer.state.items())]


def save(folder: Path, state: ShardedState, step: int, **options: Any) -> None:
    """Collective."""
    settings = {"tokenizer": ByteTokenizer(), "config": {}, "keep": 99, "before": step}
    checkpoint.save(folder, state, step=step, **settings | options).finish()


def read(path: Path, state: ShardedState) -> None:
    shapes = state.model.parameter_shapes()
    step = checkpoint.verify(path).step
    files = checkpoint.state_files(path, shapes, dict.fromkeys(AdamW.state, shapes))
    state.read(huggingface.weight_files(path, shapes), files, step)


def save_in(
    layout: Layout, folder: Path, step: int, model: LlamaConfig, whole: Whole, options: dict[str, Any] | None = None,
    **how: Any,
) -> Path:  # fmt: skip
    """A whole model's state, saved by the ranks of a layout; ``how`` makes their state."""

    def run(comm: Communicator) -> None:
        state = make_state(comm, model, layout, **how)
        fill(state, whole)
        save(folder, state, step, **(options or {}))

    spawn(run, layout.ranks, timeout=100)
    return folder / f"step-{step}"


def assert_loads_in(layout: Layout, path: Path, model: LlamaConfig, whole: Whole, **how: Any) -> None:
    """The ranks of a layout find their parts of ``whole`` in a checkpoint."""

    def run(comm: Communicator) -> None:
        state = make_state(comm, model, layout, **how)
        read(path, state)
        assert_holds(state, whole)

    spawn(run, layout.ranks, timeout=100)


def tensors_of_run(out: Path) -> dict[str, bytes]:
    """All that a run has trained, by name, whichever ranks wrote it."""
    files = checkpoint.find(out).path.glob("*.safetensors")
    tensors = {name: tensor.tobytes() for file in files for name, tensor in load_file(file).items()}
    return dict(sorted(tensors.items()))


def save_alone(folder: Path, model: LlamaConfig, step: int, seed: int = 0, **options: Any) -> Path:
    """The state that follows from ``seed``, saved by one rank."""
    return save_in(Layout(), folder, step, model, whole_state(model, seed), {"config": {"seed": seed}, **options})
