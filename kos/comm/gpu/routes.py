"""The routes of a communicator on GPUs: the choice for each signature, and the launch in a group of one rank.

A route is a ``contract.Backend``: ``nccl``, ``peer``, a backend of another package, or phases between hosts
(``hierarchical.py``).  All ranks choose alike: they share one tuning table, and choose by arguments that are equal on
all ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kos.comm.contract import Backend
from kos.comm.operation import AUTO, Operation
from kos.comm.reduction import ReduceOp
from kos.comm.tuning import Table, merged
from kos.cuda.kernels import RECV, SEND, Plan, copy_launch
from kos.cuda.streams import is_captured
from kos.dtypes import DTYPES, DType

PHASES = "hierarchical"
"""The name of phases between hosts in tuning tables, as an algorithm and as a route."""

_UNEVEN = frozenset({"all_to_all_v", "gather_v", "scatter_v", "send", "recv", "send_recv"})
"""Operations whose sizes may differ between ranks.  Each of them always takes its route for ``_UNEVEN_BYTES``."""
_UNEVEN_BYTES = 1 << 20
_BY_OUTPUT = frozenset({"scatter", "all_gather_v"})
"""Operations whose outputs, not inputs, have the same size on all ranks."""

Choice = Backend | dict[tuple[bool, bool], Backend]
"""A route; or routes by (whether both buffers are symmetric, whether the call is captured in a graph)."""


class Choices:
    """The choice between routes for the calls of one communicator."""

    def __init__(self, routes: Sequence[Backend], table: Table | None) -> None:
        self.table, self._by_name = table, {route.name: route for route in routes}
        kernels = (self._by_name[name] for name in ("peer", "nccl") if name in self._by_name)
        self.ordered = next(kernels, routes[0])
        """The route that adds in rank order and allocates.  It also runs calls for which the table has no choice."""
        self._choices: dict[tuple[str, DType], tuple[list[int], list[Choice]]] = {}

    def use(self, table: Table) -> None:
        """Choose by this table from now on."""
        self.table = table
        self._choices.clear()

    def of(self, o: Operation) -> tuple[Backend, bool]:
        """The route of ``o``, and whether the choice is the same inside and outside of a graph."""
        buffer, phases = o.send or o.recv, self._by_name.get(PHASES)
        if buffer is None:
            return self.ordered, True
        if o.options.algorithm != AUTO:
            named = phases is not None and o.options.algorithm == PHASES and phases.carries(o)
            return self._by_name[PHASES] if named else self.ordered, True
        if o.options.compress and phases is not None and phases.carries(o):
            return phases, True
        if o.options.deterministic or o.options.compress or (o.options.overlap and self.ordered.overlapped(o)):
            return self.ordered, True
        limits, choices = self._of_operation(o.name, buffer.dtype)
        if o.name in _BY_OUTPUT and o.recv is not None:
            buffer = o.recv
        choice = choices[bisect_left(limits, buffer.count)]
        if isinstance(choice, dict) and o.name in _UNEVEN:
            choice = choice[False, False]
        if not isinstance(choice, dict):
            return choice if choice.carries(o) else self.ordered, True
        symmetric = self.ordered.is_symmetric(o)
        both = choice[symmetric, False], choice[symmetric, True]
        uncaptured, graph = (each if each.carries(o) else self.ordered for each in both)
        return uncaptured if uncaptured is graph or not is_captured(buffer.stream) else graph, uncaptured is graph

    def _of_operation(self, operation: str, dtype: DType) -> tuple[list[int], list[Choice]]:
        """Size limits in elements, and the choice for sizes up to each limit; one more choice for larger sizes."""
        if (known := self._choices.get((operation, dtype))) is not None:
            return known
        limits, names = ([], [{}]) if self.table is None else merged(self.table, operation, dtype.itemsize > 2)
        choices: list[Choice] = []
        for each in names:
            # A table may name a backend that cannot be used here.
            parts = {kind: self._by_name.get(name, self.ordered) for kind, name in each.items()}
            alike = set(parts.values()) or {self.ordered}
            choices.append(alike.pop() if len(alike) == 1 else parts)
        if operation in _UNEVEN:
            limits, choices = [], [choices[bisect_left(limits, _UNEVEN_BYTES)]]
        self._choices[operation, dtype] = [limit // dtype.itemsize for limit in limits], choices
        return self._choices[operation, dtype]

    def route_of(self, name: str, nbytes: int, symmetric: bool, graph: bool) -> str:
        """The route of an operation on float32, as ``Communicator.explain`` shows it."""
        limits, choices = self._of_operation(name, DTYPES["float32"])
        choice = choices[bisect_left(limits, nbytes // 4)]
        route = choice[symmetric, graph] if isinstance(choice, dict) else choice
        return route.route_of(name, nbytes, symmetric, graph)


def single_rank_plan(o: Operation, device: int) -> Plan | None:
    """How an operation runs in a group of one rank: as a copy, or as nothing.

    None for a reduction of bool, an operation with a factor or a chosen algorithm, which runs as in other groups.
    """
    send, recv, reduction = o.send, o.recv, o.reduction
    if reduction is not None and (reduction.op is ReduceOp.PREMUL_SUM or reduction.dtype.kind == "bool"):
        return None
    if o.options.algorithm != AUTO:
        return None
    nbytes = 0 if send is None or recv is None or send is recv else recv.nbytes
    return Plan((copy_launch(RECV, SEND, nbytes, device),) if nbytes else (), waits=False)
