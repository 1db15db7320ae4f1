"""The benchmark of collectives: its arithmetic, that it sees wrong results, what it writes."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest

from benchmarks import compare
from benchmarks.collectives import __main__ as command
from benchmarks.collectives import report
from benchmarks.collectives.cases import (
    IN_PLACE,
    OPERATIONS,
    PERIOD,
    STRIDE,
    Case,
    Data,
    bandwidths,
    busbw_factor,
    parse_sizes,
    uneven,
)
from benchmarks.collectives.implementations import Ours
from benchmarks.collectives.limits import DeviceLimits
from benchmarks.collectives.measure import DeviceTimer, HostTimer, Job, Run, measure
from benchmarks.collectives.memory import DeviceMemory, HostMemory, Space
from benchmarks.collectives.peers_gpu import RawNCCL
from kos import cuda
from kos.comm import Communicator
from kos.comm.rendezvous.threads import ThreadGroup, ThreadRendezvous
from kos.cuda import driver, kernels
from kos.cuda.kernels import KernelCache, compile_kernels
from kos.errors import BackendUnavailable, InvalidArgument
from kos.testing import spawn
from tests.comm.fake_nccl import Group, at, communicator, no_gpu
from tests.forked import python
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program

ROOT = Path(__file__).resolve().parents[1]
PLACES = [(op, False) for op in OPERATIONS] + [(op, True) for op in IN_PLACE]


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 2 * 7 / 8), ("reduce_scatter", 7 / 8), ("all_gather", 7 / 8), ("all_to_all", 7 / 8),
        ("gather", 7 / 8), ("scatter", 7 / 8), ("broadcast", 1.0), ("reduce", 1.0), ("send_recv", 1.0),
        ("all_gather_v", 15 / 16), ("all_to_all_v", 15 / 16), ("scan", 1.0), ("exscan", 1.0),
    ],
)  # fmt: skip
def test_bus_bandwidth_is_that_of_nccl_tests(op: str, factor: float) -> None:
    assert busbw_factor(op, 8) == factor
    assert bandwidths(factor, 10**9, 1e6) == (1.0, factor)  # 1 GB in a second


def test_sizes() -> None:
    assert parse_sizes("1K:64K:x4") == [1024, 4096, 16384, 65536]
    assert parse_sizes("512,1M,1G") == [512, 2**20, 2**30]
    for wrong in ("", "1K:2K", "0", "1T", "4:8:2", "4K:1K:x2", "4:8:x1", "-1", "1.5K"):
        with pytest.raises(ValueError, match="expected"):
            parse_sizes(wrong)


def test_counts_are_those_of_nccl_tests() -> None:
    case = Case.of("all_gather", 100, "float32", "sum", 8, False)
    assert (case.count, case.nbytes, case.sends(7), case.receives(7), case.redop) == (24, 96, 3, 24, "none")
    case = Case.of("reduce_scatter", 100, "bfloat16", "sum", 8, False)
    assert (case.count, case.nbytes, case.sends(0), case.receives(0), case.redop) == (48, 96, 48, 6, "sum")
    with pytest.raises(InvalidArgument, match="for each of 8 ranks, got 16 bytes"):
        Case.of("all_to_all", 16, "float32", "sum", 8, False)


def test_uneven_parts() -> None:
    assert uneven(24, 4) == [3, 9, 3, 9] and uneven(15, 3) == [3, 7, 5] and uneven(5, 1) == [5]
    assert uneven(6, 2) == [2, 4], "half of three is one"
    for ranks in (1, 2, 3, 5, 8):
        case = Case.of("all_to_all_v", 8 * 7 * ranks, "float64", "sum", ranks, False)
        for rank in range(ranks):
            assert [sum(counts) for counts in case.counts(rank)] == [case.count] * 2
            assert sorted(case.counts(rank)[0]) == sorted(case.parts)


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_go_once_to_each_rank_of_their_experts(ranks: int) -> None:
    case = Case.of("routing", 8192 * 7168 * 2, "bfloat16", "sum", ranks, False)
    assert case.nbytes == 8192 * 7168 * 2 and case.function == "all_to_all_v"
    held = 64 // ranks
    missed = np.prod([(64 - held - i) / (64 - i) for i in range(8)])  # none of the eight is among a rank's experts
    tokens = np.array(case.pieces) / 7168
    assert tokens == pytest.approx(8192 * (1 - missed), rel=0.02) and len(np.unique(tokens)) > 1
    assert case.busbw_factor == pytest.approx((ranks - 1) * (1 - missed), rel=0.02)
    assert [case.sends(0), case.receives(0)] == [tokens[0].sum() * 7168, tokens[:, 0].sum() * 7168]
    with pytest.raises(InvalidArgument, match="routing: expected at least a token of 7168 bfloat16, got 1024 bytes"):
        Case.of("routing", 1024, "bfloat16", "sum", ranks, False)


def collective(op: str, redop: str, inputs: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any] | None]:
    """What each rank must get, in float64: the definition of the operation, written down once more."""
    n, x = len(inputs), [np.asarray(i, np.float64) for i in inputs]
    functions: dict[str, Any] = {"sum": np.sum, "avg": np.mean, "prod": np.prod, "min": np.min, "max": np.max}
    reduced: Any = functions[redop](x, axis=0) if "reduce" in op else None
    if op == "all_reduce":
        return [reduced] * n
    if op in ("scan", "exscan"):
        prefixes = [collective("all_reduce", redop, inputs[: r + 1])[0] for r in range(n)]
        return prefixes if op == "scan" else [None, *prefixes[:-1]]
    if op == "reduce":
        return [reduced] + [None] * (n - 1)
    if op == "broadcast":
        return [x[0]] * n
    if op == "send_recv":
        return [x[-1], *x[:-1]]
    eighths = [1, 3, 1, 3] if op.endswith("_v") else [2] * 4
    op = op.removesuffix("_v")

    def split(whole: np.ndarray[Any, Any], by: int = 0) -> list[np.ndarray[Any, Any]]:
        sizes = np.roll(eighths, by) * whole.size // 8
        return np.split(whole, np.cumsum(sizes)[:-1])

    if op == "reduce_scatter":
        return split(reduced)
    if op == "scatter":
        return split(x[0])
    if op == "all_to_all":  # a rank's own piece is the smallest, the next thrice that
        pieces = [split(i, rank) for rank, i in enumerate(x)]
        return [np.concatenate([row[rank] for row in pieces]) for rank in range(n)]
    return [np.concatenate(x)] * n if op == "all_gather" else [np.concatenate(x)] + [None] * (n - 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("op", "in_place"), PLACES)
def test_expected_outputs(op: str, in_place: bool, dtype: str) -> None:
    """The right outputs pass the check in every iteration; each wrong element is counted."""
    ranks, seed = 4, int(np.random.SeedSequence().entropy or 0) % 2**32
    print("seed", seed)
    for redop in ("sum", "avg", "max", "min", "prod") if "reduce" in op else ("sum",):
        if redop == "avg" and dtype == "int8":
            continue
        nbytes = (PERIOD + 5000) * np.dtype(Case.of(op, 64, dtype, redop, 4, False).dtype.numpy).itemsize
        case = Case.of(op, nbytes, dtype, redop, ranks, in_place)
        memory = HostMemory()
        spaces = [Space(case, Data(case, r, seed), memory, memory.empty, 2) for r in range(ranks)]
        for iteration in (0, PERIOD // STRIDE + 1):
            for space in spaces:
                space.fill(1, iteration)
            results = collective(op, redop, [space.slots[1].send for space in spaces])
            for space, result in zip(spaces, results, strict=True):
                space.check(1, iteration)
                untouched = space.wrong()
                if result is None:
                    continue
                recv = space.slots[1].recv
                assert in_place or (recv.view(np.uint8) == 255).all(), "an output was not poisoned"
                if not in_place or op not in ("broadcast", "scan") or space is not spaces[0]:  # it is there already
                    assert untouched > recv.size // (4 * ranks), "an operation that did nothing passed"
                recv[:] = result
                space.check(1, iteration)
                assert space.wrong() == 0
                space.check(1, iteration + 1)
                assert space.wrong() > recv.size // 4, "the result of another iteration passed"
                recv.view(np.uint8)[:: recv.itemsize][[0, recv.size // 2, -1]] ^= 1
                space.check(1, iteration)
                assert space.wrong() == 3


def test_values_that_have_no_exact_result_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="sum: no values of float8_e5m2 have an exact result on 8 ranks"):
        Case.of("all_reduce", 64, "float8_e5m2", "sum", 8, True)
    with pytest.raises(InvalidArgument, match="avg: is exact"):
        Case.of("all_reduce", 96, "float32", "avg", 3, True)
    with pytest.raises(InvalidArgument, match="avg: expected an operation that has an average, got exscan"):
        Case.of("exscan", 96, "float32", "avg", 2, True)


class Faulty(Ours):
    """Ours, with the last element of rank 0's result off by one bit in every fifth call."""

    calls = 0

    def bind(self, case: Case, send: Any, recv: Any) -> Any:
        right = super().bind(case, send, recv)
        assert right is not None

        def call() -> None:
            right()
            self.calls += 1
            if self.comm.rank == 0 and self.calls % 5 == 0:
                recv.view(np.uint32)[-1] ^= 1

        return call


