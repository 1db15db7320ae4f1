"""What benchmarks compute from their rows: summaries, ratios, joined files, pictures' names, power, instructions."""

import json
import sys
from typing import Any

import pytest

from benchmarks import instructions
from benchmarks.plots.results import load
from kos.bench import report
from kos.bench.options import parse
from kos.bench.ratios import lines, ratios
from kos.bench.summary import busy, summary
from kos.train.machine import versions_of
from tests.core.core_ranks import needs_core

USUAL = {"op": "all_reduce", "ranks": 2, "mode": "eager", "in_place": True, "algorithm": "auto", "limit_us": 0.5,
         "call": "function", "dtype": "float32", "busbw_gbps": 1.0}  # fmt: skip


def row(backend: str, nbytes: int, time_us: float, **other: Any) -> dict[str, Any]:
    return {**USUAL, "backend": backend, "bytes": nbytes, "time_us": time_us, **other}


def test_worst_rows_are_first():
    names, title, heading, *rows, end = summary([
        row("mpi", 8, 10.0), row("mpi-native", 8, 4.0), row("gloo", 8, 100.0),
        row("mpi", 1024, 20.0), row("mpi", 1024, 16.0, call="async"), row("mpi-native", 1024, 32.0),
        row("mpi", 64, 10.0), row("mpi-native", 64, 2.0), row("mpi-native", 64, 1.0, in_place=False),
        row("mpi", 64, 1.0, ranks=1), row("mpi", 8, 1.0, mode="single_shot"),
    ])  # fmt: skip
    assert names == "# kos: mpi; others: mpi-native (the MPI library itself), gloo (PyTorch's)"
    assert title.startswith("# summary: all_reduce on 2 ranks, eager; a peer's column is its time / the time of kos")
    assert heading.split()[-2:] == ["mpi-native", "gloo"]
    assert [" ".join(line.split()) for line in rows] == [
        "64 in mpi-native 2.00 0.50 mpi 10.00 0.20 n/a",
        "8 in mpi-native 4.00 0.50 mpi 10.00 0.40 10.00",
        "1024 in mpi async 16.00 0.50 mpi async 16.00 2.00 n/a",
        "64 out mpi-native 1.00 0.50 none n/a n/a",  # kos was not measured there
    ]
    assert end == "# kos is the fastest in 1 of 3 rows"


def test_a_busy_machine_and_few_bytes():
    calm, hit = row("mpi", 8, 2.0, p99_us=20.0), row("mpi", 64, 2.0, p99_us=21.0)
    assert busy([calm]) == []
    assert busy([calm, hit]) == ["# the machine was busy: p99 over 10 times the median in 1 of 2 rows"]
    [line] = report.table([{**calm, "count": 2, "redop": "sum", "wrong": 0, "cpu_us": 12.0, "algbw_gbps": 0.00066667,
                            "busbw_gbps": 0.25}])  # fmt: skip
    assert line.split()[-5:-2] == ["0.00067", "0.25", "0"]


def test_ratios_of_rows():
    ours = row("mpi", 8, 3.0, op="scan", arrays=1)
    peer, single = ours | {"backend": "mpi-native", "time_us": 2.0}, {"mode": "single_shot", "p99_us": 6.0}
    rows = [ours, peer, ours | {"call": "async", "time_us": 4.5}, ours | {"arrays": 100, "time_us": 4.0},
            peer | {"arrays": 100, "time_us": 8.0}, peer | {"backend": "mpi-again", "time_us": 2.2},
            ours | single, peer | single | {"p99_us": 12.0}]  # fmt: skip
    assert ratios(rows) == [("scan", 8, [1.5, 0.5, 1.5, 1.5, 0.5, 1.1, None])]
    assert ratios([ours | {"arrays": 0}]) == [] and lines([]) == []
    assert lines(rows)[-1].endswith("same array: 1.50")


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("-b 1K -e 64K -f 4", [1024, 4096, 16384, 65536]), ("-b 1k -e 3K -f 2", [1024, 2048]), ("-e 512", [512]),
        ("--sizes 512,1M,1G", [512, 2**20, 2**30]), ("-b 128M", [2**27]), ("", [1024 * 4**n for n in range(9)]),
    ],
)  # fmt: skip
def test_sizes_are_those_of_nccl_tests(words, sizes):
    assert parse(words.split()).sizes == sizes


