"""Hugging Face transformers' own LLaMA and GPT-2 beside ours: logits, loss, every gradient, and files both ways.

Theirs runs in float64 on the CPU (with the fp32 islands that its norms and rotations keep); ours in float64 on
numpy, and in fp32 on a GPU where there is one.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from kos import cuda
from kos.train.checkpoint import huggingface
from kos.train.model.gpt2 import GPT2Config, make_model
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.ops import numpy as numpy_ops
from kos.train.parallel.mesh import Layout
from tests.train.models import SCALING, loss_and_gradients, tensors_of
from tests.train.sharded import save_in, whole_state

REASON = "the reference needs transformers and torch (pip install transformers torch)"
transformers = pytest.importorskip("transformers", reason=REASON)
torch = pytest.importorskip("torch", reason=REASON)

CASES = {  # with 8 query heads: groups of 1, 4 and 8
    "multi-head, untied": LlamaConfig(83, 72, 104, 2, 8, 8, 10),
    "group of 4, tied": LlamaConfig(83, 64, 88, 3, 8, 2, 8, tie_word_embeddings=True),
    "group of 8, llama3": LlamaConfig(131, 64, 72, 2, 8, 1, 16, rope_theta=500.0, rope_scaling=SCALING),
    "wide heads, llama3, tied": LlamaConfig(
        97, 128, 96, 2, 4, 1, 64, 4096, 1e-6, 10_000.0, SCALING, tie_word_embeddings=True
    ),
}
GPT2 = {"GPT-2": GPT2Config(83, 64, 200, 3, 4, 4, 16, 130, tie_word_embeddings=True)}
V4 = ("rope_theta", "rope_scaling", "torch_dtype")
V5 = ("rope_parameters", "dtype")
each_llama = pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))
each_case = pytest.mark.parametrize("config", (CASES | GPT2).values(), ids=list(CASES | GPT2))


@pytest.fixture(params=["numpy", pytest.param("cuda", marks=pytest.mark.gpu)])
def dialect(request):
    """The operations, the dtype they run in, and how arrays of weights are made."""
    if request.param == "numpy":
        return numpy_ops, "float64", np.zeros
    if cuda.unavailable() is not None:
        pytest.skip(f"needs a GPU: {cuda.unavailable()}")
    from kos.train.ops.cuda.dialect import CudaOps

    ops = CudaOps(0)
    return ops, "float32", ops.zeros


def host_weights(config, rng):
    """Random weights, norms around 1, that fp32 holds exactly."""
    weights = Parameters(config.parameter_shapes(), np.float32, config.fused_groups())
    weights.flat[:] = rng.normal(0, 0.2, weights.flat.size)
    for name, shape in weights.shapes.items():
        if len(shape) == 1 and name.endswith(".weight"):
            weights[name][:] += 1
    return weights


def theirs_of(config, weights):
    """transformers' model, with our weights."""
    settings = huggingface.to_huggingface(config)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings)).eval()
    state = {name: torch.tensor(array) for name, array in tensors_of(weights).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def batch_of(config, rng, samples=3, length=33):
    """Tokens, transformers' labels (unshifted, -100 left out) and our targets (shifted, -1 left out)."""
    tokens = rng.integers(0, config.vocab_size, (samples, length), dtype=np.int32)
    labels = np.where(rng.random(tokens.shape) < 0.2, -100, tokens)
    targets = np.full_like(tokens, -1)
    targets[:, :-1] = np.where(labels[:, 1:] == -100, -1, labels[:, 1:])
    return tokens, labels, targets


@each_case
@pytest.mark.parametrize("length", [1, 33, 130])
def test_logits_loss_and_gradients(dialect, rng, config, length):
    ops, dtype, zeros = dialect
    start = host_weights(config, rng)
    tokens, labels, targets = batch_of(config, rng, length=length)
    if length == 1:
        labels = None

    theirs = theirs_of(config, start).double()
    if config.model_type == "llama":  # angles as exact as ours: theirs are fp32, whose error grows with the position
        theirs.model.rotary_emb = Rotary(config)
    ids = torch.tensor(tokens, dtype=torch.int64)
    out = theirs(ids, labels=None if labels is None else torch.tensor(labels, dtype=torch.int64))

    weights = Parameters(start.shapes, dtype, start.groups, zeros)
    source = start.flat.astype(dtype)
    weights.flat.copy_from(source, ops.stream) if dtype == "float32" else np.copyto(weights.flat, source)
    model, gradients = make_model(config, ops), weights.like()
    assert_near(model.logits(weights, tokens), out.logits.detach().numpy(), 1e-5, "logits")
    if labels is None:
        return
    loss = loss_and_gradients(model, weights, tokens, targets, gradients, accumulate=False)
    assert loss == pytest.approx(out.loss.item(), rel=1e-5)
    out.loss.backward()
    parameters = dict(theirs.named_parameters())
    assert parameters.keys() == gradients.keys()
    got = tensors_of({name: ops.to_host(gradients[name]) for name in gradients})
    for name, parameter in parameters.items():
        assert_near(got[name], parameter.grad.numpy(), 2e-5, name)


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.frequencies = torch.tensor(config.rope_frequencies(), dtype=torch.float64).repeat(2)

    def forward(self, x, position_ids=None, **_):
        angles = position_ids[..., None].double() * self.frequencies
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def assert_near(got, expected, limit, name):
    error = np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error < limit, f"{name}: {error:.2e}, expected at most {limit:.0e}"


@each_llama
def test_frequencies(config):
    """Their rotary frequencies, from either spelling of the configuration."""
    settings = huggingface.to_huggingface(config)
    dropped = [(), V5] if int(transformers.__version__.split(".")[0]) < 5 else [(), V4, V5]
    for keys in dropped:
        spelling = {key: value for key, value in settings.items() if key not in keys}
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**spelling))
        got = theirs.model.rotary_emb.inv_freq.double().numpy()
        np.testing.assert_allclose(got, config.rope_frequencies(), rtol=1e-6)


