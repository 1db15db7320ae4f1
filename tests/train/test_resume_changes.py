"""What each option changes in a run that is resumed, as the option declares it: bits, unless it says otherwise."""

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from kos.errors import CheckpointError
from kos.train.checkpoint import Checkpoint
from kos.train.checkpoint.resume import warn_of_changes
from kos.train.config.options import KEYS, TrainConfig
from kos.train.data.batches import load_data
from kos.train.model import option_of
from tests.train.runs import _config, _losses, _train
from tests.train.sharded import tensors_of_run
from tests.train.tokenizer_files import byte_level_bpe

CONFIG: dict[str, Any] = {"steps": 9, "pp": 2, "schedule": "wsd", "warmup_steps": 3, "lr": 1e-3, "fit": "cut"}
OTHER: dict[str, Any] = {
    "data": "text", "val_data": "text", "eval_data": ["a=b"], "text_field": "body", "fields": ["prompt=q"],
    "template_date": "2020-01-02",
    "tokenizer": "bytes", "elastic": "1:2", "join": "file", "out": "elsewhere", "resume": "auto", "prompt": "a",
    "lora_targets": ["q_proj"], "lora_layers": [0],
    "freeze": ["*"], "keep_best": "val_loss", "publish": "host:1", "tracker": ["wandb"],
    "preset": "1b", "init_from": "folder", "epochs": 2, "fit": "whole", "groups": [{"pattern": "*", "lr": 2.0}],
    "model.layer_types": ["full_attention"], "model.no_rope_layers": [0], "model.model_type": "qwen3",
    "model.rope_scaling": {"rope_type": "linear", "factor": 2.0},
}  # fmt: skip


def other(key: str, now: Any) -> Any:
    """Another value of an option than ``now``."""
    if key in OTHER:
        return OTHER[key]
    kinds = KEYS[key].annotation, *get_args(KEYS[key].annotation)
    for kind in kinds:
        if get_origin(kind) is Literal:
            return next(value for value in get_args(kind) if value != now)
    return not now if bool in kinds else (now or 0) + 1 if int in kinds else (now or 0.5) / 2


