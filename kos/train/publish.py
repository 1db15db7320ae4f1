"""``--publish``: the weights of a run for those who serve them, in any layout (``kos.transfer``).

Each rank publishes what it has after an update.  With ZeRO-1 these are its slices of the buckets; otherwise, replicas
share the weights out, so that a rank copies as little as with ZeRO-1.  Tensors have the names and shapes of Hugging
Face.  With adapters, only these are published, under the names of peft.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kos.errors import ConfigError, InvalidArgument, RendezvousError
from kos.train.checkpoint.huggingface import name_as_saved, shape_as_saved
from kos.train.device import Device
from kos.train.layers import Placement as Place
from kos.train.model.gpt2 import TRANSPOSED
from kos.train.model.parameters import Parameters
from kos.train.parallel.mesh import Axis
from kos.train.run_context import RunContext
from kos.transfer.placement import Arrays, Placement
from kos.transfer.publisher import Publisher


def open_publisher(run: RunContext) -> Publisher | None:
    """With ``--publish``, offer the weights of a run, and publish those from which it starts.  Collective."""
    if (address := run.config.publish) is None or not run.trains:
        return None
    arrays = published_arrays(run.device, run.model_config.lora is not None)
    try:
        publisher = run.held.enter_context(Publisher(run.comm, arrays, address, name="kos.train"))
    except (InvalidArgument, RendezvousError) as error:
        raise ConfigError(f"--publish {address}: {error}").about("publish") from error
    publisher.publish(run.steps_done)
    run.console.say(f"publishing weights at {publisher.address}")
    return publisher


def published_arrays(device: Device, adapters: bool) -> Arrays:
    """The arrays that this rank publishes: slices of the weights, and of the frozen weights unless ``adapters``."""
    step, places = device.step, device.state.placements
    parallel, weights = step.parallel, step.weights
    if parallel.sharded:
        slices = parallel.own()
    elif parallel.more:  # not the same ranks hold all of them
        slices = [slice(0, weights.flat.size)]
    else:
        slices = _shared_out(weights, parallel.replicas)
    found = _arrays("weights", weights, slices, places)
    frozen = Parameters({}) if adapters else step.frozen
    return found | _arrays("frozen", frozen, _shared_out(frozen, parallel.replicas), places)


def _shared_out(held: Parameters, replicas: Axis) -> list[slice]:
    """The part of this rank, of ranks that hold the same weights."""
    size = held.flat.size
    return [slice(size * replicas.rank // replicas.size, size * (replicas.rank + 1) // replicas.size)]


def _arrays(
    prefix: str, held: Parameters, slices: Iterable[slice], places: Mapping[str, Place]
) -> dict[str, tuple[object, Placement]]:
    """An array for each run of neighbouring elements of tensors in ``slices`` of ``held.flat``."""
    found = dict[str, tuple[object, Placement]]()
    for part in slices:
        runs: list[tuple[int, int, list[Placement]]] = []
        for name, span in held.spans.items():
            start, stop = max(span.start, part.start), min(span.stop, part.stop)
            if start < stop:
                placed = _placed(name, places[name]).flat(start - span.start, stop - span.start)
                if not runs or runs[-1][1] != start:
                    runs.append((start, start, []))
                first, _, several = runs.pop()
                runs.append((first, stop, [*several, placed]))
        for first, last, several in runs:
            found[f"{prefix}[{first}:{last}]"] = held.flat[first:last], Placement.joined(several, (last - first,))
    return found


def _placed(name: str, place: Place) -> Placement:
    """Where this rank's part of a tensor lies in the tensor of Hugging Face."""
    dim, shape = place.dim or 0, place.shape
    start, size = (place.start, place.size) if place.dim is not None else (0, shape[0])
    if name.endswith(TRANSPOSED):
        shape, last = shape_as_saved(name, shape), len(shape) - 1
        return Placement.cut(shape, last - dim, start, size, name_as_saved(name)).transposed
    return Placement.cut(shape, dim, start, size, name_as_saved(name))
