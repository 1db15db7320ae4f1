"""--profile: costs by shape, what a trace holds, on the CPU and on the emulated device, streams of collectives."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from kos.comm.rendezvous.threads import ThreadGroup, ThreadRendezvous
from kos.memory.array import Array
from kos.testing import spawn
from kos.train import run as loop
from kos.train.config.options import TrainConfig
from kos.train.ops.cuda import attention
from kos.train.ops.cuda.adamw import CHUNK
from kos.train.ops.cuda.dialect import CudaOps
from kos.train.run import Trainer
from kos.train.tools import profile
from kos.train.tools.profile import Marks, Profiler, Span, cost, to_trace
from tests.comm.fake_nccl import Group, communicator, no_gpu
from tests.train.host_kernels import emulator
from tests.train.host_kernels.emulator import HostOps
from tests.train.host_kernels.engine import DeviceComm, host_engine, on_device
from tests.train.test_engine_on_host import SMALL

LOOKUPS = ("embedding", "embedding_backward")
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
    assert cost("attention", (qkv, heads, kv, out, lse, None))[1] == causal
    assert cost("attention_backward", (out, qkv, out, lse, heads, kv, qkv, None))[1] == 2.5 * causal
    others, parts = qkv[:, heads * d :], (slice(3, 7), slice(0, 5))
    flops = 2 * (2 * samples * heads * 4 * 5 * d)
    assert cost("attention_to", (qkv, others, heads, kv, *parts, out, lse, None))[1] == flops
    backward = (out, qkv, others, out, lse, heads, kv, *parts, qkv, others, None)
    assert cost("attention_to_backward", backward)[1] == 2.5 * flops
    assert cost("swiglu", (y, x, None)) == (4 * (30 + 24), 0)
    assert cost("swiglu_backward", (x, y, x, y, None)) == (4 * (24 + 2 * 30), 0)
    for rope in ("rope", "rope_backward"):  # the heads of q and k, two of three of width 2
        assert cost(rope, (np.zeros((6, 6), f32), (w, w), 2, 2, None)) == (2 * 4 * 6 * 4, 0)
    assert cost("cross_entropy_with_gradient", (y, losses, losses[:1], losses, None))[0] == 4 * (60 + 6 + 1 + 6)
    tokens, table, sums = np.zeros(6, np.int32), np.zeros((1000, 4), np.float16), np.zeros((1000, 4), f32)
    assert cost("embedding", (tokens, table, x), {6: 5}.get)[0] == 24 + 5 * 4 * 2 + x.nbytes
    assert cost("embedding_backward", (x, tokens, sums, True, None), {6: 5}.get)[0] == x.nbytes + 24 + 2 * 5 * 4 * 4
    assert cost("embedding_backward", (x, tokens, sums, False, None), {6: 5}.get)[0] == x.nbytes + 24 + sums.nbytes
    shard, gradients, copy = np.zeros(8, f32), np.zeros(32, f32), np.zeros(32, np.float16)
    state = ("adamw.cu", "adamw", 1, 256, shard, gradients, shard.copy(), shard.copy(), copy, losses, losses, 0.9)
    assert cost("adamw", state)[0] == 8 * (4 + 4 + 4 + 4 * 4 + 2)
    assert cost("adamw", (*state[:8], shard, *state[9:]))[0] == 8 * (4 + 4 + 4 + 4 * 4)
    flat = np.zeros(5 * CHUNK - 7, np.float16)
    for chunks, read in ((5, flat.nbytes), (2, 2 * 2 * CHUNK)):  # all of them, and one rank's
        assert cost("squares", ("adamw.cu", "squares", chunks, 256, flat, x, losses)) == (read, 0)


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


def test_on_the_cpu(tmp_path, capsys):
    table, spans = profiled(tmp_path, 2)
    for rank in range(2):
        found = count(spans, rank)
        assert {found[0, name] for name in LINEAR} == {2 * 2 * PRODUCTS}  # steps, micro-batches
        assert found[0, "attention"] == 2 * 2 * 2 and found[0, "optimizer"] == 2
        assert found[1, "all_reduce"] == 2
        assert found[1, "all_gather"] == 2  # what a step came to
    flops = {span["name"]: span["args"] for span in spans}["linear 16 x 58 x 24"]
    assert flops == {"bytes": 4 * (16 * 24 + 58 * 24 + 16 * 58), "flops": 2.0 * 16 * 58 * 24}
    width, (looked, added) = 24, ([s["args"]["bytes"] for s in spans if s["name"] == name] for name in LOOKUPS)
    letters = looked[0] / 4 - 16 * (1 + width)  # of the rows of at most 13
    assert letters % width == 0 and 1 < letters / width <= 13 and len(set(looked)) == 1
    assert min(added) == 4 * (16 * (1 + width) + 2 * letters)
    rows = {line.split()[0]: line.split() for line in table.splitlines()}
    assert rows["attention_backward"][1] == "4" and rows["limits:"][-1] == "TFLOP/s"
    step = float(next(line for line in table.splitlines() if line.startswith("a step")).split()[2].rstrip(","))
    alone = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["pid"] == s["tid"] == 0)
    assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(alone)), "operations of one thread overlap"
    assert 0 < sum(end - begin for begin, end in alone) / 2e3 <= 2.1 * step
    assert table in capsys.readouterr().out


def test_a_run_that_is_gone_on_from_stays_as_it_was(tmp_path):
    run = tmp_path / "run"
    values = {**SMALL, "data": str(tmp_path / "letters.txt"), "out": run, "steps": 3, "save_every": 2, "keep": 9}
    (tmp_path / "letters.txt").write_bytes(b"abc" * 700)
    spawn(lambda comm: Trainer(TrainConfig.from_preset("tiny", **values), comm).run(), 1, timeout=100)
    files = (path for path in run.rglob("*") if path.is_file() and path.name != ".lock")  # that is of a process
    before = {path: path.read_bytes() for path in files}
    values |= {"profile": 1, "steps": 9, "resume": str(run / "checkpoints" / "step-2")}
    spawn(lambda comm: Trainer(TrainConfig.from_preset("tiny", **values), comm).run(), 1, timeout=100)
    assert {path: path.read_bytes() for path in before} == before and (run / "profile.txt").exists()


def test_no_share_of_a_step_is_more_than_all():
    """Collectives that overlap, and an operation faster than what was measured as the limit."""
    spans = [Span("all_reduce", 1, begin, begin + 6.0, 8) for begin in (0.0, 2.0, 3.0)]
    spans += [Span("linear", 0, 0.0, 4.0, 10, 10.0), Span("linear", 0, 6.0, 10.0, 10, 10.0)]
    profiler = SimpleNamespace(bandwidth=1e6, arithmetic=1e6)
    table = [line.split() for line in Profiler.table(profiler, [5.0, 5.0], spans).splitlines()]
    shares = {row[0]: row[-4:] for row in table[1:3]}
    assert shares["all_reduce,"] == ["90.0%", "0.0", "-", "-"], table
    assert shares["linear"] == ["80.0%", "0.0", "0.000", "250%"], table
    assert table[3][:4] == ["a", "step", "0.005,", "20.0%"]


def watched(monkeypatch, ops):
    """A profiler whose marks are 0, 1, …, and ``ops`` as it lets the model see them."""
    emulator.host_memory(monkeypatch)
    profiler = object.__new__(Profiler)
    profiler.ops, profiler.spans, profiler.kernels, profiler.different = ops, [], None, int
    profiler.marks = SimpleNamespace(mark=itertools.count().__next__)
    profiler._watch_kernels(ops)
    return profiler, profile._Watched(profiler)


def zeros(*shape, dtype="float32"):
    array = Array.empty(shape, dtype, 0)
    array.fill_bytes(0)
    return array


def places(profiler, first=0):
    """Operations and kernels: of what, from which mark to which."""
    return [(span.name, span.of, span.begin, span.end) for span in profiler.spans[first:]]


def test_products(monkeypatch):
    """Each is an operation of its own, by rows, columns out and columns in."""
    profiler, ops = watched(monkeypatch, HostOps())
    x, weight, d_out = zeros(6, 4), zeros(5, 4), zeros(6, 5)
    ops.linear(x, weight, d_out)
    ops.linear_input_gradient(d_out, weight, x)
    ops.linear_weight_gradient(d_out, x, weight, True, ops.make_arena())
    assert places(profiler) == [(f"{name} 6 x 5 x 4", "", 2 * at, 2 * at + 1) for at, name in enumerate(LINEAR)]
    assert [(span.nbytes, span.flops) for span in profiler.spans] == [(4 * (24 + 20 + 30), 240.0)] * 3
    profiler.bandwidth, profiler.arithmetic = 1e9, 1e12
    table = [line.split() for line in profiler.table([6.0], profiler.spans).splitlines()]
    assert [(row[0], row[-5], row[-1]) for row in table[1:4]] == [(name, "0.001", "30%") for name in LINEAR]
    assert table[4][:4] == ["a", "step", "0.006,", "50.0%"]


def test_kernels_of_an_operation(monkeypatch):
    profiler, ops = watched(monkeypatch, HostOps())
    arena = ops.make_arena()
    ops.embedding_backward(zeros(6, 4), zeros(6, dtype="int32"), zeros(9, 4), False, arena)
    names = "zero", "digit_counts", "scan", "scatter", "sum_runs", "join_runs"
    parts = [(name, "embedding_backward", at, at + 1) for at, name in enumerate(names)]
    assert places(profiler) == [("embedding_backward", "", 0, 6), *parts]
    profiler.ops.zero(zeros(3))  # of no operation
    ops.rms_norm_backward(*(zeros(*shape) for shape in ((6, 4), (6, 4), (4,), (6,), (6, 4), (4,))), False, arena)
    assert [span.name for span in profiler.spans[7:]] == ["rms_norm_backward", "norm_backward", "sum_partials"]
    profiler.bandwidth = profiler.arithmetic = 1e9
    rows = {line.split()[0]: line.split() for line in profiler.table([9.0], profiler.spans).splitlines()}
    assert rows["scan"][-3:] == rows["sum_partials"][-3:] == ["-", "-", "-"] and rows["zero"][-1] == "14%"


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("hopper", ["attention_bounds", "attention_statistics", "attention_backward", "attention_finish"]),
        ("mma", ["attention_statistics", "attention_backward_kv", "attention_backward_q"]),
        ("simple", ["attention_backward_q", "attention_backward_kv"]),
    ],
)
def test_kernels_of_attention(monkeypatch, family, kernels):
    ops = CudaOps.__new__(CudaOps)
    ops.device, ops.stream, ops.launch, ops.matmul = 0, None, lambda *arguments, **options: None, None
    profiler, ops = watched(monkeypatch, ops)
    for name, fake in {"family_for": family, "_map": 0, "device_info": SimpleNamespace(multiprocessors=2)}.items():
        monkeypatch.setattr(attention, name, lambda *arguments, fake=fake: fake)
    qkv, out, lse = (
        zeros(*shape, dtype=t) for shape, t in (((9, 256), "bfloat16"), ((9, 128), "bfloat16"), ((1, 2, 9), "float32"))
    )
    ops.attention(qkv, 2, 1, out, lse, None)
    ops.attention_backward(out, qkv, out, lse, 2, 1, qkv, ops._ops.make_arena())
    assert [span.name for span in profiler.spans] == ["attention", "attention_backward", *kernels]


def test_kernels_end_within_their_operation():
    """In a trace: to the nanosecond, in which Perfetto counts."""
    marks = np.sort(np.random.default_rng(7).uniform(0, 1e6, 999)).tolist()
    spans = [Span("a", 0, marks[0], marks[-1]), *(Span("k", 0, *pair, of="a") for pair in itertools.pairwise(marks))]
    events = [e for e in to_trace([[s._asdict() for s in spans]])["traceEvents"] if e["ph"] == "X"]
    begins = [int(1000 * e["ts"]) for e in events]
    ends = [begin + int(1000 * e["dur"]) for begin, e in zip(begins, events, strict=True)]
    assert all(end <= begin for end, begin in zip(ends[1:], begins[2:], strict=False)), "kernels overlap"
    assert begins[0] == begins[1] and ends[-1] == ends[0] and events[0]["name"] == "a", "an operation comes first"


@pytest.mark.parametrize("graph", [True, False])
def test_on_the_emulated_device(tmp_path, monkeypatch, graph):
    """Events are recorded when the device comes to them: of a captured step, at each replay."""
    host_engine(monkeypatch)
    monkeypatch.setattr(loop, "choose_device", lambda asked, comm: asked)
    clock = itertools.count()

    def mark(self, stream=None):
        event = SimpleNamespace(at=None)
        on_device(lambda: setattr(event, "at", next(clock)))
        return event

    monkeypatch.setattr(Marks, "mark", mark)
    monkeypatch.setattr(Marks, "microseconds", lambda self, begin, end: float(end.at - begin.at))
    monkeypatch.setattr(profile, "device_info", lambda device: SimpleNamespace(name="host"))
    monkeypatch.setattr(profile.streams, "handle", lambda stream: 7)
    monkeypatch.setattr(profile, "COPIED", 1 << 20)
    monkeypatch.setattr(profile, "ROWS", 64)
    table, spans = profiled(tmp_path, 1, DeviceComm, device="cuda", graph=graph)
    found = count(spans)
    assert {found[0, name] for name in LINEAR} == {2 * 4 * PRODUCTS}
    assert found[0, "adamw"] == found[0, "prepare"] == found[0, "squares"] == 2
    assert {span["dur"] for span in spans} == {1.0}  # nothing is marked in between
    begins = [span["ts"] for span in spans]
    assert begins == sorted(begins) and len(set(begins)) == len(begins), "the second step has the first's marks"
    assert "adamw" in table


def test_collectives_are_marked_on_the_stream_that_they_run_on(monkeypatch):
    def run(control):
        comm = communicator(ThreadRendezvous(threads, control.rank, 20.0), group)
        profiler = object.__new__(Profiler)
        profiler.spans, marked = [], []
        profiler.marks = SimpleNamespace(mark=marked.append)
        profiler._watch(comm.backend)
        x = Array.from_numpy(np.arange(8, dtype=np.float32), 0)
        comm.all_reduce(x)
        own = list(marked)
        comm.all_gather(x[4 * comm.rank :][:4], x, async_op=True).wait()
        beside = marked[len(own) :]
        comm.close()
        facts = [(span.name, span.lane, span.nbytes) for span in profiler.spans]
        return own, beside, facts, x.numpy()[:4].tolist()

    with no_gpu(monkeypatch):
        threads, group = ThreadGroup(2), Group(2)
        for own, beside, facts, values in spawn(run, 2):
            assert len(own) == len(beside) == 2 and len(set(own)) == len(set(beside)) == 1 and own[0] != beside[0]
            assert facts == [("all_reduce", 1, 32), ("all_gather", 1, 32)] and values == [0.0, 2.0, 4.0, 6.0]
