"""Presets, files and flags: which wins, what is derived, and what is refused in one line."""

import json
from pathlib import Path

import pytest

from kos.errors import ConfigError
from kos.train.config import PRESETS
from kos.train.config.flags import parse, without_effect
from kos.train.config.options import KEYS, TrainConfig
from kos.train.model.families import FAMILIES, GPT2Config
from kos.train.model.huggingface import to_huggingface
from kos.train.model.llama import LlamaConfig
from tests.train.models import SCALING, small
from tests.train.refusal import refused


def write(path: Path, content: str) -> str:
    path.write_text(content, "utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("preset", "shape", "heads", "vocab", "context", "batch", "tied", "scaling"),
    [
        ("124m", (12, 768, 2048), (12, None), 50_304, 1024, 32, True, None),
        ("1b", (16, 2048, 8192), (32, 8), 128_256, 4096, 16, True, (32.0, 1.0, 4.0, 8192)),
        ("8b", (32, 4096, 14_336), (32, 8), 128_256, 8192, 16, False, (8.0, 1.0, 4.0, 8192)),
    ],
)
def test_presets_have_the_published_shapes(preset, shape, heads, vocab, context, batch, tied, scaling):
    config = parse(["--preset", preset])
    model = config.model
    assert (model.num_hidden_layers, model.hidden_size, model.intermediate_size) == shape
    assert (model.num_attention_heads, model.num_key_value_heads) == heads
    assert (model.vocab_size, model.tie_word_embeddings) == (vocab, tied)
    assert (config.preset, config.seq_len, config.batch_size, config.out) == (preset, context, batch, None)
    assert model.rope_theta == (500_000.0 if scaling else 10_000.0)
    resolved = config.model_config_for(65).rope_scaling
    assert (resolved and tuple(resolved.settings().values())) == (scaling and ("llama3", *scaling))


def test_trackers_are_a_list_however_they_are_given(tmp_path):
    both = ("wandb", "tensorboard")
    file = write(tmp_path / "run.toml", 'tracker = ["wandb", "tensorboard"]\n')
    for flags in (["--tracker", "wandb,tensorboard"], ["--tracker", "wandb", "--tracker=tensorboard, wandb"],
                  ["--config", file]):  # fmt: skip
        assert parse(flags).tracker == both
    assert parse([]).tracker == ()
    again = write(tmp_path / "again.json", json.dumps(TrainConfig.from_preset("tiny", tracker=both).to_json()))
    assert parse(["--config", again]).tracker == both
    expected = "--tracker: expected 'tensorboard' or 'wandb', got 'wand'"
    with refused(ConfigError, expected):
        parse(["--tracker", "wand"])


def test_a_flag_beats_the_file_which_beats_the_preset(tmp_path):
    toml = 'preset = "124m"\nsteps = 70\nlr = 0.5\n[model]\nhidden_size = 96\nnum_hidden_layers = 3\n'
    file = write(tmp_path / "run.toml", toml)
    config = parse(["--steps", "7", "--config", file, "--num-hidden-layers", "2"])
    assert (config.preset, config.steps, config.lr, config.batch_size) == ("124m", 7, 0.5, 32)
    assert (config.model.hidden_size, config.model.num_hidden_layers) == (96, 2)
    assert config.model.intermediate_size == parse(["--preset", "124m"]).model.intermediate_size
    assert parse(["--config", file, "--preset", "tiny"]).batch_size == 16


