"""The engine of GPUs on machines without one: its kernels emulated, a step against the CPU's, its parts together."""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import load_file

from kos.cuda import unavailable
from kos.errors import BackendUnavailable, ConfigError, CudaError, KosError, RankLost, TrainingError, install
from kos.memory import array as array_module
from kos.testing import spawn
from kos.train import run as loop
from kos.train.checkpoint import checkpoint
from kos.train.checkpoint.shards import Shards
from kos.train.config.options import TrainConfig
from kos.train.engine import choose, memory_plan
from kos.train.engine import cuda as engine_module
from kos.train.engine.choose import choose_device
from kos.train.engine.cuda import CudaEngine
from kos.train.engine.feed import Feed
from kos.train.model import initial
from kos.train.model.initial import init_weights
from kos.train.model.llama import Llama
from kos.train.model.parameters import Parameters
from kos.train.ops.cuda import cublaslt
from kos.train.ops.cuda.adamw import CHUNK
from kos.train.parallel.data import DataParallel
from kos.train.parallel.mesh import Layout
from kos.train.run import Trainer
from kos.train.tools.metrics import read_metrics
from tests.train.host_kernels.engine import BFLOAT16, DeviceComm, Event, QueuedOps, host_engine, on_device, on_host
from tests.train.sharded import tensors_of_run

SMALL: dict[str, Any] = {
    "steps": 4,
    "batch_size": 8,
    "micro_batch_size": 2,
    "seq_len": 8,
    "lr": 3e-3,
    "warmup_steps": 0,
    "schedule": "constant",
    "eval_every": 2,
    "eval_batches": 2,
    "sample_tokens": 0,
    "save_every": 2,
    "dtype": "float32",
    "model": {
        "vocab_size": 256, "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "letters.txt"
    path.write_bytes(np.random.default_rng(7).integers(97, 110, 2000, np.uint8).tobytes())
    return path


@pytest.fixture
def emulated(monkeypatch):
    host_engine(monkeypatch)
    monkeypatch.setattr(loop, "choose_device", lambda asked, comm: asked.replace("auto", "cpu"))


def train(text, out, device="cuda", ranks=1, **changes):
    values = {**SMALL, "data": str(text), "out": out, "device": device, **changes}

    def run(comm):
        Trainer(TrainConfig.from_preset("tiny", **values), DeviceComm(comm) if device == "cuda" else comm).run()

    spawn(run, ranks, timeout=100)
    return read_metrics(out / "metrics.jsonl")


def column(rows, name="loss"):
    return [row[name] for row in rows if name in row]


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


def test_a_step_lasts_from_the_one_before(emulated, text, tmp_path, monkeypatch):
    """By the device's clock, which is one on at each mark; not from before what comes between steps."""
    clock, evaluate = itertools.count(), CudaEngine.evaluate
    monkeypatch.setattr(Event, "clock", lambda event: next(clock))
    monkeypatch.setattr(CudaEngine, "evaluate", lambda self: [evaluate(self), *itertools.islice(clock, 99)][0])
    rows = train(text, tmp_path, steps=8, eval_every=4, save_every=0)
    assert column(rows, "step_seconds") == [1] * 8


def test_gpt2(emulated, text, tmp_path):
    shape = {"model_type": "gpt2", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"intermediate_size": 48, "vocab_size": 256, "tie_word_embeddings": True, "num_key_value_heads": 4}
    cpu, gpu = (train(text, tmp_path / device, device, model=shape) for device in ("cpu", "cuda"))
    for name in ("loss", "grad_norm", "val_loss"):
        np.testing.assert_allclose(column(gpu, name), column(cpu, name), rtol=1e-5)


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


def test_resuming_says_what_changes_bits(emulated, text, tmp_path, caplog, monkeypatch):
    """The GPU, and what may sum gradients otherwise; nothing of what is not known."""
    about, real = {"gpus": ["A", "A"], "backend": "peer"}, loop.provenance
    monkeypatch.setattr(loop, "provenance", lambda comm: real(comm) | about)

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


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [(2, "bfloat16"), *(pytest.param(n, "float32", marks=pytest.mark.slow) for n in (2, 4))],
)
def test_ranks(emulated, text, tmp_path, ranks, dtype, monkeypatch):
    """Buckets and shards of several sizes: the losses of one rank, and ZeRO-1 resumed, on other ranks too."""
    monkeypatch.setattr(memory_plan, "BUCKET_BYTES", 4 * ranks * CHUNK)
    tolerance = 1e-5 if dtype == "float32" else 1e-3
    one = train(text, tmp_path / "one", dtype=dtype)
    both = {zero: train(text, tmp_path / str(zero), ranks=ranks, zero=zero, dtype=dtype) for zero in (0, 1)}
    for rows in both.values():
        for name in ("loss", "grad_norm", "val_loss"):
            np.testing.assert_allclose(column(rows, name), column(one, name), rtol=tolerance)
    step2 = tmp_path / "1" / "checkpoints" / "step-2"
    rest = train(text, tmp_path / "rest", ranks=ranks, zero=1, dtype=dtype, resume=str(step2))
    assert column(rest) == column(both[1])[2:] and tensors_of_run(tmp_path / "rest") == tensors_of_run(tmp_path / "1")
    alone = train(text, tmp_path / "alone", dtype=dtype, resume=str(step2))
    np.testing.assert_allclose(column(alone), column(one)[2:], rtol=tolerance)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {"zero": 1}),
        (4, {}),
        (4, {"zero": 1}),
        (2, {"micro_batch_size": 4, "dtype": "bfloat16", "grad_dtype": "bfloat16"}),
    ],
)
def test_initial_weights_are_those_of_one_rank(emulated, text, tmp_path, ranks, options, monkeypatch):
    """In blocks smaller than a tensor."""
    seed = int(np.random.default_rng().integers(1 << 62))
    print(f"{seed = }")
    monkeypatch.setattr(initial, "BLOCK", 777)
    values = {**SMALL, "data": str(text), "out": tmp_path, "device": "cuda", "seed": seed, **options}

    def run(comm):
        trainer = Trainer(TrainConfig.from_preset("tiny", **values), DeviceComm(comm))
        expected = Parameters(trainer.model_config.parameter_shapes())
        init_weights(trainer.model_config, expected, seed)
        state = trainer.engine.state
        names, tensors = state.shards.names(comm.rank), [*state.gather()]
        assert len(tensors) == 3 * len(names)
        for name, tensor in zip(names, tensors, strict=False):
            np.testing.assert_array_equal(expected[name].ravel(), tensor.ravel(), err_msg=name)
        assert not any(moment.any() for moment in tensors[len(names) :])
        trainer._held.close()

    spawn(run, ranks, timeout=100)


