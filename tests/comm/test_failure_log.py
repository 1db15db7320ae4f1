"""Which failure a rank raises and which ranks it names: ``FailureLog`` and ``PeerStatus``, without ranks."""

import pickle
import time
import weakref
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import pytest

from kos.comm import timeouts
from kos.comm.failures import FailureLog, PendingRanks
from kos.comm.peer_status import PeerStatus
from kos.errors import CollectiveMismatch, CollectiveTimeout, KosError, RankLost, from_record, to_record
from tests.comm.works import work_of


def test_a_posted_failure_holds_no_frames():
    """Its frames refer to memory and files of the failed call, which would otherwise be kept until the next call."""

    class Made:
        pass

    def fail():
        made = Made()
        try:
            raise RankLost(f"rank 1 is gone, {made} is left", ranks=[1])
        except RankLost as error:
            status.post_failure(error)
        return weakref.ref(made)

    status = PeerStatus(0)
    made = fail()
    assert made() is None
    known = status.failure(0)
    assert known is not None and known[0].ranks == (1,)
    assert status.last is not None and status.last.ranks == (1,)


def test_what_is_queued_may_change_while_another_thread_reads_it():
    status, first, second = PeerStatus(), SimpleNamespace, PeerStatus()
    status.post_queued(first, [1])
    reading = iter(status.queued.items())
    status.post_queued(second, [2])
    assert list(reading) == [(first, (1,))]
    assert status.queued == {first: (1,), second: (2,)}


def test_a_failure_of_an_earlier_collective_is_reported_too():
    """Other ranks may be waiting in that collective.  A failure of a later one is not reported."""
    log, reported = FailureLog(range(3), 0), list[int]()
    log.reporters = [SimpleNamespace(report_failure=lambda failure, sequence: reported.append(sequence))]
    for sequence in (5, 7, 3):
        log.report(work_of("barrier", sequence=sequence), RankLost(f"lost in #{sequence}", ranks=[1]), 0)
    assert reported == [5, 3]


class _Waits(PeerStatus):
    """What ranks show of their waits and failures; all of them run."""

    def __init__(self, waits: dict[int, tuple[int, ...]], failures: dict[int, KosError]) -> None:
        super().__init__()
        self._waits, self._failures = waits, failures

    def awaited(self, rank: int) -> tuple[int, ...] | None:
        return self._waits.get(rank)

    def failure(self, rank: int) -> tuple[KosError, float] | None:
        return (self._failures[rank], 0.1) if rank in self._failures else None

    def runs(self, rank: int) -> bool:
        return True


