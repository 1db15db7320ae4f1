"""Runs with adapters: checkpoints in other layouts, the base, elastic runs, and folders of peft."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kos.errors import CheckpointError, ConfigError
from kos.testing import Fault, spawn
from kos.train import checkpoint, load
from kos.train.checkpoint import adapter
from kos.train.checkpoint.state import ShardedState
from kos.train.config.flags import parse
from kos.train.evaluator import evaluate
from kos.train.export import main as export
from kos.train.layers.lora import is_adapter
from kos.train.model import peft
from kos.train.tools import show
from kos.train.trainer import Trainer
from tests.train import elastic_runs, runs
from tests.train.elastic_runs import ranks_of, text
from tests.train.newcomers import ended, invite

__all__ = ["text"]

SHAPE = ["--hidden-size=16", "--intermediate-size=24", "--num-hidden-layers=3", "--num-attention-heads=4",
         "--num-key-value-heads=2", "--head-dim=4"]  # fmt: skip
SHORT = ["--device=cpu", "--batch-size=8", "--micro-batch-size=2", "--seq-len=16", "--eval-batches=2",
         "--sample-tokens=0", "--warmup-steps=0", "--lr=1e-2"]  # fmt: skip
ADAPT = ["--lora=3", "--lora-alpha=5", "--save-every=3", "--steps=6"]


def run(text: Path, out: Path, *flags: str, ranks: int = 1) -> np.ndarray:
    rows = runs.run(parse([f"--data={text}", *SHORT, f"--out={out}", *flags]), ranks)
    return np.array([[row["loss"], row["grad_norm"]] for row in rows])


@pytest.fixture(scope="module")
def base(text, tmp_path_factory):
    """A checkpoint of a run that trains all weights, whose folder transformers reads."""
    out = tmp_path_factory.mktemp("base")
    run(text, out, *SHAPE, "--steps=3", "--seed=5")
    return checkpoint.find(out).path


@pytest.fixture(scope="module")
def whole(text, base, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, run(text, out, f"--init-from={base}", *ADAPT)


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, "--tp=2", "--zero=1"), (2, "--pp=2", "--pp-schedule=zero-bubble-v")),
     ((4, "--pp=2", "--dp=2", "--zero=1"), (2, "--cp=2")), ((1,), (4, "--zero=1", "--tp=2"))],
    ids=str,
)  # fmt: skip
def test_a_run_resumes_in_another_layout(before, after, text, base, tmp_path):
    """In the last of these the adapters of one layer are frozen; they are in checkpoints as the others."""
    (ranks, *layout), (others, *another) = before, after
    flags = [f"--init-from={base}", *ADAPT, "--schedule=constant", *["--freeze=model.layers.0.*"] * (others == 4)]
    run(text, tmp_path / "first", *flags, *layout, "--steps=3", ranks=ranks)
    straight = run(text, tmp_path / "straight", *flags)
    got = run(text, tmp_path / "second", *flags, *another, f"--resume={tmp_path / 'first'}", ranks=others)
    np.testing.assert_allclose(got, straight[-3:], rtol=1e-4)


def test_a_checkpoint_holds_adapters_alone(whole, base):
    """Their optimizer state, and the path and hash of the base."""
    found = checkpoint.find(whole[0])
    assert found.config["base"] == {"path": str(base), "sha256": adapter.fingerprint(base)}
    names = set(load_file(found.path / "adapter_model.safetensors"))
    assert names == {f"base_model.model.{name}" for name in adapter.shapes_of(peft.model_of(found.path))}
    state = load_file(found.path / "optimizer.safetensors")
    assert {f"base_model.model.{name.partition('.')[2]}" for name in state} == names
    assert not (found.path / "model.safetensors").exists()
    settings = json.loads((found.path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (3, 5.0, str(base))


def edit(folder: Path, **settings: Any) -> Path:
    """Change settings of the adapters in a folder."""
    path = folder / peft.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def changed(base: Path, folder: Path) -> Path:
    """The same model with another number in one weight."""
    shutil.copytree(base, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, folder / "model.safetensors")
    return folder


def test_another_base_is_refused(text, base, whole, tmp_path):
    """To resume from, to load and to merge. The same base at another place is taken."""
    other, moved, resume = changed(base, tmp_path / "other"), tmp_path / "moved", f"--resume={whole[0]}"
    with pytest.raises(CheckpointError, match=r"expected the base of its run, .*, got .*other \("):
        run(text, tmp_path / "a", f"--init-from={other}", *ADAPT, "--steps=7", resume)
    shutil.copytree(base, moved)
    run(text, tmp_path / "b", f"--init-from={moved}", *ADAPT, "--steps=7", resume)
    mine = shutil.copytree(checkpoint.find(whole[0]).path, tmp_path / "step-6")
    edit(mine, base_model_name_or_path=str(other))
    with pytest.raises(CheckpointError, match="expected the base of its run"):
        adapter.Merged(mine)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lora=4"], "trains --lora 4 --lora-alpha 8 .*, got one with --lora 3 --lora-alpha 5"),
        (["--lora=3", "--lora-alpha=5", "--lora-targets=q_proj,v_proj"], "--lora-targets q_proj,v_proj, got one with"),
        ([], "expected a run that trains all weights, got one with --lora 3"),
        (ADAPT, "expected a run that trains --lora 3 .*, got one with all weights"),
    ],
    ids=str,
)
def test_a_run_with_other_adapters_does_not_resume(flags, said, text, base, whole, tmp_path):
    before = base if flags == ADAPT else whole[0]
    with pytest.raises(CheckpointError, match=said):
        run(text, tmp_path / "a", f"--init-from={base}", *flags, "--steps=7", f"--resume={before}")


def test_adapters_need_a_base(text, tmp_path):
    with pytest.raises(ConfigError, match="--lora: expected --init-from with the folder of the model to adapt"):
        run(text, tmp_path / "a", *SHAPE, *ADAPT)


def test_merged_and_loaded(whole, base, tmp_path, capsys):
    """W + alpha / rank B A, in the files of the base; without --merge a folder of peft."""
    out, tokens = whole[0], np.arange(16)[None] + 97
    assert export([str(out), str(tmp_path / "merged"), "--merge", "--dtype", "float32"]) == 0
    merged, plain = load(tmp_path / "merged"), load(base)
    np.testing.assert_allclose(merged.logits(tokens), load(out).logits(tokens), rtol=1e-5, atol=1e-6)
    adapters = load_file(checkpoint.find(out).path / "adapter_model.safetensors")
    for name, weight in plain.weights.items():
        at = f"base_model.model.{name.removesuffix('weight')}lora_"
        added = 5 / 3 * adapters[f"{at}B.weight"] @ adapters[f"{at}A.weight"] if f"{at}A.weight" in adapters else 0
        np.testing.assert_allclose(merged.weights[name], weight + added, rtol=1e-5, atol=1e-6, err_msg=name)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert export([str(out), str(tmp_path / "peft"), "--dtype", "float32"]) == 0
    assert load(tmp_path / "peft").logits(tokens).tobytes() == load(out).logits(tokens).tobytes()
    assert export([str(base), str(tmp_path / "none"), "--merge"]) == 2
    assert "--merge: expected a run or a folder with adapters (--lora), got" in capsys.readouterr().err


def test_evaluated(whole, base, text):
    """A folder of adapters is evaluated with its base."""
    ids = np.frombuffer(text.read_bytes()[:401], np.uint8).astype(np.int32)
    (text.parent / "some.txt").write_bytes(ids.astype(np.uint8).tobytes())

    def evaluated(folder):
        some = [str(text.parent / "some.txt")]
        return spawn(lambda comm: evaluate(folder, some, [], {"seq_len": 16, "tp": 2}, comm), 2)[0][0]["loss"]

    for folder in (whole[0], base):
        losses = [load(folder).loss(ids[at : at + 17]) for at in range(0, 400, 16)]
        assert evaluated(folder) == pytest.approx(np.mean(losses), rel=1e-5)
    assert evaluated(whole[0]) != pytest.approx(evaluated(base), rel=1e-3)


def test_training_goes_on_from_a_folder_of_peft(whole, text, base, tmp_path, before_call):
    """Rank, alpha and targets are the folder's, and the base is the one that it names."""
    export([str(whole[0]), str(tmp_path / "peft"), "--dtype", "float32"])
    for name in ("tokenizer.json", "kos_tokenizer.json", "tokenizer_config.json"):  # which peft does not write
        (tmp_path / "peft" / name).unlink(missing_ok=True)
    folder = f"--init-from={tmp_path / 'peft'}"
    config = parse([folder])
    assert (config.lora, config.lora_alpha, config.lr) == (3, 5.0, 2e-4)
    run(text, tmp_path / "more", folder, "--steps=2", "--lr=1e-9", "--weight-decay=0")
    tokens = np.arange(16)[None] + 97
    np.testing.assert_allclose(load(tmp_path / "more").logits(tokens), load(whole[0]).logits(tokens), rtol=1e-4)
    assert checkpoint.find(tmp_path / "more").config["base"]["path"] == str(base)
    of_own = [folder, "--steps=9", *SHORT, f"--out={tmp_path / 'own'}", "--backend=mock"]
    with pytest.raises(ConfigError, match=r"--epochs: expected none with batches of one's own \(set steps instead\)"):
        Trainer(parse([word for word in of_own if word != "--steps=9"]), batches=())
    with Trainer(parse(of_own), batches=()) as own:
        assert own.data.tokenizer.name == "bytes"
    read = list[str]()
    before_call(show, "load_data", lambda config, weights, runs: read.append(weights))
    show.report(config.model_copy(update={"show_data": 1}))
    assert read == [str(base)]
    for flag, said in (("--lora=4", "--lora: expected 3, as in the adapters of --init-from, got 4"),
                       ("--lora-targets=q_proj", "--lora-targets: expected .*, as in the adapters of")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            parse([folder, flag])
    assert parse([folder, "--lora=3", "--lora-alpha=5"]).lora == 3


def of_peft(whole, base, folder, **changes):
    """The files that peft writes, and those of a base beside it that has a chat template."""
    export([str(whole[0]), str(folder / "all"), "--dtype", "float32"])
    shutil.copytree(base, folder / "base")
    (folder / "base" / "generation_config.json").write_text('{"eos_token_id": [7]}')
    (folder / "base" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "peft").mkdir()
    for name in (peft.CONFIG, adapter.WEIGHTS):
        shutil.copy(folder / "all" / name, folder / "peft")
    return edit(folder / "peft", **{"base_model_name_or_path": str(folder / "base"), **changes})


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"


def test_the_chat_template_of_the_base_is_saved(whole, base, tmp_path, capfd):
    """The run trains with it; a file that the folder of adapters has without a tokenizer is not used."""
    pytest.importorskip("jinja2", reason="needs the extra 'chat'")
    folder = of_peft(whole, base, tmp_path)
    (folder / "chat_template.jinja").write_text("another")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 30)
    run(tmp_path / "chats.jsonl", tmp_path / "out", f"--init-from={folder}", "--steps=1")
    assert load(tmp_path / "out").chat_prompt(turns[:1])[0].startswith("<user>a;")
    assert "chat:       " in capfd.readouterr().out
    run(tmp_path / "chats.jsonl", tmp_path / "out", "--resume=auto", f"--init-from={folder}", "--steps=2")
    assert load(tmp_path / "out").chat_prompt(turns[:1])[0].startswith("<user>a;")


