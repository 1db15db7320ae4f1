"""The words of every timeout: what an error says of a wait that took too long, and of the ranks that are late.

Each caller knows who is late, and passes their names.  ``Ledger.overdue`` (failures.py) decides which ranks the error
names, and ``Backend.timed_out`` (backend.py) makes the error of a call.
"""

from __future__ import annotations

ARRIVE, CONNECT, ANSWER, REPLY = "did not arrive", "did not connect", "did not answer", "gave no answer"
JOIN = "did not join the store"
UNKNOWN = "which ranks did not arrive is not known"


def late(names: str, verb: str = ARRIVE, within: float | None = None) -> str:
    """What ranks did not do: ``ranks [1] did not arrive``, if given ``within 5 s``."""
    return f"{names} {verb}" + ("" if within is None else f" within {within:g} s")


def late_for(culprits: str, waiting: str) -> str:
    """Of two kinds of late ranks: those that block the others, and those that only wait for them."""
    return f"{late(culprits)}, for which {waiting} wait"


def incomplete(seconds: float | None) -> str:
    """Of an operation."""
    return f"not complete after {seconds} s"


def unbegun(seconds: float | None) -> str:
    """Of work on a GPU."""
    return f"not begun by all ranks after {seconds:g} s"


def stuck(names: str) -> str:
    """Of a collective in shared memory that every rank has begun."""
    return f"every rank arrived, {names} went no further"


def awaited(names: str) -> str:
    """Of a collective's messages."""
    return f"still waiting for {names}"


def unsent(names: str, tag: int) -> str:
    """Of the sender of a message."""
    return f"{names} sent nothing with tag {tag}"


def unreceived(names: str) -> str:
    """Of the receiver of a message."""
    return f"{names} did not receive"


def unreached(me: str, other: str, seconds: float, problem: str) -> str:
    """Of a rank that could not connect, and why."""
    return f"{late(me, f'did not reach {other}', seconds)}: {problem}"


def waited(me: str, seconds: float, others: str) -> str:
    """Of a wait in MPI, which does not tell who is late."""
    return f"{me} waited {seconds:g} s for {others}"


def survivors(seconds: float) -> str:
    """Of a shrink under ULFM, which does not tell who is late."""
    return f"not all surviving ranks arrived within {seconds:g} s"


def running(ranks: list[int], size: int, seconds: float) -> str:
    """Of the threads of ``kos.testing.spawn``."""
    return f"ranks {ranks} of {size} are still running after {seconds:g} s"
