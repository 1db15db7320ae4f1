"""Backends of other packages: registered by a program, or found as entry points."""

import threading
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import numpy as np
import pytest

import kos
from kos.comm import create
from kos.comm.contract import Backend, Probe
from kos.comm.control.base import ControlPlane
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.host.threads import ThreadTransport
from kos.errors import BackendUnavailable, InvalidArgument
from kos.testing import spawn
from tests.comm.tcp_ranks import run_threads


class Another(ThreadTransport):
    name = "another"


class Partial(Backend):
    """A class that lacks methods of Backend is refused, and the error names them."""

    @classmethod
    def probe(cls, rendezvous: ControlPlane) -> Probe:
        return Probe(True, "a test")


def raises(rendezvous: ControlPlane) -> Probe:
    raise OSError("no such wire")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The packages that are installed: ``find(group)`` returns their entry points, none at first."""
    before, installed = dict(create.BACKENDS), SimpleNamespace(find=lambda group: [])
    monkeypatch.setattr(create, "installed", False)
    monkeypatch.setattr(create, "entry_points", lambda group: installed.find(group))
    yield installed
    create.BACKENDS.clear()
    create.BACKENDS.update(before)


def init(backend: str) -> kos.Communicator:
    return kos.init(backend, rendezvous=ThreadControlPlane(ThreadGroup(1), 0, 5.0))


def test_a_registered_backend_is_one_of_kos():
    kos.register_backend("another", Another)
    kos.register_backend("another", Another)  # again: by a module that is imported twice
    with init("another") as comm:
        assert comm.backend_name == "another"
        assert comm.all_reduce(np.ones(3)).tolist() == [1.0] * 3
        assert "another  in use" in comm.explain()


@pytest.mark.parametrize(("name", "kind", "message"), [
    ("mpi", Another, "expected one that is free, got 'mpi', which is MPITransport"),
    ("auto", Another, "expected an identifier other than 'auto', got 'auto'"),
    ("a b", Another, "expected an identifier"),
    (3, Another, "expected an identifier .* got 3"),
    ("another", int, "expected a subclass of kos.comm.contract.Backend, got <class 'int'>"),
    ("another", Partial, "backend another: expected a class that defines cancel, irecv, isend, got <class .*Partial'>"),
    ("another", type("OnGPUs", (Partial,), {"on_host": False, "on_gpu": True}), "that defines exchange, got"),
    ("another", type("Nowhere", (Another,), {"on_host": False}), "expected on_host or on_gpu to be True, got neither"),
    ("another", type("NoProbe", (Backend,), {"on_host": False, "on_gpu": True}), "that defines exchange, probe, got"),
    ("another", "kos", "expected a subclass of kos.comm.contract.Backend, got 'kos'"),
])  # fmt: skip
def test_what_cannot_be_registered(name, kind, message):
    before = dict(create.BACKENDS)
    with pytest.raises(InvalidArgument, match=message):
        kos.register_backend(name, kind)
    assert before == create.BACKENDS


def test_an_installed_package_offers_backends(installed):
    looked = []

    def entry_points(group):
        looked.append(group)
        offers = {"another": f"{__name__}:Another", "missing": "no_such_module:Backend", "mpi": f"{__name__}:Another"}
        return [EntryPoint(name, value, group) for name, value in offers.items()]

    installed.find = entry_points
    init("mock").close()
    assert not looked, "a known name needs none of them"
    with init("another") as comm:
        assert comm.backend_name == "another"
    with pytest.raises(BackendUnavailable, match="missing: its entry point no_such_module:Backend failed: ModuleNotF"):
        init("missing")
    with pytest.raises(InvalidArgument, match="expected auto or one of mpi, tcp, .*, another, missing, got 'nowhere'"):
        init("nowhere")
    assert looked == ["kos.backends"]
    with init("auto") as comm:
        assert "missing  no      its entry point" in comm.explain()
        assert create.BACKENDS["mpi"] is not Another


def test_threads_wait_for_the_packages(installed):
    """The import of a package may take long, and another rank of this process needs the package too."""
    looking, second = threading.Event(), threading.Event()

    def entry_points(group):
        looking.set()
        second.wait(0.2)  # in which it is not found, if it does not wait
        return [EntryPoint("another", f"{__name__}:Another", group)]

    installed.find = entry_points

    def late():
        looking.wait(20)
        try:
            init("another").close()
        finally:
            second.set()

    _, error = run_threads(lambda: init("another").close(), late)
    assert error is None


@pytest.mark.parametrize(("probe", "message"), [
    (raises, "OSError: no such wire"), (lambda rendezvous: True, "TypeError: expected a Probe, got True"),
])  # fmt: skip
def test_a_probe_that_gives_none_is_of_a_backend_that_cannot_be_used(probe, message):
    kos.register_backend("hasty", type("Hasty", (ThreadTransport,), {"probe": staticmethod(probe)}))
    with pytest.raises(BackendUnavailable, match=f"hasty: its probe failed: {message}"):
        init("hasty")
    init("mock").close()


def test_a_backend_that_another_rank_lacks_is_unusable():
    kos.register_backend("another", Another)

    class Alone(ThreadControlPlane):
        """Rank 0 of two: what rank 1 votes for is made up."""

        def allgather(self, data):
            return [data, data.replace(b'"another": [true', b'"different": [true')]

    with pytest.raises(BackendUnavailable, match="another: rank 1: not registered there"):
        kos.init("another", rendezvous=Alone(ThreadGroup(2), 0, 1.0))


def test_each_rank_reports_its_own_reason():
    def probe(kind, rendezvous):
        return Probe(rendezvous.rank == 2, f"broken on rank {rendezvous.rank}")

    kos.register_backend("odd", type("Odd", (ThreadTransport,), {"probe": classmethod(probe)}))
    reasons = spawn(lambda comm: comm.probes["odd"].reason, 3)
    assert reasons == ["broken on rank 0", "broken on rank 1", "rank 0: broken on rank 0"]


def test_dir_lists_what_a_user_wants():
    names = {name for name in dir(kos) if not name.startswith("__")}
    assert names == {
        "ANY", "Communicator", "NOBODY", "PremulSum", "ReduceOp", "Work", "as_completed", "errors", "init", "join",
        "register_backend", "wait_any",
    }  # fmt: skip
