"""Collectives on host memory between hosts with several ranks each: the bytes that leave a host, and equal bits."""

import threading
from typing import Any

import numpy as np
import pytest

import kos
from benchmarks.between_hosts import crossing
from kos._core import native
from kos.comm import compression
from kos.comm.compression import FORMATS
from kos.comm.host.tcp import TCPTransport
from kos.comm.host.threads import ThreadTransport
from kos.testing import spawn
from tests.comm.ranks import on_hosts
from tests.comm.tcp_ranks import TCPRanks

HOSTS = [(2, 2), (3, 3), (2, 2, 2)]
COUNT = 180 * 64  # elements: a multiple of all numbers of ranks, in whole blocks
NAMES = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "all_gather_v", "broadcast", "all_to_all")


def call(comm: kos.Communicator, name: str, x: np.ndarray, **options: Any) -> Any:
    if name == "broadcast":
        return comm.broadcast(x, root=1)
    if name == "reduce":
        return comm.reduce(x, root=1)
    if name == "all_gather_v":
        return comm.all_gather_v(x, [x.size] * comm.size, **options)
    return getattr(comm, name)(x, **options)


@pytest.fixture
def leaving(messages, before_call):
    """Bytes that leave all hosts in one call."""
    sent, lock = [0], threading.Lock()

    def counting(self, array, peer, tag):
        local = self.ranks_per_host
        assert local is not None
        if peer // local != self.rank // local:
            with lock:
                sent[0] += array.nbytes

    before_call(ThreadTransport, "isend", counting)

    def count(hosts, name, **options):
        def body(comm):
            call(comm, name, np.ones(COUNT, np.float32), **options)

        sent[0] = 0
        spawn(body, sum(hosts), hosts=list(hosts))
        return sent[0]

    return count


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_as_few_bytes_as_must_leave_a_host(name, hosts, leaving):
    one_way = {"broadcast": 1, "reduce": 1}.get(name, 0)  # hosts that send nothing
    each = crossing({"reduce": "broadcast"}.get(name, name.removesuffix("_v")), 4 * COUNT, len(hosts), hosts[0])
    assert leaving(hosts, name) == each * (len(hosts) - one_way)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_bytes_of_compressed_calls(form, hosts, leaving):
    """Every contribution leaves its host once, and so does every sum.  The sum of a host counts as one contribution."""
    ranks, local = sum(hosts), hosts[0]
    whole = FORMATS[form].nbytes(COUNT)
    contributions, sums = whole * (ranks - local), whole * (len(hosts) - 1)
    assert leaving(hosts, "reduce_scatter", compress=form) == sums
    assert leaving(hosts, "all_reduce", compress=form) == 2 * sums
    assert leaving(hosts, "all_reduce", compress=form, deterministic=True) == contributions + sums
    assert leaving(hosts, "all_gather", compress=form) == sums * ranks
    assert leaving(hosts, "all_gather_v", compress=form) == sums * ranks
    assert leaving(hosts, "all_to_all", compress=form) == contributions


def test_flat_where_hosts_differ(messages):
    """With one rank per host, and with different numbers of ranks per host, the algorithm is not hierarchical."""
    found = [spawn(_choice, sum(hosts), hosts=hosts) for hosts in ([1, 1], [2, 1], [2, 2])]
    assert [{*each} for each in found] == [{(1, "ring")}, {(None, "ring")}, {(2, "hierarchical")}]


def _choice(comm: kos.Communicator) -> tuple[int | None, str]:
    backend: Any = comm.backend
    return backend.transport.ranks_per_host, backend.route_of("all_reduce", 1 << 20).split()[1]


def _sums(comm: kos.Communicator, deterministic: bool = True) -> list[bytes]:
    """Sums in rank order: compressed ones of several segments and uneven parts, and deterministic ones."""
    rng, found = np.random.default_rng(comm.rank), []
    for count in (4, 4 * 64 * 5, 4 * 64 * 3 - 70, 64, 4 * 64 * 40):
        x = (rng.standard_normal(count) * np.exp(rng.uniform(-9, 9, count))).astype(np.float32)
        for form in FORMATS:
            how = {"compress": form, "deterministic": deterministic}
            found += [comm.all_reduce(x, out=np.empty_like(x), **how), comm.all_gather(x, compress=form)]
            found += [comm.reduce_scatter(x, **how)] if count % 4 == 0 else []
        found.append(comm.all_reduce(x, deterministic=True, out=np.empty_like(x)))
    return [each.tobytes() for each in found]


def test_the_same_bits_on_any_hosts_and_in_any_segments(request, monkeypatch):
    """Also the bits that the last rank computes, and over sockets between hosts with shared memory within each.

    If rank order is not requested, hosts of several ranks first add within each host.
    """

    def unordered(comm):
        return _sums(comm, deterministic=False)

    expected, in_phases = spawn(_sums, 4), spawn(unordered, 4, hosts=[2, 2])
    request.getfixturevalue("messages")
    monkeypatch.setattr(compression, "SEGMENT", 64)
    on_hosts(monkeypatch, (2, 2))
    for found in (spawn(_sums, 4, hosts=[2, 2]), spawn(_sums, 4, hosts=[3, 1]), TCPRanks(4).run(_sums)):
        assert found == expected
    for found in (spawn(unordered, 4, hosts=[2, 2]), TCPRanks(4).run(unordered)):
        assert found == in_phases != expected
    assert spawn(unordered, 4, hosts=[3, 1]) == expected
    assert expected[0][0] == expected[1][0] and expected[0][2] != expected[1][2]


def _calls(comm: kos.Communicator) -> None:
    for name in NAMES:
        call(comm, name, np.ones(COUNT, np.float32))
    comm.all_reduce(np.ones(COUNT, np.float32), compress="fp8")
    comm.all_reduce(np.ones(COUNT, np.float32), deterministic=True)


@pytest.mark.skipif(native is None, reason="needs the compiled core")
def test_messages_within_a_host_use_no_socket(monkeypatch, before_call):
    peers = set()
    before_call(TCPTransport, "isend", lambda self, array, peer, tag: peers.add((self.rank, peer)))
    on_hosts(monkeypatch, (2, 2))
    TCPRanks(4).run(_calls)
    assert peers and all(rank // 2 != peer // 2 for rank, peer in peers)
