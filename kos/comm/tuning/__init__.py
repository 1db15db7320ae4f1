"""Tuning tables: measured routes of operations on GPUs (backend, and kernel of an all-reduce).

A table is a JSON file for one kind of GPU, link and number of ranks.  kos ships some in ``kos/comm/tuning/tables``.
The user's own, in $XDG_CACHE_HOME/kos/tuning, take precedence; ``kos bench --write-table`` writes them.  A file that is
damaged or made for another machine is not used, and one warning gives the reason.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kos.comm.control.base import ControlPlane
from kos.cuda.devices import device_info, nvlinks
from kos.errors import InvalidArgument
from kos.files import cache_folder
from kos.memory.symmetric import on_all

log = logging.getLogger(__name__)

FORMAT = 1
UNKNOWN = "unknown links"
"""NVML sometimes does not report the links: such a machine matches every table for its GPU."""
UNMEASURED = ((None, "nccl"),)
"""The route of an operation that a table does not contain."""

_MEASURED = {"send": "send_recv", "recv": "send_recv", "scan": "all_to_all", "exscan": "all_to_all"}
"""The measured operation most like one that is not; a scan is two exchanges."""

Route = tuple[tuple[int | None, str], ...]
"""(largest number of bytes, backend), sorted; None in the last row is no limit."""


# The kernels of ``peer``.

PACKETS = ("one_shot", "two_shot", "ring", "tree")
IN_RANK_ORDER = ("one_shot", "two_shot", "direct", "push", "specialized", "copies")
"""The algorithms that a tuning table may name.  They add in rank order, which ``deterministic=True`` promises."""
T = TypeVar("T")
_RANGES = {"blocks": (0, 128), "threads": (32, 1024), "tile": (256, 65536), "pieces": (1, 8)}
_KINDS = ("symmetric", "ordinary")


@dataclass(frozen=True)
class KernelConfig:
    """An algorithm and its launch parameters; 0 blocks: as many as the packets need."""

    algorithm: str
    blocks: int = 0
    threads: int = 512
    tile: int = 8192  # bytes; of specialized
    pieces: int = 1  # of copies

    def as_json(self) -> dict[str, Any]:
        """The fields that differ from the defaults."""
        defaults = asdict(KernelConfig(self.algorithm))
        return {name: value for name, value in asdict(self).items() if name == "algorithm" or value != defaults[name]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> KernelConfig:
        """Raises InvalidArgument for values that no table may have."""
        launch = KernelConfig(**data)
        if launch.algorithm not in IN_RANK_ORDER:
            raise InvalidArgument(f"algorithm: expected one of {', '.join(IN_RANK_ORDER)}, got {launch.algorithm!r}")
        for name, (least, most) in _RANGES.items():
            value = getattr(launch, name)
            if type(value) is not int or not least <= value <= most:
                raise InvalidArgument(f"{launch.algorithm}: {name}: expected {least} to {most}, got {value!r}")
        if launch.threads % 32:
            raise InvalidArgument(f"{launch.algorithm}: threads: expected a multiple of 32, got {launch.threads}")
        return launch


Rows = Sequence[tuple[int | None, T]]
"""(largest number of bytes, value), sorted; None in the last row is no limit."""


@dataclass(frozen=True)
class Launches:
    """The launches of a group: with both buffers symmetric, and otherwise."""

    symmetric: Rows[KernelConfig]
    ordinary: Rows[KernelConfig]

    def as_json(self) -> dict[str, Any]:
        return {kind: [[limit, launch.as_json()] for limit, launch in getattr(self, kind)] for kind in _KINDS}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Launches:
        """The reverse of ``as_json``.  Raises InvalidArgument for anything else."""
        symmetric, ordinary = (
            tuple((limit, KernelConfig.from_json(row)) for limit, row in by_size(kind, data[kind])) for kind in _KINDS
        )
        return Launches(symmetric, ordinary)


def pick(rows: Rows[T], nbytes: int) -> T:
    """The value of the row for ``nbytes``."""
    return next(value for limit, value in rows if limit is None or nbytes <= limit)


def by_size(name: str, rows: Any) -> list[tuple[int | None, Any]]:
    """The rows; raises InvalidArgument unless their limits increase and the last is null."""
    limits = [limit for limit, _ in rows]
    whole = all(type(limit) is int and 0 < limit < 1 << 63 for limit in limits[:-1])
    if limits[-1:] != [None] or not whole or sorted(set(limits[:-1])) != limits[:-1]:
        raise InvalidArgument(f"{name}: expected increasing sizes, the last null, got {limits}")
    return [(limit, value) for limit, value in rows]


TABLES = Path(__file__).with_name("tables")
DEFAULT = Launches.from_json(json.loads((TABLES / "nvidia-h200-4.json").read_text())["launches"])
"""The launches of an unmeasured machine."""


# The routes.


def key(operation: str, wide: bool, symmetric: bool, graph: bool) -> str:
    """The name of a route, such as "all_reduce 16-bit symmetric graph".

    ``wide``: elements of more than 16 bits.  ``symmetric``: both buffers are symmetric.
    """
    bits, kind = "32-bit" if wide else "16-bit", "symmetric" if symmetric else "ordinary"
    return f"{operation} {bits} {kind} {'graph' if graph else 'eager'}"


@dataclass(frozen=True)
class Table:
    """The measured routes of one kind of machine."""

    gpu: str
    link: str
    ranks: int
    source: str  # its file, for ``explain``
    launches: Launches
    routes: Mapping[str, Route]
    hosts: int = 1

    def route(self, operation: str, wide: bool, symmetric: bool, graph: bool) -> Route:
        """The backend of the operation by size; an unmeasured case takes the route of the most similar one."""
        flags = itertools.product((wide, not wide), (symmetric, not symmetric), (graph, not graph))
        measured = _MEASURED.get(operation, operation.removesuffix("_v"))
        names = [key(measured, *each) for each in flags]
        return next((self.routes[name] for name in names if name in self.routes), UNMEASURED)

    def backends(self) -> set[str]:
        """The backends whose routes calls may take."""
        return {name for route in self.routes.values() for _, name in route}

    def to_json(self) -> dict[str, Any]:
        """The table alone; a file adds ``provenance`` and ``measured``."""
        return {
            "format": FORMAT,
            "gpu": self.gpu,
            "link": self.link,
            "ranks": self.ranks,
            "hosts": self.hosts,
            "launches": self.launches.as_json(),
            "routes": {name: [list(row) for row in route] for name, route in self.routes.items()},
        }


def parse(data: Any, source: str) -> Table:
    """The table that JSON ``data`` describes.  Raises InvalidArgument, with the reason, for invalid data."""
    try:
        if data["format"] != FORMAT:
            raise InvalidArgument(f"format: expected {FORMAT}, got {data['format']!r}")
        data = {"hosts": 1, **data}
        for name, kind in (("gpu", str), ("link", str), ("ranks", int), ("hosts", int)):
            if type(data[name]) is not kind:
                raise InvalidArgument(f"{name}: expected {kind.__name__}, got {data[name]!r}")
        kernels = Launches.from_json(data["launches"])
        routes = {name: tuple(by_size(name, route)) for name, route in data["routes"].items()}
        for name, route in routes.items():
            if wrong := [each for _, each in route if not isinstance(each, str) or not each.isidentifier()]:
                raise InvalidArgument(f"{name}: expected the names of backends, got {wrong[0]!r}")
    except InvalidArgument:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InvalidArgument(f"expected a tuning table, got {type(error).__name__}: {error}") from error
    return Table(data["gpu"], data["link"], data["ranks"], source, kernels, routes, data["hosts"])


# Finding the table.


def user_path(gpu: str, ranks: int, hosts: int = 1) -> Path:
    """The path of the user's own table."""
    return cache_folder() / "tuning" / _file(gpu, ranks, hosts)


