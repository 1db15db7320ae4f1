"""Commands: those that kos prints, exit statuses, repeated options, environment variables."""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kos
from kos import commands, errors, reporting
from kos.__main__ import COMMANDS
from kos.doctor import checks
from kos.errors import install
from kos.reporting import ArgumentParser, Parser
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program

OPEN_MPI, HYDRA = "mpirun (Open MPI) 5.0.11", "HYDRA build details:"


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """The programs of a virtual environment in the current folder, which is not activated; no mpirun started this."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", str(programs.with_name("others")))
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    return programs


@pytest.fixture
def one_core():
    """Meanwhile the test's thread may run on one CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def _program(path: Path, said: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(f"#!/bin/sh\necho '{said}'\n".encode("latin-1"))
    path.chmod(0o755)


def test_an_installed_kos_names_this_python_from_any_clone(environment):
    package = environment / "site-packages" / "kos"
    assert install("train", package) == f"in a clone of kos: {environment}/python -m pip install -e '.[train]'"
    (environment / "site-packages" / "kos-0.1.0.dist-info").mkdir(parents=True)
    assert install("train", package) == ".venv/bin/python -m pip install 'kos[train]'"
    assert install("", package) == f"in a clone of kos: {environment}/python -m pip install -e ."
    (environment.parent / "pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.13.9\n")  # uv's environments have no pip
    assert install("train", package) == "uv pip install --python .venv/bin/python 'kos[train]'"


def test_cores_are_counted_and_not_cpus(environment, one_core, monkeypatch):
    """Two ranks need a flag on one core, one rank needs none.  A core has one CPU, or several: its siblings."""
    _program(environment / "mpirun", OPEN_MPI)
    for place in (commands.SIBLINGS, "/no/{}"):  # where the kernel does not name siblings, each CPU counts
        monkeypatch.setattr(commands, "SIBLINGS", place)
        assert [("--map-by" in commands.mpirun(ranks)) for ranks in (1, 2)] == [False, True]
        assert "--map-by" not in commands.mpirun(2, here=False)