class Lazy(Ours):
    """Ours, which does nothing in the last call of a batch of four."""

    calls = 0

    def bind(self, case: Case, send: Any, recv: Any) -> Any:
        right = super().bind(case, send, recv)
        assert right is not None

        def call() -> None:
            self.calls += 1
            if self.calls % 4:
                right()

        return call


@pytest.mark.parametrize("mode", ["eager", "single_shot"])
def test_wrong_results_are_counted(mode: str) -> None:
    case = Case.of("all_reduce", 4000, "float32", "sum", 2, False)

    def run(comm: Communicator) -> list[tuple[int, int]]:
        job, memory = Job(comm), HostMemory()
        runs = []
        for implementation in (Ours(comm, "mock"), Faulty(comm, "mock"), Lazy(comm, "mock")):
            space = Space(case, Data(case, comm.rank, 0), memory, memory.empty, 4)
            calls = [implementation.bind(case, slot.send, slot.recv) for slot in space.slots]
            runs.append(Run(implementation, space, calls))
        return [(s.iterations, s.wrong) for s in measure(job, HostTimer(job), runs, mode, 16, 4)]

    right, faulty, lazy = spawn(run, 2)[1]  # a batch of 4 calls to warm up, 5 timed ones; all ranks know all
    assert right == (20, 0)
    assert faulty == (20, 4)
    assert lazy == (20, 6 * 2 * 1000)


