"""Weights from M ranks to N: every layout against NumPy, versions, leases, checksums, refusals."""

import threading
import time
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

from kos.errors import CollectiveMismatch, TransferError, TransferTimeout
from kos.testing import spawn
from kos.transfer import Placement, Publisher, Subscriber, exchange
from kos.transfer.exchange import GRACE
from tests.transfer.layouts import FUSED, WHOLE, last_alone, one_array, stages, tensor, zero, zero_of_tensor
from tests.transfer.publishing import (
    SHAPES,
    arrays_of,
    before_reads,
    contents,
    corrupt,
    expect_version,
    planned_bytes,
    publishing,
    set_version,
)

TRANSPORTS = pytest.mark.parametrize("transport", ["shared", "tcp"])


@contextmanager
def both(**options):
    """Source arrays and their publisher, target arrays and their subscriber; ``options`` are those of the publisher."""
    transport = options.pop("transport", "auto")
    arrays, mine = arrays_of(WHOLE), arrays_of(WHOLE)
    with (
        Publisher(None, mine, **options) as publisher,
        Subscriber(publisher.address, arrays, transport=transport) as reader,
    ):
        set_version(mine, 1)
        publisher.publish(1)
        yield mine, publisher, arrays, reader


@pytest.mark.parametrize(
    ("publishers", "subscribers", "transport"),
    [
        pytest.param([zero(r, 2) for r in range(2)], [tensor(r, 2) for r in range(2)], "shared", id="ZeRO-1 to tp2"),
        pytest.param([zero(r, 3) for r in range(3)], [tensor(r, 2) for r in range(2)], "tcp", id="3 to 2"),
        pytest.param([tensor(r, 2) for r in range(2)], [tensor(r, 3) for r in range(3)], "shared", id="tp2 to tp3"),
        pytest.param([zero_of_tensor(r) for r in range(4)], [WHOLE], "tcp", id="dp2 x tp2, ZeRO, to 1"),
        pytest.param([stages(r, 2) for r in range(2)], [FUSED], "shared", id="pp2 to fused and transposed"),
        pytest.param([one_array(r, 2) for r in range(2)], [tensor(1, 2)], "tcp", id="one flat array to tp2"),
        pytest.param([last_alone(r, 2) for r in range(2)], [tensor(0, 2)], "tcp", id="a rank without arrays"),
        pytest.param([WHOLE], [tensor(r, 2) for r in range(2)], "shared", id="1 to tp2"),
    ],
)
def test_layouts(publishers, subscribers, transport):
    """Each rank gets its elements, and reads as many bytes as planned."""
    def subscribe(comm):
        arrays = arrays_of(subscribers[comm.rank])
        with Subscriber(address, arrays, comm=comm, transport=transport) as subscriber:
            for version in (1, 2, 3):
                if version > 1:
                    published.wait()
                first = subscriber.update(30, verify=version == 3)
                expect_version(arrays, version)
                assert (first.version, first.changed, subscriber.version) == (version, True, version)
                assert first.nbytes == planned_bytes(publishers, subscribers[comm.rank], rank=comm.rank)
                assert not subscriber.update(30).changed
                done.wait()

    with publishing(publishers, checksums=True) as ranks:
        address = ranks.address
        done, published = (threading.Barrier(len(subscribers) + 1, timeout=60) for _ in range(2))

        def drive():
            for version in (2, 3):
                done.wait()
                assert ranks.publish(version) == [0] * len(publishers)
                published.wait()
            done.wait()

        assert ranks.publish(1) == [0] * len(publishers)
        thread = threading.Thread(target=drive, daemon=True)
        thread.start()
        spawn(subscribe, len(subscribers), timeout=60)
        thread.join(60)


@TRANSPORTS
def test_conversions(transport):
    """fp32 to bf16 and fp8, and bf16 to fp32; over TCP the smaller of both types travels."""
    with publishing([WHOLE]) as ranks:
        ranks.publish(0)
        for dtype in (ml_dtypes.bfloat16, np.float16, np.float64, ml_dtypes.float8_e5m2):
            arrays = arrays_of({"a.weight": WHOLE["a.weight"]}, dtype)
            with Subscriber(ranks.address, arrays, transport=transport) as subscriber:
                got = subscriber.update(30)
                expect_version(arrays, 0)
                if transport == "tcp":
                    assert got.nbytes == planned_bytes([WHOLE], {"a.weight": WHOLE["a.weight"]}, dtype)


@TRANSPORTS
def test_large_tensors_are_split(transport):
    """Requests are of at most a few MiB, over several connections."""
    shape, rng = (3000, 2000), np.random.default_rng(0)
    x = rng.random(shape, dtype=np.float32)
    with Publisher(None, {"w": (x, Placement.whole(shape))}) as publisher:
        publisher.publish(1)
        for placed, right in (
            (Placement.whole(shape), x), (Placement.whole(shape).transposed, x.T),
            (Placement.cut(shape, 1, 500, 1000), x[:, 500:1500]),
        ):  # fmt: skip
            y = np.zeros(placed.shape, np.float32)
            with Subscriber(publisher.address, {"w": (y, placed)}, transport=transport, staged=False) as subscriber:
                subscriber.update(60)
                assert (y == right).all()


