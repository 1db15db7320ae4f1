"""The flight recorder: what it holds, and when it is dumped."""

import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import kos
from kos.comm.recorder import SLOTS, Group, Recorder, recorders
from kos.comm.recorder.analysis import load
from kos.comm.recorder.on_signal import dump_on_signal
from kos.errors import CollectiveTimeout, InvalidArgument
from kos.testing import spawn
from tests.comm.works import recorded, work_of

# FlightRecorder.hpp and FlightRecorderDetail.hpp of PyTorch 2.13.
TORCH_KEYS = {"version", "pg_config", "pg_status", "entries"}
TORCH_ENTRY_KEYS = {
    *("frames", "record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id"),
    *("profiling_name", "time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes"),
    *("state", "time_discovered_started_ns", "time_discovered_completed_ns", "retired", "timeout_ms", "is_p2p"),
}
ONES = np.ones((2, 2), np.float32)


def line_of(text: str, file: str = __file__) -> int:
    """The line of ``file`` that ends with a comment of that text."""
    lines = Path(file).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return number


def test_what_an_entry_says():
    def body(comm):
        comm.reduce_scatter(np.ones((4, 3), np.int64), op=kos.ReduceOp.MAX, timeout=7)  # the call site
        return comm.recorder.to_dict("because")

    dumps = spawn(body, 2)
    for rank, dump in enumerate(dumps):
        assert set(dump) > TORCH_KEYS
        assert dump["version"].startswith("2.")
        assert (dump["rank"], dump["world_size"], dump["reason"]) == (rank, 2, "because")
        assert dump["job"] == dumps[0]["job"] != ""
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


def test_call_sites_are_the_users_for_every_kind_of_call():
    def body(comm):
        with comm.batch():  # batch
            comm.barrier()
            comm.all_gather(ONES)
        comm.all_gather_bytes(b"x" * 200 * comm.rank)  # twice inside
        comm.barrier(async_op=True).wait()  # async
        comm.split(0), comm.group([0, 1]), comm.grid((2,)), comm.duplicate()  # groups
        comm.allocate(3, np.float32)  # memory
        return [entry["frames"][0]["line"] for entry in comm.recorder.entries()]

    sites = ["batch", "batch", "twice inside", "twice inside", "async", *["groups"] * 4, "memory"]
    for lines in spawn(body, 2):
        assert lines == [line_of(site) for site in sites]


def test_a_caller_that_is_not_python():
    import _thread

    with kos.init("mock") as comm:
        _thread.start_new_thread(comm.barrier, ())
        while not comm.recorder.entries() or comm.recorder.entries()[0]["state"] != "completed":
            pass
        assert comm.recorder.entries()[0]["frames"][0]["filename"].endswith("collectives.py")


def test_messages_and_groups():
    def body(comm):
        part = comm.split(comm.rank % 2)
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


def test_what_ends_late_leaves_the_slot_to_its_next_operation():
    recorder = Recorder(0, 1)
    group = Group(recorder, "world", [0], 0, "mock")
    late = recorded(work_of("all_reduce", group=group))
    for _ in range(SLOTS):
        recorded(work_of("barrier", group=group))
    late.record_end(5)
    assert {entry["state"] for entry in recorder.entries()} == {"scheduled"}
    assert not recorder._failed
    late.record_failure(ValueError("too late"))
    assert {(entry["state"], entry["error"]) for entry in recorder.entries()} == {("scheduled", None)}
    assert recorder._failed, "a first failure leaves a dump"


def test_a_dump_is_of_one_moment():
    """Another thread continues, and its operations reuse the slots of operations that are being described."""
    recorder = Recorder(0, 1)

    class Mock(str):
        def __format__(self, spec):  # as an operation is described
            for _ in range(2):
                recorded(work_of("broadcast", group=group))
            return super().__format__(spec)

    group = Group(recorder, "world", [0], 0, Mock("mock"))
    for sequence in range(SLOTS):
        recorded(work_of("barrier", sequence=sequence, group=group))
    entries = recorder.entries()
    assert [entry["collective_seq_id"] for entry in entries] == list(range(SLOTS))
    assert {entry["profiling_name"] for entry in entries} == {"mock:barrier"}


def test_only_the_last_operations_and_no_arrays_are_kept():
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


def test_states_while_under_way_and_after_a_refusal():
    may_go = threading.Event()

    def body(comm):
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