def test_algorithms_are_searched_once(emulated, text, tmp_path, monkeypatch):
    """For the same shapes, by the same code; the numbers are the same without."""
    made, rows = [], []
    real = engine_module._draw_quickly
    monkeypatch.setattr(engine_module, "_draw_quickly", lambda *a: made.append(a) or real(*a))
    other = {"seq_len": 9}
    cases = ((1, {}), (0, {}), (0, {"lr": 1e-3}), (1, other), (1, {"micro_batch_size": 1}), (0, other))
    for number, (searches, options) in enumerate(cases):
        made.clear()
        rows.append(train(text, tmp_path / str(number), steps=1, save_every=0, **options))
        assert len(made) == searches, options
    assert column(rows[0]) == column(rows[1])
    monkeypatch.setattr(engine_module, "__file__", str(tmp_path / "other" / "code.py"))
    made.clear()
    train(text, tmp_path / "other", steps=1, save_every=0)
    assert len(made) == 1


def test_one_rank_searches_and_all_take_what_it_found(emulated, text, tmp_path, caplog, monkeypatch):
    """Where the cache cannot be written, too; a GPU of another kind is searched for on its own."""
    (tmp_path / "file").write_text("where a folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(cublaslt, "stored_algorithms", lambda device: cublaslt.Stored("matmul", "host"))
    searched, given = [], []

    def make(device, stream=None, algorithms=None, search=False, **others):
        if search:
            searched.append(algorithms)
            algorithms["a shape"] = f"by search {len(searched)}"
        ops = QueuedOps()
        if not search:
            given.append(ops.algorithms)
        return ops

    monkeypatch.setattr(engine_module, "CudaOps", make)
    train(text, tmp_path / "alike", ranks=2, steps=1, save_every=0)
    taken = [table for table in given if table]  # the samples' products have none
    assert len(searched) == 1 and taken == [{"a shape": "by search 1"}] * 2
    (line,) = (record.getMessage() for record in caplog.records if "cache" in record.getMessage())
    assert "host.json cannot be used" in line
    searched.clear(), given.clear()
    names = iter(["one", "other", "one"])
    own = threading.local()

    def about(device):
        own.name = getattr(own, "name", None) or next(names)
        return SimpleNamespace(name=own.name, uuid=own.name)

    monkeypatch.setattr(engine_module, "device_info", about)
    train(text, tmp_path / "mixed", ranks=3, steps=1, save_every=0, batch_size=6)
    assert len(searched) == 2 and sorted(x["a shape"][-1] for x in given if x) in (["1", "1", "2"], ["1", "2", "2"])


@pytest.mark.parametrize(
    "model", [{}, {"model_type": "gpt2", "num_key_value_heads": 4, "tie_word_embeddings": True}], ids=["llama", "gpt2"]
)
def test_the_search_sees_numbers_like_those_of_a_first_step(emulated, text, tmp_path, model, monkeypatch):
    """Its first pass does: weights, those beyond what is drawn too, and tokens."""
    seen, real = [], Llama.queue_forward

    def queue(self, weights, slot, tokens, *others):
        if isinstance(self.ops, QueuedOps) and not seen:
            seen.extend([np.array(tokens), {name: on_host(weights[name]).copy() for name in weights}])
        return real(self, weights, slot, tokens, *others)

    monkeypatch.setattr(engine_module, "DRAWN", 1000)
    monkeypatch.setattr(Llama, "queue_forward", queue)
    train(text, tmp_path, steps=1, save_every=0, model={**SMALL["model"], "head_dim": 6, **model})
    tokens, weights = seen
    assert tokens.shape == (2, 8) and len(np.unique(tokens)) > 8 and tokens.min() >= 0 and tokens.max() < 256
    assert sum(w.size for w in weights.values()) > 10_000
    for name, w in weights.items():
        if w.ndim == 1:
            assert (w == (not name.endswith("bias"))).all(), name
        else:
            np.testing.assert_allclose((w.mean(), w.std()), (0, 0.02), atol=0.003, err_msg=name)


def test_deterministic_for_any_number_of_ranks(emulated, text, tmp_path):
    one = train(text, tmp_path / "one", deterministic=True)
    for ranks, zero in ((2, 0), (4, 1)):
        out = tmp_path / f"{ranks}"
        rows = train(text, out, ranks=ranks, zero=zero, deterministic=True)
        for name in ("loss", "grad_norm", "val_loss"):
            assert column(rows, name) == column(one, name)
        assert tensors_of_run(out) == tensors_of_run(tmp_path / "one")


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("tp", "--deterministic: expected --tp 1 on GPUs, where sums over features are not split, got 2"),
        ("cp", "--deterministic --cp 2: expected --seq-len to be a multiple of 4 and at least 16384"),
    ],
)
def test_deterministic_that_cannot_be_cut_is_refused(emulated, text, tmp_path, axis, expected):
    with pytest.raises(ConfigError, match=expected):
        train(text, tmp_path, ranks=2, deterministic=True, **{axis: 2})


