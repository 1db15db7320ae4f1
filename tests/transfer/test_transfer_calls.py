"""Weights from M ranks to N: deadlines, threads, closing, forks, and ranks of a subscriber that are late or lost."""

import gc
import os
import queue
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos.errors import CollectiveTimeout, InvalidArgument, RankLost, TransferError, TransferTimeout
from kos.testing import spawn
from kos.transfer import Placement, Publisher, Subscriber, exchange
from kos.transfer.local_arrays import LocalArrays
from tests.transfer.layouts import WHOLE, tensor, zero
from tests.transfer.publishing import arrays_of, before_reads, expect_version, publishing

ROOT = Path(__file__).parents[2]


def outcome(call: Callable[[], Any]) -> Any:
    """The result or the exception of a call in another thread, which has ended."""
    found: queue.Queue[Any] = queue.Queue()
    in_thread(call, found)
    return found.get(timeout=60)


def in_thread(call: Callable[[], Any], found: "queue.Queue[Any]") -> None:
    """Start a thread that puts the result or the exception of a call in ``found``."""
    def run() -> None:
        try:
            found.put(call())
        except Exception as error:
            found.put(error)

    threading.Thread(target=run, daemon=True).start()


# --- ranks of a subscriber ------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True])
def test_a_late_or_lost_subscriber_rank_is_named_and_the_others_go_on(lost):
    """The error names the rank, the publisher and the version.  ``cause`` is the failure of the communicator."""
    with publishing([WHOLE]) as ranks:
        ranks.publish(7)
        late = threading.Event()

        def subscribe(comm):
            with Subscriber(ranks.address, arrays_of(WHOLE), comm=comm) as reader:
                assert reader.update(30).version == 7
                if comm.rank == 1:
                    if lost:
                        comm.abort(reason="it was killed")
                        return ""
                    assert late.wait(60)
                with pytest.raises(TransferError) as raised:
                    reader.update(30 if lost else 2)
                late.set()
            error = raised.value
            assert isinstance(error, TransferTimeout) == (not lost) and error.ranks == (1,)
            assert error.cause is error.__cause__ and isinstance(error.cause, RankLost if lost else CollectiveTimeout)
            with comm.shrink() as others, Subscriber(ranks.address, arrays_of(WHOLE), comm=others) as again:
                assert again.update(30).version == 7
            return str(error)

        texts = spawn(subscribe, 2, timeout=60)
        for text in texts[: 2 - lost]:
            named = rf"update from publisher trainer at {ranks.address}, which had version 7: .* subscriber rank 1"
            assert re.match(named, text) and "comm.shrink()" in text
            if not lost:
                seconds = re.search(r"not complete after ([\d.]+) s", text)
                assert seconds and float(seconds[1]) <= 2 and len(seconds[1]) < 7  # it waited no longer


def test_a_rank_that_is_lost_while_a_version_is_read_is_named_with_the_version():
    with publishing([WHOLE]) as ranks:
        ranks.publish(7)

        def subscribe(comm):
            with Subscriber(ranks.address, arrays_of(WHOLE), comm=comm) as reader:
                act = comm.abort if comm.rank == 1 else lambda: None
                acts[comm.rank] = act
                with pytest.raises(TransferError) as raised:
                    reader.update(30)
                assert reader.version is None
                return str(raised.value)

        acts = dict[int, Callable[[], object]]()
        with before_reads(lambda: acts[1](), rank=1):
            text = spawn(subscribe, 2, timeout=60)[0]
        assert re.match(rf"update from publisher trainer at {ranks.address} to version 7: .* subscriber rank 1", text)


@pytest.mark.parametrize("wrong", ["timeout", "verify", "closed"])
def test_a_wrong_argument_of_update_on_one_rank_leaves_the_communicator_intact(wrong):
    """As does a subscriber that one rank has closed: its error is raised on all ranks."""
    with publishing([WHOLE]) as ranks:
        ranks.publish(7)

        def subscribe(comm):
            arrays = arrays_of(WHOLE)
            with Subscriber(ranks.address, arrays, comm=comm) as subscriber:
                kind, arguments = TransferError, {"timeout": 60}
                if comm.rank == 1 and wrong == "closed":
                    subscriber.close()
                elif comm.rank == 1:
                    kind, arguments = InvalidArgument, {wrong: -1}
                with pytest.raises(kind, match=wrong) as caught:
                    subscriber.update(**arguments)
                assert comm.rank == 1 or (caught.value.ranks == (1,) and caught.value.cause is None)
                if wrong != "closed":
                    assert subscriber.update(60).version == 7
            with Subscriber(ranks.address, arrays, comm=comm) as again:
                again.update(60)
            expect_version(arrays, 7)

        spawn(subscribe, 2, timeout=60)


