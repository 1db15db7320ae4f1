"""Ranks of this machine that pretend to be on several hosts (``KOS_HOST``), as threads, over sockets and under mpirun.

What is shared within a host and what goes between hosts, the promises of every collective, and failures.
"""

import os
import re
from typing import Any

import numpy as np
import pytest

import kos
from kos._core import native
from kos.comm.control.place import env_rendezvous
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.gpu import devices as gpu_devices
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.schedules import algorithms
from kos.errors import BackendUnavailable, CollectiveTimeout, InvalidArgument, RendezvousError
from kos.testing import spawn
from kos.testing.conformance import cases
from tests.comm.fake_nccl import no_gpu, of_nccl
from tests.comm.ranks import MockRanks, MPIRanks, on_each_rank, on_hosts, split_among_jobs
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import TCPRanks, environment, free_port, run_processes, run_ranks, run_threads
from tests.comm.test_jobs import needs_mpirun
from tests.comm.test_shared_failures import ULFM, job
from tests.fake_cuda import GPU
from tests.run import RANK_VARIABLES

OF_FOUR = [(2, 2), (3, 1), (1, 1, 1, 1)]  # ranks of each host
OF_MPI = {"2": [(1, 1)], "3": [(2, 1)], "4": OF_FOUR}.get(os.environ.get("OMPI_COMM_WORLD_SIZE", ""), [])
UNDER_MPIRUN = any(name in os.environ for name in RANK_VARIABLES)
KINDS = [(kind, hosts) for kind in ("mock", "tcp") for hosts in OF_FOUR if not UNDER_MPIRUN]
KINDS += [("mpi", hosts) for hosts in OF_MPI or [()]]

ALIKE = re.compile(
    r".* (float16|bfloat16|int32|bool)\b.*|.*, (a rank is late|rank 0 gives up|messages differ)|"
    "sends_need_no_further_call|one_poll_advances_all_messages|shapes_and_scalars|barrier_waits_for_all_ranks|close|"
    "repeated|waiting_for_one_advances_the_other_across_groups|messages_from_any_rank|receives_keep_their_order|"
    "views_put_and_get|refused|refused_sizes|messages|cancelled"
)
"""The names of the promises for which it does not matter on which hosts the ranks are."""
CASES = [case for case in cases() if not ALIKE.fullmatch(case.name)]


class Ranks:
    """``run(fn)`` runs ``fn(comm)`` on the ranks of ``kind``, so many on each of the ``hosts``."""

    def __init__(self, kind: str, hosts: tuple[int, ...], start: Any) -> None:
        self.kind, self.hosts, self.run = kind, hosts, start.run

    def near(self, rank: int) -> list[int]:
        """The ranks on the host of ``rank``."""
        ends = np.cumsum(self.hosts)
        host = int(np.searchsorted(ends, rank, side="right"))
        return list(range(ends[host] - self.hosts[host], ends[host]))


def named(kind: str, hosts: tuple[int, ...], *more: Any) -> Any:
    """Parameters of a test: the ranks, and ``more``."""
    name = "-".join([f"{kind} {'+'.join(map(str, hosts))}", *map(str, more)])
    marks = [pytest.mark.mpi] * (kind == "mpi")
    return pytest.param((kind, hosts), *more, marks=marks, id=name)


CHOSEN = {"mock": CASES[::3], "tcp": CASES, "mpi": split_among_jobs(CASES, 2)}
PROMISES = [
    named(kind, hosts, case)
    for kind, hosts in KINDS
    for number, case in enumerate(CHOSEN[kind])
    if hosts not in OF_FOUR or hosts == OF_FOUR[number % 3]
]
"""All promises on tcp, a third on threads, and half in each job of mpirun.  Each runs on one of ``OF_FOUR``."""


@pytest.fixture(params=[named(*each) for each in KINDS])
def ranks(request, monkeypatch):
    kind, hosts = request.param
    if kind == "mock":
        return Ranks(kind, hosts, MockRanks(sum(hosts), hosts))
    on_hosts(monkeypatch, hosts)
    start = TCPRanks(sum(hosts)) if kind == "tcp" else MPIRanks(request.getfixturevalue("mpi_world"))
    return Ranks(kind, hosts, start)


