"""Generation with a KV cache on CPUs: the tokens of a model without one, in any batch; limits, ends and streams."""

from typing import Any

import numpy as np
import pytest

from kos.errors import InvalidArgument
from kos.train.data.tokenizers import ByteTokenizer, NumberTokenizer
from kos.train.generate import Decoder, Sampling, Uncached, continue_texts
from kos.train.model.families import FAMILIES
from kos.train.model.model import Model
from kos.train.ops import numpy as numpy_ops
from kos.train.trained import TrainedModel
from tests.train.generate_cases import logits_of
from tests.train.generation import CASES, GREEDY, PROMPTS, decoder, random_weights, tokens_of

each_case = pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))


def test_every_family_has_a_case():
    assert {config.model_type for config in CASES.values()} == {*FAMILIES}


@each_case
def test_tokens_are_those_without_a_cache(config):
    """Prompts of several lengths at once, also beyond the context, from whose last half a text goes on."""
    config = config.replace(max_position_embeddings=24)
    weights, model = random_weights(config), Model(config, numpy_ops)
    plain = Uncached(lambda tokens: model.next_logits(weights, tokens))
    expected = tokens_of(plain, config, PROMPTS, 30, GREEDY)
    assert tokens_of(decoder(config, weights, 4), config, PROMPTS, 30, GREEDY) == expected
    assert all(len(set(tokens)) > 1 for tokens in expected)


@each_case
def test_a_sequence_has_the_same_bits_in_any_batch(config):
    weights = random_weights(config)

    def logits(*prompts):
        return logits_of(config, numpy_ops, weights, prompts, 9)

    together = logits(*PROMPTS)
    for prompt, of_prompt in zip(PROMPTS, together, strict=True):
        np.testing.assert_array_equal(logits(prompt)[0], of_prompt)
    np.testing.assert_array_equal(logits(*PROMPTS[::-1])[::-1][0], together[0])


def test_sampled_text_is_that_of_the_prompt_alone():
    config = CASES["llama"]
    model = TrainedModel(config, random_weights(config), NumberTokenizer(41), ends=[7])
    prompts = ["3 1 4", "", "5 9 2 6", "3 1 4"]
    texts = model.generate(prompts, 20, seed=3, top_p=0.9, min_p=0.01, repetition_penalty=1.3)
    assert texts == [model.generate(p, 20, seed=3, top_p=0.9, min_p=0.01, repetition_penalty=1.3) for p in prompts]
    assert texts[0] == texts[3] != texts[1] and texts != model.generate(prompts, 20, seed=4)
    assert model.generate([], 5) == []


def test_frequencies_are_those_of_the_limits():
    """Of 4000 draws, each token's number is within four standard deviations of what its odds give."""
    logits = np.array([1.2, -0.5, 3.0, 2.0, 0.0, 2.5, -4.0, 1.0], np.float32)
    before, penalty, temperature, rng = [2, 1, 2], 2.0, 1.5, np.random.default_rng(2)
    scores = logits.astype(float)
    scores[2], scores[1] = scores[2] / penalty, scores[1] * penalty
    odds = np.exp(scores / temperature)
    odds /= odds.sum()
    ranked = np.argsort(-odds)
    least = np.searchsorted(np.cumsum(odds[ranked]), 0.8)
    likely = np.flatnonzero(odds >= 0.4 * odds.max())
    kept = {"top_p": {*ranked[: least + 1]}, "min_p": {*likely}, "top_k": {*ranked[:3]}}
    assert all(2 < len(each) < 8 for each in kept.values())
    for name, value in {"top_p": 0.8, "min_p": 0.4, "top_k": 3}.items():
        how = Sampling(penalty, temperature, **{"top_k": 0, name: value})
        drawn = np.bincount([how.draw(logits, before, rng) for _ in range(4000)], minlength=8)
        among = np.where(np.isin(range(8), [*kept[name]]), odds, 0)
        expected = 4000 * among / among.sum()
        sigma = np.sqrt(expected * (1 - expected / 4000))
        assert np.all(np.abs(drawn - expected) <= 4 * sigma), (name, drawn, expected)
    assert Sampling(penalty, 0).draw(logits, before, rng) == 5 and Sampling(1.0, 0).draw(logits, before, rng) == 2


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("top_p", 0, "more than 0, at most 1, got 0"), ("top_p", 1.1, "more than 0, at most 1, got 1.1"),
     ("min_p", -0.1, "0 to 1, got -0.1"), ("min_p", float("nan"), "0 to 1, got nan"), ("seed", -1, "0 or more, got -1"),
     ("temperature", -1, "0 or more, got -1"), ("top_k", -1, "0 or more, got -1"),
     ("repetition_penalty", 0, "more than 0, got 0"), ("tokens", -1, "0 or more, got -1"),
     ("stop", "ab", "a list of texts that are not empty, got 'ab'"), ("stop", [""], r"not empty, got \[''\]")],
)  # fmt: skip
def test_settings_out_of_range(name, value, expected):
    config = CASES["llama"]
    model = TrainedModel(config, random_weights(config), NumberTokenizer(41))
    with pytest.raises(InvalidArgument, match=f"{name}: expected .*{expected}"):
        model.stream(["1"], **{name: value})


