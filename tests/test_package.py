"""The wheel and the sdist: what they hold, and that an installed wheel runs; the command ``kos``."""

import fcntl
import importlib.util
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest

import kos
from kos import commands
from kos.__main__ import COMMANDS, main
from tests.host_compiler import PYTHON_HEADERS
from tests.launcher import MPIRUN

ROOT = Path(__file__).resolve().parent.parent
BUILDS = PYTHON_HEADERS and shutil.which("cc") is not None
"""Whether this machine can compile the core."""
BUILD = "import sys; from setuptools import build_meta as b; print(b.build_{kind}(sys.argv[1]))"


def run(*command: str | Path, cwd: Path = ROOT, limit: float = 120) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([*map(str, command)], cwd=cwd, env=environ, capture_output=True, text=True, timeout=limit)


def from_index(*command: str | Path, limit: float = 120) -> None:
    """Run a command that downloads packages.  Skip the test if pip finds no versions, for example without a network."""
    done = run(*command, limit=limit)
    if "(from versions: none)" in done.stderr:
        pytest.skip(f"needs a package index: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def ran(monkeypatch):
    """The modules that the command has run, with their arguments."""
    found = []
    monkeypatch.setattr(sys, "argv", ["kos"])
    monkeypatch.setattr(runpy, "run_module", lambda module, **_: found.append((module, sys.argv[1:])))
    return found


def test_the_command_lists_its_commands(capsys):
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert all(f"\n  {name} " in text for name in COMMANDS), text


def test_a_command_is_its_module(ran):
    for name, (module, _) in COMMANDS.items():
        assert main([name, "--help", "x"]) == 0 and ran.pop() == (module, ["--help", "x"])
        flat = ("sample", "chat", "eval", "tokenize", "export", "plot")
        program = module if name in flat else f"{module}.__main__"
        assert importlib.util.find_spec(program) is not None


def test_what_is_no_command(ran, capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == f"kos: error: expected one of {', '.join(COMMANDS)}, got 'trian'\n"
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"kos {kos.__version__}\n"
    assert not ran


PRINTING = ("--help", "schedules ring --ranks 3", "doctor")


@pytest.mark.parametrize("words", PRINTING)
def test_an_output_that_cannot_be_written_is_one_line(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kos", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("kos: error: expected to write the output, got [Errno 28]")


@pytest.mark.parametrize("words", PRINTING)
def test_a_closed_pipe_or_an_ascii_output_ends_no_command_with_an_error(words):
    command = ["env", "PYTHONIOENCODING=ascii", sys.executable, "-m", "kos", *words.split()]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.isascii()
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=PIPE, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_ends_a_command_without_a_traceback():
    command = [sys.executable, "-m", "kos", "schedules", "ring", "--predict", "--scales", "8,16384", "--sizes", "1K,1G"]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None and "predicted" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "" and process.returncode == -signal.SIGINT


@pytest.mark.parametrize(("ignored", "status"), [(False, -signal.SIGINT), (True, 0)])
def test_what_a_command_printed_before_ctrl_c_is_not_lost(ignored, status):
    """A command that a shell began in the background ignores SIGINT, and goes on."""
    program = """
import os, runpy, signal
from kos.__main__ import main
def run_module(*_, **__):
    print("printed")
    os.kill(os.getpid(), signal.SIGINT)
runpy.run_module = run_module
main(["schedules"])
"""
    command = ["env", "-u", "PYTHONUNBUFFERED", sys.executable, "-c", program]
    start = partial(signal.signal, signal.SIGINT, signal.SIG_IGN) if ignored else None
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=start)
    assert (done.returncode, done.stdout, done.stderr) == (status, "printed\n", "")


@pytest.mark.parametrize("words", ["schedules", "sample --help", "plot --help"])
def test_commands_work_without_docstrings(words):
    done = run(sys.executable, "-OO", "-m", "kos", *words.split())
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_with_another_name_now_is_refused_with_it(program):
    done = program("kos", "tune --largest 1G")
    assert (done.code, done.err) == (2, "kos: error: expected kos bench --write-table, got 'tune'\n")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "train"])