def test_no_version_yet_and_no_publisher_yet():
    """Both are waited for until the deadline, and named."""
    with publishing([WHOLE]) as ranks:
        arrays = arrays_of(WHOLE)
        with Subscriber(ranks.address, arrays) as subscriber:
            subscriber.catalogue(30)
            began = time.monotonic()
            expected = f"publisher trainer at {ranks.address}: expected a version before the deadline, got none: it has"
            with pytest.raises(TransferTimeout, match=f"{expected} published nothing yet"):
                subscriber.update(GRACE + 0.9)  # which asks twice: the publisher answers after ``GRACE`` seconds
            assert time.monotonic() - began > GRACE + 0.8
            assert subscriber.version is None
            timer = threading.Timer(0.2, lambda: ranks.publish(7))
            timer.start()
            assert subscriber.update(30).version == 7
            timer.join()
            address = ranks.address
    with Subscriber(address, arrays) as subscriber, pytest.raises(TransferTimeout, match=f"at {address}, which never"):
        subscriber.update(0.3)
    done = []
    late = threading.Thread(target=lambda: done.append(Subscriber(address, arrays).update(30).version), daemon=True)
    late.start()
    with Publisher(None, arrays_of(WHOLE), address) as publisher:
        publisher.publish(4)
        late.join(30)
    assert done == [4]


@TRANSPORTS
def test_a_version_that_is_replaced_while_it_is_read_is_stale(transport):
    """The publisher waits no longer than its patience; the reader begins again with the newest version."""
    with both(patience=0.05, transport=transport) as (mine, publisher, arrays, reader):
        late = list[int]()

        def publish_twice():
            for version in (2, 3):
                set_version(mine, version)
                late.append(publisher.publish(version))

        with before_reads(publish_twice):
            assert reader.update(30).version == 3
        expect_version(arrays, 3)
        assert late == [0, 1]


@TRANSPORTS
def test_a_publisher_waits_for_a_reader_within_its_patience(transport):
    """The buffer that is read is written again when the reader has its version."""
    late = list[int]()
    with both(patience=60, transport=transport) as (mine, publisher, arrays, reader):

        def publish():
            for version in (2, 3):
                set_version(mine, version)
                late.append(publisher.publish(version))

        thread = threading.Thread(target=publish, daemon=True)

        def publish_for_a_while():
            thread.start()
            thread.join(0.3)  # it does not end

        with before_reads(publish_for_a_while):
            assert reader.update(50).version == 1
        expect_version(arrays, 1)
        thread.join(30)
        assert late == [0, 0]
        assert reader.update(50).version == 3


def test_if_one_rank_reads_a_stale_version_all_begin_again():
    with publishing([WHOLE], patience=0.0) as ranks:
        ranks.publish(1)

        def subscribe(comm):
            arrays = arrays_of({[*SHAPES][comm.rank]: WHOLE[[*SHAPES][comm.rank]]})
            with Subscriber(ranks.address, arrays, comm=comm) as subscriber:
                comm.barrier()
                version = subscriber.update(30).version
                expect_version(arrays, version)
                return version

        with before_reads(lambda: (ranks.publish(2), ranks.publish(3)), rank=1):
            assert spawn(subscribe, 2, timeout=60) == [3, 3]


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_no_torn_version_is_seen(buffers):
    """A publisher that never waits, and readers that read all the time: each version is whole."""
    shape = (400, 250)
    x = np.zeros(shape, np.float32)
    stop, errors, seen = threading.Event(), list[BaseException](), list[int]()
    placed = {"w": (x, Placement.whole(shape))}
    with Publisher(None, placed, buffers=buffers, patience=0.0) as publisher:
        def read(transport):
            y = np.zeros(shape, np.float32)
            with Subscriber(publisher.address, {"w": (y, Placement.whole(shape))}, transport=transport) as reader:
                while not stop.is_set():
                    try:
                        update = reader.update(20)
                        assert y.min() == y.max() == update.version
                        seen.append(update.version)
                    except BaseException as error:
                        if not stop.is_set():
                            errors.append(error)
                        return

        threads = [threading.Thread(target=read, args=(by,), daemon=True) for by in ("shared", "tcp", "tcp")]
        for each in threads:
            each.start()
        for version in range(1, 150):
            x[...] = version
            publisher.publish(version)
            time.sleep(0.001)
        stop.set()
        for each in threads:
            each.join(60)
    assert not errors, errors
    assert seen and all(a <= 149 for a in seen)


