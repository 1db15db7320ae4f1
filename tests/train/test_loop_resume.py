"""Resumed runs: bit for bit, from an older checkpoint, with other settings, on other ranks."""

import json
import shutil
from datetime import date
from pathlib import Path

import pytest

from kos.errors import CheckpointError, ConfigError
from kos.train import load
from kos.train.config.flags import parse
from kos.train.tools import read_metrics
from tests.train.runs import _config, _losses, _train, run
from tests.train.sharded import tensors_of_run
from tests.train.tokenizer_files import letters


@pytest.mark.parametrize(("ranks", "micro_batch_size"), [(1, None), (2, 2)])
def test_resume_continues_bit_for_bit(text, tmp_path, ranks, micro_batch_size):
    settings = {"steps": 12, "save_every": 5, "eval_batches": 1, "micro_batch_size": micro_batch_size}
    whole = _train(text, tmp_path / "whole", ranks, **settings)
    out = tmp_path / "parts"
    _train(text, out, ranks, **settings)
    for path in (out / "checkpoints").glob("step-12"):  # as if killed after step 10 was saved
        path.rename(out / "gone")
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "lo')
    parts = _train(text, out, ranks, **settings, resume="auto")
    assert [row["step"] for row in parts] == list(range(1, 13))
    assert _losses(parts).tobytes() == _losses(whole).tobytes()
    assert tensors_of_run(out) == tensors_of_run(tmp_path / "whole")


def test_skipped_steps_are_not_counted_as_updates_after_a_resume(text, tmp_path, caplog):
    """A checkpoint of kos 0.3 has no number of updates: there, all steps counted."""
    how = {"steps": 5, "save_every": 4, "keep": 9, "eval_batches": 0, "sample_tokens": 0, "warmup_steps": 0, "zero": 1}
    first = _train(text, tmp_path / "first", 2, **{**how, "steps": 1})[0]["grad_norm"]
    rows = _train(text, tmp_path / "whole", 2, skip_outliers=0.999 * first, **how)
    assert [row.get("skipped", False) for row in rows] == [True, True, False, True, False]
    step = tmp_path / "whole/checkpoints/step-4"
    manifest = json.loads((step / "manifest.json").read_text())
    assert manifest.pop("updates") == 1
    rest = _train(text, tmp_path / "rest", 2, skip_outliers=0.999 * first, resume=str(step), **how)
    assert _losses(rest).tobytes() == _losses(rows[4:]).tobytes() and not caplog.records
    assert tensors_of_run(tmp_path / "rest") == tensors_of_run(tmp_path / "whole")
    (step / "manifest.json").write_text(json.dumps(manifest))
    _train(text, tmp_path / "old", 2, skip_outliers=0.999 * first, resume=str(step), **how)
    assert tensors_of_run(tmp_path / "old") != tensors_of_run(tmp_path / "whole")
    assert "expected the number of updates, got none (kos 0.3): steps that were skipped count" in caplog.text
    (step / "manifest.json").write_text(json.dumps(manifest | {"updates": 5}))
    with pytest.raises(CheckpointError, match="expected from 0 to 4 updates, got 5"):
        _train(text, tmp_path / "wrong", 2, resume=str(step), **how)


def test_a_deterministic_run_with_another_order_of_sums_is_refused(text, tmp_path):
    """One that an earlier version began, which wrote no order. Without --deterministic it goes on."""
    _train(text, tmp_path, steps=2, deterministic=True)
    manifest = tmp_path / "checkpoints" / "step-2" / "manifest.json"
    written = json.loads(manifest.read_text())
    del written["config"]["order_of_sums"]
    manifest.write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match=r"step-2: --deterministic: expected .* order 3, .* got order 1: .*"):
        _train(text, tmp_path, steps=3, deterministic=True, resume="auto")
    assert [row["step"] for row in _train(text, tmp_path, steps=3, resume="auto")] == [1, 2, 3]


