"""Every program of examples/ runs, is short, and is named by its README."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kos import cuda
from kos.train.tools import read_metrics
from tests.comm.tcp_ranks import free_port
from tests.comm.test_jobs import environment, mpirun
from tests.forked import as_program, python
from tests.interop.ranks import run
from tests.launcher import MPIRUN, needs_mpirun, run_program, running_program

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FILES = sorted(path.name for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md")
LINES = 63
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


def test_each_is_short_run_by_a_test_and_named_by_the_readme():
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
        ("halo.py", 4, "of 256.00"),
        ("service.py", 3, "rank 0: 100 clients have their answers"),
        pytest.param("torch_store.py", 2, "rank 1: gloo met through a store of", marks=needs("torch")),
        ("mpi_program.py", 3, "rank 1: group of world ranks [0, 1], sum of halves 4.5"),
        ("own_schedule.py", 4, "refused: all_reduce/hasty on 4 ranks, 1 chunk a unit: rank 1, after the last round"),
        ("own_backend.py", 2, "rank 1: 198.0 by plain, promises broken: {}"),
    ],
)
def test_under_mpirun(name, ranks, expected):
    assert expected in output(mpirun(ranks, str(EXAMPLES / name)))


@pytest.mark.parametrize("name", ["all_reduce.py", "ring.py", "halo.py", "own_schedule.py"])
def test_alone(name):
    output(run_program(*python(), str(EXAMPLES / name), env=environment()))


@needs_mpirun
def test_training_from_python(tmp_path):
    """Both learn."""
    said = {}
    for name in ("train_own_batches.py", "reinforce.py"):
        command = (MPIRUN, "-n", "2", *python(), str(EXAMPLES / name), str(tmp_path / name))
        said[name] = output(run_program(*command, env=environment(), cwd=tmp_path))
    assert said["train_own_batches.py"].endswith("7 + 8 = 15\n" * 2)
    first, last = (float(each) for each in re.findall(r"step \d+: ([\d.]+) of 8 tokens rise", said["reinforce.py"]))
    assert last > first + 1.5, said


def test_the_tests_of_ones_own_code(tmp_path):
    options = ("-q", "-p", "kos.testing.plugin", "-p", "no:cacheprovider", "--rootdir=.")
    command = (*python(), "-m", "pytest", *options, str(EXAMPLES / "test_my_code.py"))
    done = run_program(*command, env=environment(), cwd=tmp_path)
    assert "6 passed" in output(done)


def test_survivors_go_on():
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


def test_weights_to_a_server(tmp_path):
    """The server has four versions, then keeps its weights while the trainer is away, then has four of the next one."""
    port = next(port for port in iter(free_port, 0) if port < 60_000)
    env = {**environment(), "TMPDIR": str(tmp_path)}
    text = output(run_program(*python(), str(EXAMPLES / "weights_to_server.py"), str(port), env=env, cwd=tmp_path))
    versions = re.findall(r"(?<!; )(?<!which had )version \d+", text)  # the trainer may write amid its line
    assert len(versions) == 8 and text.count("of a restarted trainer") == 1, text
    assert re.search(rf"publisher kos.train at 127.0.0.1:{port}, which had version \d+: expected it to answer", text)
    assert not [*tmp_path.glob("kos-weights-*")]


def test_a_trainer_that_fails_ends_the_example(tmp_path):
    env = {**environment(), "TMPDIR": str(tmp_path)}
    done = run_program(*python(), str(EXAMPLES / "weights_to_server.py"), "65535", env=env, cwd=tmp_path)
    assert done.returncode == 1 and "the trainer ended before its first checkpoint" in done.stderr, done.stderr
    assert done.stderr.count("MASTER_PORT: expected a whole number from 1 to 65535, got '65536'") == 2, done.stderr
    assert not [*tmp_path.glob("kos-weights-*")]


SLURM = {
    "scontrol": '[ "$*" = "show hostnames node[1-2]" ] && printf "127.0.0.1\\nnode2\\n" || echo "scontrol $*"',
    "srun": """[ "$1 $2" = "--kill-on-bad-exit=1 --cpus-per-task=3" ] || exit 2; shift 2
export SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2
trap 'kill -USR1 $ranks' USR1; echo $$ > srun.pid
for r in 0 1; do SLURM_PROCID=$r SLURM_LOCALID=$r "$@" & ranks="${ranks-} $!"; done
for rank in $ranks; do until wait $rank; do [ $? -gt 128 ] || exit 1; done; done""",
}
"""Stand-ins for Slurm's commands: two ranks, which receive the signal."""


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    port = next(port for port in iter(free_port, 0) if 20_000 <= port < 40_000)  # what the script makes of the job's id
    return {
        **environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": as_program(tmp_path / "python"),
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": str(port - 20_000), "SLURM_CPUS_PER_TASK": "3",
    }  # fmt: skip


def test_a_slurm_job(tmp_path, slurm):
    """The ranks find each other by the variables that the script sets, and get all arguments."""
    command = ("bash", str(EXAMPLES / "slurm.sh"), str(EXAMPLES / "all_reduce.py"))
    said = output(run_program(*command, env=slurm, cwd=tmp_path))
    assert "rank 1 of 2 on tcp: [3. 3. 3. 3.]" in said and "scontrol" not in said
    (tmp_path / "words.py").write_text(r"import os, sys; os.write(1, f'{sys.argv[1:]}\n'.encode())")
    done = run_program("bash", str(EXAMPLES / "slurm.sh"), "words.py", "two words", "-x", env=slurm, cwd=tmp_path)
    assert output(done).splitlines() == ["['two words', '-x']"] * 2


def test_a_slurm_job_uses_the_venv_of_its_folder(tmp_path, slurm):
    del slurm["PYTHON"]
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text('#!/bin/bash\necho "of the folder: $*"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    done = run_program("bash", str(EXAMPLES / "slurm.sh"), "words.py", env=slurm, cwd=tmp_path)
    assert output(done).splitlines() == ["of the folder: words.py"] * 2


def test_a_slurm_job_trains_and_resumes_when_requeued(tmp_path, slurm):
    """Slurm sends the signal before the time limit; then the job is requeued with the same id."""
    text, job = (EXAMPLES / "slurm.sh").read_text(), slurm["SLURM_JOB_ID"]
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, re.M))
    assert options["signal"] == "USR1@120" and "requeue" in options and int(options["cpus-per-task"]) > 1
    (tmp_path / "words.txt").write_text("the quick brown fox\n" * 500)
    shape = ["--hidden-size=16", "--num-hidden-layers=1", "--intermediate-size=16", "--num-attention-heads=2"]
    sizes = ["--data=words.txt", "--batch-size=2", "--seq-len=16", "--eval-batches=0", "--sample-tokens=0", *shape]
    command = ["bash", str(EXAMPLES / "slurm.sh"), "-m", "kos.train", *sizes, "--save-every=0"]
    ending = {**slurm, "SLURM_JOB_END_TIME": str(int(time.time()) + 60)}
    with running_program(
        lambda line: line.startswith("step") and " 3/" in line, *command, "--steps=1000000", env=ending, cwd=tmp_path
    ) as process:
        os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGUSR1)
        said = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 0 and said.endswith(f"scontrol requeue {job}\n"), said
    out = tmp_path / "runs" / f"slurm-{job}"
    (last,) = (int(path.name.removeprefix("step-")) for path in (out / "checkpoints").iterdir())
    again = output(run_program(*command, f"--steps={last + 2}", env=slurm, cwd=tmp_path))
    assert f"resuming after step {last}, from runs/slurm-{job}/" in again and "scontrol" not in again
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [*range(1, last + 3)]