def test_the_recorded_command_has_no_machine_paths(monkeypatch):
    for name in (*report.NOTED, "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    typed = ["--json=/home/me/a.json", "/tmp/b/", "../c d", "~/e", "runs/f", "--sizes=1K:4K:x4", "--lr", "1e-3"]
    said = "python -m x.y --json=a.json b 'c d' e runs/f --sizes=1K:4K:x4 --lr 1e-3"
    assert report.command("x.y", typed) == said
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("NCCL_ALGO", "ring")
    assert report.command("x.y", typed) == f"NCCL_ALGO=ring mpirun -n 3 {said}"


@pytest.mark.parametrize(
    ("arguments", "ops", "name"),
    [
        ("", ["all_reduce"], "bench-all_reduce-2.png"),
        ("", ["all_reduce", "broadcast"], "bench-collectives-2.png"),
        ("--json rows.json", ["all_reduce"], "rows.png"),
        ("--json rows.json --plot x.svg", ["all_reduce"], "x.svg"),
        ("--no-plot", ["all_reduce"], ""),
        ("without matplotlib", ["all_reduce"], ""),
    ],
)
def test_a_picture_and_its_name(arguments, ops, name, tmp_path, monkeypatch):
    from kos.bench.__main__ import draw

    monkeypatch.chdir(tmp_path)
    if name:
        pytest.importorskip("matplotlib")
    elif arguments == "without matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        arguments = ""
    rows = [row("mock", nbytes, 1.0, op=op) for op in ops for nbytes in (8, 64)]
    said = draw({"hardware": "h", "date": "2026-01-01", "rows": rows}, parse(arguments.split()))
    assert [path.name for path in tmp_path.iterdir()] == [name] * bool(name) and "\n" not in said
    without = "# no picture (--no-plot)" if arguments else "# no picture: a picture needs matplotlib: "
    assert said.startswith(f"# picture: {name}" if name else without)


def test_results_are_joined(tmp_path, program):
    def file(name, commit, *rows, hardware="h"):
        head = {"hardware": hardware, "driver": None, "versions": {"numpy": name}, "date": name, "commit": commit}
        result = {**head, "command": f"python {name}", "limits": {"launch_us": 1.0}, "skipped": {}, "rows": list(rows)}
        (tmp_path / name).write_text(json.dumps(result))
        return name

    def joined(*names):
        return program("kos.bench.join", " ".join(f"{{folder}}/{name}" for name in names) + " --json {json}")

    small, large = (row("mock", nbytes, 1.0, redop="sum") for nbytes in (8, 64))
    sent = row("mock", 8, 1.0, op="broadcast", redop="sum")
    first = file("1", "aaaaaaa", small, sent)
    both = joined(first, file("2", "aaaaaaa", large, {**small, "time_us": 2.0})).result
    assert tuple(both) == report.KEYS and both["rows"] == [{**small, "time_us": 2.0}, large, sent]
    assert [both[key] for key in ("date", "commit", "command")] == ["2", "aaaaaaa", "python 1 && python 2"]
    assert both["versions"] == {"numpy": "1 and 2"}
    of_two = joined(first, file("3", "bbbbbbb", large)).result
    assert of_two["commit"] is None
    assert [(each["op"], each["bytes"], each["commit"]) for each in of_two["rows"]] == [
        ("all_reduce", 8, "aaaaaaa"), ("all_reduce", 64, "bbbbbbb"), ("broadcast", 8, "aaaaaaa"),
    ]  # fmt: skip
    assert joined("result.json", first).result["rows"][1]["commit"] == "bbbbbbb"
    done = joined(first, file("4", "aaaaaaa", sent, hardware="g"))
    assert (done.code, done.err) == (2, "kos: error: expected results of the same hardware, got g, h\n")


# --- instructions of calls that the core knows -------------------------------------------------------------


@needs_core
@pytest.mark.skipif(instructions.unavailable() is not None, reason=str(instructions.unavailable()))
def test_no_call_takes_more_instructions():
    """Than 1.05 times what benchmarks/results/instructions.json has."""
    recorded = load("instructions")
    if (here := instructions.toolchain()) != recorded["toolchain"]:
        pytest.skip(f"counted with {recorded['toolchain']}, here are {here}")
    same_torch = recorded["versions"]["torch"] == versions_of(["torch"]).get("torch")  # whose version changes them
    known, counted = (
        {(each["op"], each["bytes"], each["cpu"]): each for each in rows if same_torch or "torch" not in each["op"]}
        for rows in (recorded["rows"], instructions.count())
    )
    assert counted.keys() == known.keys()
    for case, each in counted.items():
        for what in ("core", "python"):  # the C library's depend on the CPU
            assert each[what] <= 1.05 * known[case][what], f"{case}: python -m benchmarks.instructions --json FILE"


def test_every_operation_is_counted():
    """With the settings of the core for each vendor of CPUs."""
    counted = {(each["op"], each["cpu"]) for each in load("instructions")["rows"]}
    assert {op for op, _ in counted} >= set(instructions.OPERATIONS)
    assert {("broadcast", "intel"), ("broadcast", "other")} <= counted