HOSTS = {0: ("host a", (0, 1)), 1: ("host a", (0, 1)), 2: ("host b", (2, 3)), 3: ("host b", (2, 3)), 4: ("c", (4,))}
ONE, TWO = (partial(PendingRanks, words=timeouts.UNKNOWN, others=[*range(1, size)], all_wait=True) for size in (2, 3))
THIRD = partial(PendingRanks, [3], "ranks [3] did not arrive")
BEYOND = f"ranks [2] {timeouts.GO_ON}, for which ranks [1] wait"
OVERDUE: dict[str, tuple[PendingRanks, dict[int, tuple[int, ...]], tuple[int, ...], str]] = {
    # In a barrier of mpi between hosts nobody knows who has not arrived; its GPU may wait.
    "the only other": (ONE(), {}, (1,), "ranks [1]"),
    "the only other, which waits": (ONE(), {1: (0,)}, (), "not known"),
    "the only other may wait for its GPU": (ONE(all_wait=False), {}, (), "not known"),
    # A native collective of mpi all ranks have begun, and some may have completed.
    "none waits": (TWO(), {}, (1, 2), "ranks [1, 2]"),
    "none waits: one may be done": (TWO(may_be_complete=True), {}, (), ""),
    "one waits": (TWO(may_be_complete=True), {1: (0,)}, (2,), "ranks [2]"),
    "all wait": (TWO(may_be_complete=True), {1: (2,), 2: (0,)}, (), ""),
    # A rank waits elsewhere, for ranks that wait for it; those of ``arrived`` wait for a stream, which nobody shows.
    "it waits for all": (THIRD(), {3: (0, 1, 2)}, (1, 2), "ranks [1, 2] did not arrive"),
    "the others have arrived": (THIRD((1, 2)), {3: (0, 1, 2)}, (3,), "ranks [3] did not arrive"),
    # A rank that is absent waits in another call, for one that may have begun both and stopped.
    "beyond the absent": (PendingRanks([1], absent=True), {1: (2,)}, (2,), BEYOND),
    "two in a cycle": (PendingRanks([1]), {1: (0,)}, (1,), "; ranks [0, 1] wait for one another"),
    "three in a cycle": (PendingRanks([1]), {1: (2,), 2: (0,)}, (1,), "; ranks [0, 1, 2] wait for one another"),
    "no cycle": (PendingRanks([1]), {1: (2,)}, (2,), BEYOND),
    # One that runs may wait for one that is stopped where nobody sees that: in a call of a library, for one.
    "rank 2 is stopped": (PendingRanks([1, 2]), {}, (2,), BEYOND),
    # A rank that is not known to be absent may have stopped within the call.
    **{f"{ranks} of hosts{', absent' * absent}":
       (PendingRanks(ranks, absent=absent), {}, tuple(ranks), named.format(how))
       for ranks, named in (([2, 3], "host b (ranks [2, 3]) {}"), ([3], "ranks [3] {}; rank 3 is on host b"),
                            ([1, 2, 3], "ranks [1, 2, 3] {}; rank 1 is on host a; ranks [2, 3] are on host b"),
                            ([4], "ranks [4] {}; rank 4 is on c"))
       for absent, how in ((True, timeouts.ARRIVE), (False, timeouts.GO_ON))},
}  # fmt: skip
"""Who is late, what ranks show of their waits, which ranks are named, and the words."""


@pytest.mark.parametrize("case", OVERDUE)
def test_who_is_late(case):
    late, waits, named, words = OVERDUE[case]
    status = _Waits(waits, {})
    status.halted = lambda rank: rank == 2 and "stopped" in case
    status.hosts = HOSTS if "of hosts" in case else {}
    error = FailureLog(range(5), 0, status).timeout_error(late, "all_reduce #1", 1.0)
    assert error.ranks == named and words in str(error), error
    assert ("wait for one another" in str(error)) == ("in a cycle" in case)
    assert "of hosts" not in case or str(error) == f"all_reduce #1: not complete after 1.0 s; {words}"


@pytest.mark.parametrize(("failures", "arrived", "named"), [({1: (3,), 2: (3,)}, (), (3,)), ({1: (1,)}, (2,), (1,))])
def test_a_rank_that_others_waited_for_when_their_time_was_up(failures, arrived, named):
    errors = {rank: CollectiveTimeout("late", ranks=list(ranks)) for rank, ranks in failures.items()}
    log = FailureLog(range(4), 0, _Waits({3: (0, 1, 2)}, errors))
    assert log.timeout_error(THIRD(arrived), "all_reduce #1", 1.0).ranks == named


def test_a_wait_for_ranks_of_other_groups():
    """The GPU runs the kernels of all communicators one after another."""
    failures = FailureLog([3, 0], 0, _Waits({2: (1,)}, {}))
    error = failures.timeout_error(PendingRanks(elsewhere=[2]), "all_reduce #1", 1.0)
    assert error.ranks == (1,) and "ranks [1] of world did not arrive" in str(error)


