"""Families of models beside transformers: settings, logits, gradients and steps of AdamW.

The results of transformers are recorded (``tests.goldens``).  Theirs runs in float64, where what differs from ours is
seen; with masks of documents and windows written out.
"""

import json
import re
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from safetensors.numpy import load_file

from kos.errors import ConfigError
from kos.testing import spawn
from kos.train import checkpoint
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.data.tokenizers import ByteTokenizer
from kos.train.model import huggingface
from kos.train.model.families import (
    FAMILIES,
    GPT2Config,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from kos.train.model.initial import init_weights
from kos.train.model.llama import FULL, SLIDING, LlamaConfig
from kos.train.model.model import InFlight, Model
from kos.train.model.shape import RopeScaling
from kos.train.ops import Batch
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import Parameters
from kos.train.parallel.mesh import Mesh
from tests.goldens import distance, sketch
from tests.train.layouts import Precise, make_data
from tests.train.masks import visible
from tests.train.models import loss_and_gradients, random_weights, read_weights, save_model, tensors_of
from tests.train.of_transformers import precise, torch, transformers
from tests.train.refusal import refused

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = "model.safetensors"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def of(family: type[LlamaConfig], **changes: Any) -> LlamaConfig:
    return family(**{**SHAPE, **changes})


def rope(**settings: Any) -> dict[str, Any]:
    return {"rope_scaling": RopeScaling(**settings), "rope_theta": 100.0}


PADS = (0, 3, 6, 39, -1, -40)
CASES: dict[str, LlamaConfig] = {
    "llama": of(LlamaConfig),
    "llama, biases": of(LlamaConfig, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama, one kv head": of(LlamaConfig, num_key_value_heads=1, head_dim=10, intermediate_size=29),
    "linear": of(LlamaConfig, **rope(rope_type="linear", factor=3.0)),
    "dynamic": of(LlamaConfig, **rope(rope_type="dynamic", factor=3.0)),
    "yarn": of(LlamaConfig, **rope(**YARN)),
    "yarn, more settings": of(
        Qwen2Config, **rope(**YARN, beta_fast=16.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=0.4, truncate=False)
    ),
    "yarn, its length": of(Qwen3Config, **rope(**YARN, attention_factor=0.8)),
    "llama3": of(LlamaConfig, **rope(factor=8.0, original_max_position_embeddings=16)),
    "qwen2": of(Qwen2Config, tie_word_embeddings=True, rms_norm_eps=1e-3),
    "qwen2, windows": of(
        Qwen2Config, sliding_window=5, layer_types=(FULL, SLIDING, SLIDING), num_key_value_heads=2
    ),
    "qwen3": of(Qwen3Config, head_dim=10, rms_norm_eps=1e-3, num_key_value_heads=2),
    "qwen3, biases and windows": of(
        Qwen3Config, attention_bias=True, sliding_window=7, layer_types=(SLIDING, FULL, SLIDING), num_key_value_heads=8
    ),
    "mistral": of(MistralConfig),
    "mistral, a window": of(MistralConfig, sliding_window=6),
    "olmo2": of(Olmo2Config, rms_norm_eps=1e-3),
    "olmo2, biases": of(Olmo2Config, attention_bias=True, num_key_value_heads=8, tie_word_embeddings=True),
    "smollm3": of(SmolLM3Config, no_rope_layers=(1, 0, 1), tie_word_embeddings=True),
    "smollm3, all": of(
        SmolLM3Config, no_rope_layers=(1, 0, 0), sliding_window=4, layer_types=(FULL, SLIDING, FULL),
        attention_bias=True, mlp_bias=True,
    ),
    "gpt2": of(GPT2Config, num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-3, tie_word_embeddings=True),
    **{f"{family.kind}, padding": of(family, pad_token_id=pad, tie_word_embeddings=pad % 2 == 0)
       for pad, family in zip(PADS, sorted({*FAMILIES.values()} - {GPT2Config}, key=str), strict=True)},
}  # fmt: skip
each_case = pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))


def their_logits(config: LlamaConfig, theirs: Any, batch: Batch) -> Any:
    """With a mask of each kind of layer, block-diagonal where there are documents."""
    places, starts = np.arange(batch.tokens.shape[1]), batch.document_starts

    def mask(window: int | None) -> Any:
        seen = np.broadcast_to(visible(starts, window, places), (len(batch.tokens), len(places), len(places)))
        return torch.zeros(seen.shape, dtype=theirs.dtype).masked_fill(~torch.tensor(seen), -1e30)[:, None]

    window = config.sliding_window
    masks: Any = mask(window)
    if "layer_types" in config.takes:
        masks = {FULL: mask(None), SLIDING: masks}
    return theirs(torch.tensor(batch.tokens, dtype=torch.int64), attention_mask=masks).logits


