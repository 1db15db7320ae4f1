"""``--publish`` on an emulated GPU: servers get the weights of their step, as the kernels have them."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos.comm import Communicator
from kos.testing import spawn
from kos.train import TrainConfig, Trainer
from kos.train import publish as publishing
from kos.train.export import export
from kos.transfer import Publisher
from tests.comm.tcp_ranks import free_port
from tests.train.emulated_runs import SMALL, text
from tests.train.host_kernels.communicator import DeviceComm
from tests.train.host_kernels.ops import needs_compiler
from tests.train.test_publish import Server, saved
from tests.transfer.emulated_gpu import emulated_gpu

__all__ = ["text"]

pytestmark = needs_compiler
EVEN = {**SMALL["model"], "intermediate_size": 32}


@pytest.fixture
def transfer_emulated():
    with emulated_gpu():
        yield


@pytest.fixture
def emulated(transfer_emulated, emulated):
    """Also for the transfer of weights; the functions that both replace are those of training."""


def watched(monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that updates after each version."""
    server = Server(f"127.0.0.1:{free_port()}")

    class Watched(Publisher):
        def publish(self, version: int) -> int:
            late = super().publish(version)
            if self.rank == 0:
                server.update()
            return late

    monkeypatch.setattr(publishing, "Publisher", Watched)
    return server


def run(out: Path, ranks: int, **changes: Any) -> Path:
    """The folder of the checkpoints of a run on emulated GPUs."""
    values = {**SMALL, "out": out, "device": "cuda", "keep": 9, **changes}

    def train(comm: Communicator) -> None:
        Trainer(TrainConfig.from_preset("tiny", **values), DeviceComm(comm), verbose=False).run()

    spawn(train, ranks, timeout=100)
    return out / "checkpoints"


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(2, {}, id="dp"),
        pytest.param(2, {"zero": 1, "dtype": "bfloat16"}, id="dp with ZeRO-1, bfloat16"),
        pytest.param(2, {"tp": 2, "dtype": "bfloat16", "model": EVEN}, id="tp, bfloat16"),
    ],
)
def test_versions_are_those_of_their_steps(ranks, changes, emulated, text, tmp_path, monkeypatch):
    """Although a step may begin before the one before it is finished; weights in bfloat16 are those of the copy."""
    server = watched(monkeypatch)
    values = {"data": str(text), **changes}
    run(tmp_path / "published", ranks, publish=server.address, eval_every=0, save_every=0, **values)
    checkpoints = run(tmp_path / "saved", ranks, save_every=1, **values)
    dtype = ml_dtypes.bfloat16 if "dtype" in changes else np.float32
    assert [*server.seen] == [0, 1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        right = saved(checkpoints / f"step-{step}")
        assert right.keys() == server.seen[step].keys()
        for name, tensor in right.items():
            assert (server.seen[step][name] == tensor.astype(dtype).astype(np.float32)).all(), (step, name)


@pytest.mark.parametrize("changes", [{}, {"zero": 1, "dtype": "bfloat16"}], ids=["dp", "dp with ZeRO-1, bfloat16"])
def test_adapters_are_merged(changes, emulated, text, tmp_path, monkeypatch):
    """On the GPU, in the dtype of the weights there."""
    base = run(tmp_path / "base", 1, data=str(text), steps=1) / "step-1"
    server = watched(monkeypatch)
    about = {"init_from": str(base), "lora": 2, "publish": server.address, "publish_merged": True, "lr": 1e-2}
    checkpoints = run(tmp_path / "tuned", 2, data=str(text), **about, **changes)
    assert server.seen.keys() >= {2, 4}
    moved = False
    for step in (2, 4):
        export(checkpoints / f"step-{step}", tmp_path / f"merged-{step}", "float32", merge=True)
        right = saved(tmp_path / f"merged-{step}")
        assert right.keys() == server.seen[step].keys()
        for name, tensor in right.items():
            # In bfloat16 three things are rounded, each by at most 2^-9 of its size: weight, product, sum.
            largest = np.abs(tensor).max()
            bound = 2.0**-7 * largest if changes else 1e-5 * largest
            assert np.abs(server.seen[step][name] - tensor).max() <= bound, (step, name)
            moved = moved or np.abs(saved(base)[name] - tensor).max() > 2 * bound
    assert moved, "the adapters are too small for this test to see"
