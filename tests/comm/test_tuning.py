"""Tuning tables: which are refused and why, which one is used, how ranks agree, and how measurements become a table."""

import copy
import json
import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kos.bench import __main__ as bench
from kos.bench import tables as tune
from kos.comm import create, tuning
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.gpu import backend as gpu_backend
from kos.comm.gpu.peer.engine import PeerEngine
from kos.comm.tuning import DEFAULT, KernelConfig, Table, load, parse, pick, read, user_path
from kos.errors import InvalidArgument
from tests import fake_cuda
from tests.comm.tcp_ranks import run_threads
from tests.fake_cuda import installed

GPU, LINK = "NVIDIA H200", "18 NVLinks"
ROUTE = "all_reduce 16-bit symmetric graph"
TABLE: dict[str, Any] = {
    "format": 1,
    "gpu": GPU,
    "link": LINK,
    "ranks": 4,
    "launches": {
        "symmetric": [[65536, {"algorithm": "one_shot", "threads": 128}], [None, {"algorithm": "push", "blocks": 64}]],
        "ordinary": [[None, {"algorithm": "two_shot"}]],
    },
    "routes": {
        "all_reduce 16-bit symmetric graph": [[1 << 20, "peer"], [None, "nccl"]],
        "all_reduce 16-bit ordinary graph": [[4096, "peer"], [8192, "nccl"], [None, "peer"]],
        "send_recv 16-bit ordinary eager": [[None, "nccl"]],
    },
    "provenance": {"date": "2026-11-20"},
}


def changed(*path: Any, to: Any) -> dict[str, Any]:
    data = copy.deepcopy(TABLE)
    at: Any = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return data


def tuned(monkeypatch: pytest.MonkeyPatch, routes: dict[str, Any] | None) -> None:
    """Let ranks with a GPU find a table with these routes, or none."""
    table = None if routes is None else parse(changed("routes", to=routes), "a test")
    for module in (create, gpu_backend):
        monkeypatch.setattr(module, "for_group", lambda rendezvous, device: table)


