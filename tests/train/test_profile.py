"""--profile: costs by shape, what a trace holds, on the CPU and on the emulated device, streams of collectives."""

import itertools
import json
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from kos.testing import spawn
from kos.train.config.options import TrainConfig
from kos.train.device.costs import cost
from kos.train.ops import Attend
from kos.train.ops import numpy as numpy_ops
from kos.train.optim import CHUNK
from kos.train.tools import profile
from kos.train.tools.profile import Marks, Span
from kos.train.trainer import Trainer
from tests.train.emulated_runs import SMALL
from tests.train.host_kernels.communicator import DeviceComm
from tests.train.host_kernels.engine import captured, on_device
from tests.train.runs import run

LINEAR = ("linear", "linear_input_gradient", "linear_weight_gradient")
PRODUCTS = 4 * 2 + 1  # of the two layers of SMALL, and the head


def test_costs_follow_from_shapes():
    f32 = np.float32
    x, w, y, losses = np.zeros((6, 4), f32), np.zeros((5, 4), f32), np.zeros((6, 5), f32), np.zeros(6, f32)
    assert cost("linear", (x, w, y, None)) == (4 * (24 + 20 + 30), 2 * 6 * 5 * 4)
    assert cost("linear_input_gradient", (y, w, x)) == (4 * (30 + 20 + 24), 2 * 6 * 5 * 4)
    assert cost("linear_weight_gradient", (y, x, w, False, None)) == (4 * (30 + 24 + 20), 2 * 6 * 5 * 4)
    heads, kv, d, samples, length = 4, 2, 3, 2, 7
    qkv, out = np.zeros((14, (heads + 2 * kv) * d), f32), np.zeros((14, heads * d), f32)
    lse = np.zeros((samples, heads, length), f32)
    causal = 2 * (2 * samples * heads * length * length * d) / 2  # two products, half of each
    attend = Attend(qkv, heads, kv, out, lse)
    assert cost("attention", (attend, None)) == (qkv.nbytes + out.nbytes + lse.nbytes, causal)
    moved = 2 * qkv.nbytes + 2 * out.nbytes + lse.nbytes
    assert cost("attention_backward", (attend, out, qkv, None)) == (moved, 2.5 * causal)
    others, parts = qkv[:, heads * d :], (slice(3, 7), slice(0, 5))
    flops = 2 * (2 * samples * heads * 4 * 5 * d)
    to_others = attend.to(others, *parts)
    assert cost("attention", (to_others, None)) == (qkv.nbytes + out.nbytes + lse.nbytes + others.nbytes, flops)
    moved += 2 * others.nbytes
    assert cost("attention_backward", (to_others, out, qkv, None, others)) == (moved, 2.5 * flops)
    assert cost("swiglu", (y, x, None)) == (4 * (30 + 24), 0)
    assert cost("swiglu_backward", (x, y, x, y, None)) == (4 * (24 + 2 * 30), 0)
    for rope in ("rope", "rope_backward"):  # the heads of q and k, two of three of width 2
        assert cost(rope, (np.zeros((6, 6), f32), (w, w), 2, 2, None)) == (2 * 4 * 6 * 4, 0)
    assert cost("cross_entropy", (y, losses, losses[:1], losses, None))[0] == 4 * (60 + 6 + 1 + 6)
    tokens, table, sums = np.zeros(6, np.int32), np.zeros((1000, 4), np.float16), np.zeros((1000, 4), f32)
    assert cost("embedding", (tokens, table, x))[0] == 24 + 6 * 4 * 2 + x.nbytes
    assert cost("embedding_backward", (x, tokens, sums, True, None))[0] == x.nbytes + 24 + 2 * 6 * 4 * 4
    assert cost("embedding", (np.zeros(2000, np.int32), table, x))[0] == 8000 + table.nbytes + x.nbytes
    assert cost("embedding_backward", (x, tokens, sums, False, None))[0] == x.nbytes + 24 + sums.nbytes
    flat = np.zeros(5 * CHUNK - 7, np.float16)
    for chunks, read in ((5, flat.nbytes), (2, 2 * 2 * CHUNK)):  # all of them, and one rank's
        assert cost("squares", ("optimizer.cu", "squares", chunks, 256, flat, x, losses)) == (read, 0)


