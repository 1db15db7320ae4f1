"""``--compress``: losses stay close, ranks have the same weights, and residuals are added later, also after a resume.

Between hosts: exact sums within hosts and compressed ones between them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kos.comm.communicator import Communicator
from kos.comm.compression import BLOCK, FORMATS, Format, feed_back
from kos.errors import ConfigError
from kos.testing import spawn
from kos.train.config.options import TrainConfig
from kos.train.device import dry_run
from kos.train.device.cpu import CpuDevice
from kos.train.ops.parameters import Parameters
from kos.train.parallel.data import Buckets, DataParallel
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.trainer import Trainer
from tests.train import layouts
from tests.train.refusal import refused
from tests.train.runs import _config, _train
from tests.train.sharded import tensors_of_run

QUIET: dict[str, Any] = {"eval_batches": 0, "sample_tokens": 0, "keep": 9}
@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(dry_run, "HOST_BUCKET_BYTES", 20_000)


ODD: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12}
"""Sizes with which tensors share blocks.  They are refused if two ranks hold one tensor beside different others."""
LAYOUTS = [
    (Layout(dp=3), {"zero": 1, "batch_size": 9, **ODD}), (Layout(dp=2, pp=2), ODD),
    (Layout(cp=2, tp=2), {"tied": True, "zero": 1}),
    (Layout(dp=2, pp=2), {"tied": True, "zero": 1, "pp_schedule": "zero-bubble-v"}),
    (Layout(dp=4, pp=2), {"hosts": (2, 2, 2, 2), "tied": True}),
]


@pytest.mark.parametrize(("layout", "changes"), LAYOUTS, ids=str)
def test_ranks_hold_the_same_weights(layout, changes):
    """Those of dp and cp all; those of tp what each holds whole; both ends of a pipeline the tied embedding."""
    wide = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    changes, held = {"tied": False, **wide, **changes}, dict[Any, bytes]()
    ranks = layouts.train(layout, CpuDevice, layout.pp + 1, compress="int4", steps=3, **changes)
    for rank, got in enumerate(ranks):
        placements = got["model"].placements(got["model"].local(0, layout.tp))
        for name, value in got["weights"].items():
            at = None if placements[name].along("tp") is None else layout.coordinates(rank)["tp"]
            assert held.setdefault((name, at), value.tobytes()) == value.tobytes(), f"{name} of rank {rank}"
    rows = ranks[0]["rows"]
    assert all(got["rows"].tobytes() == rows.tobytes() for got in ranks) and rows[-1, 0] < rows[0, 0]


BETWEEN: dict[str, Any] = {"compress": "int8", "hosts": [2, 2]}
RESUMED: list[tuple[int, dict[str, Any]]] = [
    (2, {"compress": "fp8", "zero": 1}),
    (4, {"compress": "int8", "pp": 2, "batch_size": 16}),
    (4, {**BETWEEN, "compress": "int4", "cp": 2}),
    (6, {**BETWEEN, "compress": "fp8", "hosts": [3, 3], "zero": 1, "batch_size": 12}),
    (4, {**BETWEEN, "tp": 2, "zero": 1}),
]


@pytest.mark.parametrize(("ranks", "how"), RESUMED, ids=str)
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(text, tmp_path, ranks, how, caplog):
    model = {"hidden_size": 64, "num_hidden_layers": 3}
    how = {**QUIET, "steps": 2, "save_every": 1, "schedule": "constant", "model": model, **how}
    rows = _train(text, tmp_path / "whole", ranks, **how)
    step = tmp_path / "whole/checkpoints/step-1"
    assert any(tensor.any() for file in step.glob("residual-*") for tensor in load_file(file).values())
    rest = _train(text, tmp_path / "rest", ranks, resume=str(step), **how)
    assert [row["loss"] for row in rest] == [row["loss"] for row in rows][1:]
    assert tensors_of_run(tmp_path / "rest") == tensors_of_run(tmp_path / "whole")
    assert not caplog.records


@pytest.fixture(scope="module")
def half(text, tmp_path_factory):
    """The checkpoint of a run of four ranks with compressed gradients."""
    out = tmp_path_factory.mktemp("half")
    _train(text, out, 4, steps=3, compress="int8", micro_batch_size=2, **QUIET)
    return out / "checkpoints/step-3"


def whole_residual(parallel: DataParallel) -> np.ndarray:
    """What this rank has lost, at its place among all gradients."""
    assert parallel.residual is not None
    found = np.zeros_like(parallel.gradients.flat)
    for part, place in parallel.residual.parts():
        found[part] = parallel.residual.flat[place]
    return found


def residuals(
    text: Path, out: Path, ranks: int, hosts: Sequence[int] = (), **changes: Any
) -> list[dict[str, np.ndarray]]:
    """The residual of each rank of a run, before its first step."""
    config = _config(text, out, **{**QUIET, "compress": "int8", "micro_batch_size": 2, **changes})

    def look(comm: Communicator) -> dict[str, np.ndarray]:
        trainer = Trainer(config, comm)
        parallel = trainer.device.step.parallel
        flat = None if parallel.residual is None else whole_residual(parallel)
        trainer.held.close()
        return {} if flat is None else {name: flat[span] for name, span in parallel.gradients.spans.items()}

    return spawn(look, ranks, timeout=100, hosts=hosts)


@pytest.mark.parametrize(
    ("ranks", "how"), [(2, {"cp": 2, "zero": 1}), (3, {"batch_size": 6}), (6, {"batch_size": 12})], ids=str
)
def test_residuals_are_split_over_other_ranks(text, tmp_path, half, ranks, how, caplog):
    """The mean of the gradients over micro-batches lacks as much as before."""
    saved = [load_file(file) for file in sorted(half.glob("residual-*"))]
    found = residuals(text, tmp_path, ranks, resume=str(half), **how)
    scale = how.get("batch_size", 8) / 8
    for name in found[0]:
        parts = [one[f"residual.{rank}.{name}"].reshape(-1).astype(np.float64) for rank, one in enumerate(saved)]
        got = sum(each[name].astype(np.float64) for each in found)
        # Parts of opposite sign cancel, so the bound is relative to their sizes: each share and the scale are rounded.
        bound = 4 * np.finfo(np.float32).eps * scale * sum(map(np.abs, parts)) + 1e-12
        assert (abs(got - scale * sum(parts)) <= bound).all(), name
    lines = [record.getMessage() for record in caplog.records]
    assert any(
        line.endswith(f"the residuals of 4 ranks are shared out over {ranks}; their sum stays") for line in lines
    )


@pytest.mark.parametrize(
    ("ranks", "changes", "said"),
    [
        (1, {}, "what compressed gradients of 4 ranks have lost is left out: one rank sends no gradients"),
        (2, {"compress": "none"}, "what compressed gradients of 4 ranks have lost is left out: --compress is none"),
    ],
)
def test_residuals_that_are_left_out_are_reported(text, tmp_path, half, ranks, changes, said, caplog):
    assert residuals(text, tmp_path, ranks, resume=str(half), **changes) == [{}] * ranks
    assert any(record.getMessage() == f"{half}: {said}" for record in caplog.records)


def test_a_checkpoint_without_residuals_begins_with_zeros(text, tmp_path, caplog):
    how = {**QUIET, "micro_batch_size": 2, "steps": 1}
    _train(text, tmp_path / "a", 2, **how)
    step = tmp_path / "a/checkpoints/step-1"
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest["config"]["config"]["compress"]  # as written before there was such a setting
    (step / "manifest.json").write_text(json.dumps(manifest))
    for residual in residuals(text, tmp_path / "b", 2, resume=str(step), steps=9):
        assert residual and not any(value.any() for value in residual.values())
    changed, zeros = (record.getMessage() for record in caplog.records)
    assert changed.startswith("resuming with another compress: ")
    assert zeros == f"{step}: expected residuals of compressed gradients, got none: they begin as zeros"
    caplog.clear()
    assert residuals(text, tmp_path / "c", 2, resume=str(step), steps=9, compress="none") == [{}, {}]
    assert not caplog.records


def test_refusals(text, tmp_path):
    for compress, changes, other in [
        ("int8", {"deterministic": True}, "--deterministic"),
        ("fp8", {"optimizer": "muon", "zero": 1}, "--optimizer muon and --zero 1"),
    ]:
        with refused(ConfigError, f"--compress: expected none with {other}, got {compress}"):
            _train(text, tmp_path, 2, compress=compress, **changes)
    with refused(ConfigError, "compress", "'none', 'fp8', 'int8' or 'int4'", "int3"):
        TrainConfig.from_preset("tiny", compress="int3")
    odd = {"compress": "int8", "model": {"hidden_size": 96, "head_dim": 24}}
    with refused(ConfigError, "--compress: expected tensors of a multiple of 64 elements with --tp, got "):
        _train(text, tmp_path, 4, tp=2, **odd)
    tied = {**odd, "model": {**odd["model"], "tie_word_embeddings": True}, "batch_size": 16}
    with refused(ConfigError, "of 64 elements with --pp and a tied embedding, got model.norm.weight of 96"):
        _train(text, tmp_path, 4, pp=2, **tied)
    assert not (tmp_path / "checkpoints").exists()


def test_one_rank_keeps_nothing(text, tmp_path, capsys):
    line = "--compress int4: no two ranks have the same weights, so no gradients are sent\n"
    exact = _train(text, tmp_path / "exact", 1, steps=2, **QUIET)
    assert line not in capsys.readouterr().out
    alone = _train(text, tmp_path / "alone", 1, steps=2, compress="int4", **QUIET)
    assert line in capsys.readouterr().out
    assert [row["loss"] for row in alone] == [row["loss"] for row in exact]
    assert not [*(tmp_path / "alone/checkpoints/step-2").glob("residual*")]


# --- between hosts ----------------------------------------------------------------------------------------------

HOSTED = {**QUIET, "compress": "int8"}


def decoded(form: Format, x: np.ndarray) -> np.ndarray:
    out = np.empty(x.size, np.float32)
    form.decode(form.encode(x), out)
    return out


def between_hosts(form: Format, sums: list[np.ndarray], residuals: list[np.ndarray], sharded: bool) -> np.ndarray:
    """The sum of the compressed pieces that the hosts send.  With ZeRO-1, its parts are not compressed again."""
    sent = [total.copy() for total in sums]
    for x, residual in zip(sent, residuals, strict=True):
        feed_back(x, residual, form)
    total = decoded(form, sent[0])
    for x in sent[1:]:
        total = total + decoded(form, x)
    return total if sharded else decoded(form, total)


@pytest.mark.parametrize("hosts", [(2, 2), (3, 3), (2, 2, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("sharded", [False, True])
def test_bits_of_sums_and_residuals(hosts, sharded, rng):
    """Hosts add in rank order. Their compressed sums are added in host order. A rank keeps the residual of a piece."""
    ranks, local, form = sum(hosts), hosts[0], FORMATS["int4"]
    bucket, steps = ranks * BLOCK, 3
    terms = rng.standard_normal((steps, ranks, 3 * bucket)).astype(np.float32)

    def body(comm):
        gradients = Parameters({"a": (2 * bucket,), "b": (bucket,)}, multiple=bucket)
        mesh = Mesh(comm)
        how = {"compress": form.name, "exact": mesh.exact("cpu")}
        buckets = Buckets(bucket, 4 * bucket, 4 * bucket, sharded)
        parallel = DataParallel(mesh.dense, gradients, buckets, **how)
        sums = []
        for step in range(steps):
            gradients.flat[:] = terms[step, comm.rank]
            for name in gradients:
                parallel.gradient_ready(name)
            parallel.finish()
            sums.append(gradients.flat.copy())
        mine = parallel.parts() if sharded else [slice(0, 3 * bucket)]
        residual = whole_residual(parallel)
        mesh.close()
        return sums, residual, mine

    got = spawn(body, ranks, hosts=hosts)
    residuals = [np.zeros(3 * bucket, np.float32) for _ in hosts]
    for step in range(steps):
        sums = [sum(terms[step, at : at + local]) for at in range(0, ranks, local)]
        expected = between_hosts(form, sums, residuals, sharded)
        for each, _, mine in got:
            for part in mine:
                assert each[step][part].tobytes() == expected[part].tobytes(), f"step {step}"
    kept = [sum(residual for _, residual, _ in got[at : at + local]) for at in range(0, ranks, local)]
    for host, residual in enumerate(residuals):
        np.testing.assert_array_equal(kept[host], residual)
    assert all(np.count_nonzero(residual) <= 3 * bucket // local for _, residual, _ in got)


OTHER_HOSTS: list[Any] = [([2, 2], ([4], [1, 1, 1, 1])), ([4], ([2, 2],)), ([2, 2, 2], ([2, 2],))]


@pytest.mark.parametrize(("before", "later"), OTHER_HOSTS, ids=str)
def test_what_is_lost_goes_on_on_other_hosts(text, tmp_path, before, later, caplog):
    """The sum over ranks stays, also on fewer hosts."""
    how = {**HOSTED, "batch_size": 12, "micro_batch_size": 1}

    def lost(hosts):
        each = residuals(text, tmp_path / "other", sum(hosts), hosts, **how, steps=9, resume=step)
        return np.sum([np.concatenate([*one.values()]) for one in each], 0)

    _train(text, tmp_path / "run", sum(before), hosts=before, **how, steps=2)
    step = str(tmp_path / "run/checkpoints/step-2")
    expected = lost(before)
    assert expected.any() and not caplog.records
    for after in later:
        caplog.clear()
        np.testing.assert_allclose(lost(after), expected, rtol=1e-6, atol=1e-10)
        said = "their sum stays" if sum(after) < sum(before) else "resuming with another number of ranks per host"
        assert any(said in message for message in caplog.messages)