def check_document(result: dict[str, Any], ranks: int) -> None:
    assert tuple(result) == report.KEYS
    assert result["driver"] is None and result["hardware"] and result["versions"]["numpy"] == np.__version__
    assert "/" not in result["command"].replace("python -m", "")
    for row in result["rows"]:
        assert tuple(row) == report.ROW_KEYS
        assert row["wrong"] == 0 and row["ranks"] in (ranks, 1)
        assert 0 < row["time_us"] <= row["p99_us"] and row["cpu_us"] > 0
        assert row["algbw_gbps"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3, rel=1e-3)
        assert row["mode"] in ("eager", "single_shot") and row["iterations"] >= 4


def test_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in command.STARTED_BY:
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "rows.json"
    arguments = ["--sizes", "4K", "--iterations", "4", "--ranks", "3", "--collective", "all", "--json", str(file)]
    arguments.append("--no-plot")  # drawing nine operations takes long
    monkeypatch.setattr(sys, "argv", ["collectives", *arguments])
    assert command.main(arguments) == 0
    result = json.loads(file.read_text())
    check_document(result, 3)
    assert {(row["op"], row["in_place"]) for row in result["rows"] if row["ranks"] == 3} == set(PLACES)
    assert {row["backend"] for row in result["rows"]} == {"mock"}
    assert {row["call"] for row in result["rows"]} == {"function", "persistent"}
    printed = capsys.readouterr().out
    assert printed.count("# all_reduce on 3 ranks") == 1 and "0 wrong elements in" in printed
    assert printed.count("# summary: ") == len(OPERATIONS) and printed.endswith("# no picture (--no-plot)\n")
    assert not file.with_suffix(".png").exists()

    pytest.importorskip("matplotlib")
    from benchmarks.collectives.plot import plot, series

    rows = [row for row in result["rows"] if row["op"] == "all_reduce" and row["ranks"] == 3]
    line = series(rows, "eager")["mock"]
    assert [(row["bytes"], row["in_place"], row["call"]) for row in line] == [(4096, True, "function")]
    two = [row for row in result["rows"] if row["op"] in ("all_reduce", "all_gather")]  # drawing takes long
    plot({**result, "rows": two}, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes()[:4] == b"\x89PNG"


def test_collectives_need_none_of_the_trainers_packages() -> None:
    code = """import sys
for name in ("pydantic", "rich", "safetensors", "threadpoolctl", "torch", "matplotlib"):
    sys.modules[name] = None
from benchmarks.collectives.__main__ import main
sys.exit(main(["--sizes", "64", "--iterations", "4", "--mode", "eager", "--no-plot"]))"""
    done = run_program(sys.executable, "-c", code, env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_wrong_elements_are_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in command.STARTED_BY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "Ours", Lazy)
    assert command.main(["--sizes", "64", "--iterations", "4", "--mode", "eager", "--no-plot"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "gpu"], "kos: error: --device gpu: "),
        (["--mode", "eager,graph"], "kos: error: --mode: expected some of eager, single_shot on a host, got 'graph'"),
        (["--plot", "x.gif"], "kos: error: x.gif: expected a picture's name that ends in .png or .svg"),
        (["--json", "/nowhere/x"], "kos: error: /nowhere/x: expected a file to write, got no such folder"),
    ],
)
def test_what_cannot_be_done_is_refused_first(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "unavailable", lambda: "no CUDA driver")
    monkeypatch.setattr(command, "work", None)
    for name in command.STARTED_BY:
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        assert command.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith(said)
        monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "64,4", "--dtype", "float64"], "all_reduce: expected at least one float64 for each of 2 ranks"),
        (["--op", "avg", "--ranks", "3"], "avg: is exact"),
        (["--backend", "gloo"], "nothing to measure on a host: gloo: needs mpirun"),
    ],
)
def test_cases_are_refused_before_any_is_measured(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in command.STARTED_BY:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as refused:
        command.main(arguments)
    captured = capsys.readouterr()
    assert refused.value.code == 2 and captured.out == ""
    assert captured.err.startswith(f"kos: error: {said}") and captured.err.count("\n") == 1


def test_no_gpu_under_mpirun() -> None:
    if not MPIRUN or driver.unavailable() is None:
        pytest.skip("needs mpirun and no GPU")
    command = [MPIRUN, "-n", "2", sys.executable, "-m", "benchmarks.collectives", "--device", "gpu"]
    done = run_program(*command, env=OUTSIDE, cwd=ROOT)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "kos: error: --device gpu: " in done.stderr


@pytest.mark.parametrize(
    ("program", "lacks", "said"),
    [
        ("train", "a GPU", "--device cuda: expected a GPU, got none: no CUDA driver"),
        ("kernels", "a GPU", "benchmarks.kernels: expected a GPU, got none: no CUDA driver"),
        ("kernels", "torch", "benchmarks.kernels: expected PyTorch .*, got none"),
    ],
)
def test_what_a_benchmark_lacks_is_one_line(
    program: str, lacks: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"benchmarks.{program}"
    monkeypatch.setattr(sys, "argv", [name, *(["--preset", "124m", "--device", "cuda"] if program == "train" else [])])
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(cuda, "unavailable", lambda: "no CUDA driver")
    monkeypatch.setattr(driver, "unavailable", lambda: "no CUDA driver")
    if lacks == "torch":
        monkeypatch.setitem(sys.modules, "torch", None)
    elif program != "train":
        pytest.importorskip("torch")
    with pytest.raises(SystemExit) as exit:
        runpy.run_module(name, run_name="__main__")
    told = capsys.readouterr()
    if program == "train":  # as the trainer: settings that cannot be had are exit code 2
        assert exit.value.code == 2 and told == ("", f"kos: error: {said}\n")
    else:
        assert re.fullmatch(f"kos: error: {said}", str(exit.value.code)) and told == ("", "")


@pytest.mark.parametrize("program", ["kernels", "recorder"])
def test_arguments_are_looked_at_first(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also without PyTorch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for argument, code in (("--help", 0), ("--bogus", 2)):
        name = f"benchmarks.{program}"
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "argv", [name, argument])
        with pytest.raises(SystemExit) as left:
            runpy.run_module(name, run_name="__main__")
        assert left.value.code == code
        assert ("usage: " in capsys.readouterr().out) == (code == 0)


@pytest.mark.parametrize(
    ("device", "backends", "no_gpu", "reason"),
    [
        (None, ["peer", "nccl"], "no CUDA driver", "no CUDA driver"),
        (None, ["peer"], None, "it is for GPUs"),
        (0, ["mpi", "gloo"], None, "it is for a host"),
        (None, ["mock"], "no CUDA driver", "its ranks are threads of one process (start without mpirun)"),
    ],
)
def test_a_backend_that_cannot_be_measured_here_says_why(
    device: int | None, backends: list[str], no_gpu: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "unavailable", lambda: no_gpu)
    benchmark = object.__new__(command.Benchmark)
    benchmark.options, benchmark.job = SimpleNamespace(backend=backends), SimpleNamespace(threads=False)
    benchmark.device, benchmark.skipped = device, {}
    assert list(benchmark._implementations(None)) == []
    assert benchmark.skipped == dict.fromkeys(backends, reason)


def test_only_results_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.collectives import plot

    (tmp_path / "other").write_text('{"rows": [{}]}')
    for source, said in (("other", "expected a result of benchmarks"), ("no", "No such file")):
        monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path / source), str(tmp_path / "x.png")])
        with pytest.raises(SystemExit, match=f"^kos: error: .*{said}"):
            plot.main()


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--sizes", "4Q"], "expected a size such as"),
        (["--backend", "smoke"], "--backend: expected some of"),
        (["--mode", "fast"], "--mode: expected some of"),
        (["--collective", "all_reduced"], "--collective: expected some of"),
        (["--dtype", "bool"], "--dtype: expected one of float64, "),
        (["--dtype", "complex64", "--collective", "all_gather"], "--dtype: expected one of float64, "),
        (["--seed", "-1"], "--seed: expected a number from 0 on, got -1"),
        (["--iterations", "0"], "expected numbers from 1 on"),
        (["--plot", "x.png", "--no-plot"], "--plot, --no-plot: expected one of them, got both"),
        (["--algorithm", "foo"], "--algorithm: expected some of auto, ring, "),
        (["--algorithm", "ring", "--collective", "broadcast"], "--algorithm: expected some of auto, got 'ring'"),
        (["--algorithm", "deterministic", "--collective", "all_gather"], "got 'deterministic'"),
    ):
        with pytest.raises(SystemExit) as refused:
            command.parse(arguments)
        error = capsys.readouterr().err
        assert refused.value.code == 2 and error.startswith("kos: error: ") and error.count("\n") == 1
        assert said in error


