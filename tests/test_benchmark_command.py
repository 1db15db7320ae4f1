"""The command of the benchmark of collectives: what it refuses, runs, prints and writes."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import compare, recorder
from kos import cuda
from kos.bench import __main__ as command
from kos.bench import report
from kos.bench.cases import OPERATIONS
from kos.bench.implementations import Ours
from kos.bench.measure import Run
from kos.bench.options import parse
from kos.bench.ratios import lines, ratios
from kos.cuda import driver
from tests.comm.shared_ranks import needs_core
from tests.forked import python
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program
from tests.test_benchmark_cases import PLACES, Lazy

ROOT = Path(__file__).resolve().parents[1]
FEW = ["--iterations", "4", "--mode", "eager", "--no-plot"]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the launcher's variables, so that the command starts its own ranks."""
    for name in command.STARTED_BY:
        monkeypatch.delenv(name, raising=False)


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
    from kos.bench.plot import plot, series

    rows = [row for row in result["rows"] if row["op"] == "all_reduce" and row["ranks"] == 3]
    line = series(rows, "eager")["mock"]
    assert [(row["bytes"], row["in_place"], row["call"]) for row in line] == [(4096, True, "function")]
    two = [row for row in result["rows"] if row["op"] in ("all_reduce", "all_gather")]  # drawing takes long
    plot({**result, "rows": two}, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes()[:4] == b"\x89PNG"


def test_the_benchmark_needs_no_packages_of_the_trainer() -> None:
    code = """import sys
for name in ("pydantic", "rich", "safetensors", "threadpoolctl", "torch", "matplotlib"):
    sys.modules[name] = None
from kos.bench.__main__ import main
sys.exit(main(["--sizes", "64", "--iterations", "4", "--mode", "eager", "--no-plot"]))"""
    done = run_program(sys.executable, "-c", code, env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_wrong_elements_give_a_nonzero_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Ours", Lazy)
    assert command.main(["--sizes", "64", *FEW]) == 1


@pytest.mark.parametrize("reason", [None, "the compiled core is off: KOS_CORE=0"])
def test_it_says_that_the_compiled_core_is_away(
    reason: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command._core, "unavailable", reason)
    assert command.main(["--sizes", "64", *FEW]) == 0
    assert ("; ranks of one host share no memory" in capsys.readouterr().out) == (reason is not None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "gpu"], "kos: error: --device gpu: "),
        (["--mode", "eager,graph"], "kos: error: --mode: expected some of eager, single_shot on a host, got 'graph'"),
        (["--arrays", "1,x"], "kos: error: --arrays: expected numbers from 1 to 1000 such as 1,100, got 'x'"),
        (["--arrays", "1", "--algorithm", "ring"], "kos: error: --arrays: expected host memory and no --algorithm"),
        (["--plot", "x.gif"], "kos: error: x.gif: expected a picture's name that ends in .png or .svg"),
        (["--json", "/nowhere/x"], "kos: error: /nowhere/x: expected a file to write, got no such folder"),
    ],
)
def test_invalid_options_are_refused_before_ranks_start(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "unavailable", lambda: "no CUDA driver")
    monkeypatch.setattr(command, "work", None)
    for _ in range(2):
        assert command.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith(said)
        monkeypatch.setenv("WORLD_SIZE", "2")


