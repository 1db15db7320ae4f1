"""Failures raise errors on every rank that name the failed ranks: late and lost ranks, calls that differ.

``SCENARIOS`` is the table of what goes wrong between ranks: a row is what the ranks call, what one of them does
instead, and what the others raise.  ``check`` runs one row.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kos.comm import Communicator, ReduceOp
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, KosError, RankLost
from kos.testing.conformance.model import Step, Trial
from kos.testing.conformance.on_gpu import OnGPU
from kos.testing.conformance.values import LARGE, assert_same_on_all_ranks, raises

SHORT = 0.3  # seconds, for calls that must time out
GRACE = 20.0  # seconds that an error may be late on a busy machine
WHY = "it had enough"

GPU = "a GPU"
NO_GPU, BY_MPI = (GPU,), ("mpi", GPU)

Meet = Callable[[Communicator, float], Any]
"""Waits outside of kos for all ranks; the others come when a timeout, in seconds, has passed."""


class Scenario(NamedTuple):
    """What the ranks call, what goes wrong, and what the ranks that it concerns raise."""

    program: str
    """What they call: a key of ``PROGRAMS``, of ``MISMATCHES``, or what messages hold."""
    fault: str
    """What goes wrong, and on which rank: a key of ``FAULTS``."""
    error: type[CollectiveError] | tuple[type[CollectiveError], ...]
    words: str
    """A pattern of the error's text, in which ``{culprit}`` stands for the rank that is named."""
    ranks: int = 2
    """The least number of ranks."""
    never: Sequence[str] = ()
    """Backends, or ``GPU`` for all those of GPUs, that do not promise it."""

    def __str__(self) -> str:
        return f"{self.program}, {self.fault}"

    def applies(self, comm: Any) -> bool:
        """Whether ``comm`` has enough ranks, and its backend makes this promise."""
        backend = GPU if _on_gpus(comm) else comm.backend_name
        promised = self.program not in ENVELOPES or comm.backend.has_envelopes
        return comm.size >= self.ranks and promised and not any(name in backend for name in self.never)


def _poll(done: Callable[[], Any]) -> None:
    while not done():
        time.sleep(0.001)


def _batch(comm: Communicator) -> None:
    with comm.batch():
        comm.all_reduce(np.ones(5))
        comm.all_reduce(np.ones(7))


def _several(comm: Communicator) -> None:
    for work in [comm.all_reduce(np.ones(5), async_op=True) for _ in range(3)]:
        work.wait()


PROGRAMS: dict[str, Step | Callable[[Any, int], Any]] = {
    "barrier": lambda comm, culprit: comm.barrier(),
    "all_reduce": Step("all_reduce"),
    "all_reduce of 300,007": Step("all_reduce", LARGE),
    "all_reduce by a ring": lambda comm, culprit: comm.all_reduce(np.ones(5), algorithm="ring"),
    "all_reduce by a tree": lambda comm, culprit: comm.all_reduce(np.ones(LARGE), algorithm="tree"),
    "all_reduce in rank order": Step("all_reduce", deterministic=True),
    "all_reduce in 8 bits": Step("all_reduce", 4096, compress="int8"),
    "all_reduce, polled": lambda comm, culprit: _poll(comm.all_reduce(np.ones(5), async_op=True).done),
    "several all_reduce": lambda comm, culprit: _several(comm),
    "batch": lambda comm, culprit: _batch(comm),
    **{name: Step(name) for name in ("broadcast", "scatter", "reduce_scatter", "all_gather")},
    "all_gather_v": lambda comm, culprit: comm.all_gather_v(np.ones(comm.rank + 1), range(1, comm.size + 1)),
    "all_gather_v without counts": Step("all_gather_v", sized=False),
    "all_gather_bytes": lambda comm, culprit: comm.all_gather_bytes(b"abc"),
    "all_to_all": Step("all_to_all", LARGE, np.int8),
    "all_to_all_v": Step("all_to_all_v"),
    "split": lambda comm, culprit: comm.split(0),
    "duplicate": lambda comm, culprit: comm.duplicate(),
    "recv": lambda comm, culprit: comm.recv(np.ones(5), culprit),
    "send_recv": lambda comm, culprit: comm.send_recv(np.ones(70_000), np.ones(70_000), culprit, culprit),
    "recv from any": lambda comm, culprit: comm.recv(np.ones(5)),
    "recv_bytes": lambda comm, culprit: comm.recv_bytes(culprit),
    "recv_bytes from any": lambda comm, culprit: comm.recv_bytes(),
    "probe": lambda comm, culprit: comm.probe(culprit),
    "probe, polled": lambda comm, culprit: _poll(lambda: comm.probe(wait=False)),
    "exchange": lambda comm, culprit: comm.rendezvous.barrier(),
}
"""What a rank calls that waits for the rank ``culprit``."""
ENVELOPES = ("recv from any", "recv_bytes", "recv_bytes from any", "probe", "probe, polled")
MESSAGES = ("recv", "send_recv", *ENVELOPES)  # between hosts' memories, a failure of one breaks nothing

