"""What several ranks hold has the same bits on all of them.

The ranks are on pretended hosts and send messages: threads would add in rank order, whatever the buckets are.
"""

from typing import Any

import numpy as np
import pytest

from kos.comm.communicator import Communicator
from kos.errors import TrainingError
from kos.testing import spawn
from kos.train import optim
from kos.train.device import check_replicas, dry_run
from kos.train.device.cpu import CpuDevice
from kos.train.ops.parameters import overlap
from kos.train.parallel.mesh import Layout
from kos.train.trainer import Trainer
from tests.comm.ranks import on_hosts
from tests.comm.tcp_ranks import TCPRanks
from tests.train import layouts, layouts_on_host
from tests.train.host_kernels.engine import on_host
from tests.train.layouts_on_host import emulated
from tests.train.runs import SMALL, _config
from tests.train.sharded import tensors_of_run

__all__ = ["emulated"]

ALONE = (1,) * 8  # each rank on a host of its own
ENDS = (3, 3, 2)  # hosts on which the two stages of a pipeline lie in different ways
PAIRS = (3, 4, 1)  # and those on which the groups of dp of two ranks of tp do
WIDE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
"""A model whose gradients may be compressed."""


def case(layout: Layout, hosts: tuple[int, ...] = ALONE, **changes: Any) -> Any:
    settings = [f"{name}={value}" for name, value in changes.items() if WIDE.get(name) != value]
    of_hosts = [] if hosts is ALONE else ["hosts=" + "+".join(map(str, hosts))]
    name = "-".join([layouts.named(layout), *settings, *of_hosts])
    return pytest.param(layout, hosts[: layout.ranks] if hosts is ALONE else hosts, changes, id=name)


SIX, EIGHT = Layout(dp=3, pp=2), Layout(dp=4, pp=2)
TIED = [
    case(SIX), case(SIX, zero=1), case(EIGHT, ENDS), case(EIGHT, ENDS, zero=1), case(Layout(cp=4, pp=2)),
    case(SIX, zero=1, optimizer="muon"), case(SIX, deterministic=True, zero=1),
    case(Layout(dp=2, pp=2, tp=2), ENDS, zero=1), case(EIGHT, ENDS, compress="int8", **WIDE),
    case(SIX, compress="int4", zero=1, **WIDE), case(SIX, pp_schedule="zero-bubble-v", layers=3),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "hosts", "changes"), TIED)
def test_both_ends_of_a_pipeline_hold_the_same_tied_table(layout, hosts, changes):
    compare(layout, hosts, tied=True, **changes)


WHOLE = [
    case(Layout(dp=4, tp=2), PAIRS), case(Layout(dp=4, tp=2), PAIRS, zero=1), case(Layout(dp=2, cp=2, tp=2), PAIRS),
    case(Layout(dp=4, tp=2), PAIRS, compress="int8", **WIDE), case(Layout(dp=4, tp=2), PAIRS, optimizer="muon"),
    case(Layout(dp=2, tp=4), PAIRS, num_key_value_heads=1),
    case(Layout(dp=4, tp=2), PAIRS, zero=1, num_key_value_heads=1),
    case(Layout(dp=8), PAIRS), case(Layout(dp=3, tp=2), zero=1, optimizer="muon"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "hosts", "changes"), WHOLE)
def test_ranks_hold_the_same_norms_and_heads(layout, hosts, changes):
    """Those of dp and cp all; those of tp the norms, and the heads of keys and values that several ranks hold."""
    compare(layout, hosts, tied=False, **changes)


def compare(layout: Layout, hosts: tuple[int, ...], tied: bool, layers: int = 2, **changes: Any) -> None:
    """All ranks that hold the same elements of weights or state have the same bits of them after two steps.

    The buckets are large enough for rings.
    """
    how = {"steps": 2, "batch_size": layout.dp * layout.pp, "vocab_size": 4000, "num_hidden_layers": layers}
    asked = layouts.settings(layout, **{**layouts.RUN, **how, "tie_word_embeddings": tied, **changes})

    def run(comm: Communicator) -> dict[Any, bytes]:
        device = layouts.make_device(comm, layout, CpuDevice, asked)
        for step in range(asked.steps):
            device.start_step(step, 0)
            device.finish_step(step)
        held = layouts.held_by(device, np.copy)
        device.close()
        device.mesh.close()
        return held

    with pytest.MonkeyPatch.context() as patch:
        layouts.small_buckets(patch)
        patch.setattr(dry_run, "HOST_BUCKET_BYTES", 64 << 10)
        on_hosts(patch, hosts)
        ranks = TCPRanks(layout.ranks).run(run)
    first = dict[Any, tuple[int, bytes]]()
    for rank, held in enumerate(ranks):
        for key, values in held.items():
            other, theirs = first.setdefault(key, (rank, values))
            assert values == theirs, f"{key} differs on ranks {other} and {rank}"