@pytest.mark.parametrize("user", [0, 1000])
@pytest.mark.parametrize(("said", "allowed"), [(OPEN_MPI, "1"), (OPEN_MPI, ""), (HYDRA, ""), ("", "")])
def test_root_needs_a_flag_for_open_mpi(environment, one_core, monkeypatch, said, allowed, user):
    """The commands have it always, as `make train` allows root for the run alone; the doctor notes it if needed."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    for name in commands.ROOT:
        monkeypatch.setenv(name, allowed)
    assert commands.mpirun(2) == ["mpirun", "-n", "2"], "there is none"
    of_root = ["--allow-run-as-root"] * (said == OPEN_MPI and user == 0)
    flags = [*of_root, *["--map-by", ":OVERSUBSCRIBE"] * (said == OPEN_MPI)]
    _program(environment.with_name("others") / "mpirun", said)
    assert commands.mpirun(2) == ["mpirun", *flags, "-n", "2"]
    _program(environment / "mpirun", said)
    assert commands.mpirun(2) == [".venv/bin/mpirun", *flags, "-n", "2"]
    _program(environment / "python", json.dumps(["Open MPI v5", []]))  # what the doctor's probe prints
    (check,) = checks.mpi()
    if said != HYDRA:
        expected = "for root: mpirun --allow-run-as-root, or export " + " ".join(f"{name}=1" for name in commands.ROOT)
        assert check.verdict == checks.OK and check.remedy == expected * (bool(of_root) and not allowed)


@pytest.mark.parametrize(
    ("said", "verdict", "found"),
    [
        (OPEN_MPI, checks.OK, "{mpirun}"),
        (HYDRA, checks.NO, "{mpirun}, which is of MPICH"),
        ("", checks.OK, "{mpirun}, which is of an unknown MPI, or does not run"),
        (None, checks.NO, "no mpirun"),
    ],
)
def test_the_doctor_compares_mpirun_with_the_library(environment, monkeypatch, said, verdict, found):
    if said is not None:
        _program(environment / "mpirun", said)
    for name in commands.ROOT:
        monkeypatch.setenv(name, "1")
    _program(environment / "python", json.dumps(["Open MPI v5", ["/lib/libmpi.so.40"]]))
    (check,) = checks.mpi()
    found = found.format(mpirun=environment / "mpirun")
    assert check.found.startswith("Open MPI v5 (/lib/libmpi.so.40), mpi4py ") and check.found.endswith(f", {found}")
    assert check.verdict == verdict and bool(check.remedy) == (verdict == checks.NO)


def test_an_mpirun_whose_version_is_not_utf8(environment):
    _program(environment / "mpirun", "mpirun (Open MPI) 5.0.11, paramétré")
    assert commands.mpi_of(str(environment / "mpirun")) == "Open MPI"


@needs_mpirun
@pytest.mark.parametrize("script", [False, True])
def test_the_options_that_started_this_job_are_kept(tmp_path, script):
    file = tmp_path / "program"
    code = "import json; from kos import commands; print(json.dumps(commands.mpirun(1)))"
    file.write_text(f"#!{sys.executable}\n{code}\n")
    file.chmod(0o755)
    program = [str(file)] if script else [sys.executable, "-c", code]
    options = ["--map-by", ":OVERSUBSCRIBE", "-x", "KOS_A=b c", "-n", "1"]
    done = run_program(MPIRUN, *options, *program, "a", "b c", env=OUTSIDE)
    assert json.loads(done.stdout)[-6:] == options, done.stderr
    two = run_program(MPIRUN, *options, *program, ":", *options, *program, env=OUTSIDE)
    assert [json.loads(line)[-2:] for line in two.stdout.splitlines()] == [["-n", "1"]] * 2, two.stderr


MISSING = {
    "kos.bench": [
        "--json no/x.json", "--plot no/x.png", "--ranks 0", "--write-table --json no/x.json", "--write-table -e 8G",
        "--write-table --dtype int8", "--with no",
    ],
    "kos.bench.join": ["no.json --json x.json", "result.json --json no/x.json", "other.json --json x.json"],
    "kos.bench.plot": ["no.json x.png", "result.json no/x.png", "other.json x.png", "broken.json x.png"],
    "kos.comm.recorder": ["no", "empty", "no.json", "broken.json", "other.json"],
    "kos.comm.schedules": ["no", "ring --draw no/x.svg", "ring --import no", "ring --predict --topology no"],
    "kos.doctor": ["--timeout 0", "no"],
    "kos.testing.conformance": ["--backend no", "--ranks 0"],
    "kos.train.parallel.schedules": ["no"],
    "kos.train.tools.plot": ["no", "empty", "empty -o no/x.png"],
}
"""Arguments by command, each with one thing that does not exist or is something else."""
TRAINING = {f"kos.train{name}" for name in ("", ".sample", ".chat", ".evaluate", ".export", ".tokenize")}  # tests/train


def test_every_command_is_here():
    assert {module for module, _ in COMMANDS.values()} <= MISSING.keys() | TRAINING


@pytest.mark.parametrize(
    ("module", "words"), [(module, words) for module, several in MISSING.items() for words in several]
)
def test_what_does_not_exist_is_refused_with_status_2(module, words, program, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "result.json").write_text(json.dumps({"rows": []}))
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "broken.json").write_text('{"rows": [')
    done = program(module, words)
    assert (done.code, done.out) == (2, "")
    assert "error: " in done.err.splitlines()[-1] and "Traceback" not in done.err, done.err


def test_what_is_refused_and_what_has_failed():
    """The rule of the page."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KosError)]
    status = {kind: reporting.exit_status(kind("x")) for kind in kinds if kind is not errors.SettingError}
    refused = {errors.ConfigError, errors.InvalidArgument, errors.DataError, errors.BackendUnavailable}
    assert {kind for kind, code in status.items() if code == 2} >= refused
    assert {kind for kind, code in status.items() if code == 1} >= {errors.RankLost, errors.CudaError}
    assert set(status.values()) == {1, 2}


@pytest.mark.parametrize("kind", [ArgumentParser, Parser])
def test_the_last_value_counts_and_this_is_said(kind, caplog):
    """Not of equal values, nor of options of several.  A parser may be used again."""
    made, name = kind(), f"--first-{kind.__name__}"  # each warning is given once in a process
    made.add_argument("--one", name, type=int)
    made.add_argument("--several", action="append")
    made.add_argument("--on", action="store_true")
    for _ in range(2):
        found = made.parse_args(["--one", "1", "--one", "1", "--several", "a", "--several", "b", "--on", "--on"])
        assert (found.one, found.several, found.on) == (1, ["a", "b"], True)
    assert not made.parse_args(["--one", "3"]).on and not caplog.records
    assert [made.parse_args(["--one=1", name, "2"]).one for _ in range(2)] == [2, 2]
    assert [record.getMessage() for record in caplog.records] == [f"{name} is given twice: 2 counts, not 1"]