OF_A_LAYER = [*(f"self_attn.{each}_proj" for each in "qkvo"), *(f"mlp.{each}_proj" for each in ("gate", "up", "down"))]
MODULES = [f"model.layers.{number}.{name}" for number in range(3) for name in OF_A_LAYER]


@pytest.mark.parametrize("targets", [MODULES, OF_A_LAYER], ids=len)
def test_targets_by_longer_names(targets, whole, base, tmp_path):
    """As peft writes them for "all-linear": the matrices of all layers, each by its name."""
    folder = of_peft(whole, base, tmp_path, target_modules=targets)
    found = peft.model_of(folder)
    assert found.lora.targets == peft.model_of(tmp_path / "all").lora.targets
    assert load(folder).logits(np.arange(9)).tobytes() == load(whole[0]).logits(np.arange(9)).tobytes()
    assert load(folder).ends == (7,), "those of the base"
    assert parse([f"--init-from={folder}"]).lora == 3


@pytest.mark.parametrize("name", ["peft", "all"])
def test_a_folder_of_adapters_is_merged(name, whole, base, tmp_path, capsys):
    """One of peft with the files of its base, one that was exported with its own."""
    folder = of_peft(whole, base, tmp_path).with_name(name)
    assert export([str(folder), str(tmp_path / "merged"), "--merge", "--dtype", "float32"]) == 0
    assert export([str(whole[0]), str(tmp_path / "expected"), "--merge", "--dtype", "float32"]) == 0
    files, of_run = ({path.name for path in (tmp_path / each).iterdir()} for each in ("merged", "expected"))
    of_base = {"generation_config.json", "chat_template.jinja"}
    assert files == of_run | (of_base if name == "peft" else set())
    merged, expected = load(tmp_path / "merged"), load(tmp_path / "expected")
    assert merged.weights.flat.tobytes() == expected.weights.flat.tobytes()
    assert merged.tokenizer.is_like(expected.tokenizer) and (7 in merged.ends) == (name == "peft")
    capsys.readouterr()
    assert export([str(folder), str(tmp_path / "none")]) == 2
    assert "expected a run or a checkpoint, got a folder of adapters; --merge" in capsys.readouterr().err
    edit(folder, base_model_name_or_path="gone")
    assert export([str(folder), str(tmp_path / "none"), "--merge"]) == 1
    assert "base_model_name_or_path: expected a folder" in capsys.readouterr().err


