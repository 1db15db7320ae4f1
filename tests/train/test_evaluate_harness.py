"""The accuracies of ``kos eval`` are those of lm-evaluation-harness, on the same model and questions."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.packages import Package, needs
from tests.train.evaluation_cases import FORMS, write_model, write_questions
from tests.train.of_transformers import torch, transformers
from tests.train.test_evaluate import ACCURACIES, rows_of

pytestmark = needs("lm_eval", "transformers", "torch")
harness, library, managers = Package("lm_eval"), Package("lm_eval.api.model"), Package("lm_eval.tasks")

TASKS: dict[str, dict[str, Any]] = {
    "plain": {
        "doc_to_text": "{{ctx}}", "doc_to_choice": "{{endings}}", "doc_to_target": "label", "test_split": "test",
        "output_type": "multiple_choice", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "hellaswag": {"include": "hellaswag/hellaswag.yaml"},
    "arc": {"include": "arc/arc_easy.yaml"},
}  # fmt: skip
"""The tasks of each form of questions: those of the harness, and one for the plain form."""
CONTEXT = 64


def model_of(folder: Path) -> Any:
    """The model of a folder for the harness, by transformers in float32.  A token is a byte."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    class OfBytes(library.TemplateLM):
        eot_token_id = 0

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            return list(string.encode())

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            found = []
            for _, context, ending in requests:
                ids = torch.tensor([*context, *ending][-CONTEXT - 1 :])
                with torch.no_grad():
                    odds = model(ids[None, :-1]).logits[0].log_softmax(-1)
                at = range(len(ids) - 1 - len(ending), len(ids) - 1)
                found.append((float(sum(odds[place, ids[place + 1]] for place in at)), False))
            return found

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> Any:
            raise NotImplementedError

        def generate_until(self, requests: Any, **_: Any) -> Any:
            raise NotImplementedError

    return OfBytes()


def write_task(folder: Path, form: str) -> None:
    """A task of the harness on the questions of a form."""
    files = dict.fromkeys(("train", "validation", "test"), str(write_questions(folder / f"{form}.jsonl", form)))
    task = TASKS[form] | {"task": f"kos_{form}", "dataset_path": "json", "dataset_name": None}
    if "include" in task:
        task["include"] = str(Path(find_spec("lm_eval").origin).parent / "tasks" / task["include"])
    (folder / f"{form}.yaml").write_text(json.dumps(task | {"dataset_kwargs": {"data_files": files}}))


def test_accuracies_are_those_of_the_harness(tmp_path, monkeypatch):
    """Also those that the other tests expect, which were recorded with this version."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    for form in FORMS:
        write_task(tmp_path, form)
    manager = managers.TaskManager(include_path=str(tmp_path), include_defaults=False)
    names = [f"kos_{form}" for form in FORMS]
    found = harness.simple_evaluate(model_of(tmp_path / "model"), tasks=names, task_manager=manager, bootstrap_iters=0)
    rows = rows_of(tmp_path, data=())
    for form, row in zip(FORMS, rows, strict=True):
        theirs = [found["results"][f"kos_{form}"][f"{name},none"] for name in ("acc", "acc_norm")]
        assert [row["acc"], row["acc_norm"]] == pytest.approx(theirs), form
        assert [round(24 * each) for each in theirs] == [*ACCURACIES[form]], form