_FOUR = Step("all_reduce", 4, np.float64)
MISMATCHES: dict[str, tuple[Step, Step] | Callable[[Any, bool], Any]] = {
    "operation": lambda comm, other: comm.barrier() if other else comm.all_reduce(np.ones(4)),
    "dtype": (replace(_FOUR, dtype=np.int32), replace(_FOUR, dtype=np.float32)),
    "count": (_FOUR, replace(_FOUR, count=5)),
    "count of a gather": (Step("gather", 4), Step("gather", 5)),
    "count, large and small": (replace(_FOUR, count=LARGE), _FOUR),
    "op": (_FOUR, replace(_FOUR, op=ReduceOp.MAX)),
    "root": (Step("broadcast"), Step("broadcast", root=1)),
    "root of a reduce": (Step("reduce"), Step("reduce", root=1)),
    "algorithm": lambda comm, other: comm.all_reduce(np.ones(4), algorithm="tree" if other else "ring"),
    "algorithm, automatic or not": lambda comm, other: comm.all_reduce(
        np.ones(4), algorithm="ring" if other else "auto"),
    "deterministic": (_FOUR, replace(_FOUR, deterministic=True)),
    "counts": lambda comm, other: comm.all_gather_v(
        np.ones(2 + (other and comm.rank > 0)), [2] * (comm.size - 1) + [2 + other]
    ) if comm.rank in (0, comm.size - 1) else comm.all_gather_v(np.ones(2), [2] * comm.size),
    "purpose": (Step("gather_v", sized=False), Step("scatter_v", sized=False)),
    "operation of bytes": lambda comm, other: comm.barrier() if other else comm.all_gather_bytes(b"x"),
    "operation of a split": lambda comm, other: comm.all_reduce(np.ones(4)) if other else comm.split(0),
    "operation of two splits": lambda comm, other: comm.duplicate() if other else comm.split(0),
}  # fmt: skip
"""Calls by their difference, whose first word is in the error; ``other`` is true on the rank whose call differs."""


def _ready(comm: Any, program: str, culprit: int) -> Callable[[], Any]:
    """The call that waits for the rank ``culprit``, with its arrays."""
    action = PROGRAMS[program]
    if isinstance(action, Step):
        return Trial(comm, replace(action, root=culprit), 0).start
    return partial(action, comm, culprit)


def _call_or_other(comm: Any, program: str, other: bool) -> None:
    """Make one of two calls that differ."""
    action = MISMATCHES[program]
    if isinstance(action, tuple):
        Trial(comm, action[other], 0).start()
    else:
        action(comm, other)


def _sleep(comm: Communicator, limit: float) -> None:
    if comm.rank == comm.size - 1:
        time.sleep(limit + 1.0)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _on_gpus(comm: Any) -> bool:
    """Whether the arrays of the calls lie on GPUs."""
    return isinstance(comm, OnGPU)


def _may_not_name(comm: Any) -> bool:
    """Ranks of several hosts, or without the compiled core, name a late rank only if they wait for its message."""
    return comm.backend_name in ("mpi", "tcp") and not comm.backend.one_host


def _fills_ranks(comm: Any) -> bool:
    """Whether ``KosError.ranks`` is filled: backends of users may leave it empty."""
    return bool({*comm.backend_name.split("+")} & {"mock", "mpi", "tcp", "nccl", "peer"})


def _check_ranks(comm: Any, error: KosError, *ranks: int) -> None:
    as_promised = error.ranks == ranks or not (_fills_ranks(comm) or error.ranks)
    assert as_promised, f"expected {ranks}, got {error.ranks}: {error}"


