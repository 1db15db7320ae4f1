"""``KOS_PORTS`` and ``KOS_BIND``: every socket at which a rank or a newcomer listens."""

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kos
from kos.errors import RendezvousError
from tests.comm.tcp_ranks import environment, errors_of, free_port, run_processes
from tests.comm.test_jobs import environment as environment_of_jobs
from tests.comm.test_jobs import program
from tests.forked import python
from tests.launcher import MPIRUN, needs_mpirun, run_program

HAS_IPV6 = pytest.mark.skipif(
    "00000000000000000000000000000001" not in Path("/proc/net/if_inet6").read_text()
    if Path("/proc/net/if_inet6").exists() else True,
    reason="this host has no IPv6 loopback address",
)  # fmt: skip

# A group, its parts, and a newcomer, a thread of rank 0: the addresses of all sockets that any of them binds.
EVERYTHING = """
import os, sys, threading, numpy as np, kos
found = set()
def hook(event, arguments):
    if event == "socket.bind" and isinstance(arguments[1], tuple):  # not of a Unix socket
        found.add(arguments[1][:2])
sys.addaudithook(hook)
def newcomer(address):
    with kos.join(address, timeout=60) as comm:
        assert comm.all_reduce(np.ones(1)) == comm.size
comm = kos.init("tcp", timeout=60)
assert comm.all_reduce(np.ones(1)) == comm.size
parts = [comm.split(0), comm.split(comm.rank % 2)]
if comm.rank == 0:
    thread = threading.Thread(target=newcomer, args=(comm.address,))
    thread.start()
comm = comm.grow(1, timeout=60)
assert comm.all_reduce(np.ones(1)) == comm.size == 3
comm.close()
if comm.rank == 0:
    thread.join()
print(found, flush=True)
"""


def taken(count: int) -> Iterator[int]:
    """The first of ``count`` ports in a row at which another program listens."""
    while True:
        with contextlib.ExitStack() as stack:
            first = free_port()
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            yield first
            return


def none_free(port: int) -> str:
    got = "got 1 that are in use or not allowed; a host needs one for each of its ranks in each open group, the world"
    return f"KOS_PORTS: expected a free port from {port} to {port}, {got} included, and one more"


@pytest.fixture
def taken_port():
    yield from taken(1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("KOS_PORTS", value) for value in ("20000", "1-", "20100-20000", "0-5", "65000-65536", "a-b", "１-２")),
        *(("KOS_BIND", value) for value in ("eth0", "localhost", "10.0.0", "10.0.0.0/8", "::g")),
    ],
)
def test_wrong_values_are_refused_by_name(no_launcher, name, value):
    no_launcher.setenv(name, value)
    place = {"rank": 0, "size": 1, "address": "127.0.0.1:1"}
    for call in (kos.init, lambda: kos.init(rendezvous=place), lambda: kos.join("127.0.0.1:1")):
        with pytest.raises(RendezvousError, match=f"^{name}: expected an? .*, got '{value}'$"):
            call()


def test_an_address_of_another_host(no_launcher):
    no_launcher.setenv("KOS_BIND", "192.0.2.1")  # of RFC 5737: no host has it
    message = r"^KOS_BIND: expected an IP address of this host, got 192\.0\.2\.1$"
    for call in (
        lambda: kos.init(rendezvous={"rank": 0, "size": 1, "address": "127.0.0.1:1"}).address,
        lambda: kos.init(rendezvous={"rank": 0, "size": 2, "address": f"192.0.2.1:{free_port()}"}, timeout=20),
        lambda: kos.join("127.0.0.1:1", timeout=20),
    ):
        with pytest.raises(RendezvousError, match=message):
            call()


def test_an_address_at_which_the_others_do_not_look(monkeypatch):
    monkeypatch.setenv("KOS_BIND", "127.0.0.2")
    port = free_port()
    said = errors_of(20, *(environment(rank, 2, port) for rank in range(2)))
    expected = "KOS_BIND: expected the address of MASTER_ADDR=127.0.0.1, or another MASTER_ADDR, got 127.0.0.2"
    assert said == [expected] * 2


