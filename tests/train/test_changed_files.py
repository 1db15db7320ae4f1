"""Files that another program changes during a run, or while they are read: one error that names them, not SIGBUS."""

import json
import os
import resource
import subprocess

import numpy as np
import pytest

from kos.errors import DataError
from kos.files import OpenFile
from kos.train import checkpoint
from kos.train.config.flags import parse
from kos.train.data.batches import load_data
from tests.forked import python
from tests.launcher import OUTSIDE, run_program
from tests.train.corpora import token_bytes
from tests.train.refusal import refused

RUN = """
import glob, json, os, sys
from pathlib import Path
from kos.testing import spawn
from kos.train.config.flags import parse
from kos.train.device.cpu import CpuDevice
from kos.train.trainer import Trainer
changed, *flags = sys.argv[1:]
start_step = CpuDevice.start_step
def shortened(self, step, stop_request):
    if step == 3 and self.comm.rank == 0:
        os.truncate(glob.glob(changed)[0], 100)
    start_step(self, step, stop_request)
CpuDevice.start_step = shortened
def run(comm):
    try:
        Trainer(parse(flags), comm).run()
    except Exception as error:
        errors[comm.rank] = f"{type(error).__name__}: {error}"
        raise
errors = {}
try:
    spawn(run, 2, timeout=60)
except Exception:
    print("\\n" + json.dumps(errors))
    sys.exit(1)
"""

READ = """
import os, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from kos.errors import CheckpointError
from kos.train.checkpoint.huggingface import TensorFiles
folder = Path(sys.argv[1])
save_file({"x": np.ones((300, 300), np.float32)}, folder / "a.safetensors")
files = TensorFiles(folder, ["a.safetensors"], {"x": (300, 300)})
assert files.read("x").sum() == 90_000 and files.read("x", (slice(7, 9), slice(2, 5))).shape == (2, 3)
os.truncate(folder / "a.safetensors", 1000)
try:
    files.read("x")
except CheckpointError as error:
    print(error)
"""


def run_python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_program(*python(), "-c", program, *map(str, arguments), env=OUTSIDE)


@pytest.mark.parametrize("kind", ["tokens", "mask", "text"])
def test_a_file_that_becomes_shorter_ends_the_run_with_its_name(tmp_path, kind):
    """On every rank; the last checkpoint is whole."""
    data, changed = tmp_path / "data.bin", tmp_path / "data.bin"
    if kind == "text":  # so much that its tokens are kept
        data, changed = tmp_path / "data.txt", tmp_path / ".kos" / "*" / "00000.bin"
        data.write_bytes(np.random.default_rng(0).integers(97, 110, 1 << 20, np.uint8).tobytes())
    else:
        data.write_bytes(token_bytes([*range(250)] * 100))
    if kind == "mask":
        changed = tmp_path / "data.mask"
        changed.write_bytes(bytes([1]) * 25_000)
    shape = ["--hidden-size=16", "--num-hidden-layers=1", "--intermediate-size=16", "--batch-size=8", "--seq-len=8"]
    run = ["--steps=9", "--save-every=2", "--eval-batches=0", "--sample-tokens=0", "--device=cpu", "--vocab-size=256"]
    out = tmp_path / "out"
    done = run_python(RUN, changed, "--data", data, "--out", out, *shape, *run)
    assert done.returncode == 1, (done.stdout, done.stderr)
    errors = json.loads(done.stdout.splitlines()[-1])
    assert sorted(errors) == ["0", "1"], done.stdout
    name = changed.name
    assert all(f"/{name}: expected the file as it was opened, of " in line for line in errors.values()), errors
    good = "the last checkpoint, of step 2, is good"
    assert all("got 100 bytes" in line and good in line for line in errors.values()), errors
    found = checkpoint.latest(out / "checkpoints")
    assert found is not None and found.step == 2


def test_a_file_of_weights_that_becomes_shorter_is_named(tmp_path):
    done = run_python(READ, tmp_path)
    expected = f"{tmp_path}/a.safetensors: expected readable safetensors, got [Errno "
    assert done.returncode == 0 and done.stdout.startswith(expected), (done.stdout, done.stderr)
    assert "expected the file as it was opened, of " in done.stdout and "got 1,000 bytes" in done.stdout


def test_a_file_that_is_written_to_is_refused(tmp_path):
    """With as many bytes as before, too."""
    path = tmp_path / "a.bin"
    path.write_bytes(token_bytes([*range(200)]))
    data = load_data(parse(["--data", str(path), "--seq-len", "4", "--batch-size", "2"]))
    data.batch(0)
    before = os.stat(path)
    path.write_bytes(token_bytes([7] * 200))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with refused(DataError, f"{path}: expected the file as it was opened, of 1,424 bytes, got one that was written to"):
        data.batch(1)


def test_a_file_that_is_replaced_is_read_as_it_was(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(token_bytes([*range(200)]))
    data = load_data(parse(["--data", str(path), "--seq-len", "4", "--batch-size", "2"]))
    before = data.batch(3).tokens
    other = tmp_path / "other.bin"
    other.write_bytes(token_bytes([7] * 200))
    other.replace(path)
    assert (data.batch(3).tokens == before).all()


def test_more_files_than_the_soft_limit_allows_are_read(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"content")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        files = [OpenFile(path) for _ in range(30)]
        memory = bytearray(3)
        files[-1].read(4, memoryview(memory))
        assert memory == b"ent" and resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