@pytest.mark.parametrize(("ranks", "case"), PROMISES, indirect=["ranks"])
def test_promise(ranks, case, request):
    if ranks.kind == "mock":
        request.getfixturevalue("messages")
    ranks.run(lambda comm: case.applies(comm) and case.call(comm))


@pytest.mark.parametrize("short", ["on all", "on rank 0"])
def test_who_is_late(ranks, short):
    """An error of one rank reaches the other ranks, including those that wait for a rank of their own host.

    Between hosts, tcp names the ranks that a rank waits for, which may be waiting themselves. mpi may name none.
    """

    def body(comm):
        part, late = comm.duplicate(), comm.size - 1
        if comm.rank != late:
            named = {"mock": rf"ranks \[{late}\] did not", "tcp": r"ranks \[", "mpi": rf"ranks \[{late}\]|is not known"}
            with pytest.raises(CollectiveTimeout, match=named[ranks.kind]):
                part.all_reduce(np.ones(5), timeout=0.5 if short == "on all" or comm.rank == 0 else 100)
        comm.barrier()
        part.abort()

    ranks.run(body)


@pytest.mark.parametrize("ranks", [named("mpi", hosts) for hosts in OF_MPI or [()]], indirect=True)
@on_each_rank("ranks.run")
def test_a_rank_that_does_not_come_is_named(comm, /):
    """Every rank names it, also if several ranks end the call at their own timeout.

    Meanwhile, it waits in another job.
    """
    comm.barrier()
    late = comm.size - 1
    if comm.rank != late:
        with pytest.raises(CollectiveTimeout, match=rf"ranks \[{late}\] did not arrive") as caught:
            comm.all_reduce(np.ones(5), timeout=2)
        assert caught.value.ranks == (late,)


def test_what_ranks_share(ranks):
    def body(comm):
        near = ranks.near(comm.rank)
        assert comm.local_ranks == near
        assert (comm.local_rank, comm.local_size) == (near.index(comm.rank), len(near))
        host = comm.split("host")
        assert host.all_gather(np.array(comm.rank)).tolist() == near == host.world_ranks
        shared = host.allocate(3, np.int64)
        shared[:] = comm.rank
        host.barrier()
        assert [view[0] for view in host.views(shared)] == near
        host.barrier()
        with pytest.raises(BackendUnavailable, match=f"views: .* got {ranks.kind} on several hosts"):
            comm.views(comm.allocate(3, np.int64))
        if ranks.kind != "mock":
            assert comm.backend.shares_memory == (len(near) > 1 and native is not None)
            assert not comm.backend.one_host
            assert host.backend.one_host == (host.size == 1 or native is not None)
        across = comm.split(comm.local_rank)
        assert across is not None and across.local_size == 1
        across.barrier()

    ranks.run(body)


@needs_core
def test_hosts_without_shared_memory_beside_others_with_it(monkeypatch):
    """Hosts without shared memory take part in the exchanges of the others."""

    def body(rank):
        rendezvous = env_rendezvous(20.0, environment(rank, 3, port, KOS_HOST="b" if rank == 2 else "a"))
        comm = kos.init("tcp", rendezvous=rendezvous, timeout=20.0)
        assert (comm.backend.calls is None) == (rank < 2)
        assert (comm.all_reduce(np.full(70_001, comm.rank + 1.0)) == 6).all()
        assert comm.all_gather_bytes(b"%d" % rank) == [b"0", b"1", b"2"]
        comm.close()
        rendezvous.close()

    port = free_port()
    monkeypatch.setattr(native, "MAX_RANKS", 1)
    assert run_threads(*[lambda rank=rank: body(rank) for rank in range(3)]) == [None] * 3