@contextmanager
def _raises(comm: Any, row: Scenario, *ranks: int, **names: Any) -> Iterator[list[KosError]]:
    """Check that the block raises the error of the row, with these ``ranks`` if any are given.

    ``names`` are the values of the names in the row's words.
    """
    words = "not complete" if row.error is LATE and _may_not_name(comm) else row.words.format(**names)
    with raises(row.error, words) as caught:
        yield caught
    if ranks:
        _check_ranks(comm, caught[0], *ranks)


class _HeldUp:
    """Measures in a ``with`` block the longest time, ``seconds``, for which this process got no core."""

    def __enter__(self) -> _HeldUp:
        self.seconds, self._at, self._over = 0.0, time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kos-held-up", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._over.wait(0.01):
            self.seconds, self._at = max(self.seconds, (now := time.monotonic()) - self._at), now

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.seconds = max(self.seconds, time.monotonic() - self._at)


def _late(comm: Any, part: Any, row: Scenario, limit: float, meet: Meet) -> None:
    """The last rank does not come: it is named when the timeout has passed."""
    culprit, message = comm.size - 1, row.program in MESSAGES
    part.timeout = limit
    part.rendezvous.timeout = GRACE if _on_gpus(comm) else limit
    call = _ready(part, row.program, culprit)  # making large arrays takes a while on a busy machine
    began = time.monotonic()  # before any rank begins the call
    comm.rendezvous.barrier()
    with _HeldUp() as mine:
        start, named = time.monotonic(), set[int]()
        if comm.rank != culprit:
            with _raises(comm, row, culprit=culprit) as caught:
                call()
                part.synchronize()
            assert limit <= time.monotonic() - began < limit + GRACE, "the error came early or late"
            named = set(caught[0].ranks)
    if comm.rank != culprit and (not message or _on_gpus(comm)):
        with raises(CollectiveError, "failed before"):
            part.barrier()
    meet(comm, limit)  # not in kos: a rank that waited there would be late because of the others
    # A rank that could not begin, or not yet show for whom it waits, may be named too.
    everyone = [json.loads(each) for each in comm.rendezvous.allgather(json.dumps([start, mine.seconds]).encode())]
    slow = {i for i, (began, held_up) in enumerate(everyone) if max(began - min(everyone)[0], held_up) > 0.5 * limit}
    if comm.rank != culprit and not _may_not_name(comm):
        assert (named or not _fills_ranks(comm)) and named <= {culprit} | slow, caught[0]
        assert slow or re.search(NAMED.format(culprit=culprit), str(caught[0])), caught[0]


def _gives_up(comm: Any, part: Any, row: Scenario, limit: float, meet: Meet) -> None:
    """Rank 0 gives up on the last rank: all others raise its error, the last one too when it comes."""
    late, message = comm.size - 1, row.program in MESSAGES
    part.timeout, part.rendezvous.timeout = limit if comm.rank == 0 else 2 * GRACE, 2 * GRACE
    comm.rendezvous.barrier()
    if comm.rank == late:
        comm.rendezvous.barrier()  # the others have failed by then
    began = time.monotonic()
    with _raises(comm, row, culprit=late):
        _ready(part, "all_reduce" if comm.rank == 0 and message else row.program, 0 if message else late)()
        part.synchronize()
    assert time.monotonic() - began < GRACE, "a rank did not learn of the failure of rank 0"
    if comm.rank != late:
        comm.rendezvous.barrier()


def _ends(comm: Any, part: Any, row: Scenario, limit: float, meet: Meet) -> None:
    """The last rank aborts, or closes, the communicator that others use or wait in."""
    culprit = comm.size - 1
    comm.rendezvous.barrier()
    began = time.monotonic()
    if comm.rank == culprit:
        part.abort(reason=WHY) if row.fault == "a rank aborts" else part.close()
    else:
        with _raises(comm, row, culprit, culprit=culprit):
            _ready(part, row.program, culprit)()
            part.synchronize()
        assert time.monotonic() - began < GRACE, "the error came late"


def _fails_elsewhere(comm: Any, part: Any, row: Scenario, limit: float, meet: Meet) -> None:
    """Rank 1 aborts its group with rank 0, which then ends its group with rank 2: rank 2 names rank 1."""
    one, other = (comm.split(0 if comm.rank in pair else None) for pair in ((0, 1), (0, 2)))
    if comm.rank == 1:
        one.abort(0, WHY)
    elif comm.rank == 0:
        with raises(row.error, f"rank 1( of world)? is gone: {WHY}"):
            one.barrier()
        other.abort(0, "of no interest") if "aborts" in row.fault else other.close()
    elif comm.rank == 2:
        with _raises(comm, row, 1, culprit=1):
            _ready(other, row.program, 0)()