def test_options_of_other_optimizers_in_files(tmp_path, caplog):
    """Those of a run's config.json that it ignored are ignored again. Others than the defaults are refused, or left
    out if a flag asks for another optimizer than the file's."""

    def saved(optimizer, **options):
        values = TrainConfig.from_preset(optimizer=optimizer).to_json() | options
        return write(tmp_path / "config.json", json.dumps({"config": values}))

    assert parse(["--config", saved("adamw", momentum=0.5)]) == parse([])
    assert parse(["--config", saved("adamw", momentum=0.5), "--optimizer", "muon"]).momentum == 0.95
    assert parse(["--config", saved("muon"), "--optimizer", "adamw"]) == parse([])
    file = saved("muon", momentum=0.5, muon_lr=0.02)
    assert not caplog.messages
    assert parse(["--config", file, "--optimizer", "adamw"]) == parse([])
    lost = [f"{file}: momentum: 0.5", f"{file}: muon_lr: 0.02"]
    assert caplog.messages == [f"{each} is ignored: --optimizer adamw does not take it" for each in lost]
    with refused(ConfigError, "--muon-lr: expected none with --optimizer adamw, got 0.01"):
        parse(["--config", file, "--optimizer", "adamw", "--muon-lr", "0.01"])
    file = write(tmp_path / "mine.toml", "momentum = 0.5")
    with refused(ConfigError, f"{file}: momentum: expected none with --optimizer adamw, got 0.5"):
        parse(["--config", file])
    assert parse(["--config", file, "--optimizer", "muon"]).momentum == 0.5


def test_derived_values_follow_what_was_given():
    config = parse(["--lr", "0.5", "--steps", "50", "--decay-fraction", "0.1"])
    assert config.learning_rate().min_lr == pytest.approx(0.05) and config.learning_rate().decay_steps == 5
    assert parse(["--lr", "0.5", "--min-lr", "0"]).learning_rate().min_lr == 0
    assert parse(["--steps", "50"]).learning_rate().decay_steps == 10


