"""Runs of the programs that measure, each with few iterations: what they refuse, print and write."""

import importlib.util
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kos import cuda
from kos.bench import implementations, report
from kos.bench.cases import OPERATIONS
from kos.bench.implementations import Ours
from kos.bench.measure import Run
from kos.cuda import driver
from kos.errors import CudaError
from tests.comm.shared_ranks import needs_core
from tests.forked import python
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program
from tests.test_benchmark_cases import PLACES

ROOT = Path(__file__).resolve().parents[1]
FEW = "--iterations 4 --no-plot"
EVERY = (*OPERATIONS, "barrier")
UNEVEN = ("barrier", *(op for op in OPERATIONS if op.endswith(("_v", "scan"))))
SOME = ("all_reduce", "broadcast", "all_gather")
ALL_OF_MPI = "mpi,mpi-native,mpi-again,mpi-c"


def check_document(result: dict[str, Any], ranks: int) -> None:
    assert tuple(result) == report.KEYS
    assert result["driver"] is None and result["hardware"] and result["versions"]["numpy"] == np.__version__
    assert "/" not in result["command"].replace("python -m", "")
    for row in result["rows"]:
        assert tuple(row) == report.ROW_KEYS
        assert row["wrong"] == 0 and row["ranks"] in (ranks, 1)
        assert 0 < row["time_us"] <= row["p99_us"] and row["cpu_us"] > 0
        assert row["limit_us"] > 0 or row["ranks"] == 1 or row["arrays"] or row["op"] == "barrier"
        assert row["algbw_gbps"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3, rel=1e-3)
        assert row["mode"] in ("eager", "single_shot") and row["iterations"] >= 4


def found(rows: Iterable[dict[str, Any]], *columns: str) -> set[tuple[Any, ...]]:
    return {tuple(row[column] for column in columns) for row in rows}