def described(config: TrainConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """A run, as its checkpoints describe it; with other values, and without the settings whose value is ``...``."""
    settings = json.loads(json.dumps(config.to_json()))
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        table = settings["model"] if section else settings
        if value is ...:
            del table[name]
        else:
            table[name] = value
    about = {"ranks": 4, "gpus": [], "backend": "tcp", "local_replicas": 1, "data_fingerprint": "0"}
    return {"config": settings, "derived": {}, **about}


def said(caplog: Any, before: dict[str, Any], config: TrainConfig, step: int = 2) -> list[str]:
    """The lines about changes, without those of a learning rate that jumps."""
    caplog.clear()
    warn_of_changes(Checkpoint(Path("run"), step, before, None), config, described(config, {}))
    lines = (record.getMessage() for record in caplog.records)
    return [line for line in lines if not line.startswith("the learning rate ")]


@pytest.mark.parametrize("key", KEYS)
def test_every_option(key, caplog):
    """One line names it if it changes results."""
    config = TrainConfig.from_preset("tiny", **CONFIG)
    now = described(config, {})["config"]
    section, _, name = key.rpartition(".")
    changes = option_of(KEYS[key]).changes
    lines = said(caplog, described(config, {key: other(key, (now["model"] if section else now)[name])}), config)
    if section and name != "pad_token_id":  # any other model is refused, or starts with other weights
        assert not lines
    elif changes == "layout" and key != "dp":
        assert [line.partition(":")[0] for line in lines] == ["resuming in another layout"]
    elif changes in ("bits", "rate", "order") and key != "backend":
        named = "order of sequences (--epochs)" if key == "epochs" else name
        assert [line.partition(":")[0] for line in lines] == [f"resuming with another {named}"]
    else:
        assert not lines


def test_an_option_that_an_earlier_version_lacks_had_its_default(caplog):
    config = TrainConfig.from_preset("tiny", **CONFIG)
    later = [key for key, field in KEYS.items() if option_of(field).changes in ("bits", "order")]
    missing = [key for key in later if not KEYS[key].is_required()]
    before = described(config, dict.fromkeys(missing, ...))
    assert said(caplog, before, config) == []
    (line,) = said(caplog, before, config.model_copy(update={"documents": "cross"}))
    assert line.startswith("resuming with another documents: ")


def test_learning_rates_count_from_the_checkpoint_to_the_end_of_its_run(caplog):
    """A run that has ended goes on as one may wish; and a schedule can be written in several ways."""
    config = TrainConfig.from_preset("tiny", **CONFIG)
    longer = config.model_copy(update={"steps": 18})
    assert said(caplog, described(config, {}), longer, 9) == []
    (line,) = said(caplog, described(config, {}), longer, 8)
    assert line.startswith("resuming with another steps: ")
    constant = config.model_copy(update={"schedule": "constant"})
    assert said(caplog, described(constant, {}), constant.model_copy(update={"steps": 18, "min_lr": 1e-4})) == []
    assert said(caplog, described(config, {"min_lr": config.lr / 10}), config) == []


def test_orders_of_additions(caplog):
    """They are those of several ranks that are not deterministic; the backend is the one that was chosen."""
    config, before = TrainConfig.from_preset("tiny", **CONFIG), {"zero": 1, "pp_schedule": "zero-bubble-v"}
    (line,) = said(caplog, described(config, before) | {"backend": "mpi"}, config)
    assert line.startswith("resuming with another zero, backend, pp_schedule: ")
    fixed = config.model_copy(update={"deterministic": True})
    assert said(caplog, described(fixed, before) | {"backend": "mpi"}, fixed) == []


def test_what_changes_no_bit_changes_none(text, tmp_path):
    """A run with other values of all options that declare it, but for those that need a GPU, a package or another
    command, or that name the folders of the run."""
    elsewhere = {
        "preset", "init_from", "join", "out", "resume", "publish", "publish_every", "publish_merged", "tracker",
        "graph", "profile", "show_data", "model.max_position_embeddings", "model.initializer_range",
    }  # fmt: skip
    shared = {"steps": 4, "hold_out": 0.1, "model": {"max_position_embeddings": 32}}
    config = _config(text, None, **shared)
    names = [key for key, field in KEYS.items() if option_of(field).changes == "nothing" and key not in elsewhere]
    others = {name: other(name, getattr(config, name)) for name in names} | {"eval_data": [f"a={text}"]}
    whole = _train(text, tmp_path / "a", **shared)
    rows = _train(text, tmp_path / "b", **{**shared, **others})
    assert _losses(rows).tobytes() == _losses(whole).tobytes()
    assert tensors_of_run(tmp_path / "b") == tensors_of_run(tmp_path / "a")


@pytest.mark.parametrize(("key", "first", "second"), [
    ("optimizer", {}, {"optimizer": "muon"}), ("freeze", {}, {"freeze": ["*embed*"]}), ("lora", {}, {"lora": 2}),
    ("lora_alpha", {"lora": 2}, {"lora": 2, "lora_alpha": 3.0}),
    ("lora_targets", {"lora": 2}, {"lora": 2, "lora_targets": ["q_proj"]}),
    ("rslora", {"lora": 2}, {"lora": 2, "rslora": True}), ("lora_layers", {"lora": 2}, {"lora": 2, "lora_layers": [0]}),
])  # fmt: skip
def test_another_state_is_refused(text, tmp_path, key, first, second):
    _train(text, tmp_path / "base", steps=1)
    how = {"init_from": str(tmp_path / "base/checkpoints/step-1")} if "lora" in key else {}
    shape = {} if how else {"model": {}}
    _train(text, tmp_path / "run", **{"steps": 1, **how, **shape, **first})
    with pytest.raises(CheckpointError):
        _train(text, tmp_path / "run", **{"steps": 2, "resume": "auto", **how, **shape, **second})


def test_every_option_of_a_state_is_tried():
    keys = {key for key, field in KEYS.items() if option_of(field).changes == "state"}
    assert keys == {case[0] for case in test_another_state_is_refused.pytestmark[0].args[1]}


CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
LINES = [{"prompt": f"how {n}?", "completion": f"so {n} <|end|> é", "body": f"text {n}"} for n in range(40)]
TURNS = [{"messages": [{"role": each, "content": f"{each} {n}"} for each in ("user", "assistant") * 2]}
         for n in range(9)]  # fmt: skip
READ: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "data": ("lines", {}, {"data": "more"}), "val_data": ("lines", {}, {"val_data": "more"}),
    "hold_out": ("lines", {}, {"hold_out": 0.4}), "text_field": ("lines", {}, {"text_field": "body"}),
    "loss_on": ("lines", {}, {"loss_on": "all"}),
    "token_dtype": ("numbers.bin", {"token_dtype": "uint8"}, {"token_dtype": "uint16"}),
    "tokenizer": ("lines", {}, {"tokenizer": "bpe"}),
    "split_special_tokens": ("lines", {"tokenizer": "bpe"}, {"split_special_tokens": False}),
    "split_turns": ("turns", {"tokenizer": "bpe"}, {"split_turns": True}),
    "fields": ("lines", {}, {"fields": ["completion=body"]}),
    "template_date": ("turns", {"tokenizer": "bpe", "template_date": "2026-01-02"}, {"template_date": "2025-01-02"}),
}  # fmt: skip
"""Of each option that declares ``data``: what is read, with which other settings, and with another value."""


@pytest.mark.parametrize("key", [key for key, field in KEYS.items() if option_of(field).changes == "data"])
def test_other_data_has_another_fingerprint(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, lines in {"lines": LINES, "more": LINES[::-1], "turns": TURNS}.items():
        text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in lines)
        Path(name).mkdir()
        Path(name, "a.jsonl").write_text(text, encoding="utf-8")
    Path("numbers.bin").write_bytes(bytes(range(1, 101)) * 4)
    Path("bpe").mkdir()
    byte_level_bpe([line["completion"] for line in LINES], 300, []).save("bpe/tokenizer.json")
    chat = "{{ strftime_now('%Y') }}" * (key == "template_date") + CHAT
    Path("bpe/tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": chat}))
    data, common, changed = READ[key]
    common = {"data": data, "seq_len": 8, "batch_size": 2, **common}
    before, now = (load_data(TrainConfig.from_preset("tiny", **common, **how)) for how in ({}, {"seed": 3}))
    assert before.fingerprint == now.fingerprint, "of the same data"
    assert load_data(TrainConfig.from_preset("tiny", **{**common, **changed})).fingerprint != before.fingerprint
