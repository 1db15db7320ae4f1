"""Folders that ranks of any layout save, and a chat model that kos fine-tunes, in Hugging Face transformers."""

import numpy as np
import pytest

import kos.train
from kos.train.checkpoint import huggingface
from kos.train.config.flags import parse
from kos.train.model.gpt2 import GPT2Config
from kos.train.model.llama import LlamaConfig
from kos.train.parallel.mesh import Layout
from tests.train.of_transformers import needs_transformers, torch, transformers
from tests.train.runs import run
from tests.train.sharded import save_in, whole_state

pytestmark = needs_transformers
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
