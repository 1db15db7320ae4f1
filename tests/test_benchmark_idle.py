"""``benchmarks.idle``: a pipeline whose idle time is known, on the CPU and in a graph of the emulated GPU."""

from __future__ import annotations

import itertools
import shlex
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import kos
from benchmarks import idle, train
from kos.comm import Communicator
from kos.testing import spawn
from tests.train.host_kernels.engine import DeviceComm, host_engine, on_device

FLAGS = shlex.split("""
--seq-len 8 --batch-size 4 --micro-batch-size 1 --hidden-size 16 --intermediate-size 16 --num-hidden-layers 3 --pp 2
--num-attention-heads 2 --num-key-value-heads 2 --vocab-size 64 --dtype float32 --ranks 2 --device cpu --idle
""")


def facts(monkeypatch: pytest.MonkeyPatch, device: str, prepare: Callable[[Any], None], *flags: str) -> dict[str, Any]:
    """The results of the third step of two ranks.  ``prepare`` gets each device before it records timestamps."""
    options, config = train.read_arguments([*FLAGS, *flags])
    assert options.idle
    config = config.for_world(1, device)

    own = threading.local()
    monkeypatch.setattr(kos, "init", lambda *_, **__: own.comm)

    def run(comm: Communicator) -> dict[str, Any]:
        own.comm = DeviceComm(comm) if device == "cuda" else comm
        model = train.model_of(config)
        training = train.KosTraining(config, model, train.random_tokens(config, model), 1)
        prepare(training.device)
        stamps = idle.Stamps(training.device)
        training.run(0, 3)
        found = stamps.facts()
        training.device.close()
        return found

    first, second = spawn(run, 2)
    assert first == second
    return first


def test_a_rank_waits_for_a_slow_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def slow_down(device: Any) -> None:
        act = device.step.act

        def slow(*arguments: Any) -> None:
            time.sleep(0.02)
            act(*arguments)

        device.step.act = slow if device.mesh.pp.rank == 1 else act

    found = facts(monkeypatch, "cpu", slow_down)
    quick, slow = found["ranks"]
    assert set(slow["passes_ms"]) == {"F0", "B0"} and min(slow["passes_ms"].values()) >= 20
    assert slow["computes_ms"] >= 8 * 20 and slow["idle"] < 0.3
    assert quick["idle"] > 0.5 and found["simulated_idle"][0] > 0.5
    assert found["idle"] == pytest.approx((quick["idle"] + slow["idle"]) / 2)
    idle.print_facts(found)
    assert f"rank 0  {quick['layers'][0]:>10}" in capsys.readouterr().out


def test_stamps_are_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock ticks once per timestamp, so each pass takes a tick, and so does each gap between two passes."""
    host_engine(monkeypatch)

    class Ticks:
        def __init__(self, stream: Any) -> None:
            self.ticks = itertools.count()

        def mark(self) -> Any:
            event = SimpleNamespace()
            on_device(lambda: setattr(event, "tick", next(self.ticks)))
            return event

        def microseconds(self, begin: Any, end: Any) -> float:
            return 1e3 * (end.tick - begin.tick)

    monkeypatch.setattr(idle, "Marks", Ticks)
    found = facts(monkeypatch, "cuda", lambda device: None, "--pp-schedule", "zero-bubble-v")
    for rank in found["ranks"]:
        assert rank["passes_ms"] == dict.fromkeys(("F0", "F1", "I0", "I1", "W0", "W1"), 1.0)
        spans = 3 * 2 * 4 + 2  # and norm and update
        assert (rank["computes_ms"], rank["step_ms"]) == (spans, 2 * spans + 1)
    assert [rank["layers"] for rank in found["ranks"]] == [[1, 0], [1, 1]]