def measure_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure on stand-ins, where graphs are calls: a few times, two calls at once."""
    eager = tune.Tuner._eager
    for name in ("_in_graph", "_eager"):
        monkeypatch.setattr(tune.Tuner, name, lambda self, start, depth, repeats: eager(self, start, 2, 3))


def launched(**launch: Any) -> dict[str, Any]:
    return changed("launches", "ordinary", 0, 1, to=launch)


def test_round_trip():
    table = parse(TABLE, "here")
    assert table.launches.symmetric[0] == (65536, KernelConfig("one_shot", threads=128))
    engine = SimpleNamespace(launches=table.launches)
    small = PeerEngine.pick(engine, 1024, True), PeerEngine.pick(engine, 1024)
    assert small[0] == small[1]  # packets go alike wherever buffers lie
    assert PeerEngine.pick(engine, 65537, True) == KernelConfig("push", 64)
    assert PeerEngine.pick(engine, 1) == KernelConfig("two_shot")
    again = parse(json.loads(json.dumps(table.to_json())), "there")
    assert again.to_json() == table.to_json()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([], "expected a tuning table, got TypeError"),
        ({}, "KeyError: 'format'"),
        (changed("format", to=2), "format: expected 1, got 2"),
        (changed("ranks", to="4"), "ranks: expected int, got '4'"),
        (changed("launches", "ordinary", to=[]), "ordinary: expected increasing sizes, the last null, got []"),
        (changed("launches", "ordinary", to=[[5, {"algorithm": "push"}]]), "the last null, got [5]"),
        (launched(algorithm="rm"), "algorithm: expected one of one_shot"),
        (launched(algorithm="ring"), "algorithm: expected one of one_shot, two_shot, direct"),
        (launched(algorithm="push", blocks=129), "push: blocks: expected 0 to 128, got 129"),
        (launched(algorithm="push", threads=100), "push: threads: expected a multiple of 32, got 100"),
        (launched(algorithm="push", tile=1.5), "push: tile: expected 256 to 65536, got 1.5"),
        (launched(algorithm="push", speed=1), "unexpected keyword argument 'speed'"),
        (changed("routes", ROUTE, to=[[9, "peer"], [8, "nccl"], [None, "peer"]]), "expected increasing sizes"),
        (changed("routes", ROUTE, to=[[1 << 64, "peer"], [None, "nccl"]]), "expected increasing sizes"),
        (changed("routes", ROUTE, to=[[None, "a b"]]), "expected the names of backends, got 'a b'"),
    ],
)  # fmt: skip
def test_damaged_tables_are_refused(data, why):
    with pytest.raises(InvalidArgument) as caught:
        parse(data, "")
    assert why in str(caught.value)


def test_routes_and_what_stands_for_what_was_not_measured():
    table = parse(TABLE, "")
    route = table.route("all_reduce", False, False, True)
    sizes = (1, 4096, 4097, 8192, 8193, 1 << 40)
    assert [pick(route, n) for n in sizes] == ["peer", "peer", "nccl", "nccl", "peer", "peer"]
    assert table.route("all_reduce", True, False, False) == route  # another width, not in a graph
    assert table.route("recv", True, True, True) == ((None, "nccl"),)  # as send_recv
    assert table.route("broadcast", False, False, False) == tuning.UNMEASURED


# Which table is taken.


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Where the user's table and the shipped one for four ranks would lie."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "TABLES", tmp_path / "tables")
    paths = tuning.user_path(GPU, 4), tmp_path / "tables" / "nvidia-h200-4.json"
    assert paths[0] == tmp_path / "kos/tuning/nvidia-h200-4.json"
    for path in paths:
        path.parent.mkdir(parents=True)
    return paths


def test_the_users_table_wins(places):
    mine, shipped = places
    shipped.write_text(json.dumps(TABLE))
    assert load(GPU, LINK, 4).source == str(shipped)
    mine.write_text(json.dumps(changed("routes", to={})))
    assert load(GPU, LINK, 4).routes == {} and load(GPU, LINK, 4).source == str(mine)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"format"', "got JSONDecodeError"),
        ("\xff\xfe", "expected a tuning table"),
        ("[" * 100_000, "RecursionError"),
        (json.dumps(changed("gpu", to="NVIDIA B200")), "measured on 4 x NVIDIA B200 (18 NVLinks), but this is 4 x"),
        (json.dumps(changed("link", to="PCIe")), "measured on 4 x NVIDIA H200 (PCIe)"),
        (json.dumps(changed("ranks", to=2)), "measured on 2 x NVIDIA H200"),
        (None, "Is a directory"),  # root may read everything else
    ],
    ids=["cut", "not text", "deep", "gpu", "link", "ranks", "folder"],
)  # fmt: skip
def test_foreign_and_corrupt_files_are_logged_once_and_ignored(places, caplog, text, why):
    mine, shipped = places
    mine.mkdir() if text is None else mine.write_bytes(text.encode("latin-1"))
    shipped.write_text(json.dumps(TABLE))
    with caplog.at_level(logging.WARNING):
        assert [load(GPU, LINK, 4).source for _ in range(2)] == [str(shipped)] * 2
    (record,) = (each for each in caplog.records if each.name == "kos.comm.tuning")
    assert str(mine) in record.getMessage() and why in record.getMessage()


def test_the_nearest_table_and_none(places):
    assert load(GPU, LINK, 4).routes == {} and load(GPU, LINK, 4).launches is DEFAULT
    places[1].write_text(json.dumps(TABLE))
    table = load(GPU, LINK, 3)
    assert table.source == "nvidia-h200-4.json, the nearest one" and table.routes
    assert load("NVIDIA B200", LINK, 4).routes == {}


@pytest.mark.parametrize(
    ("links", "measured", "used"),
    [(None, LINK, True), (18, tuning.UNKNOWN, True), (18, LINK, True), (0, LINK, False), (4, LINK, False)],
)
def test_links_that_nvml_does_not_count(places, monkeypatch, links, measured, used):
    places[1].write_text(json.dumps(changed("link", to=measured)))
    with installed(monkeypatch, SimpleNamespace(), (fake_cuda.GPU(GPU, nvlinks=links),)):
        assert (load(*tuning.machine(0), 4).source == str(places[1])) == used


@pytest.mark.parametrize("path", sorted(tuning.TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables(path):
    data = json.loads(path.read_text())
    table = read(path, data["gpu"], data["link"], data["ranks"])
    assert path.name == tuning.user_path(table.gpu, table.ranks).name
    assert {"date", "driver", "NCCL", "commit"} <= data["provenance"].keys()


def of_ranks(monkeypatch: pytest.MonkeyPatch, devices: list[int]) -> list[Table]:
    """The table that each rank gets; ranks are threads.  Only GPU 0 is of the kind that was measured."""
    gpus = [fake_cuda.GPU(f"NVIDIA {name}", f"GPU-{name}", nvlinks=18) for name in ("H200", "B200", "B300", "A100")]
    group = ThreadGroup(len(devices))

    def table(rank: int) -> Table:
        return tuning.for_group(ThreadControlPlane(group, rank, 10), devices[rank])

    with installed(monkeypatch, SimpleNamespace(), gpus):
        return run_threads(*[partial(table, rank) for rank in range(len(devices))])


def test_ranks_take_rank_0s_table(places, monkeypatch, caplog):
    """Only rank 0 reads files, so a damaged file is reported once per job."""
    for name in ("h200", "b200"):
        places[0].with_name(f"nvidia-{name}-4.json").write_text("{")
    places[1].write_text(json.dumps(TABLE))
    tables = of_ranks(monkeypatch, [0, 1, 2, 3])
    assert all(table.to_json() == parse(TABLE, "").to_json() for table in tables)
    assert [table.source for table in tables] == [str(places[1])] * 4
    assert len(caplog.records) == 1


def test_ranks_that_share_a_gpu_take_no_table(places, monkeypatch, caplog):
    """Tables that do not fit are not reported to them."""
    places[1].write_text(json.dumps(TABLE))
    tables = of_ranks(monkeypatch, [0, 1, 2, 0])
    assert all(table.launches is DEFAULT and not table.routes and not caplog.records for table in tables)
    assert {table.source for table in tables} == {"none for ranks that share a GPU"}


# What measurements become.


def test_the_fastest_by_size():
    times = {1024: {"peer": 4.0, "nccl": 8.0}, 2048: {"peer": 4.04, "nccl": 4.0}, 4096: {"peer": 8.0, "nccl": 4.0}}
    rows = tune.best_of(times)  # at 2048 bytes it is a tie: it stays
    assert [name for _, name in rows] == ["peer", "nccl"] and rows[-1][0] is None
    assert 2048 <= rows[0][0] < 2100  # they meet just above
    assert tune.best_of({1: {"a": 1.0}}) == [(None, "a")]
    ratios = (0.99, 1.01, 0.99, 1.01, 1.01)
    for nccl, rows in ((40.0, [(6, "peer"), (None, "nccl")]), (4.0, [(None, "peer")])):
        times = {1 << i: {"peer": ratio * nccl, "nccl": nccl} for i, ratio in enumerate(ratios)}
        assert tune.best_of(times) == rows  # at 2 bytes it is a tie; from 8 on not, unless it is noise


def test_where_lines_cross():
    def cross(before, after):
        return tune.crossing({1024: before, 4096: after}, 1024, 4096, "a", "b")

    assert cross({"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0}) == 2048
    assert cross({"a": 1.0, "b": 4.0}, {"a": 2.0, "b": 1.0}) == round(1024 * 4 ** (2 / 3))
    assert cross({"a": 1.0}, {"a": 3.0, "b": 1.0}) == cross({"a": 1.0, "b": 2.0}, {"b": 1.0}) == 2048
    assert cross({"a": 1.0, "b": 0.99}, {"a": 3.0, "b": 1.0}) == 1024
    assert tune.best_of({1: {"a": 1.0, "b": 2.0}, 16: {"b": 1.0}}) == [(4, "a"), (None, "b")]


def test_one_route_for_graphs_and_eager_calls_where_that_costs_nothing():
    graph, eager = "all_reduce 16-bit symmetric graph", "all_reduce 16-bit symmetric eager"
    routes = {graph: ((2048, "peer"), (None, "nccl")), eager: ((1024, "peer"), (None, "nccl"))}

    def measured(peer):
        row = {"route": eager, "nccl": 10.0}
        return [{**row, "bytes": 1024, "peer": 9.0}, {**row, "bytes": 2048, "peer": peer}]

    assert tune.simplified(routes, measured(10.9)) == {graph: routes[graph]}
    assert tune.simplified(routes, measured(11.1)) == routes


def test_a_disturbed_measurement_is_repeated():
    """If a measurement was slow by chance, at one size only, the route of this size does not change."""
    asked = []

    def time(name, nbytes, graph):
        asked.append((name, nbytes))
        disturbed = name == "peer" and nbytes == 4096 and asked.count((name, nbytes)) == 1
        return 73.6 if disturbed else {"peer": 2.6, "nccl": 8.0}[name]

    rows = []
    tuner = SimpleNamespace(
        first="peer", size=2, largest=16384, sizes=[1024 << i for i in range(5)], time=time,
        _timed={"peer": "peer", "nccl": "nccl"},
        bind=lambda name, *_: name, _record=lambda what, nbytes, us: rows.append((nbytes, us["peer"])),
    )  # fmt: skip
    route, times = tune.Tuner.route(tuner, "send_recv", False, False, False, {8192: {"peer": 2.7, "nccl": 8.1}})
    assert route == ((None, "peer"),) and times[8192] == {"peer": 2.7, "nccl": 8.1}
    assert rows == [(nbytes, 2.6) for nbytes in (1024, 2048, 4096, 16384)]
    assert ("peer", 8192) not in asked and asked.count(("nccl", 4096)) == 2


def write_table(*words: str) -> int:
    """The exit status of the command."""
    return bench.main(["--write-table", *words])


def measure_nothing(
    monkeypatch: pytest.MonkeyPatch, cache: Path, local_size: int = 2, meanwhile: Callable[[], Any] = bool
) -> list[str]:
    """The command on stand-ins: two ranks whose measurements give TABLE; returns what it did.

    ``meanwhile`` is called during the measurement.
    """
    done: list[str] = []

    def measure(say: Any) -> Table:
        done.append("measured")
        meanwhile()
        return parse(TABLE, "")

    comm = SimpleNamespace(size=2, rank=0, device=0, local_size=local_size)
    tuner = SimpleNamespace(table=measure, measured=[])
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(tune, "init", lambda backend: backends.append(backend) or nullcontext(comm))
    backends: list[str] = []
    kinds = {"Tuner": ["nccl", "peer"], "TunerBetweenHosts": ["nccl", "auto"]}
    for kind, needed in kinds.items():
        monkeypatch.setattr(
            tune, kind, lambda *arguments, needed=needed: tuner if backends[-2:] == needed else pytest.fail(str(needed))
        )
    monkeypatch.setattr(tune, "provenance", lambda *_: {})
    return done


def test_the_place_for_the_table_is_checked_before_measuring(tmp_path, monkeypatch, capsys):
    done = measure_nothing(monkeypatch, tmp_path / "cache")
    assert write_table() == 0 and write_table("--json", str(tmp_path / "x.json")) == 0
    assert done == ["measured"] * 2
    for path in (tmp_path / "cache/kos/tuning/nvidia-h200-4.json", tmp_path / "x.json"):
        assert read(path, GPU, LINK, 4).to_json() == parse(TABLE, "").to_json()
    capsys.readouterr()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x.json"))
    assert write_table() == write_table("--json", "/nowhere/x.json") == write_table("--json", str(tmp_path)) == 2
    said = capsys.readouterr()
    assert said.out == "" and done == ["measured"] * 2
    cache, nowhere, folder = said.err.splitlines()
    assert "expected a folder to write to" in cache and "no such folder" in nowhere and "got a folder" in folder
    assert all(line.startswith("kos: error: /") for line in (cache, nowhere, folder))


def test_between_hosts_phases_are_measured(tmp_path, monkeypatch):
    done = measure_nothing(monkeypatch, tmp_path, local_size=1)
    assert write_table() == 0 and done == ["measured"]


def test_the_table_of_so_many_hosts(tmp_path):
    path = tmp_path / "table.json"
    tune.write(path, parse({**TABLE, "hosts": 2}, "").to_json())
    with pytest.raises(InvalidArgument, match="format"):
        tune.write(path, {"format": 0})
    assert read(path, GPU, LINK, 4, 2).hosts == 2
    with pytest.raises(InvalidArgument, match=r"measured on 4 x .* on 2 hosts, but this is 4 x [^)]*\)$"):
        read(path, GPU, LINK, 4)
    with pytest.raises(InvalidArgument, match="hosts: expected int, got '2'"):
        parse({**TABLE, "hosts": "2"}, "")
    assert user_path(GPU, 4).name != user_path(GPU, 4, 2).name


def test_a_file_that_cannot_be_written_loses_no_measurements(tmp_path, monkeypatch, capsys):
    """For example, the disk is full.  Here the folder of the file is removed after the check."""
    measure_nothing(monkeypatch, tmp_path / "cache", meanwhile=lambda: shutil.rmtree(tmp_path / "cache"))
    assert write_table() == 1
    said = capsys.readouterr()
    assert parse(json.loads(said.out), "").to_json() == parse(TABLE, "").to_json()
    assert said.err.count("\n") == 1 and "No such file or directory" in said.err