def test_wrong_arguments_are_refused_by_the_name_that_was_typed(name, program):
    """With the usage, except by commands of several ranks: those refuse once for all ranks, on one line."""
    done = program("kos", f"{name} --no-such-flag")
    said = done.err
    if name in ("bench", "doctor", "eval"):
        wrong = "the following arguments are required: CHECKPOINT" if name == "eval" else ""
        assert said == f"kos: error: {wrong or 'unrecognized arguments: --no-such-flag'}\n"
    else:
        assert said.startswith(f"usage: kos {name} ") and f"\nkos {name}: error: " in said
    assert done.code == 2
    assert commands.typed == "", "of that command alone"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The wheel with the compiled core, the pure one and the sdist, as ``make wheels`` builds them from a clone.

    They are built in isolated environments, which have only the build requirements.
    """
    if shutil.which("make") is None or not BUILDS:
        pytest.skip("needs make, a C compiler and Python.h")
    if run("git", "rev-parse").returncode:
        pytest.skip("needs a clone made by git")
    folder = tmp_path_factory.mktemp("dist")
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "wheels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker's tests may build them too
        from_index("make", "wheels", f"PYTHON={sys.executable}", limit=600)
        for path in (ROOT / "dist").glob("kos-*"):
            shutil.copy(path, folder)
    return *sorted(folder.glob("*.whl")), folder / f"kos-{kos.__version__}.tar.gz"


builds_wheels = pytest.mark.timeout(1800)  # other workers may build them before


@builds_wheels
def test_wheels_and_sdist_hold_every_file_of_kos_and_no_other(dist):
    """The pure wheel has no core; in the other one, no symbol is newer than manylinux allows."""
    core, pure, sdist = dist
    assert core.name.startswith(f"kos-{kos.__version__}-cp311-abi3-manylinux")
    assert pure.name == f"kos-{kos.__version__}-py3-none-any.whl"
    expected = set(run("git", "ls-files", "-co", "--exclude-standard", "kos").stdout.split())
    expected = {name for name in expected if (ROOT / name).exists()}
    sources = {name for name in expected if name.startswith("kos/_core/") and name.endswith((".c", ".h"))}
    for path, compiled in ((core, {"kos/_core/native.abi3.so"}), (pure, set())):
        with zipfile.ZipFile(path) as archive:
            names = {name for name in archive.namelist() if ".dist-info/" not in name and name[-1] != "/"}
            metadata = archive.read(f"kos-{kos.__version__}.dist-info/METADATA").decode()
        assert names == expected - sources | compiled and "kos/py.typed" in names
        assert "License-Expression: MIT" in metadata and "Requires-Python: >=3.11" in metadata
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert expected <= packed and {"LICENSE", "README.md", "pyproject.toml"} <= packed
    assert not [name for name in packed if name.startswith(("tests/", "benchmarks/"))]


def test_no_wheel_parses_formats_that_differ_between_pythons():
    """Those with # need this macro, which the headers of 3.13 ignore: what they compile would fail on 3.11 and 3.12."""
    sources = [*(ROOT / "kos" / "_core").glob("*.[ch]")]
    assert sources and not [path for path in sources if "#define PY_SSIZE_T_CLEAN" in path.read_text()]


@builds_wheels
def test_a_wheel_built_without_a_compiler_works_without_the_core(dist, tmp_path):
    with tarfile.open(dist[2]) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 and newer have it
        archive.extractall(tmp_path, **safely)
    [unpacked] = tmp_path.iterdir()
    build = ("env", "CC=/no/compiler", sys.executable, "-c", BUILD.format(kind="wheel"), tmp_path)
    built = run(*build, cwd=unpacked)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "site")
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import kos; "
    program += "from kos import _core; print(kos.__file__); print(_core.unavailable)"
    done = run("env", "-u", "KOS_CORE", sys.executable, "-c", program, cwd=tmp_path)
    where, why = done.stdout.splitlines()
    assert where == str(tmp_path / "site" / "kos" / "__init__.py")
    assert why.startswith("the compiled core was not built: ")


@builds_wheels
def test_an_installed_wheel_passes_the_trial_of_releases(dist, tmp_path):
    """In a venv that has the packages kos depends on, from this Python, and kos from the wheel alone."""
    venv = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", "--without-pip", venv).returncode == 0
    if run(sys.executable, "-m", "pip", "--version").returncode:
        pytest.skip("needs pip")
    install = ("install", "--no-deps", "--no-index", "--no-compile", dist[0])
    done = run(sys.executable, "-m", "pip", "--python", venv / "bin" / "python", *install)
    assert done.returncode == 0, done.stderr
    [site] = venv.glob("lib/python*/site-packages")
    theirs = [path for path in sys.path if path.endswith("site-packages")]  # no .pth in them is read: no clone is found
    (site / "dependencies.pth").write_text("\n".join(theirs) + "\n")
    tried = run(venv / "bin" / "python", ROOT / "tests" / "installed.py", *([MPIRUN] if MPIRUN else []), limit=600)
    assert tried.returncode == 0 and tried.stdout.endswith("\npassed\n"), tried.stdout + tried.stderr