def refused(run: Callable[[list[str]], Any], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line of error with which ``run`` ends."""
    with pytest.raises(SystemExit) as left:
        run(arguments)
    out, error = capsys.readouterr()
    assert left.value.code == 2 and out == "" and error.count("\n") == 1
    return error


def test_cases_are_refused_before_any_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in (
        (["--sizes", "64,4", "--dtype", "float64"], "all_reduce: expected at least one float64 for each of 2 ranks"),
        (["--op", "avg", "--ranks", "3"], "avg: is exact"),
        (["--backend", "gloo"], "nothing to measure on a host: gloo: needs mpirun"),
    ):
        assert refused(command.main, arguments, capsys).startswith(f"kos: error: {said}")
    monkeypatch.setattr(Ours, "bind", lambda *_: None)
    said = "nothing was measured: expected a backend that has one of these operations, got none"
    assert refused(command.main, ["--sizes", "64"], capsys) == f"kos: error: {said}\n"


def test_no_gpu_under_mpirun() -> None:
    if not MPIRUN or driver.unavailable() is None:
        pytest.skip("needs mpirun and no GPU")
    command = [MPIRUN, "-n", "2", sys.executable, "-m", "kos.bench", "--device", "gpu"]
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
def test_a_missing_requirement_is_reported_in_one_line(
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
    if program == "train":  # as in the trainer, settings that cannot be used give exit code 2
        assert exit.value.code == 2 and told == ("", f"kos: error: {said}\n")
    else:
        assert re.fullmatch(f"kos: error: {said}", str(exit.value.code)) and told == ("", "")


@needs_core
def test_the_costs_of_the_recorder_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "RUNS", 1)
    for path in (tmp_path / "none" / "x.json", tmp_path / "x.json"):
        monkeypatch.setattr(sys, "argv", ["benchmarks.recorder", "--json", str(path)])
        if path.parent != tmp_path:
            with pytest.raises(SystemExit, match="kos: error: --json .*x.json: expected a file to write, got no such"):
                recorder.main()
        else:
            recorder.main()
    result = json.loads(path.read_text())
    assert result.keys() >= {"hardware", "versions", "date", "commit"} and str(tmp_path) not in path.read_text()
    assert [row.get("ranks") for row in result["rows"]] == [None, 2, 4, 8]


@pytest.mark.parametrize("program", ["kernels", "recorder"])
def test_arguments_are_checked_before_requirements(
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
def test_a_backend_that_cannot_be_measured_is_reported_with_the_reason(
    device: int | None, backends: list[str], no_gpu: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "unavailable", lambda: no_gpu)
    benchmark = object.__new__(command.Benchmark)
    benchmark.options, benchmark.job = SimpleNamespace(backend=backends, arrays=None), SimpleNamespace(is_mock=False)
    benchmark.device, benchmark.skipped = device, {}
    assert list(benchmark._implementations(None)) == []
    assert benchmark.skipped == dict.fromkeys(backends, reason)


def test_files_without_results_are_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from kos.bench import plot

    (tmp_path / "other").write_text('{"rows": [{}]}')
    for source, said in (("other", "expected a result of kos.bench"), ("no", "No such file")):
        monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path / source), str(tmp_path / "x.png")])
        with pytest.raises(SystemExit, match="2"):
            plot.main()
        assert re.match(f"kos: error: .*{said}", capsys.readouterr().err)


def test_sizes_are_those_of_nccl_tests() -> None:
    for words, expected in (
        ("-b 1K -e 64K -f 4", [1024, 4096, 16384, 65536]),
        ("-b 1k -e 3K -f 2", [1024, 2048]),
        ("--sizes 512,1M,1G", [512, 2**20, 2**30]),
        ("-e 512", [512]),
        ("-b 128M", [2**27]),
        ("", [1024 * 4**power for power in range(9)]),
    ):
        assert parse(words.split()).sizes == expected, words


def test_short_flags_are_the_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    short = "-b 8 -e 1K -f 2 -n 7 -w 3 -o max -d float64"
    long = "--min-bytes 8 --max-bytes 1K --factor 2 --iterations 7 --warmup 3 --op max --dtype float64"
    assert vars(parse(short.split())) == vars(parse(long.split()))


@pytest.mark.parametrize(("warmup", "untimed"), [(0, 0), (1, 1), (9, 3)])
def test_the_warm_up_is_not_timed(warmup: int, untimed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In batches of four calls, of one implementation and the copy that gives the limit."""
    batches: list[str] = []
    batch, file = Run.batch, tmp_path / "rows.json"
    monkeypatch.setattr(Run, "batch", lambda run, *given: batches.append(str(run.name)) or batch(run, *given))
    arguments = ["--ranks", "1", "--sizes", "64", "-n", "4", "-w", str(warmup), "--place", "in", "--json", str(file)]
    assert command.main([*arguments, "--mode", "eager", "--no-plot"]) == 0
    assert batches.count("copy") == untimed + 5
    assert {row["iterations"] for row in json.loads(file.read_text())["rows"]} == {20}


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--sizes", "4K,4Q"], "--sizes: expected a size such as 512, 64K or 16M, got '4Q'"),
        (["-b", "1.5K"], "-b/--min-bytes: expected a size such as 512, 64K or 16M, got '1.5K'"),
        (["-e", "0"], "-e/--max-bytes: expected a size such as 512, 64K or 16M, got '0'"),
        (["-b", "4K", "-e", "1K"], "-e/--max-bytes: expected at least the 4096 of -b, got 1024"),
        (["-f", "1"], "-f/--factor: expected a number from 2 on, got 1"),
        (["--sizes", "4K", "-b", "1K", "-f", "2"], "--sizes: expected no -b, -e or -f beside it, got -b, -f"),
        (["-w", "-1"], "expected numbers from 1, 1 and 0 on, got 200, 2 and -1"),
        (["--backend", "smoke"], "--backend: expected some of"),
        (["--mode", "fast"], "--mode: expected some of"),
        (["--collective", "all_reduced"], "--collective: expected some of"),
        (["--dtype", "bool"], "--dtype: expected one of float64, "),
        (["--dtype", "complex64", "--collective", "all_gather"], "--dtype: expected one of float64, "),
        (["--seed", "-1"], "--seed: expected a number from 0 on, got -1"),
        (["--iterations", "0"], "expected numbers from 1, 1 and 0 on, got 0, 2 and 1"),
        (["--plot", "x.png", "--no-plot"], "--plot, --no-plot: expected one of them, got both"),
        (["--algorithm", "foo"], "--algorithm: expected some of auto, ring, "),
        (["--algorithm", "ring", "--collective", "broadcast"], "--algorithm: expected some of auto, got 'ring'"),
        (["--algorithm", "deterministic", "--collective", "all_gather"], "got 'deterministic'"),
        (["--sizes"], "--sizes: expected one argument, got none"),
        (["--foo"], "unrecognized arguments: --foo"),
    ):
        assert command.main(arguments) == 2
        out, error = capsys.readouterr()
        assert out == "" and error.count("\n") == 1 and error.startswith("kos: error: ") and said in error


