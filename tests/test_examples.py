"""Every program of examples/ runs, is short, and is named by its README."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kos import cuda
from tests.comm.tcp_ranks import free_port
from tests.comm.test_jobs import environment, mpirun
from tests.forked import python
from tests.launcher import MPIRUN, needs_mpirun, run_program

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FILES = sorted(path.name for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md")
LINES = 60
ELSEWHERE = {"jax_data_parallel.py": "tests/interop/test_jax.py"}
LIMIT = 150  # seconds


def needs(module: str) -> pytest.MarkDecorator:
    try:
        missing = importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        missing = True
    return pytest.mark.skipif(missing, reason=f"{module} is not installed")


def output(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_each_is_short_run_by_a_test_and_named_by_the_readme() -> None:
    readme, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    assert re.findall(r"\]\(([\w.]+)\)", readme) == list(dict.fromkeys(re.findall(r"\]\(([\w.]+)\)", readme)))
    assert sorted(re.findall(r"\]\(([\w.]+)\)", readme)) == FILES
    for name in FILES:
        assert len((EXAMPLES / name).read_text().splitlines()) < LINES, name
        assert name in ELSEWHERE or f'"{name}"' in tests.partition("ELSEWHERE")[2], f"{name}: no test runs it"
    for name, test in ELSEWHERE.items():
        assert name in (EXAMPLES.parent / test).read_text()


@needs_mpirun
@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("all_reduce.py", 2, "rank 1 of 2 on mpi: [3. 3. 3. 3.]"),
        ("ring.py", 3, "3 ranks agree on a sum of 3,780"),
        ("mpi_program.py", 3, "rank 1: group of world ranks [0, 1], sum of halves 4.5"),
        ("own_schedule.py", 4, "refused: all_reduce/hasty on 4 ranks, 1 chunk a unit: rank 1, after the last round"),
        ("own_backend.py", 2, "rank 1: 198.0 by plain, promises broken: {}"),
    ],
)
def test_under_mpirun(name: str, ranks: int, expected: str) -> None:
    assert expected in output(mpirun(ranks, str(EXAMPLES / name)))


@pytest.mark.parametrize("name", ["all_reduce.py", "ring.py", "own_schedule.py"])
def test_alone(name: str) -> None:
    output(run_program(*python(), str(EXAMPLES / name), env=environment()))


def test_the_tests_of_ones_own_code(tmp_path: Path) -> None:
    options = ("-q", "-p", "kos.testing.plugin", "-p", "no:cacheprovider", "--rootdir=.")
    command = (sys.executable, "-m", "pytest", *options, str(EXAMPLES / "test_my_code.py"))
    done = run_program(*command, env=environment(), cwd=tmp_path)
    assert "6 passed" in output(done)


def test_survivors_go_on() -> None:
    """Rank 1 dies before step 4; the others end with the same weights."""
    base = {**environment(), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [*python(), str(EXAMPLES / "elastic.py")],
            env={**base, "RANK": str(rank), "KILL": "1:4"}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        texts = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 9, 0], texts
    for rank in (0, 2):
        assert f"rank {rank} continues at step 4 with 2 ranks: world: all_reduce #4 of" in texts[rank]
        assert f"rank {rank}: [1. 2. 3.] after 10 steps on 2 ranks" in texts[rank]


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_a_job_of_slurm(tmp_path: Path) -> None:
    """By stand-ins for srun and scontrol: what the script gives the ranks lets them find each other."""
    stand_ins = {
        "scontrol": '[ "$*" = "show hostnames node[1-2]" ] && printf "127.0.0.1\\nnode2\\n"',
        "srun": '[ "$1" = --kill-on-bad-exit=1 ] || exit 2; shift\nexport SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2\n'
        'for r in 0 1; do SLURM_PROCID=$r SLURM_LOCALID=$r "$@" & done; wait',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    port = next(port for port in iter(free_port, 0) if 20_000 <= port < 40_000)  # what the script makes of the job's id
    env = {
        **environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable,
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": str(port - 20_000),
    }  # fmt: skip
    done = run_program("bash", str(EXAMPLES / "slurm.sh"), str(EXAMPLES / "all_reduce.py"), env=env, cwd=tmp_path)
    assert "rank 1 of 2 on tcp: [3. 3. 3. 3.]" in output(done)


@needs_mpirun
def test_a_hostfile(tmp_path: Path) -> None:
    """Open MPI reads it; here the first node is this one, and there is no second."""
    text = (EXAMPLES / "hostfile").read_text()
    assert re.findall(r"^(\w+) slots=4$", text, re.M) == ["node1", "node2"]
    (tmp_path / "hostfile").write_text(text.replace("node1", "localhost").replace("node2 slots=4", ""))
    done = mpirun(2, str(EXAMPLES / "all_reduce.py"), "--hostfile", str(tmp_path / "hostfile"))
    assert "rank 1 of 2 on mpi" in output(done)


@pytest.mark.slow
@needs("kos.interop.torch")
@needs("torch")
@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py"])
def test_torch(name: str, tmp_path: Path) -> None:
    """The losses that gloo gives, to the last printed digit."""
    text = (EXAMPLES / name).read_text()
    assert text.count('init_process_group("kos")') == 1
    over_gloo = re.sub(r"^import kos.*\n", "", text, flags=re.M).replace('group("kos")', 'group("gloo")')
    (tmp_path / name).write_text(over_gloo)

    def losses(path: Path) -> list[str]:
        command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path))
        done = run_program(*command, env=environment())
        # At the end of a process Gloo may abort it: "terminate called without an active exception".
        return re.findall(r"step \d: loss [\d.]+", output(done) if path.parent == EXAMPLES else done.stdout)

    over_kos = losses(EXAMPLES / name)
    assert len(over_kos) == 5 and over_kos == losses(tmp_path / name)


@needs_mpirun
@needs("torch")
@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py"])
def test_torch_under_mpirun_names_the_right_command(name: str) -> None:
    done = mpirun(2, str(EXAMPLES / name))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"expected a number, got none; start with torchrun --nproc-per-node 2 examples/{name}" in done.stderr


@pytest.mark.slow
@needs("ray")
def test_ray(tmp_path: Path) -> None:
    done = run_program(sys.executable, str(EXAMPLES / "ray_actors.py"), env=environment(), cwd=tmp_path)
    assert "by ray.util.collective: [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]" in output(done)
    assert "by kos: [('tcp', [0, 1]), ('tcp', [0, 1])]" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda.unavailable()), reason=f"needs two GPUs: {cuda.unavailable()}")
@needs("cupy")
@needs_mpirun
def test_cupy() -> None:
    if len(cuda.visible_devices()) < 2:
        pytest.skip("needs two GPUs")
    command = (MPIRUN, "-n", "2", sys.executable, str(EXAMPLES / "cupy_gpus.py"))
    assert "2 GPUs by" in output(run_program(*command, env=environment()))
