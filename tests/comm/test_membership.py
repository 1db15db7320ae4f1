"""Random changes of a membership, beside a model of it.  Ranks are threads, on ``mock`` and over ``tcp``."""

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import kos
from kos.comm.control.place import env_rendezvous
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.errors import CollectiveError, KosError, RankLost, RendezvousError
from tests.comm.growing import both, known
from tests.comm.ranks import until
from tests.comm.tcp_ranks import TIMEOUT, environment, free_port, run_threads

__all__ = ["known"]  # a fixture of every test

MOST = 6  # members and newcomers
SOON = 0.2  # seconds, for a change that fails however late a rank calls
LONG = 3.0  # seconds, for a change without a silent rank: those that call have half of it to do so
SOME = st.integers(0, 99)


class Rank:
    """A member or a newcomer."""

    numbers = itertools.count()
    comm: kos.Communicator

    def __init__(self) -> None:
        self.name = f"rank {next(self.numbers)}".encode()

    def join(self, members: list["Rank"]) -> None:
        """Call ``kos.join`` in a thread, with the address that one of the members has."""
        self.known, address = members, members[0].comm.address
        self.joining = threading.Thread(target=self._join, args=(address,), daemon=True)
        self.joining.start()

    def _join(self, address: str) -> None:
        with contextlib.suppress(RendezvousError):
            self.comm = kos.join(address, timeout=2 * TIMEOUT)

    def has_joined(self) -> bool:
        return not self.joining.is_alive() and hasattr(self, "comm")


