"""The flight recorder: what it holds, when it is dumped, and what joined dumps say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.operation import Operation
from kos.comm.recorder import SLOTS, Group, Recorder, failed, reached, recorders
from kos.comm.recorder.__main__ import main
from kos.comm.recorder.on_signal import dump_on_signal
from kos.errors import CollectiveMismatch, CollectiveTimeout, InvalidArgument, KosError
from kos.testing import spawn
from tests.comm.test_jobs import MPIRUN, environment, needs_mpirun

# FlightRecorder.hpp and FlightRecorderDetail.hpp of PyTorch 2.13.
TORCH_KEYS = {"version", "pg_config", "pg_status", "entries"}
TORCH_ENTRY_KEYS = {
    *("frames", "record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id"),
    *("profiling_name", "time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes"),
    *("state", "time_discovered_started_ns", "time_discovered_completed_ns", "retired", "timeout_ms", "is_p2p"),
}
ONES = np.ones((2, 2), np.float32)


def line_of(text: str) -> int:
    """The line of this file that ends with a comment of that text."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return number


def test_what_an_entry_says() -> None:
    def body(comm: kos.Communicator) -> dict[str, Any]:
        comm.reduce_scatter(np.ones((4, 3), np.int64), op=kos.ReduceOp.MAX, timeout=7)  # the call site
        return comm.recorder.to_dict("because")

    dumps = spawn(body, 2)
    for rank, dump in enumerate(dumps):
        assert set(dump) > TORCH_KEYS
        assert dump["version"].startswith("2.")
        assert (dump["rank"], dump["world_size"], dump["reason"]) == (rank, 2, "because")
        assert dump["pg_config"] == {"world": {"name": "world", "desc": "mock", "ranks": "[0, 1]"}}
        assert dump["pg_status"]["0"] == dict.fromkeys(
            ("last_enqueued_collective", "last_started_collective", "last_completed_collective"), 0
        )
        (entry,) = dump["entries"]
        assert set(entry) > TORCH_ENTRY_KEYS
        assert entry["profiling_name"] == "mock:reduce_scatter"
        assert (entry["input_sizes"], entry["output_sizes"]) == ([[4, 3]], [[2, 3]])
        assert entry["input_dtypes"] == entry["output_dtypes"] == ["int64"]
        assert (entry["state"], entry["retired"], entry["timeout_ms"]) == ("completed", True, 7000)
        assert (entry["reduce_op"], entry["is_p2p"], entry["collective_seq_id"]) == ("MAX", False, 0)
        assert entry["time_created_ns"] <= entry["time_discovered_completed_ns"] < entry["time_created_ns"] + 60e9
        (frame,) = entry["frames"]
        assert Path(frame["filename"]) == Path(__file__)
        assert (frame["line"], frame["name"]) == (line_of("the call site"), "test_what_an_entry_says.<locals>.body")


def test_call_sites_are_the_users_whatever_the_way() -> None:
    def body(comm: kos.Communicator) -> list[int]:
        persistent = comm.all_reduce_init(ONES.copy())
        persistent.start().wait()  # persistent
        with comm.batch():  # batch
            comm.barrier()
            comm.all_gather(ONES)
        comm.all_gather_bytes(b"x" * comm.rank)  # twice inside
        comm.barrier(async_op=True).wait()  # async
        return [entry["frames"][0]["line"] for entry in comm.recorder.entries()]

    sites = ["persistent", "batch", "batch", "twice inside", "twice inside", "async"]
    for lines in spawn(body, 2):
        assert lines == [line_of(site) for site in sites]


def test_a_caller_that_is_not_python() -> None:
    import _thread

    with kos.init("mock") as comm:
        _thread.start_new_thread(comm.barrier, ())
        while not comm.recorder.entries() or comm.recorder.entries()[0]["state"] != "completed":
            pass
        assert comm.recorder.entries()[0]["frames"][0]["filename"].endswith("operations.py")


