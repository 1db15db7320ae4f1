"""Ranks of one host in different PID or network namespaces (containers) share no memory, and say why."""

import os
import shutil
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.host.shared import open_segment, segment
from kos.errors import BackendUnavailable
from tests.comm.tcp_ranks import TIMEOUT, finish, free_port, run_ranks, start

PID = "the ranks of this host are in different PID namespaces (containers: share them, as with --pid=host)"
PROGRAM = """
import kos
with kos.init("tcp", timeout=60) as comm:
    [row] = [line for line in comm.explain().splitlines() if line.startswith("shared memory")]
    print(" ".join(row.split()))
    x = comm.allocate(4, "float32")
    try:
        comm.views(x)
    except kos.errors.BackendUnavailable as error:
        print(error)
"""


def namespaces(monkeypatch: pytest.MonkeyPatch, **of_ranks: str) -> Any:
    """Give the thread of a rank its namespaces: character r of ``pid`` and ``net``.  Returns what sets the rank."""
    here, usual = threading.local(), os.readlink

    def readlink(path: Any) -> str:
        kind = str(path).rpartition("/")[2]
        return of_ranks[kind][here.rank] if kind in of_ranks and hasattr(here, "rank") else usual(path)

    monkeypatch.setattr(segment.os, "readlink", readlink)
    return lambda rank: setattr(here, "rank", rank)


@pytest.mark.skipif(bool(segment.unavailable), reason=f"needs the compiled core: {segment.unavailable}")
@pytest.mark.parametrize(
    ("spaces", "expected"),
    [
        ({"pid": "ab", "net": "nn"}, [PID] * 2),
        ({"pid": "aab", "net": "nnn"}, [f"2 ranks of this host share; {PID}"] * 2 + [PID]),
        ({"pid": "aa", "net": "nm"}, [PID.replace("PID", "network").replace("--pid", "--network")] * 2),
        (
            {"pid": "ab", "net": "nm"},
            [PID.replace("PID", "PID and network").replace("--pid=host", "--pid=host and --network=host")] * 2,
        ),
        ({"pid": "aa", "net": "nn"}, ["2 ranks of this host share"] * 2),
    ],
)
def test_the_reason_is_the_same_on_all_ranks(spaces, expected, monkeypatch):
    be = namespaces(monkeypatch, **spaces)

    def body(rendezvous):
        be(rendezvous.rank)
        found, text = open_segment(rendezvous)
        assert found is not None
        found.close()
        size = text.find(" up to ")
        return text if size < 0 else text[:size] + text[text.index("KiB") + 3 :]

    assert run_ranks(len(spaces["pid"]), body) == expected


def test_the_descriptor_of_another_namespace_is_never_opened(monkeypatch):
    """There, its number may belong to another process, and the file may be one that the program writes."""
    be, usual, opened = namespaces(monkeypatch, pid="ab"), os.open, list[str]()

    def body(rendezvous):
        be(rendezvous.rank)
        with kos.init("tcp", rendezvous=rendezvous, timeout=TIMEOUT) as comm:
            monkeypatch.setattr(os, "open", lambda path, *more: opened.append(str(path)) or usual(path, *more))
            x = comm.allocate(3, np.float32)
            with pytest.raises(BackendUnavailable) as refused:
                comm.views(x)
            assert str(refused.value) == f"views: the ranks share no memory: {PID}"

    run_ranks(2, body)
    assert not [path for path in opened if path.startswith("/proc/")]


def test_processes_in_pid_namespaces_of_their_own():
    """Both have the same PID there."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare (util-linux)")
    apart = [unshare, "--pid", "--fork", "--mount-proc", "--kill-child"]
    tried = subprocess.run([*apart, "true"], capture_output=True, text=True, timeout=20)
    if tried.returncode:
        pytest.skip(f"needs PID namespaces: {tried.stderr.strip()}")
    port = free_port()
    ranks = [start([*apart, sys.executable, "-c", PROGRAM], rank, 2, port) for rank in range(2)]
    reason = PID if not segment.unavailable else segment.unavailable
    expected = f"shared memory no {reason}\nviews: the ranks share no memory: {PID}\n"
    assert finish(ranks) == [(0, expected)] * 2
