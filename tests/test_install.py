"""The Makefile and pyproject.toml: clear errors, repaired installs, and a Ctrl-C that lets the ranks save."""

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
import zipfile
from functools import partial
from pathlib import Path

import pytest

from kos.train.tools import trackers

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".kos-train-wheel-mpi"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make_command(venv: Path, *words: str) -> list[str]:
    return ["make", "--no-print-directory", f"VENV={venv}", *words]


def environment() -> dict[str, str]:
    """Ours without what an outer make passes down, which would override the variables given here."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}


def run_make(venv: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        make_command(venv, *words), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    path.chmod(0o755)
    return path


def fake_python(path: Path, version_ok: bool = True, venv_ok: bool = True) -> Path:
    """A python that answers the Makefile's questions and writes down everything that it is asked to do."""
    return script(
        path,
        f"""\
        #!/bin/sh
        echo "$*" >>{path}.log
        case "$*" in
            *version_info*) exit {0 if version_ok else 1} ;;
            *ensurepip*) exit {0 if venv_ok else 1} ;;
            -V) echo "Python 3.9.1" ;;
        esac
        """,
    )


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (None, "not found: install Python 3.11 or newer"),
        ({"version_ok": False}, "needs Python 3.11 or newer, {python} is Python 3.9.1"),
        ({"venv_ok": False}, "apt install python3-venv"),
    ],
    ids=["missing", "old", "without venv"],
)
def test_an_unusable_python_is_one_clear_line(tmp_path, answers, expected):
    python = tmp_path / "python3"
    if answers is not None:
        fake_python(python, **answers)
    done = run_make(tmp_path / "venv", f"PYTHON={python}", "train")
    assert done.returncode != 0
    said, failed = done.stderr.splitlines()  # our line, and make's own "*** … Error 1"
    assert expected.format(python=python) in said
    assert failed.startswith("make: ***")
    assert not (tmp_path / "venv").exists()


def test_an_interrupted_install_starts_from_an_empty_venv(tmp_path):
    python, venv = fake_python(tmp_path / "python3"), tmp_path / "venv"
    inner = fake_python(venv / "bin" / "python")
    stamp = str(venv / STAMP)

    (venv / ".installing").touch()
    done = run_make(venv, f"PYTHON={python}", stamp)
    assert done.returncode == 0, done.stderr
    assert f"-m venv --clear {venv}" in python.with_name("python3.log").read_text()
    assert (venv / STAMP).exists()
    assert not (venv / ".installing").exists()

    for log in (python.with_name("python3.log"), inner.with_name("python.log")):
        log.unlink()
    done = run_make(venv, f"PYTHON={python}", stamp)
    assert done.returncode == 0, done.stderr
    assert not python.with_name("python3.log").exists(), "the second run asked python something"
    assert not inner.with_name("python.log").exists(), "the second run called pip"


def test_a_failed_install_leaves_no_stamp(tmp_path):
    venv = tmp_path / "venv"
    script(venv / "bin" / "python", '#!/bin/sh\ncase "$*" in *install*) exit 1 ;; esac\n')
    done = run_make(venv, f"PYTHON={fake_python(tmp_path / 'python3')}", str(venv / STAMP))
    assert done.returncode != 0
    assert not (venv / STAMP).exists()
    assert (venv / ".installing").exists()


MPIRUN = """\
    #!{python}
    # Stands in for mpirun and its ranks: says which signals arrive; the first means save, the second die.
    import os, signal, sys, time
    def said(name, code):
        def handler(*_):
            os.write(1, name.encode() + b"\\n")  # print may not be interrupted by itself
            if name == "USR1":
                time.sleep(0.5)  # a save
            if code is not None:
                os.write(1, b"GONE\\n")
                os._exit(code)
        return handler
    signal.signal(signal.SIGUSR1, said("USR1", None if {stubborn} else 0))
    signal.signal(signal.SIGTERM, said("TERM", 7))
    signal.signal(signal.SIGINT, said("INT", 8))
    os.write(1, " ".join(["BEGUN", *sys.argv[1:]]).encode() + b"\\n")
    time.sleep(100)
    """


@pytest.mark.parametrize(
    ("number", "stubborn"),
    [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False)],
    ids=["saves", "stubborn", "supervisor"],
)
def test_ctrl_c_asks_the_ranks_to_save_and_a_later_one_ends_them(tmp_path, number, stubborn):
    """What reaches the shell twice within a second counts once: ``timeout`` signals the group, and make its shell."""
    venv = tmp_path / "venv"
    script(venv / "bin" / "mpirun", MPIRUN.format(python=sys.executable, stubborn=stubborn))
    (venv / STAMP).touch()
    began = time.monotonic()
    with subprocess.Popen(
        make_command(venv, "train", "RANKS=3", "ARGS=--steps 5"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(f"/mpirun -n 3 {venv}/bin/python -m kos.train --steps 5\n")
        begun = process.stdout.readline().split()
        assert begun == ["BEGUN", "-n", "3", f"{venv}/bin/python", "-m", "kos.train", "--steps", "5"]
        os.killpg(process.pid, number)  # what a terminal does: to make, its shell and nobody else
        killed = time.monotonic()
        assert process.stdout.readline() == "USR1\n"
        if killed < began + 0.9:  # in the first second ranks may not listen yet: it would kill them
            assert time.monotonic() - killed > 0.9
        os.killpg(process.pid, number)
        if stubborn:
            while not select.select([process.stdout], [], [], 0.2)[0]:
                os.killpg(process.pid, number)  # make and its shell are still there to be told
            assert process.stdout.readline() == "TERM\n" and time.monotonic() - killed > 0.9
        assert process.stdout.read() == "GONE\n"
        assert process.wait(60) == -number


def test_every_extra_that_a_message_or_the_readme_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(file.read_text() for file in (ROOT / "kos").rglob("*.py"))
    pages = "".join(file.read_text() for file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    found = [*re.findall(r"""\binstall\(["']([a-z,]+)["']\)""", text), *re.findall(r"'\.\[([a-z,]+)\]'", pages)]
    named = {extra for group in found for extra in group.split(",")}
    assert {"mpi", "train", "cuda", "plot"} <= named, "the test looks for the wrong thing"
    named |= set(trackers.PACKAGES)  # each is an extra
    assert named <= set(extras), f"unknown extras: {sorted(named - set(extras))}"
    assert "kos[" not in text + pages, "kos is on no package index: kos.errors.install says what works"


def test_a_folder_named_kos_does_not_hide_the_package(tmp_path):
    """A script beside a clone, whose folder Python takes for a namespace package unless it finds a real one."""
    pytest.importorskip("setuptools", minversion="77")
    clone, site = tmp_path / "kos", tmp_path / "site"
    for file in ("pyproject.toml", "README.md", "LICENSE", "kos/__init__.py", "tests/__init__.py", "docs/x.md"):
        (clone / file).parent.mkdir(parents=True, exist_ok=True)
        (clone / file).write_bytes((ROOT / file).read_bytes() if (ROOT / file).is_file() else b"")
    site.mkdir()
    build = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
    run = partial(subprocess.run, capture_output=True, text=True, timeout=60)
    built = run([sys.executable, "-c", build, str(site)], cwd=clone)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(site / built.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
    look = f"import site; site.addsitedir({str(site)!r}); import kos; print(kos.__file__)"
    program = script(tmp_path / "program.py", look)
    outside = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = run([sys.executable, "-S", str(program)], env=outside)
    assert done.stdout.split() == [str(clone / "kos" / "__init__.py")], done.stdout + done.stderr
