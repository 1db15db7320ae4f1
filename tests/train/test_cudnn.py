"""Attention by cuDNN, on a frontend that computes on host memory: layouts, workspace, refusals, and what is chosen."""

from __future__ import annotations

import functools
import os
import secrets
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from kos.cuda import driver
from kos.dtypes import DTYPES
from kos.errors import BackendUnavailable, ConfigError, CudaError, InvalidArgument, OutOfMemory
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.testing import spawn
from kos.train import run as loop
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.engine import cuda as engine_module
from kos.train.ops import numpy as reference
from kos.train.ops.cuda import cudnn
from kos.train.ops.cuda.dialect import CudaOps
from kos.train.run import Trainer
from kos.train.tools.metrics import read_metrics
from tests.train.host_kernels.engine import DeviceComm, QueuedOps, host_engine, on_host
from tests.train.host_kernels.fake_cudnn import STREAM, Graph, fake_cudnn
from tests.train.sharded import tensors_of_run

SMALL = cudnn.Shape(2, 5, 4, 2, 8, "bfloat16")


@pytest.fixture
def rng():
    seed = int(os.environ.get("KOS_TEST_SEED") or secrets.randbits(32))
    print(f"KOS_TEST_SEED={seed}")
    return np.random.default_rng(seed)


class CudnnOps(QueuedOps):
    """The emulated device, where attention is cuDNN's if ``cudnn`` says so."""

    def __getattribute__(self, name):
        if name in ("attention", "attention_backward") and object.__getattribute__(self, "cudnn"):
            return functools.partial(getattr(CudaOps, name), self)
        return super().__getattribute__(name)


class Clock(list):
    """What the next calls take, in ms."""

    def milliseconds(self, run, stream):
        run()
        return self.pop(0)


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """The emulated device with cuDNN on it."""
    host_engine(monkeypatch)
    clock = Clock()
    streams = SimpleNamespace(handle=lambda stream: STREAM, milliseconds=clock.milliseconds)
    monkeypatch.setattr(cudnn, "streams", streams)
    monkeypatch.setattr(cudnn, "driver", SimpleNamespace(on_device=lambda device: nullcontext()))
    monkeypatch.setattr(cudnn, "library", lambda: (fake_cudnn(), "9.19.0"))
    monkeypatch.setattr(cudnn, "device_info", lambda device: SimpleNamespace(name="Some GPU"))
    monkeypatch.setattr(engine_module, "CudaOps", lambda device, stream=None, **options: CudnnOps())
    monkeypatch.setattr(loop, "choose_device", lambda asked, comm: asked)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return clock


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(2, 33, 4, 1, 64), (3, 7, 6, 6, 128), (1, 2, 6, 3, 8)], ids=str)
def test_our_arrays_by_their_strides(clock, rng, shape, dtype):
    """Values, statistics and gradients, from and into the mixed rows of q, k, v, in no more memory than counted."""
    samples, length, heads, kv_heads, d = shape
    tokens, width = samples * length, (heads + 2 * kv_heads) * d
    ops, arena = CudnnOps(), CudnnOps().make_arena()
    ops.cudnn = cudnn.CudnnAttention(0, None)
    made = Graph.built
    qkv, d_out = (rng.standard_normal((tokens, n)).astype(DTYPES[dtype].numpy) for n in (width, heads * d))
    exact = [np.asfortranarray(x.astype(np.float64)) for x in (qkv, d_out)]
    want = [np.asfortranarray(np.empty((tokens, n))) for n in (heads * d, width)] + [np.empty((samples, heads, length))]
    reference.attention(exact[0], heads, kv_heads, want[0], want[2], Arena())
    a_qkv, a_d_out = (Array.from_numpy(x, 0) for x in (qkv, d_out))
    out, d_qkv, lse = (Array.empty(x.shape, kind, 0) for x, kind in zip(want, (dtype, dtype, "float32"), strict=True))
    for array in (out, d_qkv, lse):
        array.fill_bytes(255)
    forward, backward = (
        (a_qkv, heads, kv_heads, out, lse, arena),
        (a_d_out, a_qkv, out, lse, heads, kv_heads, d_qkv, arena),
    )
    with ops.step(arena):
        kept = arena.take((1000,), np.uint8)
        ops.cudnn.forward(*forward, dry=True)
        ops.cudnn.backward(*backward, dry=True)
        assert np.isnan(on_host(out).astype(np.float32)).all() and arena.in_use == 1024
    assert arena.peak >= 1024 + 2 * samples * heads * length**2
    arena.fix()
    for _ in range(2):
        with ops.step(arena):
            kept = arena.take((1000,), np.uint8)
            kept.fill_bytes(7)
            ops.attention(*forward)
            ops.attention_backward(*backward)
            assert (on_host(kept) == 7).all()
    reference.attention_backward(exact[1], exact[0], want[0], want[2], heads, kv_heads, want[1], Arena())
    for array, expected in zip((out, d_qkv, lse), want, strict=True):
        error = np.linalg.norm(on_host(array).astype(np.float64) - expected) / np.linalg.norm(expected)
        assert error < (2.0**-8 if dtype == "bfloat16" else 2.0**-11)
    assert Graph.built == made + 2
    arena.take((arena.capacity,), np.uint8)
    with pytest.raises(OutOfMemory):
        ops.attention_backward(*backward)
    with pytest.raises(InvalidArgument, match="expected d_out"):
        ops.attention_backward(a_qkv, *backward[1:])