def their_loss(config: LlamaConfig, theirs: Any, batch: Batch) -> Any:
    targets = torch.tensor(batch.targets, dtype=torch.int64).flatten()
    return torch.nn.functional.cross_entropy(
        their_logits(config, theirs, batch).flatten(0, 1), targets, ignore_index=-1
    )


def random_batch(config: LlamaConfig, rng: np.random.Generator, documents: bool) -> Batch:
    tokens, targets = rng.integers(0, config.vocab_size, (2, 3, 33), dtype=np.int32)
    targets[rng.random(targets.shape) < 0.2] = -1
    begins = np.where(rng.random(tokens.shape) < 0.15, np.arange(33), 0)
    starts = np.maximum.accumulate(begins, 1).astype(np.int32)
    return Batch(tokens, targets, document_starts=starts if documents else None)


def biases_of_no_effect(config: LlamaConfig) -> set[str]:
    """Those of k in layers without positions: they move all scores of a query alike."""
    without = [layer for layer, rotated in enumerate(config.no_rope_layers) if not rotated]
    return {f"model.layers.{layer}.self_attn.k_proj.bias" for layer in without}


def assert_near(got: np.ndarray, expected: list[float], limit: float, name: str) -> None:
    """``expected``: a sketch."""
    error = distance(got, expected)
    assert error < limit, f"{name}: {error:.2e}, expected at most {limit:.0e}"


def their_results(config: LlamaConfig, start: Parameters, batch: Batch) -> dict[str, Any]:
    """Their loss, and sketches of the logits and of the gradients."""
    theirs = precise(config, start)
    loss = their_loss(config, theirs, batch)
    loss.backward()
    logits = their_logits(config, theirs, batch).detach().flatten(0, 1).numpy()
    gradients = {name: sketch(weight.grad.numpy()) for name, weight in theirs.named_parameters()
                 if name not in biases_of_no_effect(config)}  # fmt: skip
    return {"loss": loss.item(), "logits": sketch(logits), "gradients": gradients}


@pytest.mark.parametrize(("name", "documents"), [
    *((name, True) for name in CASES), *((name, False) for name in ("llama", "qwen2, windows", "smollm3, all", "gpt2")),
])  # fmt: skip
def test_logits_loss_and_gradients(name, documents, request, golden):
    """In float32 within 1e-6 and 1e-5 of float64; in float64 but for rounding.  Documents are cut into small blocks."""
    config, rng = CASES[name], np.random.default_rng(5)
    if documents:
        request.getfixturevalue("small_blocks")
    start, batch = random_weights(config, rng, np.float64), random_batch(config, rng, documents)
    expected = golden(f"{name}, {documents=}", lambda: their_results(config, start, batch))
    every = [(np.float64, 1e-12, 1e-12, how) for how in (("none", "norms", "block") if documents else ("none",))]
    for dtype, near, near_gradients, recompute in [(np.float32, 1e-6, 1e-5, "none"), *every]:
        weights = random_weights(config, rng, dtype)
        weights.flat[:] = start.flat
        model, gradients = Model(config, numpy_ops, recompute=recompute), weights.like()
        gradients.flat[:] = np.nan
        with numpy_ops.step(model.arena):
            model.forward(weights, flight := InFlight(model.arena), batch, saves=False)
            out = model.logits_of(weights, flight, slice(0, batch.tokens.size))
        assert_near(out, expected["logits"], near, "logits")
        finished = []
        how = {"accumulate": False, "on_gradient": finished.append}
        loss = loss_and_gradients(model, weights, batch, None, gradients, **how)
        assert loss == pytest.approx(expected["loss"], rel=near)
        groups = config.fused_groups()
        assert [part for each in finished for part in groups.get(each, (each,))] == list(config.parameter_shapes())
        found = tensors_of(gradients)
        assert {*found} - biases_of_no_effect(config) == {*expected["gradients"]}
        for tensor, gradient in found.items():
            if tensor in expected["gradients"]:
                assert_near(gradient, expected["gradients"][tensor], near_gradients, f"{tensor} ({recompute})")
            else:  # it is 0: there is only an error of rounding
                beside = np.linalg.norm(found[tensor.replace("k_proj", "q_proj")])
                assert np.linalg.norm(gradient) < near_gradients * beside, tensor
        once = gradients.flat.copy()
        loss_and_gradients(model, weights, batch, None, gradients, accumulate=True)
        np.testing.assert_allclose(gradients.flat, 2 * once, rtol=1e-4, atol=1e-6)


RUN: dict[str, Any] = {
    "batch_size": 8, "micro_batch_size": 2, "seq_len": 32, "lr": 1e-2, "warmup_steps": 2, "steps": 10,
}  # fmt: skip


