"""The accuracies of ``kos eval`` are those of lm-evaluation-harness, and its losses those of transformers.

Both are recorded (``tests.goldens``), for the model and the questions of ``evaluation_cases``.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.packages import Package
from tests.train.evaluation_cases import FORMS, questions, write_model, write_questions
from tests.train.of_transformers import torch, transformers
from tests.train.test_evaluate import ACCURACIES, LOSSES, check, rows_of

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


def of_the_harness(folder: Path) -> dict[str, list[float]]:
    """acc and acc_norm of each form."""
    for form in FORMS:
        write_task(folder, form)
    manager = managers.TaskManager(include_path=str(folder), include_defaults=False)
    names = [f"kos_{form}" for form in FORMS]
    found = harness.simple_evaluate(model_of(folder / "model"), tasks=names, task_manager=manager, bootstrap_iters=0)
    return {form: [found["results"][f"kos_{form}"][f"{name},none"] for name in ("acc", "acc_norm")] for form in FORMS}


def test_accuracies_are_those_of_the_harness(tmp_path, monkeypatch, golden):
    """Also those that the other tests expect."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    theirs = golden("accuracies", lambda: of_the_harness(tmp_path))
    assert theirs == {form: [each / 24 for each in ACCURACIES[form]] for form in FORMS}
    for form in FORMS:
        write_questions(tmp_path / f"{form}.jsonl", form)
    (tmp_path / "text.txt").write_text(text := " ".join(each["ctx"] for each in questions()))
    losses = golden("losses", lambda: {str(length): loss_of(tmp_path / "model", text, length) for length in LOSSES})
    for length, loss in LOSSES.items():
        assert abs(losses[str(length)] - loss) < 1e-9
    check(rows_of(tmp_path))


def loss_of(folder: Path, text: str, length: int) -> float:
    """The mean over all tokens but the first, each in its window of ``length`` tokens, in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    ids, losses = torch.tensor(list(text.encode())), list[float]()
    for begin in range(0, len(ids) - 1, length):
        window = ids[begin : begin + length + 1]
        with torch.no_grad():
            odds = model(window[None, :-1]).logits[0].log_softmax(-1)
        losses += (-odds[range(len(window) - 1), window[1:]]).tolist()
    return sum(losses) / len(losses)