def _fails_later(comm: Any, part: Any, row: Scenario, limit: float, meet: Meet) -> None:
    """Rank 0 gives up a later collective: the earlier one, to which the last rank comes after that, is complete."""
    last = comm.size - 1
    if comm.rank == last:
        comm.rendezvous.barrier()
    first = part.all_reduce(np.ones(3), async_op=True)
    if comm.rank == 0:
        with _raises(comm, row):
            part.barrier(timeout=limit)
        assert isinstance(part.failure, CollectiveTimeout)
    if comm.rank != last:
        comm.rendezvous.barrier()
    assert (first.wait() == comm.size).all()
    comm.rendezvous.barrier()
    part.abort()
    assert part.failure is not None


def _differs(comm: Any, part: Any, row: Scenario, limit: float, meet: Meet) -> None:
    """All ranks raise, in one of the next calls at the latest, and name two ranks and the difference."""
    for odd in (0, comm.size - 1):
        part = comm.duplicate()
        comm.rendezvous.barrier()  # a rank that is still within ``duplicate`` would raise the error there
        if odd and row.program != "counts" and not _on_gpus(comm):  # calls that are known are compared too
            for other in (False, True):
                _call_or_other(part, row.program, other)
        with raises(row.error, row.words) as caught:
            _call_or_other(part, row.program, comm.rank == odd)
            part.synchronize()
            for _ in range(3):
                part.barrier()
                part.synchronize()
        named = sorted(int(rank) for rank in re.findall(r"rank (\d+) called", str(caught[0])))
        assert odd in named, caught
        _check_ranks(comm, caught[0], *named)
        if comm.backend_name in ("mpi", "tcp") and comm.backend.one_host:
            told = re.sub(r"^.*?(?=rank \d+ called)", "", str(caught[0]))  # in which call it is raised may differ
            assert_same_on_all_ranks(comm, np.frombuffer(told.encode(), np.uint8), "the error")
        with raises(CollectiveError, "failed before"):
            part.barrier()
        part.abort()
        comm.rendezvous.barrier()


def _counts_differ(comm: Any, part: Any, row: Scenario, limit: float, meet: Meet) -> None:
    """Rank 1 sends rank 0 something else than rank 0 expects: all ranks name both, and break off."""
    (sent, expected), n, me = map(_number, row.program.split(" for ")), comm.size, comm.rank
    matrix = np.full((n, n), 2)
    part.all_to_all_v(np.zeros(2 * n), matrix[me], matrix[:, me])
    matrix[1, 0] = sent if me == 1 else expected
    x = np.zeros(int(matrix[me].sum()))
    with _raises(comm, row, 0, 1, expected=expected, sent=sent) as caught:
        part.all_to_all_v(x, matrix[me], matrix[:, me], timeout=GRACE)
    assert "all_to_all_v #1" in str(caught[0]), caught
    with raises(CollectiveError, "failed before"):
        part.barrier()


def _another_message(comm: Any, part: Any, row: Scenario, limit: float, meet: Meet) -> None:
    """The last rank sends what the one before it does not expect, who names both in the world's numbers."""
    last, group = comm.size - 1, comm.group(range(comm.size)[::-1])
    arrays = [text.split(" of ") for text in row.program.split(" for ")]
    sent, (length, kind) = ((_number(count), dtype) for count, dtype in arrays)
    for posted_first in (True, False):
        space = np.zeros(3 * length + 9, kind)
        y = space[length : 2 * length]
        if comm.rank == last - 1 and posted_first:
            work = group.recv(y, 0, async_op=True)
            work.done()
        comm.rendezvous.barrier()
        if comm.rank == last:
            with suppress(CollectiveMismatch):  # unless it is buffered
                group.send(np.ones(*sent), 1)
        elif comm.rank == last - 1:
            with _raises(comm, row, last - 1, last, culprit=last, receiver=last - 1):
                work.wait() if posted_first else group.recv(y, 0)
            assert not space.any(), "a refused message has written to its array, or to memory beside it"
    x, me, n = np.zeros(3), group.rank, group.size
    group.send_recv(np.full(3, 2.0), x, (me + 1) % n, (me - 1) % n)
    assert (x == 2).all(), "a message after one that was refused"
    group.close()


