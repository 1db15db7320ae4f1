"""Data parallelism on one GPU: two ranks that share it, over ``peer``, held against one rank and among themselves."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kos.train.tools.metrics import read_metrics
from tests.launcher import MPIRUN, OUTSIDE
from tests.train.sharded import tensors_of_run

SECONDS = 40  # of a run, which takes some 5
STEPS = 20
FLAGS = f"""
--preset tiny --device cuda --steps {STEPS} --eval-every 0 --eval-batches 1 --save-every 0 --sample-tokens 0
--timeout 30 --hidden-size 512 --intermediate-size 1408 --num-hidden-layers 5 --num-attention-heads 8 --vocab-size 8192
--batch-size 8 --micro-batch-size 4 --seq-len 64 --lr 5e-4 --warmup-steps 5
""".split()
"""Gradients of two buckets."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(4 * SECONDS + 20),  # a test waits for four runs at most
    pytest.mark.skipif(not MPIRUN, reason="needs mpirun"),
]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Losses and SHA-256 of the last checkpoint's weights and moments, of a run that is made once."""
    known = {}

    def run(ranks, *flags):
        if (ranks, *flags) not in known:
            out = tmp_path_factory.mktemp("run")
            launcher = [MPIRUN, "-n", str(ranks)] if ranks > 1 else []
            command = [*launcher, sys.executable, "-m", "kos.train", *FLAGS, "--out", str(out), *flags]
            command += ["--backend", "peer"] * (ranks > 1)
            done = subprocess.run(command, env=OUTSIDE, capture_output=True, text=True, timeout=SECONDS)
            assert done.returncode == 0, done.stderr[-1500:] + done.stdout[-500:]
            known[ranks, *flags] = _losses(out), _digest(out)
        return known[ranks, *flags]

    return run


def _losses(out: Path) -> list[float]:
    losses = [row["loss"] for row in read_metrics(out / "metrics.jsonl")]
    assert len(losses) == STEPS and losses[-1] < 0.6 * losses[0], "it learns nothing"
    return losses


def _digest(out: Path) -> str:
    return hashlib.sha256(b"".join(tensors_of_run(out).values())).hexdigest()


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_zero_and_the_graph_change_no_bit(train, dtype):
    plain = train(2, "--dtype", dtype)
    assert train(2, "--dtype", dtype, "--zero", "1") == plain
    assert train(2, "--dtype", dtype, "--no-graph") == plain
    assert train(2, "--dtype", dtype, "--zero", "1", "--no-graph") == plain


def test_bfloat16_gradients_over_ranks(train):
    losses, digest = train(2, "--grad-dtype", "bfloat16")
    for flags in (["--zero", "1"], ["--zero", "1", "--no-graph"]):
        assert train(2, "--grad-dtype", "bfloat16", *flags) == (losses, digest)
    wide, its_digest = train(2)
    np.testing.assert_allclose(losses, wide, rtol=5e-3)
    assert digest != its_digest, "gradients of one micro-batch a rank, rounded"


def test_two_ranks_have_the_losses_of_one(train):
    losses, _ = train(2, "--dtype", "float32")
    alone, _ = train(1, "--dtype", "float32")
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert losses != alone, "summed in another order, and not one rank's run twice"


def test_deterministic_ranks_have_the_weights_of_one(train):
    alone = train(1, "--deterministic")
    assert train(2, "--deterministic") == alone
    assert train(2, "--deterministic", "--zero", "1") == alone