def test_messages_and_groups() -> None:
    def body(comm: kos.Communicator) -> dict[str, Any]:
        part = comm.split(comm.rank % 2)
        assert part is not None
        part.all_reduce(ONES.copy())
        part.split(None)
        if comm.rank < 2:
            comm.send_recv(ONES, np.empty(4, np.float32), 1 - comm.rank, 1 - comm.rank, tag=5)
        return comm.recorder.to_dict()

    dumps = spawn(body, 4)
    assert dumps[3]["pg_config"]["world.0:1"]["ranks"] == "[1, 3]"
    assert [e["process_group"][0] for e in dumps[3]["entries"]] == ["world", "world.0:1", "world.0:1"]
    *_, send, recv = dumps[1]["entries"]
    assert send["profiling_name"] == "mock:send 1->0" and recv["profiling_name"] == "mock:recv 1<-0"
    assert send["input_sizes"] == [[2, 2]] and send["output_sizes"] == [] and recv["output_sizes"] == [[4]]
    assert send["tag"] == recv["tag"] == 5 and send["is_p2p"]


def test_what_ends_late_leaves_the_slot_to_its_next_operation() -> None:
    recorder = Recorder(0, 1)
    group = Group(recorder, "world", [0], 0, "mock")
    late = Operation("all_reduce", 0)
    group.launch(late, 1)
    for _ in range(SLOTS):
        group.launch(Operation("barrier", 0), 1)
    reached(late, 5)
    assert {entry["state"] for entry in recorder.entries()} == {"scheduled"}
    assert not recorder._failed
    failed(late, ValueError("too late"))
    assert {(entry["state"], entry["error"]) for entry in recorder.entries()} == {("scheduled", None)}
    assert recorder._failed, "a first failure leaves a dump"


def test_a_dump_is_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread goes on, and its operations take the slots of those that are being described."""
    recorder = Recorder(0, 1)
    group = Group(recorder, "world", [0], 0, "mock")
    for _ in range(SLOTS):
        group.launch(Operation("barrier", 0), 1)

    def describe(*arguments: Any) -> Any:
        for _ in range(2):
            group.launch(Operation("broadcast", 0), 1)
        return usual(*arguments)

    usual = kos.comm.recorder._describe
    monkeypatch.setattr(kos.comm.recorder, "_describe", describe)
    entries = recorder.entries()
    assert [entry["collective_seq_id"] for entry in entries] == list(range(SLOTS))
    assert {entry["profiling_name"] for entry in entries} == {"mock:barrier"}


def test_only_the_last_operations_and_no_arrays_are_kept() -> None:
    with kos.init("mock") as comm:
        import weakref

        array = np.ones(3)
        alive = weakref.ref(array)
        comm.all_reduce(array)
        del array
        assert alive() is None
        for _ in range(SLOTS + 9):
            comm.barrier()
        entries = comm.recorder.entries()
        assert len(entries) == SLOTS
        assert [e["record_id"] for e in entries] == list(range(10, SLOTS + 10))
        assert [e["collective_seq_id"] for e in entries] == list(range(10, SLOTS + 10))


def test_states_while_under_way_and_after_a_refusal() -> None:
    may_go = threading.Event()

    def body(comm: kos.Communicator) -> None:
        if comm.rank:
            may_go.wait(20)
            comm.all_reduce(ONES.copy())
            return
        work = comm.all_reduce(ONES.copy(), async_op=True)
        with pytest.raises(InvalidArgument):
            comm.all_reduce(ONES, out=np.ones(1))  # refused: nothing is recorded
        (entry,) = comm.recorder.entries()
        assert (entry["state"], entry["retired"]) == ("started", False)
        assert entry["time_discovered_completed_ns"] is None
        may_go.set()
        work.wait()
        assert comm.recorder.entries()[0]["state"] == "completed"

    spawn(body, 2)


def run_and_dump(folder: Path, size: int, fn: Callable[[kos.Communicator], Any]) -> None:
    """Every rank runs ``fn``, may fail, and then leaves its dump."""

    def body(comm: kos.Communicator) -> None:
        try:
            fn(comm)
        except KosError:
            pass
        finally:
            comm.recorder.dump(folder / f"rank_{comm.rank}.json")

    spawn(body, size, timeout=30)


def read(folder: Path, capsys: pytest.CaptureFixture[str], status: int) -> str:
    capsys.readouterr()
    assert main([str(folder)]) == status
    return capsys.readouterr().out


def test_a_healthy_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(comm: kos.Communicator) -> None:
        comm.all_gather(ONES)
        comm.scatter(np.ones(6) if comm.rank == 1 else None, np.empty(2), root=1)
        comm.gather(ONES, root=2)
        comm.reduce(ONES.copy(), root=0)
        comm.all_gather_v(np.ones(comm.rank), [0, 1, 2])
        comm.broadcast(ONES.copy())

    run_and_dump(tmp_path, 3, body)
    text = read(tmp_path, capsys, 0)
    assert "3 dumps of 3 ranks; 6 collectives that all ranks made alike" in text
    assert "nothing is wrong" in text


def test_a_rank_that_does_not_arrive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gave_up = threading.Barrier(3)

    def body(comm: kos.Communicator) -> None:
        comm.barrier()
        comm.all_reduce(np.ones(7, np.float32))
        try:
            if comm.rank != 1:
                comm.all_reduce(np.ones(8, np.float32), timeout=0.2)  # waits
        finally:
            gave_up.wait(20)

    run_and_dump(tmp_path, 3, body)
    text = read(tmp_path, capsys, 1)
    line = line_of("waits")
    assert "world: all_reduce #2 of float32[8] by SUM: rank 1 did not arrive; ranks 0, 2 called it at " in text
    assert f"test_recorder.py:{line}\n" in text
    assert "rank 1: world: all_reduce #1 of float32[7] by SUM: completed" in text
    assert "rank 2: world: all_reduce #2 of float32[8] by SUM: failed" in text


def test_a_rank_that_comes_after_the_others_gave_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gave_up = threading.Barrier(3)

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 0:
            gave_up.wait(20)
        with pytest.raises(KosError):
            comm.all_reduce(np.ones(8), timeout=0.2)
        if comm.rank != 0:
            gave_up.wait(20)

    run_and_dump(tmp_path, 3, body)
    text = read(tmp_path, capsys, 1)
    assert "all_reduce #0 of float64[8] by SUM: rank 0 came after others had given up; ranks 0, 1, 2 call" in text


def test_a_rank_that_calls_another_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_and_dump(tmp_path, 3, lambda comm: comm.all_reduce(np.ones(4 + (comm.rank == 2))))
    text = read(tmp_path, capsys, 1)
    assert "ranks 0, 1 called all_reduce #0 of float64[4] by SUM" in text
    assert "but rank 2 called all_reduce #0 of float64[5] by SUM" in text
    assert "they differ in elements\n" in text


def test_a_rank_that_leaves_a_call_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank stands apart, so that all of them get far enough to tell."""

    def call(name: str, number: int, **fields: Any) -> dict[str, Any]:
        return crafted(name, number, **fields)

    calls = [[call("all_reduce", 0), call("broadcast", 1, root=0), call("all_gather", 2)]] * 3
    calls[1] = [call("all_reduce", 0), call("all_gather", 1, state="failed")]
    for rank in range(3):
        write(tmp_path, rank, 3, calls[rank])
    text = read(tmp_path, capsys, 1)
    assert "but rank 1 called all_gather #1 of float32[4] at train.py:11: they differ in operation\n" in text