def test_an_algorithm_is_measured_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the operations that were asked for."""
    for name in command.STARTED_BY:
        monkeypatch.delenv(name, raising=False)
    file, asked = tmp_path / "rows.json", "two_shot,one_shot,deterministic"
    monkeypatch.setattr(sys, "argv", ["collectives"])
    few = ["--sizes", "4K", "--iterations", "4", "--mode", "eager", "--place", "out", "--no-plot"]
    assert command.main([*few, "--collective", "all", "--algorithm", asked, "--json", str(file)]) == 0
    assert {(row["op"], row["algorithm"]) for row in json.loads(file.read_text())["rows"]} == {
        ("all_reduce", "two_shot"), ("all_reduce", "one_shot"), ("all_reduce", "deterministic"),
        ("reduce_scatter", "one_shot"), ("reduce_scatter", "deterministic"), ("all_gather", "one_shot"),
    }  # fmt: skip


def test_what_comes_to_nothing_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in command.STARTED_BY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Ours, "bind", lambda *_: None)
    with pytest.raises(SystemExit) as refused:
        command.main(["--sizes", "64"])
    captured = capsys.readouterr()
    assert refused.value.code == 2 and captured.out == ""
    assert captured.err == (
        "kos: error: nothing was measured: expected a backend that has one of these operations, got none\n"
    )


@needs_mpirun
def test_under_mpirun(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--sizes", "1K", "--iterations", "4", "--device", "host", "--json", str(file)]
    command = [MPIRUN, "-n", "2", *python(), "-m", "benchmarks.collectives", *arguments]
    done = run_program(*command, env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    check_document(result, 2)
    assert result["command"].startswith("mpirun -n 2 python -m benchmarks.collectives --sizes 1K")
    backends = {row["backend"] for row in result["rows"]} | set(result["skipped"])
    assert backends == {"mpi", "mpi-native", "gloo"}
    assert all(row["limit_us"] > 0 for row in result["rows"] if row["ranks"] == 2)
    assert "# summary: all_reduce on 2 ranks, eager; a peer's column" in done.stdout
    last = done.stdout.splitlines()[-1]
    if importlib.util.find_spec("matplotlib"):
        assert last == f"# picture: {file.with_suffix('.png')}" and file.with_suffix(".png").exists()
    else:
        assert last.startswith("# no picture: a picture needs matplotlib")


@needs_mpirun
def test_uneven_sizes_beside_open_mpi(tmp_path: Path) -> None:
    file, ops = tmp_path / "rows.json", [op for op in OPERATIONS if op.endswith(("_v", "scan"))]
    arguments = ["--sizes", "1K", "--iterations", "4", "--device", "host", "--mode", "eager", "--place", "out"]
    arguments += ["--collective", ",".join(ops), "--backend", "mpi,mpi-native", "--no-plot", "--json", str(file)]
    done = run_program(MPIRUN, "-n", "3", *python(), "-m", "benchmarks.collectives", *arguments, env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {(row["op"], row["backend"]) for row in rows} == {(op, name) for op in ops for name in ("mpi", "mpi-native")}
    assert not any(row["wrong"] for row in rows)


class StandIn:
    """A kernel of ``device.cu`` on the memory that stands for a GPU's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self, stream: Any, grid: int, block: int, array: int, table: int, count: int, size: int, start: int,
        period: int, *counter: int,
    ) -> None:  # fmt: skip
        words = np.dtype(f"u{size}")
        expected = np.resize(at(table, period, words), start + count)[start:]
        if self.name == "repeat":
            at(array, count, words)[:] = expected
        else:
            at(*counter, 1, np.dtype("u8"))[0] += np.count_nonzero(at(array, count, words) != expected)


