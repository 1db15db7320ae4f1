"""Runs on an emulated GPU give the CPU's values, and the same bits if eager, resumed, or on more ranks."""

import itertools
import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from kos.errors import ConfigError
from kos.train import run_context
from kos.train.device import cuda as engine_module
from kos.train.device.cuda import CudaDevice
from kos.train.train import Step
from tests.train.emulated_runs import SMALL, column, text, train
from tests.train.host_kernels.engine import BFLOAT16, Event, captured
from tests.train.refusal import refused
from tests.train.sharded import tensors_of_run

__all__ = ["text"]


def test_steps_are_those_of_the_cpu(emulated, text, tmp_path, capsys):
    cpu = train(text, tmp_path / "cpu", "cpu")
    runs = {
        1e-5: train(text, tmp_path / "fp32", sample_tokens=2),
        2e-2: train(text, tmp_path / "bf16", dtype="bfloat16"),
    }
    for tolerance, rows in runs.items():
        for name in ("loss", "grad_norm", "lr", "val_loss"):
            np.testing.assert_allclose(column(rows, name), column(cpu, name), rtol=tolerance)
    said = capsys.readouterr().out
    for expected in ("activations, recompute none", "gradients, float32", "on host, bfloat16, one CUDA", "a sample"):
        assert expected in said, expected


def test_a_step_lasts_from_the_one_before(emulated, text, tmp_path, monkeypatch, before_call):
    """By the device's clock, which is one on at each mark; not from before what comes between steps."""
    clock = itertools.count()
    monkeypatch.setattr(Event, "clock", lambda event: next(clock))
    before_call(CudaDevice, "evaluate", lambda device: [*itertools.islice(clock, 99)])
    rows = train(text, tmp_path, steps=8, eval_every=4, save_every=0)
    assert column(rows, "step_seconds") == [1] * 8


def test_the_graph_resuming_and_the_way_back(emulated, text, tmp_path):
    """Bit for bit on the same device, and on the other from the same checkpoint."""
    whole = train(text, tmp_path / "whole")
    eager = train(text, tmp_path / "eager", graph=False)
    assert column(eager) == column(whole) and tensors_of_run(tmp_path / "eager") == tensors_of_run(tmp_path / "whole")
    step2 = tmp_path / "whole" / "checkpoints" / "step-2"
    rest = train(text, tmp_path / "rest", resume=str(step2))
    assert column(rest) == column(whole)[2:] and tensors_of_run(tmp_path / "rest") == tensors_of_run(tmp_path / "whole")
    back = train(text, tmp_path / "back", "cpu", resume=str(step2))
    np.testing.assert_allclose(column(back), column(whole)[2:], rtol=1e-5)
    forth = train(text, tmp_path / "forth", resume=str(tmp_path / "back"), steps=6)
    assert column(forth, "step") == [5, 6]


def test_the_dry_run_of_a_graph_reports_no_step(emulated, text, tmp_path, before_call):
    """What is left of its reports in a rank's memory must not count for the step, if that is ended."""
    reported = list[list[float]]()

    def spy(step):
        if not captured():
            reported.append(step.report.numpy()[1:3].tolist())

    before_call(Step, "run", spy)
    train(text, tmp_path, steps=1, ranks=2)
    assert reported == [[0, 0], [0, 0]]


def test_resuming_says_what_changes_bits(emulated, text, tmp_path, caplog, monkeypatch):
    """The GPU, and what may sum gradients otherwise; nothing of what is not known."""
    about, real = {"gpus": ["A", "A"], "backend": "peer"}, run_context.provenance
    monkeypatch.setattr(run_context, "provenance", lambda comm: real(comm) | about)

    def resumed(before, ranks=2, gpus=("A",), backend="peer", **changes):
        caplog.clear()
        about["gpus"], about["backend"] = list(gpus), backend
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        train(text, out, ranks=ranks, resume=str(tmp_path / before), steps=2, **changes)
        said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("resuming")]
        return [re.sub("^resuming (with|in) another ", "", line).partition(":")[0] for line in said]

    all_else = {"gpus": ("A", "B"), "backend": "nccl", "zero": 1}
    train(text, tmp_path / "new", ranks=2, steps=1)
    assert resumed("new") == []
    assert resumed("new", **all_else) == ["GPU, zero, backend"]
    assert resumed("new", ranks=1, backend="single") == ["layout"]
    train(text, tmp_path / "fixed", ranks=2, steps=1, deterministic=True)
    assert resumed("fixed", **{**all_else, "deterministic": True}) == ["GPU"]
    assert resumed("fixed", backend="nccl", zero=1, deterministic=True) == []
    (manifest,) = (tmp_path / "new" / "checkpoints").glob("*/manifest.json")
    old = json.loads(manifest.read_text())
    del old["config"]["config"]["zero"], old["config"]["gpus"], old["config"]["backend"]
    manifest.write_text(json.dumps(old))
    assert resumed("new", **all_else) == []