def test_a_failure_leaves_a_dump_where_it_is_wanted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    gave_up = threading.Barrier(2)

    def body(comm):
        with pytest.raises(CollectiveTimeout):
            comm.recv(ONES.copy(), 1 - comm.rank, timeout=0.05)
        gave_up.wait(20)
        left = Path("left", comm.recorder.job, f"rank_{comm.rank}.json")
        if Path("left").exists():  # before anybody closes
            assert "CollectiveTimeout: world: recv #0" in json.loads(left.read_text())["reason"]

    spawn(body, 2)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("KOS_RECORDER_DIR", "left")
    (tmp_path / "left").mkdir()
    spawn(body, 2)
    [job] = Path("left").iterdir()
    assert sorted(os.listdir(job)) == ["rank_0.json", "rank_1.json"]
    assert json.loads((job / "rank_0.json").read_text())["reason"] == "closed"
    spawn(lambda comm: comm.barrier(), 1)
    one, other = (load([folder]) for folder in ("left", job))
    assert [dump.size for dump in one] == [1] and [dump.size for dump in other] == [2, 2]  # the last job


def test_a_dump_that_cannot_be_written_hides_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KOS_RECORDER_DIR", str(tmp_path / "file"))
    with pytest.raises(CollectiveTimeout, match="recv #0"):
        spawn(lambda comm: comm.recv(ONES.copy(), 1 - comm.rank, timeout=0.05), 2)
    with kos.init("mock") as comm, pytest.raises(InvalidArgument, match="file.*: expected a file to write, got "):
        comm.recorder.dump()


def test_a_dump_replaces_the_last_one_whole(tmp_path, monkeypatch):
    with kos.init("mock") as comm:
        path = comm.recorder.dump(tmp_path / "a" / "x.json")
        before = path.read_text()
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            comm.recorder.dump(path)
    assert path.read_text() == before
    assert os.listdir(path.parent) == ["x.json"]


@pytest.fixture
def of_signals(tmp_path, monkeypatch):
    """A signal writes dumps to ``tmp_path``, and SIGUSR2 has the default handler."""
    monkeypatch.chdir(tmp_path)
    for left_open in list(recorders):  # by earlier tests: they would write to the same file
        recorders.discard(left_open)
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR2, before)


def test_a_signal_writes_a_dump_and_calls_the_previous_handler(of_signals, tmp_path, monkeypatch):
    monkeypatch.setenv("KOS_RECORDER_SIGNAL", "usr2")
    heard = []
    usr1 = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    with kos.init("mock") as comm:
        comm.barrier()
        dump_on_signal(signal.SIGUSR2)  # a second call changes nothing
        os.kill(os.getpid(), signal.SIGUSR2)
        signal.sigtimedwait([], 0)
        dump = json.loads((tmp_path / "rank_0.json").read_text())
        assert (dump["reason"], len(dump["entries"]), heard) == ("signal SIGUSR2", 1, [signal.SIGUSR2])
    assert signal.getsignal(signal.SIGUSR1) is usr1


def test_a_signal_that_another_thread_asks_for(of_signals, tmp_path, monkeypatch, caplog):
    """Only the main thread can install handlers.

    ``kos.init`` in another thread warns until the main thread has done so.
    """
    monkeypatch.setenv("KOS_RECORDER_SIGNAL", "USR2")
    with ThreadPoolExecutor(1, "worker") as pool:
        with pytest.raises(InvalidArgument, match="expected a call of the main thread, got one of worker_0"):
            pool.submit(dump_on_signal, signal.SIGUSR2).result(20)
        comm = pool.submit(kos.init, "mock").result(20)
        assert "KOS_RECORDER_SIGNAL=USR2: the signal writes no dump until the program calls" in caplog.text
        assert f"dump_on_signal({signal.SIGUSR2:d}) in the main thread" in caplog.text
        dump_on_signal(signal.SIGUSR2)
        caplog.clear()
        pool.submit(kos.init, "mock").result(20).close()
        assert not caplog.text
        signal.raise_signal(signal.SIGUSR2)
        assert (tmp_path / "rank_0.json").exists()
        comm.close()


def test_a_signal_during_a_dump(of_signals, tmp_path):
    """Wherever the signal arrives, both dumps are complete: neither waits for a lock that the other holds."""
    lines = strike = 0

    def trace(frame, event, _):
        nonlocal lines
        lines += event == "line"
        if lines == strike and event == "line":
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR2)
        return trace

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
    assert strike > 100, "the signal came nowhere"


def test_a_signal_concerns_open_communicators(tmp_path, monkeypatch):
    with kos.init("mock") as comm:
        part = comm.split(0)
        assert part is not None and comm.recorder is part.recorder
    assert comm.recorder in recorders  # of which a part is open
    part.close()
    assert comm.recorder not in recorders


@pytest.mark.parametrize("wanted", ["NONE", "999", "KILL", "9", "-1", "é"])
def test_a_signal_that_is_none(monkeypatch, wanted):
    monkeypatch.setenv("KOS_RECORDER_SIGNAL", wanted)
    with pytest.raises(InvalidArgument, match="KOS_RECORDER_SIGNAL: expected a signal"):
        kos.init("mock")