def test_a_run_goes_on_in_another_layout(emulated, text, tmp_path):
    """From its checkpoints: a pipeline's, a part in fp32 each, on tensor-parallel ranks and on one."""
    settings = {"model": {**SMALL["model"], "intermediate_size": 30}, "sample_tokens": 2}
    one = train(text, tmp_path / "one", **settings)
    rows = train(text, tmp_path / "pp", ranks=2, pp=2, pp_schedule="zero-bubble", **settings)
    step2 = str(tmp_path / "pp" / "checkpoints" / "step-2")
    runs = {
        "pp": rows,
        "tp": train(text, tmp_path / "tp", ranks=2, tp=2, resume=step2, **settings),
        "alone": train(text, tmp_path / "alone", resume=step2, **settings),
        "unseen": train(text, tmp_path / "unseen", ranks=2, pp=2, eval_batches=0, **settings),
    }
    for layout, got in runs.items():
        for name in ("loss", "grad_norm", "val_loss")[: 2 if layout == "unseen" else 3]:
            expected = column(one, name)[-len(column(got, name)) :]
            np.testing.assert_allclose(column(got, name), expected, rtol=1e-5, err_msg=f"{layout} {name}")


def test_without_master_weights(emulated, text, tmp_path, monkeypatch):
    """Weights are bfloat16, in checkpoints too; the same bits eager, resumed, on other ranks and with ZeRO-1."""
    monkeypatch.setattr(memory_plan, "BUCKET_BYTES", 8 * CHUNK)
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


