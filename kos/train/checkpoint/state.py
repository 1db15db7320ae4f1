"""Weights and optimizer state of a rank, resharded: to and from whole tensors in files, or host memory of other ranks.

A rank holds tensors in part: those of its pipeline stage, of each the box that tensor parallelism leaves it
(``Sharded``), and of these, with ZeRO-1, its part of each bucket.

- To files: a tensor is gathered to the one rank that writes it, bucket by bucket.
- From files: each rank reads the slices that it needs. Neither takes more host memory than a whole tensor.
- To host memory, and from the host memory of all ranks (``--elastic``): each rank says which slices it holds. A slice
  that some rank lacks is broadcast by the first one that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from kos.errors import CheckpointError, ranks_in_words
from kos.memory.arena import Arena
from kos.memory.array import as_dtype
from kos.memory.sharded import Split
from kos.train.layers.lora import is_adapter
from kos.train.model.llama import LlamaConfig, Stages
from kos.train.ops import Array
from kos.train.ops.fp8 import Quantized
from kos.train.ops.parameters import FlatTensors, Parameters, Shape, overlap
from kos.train.parallel.data import DataParallel, make_buckets
from kos.train.parallel.failures import on_every_rank
from kos.train.parallel.mesh import Layout, Mesh

if TYPE_CHECKING:
    from kos.comm.communicator import Communicator

State = Mapping[str, Container[str]]
"""The names of an optimizer's arrays of state, each with the names of the tensors that it covers."""


RESIDUAL = "residual"
"""The prefix of the files that hold compression errors of gradients, and of the tensors in these files."""