def test_an_algorithm_is_measured_where_it_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the requested operations."""
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["collectives"])
    asked = ["--collective", "all", "--algorithm", "two_shot,one_shot,deterministic", "--json", str(file)]
    assert command.main([*FEW, *asked, "--sizes", "4K", "--place", "out"]) == 0
    assert {(row["op"], row["algorithm"]) for row in json.loads(file.read_text())["rows"]} == {
        ("all_reduce", "two_shot"), ("all_reduce", "one_shot"), ("all_reduce", "deterministic"),
        ("reduce_scatter", "one_shot"), ("reduce_scatter", "deterministic"), ("all_gather", "one_shot"),
    }  # fmt: skip


@needs_mpirun
@pytest.mark.parametrize(
    "typed",
    [
        "bench --collective foo", "bench --foo", "bench --json /nowhere/x",
        "bench foo", "foo", "doctor --foo", "tune --foo",
    ],
)  # fmt: skip
def test_rank_0_alone_refuses(typed: str) -> None:
    done = run_program(MPIRUN, "-n", "2", sys.executable, "-m", "kos", *typed.split(), env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("kos") == 1, done.stderr
    assert done.stderr.startswith("kos: error: ")


@needs_mpirun
def test_under_mpirun(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--sizes", "1K", "--iterations", "4", "--device", "host", "--json", str(file)]
    command = [MPIRUN, "-n", "2", *python(), "-m", "kos.bench", *arguments]
    done = run_program(*command, env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    check_document(result, 2)
    assert result["command"].startswith("mpirun -n 2 python -m kos.bench --sizes 1K")
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
def test_one_process_under_mpirun(tmp_path: Path) -> None:
    """The command for one GPU: backends of processes, not the mock's threads."""
    file = tmp_path / "rows.json"
    arguments = ["--sizes", "8", "--iterations", "4", "--device", "host", "--backend", "mpi,mpi-native", "--no-plot"]
    command = [MPIRUN, "-n", "1", *python(), "-m", "kos.bench", *arguments, "--json", str(file)]
    done = run_program(*command, env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert {row["backend"] for row in result["rows"]} == {"mpi", "mpi-native"} and not result["skipped"]


@needs_mpirun
def test_barriers_and_uneven_sizes_beside_open_mpi(tmp_path: Path) -> None:
    file, ops = tmp_path / "rows.json", ["barrier", *(op for op in OPERATIONS if op.endswith(("_v", "scan")))]
    arguments = ["--sizes", "1K,2K", "--iterations", "4", "--device", "host", "--mode", "eager", "--place", "out"]
    arguments += ["--collective", ",".join(ops), "--backend", "mpi,mpi-native", "--no-plot", "--json", str(file)]
    done = run_program(MPIRUN, "-n", "3", *python(), "-m", "kos.bench", *arguments, env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {(row["op"], row["backend"]) for row in rows} == {(op, name) for op in ops for name in ("mpi", "mpi-native")}
    assert len([row for row in rows if row["op"] == "barrier" and row["backend"] == "mpi-native"]) == 1
    assert not any(row["wrong"] for row in rows)


@needs_mpirun
def test_arrays_in_rotation_beside_open_mpi(tmp_path: Path) -> None:
    """Every operation, also in the loop in C, on arrays that are used again."""
    file = tmp_path / "rows.json"
    every = ",".join([*OPERATIONS, "barrier"])
    arguments = ["--sizes", "4,1K", "--arrays", "1,3", "--device", "host", "--collective", every]
    arguments += ["--backend", "mpi,mpi-native,mpi-again,mpi-c", "-n", "4", "--no-plot", "--json", str(file)]
    done = run_program(MPIRUN, "-n", "2", *python(), "-m", "kos.bench", *arguments, env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    check_document(result, 2)
    ours = [("mpi", "function"), ("mpi", "persistent"), ("mpi", "async"), ("mpi-native", "function")]
    peers = {*ours, ("mpi-again", "function"), *[("mpi-c", "function")] * ("mpi-c" not in result["skipped"])}
    for op in (*OPERATIONS, "barrier"):
        rows = [row for row in result["rows"] if row["op"] == op]
        assert {(row["arrays"], row["mode"]) for row in rows} == {(1, "eager"), (1, "single_shot"), (3, "eager")}, op
        assert {(row["backend"], row["call"]) for row in rows if row["mode"] == "eager"} == peers, op
        assert {row["in_place"] for row in rows} == {op == "broadcast"}
    assert min(row["bytes"] for row in result["rows"] if row["op"] == "all_gather") == 8  # one element of each rank
    assert "# time of kos / Open MPI" in done.stdout and "# geometric mean of all but all_reduce" in done.stdout


def test_ratios_of_rows() -> None:
    row = {"op": "scan", "bytes": 8, "arrays": 1, "mode": "eager", "backend": "mpi", "call": "function", "time_us": 3.0}
    peer = row | {"backend": "mpi-native", "time_us": 2.0}
    rows = [row, peer, row | {"call": "async", "time_us": 4.5}, row | {"arrays": 100, "time_us": 4.0}]
    rows += [peer | {"arrays": 100, "time_us": 8.0}, peer | {"backend": "mpi-again", "time_us": 2.2}]
    single = {"mode": "single_shot", "p99_us": 6.0}
    rows += [row | single, peer | single | {"p99_us": 12.0}]
    assert ratios(rows) == [("scan", 8, [1.5, 0.5, None, 1.5, 1.5, 0.5, 1.1, None])]
    assert ratios([row | {"arrays": 0}]) == [] and lines([]) == []
    assert lines(rows)[-1].endswith("same array: 1.50")


def test_the_recorded_command_has_no_machine_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*report.NOTED, "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    typed = ["--json=/home/me/a.json", "/tmp/b/", "../c d", "~/e", "runs/f", "--sizes=1K:4K:x4", "--lr", "1e-3"]
    said = "--json=a.json b 'c d' e runs/f --sizes=1K:4K:x4 --lr 1e-3"
    assert report.command("x.y", typed) == f"python -m x.y {said}"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("NCCL_ALGO", "ring")
    assert report.command("x.y", typed) == f"NCCL_ALGO=ring mpirun -n 3 python -m x.y {said}"


def test_call_costs_of_two_trees_are_compared(
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
