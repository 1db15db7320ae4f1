"""A kernel writes out of bounds, and the run loses its GPU: errors name the rank, and the run can be resumed."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kos import cuda
from kos.train import checkpoint
from kos.train.tools import read_metrics
from tests.launcher import MPIRUN, OUTSIDE, SECONDS

AT = 5  # steps, after which there is a checkpoint
TIMEOUT = 8  # seconds that a rank waits for the others
FLAGS = f"""
--preset tiny --device cuda --steps 10 --schedule constant --eval-every 0 --eval-batches 1 --save-every {AT}
--sample-tokens 0 --timeout {TIMEOUT} --hidden-size 256 --intermediate-size 512 --num-hidden-layers 2 --vocab-size 512
--num-attention-heads 4 --batch-size 8 --seq-len 64 --lr 5e-4 --warmup-steps 5
""".split()
GPUS = len(cuda.visible_devices())

FAULTY = """
import sys
from kos.train.__main__ import main

def faulty():
    from kos.cuda import load_kernel
    from kos.train.device.cuda import CudaDevice

    start_step = CudaDevice.start_step

    def start(self, step, stop):
        if (step, self.comm.rank) == (int(sys.argv[2]), int(sys.argv[3])):
            load_kernel(sys.argv[1], "astray", self.ops.device)(self.ops.stream, 1, 1, 8)
        start_step(self, step, stop)

    CudaDevice.start_step = start

faulty()
sys.exit(main(sys.argv[4:]))
"""
KERNEL = 'extern "C" __global__ void astray(int* nowhere) { *nowhere = 1; }\n'

pytestmark = pytest.mark.gpu


def train(folder: Path, ranks: int, *flags: str, victim: int = -1) -> tuple[int, str, float]:
    """Exit code, what it said on stderr, and seconds, of a run in which a kernel of ``victim`` goes astray."""
    (folder / "astray.cu").write_text(KERNEL)
    (folder / "faulty.py").write_text(FAULTY)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    job = [sys.executable, folder / "faulty.py", folder / "astray.cu", AT, victim, *FLAGS]
    job += ["--data", folder / "text.txt", "--out", folder / "run", *flags]
    launcher = [MPIRUN, "-n", ranks] if ranks > 1 else []
    began = time.monotonic()
    done = subprocess.run(
        list(map(str, [*launcher, *job])), env=OUTSIDE, capture_output=True, text=True, timeout=SECONDS
    )
    return done.returncode, done.stderr, time.monotonic() - began


@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("how", [(), ("--no-graph",)], ids=["graph", "eager"])
@pytest.mark.parametrize(
    ("ranks", "victim", "backend"),
    [(1, 0, "auto"), (2, 0, "peer"), (2, 1, "peer"), (2, 0, "auto"), (2, 1, "auto"), (2, 1, "nccl")],
)
def test_a_run_whose_kernel_writes_out_of_bounds_can_be_resumed(tmp_path, ranks, victim, backend, how):
    if ranks > 1 and not MPIRUN:
        pytest.skip("needs mpirun")
    if backend != "peer" and ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, has {GPUS}")
    code, said, took = train(tmp_path, ranks, "--backend", backend, *how, victim=victim)
    print(f"over after {took:.1f} s: {said}")
    errors = [line for line in said.splitlines() if line.startswith("kos: error:")]
    assert code == 1 and "Traceback" not in said and "Exception ignored" not in said, said
    rest = rf".*ILLEGAL_ADDRESS.*; the last checkpoint, of step {AT}, is good; resume with: .* --resume auto"
    who = f"rank {victim}: " if ranks > 1 else ""
    own = rf"kos: error: {who}after step {AT} on cuda:\d+ \([^)]+\): {rest}"
    other = rf"kos: error: rank {1 - victim}: after step {AT}: .*rank {victim} is gone: {rest}"  # if it still ran
    assert sum(bool(re.fullmatch(own, line)) for line in errors) == 1, said
    assert len(errors) <= ranks and all(re.fullmatch(f"{own}|{other}", line) for line in errors), said
    found = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert found is not None and found.step == AT
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, AT + 1))
    code, said, _ = train(tmp_path, ranks, "--backend", backend, *how, "--resume", "auto")
    assert code == 0, said
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 11))