@pytest.mark.parametrize(
    ("handled", "waits", "named"),
    [(False, {}, (2,)), (True, {}, ()), (True, {1: (0, 2)}, (2,))],
    ids=["it has just ended", "it has left the call", "it is in another call"],
)
def test_a_rank_whose_own_timeout_named_no_rank_is_not_late(handled, waits, named):
    """That rank began the call, and has left it."""
    status = PeerStatus(0)
    known = PeerStatus(1, status)
    known.post_failure(CollectiveTimeout(timeouts.UNKNOWN))
    if handled:
        known.clear_failure()
    status.waits |= waits
    late = PendingRanks(words=timeouts.UNKNOWN, others=[1, 2], all_wait=True)
    log = FailureLog(range(3), 0, PeerStatus(0, status))
    assert log.timeout_error(late, "barrier #1", 0.001).ranks == named
    status.connect(_Plane())  # of a new group, in which ranks have other numbers
    assert log.timeout_error(late, "barrier #1", 0.001).ranks == tuple(rank for rank in (1, 2) if rank not in waits)


def test_a_timeout_without_ranks_is_no_cause():
    """It is neither the cause of a later failure nor that of a closed rank, and hides no failure that names ranks."""
    status = PeerStatus(0)
    log = FailureLog(range(2), 1, PeerStatus(1, status))
    PeerStatus(0, status).post_failure(CollectiveTimeout("late"))
    assert log.lost(0, CLOSED).ranks == log.timeout_error(PendingRanks([0], "late"), "barrier #1", 1.0).ranks == (0,)
    assert status.cause(0) is None and not log.suspects()
    mine = log.status
    mine.post_failure(RankLost("rank 0 is gone", ranks=[0]))
    mine.post_failure(CollectiveTimeout("late"))
    assert mine.last.ranks == status.cause(1).ranks == (0,)


def test_a_query_that_comes_before_a_wait_is_answered_in_it():
    """For example, the query comes between two calls of a program."""
    sent = list[tuple[str, object]]()
    status, plane = PeerStatus(1), _Plane()
    plane.send_notice = lambda kind, what=None, timeout=0.0: sent.append((kind, what))
    status.connect(plane)
    status.handle_notice(0, "query", None)
    assert not sent
    status.post_wait([0, 2])
    status.post_wait([0])
    status.handle_notice(2, "query", None)  # the answer went to all ranks
    assert sent == [("waits", (0, 2))]


@pytest.mark.parametrize("size", [3, 128, 129])
def test_a_rank_announces_its_wait_at_its_timeout(size):
    """On a busy machine, other ranks may ask while it looks for the late rank.

    A job of more than 128 ranks announces none.
    """
    sent = list[tuple[str, object]]()
    status, plane = PeerStatus(1), _Plane()
    plane.failures = SimpleNamespace(world=range(size))
    plane.send_notice = lambda kind, what=None, timeout=0.0: sent.append((kind, what))
    status.connect(plane)
    status.post_wait([0])
    FailureLog(range(size), 1, status).timeout_error(PendingRanks([0]), "barrier #1", 1.0)
    assert sent[:1] == ([("waits", (0,))] if size <= 128 else [])


@pytest.mark.parametrize(
    ("cause", "named"),
    [
        ("world: all_reduce #1 of int8[1]: late", ""),
        ("world: rank 1 called barrier #0, rank 2 split #0", "rank 1 called barrier #0, rank 2 split #0"),
        ("world.0:group: all_reduce #1 of int8[1]: late", "world.0:group: all_reduce #1 of int8[1]: late"),
    ],
)
def test_the_call_and_the_communicator_are_named_once(cause, named):
    """``named``: the part of the cause's text that follows the call in the error; "" if the cause has the same call."""
    call = "world: all_reduce #1 of int8[1]"
    log = FailureLog(range(3), 0, _Waits({}, {1: CollectiveTimeout(cause, ranks=[2])}))
    error = log.timeout_error(PendingRanks([1]), call, 1.0)
    assert str(error) == (f"{call}: {named}" if named else cause) + "; rank 1 failed because of it"
    log.first = CollectiveTimeout(cause)
    with pytest.raises(CollectiveTimeout) as caught:
        log.refuse(call)
    assert str(caught.value) == (f"{call}: the communicator failed before: {named}" if named else cause)


