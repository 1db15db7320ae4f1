"""Adapters on GPUs, by the command line: in a graph and not, in 8 bits, and two ranks beside one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kos.train import Trainer, checkpoint
from kos.train.config.flags import parse
from kos.train.export import export
from kos.train.tools import read_metrics
from tests.comm.tcp_ranks import free_port
from tests.launcher import MPIRUN, OUTSIDE, nccl_ranks
from tests.train.test_publish import Server, saved

SECONDS = 80  # of a run
SHAPE = """
--hidden-size 512 --intermediate-size 1408 --num-hidden-layers 5 --num-attention-heads 8 --num-key-value-heads 4
--vocab-size 4096 --max-position-embeddings 4096
""".split()  # noqa: SIM905 (as it is typed)
# Epsilon is as large as a usual gradient.  With a small one, rounding could change the sign of AdamW's step for a
# weight whose gradient is almost 0.
FLAGS = """
--preset tiny --device cuda --steps 6 --eval-batches 2 --save-every 0 --sample-tokens 4 --timeout 20 --lr 5e-3
--batch-size 8 --micro-batch-size 1 --seq-len 256 --warmup-steps 0 --schedule constant --eps 1e-3
""".split()  # noqa: SIM905 (as it is typed)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(4 * SECONDS)]


def run(out: Path, ranks: int, *flags: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    launcher = [str(MPIRUN), "-n", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "kos.train", *FLAGS, "--out", str(out), *flags]
    done = subprocess.run(command, env=OUTSIDE, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2500:] + done.stdout[-500:]
    rows = np.array([(row["loss"], row["grad_norm"]) for row in read_metrics(out / "metrics.jsonl")])
    files = checkpoint.find(out).path.glob("*.safetensors")
    return rows, {name: each for file in files for name, each in load_file(file).items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("base")
    run(out, 1, *SHAPE, "--dtype", "float32")
    return str(checkpoint.find(out).path)


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), 1, "--init-from", base, "--lora", "16", "--dtype", "float32")


def test_a_graph_and_recomputation_change_nothing(base, tmp_path):
    how = ["--init-from", base, "--lora", "16", "--dtype", "bfloat16"]
    rows, tensors = run(tmp_path / "graph", 1, *how)
    for name, flags in {"eager": ["--no-graph"], "block": ["--recompute", "block"]}.items():
        others, again = run(tmp_path / name, 1, *how, *flags)
        assert others.tobytes() == rows.tobytes(), name
        assert all(again[key].tobytes() == tensors[key].tobytes() for key in tensors)


def test_products_in_8_bits(base, alone, tmp_path):
    rows, _ = run(tmp_path, 1, "--init-from", base, "--lora", "16", "--dtype", "fp8")
    np.testing.assert_allclose(rows[:, 0], alone[0][:, 0], rtol=2e-2)


@pytest.mark.skipif(not MPIRUN, reason="needs mpirun")
@pytest.mark.parametrize("backend", ["peer", "nccl"])
@pytest.mark.parametrize("flags", ["--dp 2 --zero 1", "--tp 2", "--cp 2", "--pp 2 --pp-schedule zero-bubble-v"])
def test_two_ranks(flags, backend, base, alone, tmp_path):
    if backend != "peer" and nccl_ranks() < 2:
        pytest.skip(f"nccl needs 2 GPUs, can have {nccl_ranks()} ranks")
    how = ["--init-from", base, "--lora", "16", "--dtype", "float32", "--backend", backend]
    rows, tensors = run(tmp_path, 2, *how, *flags.split())
    np.testing.assert_allclose(rows, alone[0], rtol=2e-5)
    for name, tensor in tensors.items():
        if not name.startswith("exp_avg"):
            np.testing.assert_allclose(tensor, alone[1][name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.skipif(not MPIRUN, reason="needs mpirun")
@pytest.mark.parametrize("backend", ["peer", "nccl"])
def test_deterministic_ranks_of_tensor_parallelism_have_the_bits_of_one(backend, base, tmp_path):
    """With 4,096 tokens, collectives overlap matmuls, and sums over tokens are split too."""
    if backend != "peer" and nccl_ranks() < 2:
        pytest.skip(f"nccl needs 2 GPUs, can have {nccl_ranks()} ranks")
    how = ["--init-from", base, "--lora", "8", "--dtype", "bfloat16", "--deterministic", "--deterministic-parts", "4"]
    how += ["--seq-len", "4096", "--micro-batch-size", "4"]
    rows, tensors = run(tmp_path / "alone", 1, *how)
    others, again = run(tmp_path / "two", 2, *how, "--backend", backend, "--tp", "2")
    assert others.tobytes() == rows.tobytes()
    assert all(again[key].tobytes() == tensors[key].tobytes() for key in tensors)


def test_merged_adapters_are_published(base, tmp_path):
    """As ``kos export --merge`` writes them, but for the rounding to bfloat16."""
    server = Server(f"127.0.0.1:{free_port()}")
    how = ["--init-from", base, "--lora", "16", "--dtype", "bfloat16", "--publish", server.address, "--publish-merged"]
    Trainer(parse([*FLAGS, "--out", str(tmp_path / "out"), *how]), callbacks=[server], verbose=False).run()
    export(tmp_path / "out", tmp_path / "merged", "float32", merge=True)
    seen, right = server.seen[6], saved(tmp_path / "merged")
    assert seen.keys() == right.keys()
    assert all(np.allclose(seen[name], tensor, rtol=0.01, atol=1e-3) for name, tensor in right.items())