def test_a_publisher_tells_whom_it_refused(monkeypatch, caplog):
    with publishing([WHOLE]) as ranks:
        monkeypatch.setenv("KOS_SECRET", "another one")
        with Subscriber(ranks.address, arrays_of(WHOLE)) as stranger, pytest.raises(TransferError, match="secret"):
            stranger.update(60)
        deadline = time.monotonic() + 60
        while "refused subscriber rank 0 at" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "rank 0 refused subscriber rank 0 at 127.0.0.1: expected the secret of this publisher" in caplog.text


# --- threads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["update", "catalogue", "plan"])
def test_a_second_thread_in_a_subscriber_is_refused(call):
    """The second thread gets an error, and the first one goes on."""
    with publishing([WHOLE]) as ranks:
        ranks.publish(1)
        arrays, found = arrays_of(WHOLE), list[Any]()
        reader = Subscriber(ranks.address, arrays)
        with reader, before_reads(lambda: found.append(outcome(lambda: getattr(reader, call)(30)))):
            assert reader.update(30).version == 1
        expect_version(arrays, 1)
    (error,) = found
    here = rf"{re.escape(__file__)}:\d+"
    assert isinstance(error, TransferError) and re.match(
        rf"subscriber to {ranks.address}: two threads call it at once: update at {here} and {call} at {here}; order "
        "their calls, or give each thread a Subscriber of its own", str(error)
    ), error  # fmt: skip


# --- closing --------------------------------------------------------------------------------------------


def test_a_closed_subscriber_is_refused():
    with publishing([WHOLE]) as ranks:
        ranks.publish(1)
        reader = Subscriber(ranks.address, arrays_of(WHOLE))
        reader.update(30)
        reader.close()
        for call in (reader.update, reader.catalogue, reader.plan):
            expected = f"subscriber to {ranks.address}: expected an open subscriber, got a closed one"
            with pytest.raises(TransferError, match=expected):
                call(30)
        reader.close()
        assert reader.version == 1


def files_of_publishers() -> int:
    """How many descriptors of a publisher's memory this process has."""
    gc.collect()
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own
            found += "memfd:kos-transfer" in os.readlink(f"/proc/self/fd/{each}")
    return found


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_subscriber_that_another_thread_closes_says_so(transport):
    """The error does not blame the publisher, whose memory is unmapped when the update has ended."""
    with publishing([WHOLE]) as ranks:
        ranks.publish(1)
        before, reader = files_of_publishers(), Subscriber(ranks.address, arrays_of(WHOLE), transport=transport)
        closed = f"subscriber to {ranks.address}: expected an open subscriber, got one that another thread closed"
        with before_reads(lambda: outcome(reader.close)), pytest.raises(TransferError, match=f"{closed} during update"):
            reader.update(30)
        assert files_of_publishers() == before


def test_a_subscriber_that_is_closed_while_it_waits_for_a_version_says_so():
    with publishing([WHOLE]) as ranks:
        reader, found = Subscriber(ranks.address, arrays_of(WHOLE)), queue.Queue[Any]()
        reader.catalogue(30)
        for _ in range(2):
            in_thread(lambda: reader.update(60), found)
        assert "two threads" in str(found.get(timeout=30))  # so the other thread waits in update
        reader.close()
        assert "got one that another thread closed during update" in str(found.get(timeout=30))


def test_a_publisher_that_is_closed_during_publish_frees_its_memory_afterwards():
    """The publish waits for the lease of a reader, which ends with the connection."""
    before, found, publisher = files_of_publishers(), queue.Queue[Any](), Publisher(None, arrays_of(WHOLE), patience=60)
    publisher.publish(0)

    def close_during_publish():
        publisher.publish(1)  # into the other buffer
        for version in (2, 3):
            in_thread(lambda version=version: publisher.publish(version), found)
        refused = "publisher trainer: two threads call it at once: publish at .* and publish at"
        assert re.match(refused, str(found.get(timeout=60)))
        publisher.close()

    reader = Subscriber(publisher.address, arrays_of(WHOLE))
    with reader, before_reads(close_during_publish), pytest.raises(TransferError, match="publisher"):
        reader.update(60, verify=True)
    assert found.get(timeout=60) in (0, 1)
    with pytest.raises(TransferError, match="publisher trainer: expected an open publisher, got a closed one"):
        publisher.publish(4)
    assert files_of_publishers() == before


def test_a_subscriber_that_is_dropped_leaves_no_file():
    with publishing([WHOLE]) as ranks:
        ranks.publish(1)
        before = files_of_publishers()
        reader: Any = Subscriber(ranks.address, arrays_of(WHOLE), transport="shared")
        reader.update(30)
        assert files_of_publishers() > before
        del reader
        assert files_of_publishers() == before