def trained(config: LlamaConfig, start: Parameters) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of ten steps, and the weights after them."""
    model: dict[str, Any] = {name: value for name, value in config if value is not None}
    asked = TrainConfig.from_preset("tiny", **RUN, model={**model, "model_type": config.model_type})

    def run(comm: Any) -> Any:
        ours = asked.for_world(1)
        assert ours.model_config_for(40) == config
        device = Precise(ours, config, make_data(ours), Mesh(comm), lambda what, share: None)
        device.step.gradients.flat[:] = np.nan
        device.step.weights.flat[:] = start.flat
        losses = []
        for step in range(ours.steps):
            device.start_step(step, False)
            losses.append(device.finish_step(step).loss)
        weights = {name: value.copy() for name, value in device.step.weights.items()}
        device.close()
        return losses, weights

    return spawn(run, 1, timeout=200)[0]


def torch_steps(config: LlamaConfig, start: Parameters) -> dict[str, Any]:
    """The losses of ten steps of ``torch.optim.AdamW``, and sketches of the weights after them."""
    settings = TrainConfig.from_preset("tiny", **RUN, model={"vocab_size": 40})
    data, theirs = make_data(settings), precise(config, start)
    matrices, vectors = ([w for w in theirs.parameters() if (w.ndim > 1) == matrix] for matrix in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2), eps=settings.eps,
    )  # fmt: skip
    losses, schedule = [], settings.learning_rate()
    for step in range(settings.steps):
        optimizer.zero_grad()
        loss = their_loss(config, theirs, data.batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), settings.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
        losses.append(loss.item())
    weights = {name: sketch(weight.detach().numpy(), digits=9) for name, weight in theirs.named_parameters()
               if name not in biases_of_no_effect(config)}  # fmt: skip
    return {"losses": losses, "weights": weights}


STEPS = [
    "llama, biases", "mistral, a window", "qwen2, windows", "qwen3", "olmo2, biases", "smollm3, all", "yarn", "gpt2",
]  # fmt: skip
PADDED = [name for name in CASES if name.endswith(", padding")]


@pytest.mark.parametrize(("name", "new"), [
    *((name, False) for name in (*STEPS, *PADDED)), *((name, True) for name in PADDED),
])  # fmt: skip
def test_steps_beside_torch(name, new, golden):
    """On data with documents, in which every token occurs. ``new``: the padding token's row of the table is zero."""
    config, rng = CASES[name], np.random.default_rng(3)
    start = random_weights(config, rng, np.float64)
    if new:
        start[config.embedding][config.pad_token_id] = 0
    expected = golden(f"steps of {name}, {new=}", lambda: torch_steps(config, start), rtol=1e-7)
    losses, got = trained(config, start)
    np.testing.assert_allclose(losses, expected["losses"], rtol=2e-6)
    for tensor, value in expected["weights"].items():
        assert_near(tensors_of(got)[tensor], value, 2e-5, tensor)


def their_folder(config: LlamaConfig, weights: Parameters, folder: Path) -> dict[str, Any]:
    """The settings that they write, and the shapes and checksums of the tensors."""
    precise(config, weights, "float32").save_pretrained(folder)
    return {"config": json.loads((folder / "config.json").read_text()), "tensors": checksums(folder)}


def checksums(folder: Path) -> dict[str, list[int]]:
    return {name: [crc32(x.tobytes()), *x.shape] for name, x in load_file(folder / WEIGHTS).items()}


@each_case
def test_folders_both_ways(config, tmp_path, golden, request):
    """Theirs into ours, and ours through theirs: the same configuration, the same bits."""
    weights = random_weights(config, np.random.default_rng(6), np.float32)
    theirs = golden(request.node.callspec.id, lambda: their_folder(config, weights, tmp_path / "theirs"))
    save_model(tmp_path, config, weights)
    assert checksums(tmp_path) == theirs["tensors"]
    read = huggingface.from_huggingface(theirs["config"])
    assert read.replace(initializer_range=config.initializer_range) == config
    again = Parameters(read.parameter_shapes())
    read_weights(tmp_path, again)
    assert np.array_equal(again.flat, weights.flat)
    settings = json.loads(json.dumps(huggingface.to_huggingface(config)))
    assert huggingface.from_huggingface(settings) == config
    old = {key: value for key, value in settings.items() if key not in ("rope_parameters", "dtype")}
    assert huggingface.from_huggingface(old) == config


MISSING = [
    ("qwen2", {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    ("qwen3", {"num_key_value_heads": 4}),
    ("mistral", {}),
    ("olmo2", {}),
    ("smollm3", {}),
    ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 3}),
    ("smollm3", {"no_rope_layers": [0, 1, 0, 1], "use_sliding_window": True, "sliding_window": 3,
                 "max_window_layers": 28}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "more"), MISSING)