def fail(self, *arguments, **options):
    raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")


def test_what_fails_is_an_error_of_kos(clock, monkeypatch):
    attention, cu = cudnn.CudnnAttention(0, None), SimpleNamespace(cuMemGetInfo=lambda: (0, 0, 0))
    monkeypatch.setattr(Graph, "execute", fail)
    monkeypatch.setattr(driver, "cu", cu)
    monkeypatch.setattr(cudnn, "driver", driver)
    ops = QueuedOps()
    qkv, out, lse = (
        ops.zeros(s, d) for s, d in (((10, 64), "bfloat16"), ((10, 32), "bfloat16"), ((2, 4, 5), "float32"))
    )
    with pytest.raises(CudaError, match="^attention by cuDNN failed: CUDNN_STATUS_EXECUTION_FAILED$"):
        attention.forward(qkv, 4, 2, out, lse, ops.make_arena())


def test_what_cannot_be_had_says_why(clock, monkeypatch):
    attention = cudnn.CudnnAttention(0, None)
    for changes, reason in (
        ({"length": 1}, r"attention: cuDNN 9.19.0 refuses Shape\(samples=2, length=1.*: s_q = s_kv = 1 is not supp"),
        ({"head_dim": 6}, "refuses .*: hidden_dim should be multiple of 8$"),
        ({"dtype": "float32"}, "attention by cuDNN: expected bfloat16 or float16, got float32"),
    ):
        with pytest.raises(BackendUnavailable, match=reason):
            attention.graph(SMALL._replace(**changes), False)
    monkeypatch.undo()
    library = cudnn.library.__wrapped__
    for missing in ("cuda", "cudnn"):
        modules = {"cuda": SimpleNamespace(pathfinder=SimpleNamespace(load_nvidia_dynamic_lib=lambda name: None)),
                   "cudnn": fake_cudnn(), missing: None}  # fmt: skip
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        with pytest.raises(BackendUnavailable, match=r"cuDNN is not installed: pip install -e '.*\[cuda,cudnn\]' \("):
            library()
        monkeypatch.setitem(sys.modules, missing, modules[missing] or fake_cudnn(91705))
    monkeypatch.setitem(sys.modules, "cuda", modules["cuda"])
    with pytest.raises(BackendUnavailable, match=r"expected cuDNN 9.18.0 or later, got 9.17.5"):
        library()
    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn(91900))
    assert library()[1] == "9.19.0"


def chosen(asked, ranks=1, check=lambda: None, shape=SMALL):
    """What every rank has been given, and was told."""

    def run(comm):
        ops = CudnnOps()
        said = cudnn.choose(asked, shape, ops, DeviceComm(comm), check)
        return ("cudnn" if ops.cudnn else "flash"), said

    answers = set(spawn(run, ranks, timeout=60))
    assert len(answers) == 1, answers
    return answers.pop()


def test_the_faster_is_taken_by_all_and_remembered(clock, tmp_path):
    """Turns of flash and cuDNN: two each to warm up, of the next five the least; rank 0 measures."""
    clock[:] = [0.1, 0.1, 0.1, 0.1, 9, 4, 3.5, 4, 9, 3, 9, 4, 9, 9]
    name, said = chosen("auto", ranks=2)
    assert (name, said) == (
        "cudnn", "cuDNN 9.19.0 (forward and backward of a layer: 3.500 ms by flash, 3.000 ms by cuDNN 9.19.0)",
    )  # fmt: skip
    assert not clock and chosen("auto")[0] == "cudnn"
    (kept,) = (tmp_path / "cache" / "kos" / "attention").iterdir()
    assert kept.name.startswith("Some_GPU-cuDNN-9.19.0-") and "2 5 4 2 8 bfloat16" in kept.read_text()
    clock[:] = [1, 2] * 7
    name, said = chosen("auto", shape=SMALL._replace(length=6))
    assert name == "flash" and said.startswith("flash (forward and backward of a layer: 1.000 ms by flash, 2.000")
    built = Graph.built
    assert chosen("auto", ranks=2, shape=SMALL._replace(length=6)) == (name, said) and Graph.built == built
    kept.write_text(kept.read_text().replace("3.5000 3.0000", "oops"))
    clock[:] = [2, 1] * 7
    assert chosen("auto")[0] == "cudnn" and not clock


