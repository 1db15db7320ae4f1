"""``--publish``: the weights of a run for those who serve them, in any layout (``kos.transfer``).

Each rank publishes the weights that it holds after an update.  With ZeRO-1 these are its slices of the buckets;
otherwise, replicas divide the weights among them, so that a rank copies as little as with ZeRO-1.  Tensors have the
names and shapes of Hugging Face.  A run with adapters publishes only the adapters, under the names of peft.  With
``--publish-merged``, it publishes all weights, with the adapters added.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kos.comm.communicator import Communicator
from kos.errors import ConfigError, InvalidArgument, RendezvousError, TransferError
from kos.memory.sharded import Sharded
from kos.train.checkpoint.huggingface import name_as_saved
from kos.train.config.options import TrainConfig
from kos.train.device import Device
from kos.train.layers.lora import A, B, is_adapter
from kos.train.model.families import TRANSPOSED
from kos.train.ops.parameters import Parameters, overlap
from kos.train.parallel.failures import alone
from kos.train.parallel.mesh import Axis
from kos.transfer.exchange import listen, parse
from kos.transfer.placement import Arrays, Placement
from kos.transfer.publisher import Publisher


class MergedRows:
    """This rank's rows of each adapted matrix, with the adapter added: W + alpha / rank B A.  Replicas divide the rows.

    The sums take memory in addition to the frozen weights, and are computed for each version.
    """

    def __init__(self, device: Device) -> None:
        self._device, step, shapes = device, device.step, dict[str, tuple[int, ...]]()
        self.rows, every = dict[str, slice](), step.with_frozen(step.weights)
        for name, matrix in step.frozen.items():
            if name.removesuffix("weight") + A in every:
                self.rows[name] = rows = _part(matrix.shape[0], step.parallel.replicas)
                shapes[name] = rows.stop - rows.start, matrix.shape[1]
        self.weights = Parameters(shapes, step.frozen.flat.dtype, zeros=step.frozen.zeros)

    def compute(self) -> None:
        """Add the present adapters.  Collective."""
        model, weights = self._device.step.models[0], self._device.whole_weights()
        ops, lora = model.ops, model.config.lora
        assert lora is not None
        with ops.step(arena := ops.make_arena()):
            for name, rows in self.rows.items():
                if rows.start < rows.stop:
                    a, b = (weights[name.removesuffix("weight") + each] for each in (A, B))
                    ops.copy(weights[name][rows], self.weights[name])
                    ops.low_rank(b[rows], a, self.weights[name], False, lora.scale, True, arena)

    def arrays(self, places: Mapping[str, Sharded]) -> dict[str, tuple[object, Placement]]:
        """The published array: the merged rows, flattened, and their placement."""
        placed = []
        for name, rows in self.rows.items():
            columns = self.weights.shapes[name][1]
            placed.append(_placed(name, places[name]).flat(rows.start * columns, rows.stop * columns))
        flat = self.weights.flat[: sum(each.count for each in placed)]
        return {"merged": (flat, Placement.joined(placed))} if placed else {}


class RunPublisher:
    """Offers the weights of a run at ``address``.  Collective.  Raises ConfigError."""

    def __init__(self, run: Any, address: str) -> None:
        self._merged = MergedRows(run.device) if run.config.publish_merged else None
        arrays = published_arrays(run.device, run.model_config.lora is not None, self._merged)
        with _named(address):
            self._publisher = run.held.enter_context(Publisher(run.comm, arrays, address, name="kos.train"))
        self.address = self._publisher.address

    def publish(self, step: int) -> None:
        """Publish the weights after ``step``.  Collective."""
        if self._merged is not None:
            self._merged.compute()
        self._publisher.publish(step)


@contextmanager
def _named(address: str) -> Iterator[None]:
    try:
        yield
    except (InvalidArgument, RendezvousError, TransferError) as error:
        raise ConfigError(f"--publish {address}: {error}").about("publish") from error


def check_address(comm: Communicator, config: TrainConfig) -> None:
    """Whether rank 0 can listen at the address of ``--publish``.  Collective.  Raises ConfigError."""
    address = config.publish

    def check() -> None:
        assert address is not None
        with _named(address):
            try:
                listen(*parse(address)).close()
            except OSError as error:
                raise RendezvousError(f"cannot listen there: {error}") from error

    if address is not None and not config.profile:
        alone(comm, check)


def open_publisher(run: Any) -> RunPublisher | None:
    """With ``--publish``, offer the weights of a run, and publish those from which it starts.  Collective."""
    if run.config.publish is None or not run.trains:
        return None
    publisher = RunPublisher(run, run.config.publish)
    publisher.publish(run.steps_done)
    run.console.say(f"publishing weights at {publisher.address}")
    return publisher


def published_arrays(device: Device, adapters: bool, merged: MergedRows | None = None) -> Arrays:
    """The arrays that this rank publishes: slices of the weights and of the frozen weights; with ``adapters``, these.

    With ``merged``, these are the merged matrices, and the frozen weights that have no adapters.
    """
    step, places, merges = device.step, device.state.placements, merged is not None
    without = {name for name in step.frozen if adapters and is_adapter(name) == merges}
    without.update(merged.rows if merged is not None else ())
    part = [_part(step.frozen.flat.size, step.parallel.replicas)]
    frozen = _arrays("frozen", step.frozen, part, places, without)
    if merged is not None:
        return merged.arrays(places) | frozen
    parallel, weights = step.parallel, step.weights
    if parallel.sharded:
        slices = parallel.own()
    else:
        slices = [_part(weights.flat.size, parallel.replicas)]
    return _arrays("weights", weights, slices, places) | frozen


def _part(size: int, replicas: Axis) -> slice:
    """The part of this rank, if ranks that hold the same ``size`` elements divide them."""
    return slice(size * replicas.rank // replicas.size, size * (replicas.rank + 1) // replicas.size)


def _arrays(
    prefix: str, held: Parameters, slices: Iterable[slice], places: Mapping[str, Sharded], without: Container[str] = ()
) -> dict[str, tuple[object, Placement]]:
    """An array for each run of neighbouring elements of tensors in ``slices`` of ``held.flat``."""
    found = dict[str, tuple[object, Placement]]()
    for part in slices:
        runs: list[tuple[int, int, list[Placement]]] = []
        for name, span in held.spans.items():
            if (both := overlap(span, part)) and name not in without:
                placed = _placed(name, places[name]).flat(both.start - span.start, both.stop - span.start)
                joins = bool(runs) and runs[-1][1] == both.start
                first, _, several = runs.pop() if joins else (both.start, 0, [])
                runs.append((first, both.stop, [*several, placed]))
        for first, last, several in runs:
            found[f"{prefix}[{first}:{last}]"] = held.flat[first:last], Placement.joined(several)
    return found


def _placed(name: str, place: Sharded) -> Placement:
    """Where this rank's part of a tensor lies in the tensor of Hugging Face."""
    if name.endswith(TRANSPOSED):
        return Placement.of(place.transposed, name_as_saved(name)).transposed
    return Placement.of(place, name_as_saved(name))
