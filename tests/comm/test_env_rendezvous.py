"""ControlPlane by environment variables: launchers, and jobs that are started wrongly."""

import contextlib
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import pytest

import kos
from kos.comm.control.bootstrap import default_rendezvous
from kos.comm.control.group import TCPControlPlane
from kos.comm.control.place import Place
from kos.comm.control.threads import ThreadControlPlane
from kos.comm.control.wire import Acceptor
from kos.errors import RendezvousError
from kos.launcher import launched_rank
from tests.comm.tcp_ranks import (
    come_first,
    environment,
    errors_of,
    finish,
    free_port,
    run_processes,
    run_threads,
    start,
)

SECRETS = "expected the same secret (KOS_SECRET) on all ranks, got another"

# Who starts it.


def test_variables_of_launchers():
    secret = {"KOS_SECRET": "x"}  # else the user's own, in a home that may be read-only
    torch = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "h", "MASTER_PORT": "7", "LOCAL_RANK": "0", **secret}
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_LOCALID": "2"}
    place = Place.read(torch)
    assert (place.rank, place.size, place.local_rank, place.host, list(place.ports)) == (1, 3, 0, "h", [7])
    place = Place.read({**torch, **slurm})
    assert place.local_rank == 0
    master = {"MASTER_ADDR": "h", "MASTER_PORT": "7", **secret}
    place = Place.read({**slurm, **master})
    assert (place.rank, place.size, place.local_rank) == (1, 3, 2)
    agent = Place.read({**torch, "MASTER_PORT": "65530", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert list(agent.ports)[:7] == [65531, 65532, 65533, 65534, 65535, 1, 2]


def test_the_default_rendezvous(no_launcher):
    assert isinstance(default_rendezvous(5), ThreadControlPlane)
    no_launcher.setenv("RANK", "0")
    no_launcher.setenv("WORLD_SIZE", "1")
    rendezvous = default_rendezvous(5)
    assert isinstance(rendezvous, TCPControlPlane)
    assert rendezvous.timeout == 5
    with kos.init() as comm:
        assert (comm.backend_name, comm.size) == ("tcp", 1)
    no_launcher.setenv("PMIX_RANK", "0")
    no_launcher.setattr("kos.comm.control.bootstrap.rendezvous_of_mpi", lambda **_: "by MPI")
    assert default_rendezvous(5) == "by MPI"


TORCH = {"RANK": "1", "WORLD_SIZE": "4"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}
MASTER = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 0),
        ({"RANK": "1"}, 0),
        ({"RANK": "one", "WORLD_SIZE": "4"}, 0),
        (SLURM, 0),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, 0),
        ({"PMI_RANK": "2", "PMI_SIZE": "1"}, 0),
        (TORCH, 1),
        ({**SLURM, **MASTER}, 3),
        ({**SLURM, **MASTER, **TORCH}, 1),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, 2),
        ({"PMIX_RANK": "3", **SLURM}, 3),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", **TORCH}, 2),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", **TORCH}, 0),
    ],
)
def test_the_rank_before_the_start(no_launcher, environ, expected):
    for name, value in environ.items():
        no_launcher.setenv(name, value)
    assert launched_rank() == expected


SCRIPT = """
import kos, numpy as np
with kos.init(timeout=60) as comm:
    x = comm.all_reduce(np.full(1000, comm.rank + 1.0))
    print(f"rank {comm.rank} of {comm.size}, local {comm.local_rank}, on {comm.backend_name}: {x[-1]:g}")
"""


@pytest.mark.parametrize(("size", "more"), [(3, {}), (2, {"LOCAL_RANK": "0"})], ids=["default", "LOCAL_RANK"])
def test_plain_shells(size, more):
    """The local rank is the launcher's, if it sets one."""
    total = size * (size + 1) // 2
    expected = [(0, f"rank {r} of {size}, local {0 if more else r}, on tcp: {total}\n") for r in range(size)]
    assert run_processes(SCRIPT, size, **more) == expected


@contextlib.contextmanager
def port_before_a_taken_one() -> Iterator[int]:
    """A free port, while somebody who does not answer has the one after it."""
    with socket.socket() as other:
        while True:
            with contextlib.suppress(OSError):
                other.bind(("127.0.0.1", (port := free_port()) + 1))
                break
        yield port