def test_resume_goes_back_behind_later_checkpoints(text, tmp_path):
    constant = {"schedule": "constant", "save_every": 2, "keep": 9}
    _train(text, tmp_path, steps=6, **constant)
    first = tmp_path / "checkpoints" / "step-2"
    _train(text, tmp_path, steps=4, resume=str(first), **{**constant, "save_every": 0})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-4"]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_damaged_checkpoints_are_not_kept_for_good_ones(text, tmp_path, caplog):
    constant = {"schedule": "constant", "save_every": 2, "keep": 2}
    _train(text, tmp_path, steps=6, **{**constant, "keep": 9})
    damaged = tmp_path / "checkpoints" / "step-6" / "model.safetensors"
    damaged.write_bytes(b"")
    _train(text, tmp_path, steps=7, resume="auto", **{**constant, "save_every": 0})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-4", "step-7"]
    assert "passing over a damaged checkpoint" in caplog.text and len(read_metrics(tmp_path / "metrics.jsonl")) == 7
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="expected a complete checkpoint, got 2 damaged; remove them"):
        _train(text, tmp_path, 2, steps=9, resume="auto", **constant)
    with pytest.raises(CheckpointError, match="expected a complete checkpoint, got 2 damaged$"):
        load(tmp_path)  # as kos sample, which has nothing to resume


def test_resume_where_nothing_is_left_to_do_still_saves(text, tmp_path, capsys):
    _train(text, tmp_path / "a", steps=3)
    _train(text, tmp_path / "b", steps=2, resume=str(tmp_path / "a"))
    said = capsys.readouterr().out
    assert said.count("the warm-up of 5 steps is longer than the run") == 1, "of the first run alone"
    done = "(nothing to do: --steps is 2; for more steps, set it higher)"
    assert f"resuming after step 3, from {tmp_path}/a/checkpoints/step-3 {done}\n" in said
    assert said.count("more steps: ") == 1, "a command that does 4 steps in all would do one more"
    assert tensors_of_run(tmp_path / "b") == tensors_of_run(tmp_path / "a")
    config = (tmp_path / "a/config.json").read_bytes()
    _train(text, tmp_path / "a", steps=1, resume="auto")
    assert (tmp_path / "a/config.json").read_bytes() == config  # of the run that trained there


def test_resume_says_what_is_not_as_it_was(text, tmp_path, caplog):
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[:20_000])
    tokenizer = letters(tmp_path, text.read_text())
    _train(text, tmp_path / "run", steps=2, tokenizer=tokenizer)
    _train(other, tmp_path / "run", steps=3, tokenizer=tokenizer, resume="auto", seed=5)
    assert "resuming with another seed, data" in caplog.text
    for more in ("äöü", "ß"):
        wrong = letters(tmp_path, text.read_text() + more)
        with pytest.raises(CheckpointError, match=f"tokenizer of this run, {wrong}, got .*letters"):
            _train(text, tmp_path / "run", 2, steps=4, tokenizer=wrong, resume="auto")
    with pytest.raises(CheckpointError, match=r"tokenizer of this run, bytes, got .*letters.* \(see --tokenizer\)"):
        _train(text, tmp_path / "run", steps=4, resume="auto")


def test_a_runs_config_json_is_what_was_asked(text, tmp_path):
    """What followed from it follows again: on other ranks, with another learning rate or batch size."""
    _train(text, tmp_path / "one", steps=1)
    described = json.loads((tmp_path / "one" / "config.json").read_text())
    newer = {name: described["derived"].pop(name) for name in ("hold_out", "template_date")}
    assert described["derived"] == {"micro_batch_size": 8, "device": "cpu", "dtype": "float32"}
    assert newer["hold_out"] == 0.1 and date.fromisoformat(newer["template_date"])
    again = ["--config", str(tmp_path / "one" / "config.json"), "--out"]
    for ranks, flags in ((2, ["--lr", "1e-4"]), (2, ["--batch-size", "12"])):
        config = parse([*again, str(tmp_path / flags[0]), *flags])
        assert config.device == "auto" and config.dtype == "auto"
        run(config, ranks)
    described["config"] |= described.pop("derived") | {"min_lr": 3e-4}  # as it was written once
    (tmp_path / "one" / "config.json").write_text(json.dumps(described))
    once = _config(text, tmp_path / "old", steps=1, min_lr=3e-4)
    assert parse([*again, str(tmp_path / "old")]).for_world(1) == once.for_world(1)