@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "reduce"])
@on_each_rank("ranks.run")
def test_every_schedule(comm, /, call):
    """Hierarchical ones too."""
    for algorithm in algorithms(call):
        for count in (1, 70_001):
            x = np.full(count, comm.rank + 1.0)
            getattr(comm, call)(x, algorithm=algorithm, **({} if call == "all_reduce" else {"root": 0}))
            expected = 1 if call == "broadcast" else comm.size * (comm.size + 1) / 2
            assert (call == "reduce" and comm.rank) or (x == expected).all(), algorithm


LARGE = """
import os
import numpy as np, kos
os.environ["KOS_HOST"] = "aabb"[int(os.environ["OMPI_COMM_WORLD_RANK"])]
comm = kos.init("mpi", timeout=20)
count, after, before = 4_194_307, {0: 2, 2: 3, 3: 1, 1: 0}, {2: 0, 3: 2, 1: 3, 0: 1}
x, y = np.full(count, comm.rank, np.float32), np.empty(count, np.float32)
for _ in range(2):
    gathered = comm.all_gather_v(x, counts=[count] * 4).reshape(4, count)
    assert (gathered == np.arange(4)[:, None]).all()
    assert (comm.send_recv(x, y, after[comm.rank], before[comm.rank]) == before[comm.rank]).all()
    assert (comm.all_to_all(x[:-3]).reshape(4, -1) == np.arange(4)[:, None]).all()
    for _ in range(4):
        y[:] = 1
        assert (comm.all_reduce(y, compress="fp8", deterministic=True) == 4).all()
print("done", flush=True)
comm.close()
"""
TWO_COPIES = """
from kos.comm.host.shared import transport
transport.read_memory = lambda *_: None
"""


@needs_mpirun
@pytest.mark.parametrize("before", ["", TWO_COPIES], ids=["one copy", "two copies"])
def test_large_messages_of_mpi_progress_while_a_rank_waits_within_its_host(before, tmp_path):
    """Over sockets, MPI sends only while the sender calls it.

    The same holds for shared memory that is copied twice.
    """
    assert job(tmp_path, 4, before + LARGE, "--mca", "btl", "self,tcp") == ["done"] * 4


KILLED = """
import os, signal
import numpy as np, kos
if "OMPI_COMM_WORLD_RANK" in os.environ:
    os.environ["KOS_HOST"] = {names}[int(os.environ["OMPI_COMM_WORLD_RANK"])]
comm = kos.init(timeout=60)
me, x, child = comm.rank, np.ones(4), 0
if me == 1 and not {names}:
    child = os.fork()
    if not child:
        os.closerange(0, 3)
        signal.alarm(100)
        signal.pause()
children = comm.all_gather(np.array(child))
try:
    comm.all_reduce(x)
    if me == {killed}:
        os.kill(os.getpid(), 9)
    while True:
        comm.{call}
except kos.errors.RankLost as error:
    named = error.ranks, "rank {killed} is gone: " in str(error)
rest = comm.shrink()
left = rest.all_gather(np.array(me)).tolist()
assert (rest.all_reduce(np.full(100_000, me)) == sum(left)).all()
print(*named, left, [left[rank] for rank in rest.local_ranks], rest.split("host").world_ranks, flush=True)
rest.close()
if me == 0 and children[1]:
    os.kill(children[1], signal.SIGKILL)
os._exit(0)
"""


def after_a_kill(hosts: tuple[int, ...], killed: int = 1) -> list[str]:
    """What the survivors print."""
    near = Ranks("", hosts, MockRanks(4)).near
    left = [rank for rank in range(4) if rank != killed]
    homes = [[rank for rank in near(me) if rank != killed] for me in left]
    return [f"({killed},) True {left} {home} {home}" for home in homes]


@pytest.mark.parametrize("hosts", OF_FOUR, ids=str)
def test_a_killed_rank_on_tcp(hosts, monkeypatch):
    """Also if a process that it has forked continues."""
    on_hosts(monkeypatch, hosts)
    results = run_processes(KILLED.format(names=[], killed=1, call="all_reduce(x)"), 4)
    assert [text.strip() for code, text in results if code == 0] == after_a_kill(hosts), results