class Membership(RuleBasedStateMachine):
    """``members`` are in the order of their ranks.  Some are ``gone``, and one may be ``silent``: it does not call."""

    backend: str

    @initialize(size=st.integers(1, 4))
    def start(self, size):
        port, group = free_port(), ThreadGroup(size)
        self.members = [Rank() for _ in range(size)]
        self.gone, self.silent, self.waiting = list[Rank](), list[Rank](), list[Rank]()
        self.was_silent = self.is_closed = self.is_known = False

        def make(rank: Rank) -> None:
            number = self.members.index(rank)
            place: Any = ThreadControlPlane(group, number, TIMEOUT)
            if self.backend == "tcp":
                place = env_rendezvous(TIMEOUT, environment(number, size, port))
            rank.comm = kos.init(self.backend, rendezvous=place, timeout=TIMEOUT)

        assert self.all_call(make) == [None] * size
        self.check()

    def callers(self) -> list[Rank]:
        return [rank for rank in self.members if rank not in self.gone + self.silent]

    def is_whole(self) -> bool:
        return self.callers() == self.members

    def reachable(self) -> list[Rank]:
        """The newcomers that can be taken.  Over ``tcp``, they know the addresses of the members at their arrival."""
        on_threads, callers = self.backend == "mock", {*self.callers()}
        return [new for new in self.waiting if on_threads or callers.intersection(new.known)]

    def all_call(self, function: Callable[[Rank], Any], count: int = MOST) -> list[Any]:
        """What each rank that calls, or the first ``count`` of them, returns or raises."""
        return run_threads(*[lambda rank=rank: function(rank) for rank in self.callers()[:count]])

    def fail(self, function: Callable[[Rank], Any], kind: type[KosError], count: int = MOST) -> list[Any]:
        """The errors that the call raises on each rank, or on the first ``count``."""
        errors = self.all_call(function, count)
        assert all(isinstance(error, kind) for error in errors), errors
        return errors

    def check(self) -> None:
        """All members know the same members, in the same order."""

        def use(rank: Rank) -> tuple[list[bytes], int]:
            with rank.comm.split(rank.comm.rank % 2) as half:
                half.barrier()
            return rank.comm.all_gather_bytes(rank.name), int(rank.comm.all_reduce(np.array(1)))

        count = len(self.members)
        assert self.all_call(use) == [([rank.name for rank in self.members], count)] * count

    def change(self, name: str, *count: int, newcomers: int = 0, **options: Any) -> None:
        """The ranks that call come first, in their order, and then the newcomers.  All others are out."""
        old = [rank.comm for rank in self.callers()]
        new = self.all_call(lambda rank: getattr(rank.comm, name)(*count, **options))
        assert all(isinstance(comm, kos.Communicator) for comm in new), new
        out, self.members = self.silent, self.callers()
        self.gone, self.silent, self.is_closed, self.is_known = [], [], False, False
        for rank, comm in zip(self.members, new, strict=True):
            rank.comm = comm
        until(lambda: sum(rank.has_joined() for rank in self.waiting) >= newcomers)
        taken = [rank for rank in self.waiting if rank.has_joined()]
        self.waiting = [rank for rank in self.waiting if rank not in taken]
        self.members += sorted(taken, key=lambda rank: rank.comm.rank)
        self.check()
        for comm in old:
            with pytest.raises(CollectiveError, match="is closed"):
                comm.barrier()
        for rank in out:
            with pytest.raises((RankLost, RendezvousError)):
                rank.comm.shrink(timeout=SOON)

    # What may happen.

    @rule(which=SOME)
    @precondition(lambda self: len(self.callers()) > 1)
    def end(self, which):
        rank = self.callers()[which % len(self.callers())]
        place = rank.comm.rendezvous
        rank.comm.abort()
        if self.backend == "mock":
            place.threads.world.end(place.threads.members[place.rank], "it is dead")
        place.close()  # as the end of its process does
        self.gone.append(rank)

    @rule(which=SOME)
    @precondition(lambda self: len(self.callers()) > 1 and not self.was_silent)
    def fall_silent(self, which):
        """At most once, because it takes long."""
        self.silent, self.was_silent = [self.callers()[which % len(self.callers())]], True

    @rule()
    @precondition(lambda self: len(self.members) + len(self.waiting) < MOST)
    def arrive(self):
        self.waiting.append(Rank())
        self.waiting[-1].join(self.callers())

    @rule(count=st.integers(1, MOST), call=st.sampled_from(["all_reduce", "grow"]))
    @precondition(lambda self: self.gone and not self.silent and not self.is_closed)
    def call_after_a_loss(self, count, call):
        """If not all ranks call, the others learn of the loss when the membership changes.

        Once a rank knows of the loss, it would not come to ``grow``, and the others would wait for it.
        """
        lost = {rank.comm.world_ranks[rank.comm.rank] for rank in self.gone}
        if call == "grow" and not self.is_known:
            errors = self.fail(lambda rank: rank.comm.grow(1), RankLost)
        else:
            errors = self.fail(lambda rank: rank.comm.all_reduce(np.ones(3), algorithm="ring"), RankLost, count)
        assert all(error.ranks and lost.issuperset(error.ranks) for error in errors), errors
        self.is_known = True

    @rule(count=SOME)
    @precondition(lambda self: self.is_whole() and self.reachable())
    def grow(self, count):
        count = 1 + count % len(self.reachable())
        self.change("grow", count, newcomers=count)

    @rule()
    @precondition(lambda self: self.is_whole())
    def grow_by_too_many(self):
        count = len(self.waiting) + 1
        self.fail(lambda rank: rank.comm.grow(count, timeout=SOON), RendezvousError)
        self.check()

    @rule()
    def shrink(self):
        """A rank that is silent is named first, and then left out."""
        if not self.silent:
            return self.change("shrink")
        expected = tuple(rank.comm.world_ranks[rank.comm.rank] for rank in self.silent)
        errors = self.fail(lambda rank: rank.comm.shrink(timeout=LONG), RendezvousError)
        assert [error.ranks for error in errors] == [expected] * len(errors)
        self.change("shrink", timeout=LONG)

    @rule()
    @precondition(lambda self: not self.silent and 0 < len(self.gone) <= len(self.reachable()))
    def replace(self):
        self.change("replace", newcomers=len(self.gone))

    @rule()
    @precondition(lambda self: not self.silent and len(self.gone) > len(self.waiting))
    def replace_by_too_few(self):
        """Only ``replace`` and ``shrink`` may follow."""
        self.fail(lambda rank: rank.comm.replace(timeout=SOON), RendezvousError)
        self.is_closed = True

    def teardown(self):
        if not hasattr(self, "members"):
            return
        self.shrink()
        if count := len(self.reachable()):
            self.change("grow", count, newcomers=count)
        assert self.all_call(lambda rank: rank.comm.close()) == [None] * len(self.members)


@both
def test_random_changes(backend):
    """The same changes in each run.  Without ``derandomize``, they differ, and ``max_examples`` sets their number."""
    machine = type("On", (Membership,), {"backend": backend})
    how = {"derandomize": True, "deadline": None, "suppress_health_check": [*HealthCheck], "phases": [Phase.generate]}
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=10, **how))