@pytest.mark.parametrize(("op", "in_place"), [*PLACES, ("routing", False)])
def test_rows_of_gpus_on_stand_ins(op: str, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots, checks, timers, our calls and those of raw NCCL, where the GPU and NCCL are stand-ins on the host."""
    ranks = 2
    case = Case.of(op, 9 * 7168 * 2 if op == "routing" else 1000 * ranks, "bfloat16", "sum", ranks, in_place)
    group = Group(ranks)

    def run(control: Communicator) -> list[tuple[str, int, int, bool]]:
        stream = SimpleNamespace(handle=7, __cuda_stream__=lambda: (0, 7))
        job, memory, timer = Job(control), DeviceMemory(0, stream), DeviceTimer(Job(control), stream)
        monkeypatch.setattr(timer, "capture", lambda calls: lambda: [call() for call in calls])
        comm = communicator(ThreadRendezvous(threads, control.rank, 20.0), group)
        implementations = [Ours(comm, "kos-nccl"), Ours(comm, "kos-nccl", persistent=True)]
        implementations.append(RawNCCL(control, 0, stream))
        runs = []
        space = Space(case, Data(case, control.rank, 0), memory, memory.empty, 3)
        for implementation in implementations:
            calls = [implementation.bind(case, slot.send, slot.recv) for slot in space.slots]
            if calls[0] is not None:
                runs.append(Run(implementation, space, calls))
        found = []
        for mode in DeviceTimer.MODES:
            for each, s in zip(runs, measure(job, timer, runs, mode, 3, 3), strict=True):
                found.append((f"{each.name} {mode}", s.iterations, s.wrong, s.time_us > 0 and s.cpu_us > 0))
        space.fill(0, 0)  # and now a wrong one: nothing was done
        space.check(0, 0)
        found.append(("nothing", 0, space.wrong(), True))
        implementations[0].close()
        return found

    with no_gpu(monkeypatch):
        threads = ThreadGroup(ranks)
        monkeypatch.setattr("kos.cuda.load_kernel", lambda path, name, device: StandIn(name))
        monkeypatch.setattr(driver.cu, "cuEventElapsedTime", lambda begun, ended: (0, 0.5), raising=False)
        rows, other = spawn(run, ranks)
    *rows, untouched = rows
    kinds = {"all_reduce": 3, "scan": 1, "exscan": 1}.get(op, 2)
    assert [row[1:] for row in rows] == [(15, 0, True)] * 3 * kinds
    there = op == "exscan" or (in_place and op in ("broadcast", "scan"))
    assert (untouched[2] > 0) != there and other[-1][2] >= 0


def test_limits_of_gpus_on_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched, copied and gathered; every interval takes 0.5 ms."""
    stream = SimpleNamespace(handle=7, __cuda_stream__=lambda: (0, 7))
    bytes_copied: list[int] = []

    def run(control: Communicator) -> dict[str, float]:
        return DeviceLimits(Job(control), 0, stream).figures()

    def load(path: Path, name: str, device: int) -> Any:
        kernel = create_autospec(kernels.Kernel, instance=True)

        def bind(grid: int, block: int, *arguments: int) -> Any:
            assert isinstance(grid, int) and isinstance(block, int)
            return lambda stream: None

        kernel.bind.side_effect = bind
        return kernel

    with no_gpu(monkeypatch):
        cu = driver.cu
        slab = SimpleNamespace(pointer=4096, pointers=(4096, 8192))
        monkeypatch.setattr("kos.memory.symmetric.SymmetricMemory", lambda *arguments: nullcontext(slab))
        monkeypatch.setattr("kos.cuda.load_kernel", load)
        graph = SimpleNamespace(replay=lambda stream: None)
        monkeypatch.setattr("kos.cuda.capture", lambda stream, keep: nullcontext(graph))
        monkeypatch.setattr(cu, "cuEventElapsedTime", lambda begun, ended: (0, 0.5), raising=False)
        monkeypatch.setattr(cu, "cuEventSynchronize", lambda event: (0,), raising=False)
        monkeypatch.setattr(cu, "cuMemcpyAsync", lambda to, of, n, stream: bytes_copied.append(n) or (0,))
        figures = spawn(run, 2)
    assert figures[0] == figures[1]
    assert figures[0]["launch_us"] == 5 and figures[0]["flag_round_trip_us"] == 0.5
    assert figures[0]["pair_gbps"] == pytest.approx(bytes_copied[0] / 125e-6 / 1e9)
    assert len(bytes_copied) == 24  # of rank 0 alone


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_device_code_compiles(tmp_path: Path, arch: str) -> None:
    try:
        kernels.nvrtc_version()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    source = ROOT / "benchmarks" / "collectives" / "device.cu"
    cubin = compile_kernels(source, arch, {}, KernelCache(tmp_path))
    assert all(b".text." + name in cubin for name in (b"repeat", b"count_wrong", b"empty", b"ping_pong"))


def test_the_command_is_what_was_typed_without_the_paths_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*report.NOTED, "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    typed = ["--json=/home/me/a.json", "/tmp/b/", "../c d", "~/e", "runs/f", "--sizes=1K:4K:x4", "--lr", "1e-3"]
    said = "--json=a.json b 'c d' e runs/f --sizes=1K:4K:x4 --lr 1e-3"
    assert report.command("x.y", typed) == f"python -m x.y {said}"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("NCCL_ALGO", "ring")
    assert report.command("x.y", typed) == f"NCCL_ALGO=ring mpirun -n 3 python -m x.y {said}"


def test_what_calls_cost_in_two_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "costs.json"
    options = ["--ranks", "1", "--backend", "tcp", "--rounds", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["compare", str(ROOT), str(ROOT), *options])
    compare.main()
    rows = json.loads(file.read_text())["rows"]
    assert [row["call"] for row in rows] == ["tcp eager", "tcp persistent"]
    assert all(len(row[tree]) == 1 and 100 < row[tree][0] < 1e7 for row in rows for tree in ("old", "new"))
    (_, heading, *lines) = capsys.readouterr().out.splitlines()
    assert heading.split()[:4] == ["call", "old", "new", "new/old"]
    old, new, ratio = (float(word) for word in lines[0].split()[2:5])
    assert lines[0].startswith("tcp eager ") and abs(ratio - new / old) < 0.01
