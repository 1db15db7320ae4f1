"""The commands that kos prints run this Python and its own mpirun, as root too."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from kos import commands, errors
from kos.doctor import checks
from kos.errors import install
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program

OPEN_MPI, HYDRA = "mpirun (Open MPI) 5.0.11", "HYDRA build details:"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The programs of a virtual environment in the current folder, which is not activated."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return programs


def _program(path: Path, said: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(f"#!/bin/sh\necho '{said}'\n".encode("latin-1"))
    path.chmod(0o755)


def test_packages_are_installed_for_this_python(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = Path(commands.__file__).resolve().parent.parent
    assert install("train") == f".venv/bin/python -m pip install -e '{clone}[train]'"
    monkeypatch.chdir(clone)
    assert install("train") == f"{sys.executable} -m pip install -e '.[train]'"
    monkeypatch.setattr(sys, "executable", "")  # of a program that embeds Python
    assert install("") == "python -m pip install -e ."


def test_an_installed_kos_names_this_python_from_any_clone(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_PACKAGE", environment / "site-packages" / "kos")
    assert install("train") == f"in a clone of kos: {environment}/python -m pip install -e '.[train]'"
    (environment / "site-packages" / "kos-0.1.0.dist-info").mkdir(parents=True)
    assert install("train") == ".venv/bin/python -m pip install 'kos[train]'"
    assert install("") == f"in a clone of kos: {environment}/python -m pip install -e ."


def test_a_program_of_this_folder_is_not_one_of_the_path(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(environment)
    assert commands.python() == "./python"
    monkeypatch.chdir("/")
    assert commands.python() == sys.executable.removeprefix("/")
    monkeypatch.chdir(environment)
    environment.rmdir()
    assert commands.python() == sys.executable, "the current folder is gone"


@pytest.mark.parametrize(
    ("said", "user", "cores", "flags"),
    [
        (OPEN_MPI, 0, 2, ["--allow-run-as-root"]),
        (OPEN_MPI, 0, 1, ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"]),
        (OPEN_MPI, 1000, 1, ["--map-by", ":OVERSUBSCRIBE"]),
        (OPEN_MPI, 1000, 2, []),
        (HYDRA, 0, 1, []),
        ("", 0, 1, []),
    ],
)
def test_flags_of_mpirun_for_root_and_for_few_cores(
    environment: Path, monkeypatch: pytest.MonkeyPatch, said: str, user: int, cores: int, flags: list[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(cores)})
    monkeypatch.setattr(commands, "SIBLINGS", "/no/{}")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")  # as `make train` sets it, for the run alone
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    monkeypatch.setenv("PATH", str(environment.parent / "empty"))  # an mpirun of this machine must not be found
    assert commands.mpirun(2) == ["mpirun", "-n", "2"], "there is none"
    _program(environment.parent / "others" / "mpirun", said)
    monkeypatch.setenv("PATH", str(environment.parent / "others"))
    assert commands.mpirun(2) == ["mpirun", *flags, "-n", "2"]
    _program(environment / "mpirun", said)
    assert commands.mpirun(2) == [".venv/bin/mpirun", *flags, "-n", "2"]
    assert "--map-by" not in commands.mpirun(2, here=False)


def test_an_mpirun_whose_version_is_not_utf8(environment: Path) -> None:
    _program(environment / "mpirun", "mpirun (Open MPI) 5.0.11, paramétré")
    assert commands.mpi_of(str(environment / "mpirun")) == "Open MPI"


@needs_mpirun
@pytest.mark.parametrize("script", [False, True])
def test_the_options_that_started_this_job_are_kept(tmp_path: Path, script: bool) -> None:
    file = tmp_path / "program"
    code = "import json; from kos import commands; print(json.dumps(commands.mpirun(1)))"
    file.write_text(f"#!{sys.executable}\n{code}\n")
    file.chmod(0o755)
    program = [str(file)] if script else [sys.executable, "-c", code]
    options = ["--map-by", ":OVERSUBSCRIBE", "-x", "KOS_A=b c", "-n", "1"]
    done = run_program(MPIRUN, *options, *program, "a", "b c", env={**OUTSIDE, "PYTHONPATH": os.getcwd()})
    assert json.loads(done.stdout)[-6:] == options, done.stderr
    two = run_program(MPIRUN, *options, *program, ":", *options, *program, env={**OUTSIDE, "PYTHONPATH": os.getcwd()})
    assert [json.loads(line)[-2:] for line in two.stdout.splitlines()] == [["-n", "1"]] * 2, two.stderr


@pytest.mark.parametrize(("user", "allowed", "said"), [(0, "", True), (0, "1", False), (1000, "", False)])
def test_the_doctor_says_that_mpirun_refuses_root(
    monkeypatch: pytest.MonkeyPatch, user: int, allowed: str, said: bool
) -> None:
    launcher = commands.find_mpirun()
    if launcher is None or commands.mpi_of(launcher) != "Open MPI":
        pytest.skip("needs Open MPI's mpirun")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    for name in commands.ROOT:
        monkeypatch.setenv(name, allowed)
    monkeypatch.setattr(checks, "under_mpirun", lambda: False)
    (check,) = checks.mpi()
    expected = "for root: mpirun --allow-run-as-root, or export " + " ".join(f"{name}=1" for name in commands.ROOT)
    assert check.verdict == checks.OK and check.remedy == expected * said, check.found