@pytest.mark.parametrize("name", ["eval", "sample", "chat", "export"])
def test_help_names_no_default_of_none(name, program):
    pytest.importorskip("pydantic", reason="needs the extra 'train'")
    text = " ".join(program(COMMANDS[name][0], "--help").out.split())
    assert not re.search(r"[Dd]efault: (None|\[\])", text)
    assert ("--seq-len N " in text) == ("Default: the model's context" in text) == (name == "eval")


def test_every_command_has_such_a_parser():
    folder = Path(kos.__path__[0])
    others = [path for path in folder.rglob("*.py") if re.search(r"argparse\.ArgumentParser\(\w", path.read_text())]
    assert others == []


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "environment.md"
OF_TESTS = "Of the tests and benchmarks"
PREFIXES = r"(KOS|OMPI|PMIX?|MPI_LOCAL|SLURM|TORCHELASTIC|MASTER|XDG)_?[A-Za-z0-9_]+|RANK|WORLD_SIZE|LOCAL_RANK"
"""Names that nothing but a variable has: also those that a table of the source holds are found."""
BUILT = {"WANDB_PROJECT", "TRACKIO_PROJECT"}
"""Names that the sources put together."""


def listed(only: str = "") -> dict[str, str]:
    """The section of each variable of the page's tables; ``only``: of one section."""
    found, section = dict[str, str](), ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `") and (not only or only == section):
            for name in re.findall(r"`([A-Z][A-Za-z0-9_]+)`", line.split("|")[1]):
                assert name not in found, f"{name} is listed twice"
                found[name] = section
    return found


def read_by(tree: ast.AST) -> Iterator[str]:
    """The names of variables that a module reads, or may read."""
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if re.fullmatch(PREFIXES, text) and not text.endswith("_"):  # else it is the start of several names
            yield text
        of: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            of, key = node.func.value, node.args[0]
        elif isinstance(node, ast.Subscript):
            of, key = node.value, node.slice
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            of, key = node.comparators[0], node.left
        named = getattr(of, "attr", getattr(of, "id", "")) == "environ"  # os.environ, or an imported environ
        if named and isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_every_variable_that_kos_reads_is_on_the_page():
    documented = listed()
    for path in python_files("kos"):
        read = {*read_by(ast.parse(path.read_text()))}
        missing = read - documented.keys()
        of_kos = {name for name in read if name.startswith("KOS_")}
        assert not of_kos or path.name == "environment.py", f"{path}: expected names of kos.environment, got {of_kos}"
        assert not missing, f"{path.relative_to(ROOT)} reads {missing}: expected on {PAGE.relative_to(ROOT)}"
    for path in (ROOT / "kos" / "_core").glob("*.[ch]"):
        assert "getenv" not in path.read_text(), "the core reads none"


def test_every_variable_of_kos_that_a_page_names_is_on_the_page():
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir(), ROOT / "README.md", ROOT / "Makefile"]
    for path in pages:
        if path.is_file() and path.parent.name != "releases":  # which say what is gone
            missing = {*re.findall(r"\bKOS_[A-Z_]*[A-Z]\b", path.read_text())} - listed().keys()
            assert not missing, f"{path.relative_to(ROOT)} names {missing}, which the page lacks"


def test_every_variable_on_the_page_is_read():
    """By kos, or by the tests and benchmarks."""
    constants = re.compile(r"[\"']([A-Z][A-Za-z0-9_]+)[\"']")
    sections = listed()
    of_kos = {name for path in python_files("kos") for name in constants.findall(path.read_text())} | BUILT
    assert sections.keys() - listed(OF_TESTS).keys() <= of_kos, sections.keys() - listed(OF_TESTS).keys() - of_kos
    files = [path for path in python_files("tests", "benchmarks", "docs/hooks") if path != Path(__file__)]
    elsewhere = {name for path in files for name in constants.findall(path.read_text())}
    assert listed(OF_TESTS).keys() <= elsewhere