class WritePlan:
    """Which rank writes which tensor to which file.  ``writers`` maps a tensor to its rank, ``shapes`` to its shape.

    Tensors are whole in the files, so that a checkpoint is a Hugging Face folder and loads in any layout. Each tensor
    has one writer. The ranks of a pipeline stage write the tensors of this stage in parallel, each about equally many
    bytes. Megatron-LM's fully parallel saving splits the work among data-parallel ranks in the same way.

    ``state`` names the arrays of optimizer state and their tensors. Files hold fp32.  With ``compress``, each replica
    (a rank of dp and cp) also has a residual, except of the tensors in ``frozen``.  Tensors are written in the order of
    ``first``, and then in the order of the model.  Of a model with adapters, these are all that is written.
    """

    def __init__(
        self, model: LlamaConfig, layout: Layout, stages: Stages, state: State, compress: str = "none",
        first: Iterable[str] = (), frozen: Container[str] = (),
    ) -> None:  # fmt: skip
        self.state, shapes = state, model.parameter_shapes()
        self.kind = "model" if model.lora is None else "adapter_model"
        self.shapes: Mapping[str, Shape] = {
            name: shapes[name] for name in (*first, *shapes) if model.lora is None or is_adapter(name)
        }
        self.writers: dict[str, int] = {}
        several = layout.replicas > 1 and compress != "none"
        self.residuals = [dict[str, int]() for _ in range(layout.replicas * several)]
        """Per replica: tensor -> the rank that writes its residual.  This rank holds a part of it."""
        self._layout = layout
        for pp in range(layout.pp):
            names = model.placements(*model.parts(0, layout.tp, pp, stages))
            mine = [name for name in names if name in self.shapes and name not in self.writers]
            sizes = {name: math.prod(self.shapes[name]) for name in mine}
            start = layout.rank({"pp": pp})
            self.writers |= _shared_out(sizes, start, layout.ranks // layout.pp)
            for replica, writers in enumerate(self.residuals):
                of_replica = {name: size for name, size in sizes.items() if name not in frozen}
                writers |= _shared_out(of_replica, start + replica * layout.tp, layout.tp)
        self.ranks = sorted(set(self.writers.values()))
        """The ranks that write a file."""

    def names(self, rank: int) -> list[str]:
        """The tensors that a rank writes, in the order of the layout."""
        return [name for name in self.shapes if self.writers[name] == rank]

    def file(self, kind: str, rank: int) -> str:
        """The name of the ``model`` or ``optimizer`` file of a rank."""
        place = f"-{self.ranks.index(rank) + 1:05}-of-{len(self.ranks):05}" if len(self.ranks) > 1 else ""
        return f"{kind}{place}.safetensors"

    def contents(self, rank: int) -> dict[str, dict[str, Shape]]:
        """File -> the tensors that a rank writes to it, in order."""
        files = dict[str, dict[str, Shape]]()
        if shapes := {name: self.shapes[name] for name in self.names(rank)}:
            files[self.file(self.kind, rank)] = shapes
            files[self.file("optimizer", rank)] = state_shapes(self.state, shapes)
        for replica, writers in enumerate(self.residuals):
            mine = {name: shape for name, shape in self.shapes.items() if writers.get(name) == rank}
            if mine:
                file = f"{RESIDUAL}-{rank + 1:05}-of-{self._layout.ranks:05}.safetensors"
                files[file] = residual_shapes(replica, mine)
        return files

    def index(self) -> dict[str, object]:
        """Hugging Face's index of the weights' files."""
        size = sum(4 * math.prod(shape) for shape in self.shapes.values())
        weight_map = {name: self.file(self.kind, self.writers[name]) for name in self.shapes}
        return {"metadata": {"total_size": size}, "weight_map": weight_map}

    def host_bytes(self, rank: int, all_at_once: bool) -> int:
        """The most host memory to save on a rank: a tensor, and its part of the state or at most two more tensors."""
        files = self.contents(rank).values()
        sizes = [4 * math.prod(shape) for shapes in files for shape in shapes.values()]
        share, most = sum(sizes), max(sizes, default=0)
        return most + (share if all_at_once else min(share, 2 * most))


def _shared_out(sizes: Mapping[str, int], first: int, ranks: int) -> dict[str, int]:
    """Tensor -> the rank that writes it, one of the ``ranks`` ranks from ``first`` on."""
    given, writers = [0] * ranks, dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rank = given.index(min(given))
        given[rank] += sizes[name]
        writers[name] = first + rank
    return writers


def residual_shapes(replica: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The tensors of a replica's residual, as files name them (``residual.0.NAME``), and their shapes."""
    return {f"{RESIDUAL}.{replica}.{name}": shape for name, shape in shapes.items()}


def state_shapes(state: State, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The tensors of an optimizer's state, as files name them (``exp_avg.NAME``), and their shapes."""
    return {f"{kept}.{name}": shape for kept, of in state.items() for name, shape in shapes.items() if name in of}


FLOAT32 = np.dtype(np.float32)


class Tensors(Protocol):
    """Whole tensors by name, of which slices are read: of files (``TensorFiles``), or drawn (``InitialWeights``)."""

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor, or a slice of it."""


Holds = Mapping[str, Sequence[tuple[int, int]]]
"""Of each array, the parts (start, stop) of its layout that a rank has."""


class HostState(NamedTuple):
    """The weights and the optimizer's state of a rank in host memory, after ``step`` steps and ``updates``.

    ``values``: of each array, where each of its parts begins in the layout, and the part.  A rank that has just joined
    has none.
    """

    step: int
    updates: int
    values: Mapping[str, Sequence[tuple[int, np.ndarray]]]

    @property
    def holds(self) -> Holds:
        return {kept: [(at, at + len(part)) for at, part in parts] for kept, parts in self.values.items()}

    def find(self, kept: str, piece: slice) -> Any:
        """The values of a slice of the layout; None if this rank has not all of them."""
        for start, values in self.values.get(kept, ()):
            if start <= piece.start and piece.stop <= start + len(values):
                return values[piece.start - start : piece.stop - start]
        return None


class ShardedState:
    """What a rank holds of the weights and the optimizer's state, and its way to files and to other ranks.

    The state of ``optimizer`` has the layout of ``parallel.gradients``, which covers this rank's ``stages``.  ``ops``
    are the operations on its arrays. ``arena``, which is idle between steps, holds a bucket in fp32, or two with tensor
    parallelism.  ``frozen`` are weights that are not trained, and ``quantized`` those of them that are held in 8 bits.
    """

    def __init__(
        self, mesh: Mesh, model: LlamaConfig, stages: Stages, optimizer: Any, parallel: DataParallel,
        ops: Any, arena: Arena, frozen: Parameters | None = None, quantized: Iterable[Quantized] = (),
    ) -> None:  # fmt: skip
        self.mesh, self.model, self.optimizer, self.parallel = mesh, model, optimizer, parallel
        self.ops, self.arena, self.frozen = ops, arena, Parameters({}) if frozen is None else frozen
        self.quantized = [*quantized]
        self.parts = model.parts(mesh.tp.rank, mesh.tp.size, mesh.pp.rank, stages)
        self.placements = model.placements(*self.parts)
        self.of_files = model.lora is not None and not any(map(is_adapter, self.frozen))
        """Whether ``frozen`` is the base of adapters alone, whose files every rank reads."""
        self.names = [*parallel.gradients, *self.frozen, *chain(*(each.members for each in self.quantized))]
        """The tensors, in the order in which they are read and written."""
        kept, compress = optimizer.names_of_state, parallel.compress
        self.plan = WritePlan(model, mesh.layout, stages, kept, compress, self.names, self.frozen)

    @property
    def arrays(self) -> dict[str, FlatTensors]:
        """The weights that are trained (``weights``), the others (``frozen``), and the optimizer's state by name."""
        return {"weights": self.optimizer.weights, "frozen": self.frozen, **self.optimizer.state}

    # --- to files ------------------------------------------------------------------------------------

    def gather(self) -> Iterator[np.ndarray]:
        """The tensors that this rank writes, whole, in host memory, in the order of ``WritePlan.contents``. Collective.

        Their first dimension and the order of their elements are those of the tensor, not always their shape.
        """
        plan, residual = self.plan, self.parallel.residual
        for kept, held in self.arrays.items():
            if kept != "frozen" or not self.of_files:
                yield from self._gather(held, plan.state.get(kept, self.placements), plan.writers)
        if residual is not None:
            yield from self._gather(residual, self.placements, plan.residuals[self.mesh.replicas.rank])

    def _gather(self, held: FlatTensors, names: Container[str], writers: Mapping[str, int]) -> Iterator[np.ndarray]:
        mesh, here = self.mesh, self.mesh.world.rank
        first = here - mesh.tp.rank
        near = {name for name, rank in writers.items() if first <= rank < first + mesh.tp.size and name in names}
        tensor = np.empty(0, FLOAT32)
        for bucket, values, buffer in self._buckets(held):
            for name, span in held.spans.items():
                if name not in near or (both := overlap(span, bucket)) is None:
                    continue
                place, mine = self.placements[name], writers[name] == here
                split = place.along("tp")
                parts = 1 if split is None else split.parts
                if both.start == span.start and mine:
                    tensor = np.empty((parts, span.stop - span.start), FLOAT32)
                each = len(buffer) // mesh.tp.size if parts > 1 else both.stop - both.start
                for at in range(both.start, both.stop, each):
                    end = min(at + each, both.stop)
                    piece = values[at - bucket.start : end - bucket.start]
                    of_all = [piece] if parts == 1 else self._of_all(piece, split, buffer)
                    for part in range(parts if mine else 0):
                        self.ops.copy(of_all[part], tensor[part, at - span.start : end - span.start])
                if both.stop == span.stop and mine:
                    dim = 0 if split is None else split.dim
                    whole = np.moveaxis(tensor.reshape(parts, *place.local), 0, dim)
                    yield whole.reshape(place.shape) if dim == 0 or parts == 1 else whole

    def _of_all(self, piece: Array, split: Split | None, buffer: Array) -> Sequence[Array]:
        """The same piece of each tensor-parallel part."""
        size, tp, copies = len(piece), self.mesh.tp, 1 if split is None else split.copies
        tp.comm.all_gather(piece, buffer[: tp.size * size])
        tp.comm.synchronize()
        return [buffer[rank * size : (rank + 1) * size] for rank in range(0, tp.size, copies)]

    def _buckets(self, held: FlatTensors) -> Iterator[tuple[slice, Array, Array]]:
        """Bucket by bucket: where it lies in the layout, its values in fp32, and as much memory for those of ``tp``."""
        parallel, ops, tp, buckets = self.parallel, self.ops, self.mesh.tp.size, self.parallel.buckets
        largest = max(bucket.stop - bucket.start for bucket in buckets)
        if held is self.frozen:
            buckets = make_buckets(held.flat.size if self.frozen else 0, 1, largest, largest)
        with ops.step(self.arena):
            whole = self.arena.take((largest,), FLOAT32)
            buffer = self.arena.take((max(largest, tp) if tp > 1 else 0,), FLOAT32)
            for bucket in buckets:
                values = whole[: bucket.stop - bucket.start]
                if held is parallel.residual:  # of what other ranks keep, zeros
                    ops.zero(values)
                for start, stop, at in held.held(bucket):
                    ops.copy(held.flat[at : at + stop - start], values[start - bucket.start : stop - bucket.start])
                if parallel.sharded and held is not parallel.residual and held is not self.frozen:
                    parallel.all_gather(bucket, values)
                    parallel.synchronize()  # the next wait for a GPU has no timeout
                yield bucket, values, buffer

    # --- from files, or drawn ------------------------------------------------------------------------

    def read(
        self, weights: Tensors, state: Tensors | None = None, step: int = 0,
        show: Callable[[float], object] = lambda share: None, residual: Tensors | None = None, updates: int = 0,
    ) -> None:  # fmt: skip
        """Fill the weights, and the optimizer's state and the residual unless they begin as zeros. Waits for no rank.

        Calls ``show`` before each tensor, with the share that is done.
        """
        parts = list[Callable[[], None]]()
        for kept, held in self.arrays.items():
            names, source, prefix = self.plan.state.get(kept), weights, ""
            if names is not None:
                if state is None:
                    continue
                source, prefix = state, f"{kept}."
            parts += [partial(self._read, held, source, prefix, each) for each in held.spans
                      if names is None or each in names]  # fmt: skip
        if residual is not None and (ours := self.parallel.residual) is not None:
            parts += [partial(self._read, ours, residual, "", name) for name in ours.spans]
        parts += [partial(self._quantize, weights, each) for each in self.quantized]
        for index, part in enumerate(parts):
            show(index / len(parts))
            part()
        self.optimizer.continue_after(step, updates)

    def read_base(self, weights: Tensors) -> None:
        """Fill the weights that are not trained, except adapters."""
        for name in self.frozen:
            if not is_adapter(name):
                self._read(self.frozen, weights, "", name)
        for each in self.quantized:
            self._quantize(weights, each)

    def _quantize(self, weights: Tensors, made: Quantized) -> None:
        """Fill a matrix of which a rank holds only 8-bit copies.  The matrix itself is in ``arena`` until it is
        quantized."""
        shapes = {name: self.placements[name].local for name in made.members}
        with self.ops.step(self.arena):
            zeros = lambda size, dtype: self.arena.take((size,), dtype)  # noqa: E731
            whole = Parameters(shapes, self.frozen.flat.dtype, {made.name: made.members}, zeros)
            for name in made.members:
                self._read(whole, weights, "", name)
            self.ops.quantize(whole[made.name], made.rows, made.columns, self.arena)

    def _read(self, held: FlatTensors, tensors: Tensors, prefix: str, name: str) -> None:
        """Read what is held of a tensor: the rows that have some of it."""
        place, first = self.placements[name], held.spans[name].start
        row = max(1, math.prod(place.local[1:]))
        for start, stop, _ in held.held(held.spans[name]):
            rows = range((start - first) // row, -(-(stop - first) // row))
            values = tensors.read(prefix + name, place.rows(rows.start, rows.stop))
            flat = np.ascontiguousarray(values, as_dtype(held.flat.dtype).numpy).reshape(-1)
            skipped = start - first - rows.start * row
            self._fill(held, slice(start, stop), flat[skipped : skipped + stop - start])

    def _fill(self, held: FlatTensors, span: slice, values: Any) -> None:
        """Copy ``values`` of a span of the layout to what is held of it."""
        if isinstance(values, np.ndarray):
            values = values.astype(as_dtype(held.flat.dtype).numpy, copy=False)
        for start, stop, at in held.held(span):
            self.ops.copy(values[start - span.start : stop - span.start], held.flat[at : at + stop - start])

    # --- to host memory, and from that of all ranks ----------------------------------------------------

    @property
    def holds(self) -> Holds:
        """The parts of each array that this rank has after a step, of those that ranks receive from each other."""
        found = dict[str, list[tuple[int, int]]]()
        for kept, held in self.arrays.items():
            mine = self.parallel.parts() if kept == "weights" else [part for part, _ in held.parts()]
            cut = (overlap(part, span) for span in self._moved(kept) for part in mine)
            found[kept] = [(each.start, each.stop) for each in cut if each]
        return found

    def _moved(self, kept: str) -> list[slice]:
        """The slices of an array's layout that ranks receive from each other.

        Of frozen weights beside adapters, these are only adapters, because each rank reads the base from its files.
        """
        of_files, found = kept == "frozen" and self.model.lora is not None, list[slice]()
        for name, span in self.arrays[kept].spans.items():
            if name in self.plan.state.get(kept, self.placements) and (is_adapter(name) or not of_files):
                start = found.pop().start if found and found[-1].stop == span.start else span.start
                found.append(slice(start, span.stop))
        return found

    def to_host(self, step: int) -> HostState:
        """A copy of what this rank holds after ``step`` steps."""
        arrays = self.arrays
        values = {
            kept: [
                (first, self.ops.to_host(arrays[kept].flat[at : at + last - first]).astype(np.float32, copy=False))
                for part in parts for first, last, at in arrays[kept].held(slice(*part))
            ]
            for kept, parts in self.holds.items()
        }  # fmt: skip
        return HostState(step, self.optimizer.updates, values)

    def load(self, mine: HostState, comm: Communicator, holds: Sequence[Holds], gone: Collection[int] = ()) -> None:
        """Fill the weights and the state from the copies of all ranks of ``comm``.  Collective.

        ``holds``: of each rank.  Raises CheckpointError, on all ranks, if no rank has some part of the state, because
        ranks are ``gone``.
        """
        largest = max(bucket.stop - bucket.start for bucket in self.parallel.buckets)
        with self.ops.step(self.arena):
            staging = self.arena.take((largest,), FLOAT32)
            for kept, held in self.arrays.items():
                for piece, ranks in self._pieces(kept, [theirs.get(kept, ()) for theirs in holds], largest):
                    if not ranks:
                        got = f"expected each part of the state on a rank, got none with some of {kept}"
                        raise on_every_rank(CheckpointError(f"{got}: {ranks_in_words([*gone])} had it"))
                    values = mine.find(kept, piece)
                    if len(ranks) < comm.size:
                        part = staging[: piece.stop - piece.start]
                        if comm.rank == ranks[0]:
                            self.ops.copy(values, part)
                        comm.broadcast(part, ranks[0])
                        comm.synchronize()
                        values = part
                    self._fill(held, piece, values)
        self.optimizer.continue_after(mine.step, mine.updates)

    def _pieces(
        self, kept: str, holds: Sequence[Sequence[tuple[int, int]]], largest: int
    ) -> Iterator[tuple[slice, list[int]]]:
        """Slices of at most ``largest`` elements that make up what is moved of an array, each with the ranks that have
        it."""
        for whole in self._moved(kept):
            ends = {whole.start, whole.stop, *chain(*chain(*holds))}
            cuts = sorted(end for end in ends if whole.start <= end <= whole.stop)
            place, ranks = {cut: index for index, cut in enumerate(cuts)}, [list[int]() for _ in cuts]
            for rank, theirs in enumerate(holds):
                for part in theirs:
                    if both := overlap(slice(*part), whole):
                        for index in range(place[both.start], place[both.stop]):
                            ranks[index].append(rank)
            for (start, stop), of_piece in zip(pairwise(cuts), ranks, strict=False):
                for at in range(start, stop, largest):
                    yield slice(at, min(at + largest, stop)), of_piece
