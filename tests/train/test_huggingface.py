"""Configurations and weights in the spellings of transformers."""

import json

import numpy as np
import pytest

from kos.errors import CheckpointError, SettingError
from kos.train.checkpoint.huggingface import check_weights, weight_files
from kos.train.model.families import FAMILIES
from kos.train.model.huggingface import from_huggingface, read_config, to_huggingface
from kos.train.model.llama import FAMILY_SETTINGS, FULL, SLIDING
from kos.train.ops.parameters import Parameters
from tests.train.models import SCALING, read_weights, small
from tests.train.of_transformers import transformers

CHANGED: dict[str, object] = {
    "vocab_size": 41, "hidden_size": 28, "intermediate_size": 99, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 77, "rms_norm_eps": 0.5, "rope_theta": 5.0,
    "rope_scaling": SCALING, "tie_word_embeddings": False, "initializer_range": 0.7, "attention_bias": True,
    "mlp_bias": True, "sliding_window": 3, "layer_types": (FULL,) * 3, "no_rope_layers": (0, 1, 1),
    "pad_token_id": 5,
}  # fmt: skip
CONFIG = small(rope_theta=500_000.0, rope_scaling=SCALING)
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_positions": 8, "n_head": 4}
V4 = ("rope_theta", "rope_scaling", "torch_dtype")
V5 = ("rope_parameters", "dtype")


@pytest.mark.parametrize("config", [CONFIG, CONFIG.replace(rope_scaling=None, tie_word_embeddings=True)])
@pytest.mark.parametrize("dropped", [(), V4, V5])
def test_both_spellings(config, dropped):
    settings = {key: value for key, value in to_huggingface(config).items() if key not in dropped}
    assert from_huggingface(json.loads(json.dumps(settings))) == config
    assert from_huggingface({**settings, "attention_bias": None, "hidden_act": None}) == config
    odd = {**settings, "hidden_size": 25, "head_dim": 6}
    assert (from_huggingface(odd).hidden_size, from_huggingface(odd).head_dim) == (25, 6)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_setting_is_refused_by_a_family_or_comes_back(family):
    """No setting is lost between a run and its ``config.json``."""
    fields = {name: value for name, value in CONFIG if name not in ("lora", "model_type")}
    shape = fields | {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_scaling": None, "rope_theta": 1e4}
    assert CHANGED.keys() == fields.keys()
    refused = set()
    for name, value in {**CHANGED, "": None}.items():
        try:
            config = family(**{**shape, **({name: value} if name else {})})
        except SettingError:
            refused.add(name)
            continue
        back = from_huggingface(json.loads(json.dumps(to_huggingface(config))))
        assert back == config or (name == "layer_types" and back == config.replace(layer_types=())), name
    allowed = {*FAMILY_SETTINGS, *family.fixed} - family.takes
    assert refused <= allowed | {"num_attention_heads", "hidden_size", "tie_word_embeddings"} and "" not in refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "opt"}, "expected model_type one of llama, gpt2, .*, got 'opt'"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers: expected a number less than or equal to 100000, got"),
        ({"hidden_act": "gelu"}, "expected hidden_act 'silu', got 'gelu'"),
        ({"hidden_size": 25, "head_dim": None}, r"hidden_size: .* a multiple of 4 \(num_attention_heads\), got 25"),
        ({"rope_scaling": {"rope_type": "longrope"}, "rope_parameters": None}, r"\(closest: yarn\), got 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "expected low_freq_factor of the RoPE scaling"),
        ({"model_type": "mistral", "layer_types": ["x"]}, "layer_types: expected sliding_attention alone in a model"),
        ({"model_type": "mistral", "layer_types": [FULL, SLIDING], "sliding_window": None}, "expected full_attention"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads: expected a valid integer, got '2'"),
        ({**GPT2, "tie_word_embeddings": False}, "tie_word_embeddings: expected True in a GPT-2, got False"),
        ({"model_type": "gpt2", "n_embd": 9, "n_layer": 2, "n_positions": 8, "n_head": 5}, "hidden_size: .* 5 .* 9"),
        ({**GPT2, "activation_function": "relu"}, "expected activation_function 'gelu_new', got 'relu'"),
        ({**GPT2, "scale_attn_weights": False}, "expected scale_attn_weights True, got False"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "expected scale_attn_by_inverse_layer_idx False, got True"),
        ({"model_type": "qwen2_moe"}, r"llama, gpt2, mistral, olmo2, qwen2, qwen3, smollm3 \(closest: qwen2\), got"),
        ({"pad_token_id": 37}, r"expected none, or a row of the embedding, 0 to 36 \(vocab_size\), got 37"),
        ({"pad_token_id": "a"}, "pad_token_id: expected a valid integer, got 'a'"),
        ({"partial_rotary_factor": 0.5}, "expected partial_rotary_factor 1.0, got 0.5"),
        *(({"num_hidden_layers": 2, "model_type": kind, **change}, message) for kind, change, message in (
            ("qwen3", {"layer_types": [FULL, "x"]}, "layer_types: expected 2 of full_attention and sliding_att"),
            ("qwen3", {"layer_types": [FULL, SLIDING]}, r"sliding_window: .* of tokens \(layer_types\), got"),
            ("qwen3", {"layer_types": [FULL]}, "layer_types: expected 2 of full_attention and sliding_attention .num"),
            ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers: .* 2 of 0 and 1 \(num_hidden_layers\), got \[1\]"),
            ("smollm3", {"no_rope_layers": [0], "use_sliding_window": True, "sliding_window": 3}, "2 of 0 and 1"),
            ("smollm3", {"no_rope_layers": 5}, "expected no_rope_layers to be a list, got 5"),
            ("smollm3", {"no_rope_layer_interval": 0}, "expected no_rope_layer_interval of at least 1, got 0"),
        )),
    ],
)
def test_what_it_is_not(change, message):
    with pytest.raises(CheckpointError, match=f"^here: .*{message}"):
        from_huggingface({**to_huggingface(CONFIG), **change}, "here")


