"""Runs of every layout, and one comparison of what their ranks know with what one rank knows."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kos.testing import spawn
from kos.train import optim
from kos.train.config.options import TrainConfig
from kos.train.data import Shard
from kos.train.data.batches import Dataset, Tokens
from kos.train.data.tokenizers import NumberTokenizer
from kos.train.device import dry_run
from kos.train.device.cpu import CpuDevice
from kos.train.generate import Sampling, generate
from kos.train.model import model as model_module
from kos.train.model.initial import init_weights
from kos.train.ops.fp8 import Quantized
from kos.train.ops.parameters import Parameters
from kos.train.parallel.mesh import Layout, Mesh
from tests.train.models import InMemory, part_of

STEPS, LEAST_CHUNK = 2, 8
# A norm with a small epsilon amplifies the rounding of small inputs, which differs between processors.
SHAPE: dict[str, Any] = {
    "hidden_size": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 2, "intermediate_size": 24,
    "vocab_size": 40, "initializer_range": 0.3, "rms_norm_eps": 0.05,
}  # fmt: skip
RUN: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 1, "seq_len": 32, "lr": 1e-2, "warmup_steps": 2,
                       "documents": "cross"}  # fmt: skip


BITS: dict[str, Any] = {"seq_len": 32, "batch_size": 4, "micro_batch_size": 1, "steps": 2, "deterministic": True}


class Precise(CpuDevice):
    """In float64, where what differs between layouts is seen."""

    dtype = np.dtype(np.float64)


DEVICES: dict[type[CpuDevice], float] = {Precise: 1e-10, CpuDevice: 1e-5}


def make_data(config: TrainConfig) -> Dataset:
    """Numbers of which the next often follows from the last; some targets of the validation are left over.

    Documents of 9 tokens, on average, begin among them. Where they are packed, a quarter of the tokens do not count.
    """
    rng = np.random.default_rng(1)
    steps = rng.choice([1, 1, 1, 7, 11], max(4000, 8 * config.seq_len)).cumsum() % 40
    cut = len(steps) * 3 // 4
    sizes = config.seed, config.batch_size, config.seq_len, 2
    places = [np.unique([0, *rng.integers(0, len(part), len(part) // 9)]) for part in (steps[:cut], steps[cut:])]
    packs = config.documents == "pack"
    mask = (rng.random(len(steps)) >= 0.25).astype(np.uint8)
    tokens = Shard(steps.astype(np.uint16), mask if packs else None)
    parts = zip((tokens[:cut], tokens[cut:]), places, strict=True)
    train, val = (Tokens([part], begins) for part, begins in parts)
    return Dataset("numbers", train, val, NumberTokenizer(40), *sizes, "", packs=packs)


def run_to_its_end(device: Any, steps: int, to_host: Callable[[Any], np.ndarray], context: int) -> dict[str, Any]:
    """What a rank knows after these steps; its device is closed."""
    rows = []
    for step in range(steps):
        device.start_step(step, False)
        result = device.finish_step(step)
        rows.append((result.loss, result.norm))
    loss, decoder, text = device.evaluate()["val_loss"], device.decoder(1, 8), None
    if decoder is not None:
        how = {"tp": device.mesh.model_parallel}
        text = [*generate(decoder, context, [[1, 2, 3]], 4, Sampling(top_k=0, seed=1), **how)]
    weights = device.whole_weights().items()
    weights = {name: to_host(array) for name, array in weights if not isinstance(array, Quantized)}
    device.close()
    device.mesh.close()
    model = device.step.models[0].config
    return {"rows": np.array(rows), "loss": loss, "text": text, "weights": weights, "model": model}


def settings(layout: Layout, **values: Any) -> TrainConfig:
    """Those of a run in this layout.  What is no setting of a run is of its model, in place of that in ``SHAPE``."""
    of_run = {name: value for name, value in values.items() if name in TrainConfig.model_fields}
    of_model = {name: value for name, value in values.items() if name not in of_run}
    axes = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "cp")}
    return TrainConfig.from_preset("tiny", **of_run, **axes, model={**SHAPE, **of_model})


def small_buckets(patch: pytest.MonkeyPatch) -> None:
    """The weights of a small model are updated in many blocks, and exchanged in many buckets.

    With ``deterministic``, even short sequences are split among the ranks of cp.
    """
    blocks = ((optim, "CHUNK", 64), (dry_run, "CHUNK", 64), (dry_run, "HOST_BUCKET_BYTES", 4096),
              (model_module, "LEAST_CHUNK", LEAST_CHUNK))  # fmt: skip
    for module, name, value in blocks:
        patch.setattr(module, name, value)


def train(
    layout: Layout, kind: type[CpuDevice], layers: int, tied: bool, steps: int = STEPS, kv_heads: int = 0,
    hosts: Sequence[int] = (), **changes: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """What each rank of a run knows at its end.  Its buckets are small."""
    shape = {"num_hidden_layers": layers, "tie_word_embeddings": tied}
    if kv_heads:
        shape |= {"num_key_value_heads": kv_heads}
    asked = settings(layout, **{**RUN, "steps": steps, **shape, **changes})

    def run(comm: Any) -> dict[str, Any]:
        own = make_device(comm, layout, kind, asked)
        own.step.gradients.flat[:] = np.nan
        return run_to_its_end(own, steps, np.copy, context=20)

    with pytest.MonkeyPatch.context() as patch:
        small_buckets(patch)
        return spawn(run, layout.ranks, timeout=200, hosts=hosts)


def make_device(comm: Any, layout: Layout, kind: type[CpuDevice], asked: TrainConfig) -> CpuDevice:
    """The device of a rank, with the same weights in every layout."""
    mesh, config = Mesh(comm, layout), asked.for_world(layout.dp)
    model = config.model_config_for(40)
    whole = Parameters(model.parameter_shapes(), np.float32)
    init_weights(model, whole, 3)
    own = kind(config, model, make_data(config), mesh, lambda what, share: None)
    own.read(InMemory(whole))
    return own


def held_by(device: Any, to_host: Callable[[Any], np.ndarray]) -> dict[tuple[Any, ...], bytes]:
    """The weights and the state that a rank has: by array, tensor, its shard of tp, and elements of this shard.

    Ranks with the same key hold the same elements.
    """
    weights, state = device.whole_weights(), device.step.optimizer.state
    placements = device.state.placements
    found = {("whole", name, str(placements[name].box), 0, 0): to_host(array) for name, array in weights.items()}
    for kind, array in state.items():
        flat = to_host(array.flat)
        for (name, span), (part, local) in itertools.product(array.spans.items(), array.parts()):
            start, stop = max(part.start, span.start), min(part.stop, span.stop)
            if start < stop:
                at = local.start + start - part.start
                key = kind, name, str(placements[name].box), start - span.start, stop - span.start
                found[key] = flat[at : at + stop - start]
    return {key: values.tobytes() for key, values in found.items()}


@functools.cache
def serial(kind: type[CpuDevice], layers: int, tied: bool, steps: int, **changes: Any) -> dict[str, Any]:
    (alone,) = train(Layout(), kind, layers, tied, steps, **changes)
    return alone


def compare(
    ranks: Sequence[dict[str, Any]], alone: dict[str, Any], layout: Layout, rtol: float = 0.0, weights: float = 0.0
) -> None:
    """Each rank knows what one rank knows alone: within a relative error, ``weights`` of weights, or bit for bit."""

    def near(got: Any, expected: Any, what: str, rtol: float = rtol, atol: float = 0.0) -> None:
        if rtol:
            np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol, err_msg=what)
        else:
            assert np.asarray(got).tobytes() == np.asarray(expected).tobytes(), what

    held = set[str]()
    for rank, got in enumerate(ranks):
        near(got["rows"], alone["rows"], f"losses and norms of rank {rank}")
        near(got["loss"], alone["loss"], f"validation of rank {rank}")
        assert got["text"] in (None, alone["text"])
        for name, value in got["weights"].items():
            at = layout.coordinates(rank)["tp"]
            wanted = part_of(name, alone["weights"][name], alone["model"], layout.tp, at)
            near(value, wanted, f"{name} of rank {rank}", weights or rtol, weights or rtol)
            held.add(name)
    assert held == set(alone["weights"]) and ranks[0]["text"] == alone["text"]


OF_LAYOUTS = {"pp_schedule", "zero", "recompute"}
"""Settings that change no bit of a run on one rank."""


def check(
    layout: Layout, kind: type[CpuDevice], layers: int, tied: bool, steps: int = STEPS, **changes: Any
) -> list[dict[str, Any]]:
    """Compare the ranks of a layout with one rank, and return what ``train`` returns."""
    alone = {name: value for name, value in changes.items() if name not in OF_LAYOUTS}
    ranks = train(layout, kind, layers, tied, steps, **changes)
    compare(ranks, serial(kind, layers, tied, steps, **alone), layout, DEVICES[kind])
    return ranks


def check_bits(layout: Layout, layers: int, tied: bool, **changes: Any) -> None:
    """With ``deterministic``, unless ``changes`` say otherwise."""
    changes = BITS | changes
    alone = {name: value for name, value in changes.items() if name not in OF_LAYOUTS}
    compare(train(layout, CpuDevice, layers, tied, **changes), bits_of_one(layers, tied, **alone), layout)


@functools.cache
def bits_of_one(layers: int, tied: bool, **changes: Any) -> dict[str, Any]:
    (alone,) = train(Layout(), CpuDevice, layers, tied, **changes)
    return alone


def length(cp: int) -> int:
    """Tokens that ``cp`` ranks can cut in a fixed order."""
    return 32 if cp == 1 else 2 * LEAST_CHUNK * cp


def pairs(allowed: Callable[[dict[str, Any]], bool], **values: Sequence[Any]) -> list[dict[str, Any]]:
    """Few rows of settings, for pairwise testing: any two values that may be combined are together in some row.

    The rows are chosen from 400 random ones.  The next row is always the one with the most pairs of values that no
    chosen row has.
    """
    rng, chosen = random.Random(0), list[dict[str, Any]]()
    drawn = ({name: rng.choice(choices) for name, choices in values.items()} for _ in itertools.count())
    candidates = itertools.islice(filter(allowed, drawn), 400)
    rows = [(row, {*itertools.combinations(row.items(), 2)}) for row in candidates]
    missing = set[Any]().union(*(of_row for _, of_row in rows))
    while missing:
        best, of_best = max(rows, key=lambda row: len(missing & row[1]))
        chosen.append(best)
        missing -= of_best
    return chosen


def allowed(row: dict[str, Any], most: int) -> bool:
    """Whether the settings of a row may be combined, in a layout of 2 to ``most`` ranks."""
    return (
        2 <= math.prod(row[axis] for axis in AXES) <= most
        and row["dp"] * row["micro_batch_size"] <= RUN["batch_size"]
        and row["dp"] * row["cp"] > row["zero"]
        and (row["pp"] > 1 or row["pp_schedule"] == "1f1b")
        and (row["tp"] == 1 or row["family"] != "olmo2")
    )


AXES = "dp", "tp", "pp", "cp"


def layouts_with(
    most: int, possible: Callable[[dict[str, Any]], bool], **values: Sequence[Any]
) -> list[tuple[Layout, dict[str, Any]]]:
    """Layouts of 2 to ``most`` ranks, each with the other settings of its row of ``pairs``."""
    rows = pairs(lambda row: allowed(row, most) and possible(row), **values)
    return [(Layout(**{axis: row.pop(axis) for axis in AXES}), row) for row in rows]


def named(layout: Layout) -> str:
    return "-".join(f"{axis}{getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1)


def cases(every: Sequence[tuple[Layout, dict[str, Any]]]) -> Any:
    """Parametrizes a test by ``layout`` and by the ``changes`` of its settings."""
    ids = ["-".join([named(layout), *map(str, more.values())]) or "alone" for layout, more in every]
    return pytest.mark.parametrize(("layout", "changes"), every, ids=ids)
