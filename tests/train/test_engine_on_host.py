"""Runs on an emulated GPU give the CPU's values, and the same bits if eager, resumed, or on more ranks."""

import itertools
import json
import re
from collections import defaultdict
from threading import get_ident
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kos.comm.communicator import Communicator
from kos.errors import ConfigError
from kos.train import folder
from kos.train.device import cuda as engine_module
from kos.train.device.cuda import CudaDevice
from kos.train.model.model import Model
from kos.train.step import Step
from tests.train.emulated_runs import SMALL, column, text, train
from tests.train.host_kernels.engine import BFLOAT16, Event, QueuedOps, captured
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


AT_ONCE: dict[str, Any] = {"dtype": "bfloat16", "micro_batch_size": None}
WIDE = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
IN_8 = {"seq_len": 16, "dtype": "fp8", "model": {**SMALL["model"], **WIDE}}
RUNS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}), ({**IN_8, "lr": 1e-3}, {}), ({"optimizer": "muon", "zero": 1, "ranks": 2}, {}),
    ({"dtype": "bfloat16", "deterministic": True, "master_weights": "none"}, {"master_weights": "float32"}),
    ({"deterministic": True, "deterministic_parts": 2, "model": {**SMALL["model"], "intermediate_size": 32}}, {}),
    *(({**AT_ONCE, "ranks": 1 + zero, "zero": zero, "grad_dtype": "bfloat16"}, {"grad_dtype": "float32"})
      for zero in (0, 1)),
    *(({**AT_ONCE, "ranks": sum(hosts) or 2, "hosts": hosts, "zero": zero, "grad_dtype": kind, "compress": name},
       {"compress": "none"})
      for hosts, name, kind, zero in (
          ((), "int8", "float32", 0), ((), "fp8", "bfloat16", 1),
          ((2, 2), "int8", "float32", 1), ((2, 2), "fp8", "bfloat16", 0),
      )),
]  # fmt: skip
"""Settings of runs, and others beside which their losses are near."""


@pytest.mark.parametrize(("settings", "others"), RUNS, ids=str)
def test_a_run_has_the_same_bits_eager_and_resumed(emulated, text, tmp_path, settings, others):
    """Also computed again, or on other ranks, where that changes no order of sums. The first run of a graph has no
    effect on what compressed gradients have lost."""
    whole, tensors = train(text, tmp_path / "whole", **settings), tensors_of_run(tmp_path / "whole")
    step2 = tmp_path / "whole" / "checkpoints" / "step-2"
    if others:
        near = train(text, tmp_path / "near", **settings | others)
        for name in ("loss", "val_loss"):
            np.testing.assert_allclose(column(whole, name), column(near, name), rtol=5e-3)
        assert tensors_of_run(tmp_path / "near") != tensors
    if "master_weights" in settings:
        weights = load_file(step2 / "model.safetensors")
        assert all(np.array_equal(w, w.astype(BFLOAT16).astype(np.float32)) for w in weights.values())
    runs: list[dict[str, Any]] = [{"graph": False}, {"resume": str(step2)}]
    if "deterministic" in settings:
        layouts = [{"zero": 1}, {"pp": 2}, *([{"tp": 2}] if "deterministic_parts" in settings else [])]
        runs += [{"ranks": 2}, *({"ranks": 2, "resume": str(step2), **layout} for layout in layouts)]
    if settings.get("dtype") == "fp8":
        runs += [{"recompute": "norms"}, {"recompute": "block"}]
    for number, changes in enumerate(runs):
        rows = train(text, tmp_path / f"{number}", **settings | changes)
        assert column(rows) == column(whole)[-len(rows) :], changes
        assert tensors_of_run(tmp_path / f"{number}") == tensors, changes


def test_from_the_gpu_to_the_cpu_and_back(emulated, text, tmp_path):
    whole = train(text, tmp_path / "whole")
    step2 = tmp_path / "whole" / "checkpoints" / "step-2"
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


@pytest.mark.parametrize("graph", [True, False])
def test_a_pipeline_loads_all_kernels_before_its_messages(emulated, text, tmp_path, before_call, graph):
    """CUDA loads no kernel while another one waits for a message, so ranks could wait for each other."""
    events = defaultdict[int, list[str]](list)  # by rank

    def note(what):
        events[get_ident()].append(what)

    before_call(QueuedOps, "launch", lambda ops, file, name, *_, **defines: note(f"{name} {defines}"))
    before_call(Step, "run", lambda step: note("run"))
    before_call(CudaDevice, "evaluate", lambda device: note("validation"))
    before_call(Model, "forward", lambda *_, **options: note("forward"))
    for name in ("send", "recv"):
        before_call(Communicator, name, lambda *_, **options: note("message"))
    how = {"pp": 2, "pp_schedule": "zero-bubble-v", "model": {**SMALL["model"], "num_hidden_layers": 3}}
    train(text, tmp_path, steps=1, ranks=2, graph=graph, **how)
    for of_rank in events.values():
        parts = [[*each] for marks, each in itertools.groupby(of_rank, {"run", "validation"}.__contains__) if not marks]
        _, validation, loading, run = parts[:4]
        assert validation[: validation.index("message")].count("forward") > 1, "of each stage of a rank"
        assert "message" not in loading and "message" in run and {*run} - {"message"} <= {*loading}


def test_resuming_says_what_changes_bits(emulated, text, tmp_path, caplog, monkeypatch):
    """The GPU, and what may sum gradients otherwise; nothing of what is not known."""
    about, real = {"gpus": ["A", "A"], "backend": "peer"}, folder.provenance
    monkeypatch.setattr(folder, "provenance", lambda comm: real(comm) | about)

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
    assert resumed("new", **all_else) == ["zero"], "a setting that a version lacks had its default"


def test_several_bfloat16_gradients_add_up_in_float32(emulated, text, tmp_path, capsys):
    train(text, tmp_path / "one", **AT_ONCE, grad_dtype="bfloat16", steps=1)
    assert "gradients, bfloat16" in capsys.readouterr().out
    several = {"dtype": "bfloat16", "micro_batch_size": 2}
    bf16, fp32 = (train(text, tmp_path / name, **several, grad_dtype=name) for name in ("bfloat16", "float32"))
    assert column(bf16) == column(fp32)
    assert tensors_of_run(tmp_path / "bfloat16") == tensors_of_run(tmp_path / "float32")
    said = "--grad-dtype bfloat16: gradients are float32, since a rank adds up 4 micro-batches of a step"
    assert capsys.readouterr().out.count(said) == 1, "of the run that asked for it and got another"


def test_fp8_needs_a_gpu_that_has_it(emulated, text, tmp_path):
    about = engine_module.device_info(0)
    about.name, about.compute_capability = "NVIDIA A100", (8, 0)
    with refused(ConfigError, "--compress: expected int8 or int4 on NVIDIA A100, which has no fp8, got fp8"):
        train(text, tmp_path, ranks=2, compress="fp8")
