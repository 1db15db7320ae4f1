"""The choice of the device, and memory plans: GPUs that are missing, old or shared, and runs that do not fit."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kos.cuda import unavailable
from kos.errors import BackendUnavailable, ConfigError, install
from kos.testing import spawn
from kos.train.checkpoint.state import WritePlan
from kos.train.config.options import TrainConfig
from kos.train.device import choose
from kos.train.device import cuda as engine_module
from kos.train.device.choose import choose_device
from kos.train.ops.cuda import cublaslt
from kos.train.optim.adamw import AdamW
from kos.train.parallel.mesh import Layout
from tests.train.emulated_runs import SMALL, text, train
from tests.train.host_kernels.communicator import DeviceComm

__all__ = ["text"]


def test_a_run_that_does_not_fit_is_refused_with_its_memory_plan(emulated, text, tmp_path):
    with pytest.raises(ConfigError, match="--master-weights: expected float32 with --dtype float32, got none"):
        train(text, tmp_path, master_weights="none")
    with pytest.raises(ConfigError, match="--grad-dtype: expected float32 with --dtype float32, got bfloat16"):
        train(text, tmp_path, grad_dtype="bfloat16")
    with pytest.raises(ConfigError, match="--grad-dtype: expected float32 with --deterministic, got bfloat16"):
        train(text, tmp_path, dtype="bfloat16", grad_dtype="bfloat16", deterministic=True)
    with pytest.raises(ConfigError, match=r"expected at most 8.00 GiB.*free on cuda:0, got .* or a smaller model"):
        train(text, tmp_path, model={**SMALL["model"], "intermediate_size": 8_000_000})


def test_a_missing_gpu_is_refused(text, tmp_path):
    if unavailable() is None:
        pytest.skip("needs a machine without a GPU")
    for ranks in (1, 2):
        with pytest.raises(ConfigError, match="--device cuda: expected a GPU for every rank, got none for rank 0: "):
            spawn(lambda comm: choose_device("cuda", comm), ranks)
    for changes, name in (
        ({"dtype": "bfloat16"}, "--dtype: expected float32 or fp8 on the CPU"),
        ({"master_weights": "none"}, "--master-weights: expected float32 with --dtype float32, got none"),
        ({"grad_dtype": "bfloat16"}, "--grad-dtype: expected float32 with --dtype float32, got bfloat16"),
        ({"graph": False}, "--no-graph: expected a GPU, got the CPU"),
    ):
        with pytest.raises(ConfigError, match=name):
            train(text, tmp_path, device="cpu", **changes)


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU, its driver and its libraries, of which any may be missing."""
    gpu = SimpleNamespace(compute_capability=(7, 5), name="Old", uuid="1")
    machine = SimpleNamespace(
        require=Mock(), unavailable=Mock(return_value=None), device_info=lambda device: gpu, nvrtc_version=Mock(),
        library=Mock(), DRIVER=Mock(), gpu=gpu,
    )  # fmt: skip
    of_cuda = ((choose, name) for name in ("require", "unavailable", "device_info", "nvrtc_version", "DRIVER"))
    for module, name in (*of_cuda, (cublaslt, "library")):
        monkeypatch.setattr(module, name, getattr(machine, name))
    return machine


def test_gpus_that_are_too_old_or_shared(machine, monkeypatch, caplog):
    """An old GPU is refused by its name.  A GPU that ranks share is used only on request."""
    gpu = machine.gpu
    with pytest.raises(ConfigError, match=r"for rank 0: expected compute capability 8.0, got 7.5 \(Old\)"):
        spawn(lambda comm: choose_device("cuda", DeviceComm(comm)), 2)
    gpu.compute_capability = (9, 0)
    assert spawn(lambda comm: choose_device("auto", DeviceComm(comm)), 1) == ["cuda"]
    assert spawn(lambda comm: choose_device("cuda", DeviceComm(comm)), 2) == ["cuda"] * 2
    assert spawn(lambda comm: choose_device("auto", DeviceComm(comm)), 2) == ["cpu"] * 2
    assert "not on this machine's GPUs: ranks share a GPU" in caplog.text
    machine.nvrtc_version.side_effect = BackendUnavailable("NVRTC is not installed: pip")
    assert spawn(lambda comm: choose_device("auto", DeviceComm(comm)), 1) == ["cpu"]
    assert "not on this machine's GPUs: NVRTC is not installed: pip" in caplog.text
    why = f"the CUDA packages are not installed: {install('cuda')}"
    machine.unavailable.return_value, machine.require.side_effect = why, BackendUnavailable(f"CUDA: {why}")
    for driver_is_there, visible in ((False, None), (True, None), (True, "0"), (True, "")):
        caplog.clear()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        machine.DRIVER.exists.return_value = driver_is_there
        assert spawn(lambda comm: choose_device("auto", DeviceComm(comm)), 1) == ["cpu"]
        warned = [f"training on the CPU, not on this machine's GPUs: {why}"]
        assert caplog.messages == warned * (driver_is_there and visible != "")


def test_the_hosts_memory_for_checkpoints_is_planned(emulated, text, tmp_path, monkeypatch):
    """With ``--save-async`` each rank holds its part of weights and moments, and one tensor."""
    model = TrainConfig.from_preset("tiny", **SMALL).model_config_for(256)
    shards = WritePlan(model, Layout(dp=2), ((0,),), dict.fromkeys(AdamW.state, model.parameter_shapes()))
    at_once, needed = (2 * max(shards.host_bytes(rank, whole) for rank in range(2)) for whole in (False, True))
    assert at_once < 12 * model.num_parameters() < needed
    free = Mock(return_value=needed - 1)
    monkeypatch.setattr(engine_module, "free_memory", free)
    with pytest.raises(ConfigError, match=r"free on the host of rank [01], got .*\(tensors to be saved"):
        train(text, tmp_path / "less", ranks=2, save_async=True)
    free.return_value = needed
    assert len(train(text, tmp_path / "enough", ranks=2, save_async=True)) == 4
    free.return_value = at_once
    assert len(train(text, tmp_path / "at once", ranks=2)) == 4