def test_a_prompt_longer_than_the_model():
    config = CASES["llama"]
    model = TrainedModel(config, random_weights(config), NumberTokenizer(41))
    assert model.generate("1 " * 48, 1).startswith("1 1 ")
    with pytest.raises(InvalidArgument, match="prompt: expected at most 48 tokens, the model's context, got 49"):
        model.generate("1 " * 49, 1)


class Says:
    """A source that says the same bytes after each prompt, then zeros; nothing is computed."""

    def __init__(self, text: bytes) -> None:
        self.tokens, self.at, self.steps = [*text, *bytes(99)], dict[int, int](), 0

    def prefill(self, index: int, tokens: Any) -> np.ndarray:
        self.at[index] = 0
        return np.eye(256)[self.tokens[0]]

    def step(self, tokens: Any) -> dict[int, np.ndarray]:
        self.steps += 1
        self.at.update({index: self.at[index] + 1 for index in tokens})
        return {index: np.eye(256)[self.tokens[self.at[index]]] for index in tokens}


def pieces(text: str, stop: Any, count: int = 99, ends: Any = (0,)) -> tuple[list[str], Says]:
    source = Says(text.encode())
    found = continue_texts(source, 500, ByteTokenizer(), [[65]], count, GREEDY, ends=ends, stop=stop)
    return [piece for _, piece in found], source


def test_a_text_streams_in_whole_characters_and_withholds_what_may_be_a_stop():
    assert pieces("aé漢z", [])[0] == ["a", "é", "漢", "z"]
    assert pieces("one STOP two", ["STOP", "xx"])[0] == ["o", "n", "e", " "]
    assert pieces("a STSTOP b", ["STOP"])[0] == ["a", " ", "ST"]
    assert pieces("a STAY", ["STOP"])[0] == ["a", " ", "STA", "Y"]
    assert "".join(pieces("ends ST", ["STOP"])[0]) == "ends ST"
    assert "".join(pieces("one NÉ two", ["NÉ"])[0]) == "one "
    assert pieces("aé", [], 2)[0] == ["a", "\ufffd"]
    assert pieces("ab", [], 0)[0] == []


def test_nothing_is_computed_after_the_end():
    for stop, ends, steps in (([], (0,), 6), (["d"], (), 3), ([], (ord("c"),), 2)):
        _, source = pieces("abcdef", stop, 50, ends)
        assert source.steps == steps


def test_sequences_end_on_their_own():
    config = CASES["llama"]
    source, weights = decoder(config, random_weights(config), 4), random_weights(config)
    whole = tokens_of(source, config, PROMPTS, 30, GREEDY)
    end = whole[2][5]
    found = tokens_of(decoder(config, weights, 4), config, PROMPTS, 30, GREEDY, ends=[end])
    assert found == [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in whole]
    assert len(found[2]) <= 5 and len({len(tokens) for tokens in found}) > 1


def test_a_sequence_that_ended_with_a_full_cache_reads_nothing_behind_it():
    config = CASES["llama"]
    source = Decoder(config, numpy_ops, random_weights(config), 2, 4)
    source.prefill(0, [1, 2, 3, 4])
    source.prefill(1, [1])
    source.step({1: 2})
    assert source.inputs[1].tolist() == [3, 1]


def test_a_context_of_one_token():
    config = CASES["llama"].replace(max_position_embeddings=1)
    weights, model = random_weights(config), Model(config, numpy_ops)
    plain = Uncached(lambda tokens: model.next_logits(weights, tokens))
    expected = tokens_of(plain, config, [[3], [4, 5]], 6, GREEDY)
    assert tokens_of(decoder(config, weights, 2), config, [[3], [4, 5]], 6, GREEDY) == expected
