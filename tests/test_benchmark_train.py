"""The benchmark of training: the same losses from kos and torch, what it writes, what a failure costs."""

import importlib.util
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import train
from kos.errors import ConfigError
from tests.forked import python
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program

# Not imported here: every worker that collects this file would pay for it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch to compare with")
ROOT = Path(__file__).resolve().parents[1]
SMALL = shlex.split(
    "--seq-len 24 --per-rank 4 --micro-batch-size 2 --hidden-size 32 --intermediate-size 48 --num-hidden-layers 2 "
    "--num-attention-heads 4 --num-key-value-heads 2 --vocab-size 512 --no-tie-word-embeddings --warmup-steps 0 "
    "--steps 3 --repeats 1 --limit 100 --device cpu"
)
HEADER = ["hardware", "driver", "versions", "date", "commit", "command", "skipped", "rows"]


@needs_mpirun
@pytest.mark.parametrize(("layout", "flags"), [("dp2", ""), ("tp2", "--tp 2 --tie-word-embeddings --grad-clip 0.05")])
def test_two_ranks_beside_torch(layout, flags, tmp_path):
    """Micro-batches and grouped queries: DDP with an untied head; tensor parallelism with a tied one and clipping."""
    file = tmp_path / "rows.json"
    arguments = [*SMALL, *flags.split(), "--compare", "torch", "--torch", "eager", "--json", str(file)]
    done = run_program(MPIRUN, "-n", "2", *python(), "-m", "benchmarks.train", *arguments, env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert list(result) == HEADER
    assert result["command"].startswith("mpirun -n 2 python -m benchmarks.train --seq-len 24")
    assert result["skipped"] == {}
    ours, theirs = result["rows"]
    for row, name in ((ours, "kos"), (theirs, "torch")):
        assert tuple(row) == train.ROW_KEYS and row["implementation"] == name
        assert (row["batch_size"], row["seq_len"], row["ranks"]) == (4 if layout == "dp2" else 8, 24, 2)
        assert row["layout"] == layout
        assert row["tokens_per_second"] == pytest.approx(2 * 4 * 24 / row["step_ms"] * 1e3, rel=1e-4)
        assert row["peak_memory_bytes"] > 1e7 and 0 < row["first_step_seconds"] < 100
        assert 5 < row["loss"] < 7 and len(row["measurements"]) == 1
    assert 0 < theirs["loss_difference"] < 2e-6


def test_an_error_of_the_ranks_is_raised(tmp_path):
    options, _ = train.read_arguments([*SMALL, "--compare", "torch", "--torch", "eager"])
    kos = train.Group("kos", options, ["--preset", "nonsense"], tmp_path)
    with pytest.raises(ConfigError, match="^--preset: expected one of .* got 'nonsense'$"):
        kos.warm_up()
    kos.end()
    assert kos.lost


def test_what_fails_loses_its_row_only(tmp_path):
    """A program of torch fails in its first step, and kos in its second measurement; the results before it are kept."""
    options, _ = train.read_arguments([*SMALL, "--compare", "torch", "--torch", "eager-whole,eager", "--repeats", "2"])
    calls, kept = [], []

    class Stub:
        def __init__(self, name, *_):
            self.name, self.seconds, self.lost = name, list[float](), False

        def warm_up(self):
            if self.name == "eager":
                raise train.Lost("out of memory")

        def measure(self):
            if self.name == "kos" and self.seconds:
                self.lost = True
                raise train.Lost("rank 5 ended")
            self.seconds.append(1.0)

        def end(self):
            calls.append(f"{self.name} ends")

    train.measure(options, [], tmp_path, make_group=Stub, keep=lambda groups, skipped: kept.append(
        ([group.name for group in groups], {**skipped})
    ))  # fmt: skip
    assert kept[-1] == (["kos", "eager-whole"], {"eager": "out of memory", "kos": "rank 5 ended"})
    assert sorted(calls) == ["eager ends", "eager-whole ends", "kos ends"]


def test_rows_are_added_to_those_of_the_same_commit(tmp_path):
    file = tmp_path / "rows.json"
    header = {"hardware": "a", "driver": None, "versions": {}, "date": "", "commit": "c", "command": "x"}
    train.write(file, header, train.read_before(file, header), [{"step_ms": 1.0}], {})
    before = train.read_before(file, header | {"date": "later"})
    for rows in ([], [{"step_ms": 2.0}]):  # as they come in
        train.write(file, header | {"command": "y"}, before, rows, {"flash": "why"})
    assert json.loads(file.read_text()) == {
        **header, "command": "x && y", "skipped": {"flash": "why"}, "rows": [{"step_ms": 1.0}, {"step_ms": 2.0}],
    }  # fmt: skip
    with pytest.raises(ConfigError, match="expected results of commit d, got c"):
        train.read_before(file, header | {"commit": "d"})
    for other in ("no JSON", "[1]", "3", '{"rows": 3}', '["rows"]'):
        file.write_text(other)
        with pytest.raises(ConfigError, match=r"^--json .*rows.json: expected results of a benchmark, got "):
            train.read_before(file, header)
        assert file.read_text() == other
    with pytest.raises(ConfigError, match="got none of rows$"):  # a list of that word
        train.report.read(file, "rows")


def group(name: str, losses: list[float]) -> Any:
    facts = {"first_step_seconds": 1.0, "peak_memory_bytes": 1, "layout": "dp2"}
    return SimpleNamespace(name=name, losses=losses, seconds=[0.25, 0.5, 1.0], facts=facts)


NAN, BOTH = float("nan"), "--ranks 2 --compare"
PICOTRON_FLAGS = f"{BOTH} picotron --picotron clone --device cuda --dtype"


@pytest.mark.parametrize(
    ("flags", "losses", "code"),
    [
        (f"{BOTH} torch", [5.0, 4.0], 0), (f"{BOTH} torch", [5.0, 4.1], 1), (f"{BOTH} torch", [NAN, 4.0], 1),
        (f"{BOTH} torch", [5.0, NAN], 1), (f"{BOTH} torch", [], 1),
        (f"{BOTH} torch --device cuda --dtype bfloat16", [5.0, 4.1], 1),
        (f"{PICOTRON_FLAGS} bfloat16", [5.01, 4.1], 0), (f"{PICOTRON_FLAGS} bfloat16", [5.1, 4.0], 1),
        (f"{PICOTRON_FLAGS} bfloat16", [5.0, NAN], 1),
        (f"{PICOTRON_FLAGS} float32", [5.01, 4.0], 0), (f"{PICOTRON_FLAGS} float32", [5.0, 4.1], 1),
    ],
)  # fmt: skip
def test_losses_that_differ_are_an_exit_code(flags, losses, code, capsys):
    """Of picotron in bfloat16 those of the first step; later ones must be finite. Those of kos are 5 and 4."""
    groups = [group("kos", [5.0, 4.0]), *[group("flash", losses)] * bool(losses)]  # none: nothing of it came through
    skipped = {} if losses else {"eager": "why"}
    assert train.conclude(groups, skipped, *train.read_arguments([*SMALL, *flags.split()])) == code
    shown = capsys.readouterr().out
    assert "kos is x" in shown and "4 x 24 tokens a rank, 2 ranks\n" in shown
    assert ("compared at the first step only" in shown) == ("picotron clone --device cuda --dtype bfloat16" in flags)


def test_rows_of_groups(capsys):
    arguments = train.read_arguments([*SMALL, "--ranks", "2", "--compare", "torch"])
    groups = [group("kos", [5.0, 4.0, 3.0]), group("eager", [5.0, 4.2])]
    rows = train.make_rows(groups, *arguments)
    assert [(row["step_ms"], row["tokens_per_second"]) for row in rows] == [(500.0, 384.0)] * 2
    assert [(row["loss"], row["loss_difference"]) for row in rows] == [(4.0, 0.0), (4.2, 0.05)], "not of the same step"
    train.print_rows([{**rows[0], "ranks": 1}], {})
    assert "4 x 24 tokens a rank, 1 rank\n" in capsys.readouterr().out
    flags = shlex.split("--compare torch --ranks 2 --device cuda --grad-dtype bfloat16 --micro-batch-size")
    for micro_batch_size, variant in (("2", "bfloat16"), ("4", "bfloat16-grads")):  # several add up in fp32
        rows = train.make_rows(groups, *train.read_arguments([*SMALL, *flags, micro_batch_size]))
        assert [row["variant"] for row in rows] == [variant, "eager"]


@pytest.mark.parametrize(("before", "peak"), [(90, 120), (130, 130), (None, None)], ids=["step", "search", "cpu"])
def test_memory_that_ranks_reach_into_counts_too(before, peak, monkeypatch):
    """The search for algorithms takes memory before, which the step uses again. On CPUs none is counted."""
    pool = SimpleNamespace(reset_peak=lambda: before, statistics=lambda: SimpleNamespace(peak=100))
    device = SimpleNamespace(reachable_bytes=20, draw_weights=lambda: None)
    if before is not None:
        device.ops = SimpleNamespace(device=0)
    for name, result in (("train.device.choose.make_device", device), ("memory.pool.pool_of", pool)):
        monkeypatch.setattr(f"kos.{name}", lambda *_, result=result: result)
    monkeypatch.setattr("kos.train.machine.limit_threads", lambda *_: None)
    _, config = train.read_arguments(SMALL)
    training = train.KosTraining(SimpleNamespace(rank=0, size=1), config, train.model_of(config), None, 1)
    assert training.peak_memory() == peak