def test_on_threads(program, tmp_path):
    done = program("kos.bench", f"--sizes 4K --ranks 3 --collective all {FEW} --json {{json}}")
    rows = [row for row in done.result["rows"] if row["ranks"] == 3]
    assert done.code == 0 and done.result["command"].startswith("python -m kos.bench --sizes 4K")
    check_document(done.result, 3)
    assert found(rows, "op", "in_place") == set(PLACES) and found(rows, "backend") == {("mock",)}
    assert found(rows, "call") == {("function",)}
    assert done.out.count("# all_reduce on 3 ranks") == 1 and "0 wrong elements in" in done.out
    assert done.out.count("# summary: ") == len(OPERATIONS) and done.out.endswith("# no picture (--no-plot)\n")
    assert not (tmp_path / "result.png").exists()
    pytest.importorskip("matplotlib")
    from kos.bench.plot import plot, series

    line = series([row for row in rows if row["op"] == "all_reduce"], "eager")["mock"]
    assert found(line, "bytes", "in_place", "call") == {(4096, True, "function")} and len(line) == 1
    two = [row for row in done.result["rows"] if row["op"] in ("all_reduce", "all_gather")]  # drawing takes long
    plot({**done.result, "rows": two}, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes()[:4] == b"\x89PNG"


def test_an_algorithm_is_measured_where_it_exists(program):
    """Of the requested operations."""
    names = "two_shot,one_shot,deterministic"
    done = program("kos.bench", f"--collective all --algorithm {names} --place out --sizes 4K {FEW} --json {{json}}")
    assert found(done.result["rows"], "op", "algorithm") == {
        ("all_reduce", "two_shot"), ("all_reduce", "one_shot"), ("all_reduce", "deterministic"),
        ("reduce_scatter", "one_shot"), ("reduce_scatter", "deterministic"), ("all_gather", "one_shot"),
    }  # fmt: skip


@needs_mpirun
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "--sizes 1K --backend mpi,mpi-native,gloo"),
        (1, "--sizes 8 --backend mpi,mpi-native"),  # not the mock's threads
        (3, f"--sizes 1K,2K --mode eager --place out --collective {','.join(UNEVEN)} --backend mpi,mpi-native"),
        (2, f"--sizes 4 --arrays 1 --mode eager --collective {','.join(EVERY)} --backend {ALL_OF_MPI}"),
        (2, f"--sizes 1K --arrays 1,3 --collective {','.join(SOME)} --backend mpi,mpi-native"),
    ],
    ids=["two ranks", "one rank", "uneven sizes", "one array, repeatedly", "arrays in rotation"],
)
def test_beside_open_mpi(ranks, words, tmp_path):
    file, backends = tmp_path / "rows.json", set(words.split()[-1].split(","))
    few = 1 if "--arrays" in words else 4  # calls of Open MPI take milliseconds on busy cores
    words = f"-m kos.bench --device host -n {few} {words} {'--no-plot ' * ('gloo' not in backends)}--json {file}"
    done = run_program(MPIRUN, "-n", str(ranks), *python(), *words.split(), env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = report.read(file)
    rows, measured = result["rows"], backends - result["skipped"].keys()
    check_document(result, ranks)
    assert result["command"].startswith(f"mpirun -n {ranks} python -m kos.bench --device host")
    assert found(rows, "backend") == {(name,) for name in measured} and {"mpi", "mpi-native"} <= measured
    assert result["skipped"].keys() <= {"gloo", "mpi-c"} & backends
    if "--collective" not in words and ranks == 2:
        assert "# summary: all_reduce on 2 ranks, eager; a peer's column" in done.stdout
        last = done.stdout.splitlines()[-1]
        if importlib.util.find_spec("matplotlib"):
            assert last == f"# picture: {file.with_suffix('.png')}" and file.with_suffix(".png").exists()
        else:
            assert last.startswith("# no picture: a picture needs matplotlib")
    elif ranks == 3:
        assert found(rows, "op", "backend") == set(product(UNEVEN, measured))
        assert len([row for row in rows if row["op"] == "barrier" and row["backend"] == "mpi-native"]) == 1
    elif "--arrays" in words:
        ops, more = (EVERY, set()) if ALL_OF_MPI in words else (SOME, {(1, "single_shot"), (3, "eager")})
        calls = {("mpi", "async"), *product(measured, ["function"])}
        eager = [row for row in rows if row["mode"] == "eager"]
        assert found(eager, "op", "backend", "call") == {(op, *call) for op in ops for call in calls}
        assert found(rows, "op", "arrays", "mode") == {(op, *each) for op in ops for each in {(1, "eager"), *more}}
        assert found(rows, "op", "in_place") == {(op, op == "broadcast") for op in ops}
        assert min(row["bytes"] for row in rows if row["op"] == "all_gather") == (8 if ops == EVERY else 1024)
        assert "# time of kos / Open MPI" in done.stdout and "# geometric mean of all but all_reduce" in done.stdout


@pytest.mark.parametrize("core", ["0", "1"])
def test_the_benchmark_needs_no_packages_of_the_trainer_and_no_compiled_core(core):
    """If the core is away, it says so."""
    code = f"""import sys
for name in ("pydantic", "rich", "safetensors", "threadpoolctl", "torch", "matplotlib"):
    sys.modules[name] = None
from kos.bench.__main__ import main
sys.exit(main("--sizes 64 {FEW}".split()))"""
    done = run_program(sys.executable, "-c", code, env={**OUTSIDE, "KOS_CORE": core}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    away = core == "0" or importlib.util.find_spec("kos._core.native") is None
    assert ("; ranks of one host share no memory" in done.stdout) == away


class Faulty(Ours):
    """An implementation with an error: every second pair of buffers has a wrong bit in the last element on rank 1."""

    bound = 0

    def bind(self, case: Any, send: Any, recv: Any) -> Any:
        self.bound += 1
        right, wrong = super().bind(case, send, recv), self.comm.rank == 1 and self.bound % 2 == 0

        def call() -> None:
            right()
            if wrong:
                recv.view(np.uint32)[-1] ^= 1

        return call


class Nothing(Ours):
    """It has no operation."""

    def bind(self, case: Any, send: Any, recv: Any) -> None:
        pass


UNMEASURED = "kos: error: nothing was measured: expected a backend that has one of these operations, got none\n"


@pytest.mark.parametrize(("kind", "code", "said"), [(Faulty, 1, ""), (Nothing, 2, UNMEASURED)])
def test_wrong_elements_and_no_operation_give_a_nonzero_exit_code(kind, code, said, program, monkeypatch):
    """The count includes the wrong elements of all ranks, and those of calls that are not timed."""
    monkeypatch.setattr(implementations, "Ours", kind)
    done = program("kos.bench", f"--sizes 64 {FEW} --json {{json}}")
    assert (done.code, done.err) == (code, said)
    assert code == 2 or {row["wrong"] for row in done.result["rows"] if row["ranks"] == 2} == {12}


@pytest.mark.parametrize(("warmup", "untimed"), [(0, 0), (1, 1), (9, 3)])
def test_the_warm_up_is_not_timed(warmup, untimed, program, before_call):
    """In batches of four calls, of one implementation and the copy that gives the limit."""
    batches = list[str]()
    before_call(Run, "batch", lambda run, *_: batches.append(str(run.name)))
    done = program("kos.bench", f"--ranks 1 --sizes 64 -w {warmup} --place in --mode eager {FEW} --json {{json}}")
    assert done.code == 0 and batches.count("copy") == untimed + 5
    assert {row["iterations"] for row in done.result["rows"]} == {20}


# --- refusals ----------------------------------------------------------------------------------------------

SIZE = "expected a size such as 512, 64K or 16M, got"
REFUSED = [
    ("--sizes 4K,4Q", f"--sizes: {SIZE} '4Q'"),
    ("-b 4K -e 1K", "-e/--max-bytes: expected at least the 4096 of -b, got 1024"),
    ("--sizes 4K -b 1K -f 2", "--sizes: expected no -b, -e or -f beside it, got -b, -f"),
    ("-w -1", "expected numbers from 1, 1 and 0 on, got 200, 2 and -1"),
    ("--backend smoke", "--backend: expected some of"),
    ("--mode eager,graph --device host", "--mode: expected some of eager, single_shot on a host, got 'graph'"),
    ("--dtype bool", "--dtype: expected one of float64, "),
    ("--algorithm ring --collective broadcast", "--algorithm: expected some of auto, got 'ring'"),
    ("--arrays 1,x", "--arrays: expected numbers from 1 to 1000 such as 1,100, got 'x'"),
    ("--arrays 1 --algorithm ring", "--arrays: expected host memory and no --algorithm"),
    ("--sizes", "--sizes: expected one argument, got none"),
    ("--foo", "unrecognized arguments: --foo"),
    ("--plot x.png --no-plot", "--plot, --no-plot: expected one of the two, got both"),
    ("--plot x.gif", "x.gif: expected a picture's name that ends in .png or .svg"),
    ("--json /nowhere/x", "/nowhere/x: expected a file to write, got no such folder"),
    ("--device gpu", "--device gpu: "),
    ("--sizes 64,4 --dtype float64", "all_reduce: expected at least one float64 for each of 2 ranks"),
    ("--op avg --ranks 3", "avg: expected floats on 2, 4, 8"),
    ("--backend gloo", "nothing to measure on a host: gloo: needs mpirun"),
]


COUNTS = ("--ranks", "--per-rank", "--threads", "--steps", "--repeats")
OF_TRAIN = [
    ("--compare torch", "--compare torch: expected PyTorch"),
    ("--json /nowhere/a.json", "/nowhere/a.json: expected a file to write, got no such folder"),
    *((f"{flag} 0", f"{flag}: expected at least 1, got 0") for flag in COUNTS),
    ("--ranks 3", "--batch-size: expected a multiple of 3 (ranks), got 16"),
    ("--torch flash-best", "--torch: expected words of .*, got best"),
    ("--compare torch --preset gpt2-124m", "expected a llama, got gpt2"),
    ("--compare picotron", "--compare picotron: expected --picotron PATH, got none"),
]
ARGPARSE = ("benchmarks.all", "benchmarks.kernels", "benchmarks.recorder")


@pytest.mark.parametrize(
    ("module", "words", "code", "said"),
    [
        *(("kos.bench", words, 2, said) for words, said in REFUSED),
        ("kos.bench.plot", "{folder}/no {folder}/x.png", 2, "No such file"),
        ("kos.bench.plot", "{json} {folder}/x.png", 2, "result.json: expected a result of kos.bench, got "),
        *(("benchmarks.train", f"--device cpu {words}", 2, said) for words, said in OF_TRAIN),
        ("benchmarks.train", "--device cuda", 2, "--device cuda: expected a GPU, got none: no CUDA driver"),
        ("benchmarks.all", "--gpus 0 --only nothing", 2, "--only: expected the beginning of a subject, got nothing"),
        ("benchmarks.all", "--gpus 2", 2, "--gpus 2: no CUDA driver"),
        ("benchmarks.kernels", "", 1, "benchmarks.kernels: expected a GPU, got none: no CUDA driver\n"),
        ("benchmarks.kernels", "", 1, "benchmarks.kernels: expected PyTorch (pip install torch), got none\n"),
        ("benchmarks.kernels", "--bogus", 2, "--bogus"),
        ("benchmarks.recorder", "--bogus", 2, "--bogus"),
        ("benchmarks.recorder", "--json {folder}/none/x.json", 1, "expected a file to write, got no such"),
    ],
)
def test_what_is_refused(module, words, code, said, program, tmp_path, monkeypatch):
    """In one line, before anything is measured, and arguments before requirements."""
    if module == "kos.bench.plot":
        pytest.importorskip("matplotlib")
    elif module == "benchmarks.kernels" and "GPU" in said:
        pytest.importorskip("torch")
    elif module in ("benchmarks.train", *ARGPARSE):
        monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "result.json").write_text('{"rows": [{}]}')
    monkeypatch.setattr(cuda, "unavailable", lambda: "no CUDA driver")
    monkeypatch.setattr(cuda, "device_info", Mock(side_effect=CudaError("no CUDA driver")))
    done = program(module, words)
    shown, nothing = (done.err, done.out) if code else (done.out, done.err)
    assert (done.code, nothing) == (code, "") and all(part in shown for part in said.split(".*")), done
    assert ("usage: " in shown) == (module in ARGPARSE and code != 1)
    assert "usage: " in shown or (shown.startswith("kos: error: ") and shown.count("\n") == 1)


@needs_mpirun
@pytest.mark.parametrize(
    "typed",
    [
        "bench --collective foo", "bench --json /nowhere/x", "bench --device gpu", "foo", "bench --with foo", "tune",
    ],
)  # fmt: skip
def test_rank_0_alone_refuses(typed):
    if "gpu" in typed and driver.unavailable() is None:
        pytest.skip("needs a machine without a GPU")
    done = run_program(MPIRUN, "-n", "2", sys.executable, "-m", "kos", *typed.split(), env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("kos: ") == 1, done.stderr
    assert done.stderr.startswith("kos: error: ")


# --- other programs ----------------------------------------------------------------------------------------


@needs_core
def test_the_costs_of_the_recorder(program, tmp_path):
    result = program("benchmarks.recorder", "--runs 1 --json {json}").result
    assert result.keys() >= {"hardware", "versions", "date", "commit"} and str(tmp_path) not in str(result)
    assert [row.get("ranks") for row in result["rows"]] == [None, 2, 4, 8]


SMALL = """--hidden-size 16 --intermediate-size 24 --num-hidden-layers 2 --num-attention-heads 2 --num-key-value-heads 2
--device cpu --json {json} """


def test_times_of_prefill_and_steps(program):
    done = program("benchmarks.generate", SMALL + "--seq-len 64 --prompt 40 --tokens 6 --batches 1 3 --peers uncached")
    rows, lines = done.result["rows"], done.out.splitlines()[1:]
    assert [(row["source"], row["batch"]) for row in rows] == [(x, n) for n in (1, 3) for x in ("kos", "uncached")]
    for row, line in zip(rows, lines, strict=True):
        assert row["prefill_s"] > 0 and row["step_ms"] > 0 and row["bound_ms"] == 0
        assert line.startswith(row["source"]) and f"{row['step_ms']:.3f}" in line


def test_shares_of_a_step(program):
    done = program("benchmarks.optimizers", SMALL + "--seq-len 16 --batch-size 4 --repeats 2")
    rows = done.result["rows"]
    assert [row["optimizer"] for row in rows] == ["adamw", "muon"]
    for row in rows:
        assert 0 < row["update_ms"] < row["step_ms"] and row["share"] == row["update_ms"] / row["step_ms"]
        assert row["optimizer"] in done.out and f"{row['share']:.1%}" in done.out
    assert rows[0]["state_bytes"] > rows[1]["state_bytes"] > rows[0]["state_bytes"] / 2


def test_training_beside_8_bits(tmp_path):
    """The same weights and tokens, a row each; it needs no torch."""
    flags = SMALL.format(json=tmp_path / "rows.json") + "--seq-len 32 --vocab-size 512 --per-rank 4 --steps 2"
    words = f"-m benchmarks.train {flags} --repeats 1 --ranks 1 --compare fp8"
    done = run_program(sys.executable, *words.split(), env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    float32, fp8 = report.read(tmp_path / "rows.json")["rows"]
    assert [(row["implementation"], row["variant"]) for row in (float32, fp8)] == [("kos", "float32"), ("kos", "fp8")]
    assert 0 < fp8["loss_difference"] < 1e-2 and float32["loss"] == pytest.approx(fp8["loss"], rel=1e-2)