@pytest.mark.parametrize(
    ("late", "keeps", "named", "unasked"),
    [
        (PendingRanks([0, 1]), [0], "ranks [0] did not arrive or went no further; rank 0 is on host a", "[1]"),
        (PendingRanks([0, 1], absent=True), [0], "ranks [0] did not arrive; rank 0 is on host a", "[1]"),
        (PendingRanks([1], "rank 1 sent nothing"), [0], f"ranks [0] {timeouts.GO_ON}; rank 0 is on host a", "[1]"),
        (PendingRanks(others=[0, 1, 3], all_wait=True, may_be_complete=True), [0],
         f"ranks [0] {timeouts.GO_ON}, for which ranks [3] wait; rank 0 is on host a", "[1]"),
        (PendingRanks([0, 1]), [0, 1], f"host a (ranks [0, 1]) {timeouts.GO_ON}", ""),
        (PendingRanks([0, 1, 4]), [0, 1], f"host a (ranks [0, 1]) {timeouts.GO_ON}", "[4]"),
        (PendingRanks([0, 1, 4]), [0], f"ranks [0] {timeouts.GO_ON}; rank 0 is on host a", "[1, 4]"),
    ],
)  # fmt: skip
def test_a_hub_that_does_not_answer_is_named_alone(late, keeps, named, unasked):
    """No rank of another host can report that it waits for the hub's rank.

    The error says that these ranks were not asked. If the whole host of the hub is cut off, all of its ranks are named.
    """
    table, plane = PeerStatus(), _Plane(keeps)
    table.waits[3] = (0,)
    status = PeerStatus(2, table)
    status.sees = lambda rank: rank in (2, 3)
    status.hosts = HOSTS
    status.connect(plane)
    error = FailureLog(range(5), 2, status).timeout_error(late, "all_gather #1", 1.0)
    hub = "host a (ranks [0, 1])" if len(keeps) > 1 else "rank 0"
    more = f"; {timeouts.unasked(f'ranks {unasked}', hub)}" if unasked else ""
    assert str(error) == f"all_gather #1: not complete after 1.0 s; {named}{more}"
    assert error.ranks == tuple(keeps) and f"{list(error.unasked) or ''}" == unasked


def test_a_hub_that_does_not_answer_is_named_with_ranks_that_are_stopped_or_gone():
    """An error keeps the list of the ranks that were not asked, whatever fails later."""
    status, plane = PeerStatus(2), _Plane()
    status.sees, status.halted, status.hosts = {2, 3}.__contains__, {3, 4}.__contains__, HOSTS
    status.connect(plane)
    log, late = FailureLog(range(5), 2, status), [0, 1, 3, 4]
    native = PendingRanks(others=late, all_wait=True, may_be_complete=True)
    for error in [log.timeout_error(each, "all_gather #1", 1.0) for each in (PendingRanks(late), native)]:
        assert log.timeout_error(PendingRanks([3]), "recv #1", 1.0).unasked == ()
        assert (error.ranks, error.unasked, error.copy().unasked) == ((0, 3, 4), (1,), (1,))
        assert timeouts.unasked("ranks [1]", "rank 0") in str(error)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("world: send_recv #3 of float32[7], to and from rank 0 with tag 0 at train.py:6", "wait for one another"),
        ("world.0:duplicate: barrier #0 at train.py:9", "wait for one another, in calls of several groups"),
        ("world:shrunk: barrier #0 at train.py:9", "wait for one another, in calls of several groups"),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_cycle_says_whether_its_calls_are_of_one_group(call, expected, reverse):
    status = _Waits({1: (0,)}, {})
    what = "world: send_recv #3 of float32[7], to and from rank 1 with tag 0"
    call, what = (what, call) if reverse else (call, what)
    status.last_calls[1] = lambda: call
    text = str(FailureLog(range(2), 0, status).timeout_error(PendingRanks([1]), what, 1.0))
    assert f"ranks [0, 1] {expected}" in text.split("; "), text