@pytest.mark.parametrize("rope", [{}, {"rope_theta": 777.0}])
def test_two_spellings_that_contradict_each_other(rope, golden):
    """transformers takes ``rope_scaling`` and, within it, ``rope_theta``."""
    scaling = {"rope_type": "linear", "factor": 4.0}
    settings = {**to_huggingface(CONFIG), "rope_theta": 5e5, "rope_scaling": {**scaling, **rope}}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    settings = json.loads(json.dumps(settings))
    theirs = golden(f"two spellings {rope}", lambda: dict(transformers.LlamaConfig(**settings).rope_parameters))
    ours = from_huggingface(settings)
    assert {"rope_theta": ours.rope_theta, **(ours.rope_scaling or SCALING).settings()} == theirs


def test_a_context_of_yarn_that_is_null_is_the_model_s():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": None, "rope_theta": None}
    found = from_huggingface({**to_huggingface(CONFIG), "max_position_embeddings": 48, "rope_scaling": scaling})
    assert found.rope_scaling is not None and found.rope_scaling.original_max_position_embeddings == 48
    assert found.rope_theta == CONFIG.rope_theta


def test_weights_that_are_not_what_they_seem(tmp_path):
    """A head beside a tied embedding, an adapter, quantized weights, a pointer, and weights that kos does not read."""
    from safetensors.numpy import save_file

    tied = CONFIG.replace(tie_word_embeddings=True)
    tensors = {name: np.ones(shape, np.float32) for name, shape in tied.parameter_shapes().items()}
    model, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    config.write_text(json.dumps(to_huggingface(tied)))
    head = tensors[tied.embedding].copy()
    save_file({**tensors, "lm_head.weight": head}, model)
    weight_files(tmp_path, tied.parameter_shapes())
    for other in (head[:-1], np.concatenate([head[:-1], head[-1:] + 1])):
        save_file({**tensors, "lm_head.weight": other}, model)
        with pytest.raises(CheckpointError, match=r"expected lm_head.weight to be model.embed_tokens.weight \(tie"):
            weight_files(tmp_path, tied.parameter_shapes())
    for quantization, end in (({"quant_method": "gptq"}, r" \(quantized with gptq: take the model before.*"), (3, "")):
        config.write_text(json.dumps({**to_huggingface(tied), "quantization_config": quantization}))
        save_file({**tensors, "model.norm.qweight": head}, model)
        with pytest.raises(CheckpointError, match=f"got an unknown 'model.norm.qweight'{end}$"):
            weight_files(tmp_path, tied.parameter_shapes())
    model.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match="expected readable safetensors, got a pointer of Git LFS; run: git lfs"):
        weight_files(tmp_path, tied.parameter_shapes())
    for name, got in (("q4.gguf", "q4.gguf, which kos"), ("model-01.safetensors", "model-01.safetensors without")):
        model = model.rename(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"expected model.safetensors, got {got}"):
            check_weights(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="expected a whole model, got the adapter adapter_model.saf"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", ["[1]", "null", "{", "3", "", "[" * 100_000])
def test_a_config_that_is_none(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: expected (a Hugging Face config|model_type)"):
        read_config(tmp_path)


def test_sharded_weights(tmp_path):
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal(s).astype(np.float32) for n, s in CONFIG.parameter_shapes().items()}
    shards = [{}, {}]
    for i, (name, tensor) in enumerate(tensors.items()):
        shards[i % 2][name] = tensor
    shards[0]["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file(shard, tmp_path / file)
        weight_map |= dict.fromkeys(shard, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    weights = Parameters(CONFIG.parameter_shapes())
    weights.flat[:] = np.nan
    read_weights(tmp_path, weights)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(weights[name], tensor)
    index.write_text(json.dumps({"weight_map": {"x": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="expected file names"):
        read_weights(tmp_path, weights)
    for broken in ("[]", "{}", '{"weight_map": ["x"]}', '{"weight_map": {"x": 7}}', "{", "[" * 100_000):
        index.write_text(broken)
        with pytest.raises(CheckpointError, match="expected an index of safetensors"):
            read_weights(tmp_path, weights)
    save_file(tensors, tmp_path / "model.safetensors")  # which transformers takes, too
    weights.flat[:] = np.nan
    read_weights(tmp_path, weights)
    assert np.isfinite(weights.flat).all()
    index.unlink()
    save_file({**tensors, "model.norm.weight": np.ones(CONFIG.hidden_size, int)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.norm.weight: expected one of F64, F32, F16, BF16, got I64"):
        read_weights(tmp_path, weights)
    header = b'{"model.norm.weight": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"safetensors: model.norm.weight: expected one of .*, got F8_E4M3"):
        read_weights(tmp_path, weights)
    (tmp_path / "model.safetensors").unlink()
    index.write_text('{"weight_map": {"x": "nul\\u0000"}}')
    with pytest.raises(CheckpointError, match="expected readable safetensors, got"):
        read_weights(tmp_path, weights)
    index.unlink()
    with pytest.raises(CheckpointError, match="expected readable safetensors"):
        read_weights(tmp_path, weights)
    with pytest.raises(CheckpointError, match=r"expected a Hugging Face config\.json"):
        read_config(tmp_path)
