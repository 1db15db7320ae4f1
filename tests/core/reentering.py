"""A random program of cached calls within which Python runs: python -m tests.core.reentering SEED ROUNDS [CORE].

Finalizers, profile functions and handlers of signals make calls, set timeouts, split and close, and other threads close
communicators that are in use.  CORE is a build of the core, such as one with a sanitizer.  Both ranks of a group are in
one thread: rank 1 begins its calls first.
"""

import contextlib
import gc
import importlib.util
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

if __name__ == "__main__" and sys.argv[3:]:
    spec = importlib.util.spec_from_file_location("kos._core.native", sys.argv[3])
    assert spec is not None and spec.loader is not None
    sys.modules["kos._core.native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["kos._core.native"])

import numpy as np

import kos
from kos.comm.control.place import env_rendezvous
from kos.errors import KosError
from tests.comm.gpu_eager import hits
from tests.comm.tcp_ranks import both_ranks, environment, free_port

IN_A_CALL = sys.version_info < (3, 12)
"""Whether a collection of garbage may run within a call of the core; later ones are between two instructions."""


class Cycle:
    """Garbage that only a collection finds; runs a function at its end."""

    def __init__(self, at_end: Callable[[], Any]) -> None:
        self.me, self.at_end = self, at_end

    def __del__(self) -> None:
        self.at_end()


class Program:
    """``run`` makes a random call, within which ``act`` is called."""

    def __init__(self, pair: list[Any], alone: Any, seed: int) -> None:
        self.one, self.other, self.alone, self.random = *pair, alone, random.Random(seed)
        self.depth, self.acts, self.is_alone = 0, 0, False
        self.kept: list[Any] = []
        self.theirs: list[Any] = []  # Works of rank 1
        self.failed: list[Any] = []  # exceptions in finalizers
        self.pair_call: Callable[..., Any] = lambda: None

    def act(self, *more: Callable[[], Any]) -> None:
        """One of the actions, or of ``more``, unless this is within another one, or in a thread of kos.

        A collection in another thread runs the finalizers that are left.  There, a call could meet one of this thread.
        """
        if self.depth or threading.current_thread() is not threading.main_thread():
            return
        self.depth, profile = self.depth + 1, sys.getprofile()
        sys.setprofile(None)
        try:
            more = more or (self.call,) * self.is_alone
            actions = (self.forget, self.call_alone, self.split, gc.collect, *more * 3)
            self.random.choice(actions)()
            self.acts += 1
        finally:
            self.depth -= 1
            sys.setprofile(profile)

    def forget(self) -> None:
        """The core forgets all calls, those of all_reduce at once."""
        for comm in (self.one, self.alone):
            comm.timeout = comm.timeout
            with contextlib.suppress(TypeError):
                comm.all_reduce(*range(9))

    def forget_and_call(self) -> None:
        self.forget()
        self.pair_call()

    def call_alone(self) -> None:
        x, y = np.full(3, 2.0), np.zeros(3)
        for _ in range(3):
            assert self.alone.all_reduce(x) is x and self.alone.all_gather(x, y) is y
            assert self.alone.all_reduce(x, async_op=True).wait() is x
        self.alone.scan(x, out=y)
        assert y.tolist() == [2.0] * 3

    def split(self) -> None:
        part = self.random.choice((self.alone.duplicate, lambda: self.alone.split(0)))()
        for _ in range(3):
            part.all_reduce(np.ones(3))
        self.random.choice((part.close, part.abort))()

    def call(self) -> None:
        """Both ranks make one call of ``pair_call``'s signature."""
        self.pair_call()

    def choose(self) -> None:
        """The call of the next rounds.  A late signal makes none meanwhile: rank 1 might not make it."""
        self.depth += 1
        count, form = self.random.choice((1, 5, 600, 3000)), self.random.choice(("", "async", "out", "max"))
        self.is_alone = self.random.random() < 0.5
        one, other = self.alone if self.is_alone else self.one, self.other

        def call(make: Callable[..., Any] | None = None) -> None:
            x, y, out = np.full(count, 2.0), np.full(count, 5.0), np.zeros(count)
            op = kos.ReduceOp.MAX if form == "max" else kos.ReduceOp.SUM
            if not self.is_alone:
                self.theirs.append((type(other).all_reduce(other, y, op, async_op=True), y))
            make = make or one.all_reduce
            if form == "async":
                make(x, op, async_op=True).wait()
            else:
                make(x, op, out=out) if form == "out" else make(x, op)
            expected = 2 if self.is_alone else 5 if form == "max" else 7
            assert ((out if form == "out" else x) == expected).all(), form
            if not self.depth:  # within another call, that one may be what rank 1 waits for
                for work, y in self.theirs:
                    while not work.done():
                        pass
                    assert (y == expected).all()
                self.theirs.clear()

        self.pair_call = call
        self.depth -= 1

    def collect_within(self) -> None:
        threshold = gc.get_threshold()

        def at_end() -> None:
            gc.set_threshold(*threshold)
            self.act(*(self.call, self.forget_and_call) if IN_A_CALL else ())

        def make(*args: Any, **options: Any) -> Any:
            gc.collect()
            gc.disable()
            Cycle(at_end)
            gc.set_threshold(1)
            all_reduce = (self.alone if self.is_alone else self.one).all_reduce
            try:
                gc.enable()
                return all_reduce(*args, **options)
            finally:
                gc.set_threshold(*threshold)
                gc.enable()

        self.pair_call(make)

    def end_code(self) -> None:
        """A call from code that only the recorder keeps, for 1,024 calls."""
        code = compile("result.append(call(*args, **options))", "a line", "exec")
        self.kept.append(weakref.ref(code, lambda _: self.act()))
        del self.kept[:-3000]

        def make(*args: Any, **options: Any) -> Any:
            result: list[Any] = []
            all_reduce = (self.alone if self.is_alone else self.one).all_reduce
            exec(code, {"call": all_reduce, "args": args, "options": options, "result": result})
            return result[0]

        self.pair_call(make)

    def profile(self) -> None:
        def at_event(frame: Any, event: str, argument: object) -> None:
            if event in ("call", "c_call", "c_return") and self.random.random() < 0.02:
                self.act()

        sys.setprofile(at_event)
        try:
            self.pair_call()
        finally:
            sys.setprofile(None)

    def interrupt(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.random.choice((1e-5, 1e-4)))
        for _ in range(5):
            self.pair_call()

    def close_in_thread(self) -> None:
        """Another thread closes a communicator in which this one makes calls."""
        part, x = self.alone.duplicate(), np.ones(self.random.choice((3, 3000)))
        thread = threading.Thread(target=self.random.choice((part.close, part.abort)))
        for count in range(10**6):
            if count == 20:
                thread.start()
            try:
                part.all_reduce(x)
                part.all_reduce(x, async_op=True).wait()
            except KosError:
                break
        thread.join(30)
        assert not thread.is_alive()

    def run(self, rounds: int) -> None:
        sys.unraisablehook = self.failed.append
        signal.signal(signal.SIGALRM, lambda *_: self.act())
        kinds = (self.call, self.collect_within, self.end_code, self.profile, self.interrupt)
        for number in range(rounds):
            if number % 7 == 0:
                self.choose()
            self.random.choice(kinds)() if self.random.random() < 0.98 else self.close_in_thread()
            assert not self.failed, self.failed[0]
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    seed, rounds = map(int, sys.argv[1:3])
    sys.setswitchinterval(1e-5)
    rendezvous = env_rendezvous(30.0, environment(0, 1, free_port()))
    with both_ranks() as pair, kos.init("tcp", rendezvous=rendezvous, timeout=30.0) as alone:
        program = Program(pair, alone, seed)
        gc.freeze()  # collections are then quick
        program.run(rounds)
        print(f"{program.acts} actions, {hits(pair[0])} calls of the core")
        assert hits(pair[0]) > rounds // 4 and program.acts > rounds // 8


if __name__ == "__main__":
    main()
