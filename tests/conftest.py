"""What all tests share."""

import gc
import json
import os
import runpy
import shlex
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from zlib import crc32

import pytest

from kos import cuda
from kos.bench import report
from tests.goldens import Goldens
from tests.gpu_turns import turn
from tests.run import ROOT, WITH_GPUS, WITH_MPI, costly, heed_sigint

heed_sigint()  # for the tests that send it to programs that they start


@cache
def mentions_torch(function: Callable[..., None], module: ModuleType) -> bool:
    code = function.__code__
    names = (module.__name__, *code.co_names, *code.co_varnames, *code.co_consts)
    return hasattr(module, "torch") or any("torch" in name for name in names if isinstance(name, str))


def mark_costly(items: list[pytest.Item]) -> None:
    """Mark `slow` what the table leaves out; the cases that stay are drawn by their names, the same ones anywhere."""
    seen = Counter[tuple[str, bool]]()
    listed = [item for item in items if item.nodeid.partition("[")[0] in costly()]
    for item in sorted(listed, key=lambda item: crc32(item.nodeid.encode())):
        name, marks = item.nodeid.partition("[")[0], {mark.name for mark in item.iter_markers()}
        if not marks & {"slow", "gpu"}:
            seen[name, "mpi" in marks] += 1
            if seen[name, "mpi" in marks] > costly()[name]:
                item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = {ROOT / file for file in WITH_MPI + WITH_GPUS}
    elsewhere = {i.path for i in items if i.get_closest_marker("mpi")} - known
    if elsewhere:
        raise pytest.UsageError(f"expected tests marked mpi in the files that tests/run.py lists, got {min(elsewhere)}")
    unmarked = {i.path for i in items if not i.get_closest_marker("mpi")} & {ROOT / file for file in WITH_GPUS}
    if unmarked:
        raise pytest.UsageError(f"expected only tests marked mpi in the files with GPUs, got others in {min(unmarked)}")
    mark_costly(items)
    on_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpus and (reason := cuda.unavailable()):
        if len(on_gpus) < len(items):
            config.hook.pytest_deselected(items=on_gpus)
            items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        else:  # of tests that were named: say why they do not run
            for item in on_gpus:
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
    # First: one worker takes them all, and imports it.
    items.sort(key=lambda item: not mentions_torch(item.function, item.module))


def pytest_report_header() -> str:
    return f"without a GPU ({reason}): tests that need one are deselected" if (reason := cuda.unavailable()) else ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Thousands of tests and what they import: no garbage is collected among them, now and when a test asks for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the timeout of the test begins
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test marked `alone` shares its GPU with no test of another worker."""
    if not item.get_closest_marker("gpu") or not hasattr(item.config, "workerinput"):  # of pytest-xdist
        return (yield)
    with turn(Path(item.config.getoption("basetemp")).parent, item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    freeze_objects_of_earlier_files(item.path)
    if "mpi4py.MPI" in sys.modules:
        remove_variables_of_mpi()


@lru_cache(maxsize=1)
def freeze_objects_of_earlier_files(path: Path) -> None:
    """Exclude the objects that earlier files have created from garbage collection; once for each file, by the cache.

    Otherwise, each collection that a test requests would traverse them.  After the import of torch, they are a million.
    """
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # a file that an earlier test left open
        gc.collect()
    gc.freeze()


@cache
def remove_variables_of_mpi() -> None:
    """Remove the variables that programs inherit from this process and ``os.environ`` does not have.

    MPI_Init of Open MPI 4 adds such variables if no mpirun has started the process. With them, a program would take
    itself for a rank, and mpirun would refuse to start.
    """
    inherited = subprocess.run(["env", "-0"], stdout=subprocess.PIPE, check=True).stdout.split(b"\0")
    for name in {variable.partition(b"=")[0] for variable in inherited if variable} - os.environb.keys():
        os.unsetenv(name)


class Ended(NamedTuple):
    """How a program ended: its exit code, what it printed, and the JSON that it wrote."""

    code: int
    out: str
    err: str
    result: Any


@pytest.fixture
def program(monkeypatch, capsys, tmp_path):
    """Runs ``python -m MODULE WORDS`` in this process, as no rank of a job; ``{json}`` and ``{folder}`` are paths."""
    file = tmp_path / "result.json"

    def run(module, words=""):
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", *report.NOTED):
            monkeypatch.delenv(name, raising=False)
        for name in (module, f"{module}.__main__"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        paths = {"json": shlex.quote(str(file)), "folder": shlex.quote(str(tmp_path))}
        monkeypatch.setattr(sys, "argv", [module, *shlex.split(words.format_map(paths))])
        capsys.readouterr()
        try:
            code = runpy.run_module(module, run_name="__main__") and 0
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        if isinstance(code, str):  # an error that Python prints
            code, err = 1, f"{err}{code}\n"
        return Ended(code, out, err, json.loads(file.read_text()) if file.exists() else None)

    return run


@pytest.fixture(scope="session")
def goldens():
    """The recorded results of other libraries, by the file of the tests."""
    return cache(Goldens)


@pytest.fixture
def golden(goldens, request):
    """``golden(key, reference)``: the recorded result of ``reference``; see ``tests.goldens``."""
    return goldens(request.path)


@pytest.fixture
def before_call(monkeypatch):
    """Has ``hook`` called with the arguments of each call of ``owner.name``, before the call itself."""

    def use(owner, name, hook):
        real = getattr(owner, name)

        def call(*arguments, **options):
            hook(*arguments, **options)
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    return use


@pytest.fixture
def on_all(mpi_world):
    """Run a test's body on every rank, and raise on all what failed on any."""

    def run(body):
        failure = b""
        try:
            body()
        except pytest.skip.Exception:
            failure = b"skipped"
        except BaseException:
            failure = traceback.format_exc().encode()
        failures = mpi_world.rendezvous.allgather(failure)
        if b"skipped" in failures:
            pytest.skip("a rank lacks the library or a GPU for it")
        for rank, text in enumerate(failures):
            assert not text, f"rank {rank} failed:\n{text.decode()}"

    return run