@needs_mpirun
@pytest.mark.parametrize(("hosts", "killed", "call"), [
    *((hosts, 1, "all_reduce(x)") for hosts in OF_FOUR), ((4,), 0, "barrier()"),
    pytest.param((4,), 3, "all_reduce(np.ones(100_000), algorithm='ring')", marks=pytest.mark.slow),
    pytest.param((1, 1, 1, 1), 0, "all_reduce(np.ones(100_000))", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_killed_rank_on_mpi(hosts, killed, call, tmp_path):
    names = [f"host {host}" for host, count in enumerate(hosts) for _ in range(count)]
    lines = job(tmp_path, 4, KILLED.format(names=names, killed=killed, call=call), *ULFM)
    assert sorted(lines) == sorted(after_a_kill(hosts, killed))


KILLED_HOST = """
import os, signal, kos, kos.comm.failures, numpy as np
kos.comm.failures.HOST_SECONDS = 30.0  # on a busy machine, the processes of a host may end one long after the other
comm = kos.init(timeout=60)
pids = comm.all_gather(np.array(os.getpid())).tolist()
try:
    if comm.rank == {killer}:
        for rank in {killed}:
            os.kill(pids[rank], signal.SIGKILL)
    while True:
        {call}
except kos.errors.RankLost as error:
    print(error.ranks, "host {name} (ranks {killed}) is gone: its connection was closed" in str(error), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("call", ["comm.all_reduce(np.ones(4))", "comm.all_gather_bytes(b'x')"])
@pytest.mark.parametrize("killed", [[0, 1], [2, 3]], ids=["host of the hub", "other host"])
def test_a_killed_host_on_tcp(killed, call, monkeypatch):
    on_hosts(monkeypatch, (2, 2))
    name, killer = f"{killed[0] // 2}", (killed[0] + 2) % 4
    results = run_processes(KILLED_HOST.format(killer=killer, killed=killed, call=call, name=name), 4)
    left = [text.strip() for code, text in results if code == 0]
    assert left == [f"{tuple(killed)} True"] * 2, results


WITHOUT_A_HUB = """
import numpy as np, kos
os.environ["KOS_HOST"] = os.environ["OMPI_COMM_WORLD_RANK"]
comm = kos.init(timeout=60)
group = comm.duplicate()
comm.barrier()
if comm.rank == 0:
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
try:
    group.recv(np.ones(1), 2) if comm.rank == 1 else comm.barrier()
except kos.errors.RankLost as error:
    print(comm.rank, error.ranks, flush=True)
if comm.rank == 2:
    time.sleep(5)  # it sends nothing, and nobody can say so
os._exit(0)
"""


@needs_mpirun
def test_who_waits_for_a_rank_whose_failure_the_lost_hub_does_not_report(tmp_path):
    """The first cause is the group's rank 0, which ran the hub."""
    assert sorted(job(tmp_path, 3, WITHOUT_A_HUB, *ULFM)) == ["1 (0,)", "2 (0,)"]


REFUSED = """
import numpy as np, kos
os.environ["KOS_HOST"] = os.environ["OMPI_COMM_WORLD_RANK"]
comm = kos.init(timeout=60)
if comm.rank == 1:
    comm.send(np.ones(60_000, np.float32), 0, timeout=10)
else:
    try:
        comm.recv(np.zeros(100_000, np.float32), 1)
    except kos.errors.CollectiveMismatch as error:
        print(error.expected, error.got, sep=", ")
comm.rendezvous.barrier()  # which does not call MPI
print(comm.rank, "went on", flush=True)
"""


WITHOUT_SINGLE_COPIES = (
    "--mca", "pml", "ob1", "--mca", "smsc", "^cma,xpmem,knem", "--mca", "btl_vader_single_copy_mechanism", "none",
)  # fmt: skip
"""Options for processes that may not read each other's memory, of Open MPI 5 and of Open MPI 4."""


@needs_mpirun
@pytest.mark.parametrize("options", [(), WITHOUT_SINGLE_COPIES], ids=["single copies", "without"])
def test_a_refused_message_does_not_leave_its_sender_waiting(options, tmp_path):
    """Without single copies, Open MPI completes the send only while the receiver calls MPI."""
    refused = "100000 elements of float32, 60000 elements of float32"
    assert sorted(job(tmp_path, 2, REFUSED, *options)) == ["0 went on", "1 went on", refused]


WITHOUT_TCP = """
import numpy as np, kos
from kos.comm.control import mpi as mpi, place
rank = os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["KOS_HOST"] = {hosts}[int(rank)]
place.loopback_id = lambda: os.environ["KOS_HOST"]
reach, refused = mpi.unreachable, "rank 2 did not reach rank 0 at x:1: refused"
mpi.unreachable = lambda rank, offer: refused if rank == 2 else reach(rank, offer)
comm = kos.init(timeout=60)
assert comm.backend_name == "mpi" and not comm.probes["tcp"].usable
halves = [comm.split(comm.rank % 2, -comm.rank), comm.split("host"), comm.duplicate()]
for group in (comm, *halves):
    assert (group.all_reduce(np.full(70_000, 1.0)) == group.size).all()
    assert group.all_gather_bytes(b"x" * group.rank) == [b"x" * each for each in range(group.size)]
try:
    comm.shrink()
except kos.errors.BackendUnavailable as error:
    print(comm.rank, halves[0].world_ranks, comm.local_ranks, error, flush=True)
for group in (*halves, comm):
    group.barrier()
    group.close()
"""


@needs_mpirun
@pytest.mark.parametrize("hosts", [["a", "a", "b", "b"], ["a", "b", "c", "d"]], ids=str)
def test_hosts_without_tcp_between_them(hosts, tmp_path):
    """MPI carries init, splits and collectives."""
    refused = "shrink: expected hosts that reach each other by TCP, got: rank 2 did not reach rank 0 at x:1: refused"
    near = [[other for other in range(4) if hosts[other] == hosts[rank]] for rank in range(4)]
    assert sorted(job(tmp_path, 4, WITHOUT_TCP.format(hosts=hosts))) == [
        f"{rank} {[[2, 0], [3, 1]][rank % 2]} {near[rank]} {refused}" for rank in range(4)
    ]


# Names that are wrong, and what else names give.

WRONG = {
    "some only": (["a", "", "b"], "expected a name on all ranks or on none, got none on ranks \\[1\\]"),
    "most lack it": (["a", "", ""], r"expected a name on all ranks or on none, got none on ranks \[1, 2\]"),
    "too long": (["a", "b" * 70_000, "c"], "expected a name of at most 64 printable characters, got 'b{65}' on ranks"),
    "not printable": (["a", "a", "c\n"], r"expected a name of at most 64 printable characters, got 'c\\n' on ranks"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("kind", ["mock", "tcp"])
def test_wrong_names(kind, case):
    """All ranks refuse them, and nothing is left open."""
    names, message = WRONG[case]
    group, port = ThreadGroup(3), free_port()

    def body(rank):
        rendezvous = ThreadControlPlane(group, rank, 20, host=names[rank])
        if kind == "tcp":
            rendezvous = env_rendezvous(20, environment(rank, 3, port, KOS_HOST=names[rank]))
        with pytest.raises(RendezvousError, match=f"KOS_HOST: {message}") as raised:
            kos.init(kind, rendezvous=rendezvous)
        assert raised.value.on_every_rank and "\n" not in str(raised.value)
        rendezvous.barrier()
        rendezvous.close()

    assert run_threads(*(lambda rank=rank: body(rank) for rank in range(3))) == [None] * 3


@pytest.mark.parametrize("hosts", [[2, 1], [4, 0], ["2", "2"], 4, [1] * 5], ids=str)
def test_hosts_of_spawn_that_do_not_add_up(hosts):
    with pytest.raises(InvalidArgument, match="hosts: expected"):
        spawn(lambda comm: None, 4, hosts=hosts)


def test_the_names_of_a_launcher_give_way():
    """LOCAL_RANK, which numbers the ranks of the machine, only chooses the GPU."""

    def body(rendezvous):
        return rendezvous.local_rank, rendezvous.place_on_machine

    port, hosts = free_port(), ["a", "b", "a"]
    environments = [
        environment(rank, 3, port, KOS_HOST=host, LOCAL_RANK=str(2 - rank)) for rank, host in enumerate(hosts)
    ]
    assert run_threads(*(lambda env=env: body(env_rendezvous(20, env)) for env in environments)) == [
        (0, 2), (0, 1), (1, 0)
    ]  # fmt: skip


@pytest.mark.parametrize("hosts", OF_FOUR, ids=str)
@pytest.mark.parametrize("gpus", [2, 4])
def test_pretended_hosts_share_the_gpus_of_the_machine(monkeypatch, hosts, gpus):
    """Pretended hosts share the GPUs of the machine.  NCCL treats them as several machines, and peer refuses them."""
    on_hosts(monkeypatch, hosts)
    with no_gpu(monkeypatch, [GPU(uuid=str(index)) for index in range(gpus)]):

        def body(rendezvous):
            device = gpu_devices.device_of(rendezvous).index
            return device, NCCLBackend.probe(rendezvous).claim, PeerBackend.probe(rendezvous).reason

        found = run_ranks(4, body)
    assert [device for device, *_ in found] == [rank % gpus for rank in range(4)]
    claims = [claim for _, claim, _ in found]
    assert len(set(claims)) == 4 or (gpus, hosts) == (2, (3, 1)), claims
    for rank, (*_, reason) in enumerate(found):
        here = len(Ranks("", hosts, MockRanks(4)).near(rank))
        assert reason == f"the ranks are on several hosts: {here} of 4 here"


@pytest.mark.parametrize("given", [None, "mine"])
def test_nccl_hostid_is_set_for_a_pretended_host(monkeypatch, given):
    """kos sets NCCL_HOSTID for a pretended host, unless the user has set it."""
    monkeypatch.setenv("NCCL_HOSTID", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_HOSTID")
    with no_gpu(monkeypatch):
        for host in ("", "a"):
            rendezvous = ThreadControlPlane(ThreadGroup(1), 0, host=host)
            of_nccl(rendezvous).close()
            expected = rendezvous.host_identity if host else None
            assert os.environ.get("NCCL_HOSTID") == given or expected
    assert given or rendezvous.host_identity.endswith(" a")


STOPPED = """
import os, signal, time
os.environ["KOS_HOST"] = "aba"[int(os.environ["RANK"])]
import numpy as np
import kos
comm = kos.init("tcp", timeout=1.5)
pids = [int(pid) for pid in comm.all_gather_bytes(str(os.getpid()).encode())]
comm.barrier()
if comm.rank == {stopped}:
    os.kill(os.getpid(), signal.SIGSTOP)
if comm.rank == {other}:
    time.sleep(0.8)
try:
    {call}
except kos.errors.KosError as error:
    print(error.ranks, "{said}" in str(error), flush=True)
if comm.rank == {other}:
    time.sleep(2)
    os.kill(pids[{stopped}], signal.SIGKILL)
comm.abort()
"""


BARRIER, MESSAGE = "comm.barrier()", "comm.recv(np.empty(3), {0}) if comm.rank == 1 else comm.{1}"


@needs_core
@pytest.mark.skipif(UNDER_MPIRUN, reason="starts processes of its own")
@pytest.mark.parametrize(
    ("stopped", "call"),
    [(2, BARRIER), (2, MESSAGE.format(0, "split(0)")), (0, MESSAGE.format(2, "recv(np.empty(3), 0)"))],
)
def test_a_stopped_rank_is_named_by_who_waits_for_another_rank_of_its_host(stopped, call):
    """Rank 1, alone on its host, waits for a rank that waits for the stopped one.

    That rank begins to wait later than rank 1, so rank 1 asks it. If the stopped rank has the hub, no rank can be
    asked.
    """
    other = 2 - stopped
    said = f"for which ranks [{other}] wait" if stopped else f"ranks [{other}] could not be asked, because rank 0"
    found = run_processes(STOPPED.format(call=call, stopped=stopped, other=other, said=said), 3)
    assert found[other][1].startswith(f"({stopped},) ") and found[1][1] == f"({stopped},) True\n", found