def test_auto_is_flash_where_cudnn_cannot_be(clock, monkeypatch):
    name, said = chosen("auto", ranks=2, shape=SMALL._replace(length=1))
    assert name == "flash" and "s_q = s_kv = 1 is not supported" in said

    def check():
        raise ConfigError("memory: too much")

    assert chosen("auto", check=check) == ("flash", "flash (memory: too much)")
    assert chosen("flash", check=check) == ("flash", "flash")

    def missing():
        raise BackendUnavailable("cuDNN is not installed")

    monkeypatch.setattr(cudnn, "library", missing)
    assert chosen("auto", ranks=2) == ("flash", "flash (cuDNN is not installed)")
    with pytest.raises(BackendUnavailable, match="cuDNN is not installed"):
        chosen("cudnn", ranks=2)


@pytest.mark.parametrize("lost", [False, True])
def test_auto_is_flash_where_cudnn_does_not_run(clock, monkeypatch, lost):
    """Unless the GPU is lost by it: for flash, too."""
    monkeypatch.setattr(Graph, "execute", fail)
    monkeypatch.setattr(driver, "broken", lambda: "CUDA_ERROR_ILLEGAL_ADDRESS" if lost else None)
    monkeypatch.setattr(driver, "_describe", str)
    cudnn.driver.broken, cudnn.driver.library_error = driver.broken, driver.library_error
    clock[:] = [1] * 14
    why = "attention by cuDNN failed: CUDNN_STATUS_EXECUTION_FAILED"
    if lost:
        with pytest.raises(CudaError, match=f"^{why}; CUDA_ERROR_ILLEGAL_ADDRESS"):
            chosen("auto", ranks=2)
    else:
        assert chosen("auto", ranks=2) == ("flash", f"flash ({why})")


def train(text, out, ranks=1, **changes):
    model = {"vocab_size": 256, "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
    values = {"steps": 4, "batch_size": 8, "micro_batch_size": 2, "seq_len": 9, "lr": 3e-3, "warmup_steps": 0,
              "eval_every": 2, "eval_batches": 1, "sample_tokens": 2, "device": "cuda", "dtype": "bfloat16",
              "data": str(text), "out": out, "model": model, **changes}  # fmt: skip
    spawn(lambda comm: Trainer(TrainConfig.from_preset("tiny", **values), DeviceComm(comm)).run(), ranks, timeout=100)
    rows = read_metrics(out / "metrics.jsonl")
    weights = tensors_of_run(out)
    return [[row[name] for row in rows if name in row] for name in ("loss", "grad_norm", "val_loss")], weights


def test_training(clock, tmp_path, capsys):
    """Captured and replayed within the planned memory; without a graph the same bits; near to our own kernels."""
    text = tmp_path / "letters.txt"
    text.write_bytes(np.random.default_rng(7).integers(97, 110, 2000, np.uint8).tobytes())
    flash, _ = train(text, tmp_path / "flash")
    assert "one CUDA graph a step, attention by flash;" in capsys.readouterr().out
    ours, weights = train(text, tmp_path / "cudnn", attention="cudnn")
    assert "one CUDA graph a step, attention by cuDNN 9.19.0;" in capsys.readouterr().out
    for got, want in zip(ours, flash, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-2)
    assert train(text, tmp_path / "eager", attention="cudnn", graph=False) == (ours, weights)
    Graph.threads.clear()
    train(text, tmp_path / "ranks", ranks=2, attention="cudnn")
    assert len(Graph.threads) == 2
    clock[:] = [2, 1] * 7
    assert train(text, tmp_path / "auto", attention="auto") == (ours, weights) and not clock
    assert train(text, tmp_path / "repeatable", attention="auto", deterministic=True)[0] != ours
    assert "attention by flash;" in capsys.readouterr().out
    with pytest.raises(BackendUnavailable, match="expected bfloat16 or float16, got float32"):
        train(text, tmp_path / "float32", attention="cudnn", dtype="float32", ranks=2)
    with pytest.raises(ConfigError, match=r"got .* GiB.*; less takes .*--attention flash"):
        train(text, tmp_path / "large", attention="cudnn", batch_size=2, seq_len=60_000, data=str(long_text(tmp_path)))


def long_text(folder):
    path = folder / "long.txt"
    path.write_bytes(b"a" * 2_000_000)
    return path


def test_the_cpu_has_its_own():
    assert parse(["--attention", "auto"]).for_world(1).attention == "auto"
    with pytest.raises(ConfigError, match="--attention: expected flash on the CPU, got cudnn"):
        parse(["--attention", "cudnn"]).for_world(1)
