"""``kos.train.fit`` with a loss of your own, and ``kos eval``, on GPUs in several layouts, compared with references."""

import re
import subprocess
import sys

import numpy as np
import pytest

import kos
from kos.train import CudaLoss, evaluator, fit
from tests.launcher import MPIRUN, OUTSIDE, nccl_ranks
from tests.train.fits import ROWS, TOKENS, batch_of, batches_of, column, config_of, cross_entropy
from tests.train.test_evaluate import FORMS, check, folder  # noqa: F401 (a fixture)
from tests.train.test_fit_losses import KERNEL

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

RUN = """
import sys
from kos.train import CudaLoss, fit
from tests.train.test_fit_cuda import arguments, by_torch
loss = {"cuda": CudaLoss(sys.argv[2], 32), "torch": by_torch, "ours": None}[sys.argv[3]]
layout = {name: int(value) for name, value in (each.split("=") for each in sys.argv[4:])}
fit(loss=loss, **arguments(sys.argv[1], device="cuda", dtype="float32", **layout))
"""


def arguments(out, **config):
    """Weights, document starts and targets that are left out, in training and in validation."""
    starts = np.repeat([[0] * 8 + [8] * 8], ROWS, axis=0)
    more = {"weights": np.random.default_rng(2).normal(size=(ROWS, TOKENS)), "document_starts": starts}
    val = batch_of(9, 4)._replace(**{name: field[:4] for name, field in more.items()})
    return {"config": config_of(out, **config), "batches": batches_of(**more), "val_batches": [val]}


def by_torch(logits, batch):
    torch = pytest.importorskip("torch")
    z = torch.from_dlpack(logits).float().requires_grad_()
    targets, weights = torch.from_dlpack(batch.targets).long(), torch.from_dlpack(batch.weights)
    losses = weights * torch.nn.functional.cross_entropy(z, targets.clamp(min=0), reduction="none")
    losses.sum().backward()
    return losses.detach(), z.grad


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    out = tmp_path_factory.mktemp("cpu")
    fit(loss=cross_entropy, **arguments(out))
    return {name: np.array(column(out, *names)) for name, names in COLUMNS.items()}


COLUMNS = {"steps": ("loss", "grad_norm"), "validation": ("val_loss",)}


def check_run(out, expected):
    for name, names in COLUMNS.items():
        np.testing.assert_allclose(column(out, *names), expected[name], rtol=2e-4, err_msg=name)


@pytest.mark.parametrize("loss", [None, by_torch, CudaLoss(KERNEL, 32)], ids=["ours", "torch", "cuda"])
def test_a_loss_of_ones_own(tmp_path, capsys, expected, loss):
    fit(loss=loss, **arguments(tmp_path, device="cuda", dtype="float32"))
    assert (", so there is no CUDA graph" in capsys.readouterr().out) == (loss is by_torch)
    check_run(tmp_path, expected)


@pytest.mark.skipif(not MPIRUN or nccl_ranks() < 2, reason="needs mpirun and two GPUs")
@pytest.mark.parametrize("layout", ["zero=0", "zero=1", "pp=2", "cp=2"])
@pytest.mark.parametrize("loss", ["torch", "cuda"])
def test_ranks(tmp_path, expected, loss, layout):
    words = [MPIRUN, "-n", "2", sys.executable, "-c", RUN, str(tmp_path / "run"), KERNEL, loss, layout]
    done = subprocess.run(words, env=OUTSIDE, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2500:]
    check_run(tmp_path / "run", expected)


def numbers(table):
    found = [float(number) for number in re.findall(r"\d+\.\d+", table.splitlines()[-1])]
    assert len(found) > 2, table
    return found


def test_evaluation(folder):  # noqa: F811
    tasks = [folder / f"{form}.jsonl" for form in FORMS]
    flags = {"device": "cuda", "dtype": "float32"}
    with kos.init() as comm:
        check(evaluator.evaluate(folder / "model", [str(folder / "text.txt")], tasks, flags, comm))


@pytest.mark.skipif(not MPIRUN or nccl_ranks() < 2, reason="needs mpirun and two GPUs")
@pytest.mark.parametrize("layout", ["--dp", "--tp", "--pp", "--cp"])
def test_evaluation_by_ranks(folder, tmp_path, layout):  # noqa: F811
    """Layouts print the numbers of one rank. They may round differently, because they add in another order."""
    words = [sys.executable, "-m", "kos.train.evaluate", str(folder / "model"), "--data", str(folder / "text.txt")]
    words += ["--device", "cuda", "--dtype", "float32"]
    first = subprocess.run(words, env=OUTSIDE, capture_output=True, text=True, timeout=100)
    done = subprocess.run([MPIRUN, "-n", "2", *words, layout, "2"], env=OUTSIDE, capture_output=True, text=True,
                          timeout=100)  # fmt: skip
    assert first.returncode == done.returncode == 0, first.stderr + done.stderr
    assert numbers(done.stdout) == pytest.approx(numbers(first.stdout), rel=1e-6)
