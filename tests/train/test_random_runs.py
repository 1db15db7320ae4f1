"""Random programs of training runs: train, save, resume in another layout, elsewhere, over other transports.

Each program trains one run in several parts.  Each part has a layout of its own, and runs on threads, or over tcp on
pretended hosts, where rings add in another order.  The reference is the same run in one part on one rank:

- with ``deterministic``, all losses, norms and files of the last checkpoint have the same bits;
- else losses, norms and weights are near, and ranks that hold the same weights have the same bits of them
  (``check_replicas``).
"""

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, example, given, reject, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from kos.errors import ConfigError, KosError
from kos.testing import Fault, spawn
from kos.train import checkpoint
from kos.train.config.options import TrainConfig
from kos.train.tools import read_metrics
from kos.train.trainer import Trainer
from tests.comm.ranks import on_hosts
from tests.comm.tcp_ranks import TCPRanks
from tests.train.layouts import small_buckets

HOW_MANY = 12
RTOL = 2e-3  # of float32, after a few steps at a small learning rate
MODEL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "rms_norm_eps": 0.05,
}  # fmt: skip
RUN: dict[str, Any] = {
    "batch_size": 4, "seq_len": 32, "lr": 1e-3, "warmup_steps": 2, "schedule": "constant", "eval_every": 2,
    "eval_batches": 1, "sample_tokens": 0, "save_every": 1, "keep": 2, "check_replicas": 1,
}  # fmt: skip
WHOLE = {
    "seed": st.integers(0, 2), "deterministic": st.booleans(), "optimizer": st.sampled_from(["adamw", "muon"]),
    "documents": st.sampled_from(["cross", "pack"]), "micro_batch_size": st.sampled_from([1, 2]),
}  # fmt: skip
"""Settings of a whole run, which may change its bits."""
PART = {
    "dp": st.sampled_from([1, 1, 2, 3, 4]), "tp": st.sampled_from([1, 1, 2]), "pp": st.sampled_from([1, 1, 2, 3]),
    "cp": st.sampled_from([1, 1, 2]), "zero": st.sampled_from([0, 1]),
    "pp_schedule": st.sampled_from(["1f1b", "zero-bubble-v"]), "recompute": st.sampled_from(["none", "norms", "block"]),
}  # fmt: skip
"""Settings of a part, which change no bit of a deterministic run."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "tied": {"tie_word_embeddings": True}, "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "num_key_value_heads": 4},
}  # fmt: skip


class Part(NamedTuple):
    """A part of a run: its settings, its number of steps, and on which hosts its ranks are; none: they are threads.

    ``lost``: a rank that ends before its all_to_all of that number, with ``--elastic``.  A deterministic step has two.
    """

    settings: dict[str, Any]
    steps: int
    hosts: tuple[int, ...] = ()
    lost: tuple[int, int] | None = None

    @property
    def ranks(self) -> int:
        return int(np.prod([self.settings.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")]))


@st.composite
def parts(draw: Any) -> Part:
    part = Part(draw(st.fixed_dictionaries(PART)), draw(st.integers(1, 2)))
    assume(part.ranks <= 4 or (part.ranks <= 8 and part.settings["tp"] == 1))
    kind = draw(st.sampled_from(["threads", "tcp", "lost"])) if part.ranks > 1 else "threads"
    if kind == "tcp":
        apart = [1] * part.ranks
        return part._replace(hosts=tuple(draw(st.sampled_from([apart, [part.ranks - 1, 1]]))))
    if kind == "lost":
        dp = draw(st.integers(2, 4))
        lost = draw(st.integers(0, dp - 1)), draw(st.integers(0, 2 * part.steps - 1))
        settings = {"dp": dp, "zero": part.settings["zero"], "elastic": "1"}
        return part._replace(settings=settings, lost=lost)
    return part


def config_of(text: Path, out: Path, whole: dict[str, Any], family: str, more: dict[str, Any]) -> TrainConfig:
    model = {**MODEL, **FAMILIES[family]}
    if family == "gpt2":
        model.pop("head_dim"), model.pop("rms_norm_eps")
    values = {**RUN, **whole, **more}
    return TrainConfig.from_preset("tiny", data=str(text), out=out, model=model, **values)


@contextlib.contextmanager
def small_parts() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        small_buckets(patch)
        yield patch


def train(config: TrainConfig, part: Part) -> None:
    """Rejects the example if the trainer refuses its settings."""

    def run(comm: Any) -> None:
        Trainer(config, comm).run()

    with small_parts() as patch:
        try:
            if part.hosts:
                on_hosts(patch, part.hosts)
                TCPRanks(part.ranks).run(run)
            else:
                faults = [] if part.lost is None else [Fault("crash", *part.lost, call="all_to_all")]
                spawn(run, part.ranks, timeout=200, faults=faults)
        except (AssertionError, KosError) as error:
            if isinstance(error, ConfigError) or isinstance(error.__cause__, ConfigError):
                reject()
            raise


class Result(NamedTuple):
    rows: np.ndarray
    validation: dict[int, float]
    """The losses of validations, which are also at the end of each part, by step."""
    tensors: dict[str, np.ndarray]
    """Those of the last checkpoint: weights by name, and the state of the optimizer by ``optimizer/`` and its name."""


def result_of(out: Path) -> Result:
    rows = read_metrics(out)
    folder = checkpoint.find(out).path
    tensors = dict[str, np.ndarray]()
    for file in sorted(folder.rglob("*.safetensors")):
        prefix = "optimizer/" if file.name.startswith("optimizer") else ""
        tensors |= {prefix + name: tensor for name, tensor in load_file(file).items()}
    losses = np.array([(row["loss"], row["grad_norm"]) for row in rows])
    return Result(losses, {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}, tensors)


@functools.cache
def alone(text: Path, family: str, steps: int, **whole: Any) -> Result:
    """The run in one part, on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        train(config_of(text, Path(folder) / "run", whole, family, {"steps": steps}), Part({}, steps))
        return result_of(Path(folder) / "run")