def test_torchrun(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    # Its agent has the port itself, and the next is where rank 0 would try first.
    with port_before_a_taken_one() as port:
        static = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        [(code, output)] = finish([start([*run, *static, str(script)], 0, 1, port, OMP_NUM_THREADS="1")])
    assert code == 0, output
    for rank in range(2):
        assert f"rank {rank} of 2, local {rank}, on tcp: 3" in output


def test_jobs_side_by_side():
    """Two jobs of one user whose ports overlap, as two torchruns may choose them: each finds its own."""
    with port_before_a_taken_one() as port:
        jobs = [
            environment(rank, 2, port + job, TORCHELASTIC_USE_AGENT_STORE="True") for rank in (1, 0) for job in (0, 1)
        ]
        missing, lost = errors_of(0.3, jobs[2], jobs[1])
        assert missing.startswith("rendezvous: ranks [1] of 2 did not arrive")
        assert lost.startswith("rendezvous: rank 1 did not reach rank 0")
        assert errors_of(30, *jobs) == [""] * 4


# How a job is started wrongly.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "2"}, "RANK: expected a whole number from 0 to 1, got '2'"),
        ({"RANK": "one"}, "RANK: expected a whole number from 0 to 1, got 'one'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: expected a whole number from 1 to 1048576, got '0'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT: expected a whole number from 1 to 65535, got '65536'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK: expected a whole number from 0 to 1, got '2'"),
        ({"KOS_SECRET": ""}, "KOS_SECRET: expected a secret, got an empty one"),
    ],
)
def test_bad_variables(changes, message):
    environ = {k: v for k, v in {**environment(1, 2, 7), **changes}.items() if v is not None}
    assert errors_of(5, environ) == [message]


