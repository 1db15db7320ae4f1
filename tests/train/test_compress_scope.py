"""``--compress-scope hosts``: exact sums within hosts and compressed ones between them, kept and resumed."""

import re
from typing import Any

import numpy as np
import pytest

from kos.comm.compression import BLOCK, FORMATS, Format
from kos.comm.host_compressed import feed_back
from kos.errors import ConfigError
from kos.testing import spawn
from kos.train.config.options import TrainConfig
from kos.train.device import memory_plan
from kos.train.model.parameters import Parameters
from kos.train.parallel.data import DataParallel
from kos.train.parallel.mesh import Layout, Mesh, ranks_of_a_host
from tests.train.refusal import refused
from tests.train.runs import _losses, _train
from tests.train.sharded import tensors_of_run
from tests.train.test_compress import residuals, whole_residual

HOW: dict[str, Any] = {"eval_batches": 0, "sample_tokens": 0, "keep": 9, "compress": "int8", "compress_scope": "hosts"}


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(memory_plan, "HOST_BUCKET_BYTES", 20_000)


def decoded(form: Format, x: np.ndarray) -> np.ndarray:
    out = np.empty(x.size, np.float32)
    form.decode(form.encode(x), out)
    return out


def between_hosts(form: Format, sums: list[np.ndarray], residuals: list[np.ndarray], sharded: bool) -> np.ndarray:
    """The sum of what the hosts send of a rail's piece; with ZeRO-1 the parts of it are not compressed again."""
    sent = [total.copy() for total in sums]
    for x, residual in zip(sent, residuals, strict=True):
        feed_back(x, residual, form.name)
    total = decoded(form, sent[0])
    for x in sent[1:]:
        total = total + decoded(form, x)
    return total if sharded else decoded(form, total)


@pytest.mark.parametrize("hosts", [(2, 2), (3, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("sharded", [False, True])
def test_bits_of_sums_and_residuals(hosts, sharded, rng):
    """A host's sum in rank order, then compressed and added in the order of hosts; each rank keeps a piece's losses."""
    ranks, local, form = sum(hosts), hosts[0], FORMATS["int4"]
    bucket, steps = ranks * BLOCK, 3
    terms = rng.standard_normal((steps, ranks, 3 * bucket)).astype(np.float32)

    def body(comm):
        gradients = Parameters({"a": (2 * bucket,), "b": (bucket,)}, multiple=bucket)
        mesh = Mesh(comm, local=local)
        parallel = DataParallel(mesh.dense, gradients, sharded=sharded, bucket_bytes=4 * bucket, compress=form.name)
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


def test_losses_are_near_those_without(text, tmp_path):
    how = {**HOW, "steps": 20, "save_every": 0, "hosts": [2, 2]}
    exact = _losses(_train(text, tmp_path / "exact", 4, **{**how, "compress": "none", "compress_scope": "all"}))
    for zero in (0, 1):
        losses = _losses(_train(text, tmp_path / f"{zero}", 4, zero=zero, **how))
        assert 0 < np.abs(losses / exact - 1).max() < 1e-3 and losses[-1] < 0.7 * losses[0], "it learns"


def test_with_a_rank_a_host_it_is_the_same_as_among_all(text, tmp_path):
    how = {**HOW, "steps": 3, "hosts": [1, 1, 1]}
    rows = [_train(text, tmp_path / scope, 3, **{**how, "compress_scope": scope, "batch_size": 9})
            for scope in ("all", "hosts")]  # fmt: skip
    assert _losses(rows[0]).tolist() == _losses(rows[1]).tolist()
    assert tensors_of_run(tmp_path / "all") == tensors_of_run(tmp_path / "hosts")


def test_on_one_host_gradients_are_exact(text, tmp_path, capsys):
    """Also where hosts have different ranks of a pipeline: those with the same weights are on one host."""
    line = "--compress-scope hosts: ranks with the same weights are on one host and send exact gradients\n"
    for ranks, how in ((2, {}), (4, {"pp": 2, "hosts": [2, 2], "batch_size": 16})):
        how, exact = {**HOW, "steps": 3, **how}, {"compress": "none", "compress_scope": "all"}
        rows = _train(text, tmp_path / f"exact {ranks}", ranks, **{**how, **exact})
        assert line not in capsys.readouterr().out
        ours = _train(text, tmp_path / f"hosts {ranks}", ranks, **how)
        assert line in capsys.readouterr().out and _losses(ours).tolist() == _losses(rows).tolist()
        assert tensors_of_run(tmp_path / f"hosts {ranks}") == tensors_of_run(tmp_path / f"exact {ranks}")


@pytest.mark.parametrize(("before", "after"), [("all", "hosts"), ("hosts", "all"), ("hosts", "hosts")])
def test_what_is_lost_goes_on_in_another_scope(text, tmp_path, before, after, caplog):
    """Or on hosts of other numbers of ranks: the sum over ranks stays."""

    hosts = [1, 1, 1, 1] if before == after else [2, 2]

    def lost(scope):
        changes = {**HOW, "steps": 9, "micro_batch_size": 2, "resume": step, "compress_scope": scope}
        each = residuals(text, tmp_path / "other", 4, hosts, **changes)
        return np.sum([np.concatenate([*one.values()]) for one in each], 0)

    how = {**HOW, "compress_scope": before, "steps": 3, "micro_batch_size": 2}
    _train(text, tmp_path / "run", 4, hosts=[2, 2], **how)
    step = str(tmp_path / "run/checkpoints/step-3")
    expected = lost("all")
    assert expected.any()
    caplog.clear()
    np.testing.assert_allclose(lost(after), expected, rtol=1e-6, atol=1e-10)
    changed = "ranks of a host" if before == after else "compress_scope"
    assert any(f"resuming with another {changed}" in record.getMessage() for record in caplog.records)


def test_refusals(text, tmp_path):
    expected = "--compress-scope hosts: expected as many ranks of dp and cp on every host, side by side, got [3, 1]"
    with refused(ConfigError, expected):
        _train(text, tmp_path, 4, hosts=[3, 1], **HOW)
    with refused(ConfigError, "--compress: expected fp8, int8 or int4 (argument: compress_scope), got none"):
        TrainConfig.from_preset("tiny", compress_scope="hosts")
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("layout", "hosts", "axes", "local"),
    [
        (Layout(dp=4), "aabb", ("dp", "cp"), 2),
        (Layout(dp=4), "aaab", ("dp", "cp"), "[3, 1]"),
        (Layout(dp=4), "abab", ("dp", "cp"), "[1, 1, 1, 1]"),
        (Layout(dp=2, tp=2), "aabb", ("dp", "cp"), 1),
        (Layout(dp=2, tp=2), "aabb", ("tp",), 2),
        (Layout(pp=2, dp=2), "aabb", ("dp", "cp"), 2),
        (Layout(pp=2, dp=2), "aaab", ("dp", "cp"), "[1, 1]"),
        (Layout(dp=2, cp=2), "aabb", ("dp", "cp"), 2),
        (Layout(dp=3, tp=2), "aaabbb", ("tp",), "[1, 1]"),
    ],
)
def test_ranks_of_a_host(layout, hosts, axes, local):
    if isinstance(local, int):
        assert ranks_of_a_host(layout, axes, hosts, "--hosts 2") == local
        return
    expected = f"--hosts 2: expected as many ranks of {' and '.join(axes)} on every host, side by side, got {local}"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        ranks_of_a_host(layout, axes, hosts, "--hosts 2")