def test_a_cycle_with_a_call_that_is_not_known():
    """For example, the call of a rank of another host.  The error does not mention groups then."""
    status = _Waits({1: (2,), 2: (0,)}, {})
    status.last_calls |= {1: lambda: "world: barrier #0 at train.py:9", 2: lambda: ""}
    call = "world: recv_bytes #0, from rank 1 with tag 0"
    text = str(FailureLog(range(3), 0, status).timeout_error(PendingRanks([1]), call, 1.0))
    assert "ranks [0, 1, 2] wait for one another" in text.split("; "), text


def on_hosts(world: Sequence[int] = range(5)) -> FailureLog:
    """That of rank 0 of five ranks on three hosts."""
    log = FailureLog(world, 0)
    log.status.hosts = HOSTS
    return log


def test_a_group_names_the_host_of_its_ranks():
    log = on_hosts([0, 2, 3])
    assert log.names([1, 2]) == "host b (ranks [2, 3] of world)" and log.names([1], False) == "rank 2 of world"
    assert on_hosts().names([0, 1, 2, 3]) == "host a and host b (ranks [0, 1, 2, 3])"
    assert log.on_hosts_of([1]) == [1, 2] and on_hosts([0, 3]).on_hosts_of([1]) == [1]


CLOSED = "its connection was closed"


@pytest.mark.parametrize(
    ("ends", "why", "named"),
    [
        ([2, 3], CLOSED, f"host b (ranks [2, 3]) is gone: {CLOSED}"),
        ([2], CLOSED, f"rank 2 is gone: {CLOSED}; rank 2 is on host b"),
        ([2, 3], "it closed its communicator", "rank 2 is gone: it closed its communicator; rank 2 is on host b"),
    ],
)
def test_a_host_is_lost_with_its_last_rank(ends, why, named):
    log = on_hosts()
    log.status.ends.update(dict.fromkeys(ends, why))
    error = log.lost(2, why)
    assert str(error) == named and error.ranks == ((2, 3) if named.startswith("host") else (2,))


def test_a_rank_that_ended_because_of_another_is_not_named_with_it():
    log = on_hosts()
    log.status.ends.update({2: CLOSED, 3: CLOSED})
    log.status.failures[3] = RankLost("rank 2 is gone", ranks=[2]), time.monotonic()
    assert log.lost(2, CLOSED).ranks == (2,)


class _Plane:
    """What a rank receives from the hub: at the first times nothing, then that rank 3 has ended; or never."""

    failures = SimpleNamespace(world=range(3))

    def __init__(self, keeps: Sequence[int] = (0,)) -> None:
        self.keeps = list(keeps)

    def send_notice(self, kind: str, what: object = None, timeout: float | None = None) -> list[int]:
        return self.keeps

    def receive_notices(self, status: PeerStatus) -> None: ...


def test_the_parts_of_an_error_are_copied_sent_and_pickled():
    cause = RankLost("rank 3 is gone: boom", ranks=[3])
    error = CollectiveMismatch(ranks=[1, 2], call="world: recv #1", expected="2 elements", got="3")
    error.unasked = (3, 4)
    assert str(error) == "world: recv #1: expected 2 elements, got 3"
    for other in (error.copy(), from_record(to_record(error)), pickle.loads(pickle.dumps(error))):
        assert (type(other), str(other), other.ranks) == (type(error), str(error), (1, 2))
        assert (other.call, other.expected, other.got, other.unasked) == (error.call, "2 elements", "3", (3, 4))
    later = cause.copy(f"{cause}; rank 1 aborted because of it", "world: barrier #2", cause)
    assert (later.call, later.cause, later.ranks) == ("world: barrier #2", cause, (3,))
    assert str(later) == "world: barrier #2: rank 3 is gone: boom; rank 1 aborted because of it"
