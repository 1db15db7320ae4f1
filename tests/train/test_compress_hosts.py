"""``--compress`` between hosts: exact sums within hosts and compressed ones between them, kept and resumed."""

import json
from typing import Any

import numpy as np
import pytest

from kos.comm.compression import BLOCK, FORMATS, Format
from kos.comm.host_compressed import feed_back
from kos.errors import ConfigError
from kos.testing import spawn
from kos.train.config.flags import parse
from kos.train.device import memory_plan
from kos.train.model.parameters import Parameters
from kos.train.parallel.data import DataParallel
from kos.train.parallel.mesh import Mesh
from tests.train.refusal import refused
from tests.train.runs import _losses, _train
from tests.train.sharded import tensors_of_run
from tests.train.test_compress import residuals, whole_residual

HOW: dict[str, Any] = {"eval_batches": 0, "sample_tokens": 0, "keep": 9, "compress": "int8"}


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
        feed_back(x, residual, form)
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
        mesh = Mesh(comm)
        how = {"compress": form.name, "exact": mesh.exact("cpu")}
        parallel = DataParallel(mesh.dense, gradients, sharded=sharded, bucket_bytes=4 * bucket, **how)
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
    exact = _losses(_train(text, tmp_path / "exact", 4, **{**how, "compress": "none"}))
    for zero in (0, 1):
        losses = _losses(_train(text, tmp_path / f"{zero}", 4, zero=zero, **how))
        assert 0 < np.abs(losses / exact - 1).max() < 1e-3 and losses[-1] < 0.7 * losses[0], "it learns"


def test_ranks_of_one_host_compress_what_they_send(text, tmp_path):
    """Also where a host has other ranks of a pipeline, and where each host has one rank."""
    runs = {
        "one host": (2, {}), "ranks on their own": (2, {"hosts": [1, 1]}), "exact": (2, {"compress": "none"}),
        "stages": (4, {"pp": 2}), "stages on hosts": (4, {"pp": 2, "hosts": [2, 2]}),
    }  # fmt: skip
    model = {"hidden_size": 64}  # whole blocks
    for name, (ranks, how) in runs.items():
        _train(text, tmp_path / name, ranks, **{**HOW, "steps": 2, "batch_size": 16, "model": model, **how})
    one, own, exact, stages, on_hosts = (tensors_of_run(tmp_path / name) for name in runs)
    assert one == own != exact and stages == on_hosts != exact


def test_hosts_that_are_not_alike_compress_what_every_rank_sends(text, tmp_path):
    how = {**HOW, "steps": 3}
    for name, hosts in {"one": [4], "unlike": [3, 1], "alike": [2, 2]}.items():
        _train(text, tmp_path / name, 4, hosts=hosts, **how)
    one, unlike, alike = (tensors_of_run(tmp_path / name) for name in ("one", "unlike", "alike"))
    assert one == unlike != alike


@pytest.mark.parametrize(("before", "after"), [([2, 2], [4]), ([4], [2, 2]), ([2, 2], [1, 1, 1, 1])], ids=str)
def test_what_is_lost_goes_on_on_other_hosts(text, tmp_path, before, after, caplog):
    """The sum over ranks stays."""

    def lost(hosts):
        changes = {**HOW, "steps": 9, "micro_batch_size": 2, "resume": step}
        each = residuals(text, tmp_path / "other", 4, hosts, **changes)
        return np.sum([np.concatenate([*one.values()]) for one in each], 0)

    _train(text, tmp_path / "run", 4, hosts=before, **{**HOW, "steps": 3, "micro_batch_size": 2})
    step = str(tmp_path / "run/checkpoints/step-3")
    expected = lost(before)
    assert expected.any() and not caplog.records
    np.testing.assert_allclose(lost(after), expected, rtol=1e-6, atol=1e-10)
    assert any("resuming with another number of ranks per host" in record.getMessage() for record in caplog.records)


def test_a_run_of_an_earlier_version_resumes(text, tmp_path, caplog):
    """With the bits of an unbroken run, if it compressed between hosts alone; else it is said to differ."""
    how = {**HOW, "steps": 4, "save_every": 2, "schedule": "constant", "hosts": [2, 2]}
    _train(text, tmp_path / "run", 4, **how)
    step = tmp_path / "run/checkpoints/step-2"
    manifest = json.loads((step / "manifest.json").read_text())
    for scope, local in {"hosts": 2, "all": 1}.items():
        manifest["config"]["config"]["compress_scope"], manifest["config"]["local_replicas"] = scope, local
        (step / "manifest.json").write_text(json.dumps(manifest))
        _train(text, tmp_path / scope, 4, resume=str(step), **how)
        assert tensors_of_run(tmp_path / scope) == tensors_of_run(tmp_path / "run")
        warned = [record.getMessage().partition(":")[0] for record in caplog.records]
        assert warned == ["resuming with another number of ranks per host"] * (local == 1)


def test_the_option_that_is_gone_is_refused_or_left_out(tmp_path, caplog):
    successor = "--compress, which on several hosts compresses only between hosts"
    with refused(ConfigError, successor, "--compress-scope"):
        parse(["--compress", "int8", "--compress-scope", "hosts"])
    path = tmp_path / "old.json"
    path.write_text('{"compress": "int8", "compress_scope": "all"}')
    assert parse(["--config", str(path)]).compress == "int8" and not caplog.records
    path.write_text('{"compress": "int8", "compress_scope": "hosts"}')
    assert parse(["--config", str(path)]).compress == "int8"
    assert caplog.messages[0].startswith(f"{path}: compress_scope: hosts is ignored: ")
