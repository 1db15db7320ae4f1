"""lm-evaluation-harness beside ``kos eval``: the same model, the same local files of questions, the same accuracies."""

import json
import os
from typing import Any

import pytest

from kos.testing import spawn
from kos.train import evaluator
from kos.train.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from tests.train.evaluation_cases import FORMS, WORDS, write_model, write_questions
from tests.train.tokenizer_files import byte_level_bpe

REASON = "the reference needs lm-evaluation-harness (pip install 'lm-eval[hf]' transformers torch)"
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before it is imported
lm_eval = pytest.importorskip("lm_eval", reason=REASON)
huggingface = pytest.importorskip("lm_eval.models.huggingface", reason=REASON, exc_type=ImportError)

pytestmark = pytest.mark.slow

TASKS: dict[str, dict[str, Any]] = {
    "plain": {"doc_to_text": "{{ctx}}", "doc_to_choice": "{{endings}}", "doc_to_target": "label"},
    "hellaswag": {"doc_to_text": "{{query}}", "doc_to_choice": "choices", "doc_to_target": "{{label}}"},
    "arc": {
        "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_choice": "{{choices.text}}",
        "doc_to_target": "{{choices.label.index(answerKey)}}",
    },
}  # fmt: skip
"""As its tasks hellaswag and arc_easy say."""


def bpe() -> Tokenizer:
    made = byte_level_bpe([" ".join(WORDS) + "\nQuestion: Answer:"] * 20, 300, ["<|begin|>"])
    return HuggingFaceTokenizer(json.loads(made.to_str()), "bpe", bos="<|begin|>", eos="<|end|>")


@pytest.mark.parametrize("make", [ByteTokenizer, bpe])
def test_accuracies(make, tmp_path, monkeypatch):
    import datasets
    from lm_eval.tasks.hellaswag.utils import process_docs

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer = make()
    write_model(tmp_path / "model", tokenizer)
    start = {} if tokenizer.bos is not None else {"prefix_token_id": tokenizer.start}
    model = huggingface.HFLM(str(tmp_path / "model"), device="cpu", dtype="float32", batch_size=4, **start)
    paths = {form: write_questions(tmp_path / f"{form}.jsonl", form) for form in FORMS}
    tasks = [
        {"task": form, "dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": str(path)}},
         "validation_split": "validation", "output_type": "multiple_choice",
         "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}], **TASKS[form],
         **({"process_docs": process_docs} if form == "hellaswag" else {})}
        for form, path in paths.items()
    ]  # fmt: skip
    theirs = lm_eval.simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0)["results"]
    rows = spawn(
        lambda comm: evaluator.evaluate(tmp_path / "model", [], [*paths.values()], {}, comm), 1, timeout=100
    )[0]  # fmt: skip
    for form, row in zip(paths, rows, strict=True):
        expected = theirs[form]["acc,none"], theirs[form]["acc_norm,none"]
        assert (row["acc"], row["acc_norm"]) == pytest.approx(expected), form