def crafted(name: str, number: int, state: str = "completed", p2p: bool = False, **fields: Any) -> dict[str, Any]:
    """An entry as a dump holds it."""
    entry = {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["world", "mpi"],
        "profiling_name": f"mpi:{name}",
        "collective_seq_id": 0 if p2p else number,
        "p2p_seq_id": number if p2p else 0,
        "is_p2p": p2p,
        "state": state,
        "input_sizes": [[4]],
        "input_dtypes": ["float32"],
        "output_sizes": [[4]],
        "output_dtypes": ["float32"],
        "time_created_ns": 1_000_000 * (number + 1),
        "time_discovered_completed_ns": 1_000_000 * (number + 1) + 500_000 if state == "completed" else None,
        "frames": [{"name": "step", "filename": "train.py", "line": 10 + number}],
        "tag": 0,
    }
    return entry | fields


def write(folder: Path, rank: int, size: int, entries: list[dict[str, Any]]) -> None:
    config = {"world": {"name": "world", "desc": "mpi", "ranks": str(list(range(size)))}}
    dump = {"version": "2.10", "rank": rank, "world_size": size, "pg_config": config, "entries": entries}
    (folder / f"rank_{rank}.json").write_text(json.dumps(dump | {"time_dumped_ns": 9_000_000}))


def test_a_rank_without_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2):
        write(tmp_path, rank, 3, [crafted("barrier", 0), crafted("all_reduce", 1, "started")])
    text = read(tmp_path, capsys, 1)
    assert "world: all_reduce #1 of float32[4]: rank 1 left no dump; ranks 0, 2 called it at train.py:11" in text
    assert "2 dumps of 3 ranks" in text