@TRANSPORTS
@pytest.mark.parametrize("when", ["published", "read"])
def test_wrong_bytes_are_found_and_the_culprit_is_named(transport, when, monkeypatch):
    layouts = [stages(rank, 2) for rank in range(2)]  # rank 1 has b.weight and scale
    with publishing(layouts, checksums=True) as ranks:
        ranks.publish(1)
        arrays = arrays_of(WHOLE)
        with Subscriber(ranks.address, arrays, transport=transport) as subscriber:
            subscriber.update(30, verify=True)
            ranks.publish(2)
            if when == "published":  # a stray write in the process of rank 1
                corrupt(ranks.address, 1, contents(2)["b.weight"])
                wanted = "publisher rank 1 .*b.weight.*the published bytes have changed since"
            else:
                right = exchange.checksum

                def wrong(arrays):  # as if other bytes had arrived
                    of_reader = threading.current_thread().name.startswith("kos-subscriber")
                    return right([a + of_reader * (a.shape == (6, 6)) for a in arrays])

                monkeypatch.setattr(exchange, "checksum", wrong)
                wanted = "publisher rank 1 .*b.weight.*: expected checksum"
            with pytest.raises(TransferError, match=wanted) as raised:
                subscriber.update(30, verify=True)
            assert raised.value.ranks == (1,)
            expect_version(arrays, 1)
            assert subscriber.version == 1


def test_an_unstaged_update_that_fails_leaves_the_arrays_undefined():
    """There is no version until the next update, which still notices a restart."""
    arrays = arrays_of(WHOLE)
    with publishing([WHOLE], checksums=True) as ranks:
        subscriber = Subscriber(ranks.address, arrays, staged=False)
        for version in (1, 3):
            ranks.publish(version)
            assert not subscriber.update(30).restarted and subscriber.version == version
            expect_version(arrays, version)
            ranks.publish(version + 1)
            corrupt(ranks.address, 0, contents(version + 1)["norm"])
            with pytest.raises(TransferError, match="norm"):
                subscriber.update(30, verify=True)
            assert subscriber.version is None
    with publishing([WHOLE], address=ranks.address) as ranks, subscriber:
        ranks.publish(1)
        assert subscriber.update(30).restarted and not subscriber.update(30).restarted


def test_all_ranks_get_the_same_version_or_none():
    """The error of one subscriber rank is raised on all, and all keep the version from before."""
    with publishing([WHOLE], checksums=True) as ranks:
        ranks.publish(1)

        def subscribe(comm):
            arrays = arrays_of({[*SHAPES][comm.rank]: WHOLE[[*SHAPES][comm.rank]]})
            with Subscriber(ranks.address, arrays, comm=comm) as subscriber:
                subscriber.update(30)
                comm.barrier()
                if comm.rank == 0:
                    ranks.publish(2)
                    corrupt(ranks.address, 0, contents(2)["b.weight"])  # which rank 1 reads
                comm.barrier()
                with pytest.raises(TransferError) as raised:
                    subscriber.update(30, verify=True)
                expect_version(arrays, 1)
                assert subscriber.version == 1
                return str(raised.value)

        texts = spawn(subscribe, 2, timeout=60)
    assert "subscriber rank 1: trainer: publisher rank 0" in texts[0]
    assert "publisher rank 0" in texts[1] and "b.weight: the published bytes have changed" in texts[1]


def test_a_restarted_publisher_is_noticed():
    """It shrinks and grows under the same address, and goes on from an older version; the subscriber plans again."""
    arrays, made = arrays_of(tensor(0, 2)), set[int]()
    address, subscriber = "127.0.0.1:0", None
    for version, layouts in ((5, [zero(r, 3) for r in range(3)]), (3, [WHOLE]), (4, [tensor(r, 2) for r in range(2)])):
        with publishing(layouts, address=address) as ranks:
            address = ranks.address
            ranks.publish(version)
            subscriber = subscriber or Subscriber(address, arrays)
            update = subscriber.update(30)
            assert (update.version, update.changed, update.restarted) == (version, True, version != 5)
            expect_version(arrays, version)
            made.add(ranks.publishers[0].incarnation)
        gone = f"publisher trainer at .*, which had version {version}: expected it to answer"
        with pytest.raises(TransferError, match=gone):
            subscriber.update(30)
        expect_version(arrays, version)
    assert len(made) == 3
    subscriber.close()


def test_a_publish_that_is_refused_leaves_the_last_version_visible():
    """Also with one buffer, which it has not written."""
    with publishing([zero(rank, 2) for rank in range(2)], buffers=1) as ranks:
        assert ranks.publish(1) == [0, 0]
        errors = ranks.on_all(lambda rank: ranks.publishers[rank].publish(2 + rank))
        assert [type(each) for each in errors] == [CollectiveMismatch] * 2
        assert all("expected version 2 on all ranks, got 3 on rank 1" in str(error) for error in errors)
        arrays = arrays_of(WHOLE)
        with Subscriber(ranks.address, arrays) as subscriber:
            assert subscriber.update(30).version == 1
            expect_version(arrays, 1)
            assert ranks.publish(9) == [0, 0] and subscriber.update(30).version == 9