def near(got: Any, expected: Any, exact: bool, what: str) -> None:
    if exact:
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes(), what
    else:
        np.testing.assert_allclose(got, expected, rtol=RTOL, atol=RTOL, err_msg=what)


@settings(
    max_examples=HOW_MANY, deadline=None, derandomize=True, database=None,
    suppress_health_check=[*HealthCheck], phases=[Phase.explicit, Phase.generate, Phase.shrink],
)  # fmt: skip
@example(  # a ring of three adds in another order than threads: both ends of a tied matrix must stay equal
    {"seed": 0, "deterministic": False, "optimizer": "adamw", "documents": "cross", "micro_batch_size": 1}, "tied",
    [Part({"pp": 2, "dp": 3, "zero": 1}, 2, (1,) * 6), Part({"tp": 2, "pp": 2}, 1, (2, 2))],
)
@given(st.fixed_dictionaries(WHOLE), st.sampled_from([*FAMILIES]), st.lists(parts(), min_size=1, max_size=3))
def test_programs(text, whole, family, program):
    exact, done = whole["deterministic"], 0
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(program):
            done += part.steps
            part = part if exact else part._replace(lost=None)
            more = {**part.settings, "steps": done, **({"resume": "auto"} if number else {})}
            try:
                config = config_of(text, Path(folder) / "run", whole, family, more)
            except ConfigError:
                reject()
            train(config, part)
        got, expected = result_of(Path(folder) / "run"), alone(text, family, done, **whole)
    near(got.rows, expected.rows, exact, f"losses and norms of {program}")
    assert got.validation.keys() >= expected.validation.keys()
    for step, loss in expected.validation.items():
        near(got.validation[step], loss, exact, f"validation loss of step {step} of {program}")
    assert got.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        near(got.tensors[name], tensor, exact, f"{name} after {program}")
