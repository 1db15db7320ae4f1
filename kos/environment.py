"""The environment variables of kos: one table, which the code, docs/reference/environment.md and ``kos doctor`` use.

A new variable is a row here.  ``python -m docs.hooks.reference`` then writes the page.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLES: dict[str, Variable] = {}
"""All variables by name, in the order of the page."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable, and its row on the page, in Markdown.  A switch has the default ``0`` or ``1``."""

    name: str
    default: str
    about: str
    read_by: str

    def __post_init__(self) -> None:
        VARIABLES[self.name] = self

    def __str__(self) -> str:
        return self.name

    def get(self, environ: Mapping[str, str] = os.environ) -> str:
        """Its value; "" if it is not set."""
        return environ.get(self.name, "")


KOS_SECRET = Variable(
    "KOS_SECRET", "the file `kos/secret` of the user's cache",
    "[the secret](../guides/hosts.md#the-secret) that ranks prove to know; needed on several hosts without MPI, and by "
    "[publishers and subscribers](../guides/weights-to-a-server.md) on several hosts or of several users",
    "`kos.init`, `kos.join`, `kos.transfer`",
)  # fmt: skip
KOS_HOST = Variable(
    "KOS_HOST", "none",
    "the name of the [pretended host](../guides/hosts.md#pretended-hosts) of this rank; on all ranks or on none. A "
    "subscriber maps the memory of a publisher only if this name is the same for both",
    "`kos.init`, `kos.join`, `kos.transfer`",
)  # fmt: skip
KOS_JOIN = Variable(
    "KOS_JOIN", "none",
    "[where newcomers call](../guides/elastic.md#where-newcomers-call): an address, or the path of a file that holds "
    "it",
    "`kos.join`; members, if it is a path: they write it",
)  # fmt: skip
KOS_PORTS = Variable(
    "KOS_PORTS", "ports that the kernel chooses",
    "a range such as `20000-20100` for [the ports at which kos listens](../guides/hosts.md#ports-and-addresses)",
    "`kos.init`, `kos.join`, splits, `grow`, `Publisher`",
)  # fmt: skip
KOS_BIND = Variable(
    "KOS_BIND",
    "the loopback interface if `MASTER_ADDR` is a loopback address, or under mpirun on one host; else all interfaces",
    "the IP address of this host [at which kos listens](../guides/hosts.md#ports-and-addresses); it differs from host "
    "to host",
    "`kos.init`, `kos.join`, splits, `grow`, [`Publisher`](../guides/weights-to-a-server.md#in-two-programs)",
)
KOS_CORE = Variable(
    "KOS_CORE", "1", "`0` leaves the [compiled core](../guides/hosts.md#ranks-of-one-host) unused", "the import of kos"
)
KOS_CPU_VENDOR = Variable(
    "KOS_CPU_VENDOR", "that of `/proc/cpuinfo`",
    "`intel` or `other` forces [two settings](../guides/hosts.md#ranks-of-one-host) of the shared memory; the same on "
    "all ranks of a host",
    "`kos.init`, splits",
)  # fmt: skip
KOS_DEBUG = Variable(
    "KOS_DEBUG", "0", "`1` shows whole tracebacks of uncaught errors",
    "`kos.init`, `kos.join` and their hooks, commands, the pytest plugin",
)  # fmt: skip
KOS_RECORDER_DIR = Variable(
    "KOS_RECORDER_DIR", "none: no dumps at failures",
    "the folder of the dumps of the [flight recorder](../guides/failures.md#the-flight-recorder)",
    "`kos.init`, `kos.join`",
)  # fmt: skip
KOS_RECORDER_SIGNAL = Variable(
    "KOS_RECORDER_SIGNAL", "none", "a signal that dumps the record, such as `USR2`", "`kos.init`, `kos.join`"
)
KOS_RECORDER_TIMING = Variable(
    "KOS_RECORDER_TIMING", "0", "`1` records [durations on the GPU](../guides/gpus.md#seeing-what-runs)",
    "`kos.init`, `kos.join`, splits",
)  # fmt: skip
KOS_NVTX = Variable(
    "KOS_NVTX", "0", "`1` makes [NVTX ranges](../guides/gpus.md#seeing-what-runs)", "`kos.init`, `kos.join`, splits"
)
KOS_COMMIT = Variable(
    "KOS_COMMIT", "the commit of the clone",
    "the commit that results name, for a copy without Git's history", "`kos bench`",
)  # fmt: skip
KOS_CLAIM = Variable(
    "KOS_CLAIM", "set by kos",
    "the process that [is the rank](../guides/hosts.md#processes-that-a-rank-starts), for the programs that it starts",
    "`kos.init`",
)  # fmt: skip