def test_bfloat16_gradients(emulated, text, tmp_path, monkeypatch, capsys):
    """Of one micro-batch a rank: near fp32's, the same bits eager and resumed, over ranks too.  Several add up in fp32,
    and weights and moments come whole through a checkpoint whatever gradients are."""
    monkeypatch.setattr(memory_plan, "BUCKET_BYTES", 4 * CHUNK)
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


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_asked_to_stop(emulated, text, tmp_path, ranks, monkeypatch):
    """By a signal to one rank between two steps: all end after the same step, saved, and can go on."""
    start_step = CudaEngine.start_step

    def asked(self, step, stop):
        start_step(self, step, stop or (step == 1 and self.comm.rank == ranks - 1))

    monkeypatch.setattr(CudaEngine, "start_step", asked)
    settings = {"eval_every": 0, "save_every": 0, "steps": 9}
    rows = train(text, tmp_path / "run", ranks=ranks, **settings)
    assert column(rows, "step") == [1, 2, 3]  # the third was under way when the second's answer came
    monkeypatch.undo()
    host_engine(monkeypatch)
    monkeypatch.setattr(loop, "choose_device", lambda asked, comm: asked)
    whole = train(text, tmp_path / "whole", ranks=ranks, **settings)
    assert column(train(text, tmp_path / "run", ranks=ranks, resume="auto", **settings)) == column(whole)