@pytest.mark.parametrize(
    ("environ", "missing", "given"),
    [
        ({"RANK": "1"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT", "RANK"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "4", "RANK": "1"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT", "RANK"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK, MASTER_ADDR, MASTER_PORT", "WORLD_SIZE"),
        ({"WORLD_SIZE": "1"}, "RANK", "WORLD_SIZE"),
        (TORCH, "MASTER_ADDR, MASTER_PORT", "RANK, WORLD_SIZE"),
        ({**TORCH, "MASTER_ADDR": "", "MASTER_PORT": "7"}, "MASTER_ADDR", "RANK, WORLD_SIZE, MASTER_PORT"),
        (MASTER, "RANK, WORLD_SIZE", "MASTER_ADDR, MASTER_PORT"),
        ({**SLURM, **MASTER, "WORLD_SIZE": "4"}, "RANK", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "4"}, "MASTER_ADDR, MASTER_PORT", "SLURM_PROCID, SLURM_NTASKS"),
    ],
)
def test_a_part_of_the_variables(no_launcher, environ, missing, given):
    """If some variables are missing, the process does not become a group of one by mistake."""
    for name, value in environ.items():
        no_launcher.setenv(name, value)
    with pytest.raises(RendezvousError) as caught:
        kos.init(timeout=5)
    text = str(caught.value)
    assert text.startswith(f"{missing}: expected values beside those of {given}, got none (")
    assert ("(under srun, set" in text) == ("SLURM_STEP_NUM_TASKS" in environ), text
    assert ("is a group of one" in text) == ("SLURM_STEP_NUM_TASKS" not in environ), text


def test_a_rank_on_the_host_says_nothing(no_launcher):
    no_launcher.setenv("LOCAL_RANK", "3")
    with kos.init() as comm:
        assert (comm.size, comm.local_rank) == (1, 0)


def test_a_busy_port():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        [error] = errors_of(20, environment(0, 2, port))
    assert error.startswith(f"MASTER_PORT: expected port {port} to be free for rank 0, got one in use")
    assert error.endswith("Beside torch.distributed: kos.init(rendezvous=torch.distributed.group.WORLD))")


def test_a_port_that_becomes_free(monkeypatch):
    monkeypatch.setattr("kos.comm.control.place.BUSY_SECONDS", 20.0)
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    ranks = [environment(rank, 2, port) for rank in range(2)]

    def leave():
        other.accept()[0].close()  # rank 1 called, and will call again
        other.close()

    assert run_threads(leave, lambda: errors_of(30, *ranks))[1] == ["", ""]


def test_missing_ranks_are_named_on_all_others(monkeypatch):
    admit, admitted = Acceptor.admit, list[int]()

    def note(acceptor, seconds):
        if caller := admit(acceptor, seconds):
            admitted.append(caller[0])
        return caller

    monkeypatch.setattr(Acceptor, "admit", note)
    come_first(monkeypatch, lambda: len(admitted) == 2)
    port, began = free_port(), time.monotonic()
    others = [environment(rank, 5, port) for rank in (2, 4)]
    first, rest = run_threads(lambda: errors_of(0.5, environment(0, 5, port)), lambda: errors_of(30, *others))
    assert time.monotonic() - began >= 0.5
    expected = f"rendezvous: ranks [1, 3] of 5 did not arrive within 0.5 s (rank 0 listens at 127.0.0.1:{port})"
    assert first + rest == [expected] * 3


def test_rank_0_says_where_others_look_for_it():
    [error] = errors_of(0.3, environment(0, 2, free_port(), MASTER_ADDR="no-such-host.invalid"))
    assert "which others find by MASTER_ADDR=no-such-host.invalid)" in error


def test_a_master_that_cannot_be_reached():
    port = free_port()
    [error] = errors_of(0.3, environment(1, 2, port))
    expected = f"rendezvous: rank 1 did not reach rank 0 within 0.3 s: 127.0.0.1:{port}: "
    assert error.startswith(expected) and "refused" in error
    [error] = errors_of(0.3, environment(1, 2, port, MASTER_ADDR="no-such-host.invalid"))
    assert error.startswith("rendezvous: rank 1 did not reach rank 0 within 0.3 s: no-such-host.invalid")


def test_a_rank_that_comes_twice():
    port = free_port()
    errors = errors_of(30, *[environment(rank, 3, port) for rank in (0, 1, 1)])
    assert set(errors) == {
        f"rendezvous: rank 1 joined twice: expected one process of each rank (rank 0 listens at 127.0.0.1:{port})"
    }


def test_a_second_rank_0(monkeypatch):
    port, refused = free_port(), threading.Event()
    come_first(monkeypatch, refused.is_set)

    def come():
        [error] = errors_of(0.3, environment(0, 2, port))
        refused.set()
        return error.split(":")[0]

    assert sorted(run_threads(come, come)) == ["MASTER_PORT", "rendezvous"]


@pytest.mark.parametrize("size", [2, 4])
def test_another_world_size(size):
    port = free_port()
    ranks = [environment(rank, 3, port) for rank in (0, 2)]
    refused = (
        f"rendezvous: rank 1 joined with a world size of {size}, expected 3 as on rank 0 "
        f"(rank 0 listens at 127.0.0.1:{port})"
    )
    assert errors_of(30, *ranks, environment(1, size, port)) == [refused] * 3


def test_a_rank_that_joins_after_the_failure_gets_the_report(monkeypatch):
    """Rank 0 has already raised the failure, and ends."""
    monkeypatch.setattr("kos.comm.control.hub.CLOSE_SECONDS", 20.0)
    port = free_port()
    first = errors_of(30, environment(0, 3, port), environment(1, 2, port))
    assert errors_of(30, environment(2, 3, port)) == first[:1] and first[0] == first[1] != ""


def test_another_secret(caplog):
    """The caller with another secret fails at once; rank 0 logs it and continues to wait for the right one."""
    port = free_port()

    def others():
        return [*errors_of(30, environment(1, 2, port, KOS_SECRET="wrong")), *errors_of(30, environment(1, 2, port))]

    first, rest = run_threads(lambda: errors_of(30, environment(0, 2, port)), others)
    wrong = f"127.0.0.1:{port}: expected the same secret (KOS_SECRET) on all ranks, got different ones"
    assert (first, rest) == ([""], [f"rendezvous: rank 1: {wrong}", ""])
    rejected = f"rank 0 rejected rank 1 at 127.0.0.1: {SECRETS}"
    assert [(each.levelname, each.message) for each in caplog.records] == [("WARNING", f"rendezvous: {rejected}")]


@pytest.mark.parametrize("size", [2, 3])
def test_a_timeout_names_the_callers_with_another_secret(size, monkeypatch):
    port, refused = free_port(), threading.Event()
    come_first(monkeypatch, refused.is_set)

    def others():
        for rank in (1, 1, size - 1):
            errors_of(30, environment(rank, size, port, KOS_SECRET="wrong"))
        refused.set()

    [error], _ = run_threads(lambda: errors_of(0.3, environment(0, size, port)), others)
    callers = ", ".join(f"rank {rank} at 127.0.0.1" for rank in range(1, size))
    assert error == (
        f"rendezvous: ranks {list(range(1, size))} of {size} did not arrive within 0.3 s "
        f"(rank 0 listens at 127.0.0.1:{port}); rank 0 rejected {callers}: {SECRETS}"
    )


def test_another_program_at_the_port():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def program():
            sock, _ = other.accept()
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            sock.close()

        _, errors = run_threads(program, lambda: errors_of(20, environment(1, 2, port)))
    assert errors == [f"rendezvous: rank 1: 127.0.0.1:{port}: expected a rank of kos (kos/tcp4), got b'HTTP/1.1'"]


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("case", ["in use", "missing"])
def test_an_error_of_init_has_no_frames_within_kos(no_launcher, case, debug):
    """Python prints the frames if kos has set no hook, as under torchrun.  The frames of the program stay."""
    no_launcher.setenv("KOS_DEBUG", debug)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name, value in environment(0, 2, taken.getsockname()[1]).items():
            no_launcher.setenv(name, value)
        if case == "missing":
            no_launcher.delenv("MASTER_PORT")
        try:
            try:
                int("no number")
            except ValueError:
                kos.init(timeout=5)
        except RendezvousError as error:
            printed = "".join(traceback.format_exception(error))
    assert ("OSError: [Errno" if case == "in use" else "MASTER_PORT") in printed
    frames, mine = printed.count('  File "'), printed.count(f'  File "{__file__}"')
    assert mine == (1 if case == "in use" else 2), printed  # the other one raises ValueError
    assert frames > mine + 1 if debug == "1" else frames == mine + 1, printed
