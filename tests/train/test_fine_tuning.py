"""Ten steps on packed chats with masked turns, beside transformers and torch's AdamW, whose losses are recorded.

kos packs the chats and masks them. The reference has transformers' tokens and masks of each chat alone, and the mean
of the losses over the counted tokens of the chats that are in a batch.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.train.config.flags import parse
from kos.train.data.batches import load_data
from kos.train.model.families import MistralConfig, Qwen2Config, Qwen3Config
from kos.train.model.llama import LlamaConfig
from tests.train.chat_templates import CHATML, SPECIAL
from tests.train.models import random_weights, save_model
from tests.train.of_transformers import precise, torch, transformers
from tests.train.runs import run
from tests.train.test_loss_masks import write_lines
from tests.train.tokenizer_files import byte_level_bpe

WORDS = ["ring", "tree", "rank", "barrier", "reduce", "gather", "hub", "wait"]
SHAPE: dict[str, Any] = {
    "vocab_size": 340, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**{**SHAPE, "head_dim": 16}, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=24),
}
STEPS, LR, WARMUP, DECAY, CLIP = 10, 1e-3, 3, 0.1, 1.0
FLAGS = [
    "--steps=10", "--lr=1e-3", "--warmup-steps=3", "--schedule=constant", "--weight-decay=0.1", "--grad-clip=1",
    "--seq-len=128", "--batch-size=4", "--micro-batch-size=1", "--eval-batches=1", "--sample-tokens=0", "--device=cpu",
]  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """A random model of a family, its tokenizer with a chat template, and chats of up to 128 tokens."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp(request.param)
    bpe = byte_level_bpe([" ".join(WORDS) * 9], 300, [])
    bpe.add_special_tokens(SPECIAL)
    config = FAMILIES[request.param]
    save_model(folder, config, random_weights(config, np.random.default_rng(1)))
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHATML)

    def message(role):
        return {"role": role, "content": " ".join(rng.choice(WORDS, rng.integers(1, 9)))}

    def chat():
        turns = [message(role) for _ in range(rng.integers(1, 4)) for role in ("user", "assistant")]
        return [message("system")] * int(rng.integers(2)) + turns

    write_lines(folder / "chats.jsonl", [{"messages": chat()} for _ in range(80)])
    return folder


def arguments(folder: Path) -> list[str]:
    return [f"--init-from={folder}", f"--data={folder / 'chats.jsonl'}", *FLAGS]


def losses_of_transformers(folder: Path, config: LlamaConfig) -> list[list[float]]:
    """The losses of the steps, and the norms of their gradients before clipping."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    masks = dict[tuple[int, ...], list[int]]()
    for line in (folder / "chats.jsonl").read_text().splitlines():
        marked = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        masks[tuple(marked["input_ids"])] = marked["assistant_masks"]
    data = load_data(parse(arguments(folder)))
    model = precise(config, random_weights(config, np.random.default_rng(1)))
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": DECAY},
        {"params": [weight for weight in weights if weight.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer, losses, norms = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8), [], []
    for step in range(STEPS):
        batch, chats = data.batch(step), list[tuple[int, ...]]()
        assert batch.document_starts is not None
        for tokens, starts in zip(batch.tokens, batch.document_starts, strict=True):
            every = [tuple(tokens[starts == start].tolist()) for start in np.unique(starts)]
            chats += [each for each in every if any(each)]  # else padding
        counts = sum(sum(masks[chat][1:]) for chat in chats)
        total = 0.0
        optimizer.zero_grad()
        for chat in chats:
            ids = torch.tensor([chat])
            labels = torch.where(torch.tensor([masks[chat]]) > 0, ids, -100)
            logits = model(input_ids=ids).logits
            loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum") / counts
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights, CLIP)))
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / WARMUP)
        optimizer.step()
    return [losses, norms]


def test_ten_steps_are_those_of_transformers(folder, tmp_path, golden, request):
    name = request.node.callspec.params["folder"]
    losses, norms = golden(name, lambda: losses_of_transformers(folder, FAMILIES[name]), rtol=1e-7)
    rows = run(parse([*arguments(folder), f"--out={tmp_path}"]))
    assert losses[0] - losses[-1] > 0.02 and max(norms) > CLIP, "it learns, and gradients are clipped"
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-5)
    np.testing.assert_allclose([row["grad_norm"] for row in rows], norms, rtol=1e-4)
