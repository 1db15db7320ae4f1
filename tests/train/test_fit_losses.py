"""Losses of a program's own in ``kos.train.fit``, and weights of targets: on CPUs and on an emulated GPU."""

import numpy as np
import pytest

from kos.memory import Array
from kos.testing import spawn
from kos.train import Batch, CudaLoss, fit
from tests.train.fits import (
    LAYOUTS,
    ROWS,
    STEPS,
    TOKENS,
    OnStep,
    batch_of,
    batches_of,
    column,
    config_of,
    cross_entropy,
    on_ranks,
)  # fmt: skip
from tests.train.host_kernels.communicator import DeviceComm
from tests.train.host_kernels.engine import on_host


@pytest.mark.parametrize("layout_name", ["zero", "pp", "cp"])
def test_a_loss_of_ones_own(layout_name, tmp_path):
    """The cross-entropy of a program is that of the trainer, in training and in validation."""
    ranks, layout = LAYOUTS[layout_name]
    for name, loss in (("ours", None), ("own", cross_entropy)):
        config = config_of(tmp_path / name, **layout)
        on_ranks(ranks, config, batches=batches_of(), val_batches=batches_of(2, rows=3), loss=loss)
    for count, *names in ((STEPS, "loss", "grad_norm"), (2, "val_loss")):
        ours, own = (np.array(column(tmp_path / name, *names)) for name in ("ours", "own"))
        assert len(own) == count
        np.testing.assert_allclose(own, ours, rtol=2e-5)


@pytest.fixture(scope="module")
def weighted(tmp_path_factory):
    """Weights of targets, and what a loss of the program gives with them on one rank."""
    weights, out = np.random.default_rng(1).normal(size=(ROWS, TOKENS)), tmp_path_factory.mktemp("own")
    on_ranks(1, config_of(out, eval_every=0), batches=batches_of(weights=weights), loss=cross_entropy)
    return weights, column(out, "loss", "grad_norm")


@pytest.mark.parametrize("layout_name", ["zero", "pp", "cp", "tp"])
def test_weights_of_targets(layout_name, weighted, tmp_path):
    """Of 1 they change no bit; others give what the same loss of the program gives."""
    (ranks, layout), (weights, own) = LAYOUTS[layout_name], weighted
    found, ones = [], np.ones((ROWS, TOKENS))
    for kind, more in (("plain", {}), ("ones", {"weights": ones}), ("weights", {"weights": weights})):
        on_ranks(ranks, config_of(tmp_path / kind, eval_every=0, **layout), batches=batches_of(**more))
        found.append(column(tmp_path / kind, "loss", "grad_norm"))
    plain, with_ones, ours = found
    assert plain == with_ones and ours != plain
    np.testing.assert_allclose(ours, own, rtol=1e-4, atol=1e-6)


KERNEL = """
extern "C" __global__ void loss(DTYPE* logits, const int* targets, const float* weights, float* losses,
                                int vocabulary) {
    DTYPE* row = logits + long(blockIdx.x) * vocabulary;
    const int target = targets[blockIdx.x];
    const float weight = weights ? weights[blockIdx.x] : 1;
    float top = widen(row[0]), total = 0;
    for (int i = 1; i < vocabulary; ++i) top = fmaxf(top, widen(row[i]));
    for (int i = 0; i < vocabulary; ++i) total += expf(widen(row[i]) - top);
    const float loss = target < 0 ? 0 : logf(total) + top - widen(row[target]);
    __syncthreads();  // all threads have read the row
    if (threadIdx.x == 0) losses[blockIdx.x] = weight * loss;
    for (int i = threadIdx.x; i < vocabulary; i += blockDim.x)
        narrow(weight * (expf(widen(row[i]) - top) / total - (i == target)), row[i]);
}
"""


def on_memory(logits: Array, batch: Batch) -> tuple[Array, Array]:
    """The loss of the emulated device: its memory is the host's."""
    losses = Array.empty((len(logits),), "float32", logits.device)
    on_host(losses)[...], on_host(logits)[...] = cross_entropy(on_host(logits), batch.map(on_host))
    return losses, logits


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("layout_name", ["one", "pp"])
def test_an_emulated_gpu(layout_name, tmp_path, capsys):
    """All fields of a batch, validation, and each kind of loss, as on the CPU."""
    ranks, layout = LAYOUTS[layout_name]
    starts = np.repeat([[0] * 8 + [8] * 8], ROWS, axis=0)
    more = {"weights": np.random.default_rng(2).normal(size=(ROWS, TOKENS)), "document_starts": starts}
    losses = {"cpu": cross_entropy, "ours": None, "array": on_memory, "cuda": CudaLoss(KERNEL, 32)}
    val = [batch_of(9, 3)._replace(**{name: field[:3] for name, field in more.items()})]
    for name, loss in losses.items():
        device = {"device": "cpu"} if name == "cpu" else {"device": "cuda", "dtype": "float32", **layout}
        config = config_of(tmp_path / name, **device)
        of = DeviceComm if name != "cpu" else lambda comm: comm

        def run(comm, config=config, loss=loss, of=of):
            callbacks = [OnStep(lambda trainer, metrics: layout or trainer.model.logits([1, 2]))]
            fit(config, of(comm), batches=batches_of(**more), val_batches=val, loss=loss, callbacks=callbacks)

        spawn(run, ranks if name != "cpu" else 1, timeout=100)
        without = ", so there is no CUDA graph" in capsys.readouterr().out
        assert without == (name == "array")
    expected = np.array(column(tmp_path / "cpu", "loss", "grad_norm"))
    for name in losses:
        np.testing.assert_allclose(column(tmp_path / name, "loss", "grad_norm"), expected, rtol=1e-4, err_msg=name)
        val_loss = column(tmp_path / name, "val_loss")
        np.testing.assert_allclose(val_loss, column(tmp_path / "cpu", "val_loss"), rtol=1e-4, err_msg=name)
