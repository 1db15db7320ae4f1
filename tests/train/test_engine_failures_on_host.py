"""Failures on an emulated GPU: values that are not finite, collectives, a lost GPU; and stops by a signal."""

import re
import threading
from collections import Counter

import numpy as np
import pytest

from kos.errors import CudaError, KosError, RankLost, TrainingError
from kos.train import checkpoint
from kos.train.device.cuda import BatchPrefetcher, CudaDevice
from kos.train.parallel.data import DataParallel
from kos.train.tools import read_metrics
from kos.train.trainer import Trainer
from tests.train.emulated_runs import column, text, train
from tests.train.host_kernels.communicator import DeviceComm
from tests.train.host_kernels.engine import Event, QueuedOps, on_device, on_host

__all__ = ["text"]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_signal_stops_all_ranks_after_the_same_step(emulated, text, tmp_path, ranks, monkeypatch):
    """One rank gets a signal between two steps.  All ranks save after the same step, and the run can be resumed."""
    start_step = CudaDevice.start_step

    def asked(self, step, stop):
        start_step(self, step, stop or (step == 1 and self.comm.rank == ranks - 1))

    settings = {"eval_every": 0, "save_every": 0, "steps": 9}
    with monkeypatch.context() as patch:
        patch.setattr(CudaDevice, "start_step", asked)
        rows = train(text, tmp_path / "run", ranks=ranks, **settings)
    assert column(rows, "step") == [1, 2, 3]  # the third step had started when the second completed
    whole = train(text, tmp_path / "whole", ranks=ranks, **settings)
    assert column(train(text, tmp_path / "run", ranks=ranks, resume="auto", **settings)) == column(whole)


@pytest.mark.parametrize(("ranks", "zero"), [(2, 1), *(pytest.param(n, 0, marks=pytest.mark.slow) for n in (1, 2))])
def test_gradients_that_are_not_finite_stop_the_run_or_are_skipped(
    emulated, text, tmp_path, ranks, zero, before_call
):
    """All ranks report values that one rank's backward has broken, also with ZeRO-1, which splits gradients."""
    now, how = threading.local(), {"ranks": ranks, "zero": zero}

    def poisoned(self, name):
        if name == "model.layers.1.mlp.up_proj.weight" and self.replicas.rank == ranks - 1:
            on_device(lambda: on_host(self.gradients[name]).fill(np.nan) if now.step == 2 else None)

    before_call(BatchPrefetcher, "take", lambda feed, step: setattr(now, "step", step))
    before_call(DataParallel, "gradient_ready", poisoned)
    with pytest.raises(TrainingError, match=r"step 3: .* gradient norm, got nan \(first in .*layers.1.mlp.up_proj"):
        train(text, tmp_path / "stops", **how)
    assert checkpoint.find(tmp_path / "stops").step == 2
    rows = train(text, tmp_path / "skips", skip_outliers=1e6, **how)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[2]["grad_norm"] is None
    assert np.isfinite(rows[3]["loss"]) and [row.get("skipped") for row in rows] == [None, None, True, None]


@pytest.mark.parametrize("pp", [1, 2])
def test_a_step_whose_collectives_failed_is_not_counted(emulated, text, tmp_path, before_call, pp):
    """A graph continues after its collectives or messages fail.  Its values are neither logged nor saved."""
    looks = Counter()

    def failing(comm, until=None):
        if until is not None and looks[comm] == 3 and (pp == 1 or comm.name != "world"):
            raise RankLost("all_gather #9: rank 1 is gone")
        looks[comm] += until is not None

    before_call(DeviceComm, "synchronize", failing)
    with pytest.raises(RankLost, match="rank 1 is gone"):
        train(text, tmp_path, ranks=2, pp=pp)
    assert column(read_metrics(tmp_path / "metrics.jsonl"), "step") == [1, 2, 3]
    assert checkpoint.find(tmp_path).step == 2


@pytest.mark.parametrize(
    ("ranks", "graph"), [(2, True), (1, False), *(pytest.param(n, n == 1, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_a_gpu_that_is_lost_during_a_run(emulated, text, tmp_path, ranks, graph, monkeypatch, before_call):
    """The host finds out while it waits or launches.  The error names the step, the GPU and the checkpoint."""
    settings = {"steps": 8, "save_every": 3, "ranks": ranks, "graph": graph}
    fault, whole = None, train(text, tmp_path / "whole", **settings)
    error, rank, said, run = "cuX failed: CUDA_ERROR_ECC (why)", threading.local(), {}, Trainer.run

    def start(device, step, stop):
        rank.broken = getattr(rank, "broken", False) or (step + 1 == fault and device.comm.rank == ranks - 1)

    def broken(*arguments, **options):
        if getattr(rank, "broken", False):
            raise CudaError(error)

    def seen(self):
        try:
            run(self)
        except KosError as failure:
            said[self.comm.rank] = failure
            raise

    before_call(CudaDevice, "start_step", start)
    before_call(*((Event, "done") if graph else (QueuedOps, "launch")), broken)
    monkeypatch.setattr(Trainer, "run", seen)
    go_on = re.escape(f"--config {tmp_path}/7/config.json --resume auto")
    before = "start the 2 ranks as before, with: " * (ranks > 1)
    good = rf"the last checkpoint, of step 6, is good; resume with: {before}\S+ -m kos\.train {go_on}"
    for fault, left in ((7, good), (1, "there is no checkpoint yet")):
        out = tmp_path / str(fault)
        with pytest.raises(CudaError):
            train(text, out, **settings)
        mine = re.escape(f"after step {fault - 1} on cuda:0 (host): {error}; ") + left
        assert type(said[ranks - 1]) is CudaError and re.fullmatch(mine, str(said[ranks - 1]))
        theirs = rf"after step \d: .*rank 1 is gone: CudaError: {mine}"
        assert ranks == 1 or (type(said[0]) is RankLost and re.fullmatch(theirs, str(said[0])))
        rows = read_metrics(out / "metrics.jsonl")  # rank 0 completes the steps to which rank 1 contributed
        assert fault - 1 <= len(rows) <= fault - 1 + 2 * (ranks - 1) and column(rows) == column(whole)[: len(rows)]
    fault = None  # the GPU works again
    assert checkpoint.find(tmp_path / "7").step == 6 and not (tmp_path / "1" / "checkpoints").exists()
    assert column(train(text, tmp_path / "7", **settings, resume="auto")) == column(whole)
