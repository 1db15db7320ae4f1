"""Checkpoints and questions for tests of evaluation: the same numbers on every machine."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from kos.train.checkpoint import huggingface, saving
from kos.train.data import HEADER_BYTES
from kos.train.data.tokenizers import ByteTokenizer, Tokenizer
from kos.train.model.families import FAMILIES
from kos.train.model.huggingface import to_huggingface
from kos.train.model.llama import LlamaConfig
from tests.train.models import small

WORDS = ("ring", "tree", "one shot", "all reduce", "barrier", "rank", "été")


def write_model(folder: Path, tokenizer: Tokenizer | None = None, family: str = "llama", **changes: Any) -> LlamaConfig:
    """A Hugging Face folder with weights from a fixed seed, so large that likelihoods differ much."""
    tokenizer = tokenizer or ByteTokenizer()
    shape = {"hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64}
    settings = dict(small(**{**shape, "vocab_size": tokenizer.vocab_size, **changes}))
    config = FAMILIES[family](**settings)
    rng, shapes = np.random.default_rng(7), config.parameter_shapes()
    weights = {name: rng.normal(len(shape) == 1, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    saved = {name: huggingface.shape_as_saved(name, shape) for name, shape in shapes.items()}
    tensors = (huggingface.as_saved(name, array) for name, array in weights.items())
    saving.write_tensors(folder / "model.safetensors", saved, tensors, "float32")
    about = to_huggingface(config) | {"bos_token_id": None, "eos_token_id": None}
    for name, content in {"config.json": about, **tokenizer.files()}.items():
        (folder / name).write_text(json.dumps(content))
    return config


def questions(count: int = 24) -> list[dict[str, Any]]:
    """Questions of the plain form. Some contexts are longer than 64 bytes, some end with spaces, one is empty."""
    rng = np.random.default_rng(1)

    def words(most: int) -> str:
        return " ".join(rng.choice(WORDS, rng.integers(1, most + 1)))

    made = [{"ctx": words(12), "endings": [words(3) for _ in range(int(rng.integers(2, 6)))]} for _ in range(count)]
    for number, question in enumerate(made):
        question["ctx"] += " " * (number % 5 == 1)
        question["label"] = number % len(question["endings"])
    return made


def of_hellaswag(question: dict[str, Any]) -> dict[str, Any]:
    """The same with HellaSwag's fields, markup included, and a label that is text."""
    first, _, second = question["ctx"].partition(" ")
    endings = [f"{ending} [substeps]  [title] end" for ending in question["endings"]]
    fields = {"activity_label": "Making [ring]", "ctx_a": first, "ctx_b": second, "ctx": f"{first} {second}"}
    return fields | {"endings": endings, "label": str(question["label"]), "ind": 3}


def of_arc(question: dict[str, Any]) -> dict[str, Any]:
    names = "ABCDE"[: len(question["endings"])]
    choices = {"text": question["endings"], "label": [*names]}
    return {"id": "x", "question": question["ctx"], "choices": choices, "answerKey": names[question["label"]]}


FORMS = {"plain": lambda question: question, "hellaswag": of_hellaswag, "arc": of_arc}


def write_questions(path: Path, form: str = "plain") -> Path:
    path.write_text("".join(json.dumps(FORMS[form](question)) + "\n" for question in questions()))
    return path


def write_llmc(path: Path, made: list[tuple[list[int], list[list[int]], int]]) -> Path:
    """An evaluation file of llm.c from contexts, endings and labels."""
    words: list[int] = []
    for number, (context, endings, label) in enumerate(made):
        rest = [number, label, len(endings), len(context), *context]
        rest += [word for ending in endings for word in (len(ending), *ending)]
        words += [65_535, 2 * (2 + len(rest)), *rest]
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:4] = 20240522, 1, len(made), 2 * len(words)
    path.write_bytes(header.tobytes() + np.array(words, "<u2").tobytes())
    return path