NUMBER, LIST, SOME = "expected a number greater than 0", "expected a list of names", "expected some of q_proj, .*, got"
REFUSED: list[tuple[str, Any, str]] = [  # setting, value, what the error says of it
    ("lora_dropout", 0.1, "expected 0, got 0.1"), ("bias", "all", "expected none, got 'all'"),
    ("use_qalora", True, "expected False, got True"), ("modules_to_save", ["lm_head"], "expected none"),
    ("rank_pattern", {"q_proj": 8}, "expected"), ("alpha_pattern", {"q_proj": 8}, "expected"),
    ("peft_type", "IA3", "expected LORA, got 'IA3'"), ("init_lora_weights", "pissa", "expected True, got 'pissa'"),
    ("base_model_name_or_path", "org/model", "expected a folder, got 'org/model'; kos downloads no models"),
    ("r", None, "expected an integer of at least 1, got None"), ("r", 0, "expected .* 1, got 0"),
    ("lora_alpha", 0, f"{NUMBER}, got 0"), ("lora_alpha", float("nan"), f"{NUMBER}, got nan"),
    ("lora_alpha", 7, "expected 5.0, which the run had, got 7"), ("target_modules", "all-linear", LIST),
    ("target_modules", "(", "expected a regular expression, got missing"),
    ("target_modules", "lm_.*", "expected a regular expression that matches matrices, such as"),
    ("use_rslora", 1, "expected true or false, got 1"),
    ("layers_to_transform", ["1"], "expected numbers of layers, got"),
    ("layers_to_transform", [3], "expected numbers from 0 to 2, got 3"),
    ("target_modules", [], LIST), ("target_modules", ["q_proj", "lm_head"], f"{SOME} lm_head"),
    ("target_modules", MODULES[:-1], "expected down_proj of all layers, got it without model.layers.2.mlp.down_proj"),
    ("target_modules", [*MODULES, "model.layers.3.mlp.up_proj"], f"{SOME} model.layers.3.mlp.up_proj"),
    ("target_modules", ["mlp.q_proj"], f"{SOME} mlp.q_proj"),
    ("use_something_new", {"a": 1}, "expected none, got {'a': 1}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "said"), REFUSED)
def test_adapters_that_are_refused_by_name(name, value, said, whole, tmp_path):
    folder = edit(shutil.copytree(checkpoint.find(whole[0]).path, tmp_path / "peft"), **{name: value})
    what = "" if name == "base_model_name_or_path" else f"{name}: "
    with pytest.raises(ConfigError, match=f"--init-from: .*{what}{said}"):
        parse([f"--init-from={folder}"])


def test_an_edited_alpha_of_a_checkpoint_is_refused(text, base, whole, tmp_path):
    """To resume from, to load and to merge.  An exported folder may be edited."""
    out = shutil.copytree(whole[0], tmp_path / "run")
    folder = edit(checkpoint.find(out).path, lora_alpha=10.0)
    said = r"adapter_config.json: lora_alpha: expected 5.0, which the run had, got 10.0; kos export writes"
    with pytest.raises(CheckpointError, match=said):
        run(text, tmp_path / "more", f"--init-from={base}", *ADAPT, "--lora-alpha=10", "--steps=7", f"--resume={out}")
    for use in (load, adapter.Merged):
        with pytest.raises(CheckpointError, match=said):
            use(folder)
    export([str(whole[0]), str(tmp_path / "peft"), "--dtype", "float32"])
    edit(tmp_path / "peft", lora_alpha=10)
    plain, once, twice = (load(each).weights["model.layers.0.mlp.up_proj.weight"]
                          for each in (base, whole[0], tmp_path / "peft"))  # fmt: skip
    np.testing.assert_allclose(twice - plain, 2 * (once - plain), rtol=1e-3, atol=1e-6)


def test_a_base_in_8_bits(text, base, tmp_path):
    """A run resumes with the same bits; the whole model is made of the base in its file."""
    flags = [f"--init-from={base}", *ADAPT, "--dtype=fp8", "--schedule=constant"]
    straight = run(text, tmp_path / "straight", *flags, "--sample-tokens=4")
    first = checkpoint.find(tmp_path / "straight").path.with_name("step-3")
    got = run(text, tmp_path / "second", *flags, f"--resume={first}")
    assert got.tobytes() == straight[-3:].tobytes()
    assert {each.name for each in first.glob("*.safetensors")} == {adapter.WEIGHTS, "optimizer.safetensors"}
    plain = load(base).weights
    with Trainer(parse([f"--data={text}", *SHORT, f"--out={tmp_path / 'own'}", "--backend=mock", *flags])) as trainer:
        now = trainer.model.weights
        assert all(np.array_equal(now[name], weight) for name, weight in plain.items())


def test_adapters_of_another_shape_are_refused(whole, tmp_path):
    folder = tmp_path / "peft"
    export([str(whole[0]), str(folder), "--dtype", "float32"])
    with pytest.raises(CheckpointError, match=r"expected shape .*, got"):
        load(edit(folder, r=2))


# --- elastic -------------------------------------------------------------------------------------------

OF_ELASTIC: dict[str, Any] = {"lora": 2, "lr": 1e-2}


@pytest.fixture(scope="module")
def small(text, tmp_path_factory):
    """The base of elastic runs."""
    out = tmp_path_factory.mktemp("small")
    elastic_runs.train(text, out / "run", elastic=None, ranks=1, steps=1, lr=1e-9)
    return str(checkpoint.find(out / "run").path)


def test_a_rank_is_lost_or_two_join(text, small, tmp_path, before_call):
    """With the bits of a run in which nothing happened; a newcomer reads the base from its files."""
    how = {**OF_ELASTIC, "init_from": small, "zero": 1, "freeze": ("*.layers.0.*",), "dtype": "fp8"}
    plain = elastic_runs.train(text, tmp_path / "plain", **{**how, "elastic": None, "zero": 0})
    faults = [Fault("crash", 2, 4, call="all_to_all")]
    assert elastic_runs.train(text, tmp_path / "hurt", faults, **how) == plain
    assert ranks_of(tmp_path / "hurt")[-1] == (3, 1)
    threads = invite(before_call, text, tmp_path / "joined", count=2, **how)
    assert elastic_runs.train(text, tmp_path / "joined", ranks=1, **{**how, "elastic": "1:3"}) == plain
    assert ended(threads) == [[]] * len(threads)
    assert ranks_of(tmp_path / "joined") == [(1, 0)] * 3 + [(3, 1)] * 3


class Counting:
    """A communicator that counts the elements that its rank broadcasts or gets."""

    def __init__(self, comm):
        self.comm, self.count = comm, 0

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def broadcast(self, x, root):
        self.count += x.size
        return self.comm.broadcast(x, root)


def test_a_newcomer_gets_frozen_adapters_and_reads_the_base(text, small, tmp_path, monkeypatch, before_call):
    """The base does not come from the other ranks too."""
    how, load = {**OF_ELASTIC, "init_from": small, "freeze": ("*.layers.0.*",)}, ShardedState.load
    counted = list[tuple[int, int]]()

    def counting(self, mine, comm, holds, gone):
        load(self, mine, counting := Counting(comm), holds, gone)
        frozen = {name: span.stop - span.start for name, span in self.frozen.spans.items()}
        adapters = sum(size for name, size in frozen.items() if is_adapter(name))
        assert 0 < adapters < sum(frozen.values())
        counted.append((counting.count, adapters + 3 * self.optimizer.weights.flat.size))

    monkeypatch.setattr(ShardedState, "load", counting)
    threads = invite(before_call, text, tmp_path / "run", **how)
    elastic_runs.train(text, tmp_path / "run", ranks=1, **{**how, "elastic": "1:3"})
    assert ended(threads) == [[]] * len(threads)
    assert counted and all(count <= expected for count, expected in counted)


def test_a_newcomer_with_another_base_is_refused(text, small, tmp_path, before_call):
    other = changed(Path(small), tmp_path / "other")
    how = {**OF_ELASTIC, "init_from": str(other)}
    threads = invite(before_call, text, tmp_path / "run", **how)
    elastic_runs.train(text, tmp_path / "run", ranks=1, **{**how, "init_from": small, "elastic": "1:3"})
    ((error,),) = ended(threads)
    assert "--init-from: expected the base that the run adapts" in str(error)