@pytest.mark.parametrize(
    ("ranks", "zero"), [(2, 1), *(pytest.param(n, 0, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_what_is_not_finite_stops_or_is_skipped(emulated, text, tmp_path, ranks, zero, monkeypatch):
    """What the backward of one rank breaks all name, with ZeRO-1 too, where a rank has a part of each gradient."""
    monkeypatch.setattr(memory_plan, "BUCKET_BYTES", 4 * ranks * CHUNK)
    now, take, ready, how = threading.local(), Feed.take, DataParallel.gradient_ready, {"ranks": ranks, "zero": zero}

    def taken(self, step):
        now.step = step
        take(self, step)

    def poisoned(self, name):
        if name == "model.layers.1.mlp.up_proj.weight" and self.axis.rank == ranks - 1:
            on_device(lambda: on_host(self.gradients[name]).fill(np.nan) if now.step == 2 else None)
        ready(self, name)

    monkeypatch.setattr(Feed, "take", taken)
    monkeypatch.setattr(DataParallel, "gradient_ready", poisoned)
    with pytest.raises(TrainingError, match=r"step 3: .* gradient norm, got nan \(first in .*layers.1.mlp.up_proj"):
        train(text, tmp_path / "stops", **how)
    assert checkpoint.find(tmp_path / "stops").step == 2
    rows = train(text, tmp_path / "skips", skip_outliers=1e6, **how)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[2]["grad_norm"] is None
    assert np.isfinite(rows[3]["loss"]) and [row.get("skipped") for row in rows] == [None, None, True, None]


@pytest.mark.parametrize("pp", [1, 2])
def test_a_step_whose_collectives_failed_is_none(emulated, text, tmp_path, monkeypatch, pp):
    """A graph goes on without what it waited for; its numbers are neither logged nor saved.  Of a message as well."""
    late, synchronize = RankLost("all_gather #9: rank 1 is gone"), DeviceComm.synchronize

    def failing(self, until=None):
        synchronize(self, until)
        if until is not None and self.looks == 3 and (pp == 1 or self.name != "world"):
            raise late
        self.looks += until is not None

    monkeypatch.setattr(DeviceComm, "looks", 0, raising=False)
    monkeypatch.setattr(DeviceComm, "synchronize", failing)
    with pytest.raises(RankLost, match="rank 1 is gone"):
        train(text, tmp_path, ranks=2, pp=pp)
    assert column(read_metrics(tmp_path / "metrics.jsonl"), "step") == [1, 2, 3]
    assert checkpoint.find(tmp_path).step == 2


@pytest.mark.parametrize(
    ("ranks", "graph"), [(2, True), (1, False), *(pytest.param(n, n == 1, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_a_gpu_lost_in_the_middle(emulated, text, tmp_path, ranks, graph, monkeypatch):
    """Learned of where the host waits, or queues: an error that names step, GPU and checkpoint; nothing after it."""
    settings = {"steps": 8, "save_every": 3, "ranks": ranks, "graph": graph}
    whole = train(text, tmp_path / "whole", **settings)
    error, rank, said = "cuX failed: CUDA_ERROR_ECC (why)", threading.local(), {}
    start_step, run = CudaEngine.start_step, Trainer.run

    def start(self, step, stop):
        rank.broken = getattr(rank, "broken", False) or (step + 1 == fault and self.comm.rank == ranks - 1)
        start_step(self, step, stop)

    def broken(*arguments, **options):
        if getattr(rank, "broken", False):
            raise CudaError(error)
        return works(*arguments, **options)

    def seen(self):
        try:
            run(self)
        except KosError as failure:
            said[self.comm.rank] = failure
            raise

    where, name = (Event, "done") if graph else (QueuedOps, "launch")
    works = getattr(where, name)
    with monkeypatch.context() as patch:
        for owner, method, fake in ((where, name, broken), (CudaEngine, "start_step", start), (Trainer, "run", seen)):
            patch.setattr(owner, method, fake)
        go_on = re.escape(f"--config {tmp_path}/7/config.json --resume auto")
        start = "start the 2 ranks as before, with: " * (ranks > 1)
        good = rf"the last checkpoint, of step 6, is good; to go on: {start}\S+ -m kos\.train {go_on}"
        for fault, left in ((7, good), (1, "there is no checkpoint yet")):
            out = tmp_path / str(fault)
            with pytest.raises(CudaError):
                train(text, out, **settings)
            mine = re.escape(f"after step {fault - 1} on cuda:0 (host): {error}; ") + left
            assert type(said[ranks - 1]) is CudaError and re.fullmatch(mine, str(said[ranks - 1]))
            theirs = rf"after step \d: .*rank 1 is gone: CudaError: {mine}"
            assert ranks == 1 or (type(said[0]) is RankLost and re.fullmatch(theirs, str(said[0])))
            rows = read_metrics(out / "metrics.jsonl")  # rank 0 finishes what rank 1 had a part in
            assert fault - 1 <= len(rows) <= fault - 1 + 2 * (ranks - 1) and column(rows) == column(whole)[: len(rows)]
    assert checkpoint.find(tmp_path / "7").step == 6 and not (tmp_path / "1" / "checkpoints").exists()
    assert column(train(text, tmp_path / "7", **settings, resume="auto")) == column(whole)


def test_too_large_is_refused_with_the_plan(emulated, text, tmp_path):
    with pytest.raises(ConfigError, match="--master-weights: expected float32 with --dtype float32, got none"):
        train(text, tmp_path, master_weights="none")
    with pytest.raises(ConfigError, match="--grad-dtype: expected float32 with --dtype float32, got bfloat16"):
        train(text, tmp_path, grad_dtype="bfloat16")
    with pytest.raises(ConfigError, match="--grad-dtype: expected float32 with --deterministic, got bfloat16"):
        train(text, tmp_path, dtype="bfloat16", grad_dtype="bfloat16", deterministic=True)
    with pytest.raises(ConfigError, match=r"expected at most 8.00 GiB.*free on cuda:0, got .* or a smaller model"):
        train(text, tmp_path, model={**SMALL["model"], "intermediate_size": 8_000_000})


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"zero": 1}),
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, {"deterministic": True}, marks=pytest.mark.slow),
    ],
)
def test_what_is_allocated_is_within_the_plan(emulated, text, tmp_path, ranks, options, monkeypatch):
    """And not much less than it: all but the reserve and cuBLASLt's workspace, which the emulated device has not."""
    monkeypatch.setattr(memory_plan, "BUCKET_BYTES", 4 * ranks * CHUNK)
    monkeypatch.setattr(memory_plan, "RESERVE", 1 << 16)
    monkeypatch.setattr(cublaslt, "WORKSPACE", 0)
    held, plans, real = threading.local(), [], array_module.pool_of(0).allocate
    one_at_a_time = threading.Lock()

    def allocate(nbytes, *arguments, **options):
        memory = real(nbytes, *arguments, **options)
        held.bytes = getattr(held, "bytes", 0) + nbytes
        weakref.finalize(memory.raw, freed, held.__dict__, nbytes)
        return memory

    def freed(mine, nbytes):
        mine["bytes"] -= nbytes

    def measures(self, tokens_per_second):
        with one_at_a_time:  # a collection beside another does nothing
            gc.collect()  # the emulated operations hold their arrays in cycles
        plans.append((held.bytes, self.plan.total))
        return {}

    monkeypatch.setattr(array_module, "pool_of", lambda device: SimpleNamespace(allocate=allocate))
    monkeypatch.setattr(CudaEngine, "measures", measures)
    train(
        text,
        tmp_path,
        ranks=ranks,
        steps=2,
        save_every=0,
        dtype="bfloat16",
        batch_size=64,
        micro_batch_size=16,
        **options,
    )
    assert len(plans) == 2 * ranks and all(0.7 * total < got <= total for got, total in plans), plans


def test_a_gpu_that_is_not_there(text, tmp_path):
    if unavailable() is None:
        pytest.skip("needs a machine without a GPU")
    for ranks in (1, 2):
        with pytest.raises(ConfigError, match="--device cuda: expected a GPU for every rank, got none for rank 0: "):
            spawn(lambda comm: choose_device("cuda", comm), ranks)
    for changes, name in (
        ({"dtype": "bfloat16"}, "--dtype: expected float32 on"),
        ({"master_weights": "none"}, "--master-weights: expected float32 on"),
        ({"grad_dtype": "bfloat16"}, "--grad-dtype: expected float32 on"),
        ({"graph": False}, "--no-graph: expected a GPU, got"),
    ):
        with pytest.raises(ConfigError, match=f"{name} the CPU"):
            train(text, tmp_path, device="cpu", **changes)


def test_which_gpus_do(monkeypatch, caplog):
    """An old one is refused by its name; one that ranks share is taken only on request."""
    gpu = SimpleNamespace(compute_capability=(7, 5), name="Old", uuid="1")
    monkeypatch.setattr(choose, "require", lambda: None)
    monkeypatch.setattr(choose, "unavailable", lambda: None)
    monkeypatch.setattr(choose, "device_info", lambda device: gpu)
    monkeypatch.setattr(choose, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(cublaslt, "_library", lambda: None)
    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace())
    with pytest.raises(ConfigError, match=r"for rank 0: expected compute capability 8.0, got 7.5 \(Old\)"):
        spawn(lambda comm: choose_device("cuda", DeviceComm(comm)), 2)
    gpu.compute_capability = (9, 0)
    assert spawn(lambda comm: choose_device("auto", DeviceComm(comm)), 1) == ["cuda"]
    assert spawn(lambda comm: choose_device("cuda", DeviceComm(comm)), 2) == ["cuda"] * 2
    assert spawn(lambda comm: choose_device("auto", DeviceComm(comm)), 2) == ["cpu"] * 2
    assert "not on this machine's GPUs: ranks share a GPU" in caplog.text
    monkeypatch.setattr(choose, "nvrtc_version", Mock(side_effect=BackendUnavailable("NVRTC is not installed: pip")))
    assert spawn(lambda comm: choose_device("auto", DeviceComm(comm)), 1) == ["cpu"]
    assert "not on this machine's GPUs: NVRTC is not installed: pip" in caplog.text
    why = f"the CUDA packages are not installed: {install('cuda')}"
    monkeypatch.setattr(choose, "unavailable", lambda: why)
    monkeypatch.setattr(choose, "require", Mock(side_effect=BackendUnavailable(f"CUDA: {why}")))
    for driver_is_there, visible in ((False, None), (True, None), (True, "0"), (True, "")):
        caplog.clear()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(choose, "DRIVER", SimpleNamespace(exists=lambda there=driver_is_there: there))
        assert spawn(lambda comm: choose_device("auto", DeviceComm(comm)), 1) == ["cpu"]
        warned = [f"training on the CPU, not on this machine's GPUs: {why}"]
        assert caplog.messages == warned * (driver_is_there and visible != "")


def test_the_hosts_memory_for_checkpoints_is_planned(emulated, text, tmp_path, monkeypatch):
    """Where steps go on meanwhile, each rank holds its part of weights and moments, and a tensor."""
    model = TrainConfig.from_preset("tiny", **SMALL).model_config_for(256)
    shards = Shards(model, Layout(dp=2), ((0,),))
    at_once, needed = (2 * max(shards.host_bytes(rank, whole) for rank in range(2)) for whole in (False, True))
    assert at_once < 12 * model.num_parameters() < needed
    monkeypatch.setattr(engine_module, "free_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"free on the host of rank [01], got .*\(tensors to be saved"):
        train(text, tmp_path / "less", ranks=2, save_async=True)
    monkeypatch.setattr(engine_module, "free_memory", lambda: needed)
    assert len(train(text, tmp_path / "enough", ranks=2, save_async=True)) == 4
    monkeypatch.setattr(engine_module, "free_memory", lambda: at_once)
    assert len(train(text, tmp_path / "at once", ranks=2)) == 4