def _file(gpu: str, ranks: int, hosts: int = 1) -> str:
    words = "".join(letter if letter.isalnum() else " " for letter in gpu.lower()).split()
    return f"{'-'.join(words)}-{ranks}{f'-on-{hosts}-hosts' if hosts > 1 else ''}.json"


def read(path: Path, gpu: str, link: str, ranks: int, hosts: int = 1) -> Table:
    """The table in a file.  Raises FileNotFoundError, or InvalidArgument if it is damaged or not for such a machine."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"expected a tuning table, got {type(error).__name__}: {error}") from error
    table = parse(data, str(path))
    alike = table.link == link or UNKNOWN in (table.link, link)
    if (table.gpu, table.ranks, table.hosts) != (gpu, ranks, hosts) or not alike:
        both = (table.gpu, table.ranks, table.link, table.hosts), (gpu, ranks, link, hosts)
        words = ["{1} x {0} ({2}) on {3} hosts".format(*each).removesuffix(" on 1 hosts") for each in both]
        raise InvalidArgument(f"measured on {words[0]}, but this is {words[1]}")
    return table


_warned: set[str] = set()


def load(gpu: str, link: str, ranks: int) -> Table:
    """The table for this machine: the user's, the shipped one, the one for the nearest number of ranks, or defaults."""
    nearest = sorted((2, 4, 8), key=lambda other: (abs(other - ranks), -other)) if ranks > 1 else []
    places = [(user_path(gpu, ranks), ranks), (TABLES / _file(gpu, ranks), ranks)]
    places += [(TABLES / _file(gpu, other), other) for other in nearest if other != ranks]
    for path, measured in places:
        try:
            table = read(path, gpu, link, measured)
            return table if measured == ranks else replace(table, source=f"{path.name}, the nearest one")
        except FileNotFoundError:
            continue
        except InvalidArgument as error:
            if str(path) not in _warned:
                _warned.add(str(path))
                log.warning("the tuning table %s is not used: %s", path, error)
    return Table(gpu, link, ranks, "not measured on such a machine: kos bench --write-table", DEFAULT, {})


