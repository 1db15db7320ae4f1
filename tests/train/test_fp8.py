"""``--dtype fp8``: on an emulated GPU, whose layers are those of the CPU's emulation."""

from __future__ import annotations

import numpy as np
import pytest

from tests.train.emulated_runs import SMALL, column, emulated, text, train

__all__ = ["emulated", "text"]

MODEL = {**SMALL["model"], "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
RUN = {"model": MODEL, "seq_len": 16, "dtype": "fp8", "lr": 1e-3}


def test_steps_are_those_of_the_cpu(emulated, text, tmp_path):
    cpu = train(text, tmp_path / "cpu", "cpu", **RUN)
    gpu = train(text, tmp_path / "gpu", **RUN)
    exact = train(text, tmp_path / "float32", "cpu", **RUN | {"dtype": "float32"})
    print(column(cpu), column(gpu), column(exact), column(cpu, "grad_norm"), column(gpu, "grad_norm"))
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(column(gpu, name), column(cpu, name), rtol=1e-3)
    print(column(cpu), column(gpu), column(exact), column(cpu, "grad_norm"), column(gpu, "grad_norm"))
    assert column(cpu) != column(exact)
