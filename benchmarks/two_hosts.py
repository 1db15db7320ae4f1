"""Two hosts, as two network namespaces with names of their own, joined by a cable (veth).

Needs root, to make them, and iproute2.  Addresses are of 192.0.2.0/24, which is nobody's (RFC 5737), and
exist in the namespaces only.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

NETWORK, ADDRESSES = "192.0.2.0/24", ("192.0.2.1", "192.0.2.2")
HOSTS = tuple(f"kos-{os.getpid()}-{letter}" for letter in "ab")
CABLE = "kos0"
"""The name of the network's interface on both."""


class Impossible(Exception):
    """Why this machine cannot pretend to be two hosts."""


class Hosts:
    """Two hosts with one cable between them; each has a name, and a file of the names that it knows."""

    def __init__(self, folder: Path) -> None:
        self._files = [folder / host for host in HOSTS]
        # As Debian has it: a host knows itself by a loopback address, of no use to others.
        self._files[0].write_text(f"127.0.0.1 localhost\n127.0.1.1 {HOSTS[0]}\n{ADDRESSES[1]} {HOSTS[1]}\n")
        self._files[1].write_text(f"127.0.0.1 localhost\n{ADDRESSES[0]} {HOSTS[0]}\n127.0.1.1 {HOSTS[1]}\n")

    def on(self, host: int, *command: str) -> list[str]:
        """The command line that runs ``command`` on a host."""
        become = f'mount --bind {self._files[host]} /etc/hosts && hostname {HOSTS[host]} && exec "$@"'
        shell = ["unshare", "--uts", "--mount", "sh", "-c", become, "sh"]
        return ["ip", "netns", "exec", HOSTS[host], *shell, *command]

    def mpirun(self, mpirun: Path | str, folder: Path, ranks: int, *command: str, options: tuple[str, ...] = (),
               map_by: str = "node") -> list[str]:  # fmt: skip
        """The command line by which Open MPI 5's mpirun, on the first host, starts a program on both.

        With ``map_by="node"`` ranks alternate between the hosts, with ``"slot"`` the first half is on the first.
        """
        agent = folder / "agent"  # in place of ssh: called with an address and one line for a shell there
        agent.write_text(f'#!/bin/sh\nshift\nexec {shlex.join(self.on(1))} sh -c "$*"\n')
        agent.chmod(0o755)
        slots = ranks // 2 if map_by == "slot" else ranks
        hosts = ",".join(f"{address}:{slots}" for address in ADDRESSES)
        launch = [str(mpirun), *options, "--prtemca", "plm_ssh_agent", str(agent), "-n", str(ranks)]
        launch += ["--host", hosts, "--map-by", f"{map_by}:oversubscribe"]
        launch += ["--prtemca", "prte_if_include", NETWORK, "--mca", "btl_tcp_if_include", NETWORK]
        return self.on(0, *launch, *command)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise Impossible(f"needs network namespaces: ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts(folder: Path, rate: str = "") -> Iterator[Hosts]:
    """Make the hosts; at the end nothing is left of them. ``folder``: for their files.

    ``rate``: of the cable, each way, as ``tc`` has it, such as ``1gbit``; empty: as fast as the machine copies.
    Raises Impossible, with the reason.
    """
    if os.geteuid() != 0:
        raise Impossible("needs root, to make network namespaces")
    for tool, package in {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "hostname": "hostname"}.items():
        if shutil.which(tool) is None:
            raise Impossible(f"needs {tool} (apt-get install {package})")
    try:
        for host in HOSTS:
            _ip("netns", "add", host)
        _ip("-n", HOSTS[0], "link", "add", CABLE, "type", "veth", "peer", CABLE, "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", CABLE)
            for link in ("lo", CABLE):
                _ip("-n", host, "link", "set", link, "up")
            if rate:
                limit = ["rate", rate, "burst", "256kb", "latency", "50ms"]
                _ip("netns", "exec", host, "tc", "qdisc", "add", "dev", CABLE, "root", "tbf", *limit)
        both = Hosts(folder)
        done = subprocess.run(both.on(0, "true"), capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise Impossible(f"needs namespaces of names and mounts: {done.stderr.strip()}")
        yield both
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, timeout=20)