def test_resume_on_other_ranks_says_what_was_asked_differently(text, tmp_path, caplog):
    def said(out, ranks, **changes):
        caplog.clear()
        _train(text, tmp_path / out, ranks, eval_batches=0, sample_tokens=0, **changes)
        return [record.getMessage() for record in caplog.records]

    assert said("layouts", 4, steps=1, tp=2) == []
    (line,) = said("layouts", 4, steps=2, pp=2, cp=2, resume="auto")
    assert line.startswith("resuming in another layout: "), "of as many ranks"
    for deterministic in (False, True):
        assert said(f"{deterministic}", 1, steps=1, deterministic=deterministic) == []
        line = (
            "resuming in another layout: "
            "its results will equal those of an uninterrupted run up to rounding, not bit for bit"
        )
        expected = [] if deterministic else [line]
        assert said(f"{deterministic}", 2, steps=2, deterministic=deterministic, resume="auto") == expected
    assert said("False", 2, steps=3, resume="auto") == []
    (line,) = said("False", 1, steps=4, micro_batch_size=2, resume="auto")
    assert line == (
        "resuming with another micro_batch_size: its results will differ from those of an uninterrupted run"
    )
    (line,) = said("False", 1, steps=5, resume="auto")
    assert "another micro_batch_size:" in line
    (manifest,) = (tmp_path / "False" / "checkpoints").glob("step-5/manifest.json")
    values = json.loads(manifest.read_text())
    values["config"]["derived"] |= {"micro_batch_size": 1}  # as another version would have cut the batch
    manifest.write_text(json.dumps(values))
    (line,) = said("False", 1, steps=6, resume="auto")
    assert "another micro_batch_size:" in line


# --- what kos 0.2.0 wrote -------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A copy of a run that kos 0.2.0 made, in the current folder, beside its data.

    The run: --data text.txt --hidden-size 8 --num-hidden-layers 1 --num-attention-heads 1 --num-key-value-heads 1
    --intermediate-size 8 --batch-size 4 --seq-len 16 --lr 3e-2 --warmup-steps 1 --schedule constant --eval-every 0
    --sample-tokens 0 --log-every 1 --save-every 3 --steps 6 --out run.  Its config.json and metrics are whole; of its
    checkpoints, that of step 3 is kept.
    """
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(6000)))
    return Path(shutil.copytree(Path(__file__).with_name("run_of_0_2"), "run"))


def test_an_old_run_is_refused_by_name(old):
    """Its checkpoints can be read: they generate text, and give the weights of a new run."""
    with pytest.raises(ConfigError, match=r"--config run/config.json: expected a run of kos 0.3 or later"):
        parse(["--config", "run/config.json"])
    config = parse(["--data", "text.txt", "--resume", "run/checkpoints/step-3", "--out", "other"])
    with pytest.raises(CheckpointError, match=r"expected a run of kos 0.3 or later, got one of 0.2.0; a n"):
        run(config)
    assert load(old).generate("abc", tokens=4, temperature=0) == "abcpppp"
    start = ["--data", "text.txt", "--init-from", "run/checkpoints/step-3", "--steps", "1", "--sample-tokens", "0"]
    assert len(run(parse([*start, "--seq-len", "16", "--batch-size", "4", "--out", "new"]))) == 1