def for_group(rendezvous: ControlPlane, device: int) -> Table:
    """The table of rank 0, for all ranks of this group; defaults if ranks share a GPU.  Collective.

    An error of one rank is raised on all of them.
    """
    gpus = on_all(rendezvous, "identify its GPU", lambda: device_info(device).uuid.encode())
    if len(set(gpus)) < len(gpus):
        return Table(device_info(device).name, "shared", len(gpus), "none for ranks that share a GPU", DEFAULT, {})
    return of_rank_0(rendezvous, lambda: load(*machine(device), rendezvous.size))


def of_rank_0(rendezvous: ControlPlane, choose: Callable[[], Table]) -> Table:
    """The table that ``choose()`` returns on rank 0.  Collective; an error of one rank is raised on all of them."""
    tables: list[Table] = []

    def send() -> bytes:
        if rendezvous.rank != 0:
            return b""
        table = choose()
        return json.dumps([table.source, table.to_json()]).encode()

    source, data = json.loads(on_all(rendezvous, "choose the tuning table", send)[0])
    on_all(rendezvous, "use the tuning table of rank 0", lambda: tables.append(parse(data, source)))
    return tables[0]


def preferred_on_hosts(rendezvous: ControlPlane) -> str:
    """The backend that ``auto`` uses for host memory by the user's own table, "" without one.

    The file ``host-memory-RANKS.json`` holds ``{"format": 1, "backend": NAME}``.  One that is damaged is not used, and
    one warning gives the reason.
    """
    path = user_path("host memory", rendezvous.size, -(-rendezvous.size // max(rendezvous.local_size, 1)))
    try:
        data = json.loads(path.read_bytes())
        if data["format"] != FORMAT or not isinstance(data["backend"], str):
            raise ValueError(f"expected format {FORMAT} and the name of a backend, got {data!r}")
        return str(data["backend"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("the tuning table %s is not used: %s: %s", path, type(error).__name__, error)
        return ""


def machine(device: int) -> tuple[str, str]:
    """GPU and link, as tables name them."""
    links = nvlinks(device)
    return device_info(device).name, UNKNOWN if links is None else f"{links} NVLinks" if links else "PCIe"


def merged(table: Table, operation: str, wide: bool) -> tuple[list[int], list[dict[tuple[bool, bool], str]]]:
    """The routes of an operation, merged: size limits, and for each size range the backends by (symmetric, graph).

    The last range has no limit.
    """
    routes = {(s, g): table.route(operation, wide, s, g) for s in (False, True) for g in (False, True)}
    limits = sorted({limit for route in routes.values() for limit, _ in route if limit is not None})
    ends = [*limits, limits[-1] + 1 if limits else 1]
    return limits, [{kind: pick(route, end) for kind, route in routes.items()} for end in ends]