def _send_given_up(comm: Any, part: Any, row: Scenario, limit: float, meet: Meet) -> None:
    """A send that times out ends the communicator: nobody gets what its memory held later, and all say the same."""
    x = np.ones(_number(row.program.split()[-1]))
    collective = part.barrier(async_op=True) if comm.rank == 1 else None
    if comm.rank == 0:
        with _raises(comm, row):
            part.send_recv(x, np.zeros(1), 1, 1, 5, timeout=0.05)
        x[:] = -7
    comm.rendezvous.barrier()
    if collective is not None:
        y = np.zeros(len(x))
        with suppress(CollectiveTimeout):  # a short one may have been copied in time
            part.recv(y, 0, 5)
            assert (y == 1).all(), "what was written after the send timed out was received"
        for call in (lambda: part.recv(y, 0, 5), lambda: part.send(y, 0, 5), collective.wait):
            with _raises(comm, row):
                call()
    with _raises(comm, row):
        part.barrier()
    part.close()


def _sender_aborts(comm: Any, part: Any, row: Scenario, limit: float, meet: Meet) -> None:
    """Of a send that is under way at an abort nobody gets what its memory held later."""
    x = np.ones(_number(row.program.split()[-1]))
    if comm.rank == 0:
        part.send(x, 1, async_op=True)
        part.abort(0, WHY)
        x[:] = -7
    comm.rendezvous.barrier()
    if comm.rank == 1:
        y = np.zeros(len(x))
        with suppress(RankLost):  # a short one has left its memory
            part.recv(y, 0)
            assert (y == 1).all(), "what was written after the abort was received"
        with _raises(comm, row, culprit=0):
            part.recv(y, 0)


FAULTS: dict[str, Callable[[Any, Any, Scenario, float, Meet], None]] = {
    "a rank is late": _late,
    "rank 0 gives up": _gives_up,
    "a rank aborts": _ends,
    "a rank closes": _ends,
    "it failed elsewhere": _fails_elsewhere,
    "it aborts for a failure elsewhere": _fails_elsewhere,
    "a later one fails": _fails_later,
    "calls differ": _differs,
    "counts differ": _counts_differ,
    "messages differ": _another_message,
    "the sender gives up": _send_given_up,
    "the sender aborts": _sender_aborts,
}

LATE = (CollectiveTimeout, RankLost)
NAMED = r"(ranks?|did not reach rank) \[?{culprit}\]?"
LATE_NAMED = r"(ranks?|did not reach rank) \[?(\d+, )*{culprit}\]?"  # ``_late`` checks which others may be named
GONE = f"rank {{culprit}}( of world)? is gone: {WHY}"
UNSENT = f"rank {{culprit}} is gone: .*{WHY}"
LEFT = r"rank {culprit} is gone: it closed its communicator"
BECAUSE = f"{GONE}(; rank {{culprit}} is on host [^;]+)?; rank 0 of world aborted because of it"
DIFFER = r"rank \d+ called .*#\d.* but rank \d+ called .* differ in .*{what}"
GIVEN_UP = "send_recv #0 .* to (and from )?rank 1 with tag 5.*: not complete after 0.05 s"
OF_LENGTHS = "rank 0 expected {expected} elements of float64 from rank 1, got {sent} elements of float64"
OF_ARRAYS = r"rank {receiver} of world expected \d+ elements of \w+ from rank {culprit} of world, got \d+ elements"