def profiled(tmp_path, ranks, wrap=lambda comm: comm, **changes):
    """The table of rank 0 and, by rank, lane and name, the events of a profile of two steps."""
    data = tmp_path / "letters.txt"
    data.write_bytes(np.random.default_rng(7).integers(97, 110, 2000, np.uint8).tobytes())
    values = {**SMALL, "data": str(data), "out": tmp_path / "run", "profile": 2, **changes}
    spawn(lambda comm: Trainer(TrainConfig.from_preset("tiny", **values), wrap(comm)).run(), ranks, timeout=100)
    assert not (tmp_path / "run" / "checkpoints").exists()
    events = json.loads((tmp_path / "run" / "profile.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    names = {(e["pid"], e.get("tid"), e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names >= {(ranks - 1, None, f"rank {ranks - 1}"), (0, 0, "compute"), (0, 1, "communication")}
    return (tmp_path / "run" / "profile.txt").read_text(), spans


def count(spans, rank=0):
    return Counter((span["tid"], span["name"].split()[0]) for span in spans if span["pid"] == rank)


def test_on_the_cpu(tmp_path, capsys, before_call):
    before_call(numpy_ops, "swiglu", lambda *_, **__: time.sleep(0.002))
    table, spans = profiled(tmp_path, 2)
    assert all(span["dur"] >= 2e3 for span in spans if span["name"] == "swiglu")
    assert {span["name"] for span in spans} >= {f"{name} 16 x 58 x 24" for name in LINEAR}
    for rank in range(2):
        found = count(spans, rank)
        assert {found[0, name] for name in LINEAR} == {2 * 2 * PRODUCTS}  # steps, micro-batches
        assert found[0, "attention"] == 2 * 2 * 2 and found[0, "optimizer,"] == 2 * 4
        assert found[1, "all_reduce"] == 2
        assert found[1, "all_gather"] == 2  # what a step came to
    flops = {span["name"]: span["args"] for span in spans}["linear 16 x 58 x 24"]
    assert flops == {"bytes": 4 * (16 * 24 + 58 * 24 + 16 * 58), "flops": 2.0 * 16 * 58 * 24}
    rows = {line.split()[0]: line.split() for line in table.splitlines()}
    assert rows["attention_backward"][1] == "4"
    step = float(next(line for line in table.splitlines() if line.startswith("a step")).split()[2].rstrip(","))
    alone = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["pid"] == s["tid"] == 0)
    assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(alone)), "operations of one thread overlap"
    assert 0 < sum(end - begin for begin, end in alone) / 2e3 <= 2.1 * step
    assert table in capsys.readouterr().out


@pytest.mark.parametrize("axis", ["dp", "tp", "cp"])
def test_attention_flops_in_a_window_follow_from_those_of_mfu(tmp_path, axis):
    """The backward has five matrix products, of which MFU counts four."""
    shape = {**SMALL["model"], "intermediate_size": 30, "model_type": "mistral"}
    full, window = ({"model": {**shape, "sliding_window": size}} for size in (None, 3))
    spans = profiled(tmp_path, 2, **window, **{axis: 2})[1]
    flops = sum(s["args"]["flops"] for s in spans if s["name"].startswith("attention")) / 2  # of a step
    of_full, of_window = (
        TrainConfig.from_preset("tiny", **{**SMALL, **each}).model_config_for(256).flops_per_token(8)
        for each in (full, window)
    )
    attention = of_window.causal - (2 * of_full.causal - of_full.noncausal)
    assert flops == pytest.approx(8 * 8 * attention * 3.5 / 3)