MIXED = "NAME:WEIGHT or PATH:WEIGHT for each of several sources, with different names"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--stpes", "3"], ["closest: --steps", "got '--stpes'"]),
        (["extra"], ["got 'extra'"]),
        (["--steps", "abc"], ["--steps", "integer", "got 'abc'"]),
        (["--steps", f"{10**400}"], ["--steps", "a number less than 9223372036854775808", "got 1"]),
        (["--num-hidden-layers", "100001"], ["--num-hidden-layers", "less than or equal to 100000", "got 100001"]),
        (["--init-from", "x" * 5000], ["--init-from", "File name too long"]),
        (["--steps", "0"], ["--steps", "greater than or equal to 1", "got 0"]),
        (["--epochs", "2", "--steps", "9"], ["--epochs: expected either epochs or steps, got 2 and 9"]),
        (["--steps"], ["--steps", "one argument", "got none"]),
        (["--deterministic=yes"], ["--deterministic", "no value", "got 'yes'"]),
        (["--lr", "nan"], ["--lr", "finite", "got nan"]),
        (["--beta2", "1"], ["--beta2", "less than 1", "got 1.0"]),
        (["--schedule", "step"], ["--schedule", "'cosine', 'linear', 'wsd' or 'constant'", "got 'step'"]),
        (["--backend", "gloo"], ["--backend", "'auto', 'mpi', 'tcp', 'nccl', 'peer' or 'mock'", "got 'gloo'"]),
        (["--data", ""], ["--data", "at least 1 character", "got ''"]),
        (["--data", "a", "--steps=2", "--data=b:1"], [f"--data: expected {MIXED}, such as a:0.7, got 'a'"]),
        *((["--data=a:1", f"--data={wrong}"], [f"--data: expected {MIXED}", f"got '{wrong}'"])
          for wrong in ("b:0", "b:-1", "b:nan", ":2", "a:2")),
        (["--data=a:1", "--data="], ["--data: expected names or paths of at least 1 character, got ''"]),
        (["--eval-data", "x"], ["--eval-data: expected NAME=PATH, each NAME once, got 'x'"]),
        (["--eval-data", "a=x", "--eval-data", "a=y"], ["each NAME once, got 'a=x'"]),
        (["--data=b:1", "--data=c:1", "--eval-data=b=x"], ["--eval-data: expected another NAME than a source"]),
        (["--keep-best", "loss"], ["--keep-best: expected one of val_loss, got loss"]),
        (["--keep-best=val_loss/b", "--eval-data=a=x"], ["expected one of val_loss, val_loss/a, got val_loss/b"]),
        (["--keep-best", "val_loss", "--eval-batches", "0"], ["--eval-batches: expected at least 1 (--keep-best)"]),
        (["--patience", "2", "--eval-batches", "0"], ["--eval-batches: expected at least 1 (--patience), got 0"]),
        (["--patience", "2", "--eval-every", "0"], ["--eval-every: expected at least 1 (--patience), got 0"]),
        (["--patience", "2", "--elastic"], ["--patience: expected none (--elastic), got 2"]),
        (["--keep-best", "val_loss", "--elastic"], ["--keep-best: expected none (--elastic), got val_loss"]),
        (["--lora-alpha", "8"], ["--lora-alpha: expected none without adapters"]),
        (["--lora", "4", "--optimizer", "muon"], ["--optimizer: expected adamw with adapters"]),
        (["--early-stopping-patience", "3"], ["(here: --patience), got '--early-stopping-patience'"]),
        (["--early-stopping"], ["(here: --patience), got '--early-stopping'"]),
        (["--gguf"], ["has none: docs/guides/not-in-the-trainer.md"]),
        (["--lora-dropout", "0.1"], ["has none: docs/guides/not-in-the-trainer.md"]),
        (["--config=a.toml", "--config=b.toml"], ["--config: expected one value, got a.toml and b.toml"]),
        (["--val-data=a", "--val-data=b"], ["--val-data: expected one value, got a and b"]),
        (["--num-key-value-heads", "3"], ["--num-attention-heads: expected", "of 3 (--num-key-value-heads), got 4"]),
        (["--hidden-size", "130"], ["--hidden-size: expected a multiple of 4 (--num-attention-heads), got 130"]),
        (["--model-type=qwen"], ["--model-type: expected one of llama, gpt2, ", "(closest: qwen3), got qwen"]),
        (["--model-type=gpt2", "--num-key-value-heads=2"], ["--num-key-value-heads: expected 4 in a GPT-2, got 2"]),
        (["--preset=gpt2-124m", "--rope-theta=5"], ["--rope-theta: expected 10000 in a GPT-2, got 5.0"]),
        (["--head-dim", "33"], ["--head-dim:", "even number", "got 33"]),
        (["--lr", "0.1", "--min-lr", "0.2"], ["--min-lr: expected at most 0.1 (--lr), got 0.2"]),
        (["--seq-len=9", "--max-position-embeddings=8"], ["--seq-len: expected at most 8 (--max-position-embeddings)"]),
        (["--init-from", "/nowhere"], ["--init-from: /nowhere/config.json: expected", "got no such folder"]),
        (["--config", "/nowhere/run.toml"], ["/nowhere/run.toml", "No such file"]),
        (["--zero", "3"], ["--zero: expected 1 (the optimizer's state) or 0; --tp and --pp split weights too, got 3"]),
        (["--rope-scaling", "yarn"], ["(here: a table [model.rope_scaling] in the file of --config, or config.json"]),
        (["--dropout", "0.1"], ["(the trainer has none: docs/guides/not-in-the-trainer.md), got '--dropout'"]),
        (["--config", "run.yaml"], [".toml or .json", "got 'run.yaml'"]),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(argv, parts):
    with refused(ConfigError, *parts):
        parse(argv)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("run.toml", "stpes = 3", ["run.toml: stpes", "closest: steps", "got 'stpes'"]),
        ("run.toml", "tracker = 3", ["run.toml: tracker: expected", "got '3'"]),
        ("run.toml", "[model]\nhiden_size = 3", ["run.toml: model.hiden_size", "(closest: model.hidden_size), got"]),
        ("run.toml", "steps = '3'", ["run.toml: steps", "integer", "got '3'"]),
        ("run.toml", "steps = true", ["run.toml: steps", "integer", "got True"]),
        ("run.toml", "out = 3", ["run.toml: out: expected a path, got 3"]),
        ("run.toml", "deterministic = 1", ["run.toml: deterministic", "boolean", "got 1"]),
        ("run.toml", "model = 3", ["run.toml: model", "table", "got 3"]),
        ("run.toml", "[model.rope_scaling]\nfactr = 2", ["model.rope_scaling", "got none"]),
        ("run.toml", "learning_rate = 1e-4", ["learning_rate: expected a known key (here: --lr), got 'learning_rate'"]),
        ("run.toml", "[model]\nn_layer = 3", ["model.n_layer: expected a known key (here: --num-hidden-layers), got"]),
        ("run.toml", "[model.rope_scaling]\nfactor = 2\nx = 1", ["rope_scaling.x: expected a known key, got 'x'"]),
        ("run.toml", "preset = 'huge'", ["tiny, 124m", "got 'huge'"]),
        ("run.toml", "epochs = 3\nsteps = 4\n", ["run.toml: epochs: expected either epochs or steps, got 3 and 4"]),
        ("run.toml", "steps = = 3", ["TOML", "run.toml"]),
        ("run.json", "{steps: 3}", ["JSON", "run.json"]),
        ("run.json", "[1, 2]", ["table", "run.json", "got"]),
        ("run.json", '{"model": {"head_dim": 8, "x": 1, "head_dim": 8}}', ["run.json: the key 'head_dim' twice"]),
        ("run.json", '{"model": {"model_type": "gpt2", "rope_scaling": {"factor": 2}}}', ["expected none in a GPT-2"]),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_key(tmp_path, name, content, parts):
    with refused(ConfigError, *parts):
        parse(["--config", write(tmp_path / name, content)])