@pytest.mark.parametrize(
    ("more", "own"),
    [
        ("--out=mine", ""), ("--out mine", ""), ("--config runs/slurm-1/config.json", ""),
        ("--config my.config.json --init-from=models/config.json", "--out runs/slurm-JOB "),
    ],
)
def test_the_folder_of_a_slurm_job(tmp_path, slurm, more, own):
    """That of --out, or one of its own, not that of another run, whatever the configuration file is called."""
    slurm["PYTHON"] = "echo"
    (tmp_path / "runs/slurm-1/checkpoints").mkdir(parents=True)
    done = run_program("bash", str(EXAMPLES / "slurm.sh"), "-m", "kos.train", *more.split(), env=slurm, cwd=tmp_path)
    own = own.replace("JOB", slurm["SLURM_JOB_ID"])
    assert output(done).splitlines() == [f"-m kos.train --resume auto {own}{more}"] * 2


@pytest.mark.parametrize(("last", "requeued"), [(6, True), (10, False)])
def test_a_slurm_job_is_requeued_while_steps_are_left(tmp_path, slurm, last, requeued):
    """A job that ends shortly before its time limit; one without a run is not requeued."""
    ending = {**slurm, "PYTHON": "echo", "SLURM_JOB_END_TIME": str(int(time.time()) + 60)}
    (tmp_path / f"mine/checkpoints/step-{last}").mkdir(parents=True)
    (tmp_path / "mine/checkpoints/step-4").mkdir()
    (tmp_path / "mine/config.json").write_text(json.dumps({"config": {"steps": 10, "seed": 0}}, indent=2))
    for program in (["-m", "kos.train", "--out=mine"], ["words.py"]):
        said = output(run_program("bash", str(EXAMPLES / "slurm.sh"), *program, env=ending, cwd=tmp_path))
        assert ("scontrol requeue" in said) == (requeued and program[0] == "-m")


@needs_mpirun
def test_a_hostfile(tmp_path):
    """Open MPI reads it; here the first node is this one, and there is no second."""
    text = (EXAMPLES / "hostfile").read_text()
    assert re.findall(r"^(\w+) slots=4$", text, re.M) == ["node1", "node2"]
    (tmp_path / "hostfile").write_text(text.replace("node1", "localhost").replace("node2 slots=4", ""))
    done = mpirun(2, str(EXAMPLES / "all_reduce.py"), "--hostfile", str(tmp_path / "hostfile"))
    assert "rank 1 of 2 on mpi" in output(done)


@needs("torch")
@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py"])
def test_torch(name):
    """Its losses are those over gloo, to the last printed digit.  torchrun starts the example of DDP, too."""
    path = EXAMPLES / name
    assert f"start with torchrun --nproc-per-node 2 examples/{name}" in path.read_text()
    over_kos, over_gloo = (
        run("tests.interop.torch_programs:example", 2, "kos", str(path), each, free_port())[0]
        for each in ("kos", "gloo")
    )
    assert len([line for line in over_kos if ": loss " in line]) == 5 and over_kos == over_gloo
    if name == "ddp.py":
        command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path))
        assert output(run_program(*command, env=environment())).splitlines() == over_kos


@needs_mpirun
@needs("torch")
def test_torch_under_mpirun_names_the_right_command():
    done = mpirun(2, str(EXAMPLES / "ddp.py"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "expected a number, got none; start with torchrun --nproc-per-node 2 examples/ddp.py" in done.stderr


@needs("ray")
def test_ray(tmp_path):
    done = run_program(sys.executable, str(EXAMPLES / "ray_actors.py"), env=environment(), cwd=tmp_path)
    assert "by ray.util.collective: [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]" in output(done)
    assert "by kos: [('tcp', [0, 1]), ('tcp', [0, 1])]" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda.unavailable()), reason=f"needs two GPUs: {cuda.unavailable()}")
@needs("cupy")
@needs_mpirun
def test_cupy():
    if len(cuda.visible_devices()) < 2:
        pytest.skip("needs two GPUs")
    command = (MPIRUN, "-n", "2", sys.executable, str(EXAMPLES / "cupy_gpus.py"))
    assert "2 GPUs by" in output(run_program(*command, env=environment()))