def test_what_transformers_works_out_for_settings_that_are_missing(kind, more, golden):
    least = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8}
    settings = {"num_hidden_layers": 4, **least, **more}
    theirs = golden(
        f"{kind} {json.dumps(more)}", lambda: transformers.AutoConfig.for_model(kind, **settings).to_dict(),
    )  # fmt: skip
    ours = huggingface.from_huggingface({"model_type": kind, **settings})
    assert type(ours) is FAMILIES[kind]
    for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == theirs[name], name
    large = huggingface.from_huggingface({"model_type": kind, **settings, "vocab_size": 2**20})
    assert large.pad_token_id == theirs["pad_token_id"]
    assert ours.pad_token_id == (1 if kind == "olmo2" else None), "one that is in the vocabulary"
    assert ours.head_dim == (theirs.get("head_dim") or 4)
    assert ours.rope_theta == theirs["rope_parameters"]["rope_theta"]
    types, window = theirs.get("layer_types") or [SLIDING] * 4, theirs.get("sliding_window")
    attention = [ours.layer(number, None)[0] for number in range(4)]
    assert [each.window for each in attention] == [window if each == SLIDING else None for each in types]
    if kind == "smollm3":
        assert [*(ours.no_rope_layers or [1] * 4)] == theirs["no_rope_layers"]


@pytest.mark.parametrize("layers", [3, 8])
def test_a_new_smollm3_has_layers_without_rotary_positions(layers, tmp_path, golden):
    """Those that transformers gives it; runs of before, which had none, go on so."""
    flags = ["--model-type", "smollm3", "--num-hidden-layers", str(layers)]
    theirs = golden(
        f"smollm3 {layers}",
        lambda: transformers.AutoConfig.for_model("smollm3", num_hidden_layers=layers).no_rope_layers,
    )
    ours = parse(flags).model_config_for(256)
    assert [int(attention.rope is not None) for attention, _ in ours.layers(range(layers))] == theirs
    (file := tmp_path / "config.json").write_text(json.dumps({"model": {"no_rope_layers": []}}))
    assert parse(["--config", str(file), *flags]).model_config_for(256).no_rope_layers == ()


def rows_of_zeros(config: LlamaConfig) -> dict[str, list[int]]:
    """Of the tables of a new model of transformers."""
    settings = {"pad_token_id": 3, **huggingface.to_huggingface(config)}
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings))
    return {name: (weight == 0).all(1).nonzero().ravel().tolist() for name, weight in theirs.named_parameters()
            if len(weight) == config.vocab_size}  # fmt: skip


@pytest.mark.parametrize("name", [*PADDED, "gpt2"])
def test_a_new_models_row_of_padding_is_zero(name, golden):
    """As in a new model of transformers: tied or not, but not in the head's own matrix, nor in any row of a GPT-2."""
    config = CASES[name]
    expected = golden(f"padding of {name}", lambda: rows_of_zeros(config))
    init_weights(config, weights := Parameters(config.parameter_shapes()), 3)
    assert {name: [*np.flatnonzero((weights[name] == 0).all(1))] for name in expected} == expected


def test_a_new_models_vocabulary_may_be_small(golden):
    """Smaller than the token of transformers' default for padding, with which it cannot make the model."""

    def is_made(settings: dict[str, Any]) -> bool:
        try:
            transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings))
        except AssertionError:
            return False
        return True

    written = {"config.json": huggingface.to_huggingface(of(SmolLM3Config)), **ByteTokenizer().files()}
    settings = checkpoint.merge_extra(written, {}, ByteTokenizer())["config.json"]
    default = {key: value for key, value in settings.items() if key != "pad_token_id"}
    assert golden("with null or the default", lambda: [is_made(settings), is_made(default)]) == [True, False]
    assert settings["pad_token_id"] is None
    theirs = {"config.json": b'{"use_cache": true}'}
    assert checkpoint.merge_extra(written, theirs, ByteTokenizer())["config.json"]["pad_token_id"] is None


def test_settings_of_another_family_are_refused():
    with refused(ConfigError, "sliding_window: expected none in a model of type llama, got 8"):
        of(LlamaConfig, sliding_window=8)
    with refused(ConfigError, "--tp 4: expected num_key_value_heads to be a multiple or a divisor of 4, got 6"):
        of(Qwen3Config, num_attention_heads=12, num_key_value_heads=6).local(0, 4)


def test_the_guide_shows_the_code_of_a_family():
    """Every line that docs/guides/models.md has as added is in the file that it names."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs/guides/models.md").read_text(), re.M | re.S)
    lines = []
    for line in diff.splitlines():
        if named := re.match(r" # ([\w/]+\.py)", line):
            lines = (ROOT / named[1]).read_text().splitlines()
        assert named or not line or line[1:] in lines, line