@each_case
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_their_folder_is_read(tmp_path, rng, config, shard):
    theirs = theirs_of(config, host_weights(config, rng))
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / huggingface.INDEX).exists() == (shard == "20KB")
    read = huggingface.read_config(tmp_path)
    assert read == dataclasses.replace(config, initializer_range=read.initializer_range)
    weights = Parameters(read.parameter_shapes())
    weights.flat[:] = np.nan
    huggingface.read_weights(tmp_path, weights)
    state = theirs.state_dict()
    for name, array in tensors_of(weights).items():
        assert np.array_equal(array, state[name].numpy()), name


@each_case
def test_ours_is_read_by_them_and_comes_back(tmp_path, rng, config):
    """Our folder into transformers, saved there again, and read: the same configuration, the same bits."""
    from safetensors.numpy import save_file

    weights = host_weights(config, rng)
    tensors = tensors_of(weights)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(huggingface.to_huggingface(config)))
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(theirs, transformers.LlamaForCausalLM | transformers.GPT2LMHeadModel)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, parameter in theirs.named_parameters():
        assert np.array_equal(parameter.detach().float().numpy(), tensors[name]), name
    theirs.save_pretrained(tmp_path / "again")
    assert huggingface.read_config(tmp_path / "again") == config
    again = Parameters(config.parameter_shapes())
    huggingface.read_weights(tmp_path / "again", again)
    assert np.array_equal(again.flat, weights.flat)


@pytest.mark.parametrize("layout", [Layout(dp=3), Layout(tp=2, pp=2), Layout(dp=2, tp=4)], ids=str)
def test_what_ranks_of_any_layout_save_is_read_by_them(tmp_path, layout):
    config = LlamaConfig(80, 64, 88, 3, 8, 4, 8, tie_word_embeddings=layout.pp > 1)
    whole = whole_state(config)
    path = save_in(layout, tmp_path, 1, config, whole, zero=True)
    assert (path / huggingface.INDEX).exists()
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, parameter in theirs.named_parameters():
        assert np.array_equal(parameter.detach().float().numpy(), whole[name]), name
