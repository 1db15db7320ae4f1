"""``--publish`` on an emulated GPU: servers get the weights of their step, as the kernels have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos.comm import Communicator
from kos.testing import spawn
from kos.train import TrainConfig, Trainer
from kos.train import publish as publishing
from kos.transfer import Publisher
from tests.comm.tcp_ranks import free_port
from tests.train import emulated_runs
from tests.train.emulated_runs import SMALL, text
from tests.train.host_kernels.engine import DeviceComm, host_engine
from tests.train.host_kernels.ops import needs_compiler
from tests.train.test_publish import Server, saved
from tests.transfer.emulated_gpu import emulated_gpu

__all__ = ["text"]

pytestmark = needs_compiler
EVEN = {**SMALL["model"], "intermediate_size": 32}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with emulated_gpu():
        host_engine(monkeypatch)
        monkeypatch.setattr(emulated_runs.loop, "choose_device", lambda asked, comm: asked.replace("auto", "cpu"))
        yield


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(1, {}, id="one rank"),
        pytest.param(2, {}, id="dp"),
        pytest.param(2, {"zero": 1, "dtype": "bfloat16"}, id="dp with ZeRO-1, bfloat16"),
        pytest.param(2, {"tp": 2, "dtype": "bfloat16", "model": EVEN}, id="tp, bfloat16"),
    ],
)
def test_versions_are_those_of_their_steps(
    ranks: int, changes: dict[str, Any], emulated: None, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although a step may begin before the one before it is finished; weights in bfloat16 are those of the copy."""
    address = f"127.0.0.1:{free_port()}"
    server = Server(address)

    class Watched(Publisher):
        def publish(self, version: int) -> int:
            late = super().publish(version)
            if self.rank == 0:
                server.update()
            return late

    monkeypatch.setattr(publishing, "Publisher", Watched)

    def run(folder: str, **more: Any) -> Path:
        values = {**SMALL, "data": str(text), "out": tmp_path / folder, "device": "cuda", "keep": 9, **changes, **more}

        def train(comm: Communicator) -> None:
            Trainer(TrainConfig.from_preset("tiny", **values), DeviceComm(comm), verbose=False).run()

        spawn(train, ranks, timeout=100)
        return tmp_path / folder / "checkpoints"

    run("published", publish=address, eval_every=0, save_every=0)
    checkpoints = run("saved", save_every=1)
    dtype = ml_dtypes.bfloat16 if "dtype" in changes else np.float32
    assert [*server.seen] == [0, 1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        right = saved(checkpoints / f"step-{step}")
        assert right.keys() == server.seen[step].keys()
        for name, tensor in right.items():
            assert (server.seen[step][name] == tensor.astype(dtype).astype(np.float32)).all(), (step, name)