@pytest.mark.parametrize("place", ["127.0.0.1", "127.0.0.2", pytest.param("::1", marks=HAS_IPV6)])
def test_every_socket_is_of_the_range_and_the_address(taken_port, place):
    """One of its ports is taken; rank 0 also listens at MASTER_PORT."""
    last = min(taken_port + 40, 65535)
    master = next(port for port in iter(free_port, 0) if not taken_port <= port <= last)
    more = {"KOS_PORTS": f"{taken_port}-{last}", "KOS_BIND": place, "MASTER_ADDR": place, "MASTER_PORT": str(master)}
    results = run_processes(EVERYTHING + f"assert all(host == '{place}' for host, _ in found), found\n", 2, **more)
    outside = set[int]()
    for code, output in results:
        assert code == 0, output
        outside |= {port for _, port in eval(output) if not taken_port <= port <= last}
    assert len(outside) == 1  # MASTER_PORT
    assert taken_port in {port for _, output in results for _, port in eval(output)}  # tried first


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("place", ["", "127.0.0.1", "0.0.0.0", pytest.param("::", marks=HAS_IPV6)])
def test_addresses_of_all_interfaces(place, hosts):
    names = "os.environ['KOS_HOST'] = 'host' + os.environ['RANK']\n" if hosts == 2 else ""
    results = run_processes("import os\n" + names + EVERYTHING, 2, KOS_BIND=place)
    assert [code for code, _ in results] == [0, 0], results


def test_a_range_without_a_free_port(no_launcher, taken_port):
    no_launcher.setenv("KOS_PORTS", f"{taken_port}-{taken_port}")
    no_launcher.setenv("KOS_BIND", "127.0.0.1")
    expected = none_free(taken_port)
    with pytest.raises(RendezvousError) as caught:
        _ = kos.init(rendezvous={"rank": 0, "size": 1, "address": "127.0.0.1:1"}).address
    assert str(caught.value) == expected
    port = free_port()
    said = errors_of(20, *(environment(rank, 2, port) for rank in range(2)))
    assert said == [expected] * 2


@pytest.mark.parametrize("call", ["split(0)", "shrink()", "grow(1)"])
def test_a_range_without_a_free_port_for_a_new_group(taken_port, call):
    """All ranks raise the cause, and at once."""
    text = f"""
import os, threading, kos
def newcomer(address):
    try:
        kos.join(address, timeout=60)
    except kos.errors.RendezvousError:
        pass
comm = kos.init("tcp", timeout=60)
comm.barrier()
if comm.rank == 0:
    os.environ["KOS_PORTS"], os.environ["KOS_BIND"] = "{taken_port}-{taken_port}", "127.0.0.1"
elif comm.rank == 1 and "{call}" == "grow(1)":
    threading.Thread(target=newcomer, args=(comm.address,), daemon=True).start()
try:
    comm.{call}
except kos.errors.KosError as error:
    print(error)
"""
    expected = f"world: rendezvous: rank 0 cannot open its connections: {none_free(taken_port)}"
    for code, output in run_processes(text, 3):
        assert code == 0 and output.strip().removesuffix("; rank 0 aborted because of it") == expected, output


@needs_mpirun
@pytest.mark.parametrize("place", ["", "127.0.0.3", pytest.param("::1", marks=HAS_IPV6)])
def test_two_jobs_in_one_range(tmp_path, taken_port, place):
    """Their ranks are on pretended hosts, so that rank 0 is also called to see whether TCP reaches it."""
    last = min(taken_port + 60, 65535)
    more = {"KOS_PORTS": f"{taken_port}-{last}", "KOS_BIND": place}
    text = "os.environ['KOS_HOST'] = 'host' + os.environ['OMPI_COMM_WORLD_RANK']\n" + EVERYTHING
    path = program(tmp_path, text.replace('kos.init("tcp"', 'kos.init("mpi"'))

    def job(_):
        command = MPIRUN, "-n", "2", *python(), path
        done = run_program(*command, env={**environment_of_jobs(), **more}, cwd="/")
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return set[tuple[str, int]]().union(*map(eval, done.stdout.splitlines()))

    with ThreadPoolExecutor(2) as pool:
        found = set[tuple[str, int]]().union(*pool.map(job, range(2)))
    assert all(taken_port <= port <= last for _, port in found), found
    assert not place or {host for host, _ in found} == {place}
