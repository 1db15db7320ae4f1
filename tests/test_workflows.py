"""The files for GitHub, which run nowhere here: they parse, and what they name exists in this repository."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

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


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "date-released", "license"} <= {*cited}
    assert cited["version"] == kos.__version__ and cited["license"] == PROJECT["project"]["license"]
    released = (ROOT / "docs" / "releases" / f"{kos.__version__}.md").read_text()
    assert f"{cited['date-released']:%-d %B %Y}" in released.partition("##")[0]