FORKS = """
    import os, sys
    import numpy as np
    from kos.errors import TransferError
    from kos.transfer import Placement, Publisher, Subscriber

    whole = Placement.whole((4,))
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    with Publisher(None, {"w": (x, whole)}) as publisher:
        publisher.publish(1)
        with Subscriber(publisher.address, {"w": (y, whole)}, transport=sys.argv[1]) as reader:
            reader.update(30)
            publisher.publish(2)
            if not (child := os.fork()):
                for call in (lambda: publisher.publish(3), lambda: reader.update(30), lambda: reader.catalogue(30)):
                    try:
                        print("not refused", call(), flush=True)
                    except TransferError as error:
                        print(error, flush=True)
                reader.close()
                publisher.close()
                os._exit(0)
            os.waitpid(child, 0)
            print(reader.update(30).version, publisher.publish(3), reader.update(30).version)
"""


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_forked_process_is_refused(transport):
    """Its ``close`` does not close the Publisher and the Subscriber of its parent."""
    command = [sys.executable, "-c", textwrap.dedent(FORKS), transport]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert not ran.returncode, ran.stderr
    *refused, last = ran.stdout.splitlines()
    assert last == "2 0 3" and len(refused) == 3
    assert refused[0].startswith("publisher trainer: this process was forked from the one that made it")
    for each in refused[1:]:
        assert re.match("subscriber to .*: this process was forked from the one that made it", each)


# --- deadlines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stalls", [False, True])
def test_a_timeout_that_is_too_short_for_the_bytes_says_how_many_came(stalls, before_call):
    """The publisher sends a few MiB now and then, or nothing more after the first ones."""
    count, ends, sent = 16 << 20, threading.Event(), list[int]()

    def slow(array):
        if threading.current_thread().name.startswith("kos-publisher"):
            sent.append(array.nbytes)
            ends.wait((60 if len(sent) > 2 else 0) if stalls else 0.4)

    before_call(exchange, "as_bytes", slow)
    x, placed = np.ones(count, np.float32), Placement.whole((count,))
    with (
        Publisher(None, {"w": (x, placed)}) as publisher,
        Subscriber(publisher.address, {"w": (np.zeros_like(x), placed)}, transport="tcp", streams=1) as reader,
    ):
        publisher.publish(1)
        with pytest.raises(TransferTimeout, match="publisher rank 0 .*, from which w should come") as raised:
            reader.update(2)
        ends.set()
        ending = r"none in the last [\d.]+ s" + "|more were arriving: give update a longer timeout" * (not stalls)
        expected = rf"expected ([\d,]+) bytes before the deadline, got ([\d,]+), and ({ending})"
        counts = re.search(expected, str(raised.value))
        assert counts and raised.value.ranks == (0,)
        total, got = (int(each.replace(",", "")) for each in counts.groups()[:2])
        assert total == 4 * count and 0 < got < total


def test_the_deadline_ends_a_read_for_which_bytes_are_always_there():
    """The reader converts and transposes them, which is slower than the socket."""
    placed = Placement.whole((4 << 10, 4 << 10))
    with Publisher(None, {"w": (np.zeros(placed.shape, ml_dtypes.float8_e4m3fn), placed)}) as publisher:
        publisher.publish(1)
        arrays = {"w": (np.zeros(placed.shape[::-1], np.float32), placed.transposed)}
        with Subscriber(publisher.address, arrays, transport="tcp", streams=1) as reader:
            reader.update(60)
            publisher.publish(2)
            began = time.monotonic()
            reader.update(60)
            seconds = time.monotonic() - began
            publisher.publish(3)
            with pytest.raises(TransferTimeout):
                reader.update(seconds / 20)
            assert reader.version == 2


def test_a_copy_on_the_host_that_is_too_late_ends():
    array = np.zeros(4, np.float32)
    held = LocalArrays({"w": (array, Placement.whole((4,)))}, True)
    with pytest.raises(TransferTimeout, match="expected the end of the copy before the deadline, got 0 of 16 bytes"):
        held.copy(0, [(held.flat["w"], np.ones(4, np.float32))], time.monotonic() - 1)
    held.copy(0, [(held.flat["w"], np.ones(4, np.float32))], time.monotonic() + 60)
    assert (array == 1).all()


def test_the_catalogue_of_a_publisher_that_has_ended_is_an_error_at_once():
    """``update`` raises the same error.  After a restart, the plan is that of the new publisher."""
    with publishing([zero(rank, 2) for rank in range(2)]) as ranks:
        ranks.publish(1)
        reader = Subscriber(ranks.address, arrays_of(tensor(0, 2)))
        assert {rank for rank, _ in reader.plan(30).traffic()} == {0, 1}
    for call in (reader.catalogue, reader.plan, reader.update):
        with pytest.raises(TransferError, match=f"publisher trainer at {ranks.address}.*: expected it to") as raised:
            call(5)
        assert not isinstance(raised.value, TransferTimeout)
    with publishing([WHOLE], address=ranks.address):
        assert {rank for rank, _ in reader.plan(30).traffic()} == {0}
    reader.close()
