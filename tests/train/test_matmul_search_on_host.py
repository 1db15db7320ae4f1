"""The search for algorithms of matrix products, on an emulated GPU: once, by one rank, on values like a step's."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from kos.train.device import cuda as engine_module
from kos.train.model.model import Model
from kos.train.ops.cuda import cublaslt
from tests.train.emulated_runs import SMALL, column, text, train
from tests.train.host_kernels.engine import QueuedOps, on_host

__all__ = ["text"]


def test_algorithms_are_searched_once(emulated, text, tmp_path, monkeypatch, before_call):
    """Once for the same shapes.  A run without the search gives the same values."""
    made, rows = [], []
    before_call(engine_module, "_draw_quickly", lambda *arguments: made.append(arguments))
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


def test_one_rank_searches_and_all_ranks_use_its_algorithms(emulated, text, tmp_path, caplog, monkeypatch):
    """Also if the cache cannot be written.  A GPU of another model has a search of its own."""
    (tmp_path / "file").write_text("where a folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    searched, given, names, own = [], [], iter(()), threading.local()

    def make(device, stream=None, algorithms=None, search=False, **others):
        if search:
            searched.append(algorithms)
            algorithms["a shape"] = f"by search {len(searched)}"
        ops = QueuedOps()
        if not search:
            given.append(ops.algorithms)
        return ops

    def about(device):
        own.name = getattr(own, "name", None) or next(names, "host")
        return SimpleNamespace(name=own.name, uuid=own.name, compute_capability=(9, 0))

    stored = "stored_algorithms", lambda device: cublaslt.Stored("matmul", "host")
    for module, name, fake in (
        (cublaslt, *stored), (engine_module, "CudaOps", make), (engine_module, "device_info", about),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, fake)
    train(text, tmp_path / "alike", ranks=2, steps=1, save_every=0)
    taken = [table for table in given if table]  # products of samples have no table
    assert len(searched) == 1 and taken == [{"a shape": "by search 1"}] * 2
    (line,) = (record.getMessage() for record in caplog.records if "cache" in record.getMessage())
    assert "host.json cannot be used" in line
    searched.clear(), given.clear()
    names = iter(["one", "other", "one"])
    train(text, tmp_path / "mixed", ranks=3, steps=1, save_every=0, batch_size=6)
    assert len(searched) == 2 and sorted(x["a shape"][-1] for x in given if x) in (["1", "1", "2"], ["1", "2", "2"])


@pytest.mark.parametrize(
    "model", [{}, {"model_type": "gpt2", "num_key_value_heads": 4, "tie_word_embeddings": True}], ids=["llama", "gpt2"]
)
def test_the_search_runs_on_values_like_those_of_a_first_step(
    emulated, text, tmp_path, model, monkeypatch, before_call
):  # fmt: skip
    """Its first pass has weights, also outside the initialized tensors, and tokens."""
    seen = []

    def see(model, weights, slot, batch, *others, **how):
        if isinstance(model.ops, QueuedOps) and not seen:
            seen.extend([np.array(batch.tokens), {name: on_host(weights[name]).copy() for name in weights}])

    monkeypatch.setattr(engine_module, "DRAWN", 1000)
    before_call(Model, "forward", see)
    train(text, tmp_path, steps=1, save_every=0, model={**SMALL["model"], "head_dim": 6, **model})
    tokens, weights = seen
    assert tokens.shape == (2, 8) and len(np.unique(tokens)) > 8 and tokens.min() >= 0 and tokens.max() < 256
    assert sum(w.size for w in weights.values()) > 10_000
    for name, w in weights.items():
        if w.ndim == 1:
            assert (w == (not name.endswith("bias"))).all(), name
        else:
            np.testing.assert_allclose((w.mean(), w.std()), (0, 0.02), atol=0.003, err_msg=name)
