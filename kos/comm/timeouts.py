"""The texts of timeouts: what an error says about a wait that took too long, and about the ranks that are late.

The caller passes the names of the late ranks.  ``FailureLog`` (failures.py) decides which ranks the error names;
``HostBackend.late`` and ``GPUBackend.late`` know which ranks delay a call.
"""

from __future__ import annotations

from collections.abc import Sequence

ARRIVE, CONNECT, ANSWER, REPLY = "did not arrive", "did not connect", "did not answer", "gave no answer"
JOIN = "did not join the store"
GO_ON = "did not arrive or went no further"
"""For late ranks that may have begun the call.  ``ARRIVE`` is for ranks that are known not to have begun it."""
UNKNOWN = "which ranks are late is not known"


def late(names: str, verb: str = ARRIVE, within: float | None = None) -> str:
    """Ranks that are late: ``ranks [1] did not arrive``; with a limit: ``ranks [1] did not arrive within 5 s``."""
    return f"{names} {verb}" + ("" if within is None else f" within {within:g} s")


def rejected(callers: list[str]) -> str:
    """Callers that rank 0 rejected, which may be the late ranks."""
    return f"rank 0 rejected {', '.join(callers)}: expected the same secret (KOS_SECRET) on all ranks, got another"


def awaited_by(waiting: str) -> str:
    """A clause after ``late``: the ranks that are late only because they wait for those ranks."""
    return f", for which {waiting} wait"


def unasked(names: str, hub: str) -> str:
    """Ranks of other hosts of which nothing is known; ``hub`` is the rank of the hub, or all ranks of its host."""
    return f"{names} could not be asked, because {hub}, through which hosts query each other, did not answer"


def cycle(names: str, one_group: bool) -> str:
    """A cycle of ranks that wait for one another, in calls of the same group or of several."""
    return f"{names} wait for one another" + ("" if one_group else ", in calls of several groups")


def left_out(call: str, me: str) -> str:
    """The error of a rank that a change of the membership has left out."""
    return f"{call}: {me} was left out: the others continued without it, because it did not answer"


def last_called(name: str, call: str) -> str:
    """The last call of a late rank of this host, with its line in the program."""
    return f"the last known call of {name}: {call}"


def incomplete(seconds: float | None) -> str:
    """An operation that is not complete."""
    return f"not complete after {seconds} s"


def unbegun(seconds: float | None) -> str:
    """Work on a GPU that not all ranks have begun."""
    return f"not begun by all ranks after {seconds:g} s"


def stuck(names: str) -> str:
    """A collective in shared memory that every rank has begun: the ranks that do not continue."""
    return f"every rank arrived, but {names} went no further"


def awaited(names: str) -> str:
    """A collective by messages: the ranks whose messages are missing."""
    return f"still waiting for {names}"


def unsent(names: str, tag: int) -> str:
    """A missing message: its sender; a ``tag`` below 0 is any tag."""
    return f"{names} sent nothing with tag {tag}" if tag >= 0 else f"{names} sent nothing"


def unreceived(names: str) -> str:
    """A message that was not received: its receiver."""
    return f"{names} did not receive"


def unreached(me: str, other: str, seconds: float, problem: str) -> str:
    """A rank that could not connect to another one, and why."""
    return f"{late(me, f'did not reach {other}', seconds)}: {problem}"


def waited(me: str, seconds: float, others: str) -> str:
    """A wait in MPI, which does not report the late ranks."""
    return f"{me} waited {seconds:g} s for {others}"


def unstarted(seconds: float, missing: str = "") -> str:
    """MPI_Init, which waits for all ranks: those that are ``missing``, if they are known."""
    if missing:
        return f"{missing} did not arrive within {seconds:g} s, as MPI_Init needs all ranks"
    return f"MPI_Init did not end within {seconds:g} s; {UNKNOWN}"


def running(ranks: list[int], size: int, seconds: float) -> str:
    """Threads of ``kos.testing.spawn`` that have not returned."""
    return f"ranks {ranks} of {size} are still running after {seconds:g} s"


def too_few(call: str, came: int, wanted: int, address: str, seconds: float, refused: Sequence[str] = ()) -> str:
    """Newcomers are missing; ``refused`` is why others were refused."""
    why = f"; refused: {'; '.join(dict.fromkeys(refused))}" if refused else ""
    return f"{call}: {came} of {wanted} newcomers joined at {address} within {seconds:g} s{why}"


def not_admitted(address: str, seconds: float, waited: str) -> str:
    """No member has admitted a newcomer; ``waited`` is what it has waited for."""
    return f"join: expected members at {address} that admit newcomers within {seconds:.3g} s, got none: {waited}"