_SIZES = ("send of 4", "send of 4,096", "send of 1,048,576")
_TABLE: list[tuple[str, Any, str, int, Sequence[str], Sequence[str]]] = [
    # What goes wrong, the error that the others raise, its words, the least ranks, backends without it, programs
    ("a rank is late", LATE, LATE_NAMED, 2, (), (
        "barrier", "all_reduce", "all_reduce of 300,007", "all_reduce in rank order", "all_reduce in 8 bits",
        "broadcast", "reduce_scatter", "all_gather", "all_gather_v", "all_to_all", "all_to_all_v", "recv",
        "send_recv")),
    ("a rank is late", LATE, LATE_NAMED, 2, NO_GPU, (
        "all_reduce by a ring", "all_reduce, polled", "several all_reduce", "batch", "scatter",
        "all_gather_v without counts", "all_gather_bytes", "split")),
    ("a rank is late", LATE, LATE_NAMED, 2, NO_GPU, ENVELOPES[:-1]),  # a poll has no timeout
    ("rank 0 gives up", LATE, NAMED, 2, NO_GPU, ENVELOPES[:-1]),
    ("a rank aborts", RankLost, GONE, 2, NO_GPU, ENVELOPES),
    ("a rank closes", RankLost, LEFT, 2, NO_GPU, ("recv_bytes", "probe")),
    ("it failed elsewhere", RankLost, BECAUSE, 3, NO_GPU, ENVELOPES),
    ("rank 0 gives up", LATE, NAMED, 2, (), ("barrier", "all_reduce")),
    ("rank 0 gives up", LATE, NAMED, 2, NO_GPU, ("all_reduce by a tree", "batch", "recv")),
    ("a rank aborts", RankLost, GONE, 2, (), ("barrier", "all_reduce", "broadcast", "recv")),
    ("a rank aborts", RankLost, GONE, 2, NO_GPU, ("all_reduce by a ring", "send_recv", "split")),
    ("a rank closes", RankLost, LEFT, 2, NO_GPU, ("recv",)),
    ("a rank closes", RankLost, LEFT, 2, BY_MPI, ("barrier", "all_reduce")),  # MPI's own may be complete
    ("it failed elsewhere", RankLost, BECAUSE, 3, NO_GPU, (
        "barrier", "all_reduce by a ring", "split", "send_recv", "recv")),
    ("it failed elsewhere", RankLost, BECAUSE, 3, BY_MPI, ("exchange",)),  # MPI's own ends at the timeout
    ("it aborts for a failure elsewhere", RankLost, BECAUSE, 3, NO_GPU, ("barrier", "all_reduce by a ring", "recv")),
    ("a later one fails", CollectiveTimeout, "barrier #1", 2, NO_GPU, ("all_reduce",)),
    ("calls differ", CollectiveMismatch, DIFFER, 2, (), (
        "operation", "dtype", "count", "count, large and small", "op", "root", "deterministic")),
    ("calls differ", CollectiveMismatch, DIFFER, 2, NO_GPU, (
        "count of a gather", "root of a reduce", "algorithm", "algorithm, automatic or not", "counts", "purpose",
        "operation of bytes", "operation of a split", "operation of two splits")),
    ("counts differ", CollectiveMismatch, OF_LENGTHS, 2, NO_GPU, (
        "3 for 0", "0 for 3", "3 for 2", "0 for 300,000", "300,000 for 0", "299,999 for 300,000")),
    ("messages differ", CollectiveMismatch, OF_ARRAYS, 2, NO_GPU, (
        "3 of float64 for 4 of float64", "5 of float64 for 4 of float64", "0 of int8 for 2 of int8",
        "2 of int8 for 0 of int8", "4 of int32 for 4 of float32", "100,000 of float32 for 2,000 of float32",
        "2,000 of float32 for 100,000 of float32", "1,000,000 of float32 for 0 of float32")),
    ("the sender gives up", CollectiveTimeout, GIVEN_UP, 2, NO_GPU, _SIZES),
    ("the sender aborts", RankLost, UNSENT, 2, NO_GPU, _SIZES),
]  # fmt: skip

SCENARIOS = [
    Scenario(program, fault, error, words.replace("{what}", re.split("[ ,]", program)[0]), ranks, never)
    for fault, error, words, ranks, never, programs in _TABLE for program in programs
]  # fmt: skip
"""What goes wrong between ranks, and what they raise."""
FEW = {(what, "calls differ") for what in (
    "operation", "dtype", "count", "op", "root", "algorithm", "deterministic", "counts", "purpose")
} | {
    ("all_reduce", "a rank is late"), ("barrier", "rank 0 gives up"), ("barrier", "a rank aborts"),
    ("3 of float64 for 4 of float64", "messages differ"), ("5 of float64 for 4 of float64", "messages differ"),
}  # fmt: skip
"""Programs and faults of the short suite."""


def check(comm: Any, row: Scenario, limit: float = SHORT, meet: Meet = _sleep) -> None:
    """Check one row on the ranks of ``comm``, which stays intact; what must time out does so after ``limit`` seconds.

    A rank that is late sleeps, unless ``meet`` is given.  Does nothing if the row does not apply to ``comm``.
    """
    if row.applies(comm):
        part = comm.duplicate()
        FAULTS[row.fault](comm, part, row, limit, meet)
        part.abort()
        comm.rendezvous.barrier()