def test_a_config_file_that_is_not_text(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    with refused(ConfigError, "run.toml"):
        parse(["--config", str(path)])


@pytest.mark.parametrize(("flags", "ranks", "micro"), [
    *((f"--batch-size=32 --seq-len=64{more}", ranks, micro or 32 // ranks)
      for more, micro in (("", 0), (" --micro-batch-size=1", 1)) for ranks in (1, 2, 8, 32)),
    ("--batch-size=64 --seq-len=1024", 1, 2), ("--batch-size=100 --seq-len=100", 1, 20),
    ("--batch-size=7 --seq-len=8192", 1, 1), ("--batch-size=6 --seq-len=1000000", 1, 1),
    *((f"--batch-size={batch} --seq-len=16 --pp={pp}", 1, micro)  # two micro-batches a stage
      for batch, pp, micro in ((36, 4, 4), (24, 4, 3), (8, 4, 1), (6, 4, 1))),
])  # fmt: skip
def test_the_default_micro_batch(flags, ranks, micro):
    """The largest that divides a rank's sequences evenly and has at most ``MICRO_BATCH_TOKENS`` tokens."""
    assert parse(flags.split()).for_world(ranks).micro_batch_size == micro


def test_deterministic_micro_batches_do_not_depend_on_the_ranks():
    for batch in (8, 12, 24, 32, 40, 64):
        config = parse(["--deterministic", "--batch-size", str(batch)])
        sizes = [size for size in (1, 2, 4, 8) if batch % size == 0]
        cuts = {config.for_world(size).micro_batch_size for size in sizes}
        assert len(cuts) == 1, (batch, cuts)


@pytest.mark.parametrize(
    ("argv", "size", "parts"),
    [
        (["--batch-size", "32"], 3, ["--batch-size: expected a multiple of 3 (ranks), got 32"]),
        (["--batch-size", "32", "--micro-batch-size", "8"], 3, ["of 24 (--micro-batch-size 8 × 3 ranks), got 32"]),
        (["--batch-size=32", "--micro-batch-size=5"], 1, ["of 5 (--micro-batch-size 5 × 1 ranks), got 32"]),
        (["--batch-size", "4"], 8, ["8 (ranks), got 4"]),
        (["--batch-size", "4", "--deterministic"], 8, ["8 (ranks), got 4"]),
        (["--batch-size", "7", "--tp", "2"], 2, ["multiple of 2 (data-parallel ranks), got 7"]),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(argv, size, parts):
    with refused(ConfigError, *parts):
        parse(argv).for_world(size)


def test_the_models_vocabulary_is_the_tokenizers_unless_set():
    assert parse([]).model_config_for(65).vocab_size == 65
    model = parse(["--preset", "8b"]).model_config_for(128_000)
    assert (model.vocab_size, model.head_dim, model.num_key_value_heads) == (128_256, 128, 8)
    assert model.rope_scaling is not None and model.rope_scaling.factor == 8.0
    assert parse(["--preset", "124m"]).model_config_for(65).num_key_value_heads == 12
    assert parse(["--seq-len", "99"]).model_config_for(65).max_position_embeddings == 99
    with pytest.raises(ConfigError, match=r"--vocab-size: expected at least the tokenizer's 65, got 64"):
        parse(["--vocab-size", "64"]).model_config_for(65)


@pytest.mark.parametrize("preset", ["tiny", "1b", "8b"])
def test_a_presets_llama_may_become_a_gpt2(preset):
    config = parse(["--preset", preset, "--model-type", "gpt2"])
    model = config.model_config_for(256)
    assert model.model_type == "gpt2" and model.num_key_value_heads == model.num_attention_heads
    assert model.tie_word_embeddings and model.head_dim * model.num_attention_heads == model.hidden_size


def _folder(path: Path, model: LlamaConfig) -> str:
    path.mkdir()
    write(path / "config.json", json.dumps(to_huggingface(model)))
    return str(path)


def test_init_from_brings_the_models_shape(tmp_path):
    """Whatever the preset; the context and initial weights may be others, of a GPT-2 the latter only."""
    llama = small(rope_scaling=SCALING, rope_theta=5e5, rms_norm_eps=1e-3, initializer_range=0.5, vocab_size=300)
    folder = _folder(tmp_path / "llama", llama)
    for preset in PRESETS:
        assert parse(["--preset", preset, "--init-from", folder, "--seq-len", "9"]).model_config_for(300) == llama
    agreeing = {"init_from": folder, "model": {"head_dim": None, "hidden_size": 9, "rope_scaling": {"factor": 8.0}}}
    file = write(tmp_path / "run.json", json.dumps(agreeing))
    context = ["--seq-len", "600", "--max-position-embeddings", "700", "--initializer-range", "0.1"]
    mine = parse(["--config", file, "--hidden-size", "24", *context]).model_config_for(256)
    assert mine == llama.replace(max_position_embeddings=700, initializer_range=0.1)
    shape = {"num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 77}
    gpt2 = GPT2Config(**dict(small(**shape)))
    folder = _folder(tmp_path / "gpt2", gpt2)
    for preset in PRESETS:
        assert parse(["--preset", preset, "--init-from", folder, "--seq-len", "9"]).model_config_for(9) == gpt2
    with refused(ConfigError, f"--max-position-embeddings: expected 77, which the model in {folder} has, got 99"):
        parse(["--init-from", folder, "--max-position-embeddings", "99"])


def test_init_from_has_its_own_defaults(tmp_path):
    """A preset's learning rate is for random weights, its sequence length for another model."""

    def of(*flags, context=131_072):
        folder = tmp_path / f"context-{context}"
        if not folder.exists():
            _folder(folder, small(max_position_embeddings=context))
        config = parse(["--init-from", str(folder), *flags])
        return config.lr, config.warmup_steps, config.seq_len

    assert of() == (2e-5, None, 1024), "the data say how many steps the epochs are"
    assert of("--preset", "1b", "--steps", "10") == (2e-5, 1, 1024)
    assert of(context=77) == (2e-5, None, 77) and of("--max-position-embeddings", "99") == (2e-5, None, 99)
    assert of("--epochs", "2") == (2e-5, None, 1024)
    assert of("--lr", "1e-4", "--warmup-steps", "0", "--seq-len", "2048") == (1e-4, 0, 2048)
    file = write(tmp_path / "mine.toml", "lr = 0.1\nseq_len = 9\n")
    assert of("--config", file) == (0.1, None, 9)
    assert parse([]).lr == 3e-3
    with refused(ConfigError, "--min-lr: expected at most 2e-05 (--lr), got 0.001"):
        of("--min-lr", "1e-3")
    with refused(ConfigError, "--steps: expected a valid integer, got 'x'"):
        of("--steps", "x")


def test_a_fine_tune_is_three_epochs_long(tmp_path):
    """The steps of a preset are for random weights.  A length that is given counts, wherever it comes from."""
    folder = _folder(tmp_path / "llama", small())

    def epochs(*flags):
        return parse(["--init-from", folder, *flags]).epochs

    assert epochs() == epochs("--preset", "8b") == 3 and epochs("--epochs", "1") == 1 and parse([]).epochs is None
    given = parse(["--init-from", folder, "--steps", "9"])
    assert (given.epochs, given.steps) == (None, 9)
    assert epochs("--config", write(tmp_path / "mine.toml", "steps = 9\n")) is None
    assert epochs("--config", write(tmp_path / "mine.toml", "epochs = 2\n")) == 2
    assert epochs("--config", write(tmp_path / "mine.toml", "epochs = 2\n"), "--steps", "9") is None
    unset = write(tmp_path / "mine.json", '{"epochs": null}')
    assert epochs("--config", unset) == 3 and epochs("--config", unset, "--steps", "9") is None
    assert parse(["--config", write(tmp_path / "mine.toml", "steps = 3\n"), "--epochs", "4"]).epochs == 4


def test_a_program_fine_tunes_as_the_command_does(tmp_path):
    """``from_preset`` takes the shape of a folder, and the defaults with ``init_from``."""
    folder = _folder(tmp_path / "llama", small(max_position_embeddings=77))
    for changes in ({}, {"steps": 10}, {"epochs": 2, "lr": 1e-4}, {"lora": 2, "seq_len": 9}):
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in changes.items()]
        config = TrainConfig.from_preset("124m", init_from=folder, **changes)
        assert config == parse(["--preset", "124m", "--init-from", folder, *flags])
        assert TrainConfig.from_preset(**config.to_json()) == config
    assert config.model_config_for(37).base == small(max_position_embeddings=77) and config.lr == 2e-4
    with refused(ConfigError, f"argument: model.hidden_size: expected 24, which the model in {folder} has, got 9"):
        TrainConfig.from_preset("tiny", init_from=folder, model={"hidden_size": 9})
    with refused(ConfigError, f"--init-from: {tmp_path}/config.json: expected a Hugging Face config.json"):
        TrainConfig.from_preset("tiny", init_from=str(tmp_path))


def test_init_from_refuses_what_the_model_is_not(tmp_path):
    folder = _folder(tmp_path / "llama", small(rope_scaling=SCALING))
    has = f"which the model in {folder} has"
    for flags, said in (
        (["--hidden-size=96"], f"--hidden-size: expected 24, {has}, got 96"),
        (["--model-type=gpt2"], f"--model-type: expected llama, {has}, got gpt2"),
        (["--tie-word-embeddings"], f"--tie-word-embeddings: expected False, {has}, got True"),
        (["--sliding-window=9"], f"--sliding-window: expected no window, {has}, got 9"),
        (["--seq-len=600"], f"at most 512 ({folder}/config.json: model.max_position_embeddings), got 600"),
        (["--seq-len=9", "--max-position-embeddings=8"], "at most 8 (--max-position-embeddings), got 9"),
        (["--initializer-range=x"], "--initializer-range: expected a valid number, got 'x'"),
    ):
        with refused(ConfigError, said):
            parse(["--init-from", folder, *flags])
    with refused(ConfigError, f"{folder}/config.json: vocab_size: expected at least the tokenizer's 999, got 37"):
        parse(["--init-from", folder]).model_config_for(999)
    file = write(tmp_path / "run.toml", "lr = 0.1\n")
    with refused(ConfigError, f"--min-lr: expected at most 0.1 ({file}: lr), got 0.2"):
        parse(["--config", file, "--min-lr", "0.2"])
    file = write(tmp_path / "run.toml", "[model.rope_scaling]\nfactor = 4.0\n")
    with refused(ConfigError, f"{file}: model.rope_scaling: expected", has, "got {'factor': 4.0}"):
        parse(["--config", file, "--init-from", folder])
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with refused(ConfigError, f"--init-from: expected a folder of weights, such as {tmp_path}/run/checkpoints/step-N"):
        parse(["--init-from", str(tmp_path / "run")])


def test_flags_without_effect_are_named():
    """Those that were given alone: defaults ask for nothing."""
    config = parse([])
    assert without_effect(config, config.to_json()) == []
    given = config.to_json() | {"text_field": "other"}
    assert without_effect(config, given, {"text_field": "no record"}) == ["--text-field (no record)"]
    sample = ["--prompt", "a", "--temperature", "0.5", "--top-k", "3"]
    flags = ["--min-lr", "0", "--decay-fraction", "0.5", "--val-data", "x", "--eval-data", "a=y", *sample]
    flags += ["--pp-schedule", "zero-bubble-v"]
    config = parse([*flags, "--schedule", "wsd", "--pp", "2"])
    assert without_effect(config, config.to_json()) == []
    config = parse([*flags, "--schedule", "constant", "--eval-batches", "0", "--sample-tokens", "0"])
    assert without_effect(config, config.to_json()) == [
        "--val-data (--eval-batches 0)", "--eval-data (--eval-batches 0)",
        "--min-lr (--schedule constant)", "--decay-fraction (--schedule constant)",
        "--prompt (--sample-tokens 0)", "--temperature (--sample-tokens 0)", "--top-k (--sample-tokens 0)",
        "--pp-schedule (--pp 1)",
    ]  # fmt: skip


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_last_step_is_one_short_of_the_least_learning_rate(schedule):
    """As the help says."""
    config = parse(["--steps", "40", "--lr", "1e-2", "--min-lr", "1e-3", "--schedule", schedule])
    rate = config.learning_rate()
    assert rate(38) > rate(39) > rate(40) == 1e-3 and "the step after the last" in str(KEYS["min_lr"].description)


def test_a_linear_schedule():
    rate = parse(["--schedule=linear", "--steps=30", "--lr=1", "--min-lr=0", "--warmup-steps=10"]).learning_rate()
    assert [rate(step) for step in (9, 10, 15, 25, 30)] == pytest.approx([1, 1, 0.75, 0.25, 0])


def test_help_names_the_families_that_take_a_setting():
    """As text of its own: help imports no family."""
    assert KEYS["model.model_type"].description == f"Family of the model: {', '.join(FAMILIES)}."
    for setting in ("attention_bias", "mlp_bias", "sliding_window"):
        families = ", ".join(name for name, family in FAMILIES.items() if setting in family.takes)
        assert str(KEYS[f"model.{setting}"].description).endswith(f" ({families}).")


def test_another_encoding_in_a_file_of_0_3_is_refused(tmp_path):
    assert parse(["--config", write(tmp_path / "a.json", '{"encoding": "utf-8", "seq_len": 9}')]).seq_len == 9
    file = write(tmp_path / "b.json", '{"encoding": "latin-1"}')
    with refused(ConfigError, f"{file}: encoding: expected files in UTF-8, as iconv writes them, got latin-1"):
        parse(["--config", file])
