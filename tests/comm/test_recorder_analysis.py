"""Analysis of joined dumps of the flight recorder: missing ranks, mismatched calls, invalid files, and the trace."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.comm.recorder.__main__ import main
from kos.comm.recorder.analysis import load
from kos.errors import CollectiveMismatch, DataError
from kos.testing import spawn
from tests.comm.test_recorder import ONES


def read(folder: Path, capsys: pytest.CaptureFixture[str], status: int) -> str:
    capsys.readouterr()
    assert main([str(folder)]) == status
    return capsys.readouterr().out


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


def write(
    folder: Path, rank: int, size: int, entries: list[dict[str, Any]], time: int = 9_000_000, **more: Any
) -> None:
    config = {"world": {"name": "world", "desc": "mpi", "ranks": str(list(range(size)))}}
    dump = {"version": "2.10", "rank": rank, "world_size": size, "pg_config": config, "entries": entries}
    (folder / f"rank_{rank}.json").write_text(json.dumps(dump | {"time_dumped_ns": time} | more))


def damaged(**fields: Any) -> bytes:
    """A dump with one entry, in which some fields have wrong types."""
    entries = [crafted("all_reduce", 0, **fields)]
    return json.dumps({"version": "2.1", "rank": 0, "world_size": 1, "pg_config": {}, "entries": entries}).encode()


REDUCES, BROADCASTS = (partial(crafted, name) for name in ("all_reduce", "broadcast"))
WAITS = crafted("barrier", 1, "started")
RECEIVES, SENDS = (
    partial(crafted, p2p=True, input_sizes=[], input_dtypes=[]), partial(crafted, "send 1->0", p2p=True)
)  # fmt: skip
RECEIVED = RECEIVES("recv 0<-1", 0, "started")
DUMPS: dict[str, tuple[int, dict[int, list[dict[str, Any]]], str]] = {  # ranks, dumps, what is said of them
    "a rank without a dump": (
        3, {rank: [crafted("barrier", 0), REDUCES(1, "started")] for rank in (0, 2)},
        "2 dumps of 3 ranks; .* rank 1 wrote no dump; ranks 0, 2 called it at train.py:11",
    ),
    "all arrived and one did not complete": (
        2, {0: [BROADCASTS(0, root=0), WAITS], 1: [BROADCASTS(0, "started", root=0)]},
        "broadcast #0 of float32.4., root 0: all ranks arrived, rank 1 did not complete it",
    ),
    "a call left out": (
        3, {0: (calls := [REDUCES(0), BROADCASTS(1, root=0), crafted("all_gather", 2)]), 2: calls,
            1: [REDUCES(0), crafted("all_gather", 1, "failed")]},
        "but rank 1 called all_gather #1 of float32.4. at train.py:11: they differ in operation\n",
    ),
    "a rank that comes after the others gave up": (
        2, {0: [REDUCES(0, "failed", time_discovered_completed_ns=1_500_000, error="CollectiveTimeout: late")],
            1: [REDUCES(0, "failed", time_created_ns=2_000_000)]},
        "all_reduce #0 of float32.4.: rank 1 arrived after the timeout of others; ranks 0-1 called it",
    ),
    "a call of another size": (
        3, {0: [REDUCES(0)], 1: [REDUCES(0)], 2: [REDUCES(0, "failed", input_sizes=[[5]])]},
        "ranks 0-1 called all_reduce #0 .*4. .*but rank 2 called all_reduce #0 .*5. .*they differ in elements\n",
    ),
    "a root that went on": (  # nobody waits in the first call that the other rank missed
        2, {0: [BROADCASTS(0), BROADCASTS(1), crafted("barrier", 2, "failed")], 1: [BROADCASTS(0)]},
        "broadcast #1 of float32.4.: rank 1 did not arrive; rank 0 called it",
    ),
    "calls that differ after one that the failure ended on other ranks": (
        4, {0: [REDUCES(0), (ended := crafted("gather", 1, "failed", root=0))], 2: [REDUCES(0), ended],
            1: [*(done := [REDUCES(0), crafted("gather", 1, root=0)]), crafted("scan", 2, "failed", input_sizes=[[8]])],
            3: [*done, crafted("scan", 2, "failed")]},
        "; 1 collective that all .*\nworld: rank 1 called scan #2 of float32.8. .* they differ in elements\nwhere",
    ),
    "ranges of ranks": (
        64, {rank: [REDUCES(0), *[REDUCES(1, "failed")] * (rank not in (5, 7, 8))] for rank in range(64)},
        "ranks 5, 7-8 did not arrive; ranks 0-4, 6, 9-63 called it at train.py:11\n",
    ),
    "a message that was not sent": (
        2, {0: [RECEIVED], 1: []},
        "rank 0 did not complete recv 0<-1 #0 of float32.4. at train.py:10; rank 1 sent nothing for it",
    ),
    "a message of another tag": (2, {0: [RECEIVED], 1: [SENDS(0, tag=3)]}, "rank 1 sent nothing for it"),
    "a message of another size": (
        2, {0: [RECEIVED], 1: [SENDS(0, input_sizes=[[9]])]}, "rank 1 called send 1->0 #0 of float32.9.",
    ),
    "a message that was recorded no longer": (2, {0: [RECEIVED], 1: [SENDS(7)]}, "is not known"),
    "a message of a rank without a dump": (2, {0: [RECEIVED]}, "rank 1 wrote no dump"),
    **{  # which of the sends another receive took is not recorded, so that nothing is said of the sender
        f"{waits} after a receive from any rank": (
            2, {0: [RECEIVES("recv 0<-any", 0), RECEIVES(waits, 1, "started")], 1: []},
            f"^(?!.*sent nothing).*rank 0 did not complete {waits} #1",
        ) for waits in ("recv 0<-any", "probe 0<-1", "recv 0<-1")
    },
    "one healthy rank": (
        1, {0: [REDUCES(0)]}, "1 dump of 1 rank; 1 collective that all ranks .*\nnothing is wrong; the",
    ),
    "some healthy ranks": (
        3, {1: [REDUCES(0), REDUCES(1)]},
        "1 dump of 3 ranks; 2 collectives that these .*\nnothing is wrong in these; no dump of ranks 0, 2; the",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DUMPS)
def test_what_dumps_say(tmp_path, capsys, case):
    size, dumps, said = DUMPS[case]
    for rank, entries in dumps.items():
        write(tmp_path, rank, size, entries)
    assert re.search(said, read(tmp_path, capsys, int("healthy" not in case)), re.DOTALL)


def test_an_exception_of_the_program_between_operations_is_shown(tmp_path, monkeypatch, capsys):
    def body(comm):
        comm.barrier()
        if comm.rank == 1:
            raise ValueError("no more\ndata")
        comm.barrier()

    monkeypatch.setenv("KOS_RECORDER_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="no more"):
        spawn(body, 2)
    text = read(tmp_path, capsys, 1)
    assert re.search("\n  rank 1: .* completed, .* before the dump; aborted: ValueError: no more data\n", text)
    assert text.count("; aborted") == 1, "the other rank has only seen it"


def in_two_groups(folder: Path, entries: dict[int, list[dict[str, Any]]]) -> None:
    """Dumps of four ranks, of which the odd ones form the group ``odd``."""
    groups = {"world": [0, 1, 2, 3], "odd": [1, 3]}
    config = {name: {"name": name, "desc": "mpi", "ranks": str(ranks)} for name, ranks in groups.items()}
    for rank, calls in entries.items():
        write(folder, rank, 4, calls, pg_config=config)


ODD = {"process_group": ["odd", "mpi"]}


def test_causes_are_listed_before_their_consequences(tmp_path, capsys):
    """One rank of the group ``odd`` makes another call, or none.  The other ranks are in the next call of the world."""
    made, fails = REDUCES(0), REDUCES(1, "failed")
    in_group = {name: [made, crafted(name, 0, "failed", **ODD)] for name in ("barrier", "scan")}
    in_two_groups(tmp_path, {0: [made, fails], 2: [made, fails], 1: in_group["scan"], 3: in_group["barrier"]})
    findings = read(tmp_path, capsys, 1).splitlines()[1:]
    assert findings[0].startswith("odd: rank 1 called scan #0 ") and "but rank 3 called barrier #0 " in findings[0]
    assert findings[1].startswith("world: all_reduce #1 of float32[4]: ranks 1, 3 did not arrive: waiting elsewhere;")
    in_two_groups(tmp_path, {3: [made]})
    findings = read(tmp_path, capsys, 1).splitlines()[1:]
    assert findings[0].startswith("world: all_reduce #1 of float32[4]: rank 3 did not arrive, rank 1 waits elsewhere;")
    assert findings[1].startswith("odd: scan #0 of float32[4]: rank 3 did not arrive; rank 1 called it")


def test_records_that_end_at_different_times(tmp_path, capsys):
    """A signal wrote the dumps: no rank waits for another, and the ring buffer of one rank has advanced further."""
    write(tmp_path, 0, 2, [crafted("all_reduce", n) for n in range(5, 9)])
    write(tmp_path, 1, 2, [crafted("all_reduce", n) for n in range(3, 8)])
    assert "3 collectives that all ranks made alike" in read(tmp_path, capsys, 0)
    write(tmp_path, 1, 2, [crafted("all_reduce", n) for n in range(3, 9)] + [crafted("barrier", 9, "started")])
    text = read(tmp_path, capsys, 1)
    assert "world: barrier #9 of float32[4]: rank 0 did not arrive" in text


def test_a_dump_from_before_what_the_others_did(tmp_path, capsys):
    """Its rank was killed.  It may have called what the other ranks completed after that dump."""
    made = [crafted("all_reduce", n) for n in range(20)]
    for rank in (0, 2):
        write(tmp_path, rank, 3, [*made, crafted("barrier", 20, "failed")])
    write(tmp_path, 1, 3, made[:3], 3_500_000)
    text = read(tmp_path, capsys, 1)
    assert "3 dumps of 3 ranks; 3 collectives" in text
    came = "ranks 0, 2 called it at train.py:30; older than that: the dump of rank 1\n"
    assert f"\nworld: barrier #20 of float32[4]: rank 1 did not arrive; {came}" in text
    write(tmp_path, 0, 3, [crafted("recv 0<-1", 20, "failed", p2p=True, record_id=0)])
    said = "recv 0<-1 #20 of float32[4] at train.py:30; rank 1's call is not known: its dump is older\n"
    assert f"\nworld: rank 0 did not complete {said}" in read(tmp_path, capsys, 1)


def test_calls_that_are_queued_on_streams(tmp_path, capsys):
    """kos does not check whether they have run.  This is no fault, unless they are old and a rank is missing."""
    queued = [crafted("all_reduce", n, "scheduled") for n in range(4)]
    write(tmp_path, 0, 2, queued)
    write(tmp_path, 1, 2, queued[:2])
    assert "rank 0: world: all_reduce #3 of float32[4]: scheduled" in read(tmp_path, capsys, 0)
    late = json.loads((tmp_path / "rank_0.json").read_text()) | {"time_dumped_ns": 5_000_000_000}
    (tmp_path / "rank_0.json").write_text(json.dumps(late))
    assert "world: all_reduce #2 of float32[4]: rank 1 did not arrive" in read(tmp_path, capsys, 1)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (b'{"version": "2.10", "ra', "JSONDecodeError: Unterminated string starting at: line 1 column 21"),
        (b"PK\xff\xfe", "UnicodeDecodeError"),
        (b"[]", "TypeError"),
        (b"{}", "one without 'version'"),
        (b'{"version": "1.0"}', "ValueError: version '1.0'"),
        (b'{"version": "2.1", "rank": 0, "world_size": 1, "pg_config": 3}', "AttributeError"),
        (b'{"version": "2.1", "rank": 2, "world_size": 2, "pg_config": {}, "entries": []}', "ValueError: rank 2 of 2"),
        (damaged(collective_seq_id="x"), "ValueError: invalid literal for int() with base 10: 'x'"),
        (damaged(input_dtypes=[[]]), "TypeError: unhashable type: 'list'"),
        (damaged(is_p2p=True), "ValueError: not enough values to unpack"),
        (damaged(time_discovered_completed_ns="x"), "ValueError: invalid literal"),
        (None, "no such file or folder"),
    ],
)
def test_files_that_are_no_dumps(tmp_path, capsys, text, got):
    file = tmp_path / "bad.json"
    if text is not None:
        file.write_bytes(text)
    assert main([str(file)]) == 2
    said = capsys.readouterr().err
    expected = "a flight record of version 2" if text is not None else "a dump or a folder of dumps"
    assert f"kos: error: {file}: expected {expected}, got {got}" in said and said.count("\n") == 1


def test_a_truncated_dump_leaves_the_good_ones_readable(tmp_path, capsys):
    """The file is named, and its rank does not count as one that wrote no dump.

    The exit status is not that of a healthy job.
    """
    for rank in range(3):
        write(tmp_path, rank, 3, [crafted("all_gather", 0)])
    whole = tmp_path / "rank_1.json"
    whole.write_bytes(whole.read_bytes()[:-30])
    text = read(tmp_path, capsys, 1)
    assert text.startswith("2 dumps of 3 ranks; 1 collective that these ranks made alike\n")
    assert f"\nnot read: {whole}: expected a flight record of version 2, got JSONDecodeError: " in text
    assert "nothing is wrong in these; no dump of rank 1; the last operation of each rank:" in text
    stuck = json.loads((tmp_path / "rank_0.json").read_text())
    stuck["entries"][-1] |= {"state": "started"}
    (tmp_path / "rank_0.json").write_text(json.dumps(stuck))
    assert "\nno dump of rank 1: lost, killed, or stuck, or not read\n" in read(tmp_path, capsys, 1)
    with pytest.raises(DataError, match=r"rank_1\.json: expected a flight record"):
        load([tmp_path])
    assert [dump.rank for dump in load([tmp_path], [])] == [0, 2]


def test_dumps_that_do_not_belong_together(tmp_path, capsys):
    write(tmp_path, 0, 2, [])
    good = str(tmp_path / "rank_0.json")
    assert main([good, good]) == 2
    assert "second one of rank 0" in capsys.readouterr().err
    for mine, other in ({}, {"size": 3}), ({"job": "a"}, {"job": "b"}):
        for rank, of_rank in enumerate((mine, other)):
            write(tmp_path, rank, **{"size": 2, "entries": []} | of_rank)
        assert main([str(tmp_path)]) == 2
        said = [f" ({each['job']})" if "job" in each else "" for each in (mine, other)]
        expected = f"expected a dump of the job of rank 0's{said[0]}, got one of another job{said[1]}"
        assert f"rank_1.json: {expected}" in capsys.readouterr().err


def test_the_trace(tmp_path):
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


def test_an_output_that_is_not_read_is_no_error(tmp_path):
    """If a reader has ended (``| head -1``) or stdout is closed, there is no traceback and no other exit status."""
    write(tmp_path, 0, 1, [])
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kos.comm.recorder", str(tmp_path)]
    for start in ([], ["sh", "-c", 'exec "$@" >&-', "sh"]):
        done = subprocess.run([*start, *command], stdout=writer, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, b"")
    os.close(writer)


def test_pytorchs_own_analyzer_reads_the_dumps():
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    config = pytest.importorskip("torch.distributed.flight_recorder.components.config_manager")
    if tuple(map(int, version("torch").split(".")[:2])) < (2, 12):
        pytest.skip("the analyzer of this torch knows the backends nccl and xccl alone")

    def body(comm):
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