def test_compressed_gradients(tmp_path):
    """Bytes are those that are sent."""

    def spans(compress):
        (folder := tmp_path / compress).mkdir()
        return profiled(folder, 2, compress=compress)[1]

    whole, few = spans("none"), spans("int8")

    def nbytes(spans, name):
        return sum(span["args"]["bytes"] for span in spans if span["pid"] == 0 and span["name"] == name)

    assert nbytes(few, "all_reduce") == pytest.approx(66 / 256 * nbytes(whole, "all_reduce"), rel=0.01)


def test_a_run_that_is_gone_on_from_stays_as_it_was(tmp_path):
    out = tmp_path / "run"
    values = {**SMALL, "data": str(tmp_path / "letters.txt"), "out": out, "steps": 3, "save_every": 2, "keep": 9}
    (tmp_path / "letters.txt").write_bytes(b"abc" * 700)
    run(TrainConfig.from_preset("tiny", **values))
    files = (path for path in out.rglob("*") if path.is_file() and path.name != ".lock")  # that is of a process
    before = {path: path.read_bytes() for path in files}
    values |= {"profile": 1, "steps": 9, "resume": str(out / "checkpoints" / "step-2")}
    run(TrainConfig.from_preset("tiny", **values))
    assert {path: path.read_bytes() for path in before} == before and (out / "profile.txt").exists()


def test_no_share_of_a_step_is_more_than_all():
    """Collectives overlap one another."""
    spans = [Span("all_reduce", "communication", begin, begin + 6.0, 8) for begin in (0.0, 2.0, 3.0)]
    spans += [Span("linear", "compute", 0.0, 4.0, 10, 10.0), Span("linear", "compute", 6.0, 10.0, 10, 10.0)]
    table = [line.split() for line in profile.table([5.0, 5.0], spans).splitlines()]
    shares = {row[0]: row[-3:] for row in table[1:3]}
    assert shares["all_reduce,"] == ["90.0%", "0.0", "-"], table
    assert shares["linear"] == ["80.0%", "0.0", "0.000"], table
    assert table[3][:4] == ["a", "step", "0.005,", "20.0%"]


@pytest.mark.parametrize(("graph", "ranks"), [(True, 1), (False, 1), (True, 2)])
def test_on_the_emulated_device(emulated, tmp_path, monkeypatch, graph, ranks):
    """Events are recorded when the device comes to them: of a captured step, at each replay."""
    clock = itertools.count()

    def mark(self):
        event = SimpleNamespace(at=None)
        on_device(lambda: setattr(event, "at", next(clock)))
        return event

    of_marks = {
        "mark": mark, "captured": lambda self: captured(),
        "microseconds": lambda self, begin, end: float(end.at - begin.at),
    }  # fmt: skip
    for owner, name, fake in [*((Marks, *each) for each in of_marks.items()), (profile.streams, "handle", lambda s: 7)]:
        monkeypatch.setattr(owner, name, fake)
    table, spans = profiled(tmp_path, ranks, DeviceComm, device="cuda", graph=graph)
    found = count(spans)
    assert {found[0, name] for name in LINEAR} == {2 * 4 * PRODUCTS // ranks}
    of_optimizer = {span["name"] for span in spans if span["pid"] == 0 and span["name"].startswith(profile.OPTIMIZER)}
    names = ["squares", "finish_norm", "prepare", "update"]
    assert of_optimizer == {f"optimizer, {name}" for name in names}
    assert found[0, "optimizer,"] == 2 * len(names)
    assert (found[1, "all_reduce"], found[1, "all_gather"]) == ((0, 0) if ranks == 1 else (2 * 5, 2))  # of 5 buckets
    if ranks > 1:
        return  # whose marks share the clock
    assert {span["dur"] for span in spans} == {1.0}  # nothing is marked in between
    begins = [span["ts"] for span in spans]
    assert begins == sorted(begins) and len(set(begins)) == len(begins), "the second step has the first's marks"
    assert "optimizer, update" in table
