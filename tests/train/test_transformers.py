"""Files of Hugging Face transformers' own LLaMA and GPT-2 both ways, and its tokenizers and texts beside ours."""


import numpy as np
import pytest

import kos.train
from kos.train.checkpoint import huggingface
from kos.train.config.flags import parse
from kos.train.model.gpt2 import GPT2Config
from kos.train.model.llama import LlamaConfig
from kos.train.parallel.mesh import Layout
from tests.train.models import random_weights
from tests.train.of_transformers import needs_transformers, theirs_of, torch, transformers
from tests.train.runs import run
from tests.train.sharded import save_in, whole_state
from tests.train.tokenizer_files import byte_level_bpe

pytestmark = needs_transformers

def assert_near(got, expected, limit, name):
    error = np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error < limit, f"{name}: {error:.2e}, expected at most {limit:.0e}"


GPT2 = GPT2Config(83, 64, 200, 3, 4, 4, 16, 130, tie_word_embeddings=True)


@pytest.mark.parametrize("layout", [Layout(dp=3), Layout(tp=2, pp=2), Layout(dp=2, tp=4), Layout()], ids=str)
def test_what_ranks_of_any_layout_save_is_read_by_them(tmp_path, layout):
    """Of a LLaMA, and of a GPT-2 by one rank."""
    config = LlamaConfig(80, 64, 88, 3, 8, 4, 8, tie_word_embeddings=layout.pp > 1) if layout.ranks > 1 else GPT2
    whole = whole_state(config)
    path = save_in(layout, tmp_path, 1, config, whole, zero=layout.ranks > 1)
    assert (path / huggingface.INDEX).exists() == (layout.ranks > 1)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, parameter in theirs.named_parameters():
        assert np.array_equal(parameter.detach().float().numpy(), huggingface.as_saved(name, whole[name])), name


# Tokenizers

DOCUMENTS = [
    "the ring of one tree\n",
    "two rings, naïve ones",
    "a <|end|> that is text",
    "def f(x):\n\treturn x\n",
] * 10


@pytest.fixture(params=[["<|begin|>"], ["<|end|>"], ["<|begin|>", "<|end|>"], []], ids=["bos", "eos", "both", "none"])
def own_tokenizer(request, tmp_path):
    """A folder with a byte-level BPE trained here, whose post-processor adds BOS, EOS, both or none."""
    bpe = byte_level_bpe(DOCUMENTS, 300, request.param)
    bpe.enable_truncation(7)  # which transformers ignores unless it is asked for
    folder = tmp_path / "own"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|begin|>", eos_token="<|end|>"
    ).save_pretrained(folder)
    return folder


def test_text_is_encoded_as_transformers_encodes_it(own_tokenizer, tmp_path, rng):
    """Special tokens that are added, or spelled out; token numbers, logits and the likeliest text.

    transformers ends a text at the tokens of generation_config.json (here 2, its default for a LLaMA), and kos at them
    and at the tokenizer's.
    """
    config = LlamaConfig(300, 32, 48, 2, 4, 2, 8, max_position_embeddings=64, tie_word_embeddings=True)
    theirs = theirs_of(config, random_weights(config, rng, spread=0.2))
    theirs.save_pretrained(own_tokenizer)
    tokenizer = transformers.AutoTokenizer.from_pretrained(own_tokenizer)
    ours = kos.train.load(own_tokenizer)
    for text in ("the ring of one tree", "<|begin|>the<|end|> ring", "\n", "né\r\n  two"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert ours.tokenizer.encode(text).tolist() == ids[0].tolist()
        with torch.no_grad():
            assert_near(ours.logits(text), theirs(ids).logits[0].numpy(), 1e-5, text)
    assert ours.tokenizer.encode("").tolist() == tokenizer("").input_ids
    prompt = "the ring"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    ids = ids[:, : ids.shape[1] - (ids[0, -1].item() == tokenizer.eos_token_id)]  # a prompt goes on
    ends = [tokenizer.eos_token_id, theirs.generation_config.eos_token_id]
    assert ours.ends == tuple(ends) and None not in ends
    with torch.no_grad():
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=1,
            eos_token_id=ends,
        )  # fmt: skip
    new = [token for token in out[0, ids.shape[1] :].tolist() if token not in ends]
    assert ours.generate(prompt, 9, temperature=0) == prompt + tokenizer.decode(new)


def test_fine_tuning_a_model_of_transformers_and_loading_it_there(tmp_path, monkeypatch):
    """kos trains a chat model that transformers saved, and transformers loads the result."""
    library = pytest.importorskip("tokenizers")
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer, bpe.decoder = library.pre_tokenizers.ByteLevel(), library.decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|pad|>", "<|user|>"]
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([], library.trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>", model_max_length=77,
        additional_special_tokens=["<|user|>"],
    )  # fmt: skip
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = transformers.LlamaConfig(
        vocab_size=264, num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=1,
        pad_token_id=2, **shape,
    )  # fmt: skip
    start = transformers.LlamaForCausalLM(settings)
    start.generation_config.update(eos_token_id=[1, 3], temperature=0.6, do_sample=True)
    for each in (start, tokenizer):
        each.save_pretrained(tmp_path / "theirs")
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    monkeypatch.chdir(tmp_path)
    flags = "--init-from theirs --data words.txt --out run --steps 3 --batch-size 4 --seq-len 32 --sample-tokens 0"
    run(parse(flags.split()), 2)

    ours = "run/checkpoints/step-3"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    again = transformers.AutoTokenizer.from_pretrained(ours)
    assert again.get_vocab() == tokenizer.get_vocab() and again.model_max_length == 77
    assert (again.bos_token, again.eos_token, again.pad_token) == ("<|begin|>", "<|end|>", "<|pad|>")
    chat = [{"role": "user", "content": "the fox"}]
    said = again.apply_chat_template(chat, tokenize=False)
    assert said == "<|user|>the fox<|end|>" == tokenizer.apply_chat_template(chat, tokenize=False)
    assert again(said).input_ids == tokenizer(said).input_ids
    assert model.generation_config.eos_token_id == [1, 3] and model.generation_config.temperature == 0.6
    assert model.config.pad_token_id == 2 and model.config.eos_token_id == 1

    tokens = np.array(again("the quick brown fox").input_ids)
    theirs = model(torch.tensor(tokens[None])).logits[0].detach().numpy()
    np.testing.assert_allclose(kos.train.load(ours).logits(tokens), theirs, rtol=1e-4, atol=1e-4)
    before = start(torch.tensor(tokens[None]), labels=torch.tensor(tokens[None])).loss
    assert model(torch.tensor(tokens[None]), labels=torch.tensor(tokens[None])).loss < before
    model.save_pretrained(tmp_path / "again")
    again.save_pretrained(tmp_path / "again")
    np.testing.assert_array_equal(kos.train.load("again").logits(tokens), kos.train.load(ours).logits(tokens))