def test_all_arrived_and_one_did_not_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, 2, [crafted("broadcast", 0, root=0), crafted("barrier", 1, "started")])
    write(tmp_path, 1, 2, [crafted("broadcast", 0, "started", root=0)])
    text = read(tmp_path, capsys, 1)
    assert "broadcast #0 of float32[4], root 0: all ranks arrived, rank 1 did not complete it" in text


def test_records_that_end_at_different_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By signal: nobody waits for anybody; and the ring of one has moved on."""
    write(tmp_path, 0, 2, [crafted("all_reduce", n) for n in range(5, 9)])
    write(tmp_path, 1, 2, [crafted("all_reduce", n) for n in range(3, 8)])
    assert "3 collectives that all ranks made alike" in read(tmp_path, capsys, 0)
    write(tmp_path, 1, 2, [crafted("all_reduce", n) for n in range(3, 9)] + [crafted("barrier", 9, "started")])
    text = read(tmp_path, capsys, 1)
    assert "world: barrier #9 of float32[4]: rank 0 did not arrive" in text


def test_what_streams_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody looks whether it has run: no fault, unless it has been there for long and a rank is missing."""
    queued = [crafted("all_reduce", n, "scheduled") for n in range(4)]
    write(tmp_path, 0, 2, queued)
    write(tmp_path, 1, 2, queued[:2])
    assert "rank 0: world: all_reduce #3 of float32[4]: scheduled" in read(tmp_path, capsys, 0)
    late = json.loads((tmp_path / "rank_0.json").read_text()) | {"time_dumped_ns": 5_000_000_000}
    (tmp_path / "rank_0.json").write_text(json.dumps(late))
    assert "world: all_reduce #2 of float32[4]: rank 1 did not arrive" in read(tmp_path, capsys, 1)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ([], "rank 0 did not complete recv 0<-1 #0 of float32[4] at train.py:10; rank 1 sent nothing for it"),
        ([crafted("send 1->0", 0, p2p=True, tag=3)], "rank 1 sent nothing for it"),
        ([crafted("send 1->0", 0, p2p=True, input_sizes=[[9]])], "rank 1 called send 1->0 #0 of float32[9]"),
        ([crafted("send 1->0", 7, p2p=True)], "is not known"),
        (None, "rank 1 left no dump"),
    ],
)
def test_messages_that_do_not_meet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], theirs: list[dict[str, Any]] | None, message: str
) -> None:
    write(tmp_path, 0, 2, [crafted("recv 0<-1", 0, "started", p2p=True, input_sizes=[], input_dtypes=[])])
    if theirs is not None:
        write(tmp_path, 1, 2, theirs)
    assert message in read(tmp_path, capsys, 1)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (b'{"version": "2.10", "ra', "JSONDecodeError: Unterminated string starting at: line 1 column 21"),
        (b"PK\xff\xfe", "UnicodeDecodeError"),
        (b"[]", "TypeError"),
        (b"{}", "one without 'version'"),
        (b'{"version": "1.0"}', "ValueError: version '1.0'"),
        (b'{"version": "2.1", "rank": 0, "world_size": 1, "pg_config": 3}', "AttributeError"),
        (None, "FileNotFoundError"),
    ],
)
def test_files_that_are_no_dumps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes | None, got: str
) -> None:
    file = tmp_path / "bad.json"
    if text is not None:
        file.write_bytes(text)
    assert main([str(file)]) == 2
    said = capsys.readouterr().err
    assert f"recorder: {file}: expected a flight record of version 2, got {got}" in said and said.count("\n") == 1


def test_dumps_that_do_not_belong_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, 2, [])
    good = str(tmp_path / "rank_0.json")
    assert main([good, good]) == 2
    assert "second one of rank 0" in capsys.readouterr().err
    write(tmp_path, 1, 3, [])
    assert main([str(tmp_path)]) == 2
    assert "rank_1.json: expected a dump of the job of rank 0's, got one of another job" in capsys.readouterr().err


