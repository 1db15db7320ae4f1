"""The files for GitHub, which run nowhere here: they parse, and what they name exists in this repository."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import kos

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((GITHUB / "workflows").glob("*.yml"))}
JOBS = {(name, job): each for name, flow in WORKFLOWS.items() for job, each in flow["jobs"].items()}
STEPS = [(job, step) for job, each in JOBS.items() for step in each.get("steps", [])]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
PROGRAMS = {"python", "test"}
"""Commands of the runners that the workflows use, beside make and programs of virtual environments."""


def unknown(line: str) -> str:
    """What a line of a script names that does not exist here."""
    words = shlex.split(re.sub(r"^\w+=\$\(([^)]*)\)", r"\1", line))  # name=$(command)
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        return " ".join(target for target in targets if target not in TARGETS) if targets else "no target"
    in_environment = re.fullmatch(r"(\.venv|build/venv)/bin/python", words[0])
    if words[0] not in PROGRAMS and not in_environment and not (ROOT / words[0]).is_file():
        return words[0]
    files = [word for word in words[1:] if re.fullmatch(r"[\w./-]+\.(py|txt|toml)", word)]
    return " ".join(file for file in files if not (ROOT / file).is_file())


@pytest.mark.parametrize(("job", "step"), [(job, step) for job, step in STEPS if "run" in step], ids=str)
def test_the_commands_of_workflows_exist(job, step):
    lines = step["run"].splitlines()
    assert lines and not [found for line in lines if (found := unknown(line))]


def test_actions_name_a_commit_and_workflows_exist():
    used = [each["uses"] for each in (*JOBS.values(), *(step for _, step in STEPS)) if "uses" in each]
    assert len(used) > 5
    for name in used:
        if name.startswith("./"):
            assert (ROOT / name).is_file(), name
            assert "workflow_call" in WORKFLOWS[Path(name).stem][True], "YAML 1.1 reads `on` as true"
        else:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name), f"{name}: expected a commit, which cannot move"


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_jobs_end_and_need_jobs_that_exist(job):
    each = JOBS[job]
    needs = each.get("needs", [])
    assert {*([needs] if isinstance(needs, str) else needs)} <= {name for flow, name in JOBS if flow == job[0]}
    assert "uses" in each or 0 < each["timeout-minutes"] <= 90


def pythons(job: dict[str, Any]) -> list[str]:
    """The versions of Python on which a job runs."""
    settings = [step.get("with", {}) for step in job.get("steps", [])]
    given = [each["python-version"] for each in settings if "python-version" in each]
    return [version for each in given for version in (job["strategy"]["matrix"]["python"] if "${{" in each else [each])]


def test_pythons_are_those_that_kos_supports():
    """The tests run on three or more; what is installed, on every one that pyproject.toml lists."""
    supported = SpecifierSet(PROJECT["project"]["requires-python"])
    listed = [each.rpartition(" ")[2] for each in PROJECT["project"]["classifiers"] if "Python :: 3." in each]
    tested, installed = pythons(JOBS["ci", "tests"]), pythons(JOBS["ci", "installed"])
    assert listed and installed == listed, "the classifiers of pyproject.toml"
    assert len(tested) >= 3 and {*tested} <= {*listed} and listed[0] in tested and listed[-1] in tested
    oldest = PROJECT["tool"]["mypy"]["python_version"]
    for job in JOBS.values():
        assert all(isinstance(version, str) and version in supported for version in pythons(job)), "3.10 is a float"
    assert listed[0] == oldest and f">={oldest}" == PROJECT["project"]["requires-python"]
    abi = PROJECT["tool"]["distutils"]["bdist_wheel"]["py-limited-api"]
    [build] = [step["run"] for job, step in STEPS if job == ("ci", "wheels") and "run" in step]
    assert f"/opt/python/{abi}-{abi}/bin/python" in build and abi == f"cp{oldest.replace('.', '')}"


def test_only_the_job_that_publishes_may_write_and_it_needs_all_others():
    """By a token of this run: no password or key is stored."""
    assert all(flow["permissions"] == {"contents": "read"} for flow in WORKFLOWS.values())
    assert {job: each["permissions"] for job, each in JOBS.items() if "permissions" in each} == {
        ("release", "publish"): {"id-token": "write"}
    }
    publish = JOBS["release", "publish"]
    assert publish["environment"] and WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}
    assert publish["needs"] == "ci" and JOBS["release", "ci"]["uses"] == "./.github/workflows/ci.yml"
    assert not any("secrets." in path.read_text() for path in (GITHUB / "workflows").iterdir())
    for _, step in STEPS:
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_what_is_published_is_what_was_built():
    """One artifact for each CPU: the wheels and the sdist from one, the other CPU's wheel from the other."""
    [upload] = [step["with"] for _, step in STEPS if "upload-artifact" in step.get("uses", "")]
    assert upload["name"] == "dist-${{ matrix.cpu }}" and upload["if-no-files-found"] == "error"
    kinds = {each["cpu"]: each["files"] for each in JOBS["ci", "wheels"]["strategy"]["matrix"]["include"]}
    assert kinds == {"x86_64": "dist/*", "aarch64": "dist/*aarch64.whl"}
    downloads = [step["with"] for _, step in STEPS if "download-artifact" in step.get("uses", "")]
    assert downloads == [{"pattern": "dist-*", "path": "dist", "merge-multiple": True}] * 2


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "date-released", "license"} <= {*cited}
    assert cited["version"] == kos.__version__ and cited["license"] == PROJECT["project"]["license"]
    released = (ROOT / "docs" / "releases" / f"{kos.__version__}.md").read_text()
    assert f"{cited['date-released']:%-d %B %Y}" in released.partition("##")[0]
