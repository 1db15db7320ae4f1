"""Weights from M ranks to N: what lasts. Connections, memory, sockets, threads."""

import os
import threading
import time
from pathlib import Path

import pytest

from kos.errors import TransferError
from kos.transfer import Publisher, Subscriber, read_catalogue
from kos.transfer.buffers import Buffers
from kos.transfer.publisher import VersionLeases
from tests.transfer.layouts import WHOLE, zero
from tests.transfer.publishing import arrays_of, before_reads, expect_version, publishing, set_version

SERVING = "kos-publisher-connection"


def serving() -> int:
    """The threads of a publisher that answer a subscriber."""
    return sum(thread.name == SERVING for thread in threading.enumerate())


def test_a_subscriber_goes_on_after_the_publisher_has_closed_idle_connections(monkeypatch):
    monkeypatch.setattr("kos.transfer.publisher.IDLE_SECONDS", 0.2)
    arrays, mine = arrays_of(WHOLE), arrays_of(WHOLE)
    with Publisher(None, mine) as publisher, Subscriber(publisher.address, arrays, transport="tcp") as reader:
        for version in (1, 2):
            set_version(mine, version)
            publisher.publish(version)
            assert reader.update(30).version == version
            expect_version(arrays, version)
            limit = time.monotonic() + 30
            while serving() and time.monotonic() < limit:
                time.sleep(0.01)


def test_checksums_are_known_until_the_buffer_is_written(before_call):
    """A read with verification just before is right, and no bytes have changed."""
    arrays, mine = arrays_of(WHOLE), arrays_of(WHOLE)
    writes, may_write = threading.Event(), threading.Event()

    def slow(*arguments):
        writes.set()
        may_write.wait(30)

    with Publisher(None, mine, patience=0.0, checksums=True, buffers=1) as publisher:
        set_version(mine, 1)
        publisher.publish(1)
        thread = threading.Thread(target=publisher.publish, args=(2,), daemon=True)

        def publish():
            before_call(Buffers, "write", slow)
            thread.start()
            assert writes.wait(30)

        with before_reads(publish), Subscriber(publisher.address, arrays) as reader:
            assert reader.update(30, verify=True).version == 1
        may_write.set()
        thread.join(30)
    expect_version(arrays, 1)


def test_the_end_of_a_lease_is_not_waited_for(monkeypatch):
    """All bytes are there: a publisher that stops now delays nobody."""
    stopped = threading.Event()
    monkeypatch.setattr(VersionLeases, "release", lambda *_: stopped.wait(30))
    with Publisher(None, arrays_of(WHOLE)) as publisher:
        publisher.publish(0)
        readers = [Subscriber(publisher.address, arrays_of(WHOLE), transport="shared") for _ in range(3)]
        try:
            assert min(reader.update(30).seconds for reader in readers) < 1.5  # an answer is waited for 2 s
        finally:
            stopped.set()
            for each in readers:
                each.close()


def mapped(inode: int) -> int:
    """How often this process maps a file."""
    return sum(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


def test_close_frees_the_memory():
    """Although the objects are still there."""
    publisher = Publisher(None, arrays_of(WHOLE))
    publisher.publish(1)
    inode = os.fstat(read_catalogue(publisher.address).ranks[0].file).st_ino
    subscriber = Subscriber(publisher.address, arrays_of(WHOLE), transport="shared")
    subscriber.update(30)
    assert mapped(inode) == 2
    subscriber.close()
    assert mapped(inode) == 1
    publisher.close()
    assert mapped(inode) == 0
    publisher.close()
    with pytest.raises(TransferError, match="expected an open publisher"):
        publisher.publish(2)


def test_what_was_mapped_before_an_error_is_unmapped():
    """The memory of one rank can be mapped, and that of the other one cannot."""
    with publishing([zero(rank, 2) for rank in range(2)]) as ranks:
        ranks.publish(1)
        inode = os.fstat(read_catalogue(ranks.address).ranks[0].file).st_ino
        with Subscriber(ranks.address, arrays_of(WHOLE), transport="shared") as subscriber:
            known = subscriber.catalogue(30)
            known.ranks[1] = known.ranks[1]._replace(place="another host")
            with pytest.raises(TransferError, match="publisher rank 1 .* can map, got: it is on another host"):
                subscriber.update(30)
            assert mapped(inode) == 1  # by the publisher


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["shorter", "pipe", "closed"])
def test_a_descriptor_that_is_another_file_is_not_mapped(what, tmp_path):
    """As after the publisher's process id was given to another process: neither an error nor a wait for the pipe."""
    os.mkfifo(tmp_path / "pipe")
    arrays, mine = arrays_of(WHOLE), arrays_of(WHOLE)
    with Publisher(None, mine) as publisher:
        set_version(mine, 1)
        publisher.publish(1)
        pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # a reader waits for who writes to it
        file = os.memfd_create("other")
        other = {"shorter": file, "pipe": pipe, "closed": 1 << 20}[what]
        with Subscriber(publisher.address, arrays) as reader:
            known = reader.catalogue(30)
            known.ranks[0] = known.ranks[0]._replace(file=other)
            assert reader.update(30).version == 1
        expect_version(arrays, 1)
        os.close(file)
        os.close(pipe)


def test_a_publisher_goes_on_after_a_thread_could_not_start(monkeypatch):
    """The one caller is gone; the next one is served."""
    start, failed = threading.Thread.start, list[str]()

    def once(thread):
        if thread.name == SERVING and not failed:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", once)
    with Publisher(None, arrays_of(WHOLE)) as publisher:
        publisher.publish(1)
        with Subscriber(publisher.address, arrays_of(WHOLE)) as reader:
            assert reader.update(30).version == 1
    assert failed
