"""What a run of the benchmark of collectives says at its end: the summary, and what became of the picture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kos.bench import __main__ as command
from kos.bench import join
from kos.bench.options import parse
from kos.bench.report import KEYS, table
from kos.bench.summary import MOST_LINES, busy, summary


def row(backend: str, nbytes: int, time_us: float, **other: Any) -> dict[str, Any]:
    usual = {"op": "all_reduce", "ranks": 2, "mode": "eager", "in_place": True, "algorithm": "auto", "limit_us": 0.5}
    return {**usual, "call": "function", "dtype": "float32", "backend": backend, "bytes": nbytes,
            "time_us": time_us, "busbw_gbps": 1.0, **other}  # fmt: skip


def test_worst_rows_are_first() -> None:
    rows = [
        row("mpi", 8, 10.0), row("mpi-native", 8, 4.0), row("gloo", 8, 100.0),
        row("mpi", 1024, 20.0), row("mpi", 1024, 16.0, call="persistent"), row("mpi-native", 1024, 32.0),
        row("mpi", 64, 10.0), row("mpi-native", 64, 2.0), row("mpi-native", 64, 1.0, in_place=False),
        row("mpi", 64, 1.0, ranks=1), row("mpi", 8, 1.0, mode="single_shot"),
    ]  # fmt: skip
    names, title, heading, *lines, end = summary(rows)
    assert names == "# kos: mpi; others: mpi-native (the MPI library itself), gloo (PyTorch's)"
    assert title.startswith("# summary: all_reduce on 2 ranks, eager; a peer's column is its time / the time of kos")
    assert heading.split()[-2:] == ["mpi-native", "gloo"]
    said = [line.split() for line in lines]
    assert [(words[0], words[1]) for words in said] == [("64", "in"), ("8", "in"), ("1024", "in"), ("64", "out")]
    assert said[0][2:] == ["mpi-native", "2.00", "0.50", "mpi", "10.00", "0.20", "n/a"]
    assert said[1][2:] == ["mpi-native", "4.00", "0.50", "mpi", "10.00", "0.40", "10.00"]
    assert said[2][2:] == ["mpi", "persistent", "16.00", "0.50", "mpi", "persistent", "16.00", "2.00", "n/a"]
    assert said[3][2:] == ["mpi-native", "1.00", "0.50", "none", "n/a", "n/a"], "kos was not measured there"
    assert end == "# kos is the fastest in 1 of 3 rows"


def test_peers_with_several_algorithms_count_by_their_best() -> None:
    rows = [row("peer", 8, 4.0, mode="graph"), row("torch-symm", 8, 12.0, mode="graph", algorithm="one_shot"),
            row("torch-symm", 8, 8.0, mode="graph", algorithm="two_shot"), row("peer", 8, 1.0)]  # fmt: skip
    _, title, _, line, end = summary(rows)
    assert "graph" in title and line.split()[-1] == "2.00" and end == "# kos is the fastest in 1 of 1 rows"


def test_a_long_run_is_cut() -> None:
    sizes = [1 << power for power in range(MOST_LINES + 3)]
    rows = [row("mpi", nbytes, 1.0) for nbytes in sizes]
    rows += [row("mpi-native", nbytes, 2.0 + index) for index, nbytes in enumerate(sizes)]
    lines = summary(rows)
    assert len(lines) == MOST_LINES + 5
    assert lines[-2] == f"# 3 more rows, each at least {2 + MOST_LINES:.2f} times as fast as every peer"


def test_without_peers_the_fastest_by_size_is_named() -> None:
    lines = summary([row("mock", 64, 2.0), row("mock", 8, 3.0), row("mock", 8, 1.5, call="persistent")])
    assert lines[0] == "# kos: mock (threads of one process)"
    assert len(lines) == 5 and "peer" not in lines[1]
    assert [line.split()[:5] for line in lines[3:]] == [["8", "in", "mock", "persistent", "1.50"],
                                                        ["64", "in", "mock", "2.00", "0.50"]]  # fmt: skip


def test_a_busy_machine_is_said() -> None:
    calm, hit = row("mpi", 8, 2.0, p99_us=20.0), row("mpi", 64, 2.0, p99_us=21.0)
    assert busy([calm]) == []
    assert busy([calm, hit]) == ["# the machine was busy: p99 over 10 times the median in 1 of 2 rows"]


def test_bandwidths_of_few_bytes_are_not_zero() -> None:
    [line] = table([row("mpi", 8, 12.0, p99_us=13.0, count=2, redop="sum", wrong=0, cpu_us=12.0,
                        algbw_gbps=0.00066667, busbw_gbps=0.25)])  # fmt: skip
    assert line.split()[-5:-2] == ["0.00067", "0.25", "0"]


def test_several_operations_have_a_part_each() -> None:
    lines = summary([row("mock", 8, 1.0), row("mock", 8, 1.0, op="broadcast")])
    assert [line.split()[2] for line in lines if line.startswith("# summary")] == ["all_reduce", "broadcast"]


def result_of(*ops: str) -> dict[str, Any]:
    rows = [row("mock", nbytes, 1.0, op=op) for op in ops for nbytes in (8, 64)]
    return {"hardware": "h", "date": "2026-01-01", "rows": rows}


@pytest.mark.parametrize(
    ("arguments", "ops", "name"),
    [
        ([], ["all_reduce"], "bench-all_reduce-2.png"),
        ([], ["all_reduce", "broadcast"], "bench-collectives-2.png"),
        (["--json", "rows.json"], ["all_reduce"], "rows.png"),
        (["--json", "rows.json", "--plot", "x.svg"], ["all_reduce"], "x.svg"),
    ],
)
def test_a_picture_is_drawn(
    arguments: list[str], ops: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert command.draw(result_of(*ops), parse(arguments)) == f"# picture: {name}"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_no_picture_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options: argparse.Namespace = parse(["--no-plot"])
    assert command.draw(result_of("all_reduce"), options) == "# no picture (--no-plot)"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = command.draw(result_of("all_reduce"), parse([]))
    assert said.startswith("# no picture: a picture needs matplotlib: ") and "\n" not in said
    assert not list(tmp_path.iterdir())


def test_results_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def file(name: str, commit: str, *rows: dict[str, Any], hardware: str = "h") -> str:
        head = {"hardware": hardware, "driver": None, "versions": {"numpy": name}, "date": name, "commit": commit}
        result = {**head, "command": f"python {name}", "limits": {"launch_us": 1.0}, "skipped": {}, "rows": list(rows)}
        (tmp_path / name).write_text(json.dumps(result))
        return str(tmp_path / name)

    def joined(*files: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["join", *files, "--json", str(tmp_path / "all")])
        join.main()
        whole: dict[str, Any] = json.loads((tmp_path / "all").read_text())
        return whole

    kinds = {"redop": "sum"}
    reduced = [row("mock", nbytes, 1.0, **kinds) for nbytes in (8, 64)]
    sent = row("mock", 8, 1.0, op="broadcast", **kinds)
    first = file("1", "aaaaaaa", reduced[0], sent)
    both = joined(first, file("2", "aaaaaaa", reduced[1], {**reduced[0], "time_us": 2.0}))
    assert tuple(both) == KEYS and both["rows"] == [{**reduced[0], "time_us": 2.0}, reduced[1], sent]
    assert [both[key] for key in ("date", "commit", "command")] == ["2", "aaaaaaa", "python 1 && python 2"]
    assert both["versions"] == {"numpy": "1 and 2"}
    of_two = joined(first, file("3", "bbbbbbb", reduced[1]))
    assert of_two["commit"] is None
    assert [(each["op"], each["bytes"], each["commit"]) for each in of_two["rows"]] == [
        ("all_reduce", 8, "aaaaaaa"), ("all_reduce", 64, "bbbbbbb"), ("broadcast", 8, "aaaaaaa"),
    ]  # fmt: skip
    assert joined(str(tmp_path / "all"), first)["rows"][1]["commit"] == "bbbbbbb"
    with pytest.raises(SystemExit, match="2"):
        joined(first, file("4", "aaaaaaa", sent, hardware="g"))
    assert capsys.readouterr().err.startswith("kos: error: expected results of the same hardware, got g, h")