def test_a_run_goes_on_in_another_layout(emulated, text, tmp_path):
    """From its checkpoints: a pipeline's, a part in fp32 each, on tensor-parallel ranks and on one."""
    settings = {"model": {**SMALL["model"], "intermediate_size": 30}, "sample_tokens": 2}
    one = train(text, tmp_path / "one", **settings)
    rows = train(text, tmp_path / "pp", ranks=2, pp=2, **settings)
    step2 = str(tmp_path / "pp" / "checkpoints" / "step-2")
    runs = {
        "pp": rows,
        "tp": train(text, tmp_path / "tp", ranks=2, tp=2, resume=step2, **settings),
        "alone": train(text, tmp_path / "alone", resume=step2, **settings),
        "unseen": train(text, tmp_path / "unseen", ranks=2, pp=2, eval_batches=0, hold_out=0.1, **settings),
    }
    for layout, got in runs.items():
        for name in ("loss", "grad_norm", "val_loss")[: 2 if layout == "unseen" else 3]:
            expected = column(one, name)[-len(column(got, name)) :]
            np.testing.assert_allclose(column(got, name), expected, rtol=1e-5, err_msg=f"{layout} {name}")


def test_without_master_weights(emulated, text, tmp_path):
    """Weights are bfloat16, in checkpoints too; the same bits eager, resumed, on other ranks and with ZeRO-1."""
    settings = {"dtype": "bfloat16", "master_weights": "none", "deterministic": True}
    near = train(text, tmp_path / "near", dtype="bfloat16")
    one = train(text, tmp_path / "one", **settings)
    np.testing.assert_allclose(column(one), column(near), rtol=5e-3)
    assert tensors_of_run(tmp_path / "one") != tensors_of_run(tmp_path / "near")
    step2 = tmp_path / "one" / "checkpoints" / "step-2"
    weights = load_file(step2 / "model.safetensors")
    assert all(np.array_equal(w, w.astype(BFLOAT16).astype(np.float32)) for w in weights.values())
    for name, changes in {
        "eager": {"graph": False}, "resumed": {"resume": str(step2)}, "two": {"ranks": 2},
        "sharded resumed": {"ranks": 2, "zero": 1, "resume": str(step2)},
    }.items():  # fmt: skip
        rows = train(text, tmp_path / name, **settings, **changes)
        assert column(rows) == column(one)[-len(rows) :], name
        assert tensors_of_run(tmp_path / name) == tensors_of_run(tmp_path / "one"), name


def test_bfloat16_gradients(emulated, text, tmp_path, capsys):
    """Of one micro-batch a rank: near fp32's, the same bits eager and resumed, over ranks too.  Several add up in fp32,
    and weights and moments come whole through a checkpoint whatever gradients are."""
    settings = {"dtype": "bfloat16", "micro_batch_size": None, "grad_dtype": "bfloat16"}
    near = train(text, tmp_path / "near", **settings | {"grad_dtype": "float32"})
    for ranks, zero in ((1, 0), (2, 1)):
        out, how = tmp_path / f"{ranks}", {**settings, "ranks": ranks, "zero": zero}
        rows = train(text, out, **how)
        assert "gradients, bfloat16" in capsys.readouterr().out
        for name in ("loss", "grad_norm", "val_loss"):
            np.testing.assert_allclose(column(rows, name), column(near, name), rtol=5e-3)
        assert tensors_of_run(out) != tensors_of_run(tmp_path / "near")
        eager = train(text, tmp_path / f"{ranks} eager", **how, graph=False)
        assert column(eager) == column(rows) and tensors_of_run(tmp_path / f"{ranks} eager") == tensors_of_run(out)
        rest = train(text, tmp_path / f"{ranks} rest", **how, resume=str(out / "checkpoints" / "step-2"))
        assert column(rest) == column(rows)[2:] and tensors_of_run(tmp_path / f"{ranks} rest") == tensors_of_run(out)
    several = {"dtype": "bfloat16", "micro_batch_size": 2}
    assert column(train(text, tmp_path / "bf16", **several, grad_dtype="bfloat16")) == column(
        train(text, tmp_path / "fp32", **several)
    )
    assert tensors_of_run(tmp_path / "bf16") == tensors_of_run(tmp_path / "fp32")
    said = "--grad-dtype bfloat16: gradients are float32, since a rank adds up 4 micro-batches of a step"
    assert capsys.readouterr().out.count(said) == 1, "of the run that asked for it and got another"


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("compress", "grad_dtype"), [("int8", "float32"), ("fp8", "bfloat16")])
@pytest.mark.parametrize("hosts", [(), (2, 2)], ids=str)
def test_compressed_gradients(emulated, text, tmp_path, hosts, compress, grad_dtype, zero):
    """Near the others; the same bits in a graph, whose first run has no effect on the residual, eager and resumed."""
    how = {"dtype": "bfloat16", "micro_batch_size": None, "grad_dtype": grad_dtype, "zero": zero}
    how |= {"ranks": sum(hosts) or 2, "hosts": hosts}
    near, how = train(text, tmp_path / "near", **how), {**how, "compress": compress}
    rows = train(text, tmp_path / "graph", **how)
    np.testing.assert_allclose(column(rows), column(near), rtol=5e-3)
    assert tensors_of_run(tmp_path / "near") != tensors_of_run(tmp_path / "graph")
    step2 = str(tmp_path / "graph" / "checkpoints" / "step-2")
    for name, changes in {"eager": {"graph": False}, "resumed": {"resume": step2}}.items():
        again = train(text, tmp_path / name, **how, **changes)
        assert column(again) == column(rows)[-len(again) :], name
        assert tensors_of_run(tmp_path / name) == tensors_of_run(tmp_path / "graph"), name


def test_fp8_needs_a_gpu_that_has_it(emulated, text, tmp_path):
    about = engine_module.device_info(0)
    about.name, about.compute_capability = "NVIDIA A100", (8, 0)
    with refused(ConfigError, "--compress: expected int8 or int4 on NVIDIA A100, which has no fp8, got fp8"):
        train(text, tmp_path, ranks=2, compress="fp8")