def test_dumps_of_two_jobs_in_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the second job rank 0 alone has left one, over that of the first."""
    both = lambda comm: comm.recorder.dump(tmp_path / f"rank_{comm.rank}.json")  # noqa: E731
    spawn(both, 2)
    assert main([str(tmp_path)]) == 0
    first = json.loads((tmp_path / "rank_1.json").read_text())["job"]
    assert first == json.loads((tmp_path / "rank_0.json").read_text())["job"] != ""
    spawn(lambda comm: both(comm) if comm.rank == 0 else None, 2)
    second = json.loads((tmp_path / "rank_0.json").read_text())["job"]
    capsys.readouterr()
    assert main([str(tmp_path)]) == 2
    expected = f"expected a dump of the job of rank 0's ({second}), got one of another job ({first})"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "ranks", "calls", "said"),
    [
        (1, [0], 1, "1 dump of 1 rank; 1 collective that all ranks made alike\nnothing is wrong; the"),
        (3, [1], 2, "1 dump of 3 ranks; 0 collectives that all ranks made alike\n"
                    "nothing is wrong in these; no dump of ranks 0, 2; the"),
    ],
)  # fmt: skip
def test_what_there_is_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int, ranks: list[int], calls: int, said: str
) -> None:
    for rank in ranks:
        write(tmp_path, rank, size, [crafted("barrier", n) for n in range(calls)])
    assert read(tmp_path, capsys, 0).startswith(said)


def test_the_trace(tmp_path: Path) -> None:
    entries = [crafted("all_reduce", 0), crafted("barrier", 1, "started"), crafted("all_gather", 2)]
    write(tmp_path, 0, 2, entries)
    write(tmp_path, 1, 2, [crafted("all_reduce", 0)])
    out = tmp_path / "out"
    assert main([str(tmp_path), "--trace", str(out)]) == 1
    events = json.loads(out.read_text())["traceEvents"]
    spans = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        (0, 0, "all_reduce", 0, 500),
        (0, 0, "barrier", 1000, 7000),  # not completed: until the dump
        (0, 1, "all_gather", 2000, 500),  # overlaps it
        (1, 0, "all_reduce", 0, 500),
    ]
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert names == [(0, "rank 0"), (1, "rank 1")]


def test_pytorchs_own_analyzer_reads_the_dumps() -> None:
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    config = pytest.importorskip("torch.distributed.flight_recorder.components.config_manager")

    def body(comm: kos.Communicator) -> dict[str, Any]:
        comm.all_reduce(ONES.copy())
        comm.all_gather(ONES)
        comm.barrier()
        try:
            comm.all_reduce(np.ones(3 + comm.rank))
        except CollectiveMismatch:
            pass
        return comm.recorder.to_dict()

    details = {}
    for rank, dump in enumerate(spawn(body, 2)):
        dump = json.loads(json.dumps(dump).replace('"mock:', '"gloo:'))  # it knows the names of its backends only
        details[f"rank_{rank}"] = dump | {"host_name": "host"}
    arguments = config.JobConfig().parse_args(["folder"])
    database = builder.build_db(details, arguments, details["rank_0"]["version"])
    assert [(c.collective_name, c.pass_check) for c in database.collectives] == [
        ("gloo:all_reduce", True),
        ("gloo:all_gather", True),
        ("gloo:barrier", True),
        ("gloo:all_reduce", False),
    ]
    assert "SIZE_OR_SYNTAX_MISMATCH" in str(database.collectives[3].mismatch_collectives[1].type_of_mismatch)


def test_a_failure_leaves_a_dump_where_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    gave_up = threading.Barrier(2)

    def body(comm: kos.Communicator) -> None:
        with pytest.raises(CollectiveTimeout):
            comm.recv(ONES.copy(), 1 - comm.rank, timeout=0.05)
        gave_up.wait(20)
        left = Path("left") / f"rank_{comm.rank}.json"
        if left.parent.exists():  # before anybody closes
            assert "CollectiveTimeout: world: recv #0" in json.loads(left.read_text())["reason"]

    spawn(body, 2)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("KOS_RECORDER_DIR", "left")
    (tmp_path / "left").mkdir()
    spawn(body, 2)
    assert sorted(os.listdir("left")) == ["rank_0.json", "rank_1.json"]
    assert json.loads(Path("left/rank_0.json").read_text())["reason"] == "closed"


def wait_for_nothing(comm: kos.Communicator) -> None:
    """A timeout on rank 0, with rank 1 still there."""
    gave_up = comm.rendezvous.threads.shared("gave up", threading.Event)
    if comm.rank:
        gave_up.wait(20)
        return
    try:
        comm.recv(ONES.copy(), 1, timeout=0.05)
    finally:
        gave_up.set()


def test_a_dump_that_cannot_be_written_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KOS_RECORDER_DIR", str(tmp_path / "file"))
    with pytest.raises(CollectiveTimeout, match="recv #0"):
        spawn(wait_for_nothing, 2)
    with kos.init("mock") as comm, pytest.raises(OSError, match="file"):
        comm.recorder.dump()


def test_a_dump_replaces_the_last_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kos.init("mock") as comm:
        path = comm.recorder.dump(tmp_path / "a" / "x.json")
        before = path.read_text()
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            comm.recorder.dump(path)
    assert path.read_text() == before
    assert os.listdir(path.parent) == ["x.json"]


def test_a_signal_dumps_and_passes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KOS_RECORDER_SIGNAL", "usr2")
    heard: list[int] = []
    usr1 = signal.getsignal(signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    for left_open in list(recorders):  # by tests before: they would write to the same file
        recorders.discard(left_open)
    try:
        with kos.init("mock") as comm:
            comm.barrier()
            dump_on_signal(signal.SIGUSR2)  # twice is once
            os.kill(os.getpid(), signal.SIGUSR2)
            signal.sigtimedwait([], 0)
            dump = json.loads((tmp_path / "rank_0.json").read_text())
            assert (dump["reason"], len(dump["entries"]), heard) == ("signal SIGUSR2", 1, [signal.SIGUSR2])
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert signal.getsignal(signal.SIGUSR1) is usr1


@pytest.mark.timeout(60)
def test_a_signal_in_the_midst_of_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes, both dumps are written whole: neither waits for a lock that the other holds."""
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    for left_open in list(recorders):
        recorders.discard(left_open)
    lines = strike = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        if lines == strike and event == "line":
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR2)
        return trace

    try:
        dump_on_signal(signal.SIGUSR2)
        with kos.init("mock") as comm:
            comm.barrier()
            while lines == strike:  # until a dump has fewer lines than that
                strike, lines = strike + 1 if strike < 400 else strike + 31, 0
                before_trace = sys.gettrace()
                sys.settrace(trace)
                try:
                    comm.recorder.dump(reason="asked for")
                finally:
                    sys.settrace(before_trace)
                dump = json.loads((tmp_path / "rank_0.json").read_text())
                assert len(dump["entries"]) == 1 and os.listdir(tmp_path) == ["rank_0.json"]
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert strike > 100, "the signal came nowhere"