def test_a_resumed_run_with_a_tied_table_has_the_bits_of_an_unbroken_one(text, tmp_path, monkeypatch):
    model = {**SMALL["model"], "tie_word_embeddings": True, "hidden_size": 96, "num_hidden_layers": 3}
    how = {"pp": 2, "steps": 5, "batch_size": 6, "micro_batch_size": 1, "save_every": 2, "keep": 9, "eval_batches": 0}
    how |= {"sample_tokens": 0, "model": model, "backend": "tcp"}
    on_hosts(monkeypatch, ALONE)

    def train(out: str, **more: Any) -> Any:
        config = _config(text, tmp_path / out, **how, **more)
        TCPRanks(6).run(lambda comm: Trainer(config, comm, verbose=False).run())
        return tensors_of_run(tmp_path / out)

    whole = train("whole")
    assert train("rest", resume=str(tmp_path / "whole/checkpoints/step-2")) == whole


@pytest.mark.parametrize(
    ("zero", "where", "ranks"),
    [(0, "weights", (3, 0)), (0, "exp_avg_sq", (3, 0)), (1, "weights", (2, 0)), (1, "exp_avg_sq", (3, 1))],
)
def test_the_comparison_names_the_tensor_and_two_ranks(zero, where, ranks, text, tmp_path, monkeypatch):
    """A bit of a tied table changes on rank 3, between steps that change nothing.  With ZeRO-1, rank 2 gathers it."""
    layouts.small_buckets(monkeypatch)
    model = {**SMALL["model"], "tie_word_embeddings": True}
    how = {"pp": 2, "zero": zero, "check_replicas": 3, "save_every": 2, "model": model, "skip_outliers": 1e-9}
    config, table = _config(text, tmp_path, **how), "model.embed_tokens.weight"

    def run(comm: Communicator) -> str:
        with Trainer(config, comm, verbose=False) as trainer:
            try:
                for step in range(6):
                    if (step, comm.rank) == (3, 3):
                        change(trainer)
                    trainer.step()
            except TrainingError as error:
                return str(error)
        return ""

    def change(trainer: Trainer) -> None:
        own, optimizer = trainer.device.step.parallel.parts()[-1], trainer.device.step.optimizer
        held = optimizer.weights if where == "weights" else optimizer.state[where]
        (_, _, at), *_ = held.held(overlap(own, held.spans[table]))
        held.flat.view(np.uint32)[at] ^= 1

    what = {"weights": table, "exp_avg_sq": f"exp_avg_sq of {table}"}[where]
    for told in spawn(run, 4, timeout=100):
        assert told.startswith(f"step 6: --check-replicas: expected the same bits on all ranks that hold {what}")
        assert told.endswith("got different bits on rank {} than on rank {}".format(*ranks))


@pytest.mark.parametrize("changes", [
    {"zero": 1}, {"zero": 1, "dtype": "bfloat16"}, {"dtype": "bfloat16", "master_weights": "none"},
], ids=str)  # fmt: skip
def test_the_comparison_on_emulated_gpus(emulated, changes, monkeypatch):
    layout = Layout(dp=2, pp=2)
    for module in (optim, dry_run):
        monkeypatch.setattr(module, "CHUNK", 64)

    def run(comm: Communicator) -> str:
        device = layouts_on_host.make_device(comm, layout, 3, tied=True, **changes)
        for step in range(2):
            device.start_step(step, 0)
            device.finish_step(step)
        check_replicas(device, 2)
        held = device.step.optimizer.state["exp_avg"]  # of which this rank has a part
        (_, _, at), *_ = held.held(held.spans["model.embed_tokens.weight"])
        if comm.rank == 3:
            on_host(held.flat)[at] += 1
        with pytest.raises(TrainingError, match="exp_avg of model.embed_tokens.weight, elements .* on rank 3 than on"):
            check_replicas(device, 2)
        device.close()
        device.mesh.close()
        return "done"

    assert spawn(run, layout.ranks, timeout=100) == ["done"] * layout.ranks
