"""The benchmark of products in 8 bits, on an emulated GPU."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import fp8
from kos.bench import report
from kos.errors import BackendUnavailable
from kos.train.config import PRESETS
from kos.train.ops.cuda.cublaslt import scale_mode
from tests.host_compiler import needs_compiler
from tests.train.host_kernels import emulator


class Ops(emulator.HostOps):
    """Without products of two operands of fine scales."""

    def __init__(self, device: int, search: bool) -> None:
        super().__init__()
        self.modes = set[int]()

    def matmul(self, a: Any, b: Any, out: Any, *, scales: Any = (), **options: Any) -> None:
        modes = [scale_mode(scale.shape, *x.shape) for x, scale in zip((a, b), scales, strict=False)]
        self.modes.update(modes)
        if modes == [4, 4]:
            raise BackendUnavailable("cuBLASLt has no algorithm")
        super().matmul(a, b, out, scales=scales if 5 in modes else (), **options)


@needs_compiler
def test_all_tables(monkeypatch, tmp_path, capsys):
    emulator.host_memory(monkeypatch)
    made: list[Ops] = []
    monkeypatch.setattr(fp8, "CudaOps", lambda *given, **options: made.append(Ops(*given, **options)) or made[-1])
    monkeypatch.setattr(fp8.cuda, "unavailable", lambda: None)
    monkeypatch.setattr(report, "provenance", lambda *about: {"command": "python -m benchmarks.fp8"})
    monkeypatch.setattr(fp8, "streams", SimpleNamespace(milliseconds=lambda run, stream: (run(), 1.0)[1]))
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setitem(PRESETS, "baby", SimpleNamespace(values={"model": shape}))
    path = tmp_path / "fp8.json"
    settings = ["--preset", "baby", "--tokens", "128", "--repeats", "1", "--settle", "1", "--measure", "1"]
    monkeypatch.setattr(sys, "argv", ["fp8", *settings, "--json", str(path)])
    assert fp8.main() == 0
    result = json.loads(path.read_text())
    tables = [row["table"] for row in result["rows"]]
    assert [tables.count(name) for name in ("products", "casts", "layers")] == [12, 9, 5]
    assert made[0].modes == {0, 3, 4, 5} and set(result["reasons"]) == {"1x128 1x128"}
    first, last = result["rows"][0], result["rows"][-1]
    assert (first["name"], first["shape"]) == ("qkv forward", [128, 256, 128])
    assert first["bf16"] == pytest.approx(2e-9 * 128 * 256 * 128) and first["1x128 1x128"] is None
    assert last["fp8_over_bf16"] == 1 and last["with_weight_cast"] == 0.5
    said = capsys.readouterr().out
    assert "products  down weight gradient" in said and "1x128 1x128 left out: cuBLASLt has no algorithm" in said


def test_shapes_of_a_preset():
    assert fp8.layers_of("8b") == {
        "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
    }  # fmt: skip
    assert fp8.product_sizes(6144, 4096, 8192)["weight gradient"] == (6144, 4096, 8192)