def test_a_signal_concerns_open_communicators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kos.init("mock") as comm:
        part = comm.split(0)
        assert part is not None and comm.recorder is part.recorder
    assert comm.recorder in recorders  # of which a part is open
    part.close()
    assert comm.recorder not in recorders


@pytest.mark.parametrize("wanted", ["NONE", "999", "KILL", "9", "-1", "é"])
def test_a_signal_that_is_none(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("KOS_RECORDER_SIGNAL", wanted)
    with pytest.raises(InvalidArgument, match="KOS_RECORDER_SIGNAL: expected a signal"):
        kos.init("mock")


SKIPS = """
import numpy as np, os, sys, time, kos
with kos.init(timeout=1.5) as comm:
    comm.all_reduce(np.ones(3))
    if comm.rank == 0:
        comm.all_reduce(np.ones(5, np.float32))
    else:
        comm.recorder.dump()
        time.sleep(30)
"""


@needs_mpirun
def test_processes_of_which_one_leaves_a_call_out(tmp_path: Path) -> None:
    """Rank 0 leaves its dump at the timeout, rank 1 by call; the command names rank 1."""
    program = tmp_path / "program.py"
    program.write_text(SKIPS)
    dumps = tmp_path / "dumps"
    done = subprocess.run(
        [MPIRUN, "-n", "2", sys.executable, str(program)],
        env=environment() | {"KOS_RECORDER_DIR": str(dumps)},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode != 0 and "CollectiveTimeout" in done.stderr
    assert sorted(os.listdir(dumps)) == ["rank_0.json", "rank_1.json"]
    command = [sys.executable, "-m", "kos.comm.recorder", str(dumps), "--trace", str(tmp_path / "trace")]
    read = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=40, check=False)
    assert (read.returncode, read.stderr) == (1, "")
    assert "world: all_reduce #1 of float32[5] by SUM: rank 1 did not arrive; rank 0 called it at " in read.stdout
    assert f"{program}:6" in read.stdout
    assert json.loads((tmp_path / "trace").read_text())["traceEvents"]
