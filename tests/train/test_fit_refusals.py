"""What ``kos.train.fit`` refuses: wrong batches, losses and callbacks, on all ranks and by name."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from kos.comm.communicator import Communicator
from kos.errors import ConfigError, DataError, InvalidArgument, KosError
from kos.testing import spawn
from kos.train import Batch, Callback, TrainConfig, fit
from tests.train.fits import ROWS, SHAPE, TOKENS, batch_of, batches_of, config_of, cross_entropy, on_ranks


def changed(**fields: Any) -> list[Batch]:
    return [batch_of(0), batch_of(1)._replace(**fields)]


def refused_on_both(
    kind: type[KosError], said: str, config: TrainConfig, batches: Callable[[int], Any], **program: Any
) -> None:
    errors = list[str]()

    def run(comm: Communicator) -> None:
        with pytest.raises(kind) as error:
            fit(config, comm, batches=batches(comm.rank), verbose=False, **program)
        errors.append(str(error.value))

    spawn(run, 2, timeout=60)
    assert all(said in error for error in errors) and len(errors) == 2, errors


TOO_MANY = np.zeros((ROWS, TOKENS + 1), np.int32)
REFUSED_BATCHES: dict[str, tuple[Iterable[Any], str]] = {
    "no batch": ([{"tokens": 1}], "a kos.train.Batch with tokens and targets, got {'tokens': 1}"),
    "no targets": ([Batch(TOO_MANY[:, 1:])], "with tokens and targets, got Batch(tokens=int32 (8, 16))"),
    "shape": (changed(tokens=TOO_MANY), "tokens of a batch: expected integers (8, 16), got int32 (8, 17)"),
    "dtype": (changed(targets=np.zeros((8, 16))), "targets of a batch: expected integers (8, 16), got float64 (8, 16)"),
    "token": (changed(tokens=TOO_MANY[:, 1:] + 32), "tokens of a batch: expected 0 to 31, got 32 to 32"),
    "target": (changed(targets=TOO_MANY[:, 1:] - 2), "targets of a batch: expected -1 to 31, got -2 to -2"),
    "another field": (changed(weights=np.ones((8, 16))), "batch: expected ('tokens', 'targets'), the fields"),
    "weights": ([batch_of(0, weights=np.ones(8))], "weights of a batch: expected numbers (8, 16), got float64 (8,)"),
    "earlier": ([batch_of(0, document_starts=np.array([[0, 1, *[0] * 14]] * 8))], "document start of token 2 of a seq"),
    "starts": ([batch_of(0, document_starts=TOO_MANY[:, 1:] + 1)], "document start of token 0 of a sequence: expected"),
    "none": ([], "batches: expected at least one, got none"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED_BATCHES)
def test_wrong_batches_are_refused_on_all_ranks(what, tmp_path):
    """Those of one rank too; and nothing of that step is trained."""
    batches, said = REFUSED_BATCHES[what]
    refused_on_both(DataError, said, config_of(tmp_path, eval_every=0), lambda rank: batches)


@pytest.mark.parametrize(("rows", "layout"), [("all", {}), ("own", {"pp": 2})])
@pytest.mark.parametrize("other", ["another", "none"])
def test_ranks_with_other_batches_raise(other, rows, layout, tmp_path):
    def batches(rank):
        return [batch_of(0), *([batch_of(1 + rank)] if other == "another" or rank == 0 else [])]

    got = "other batches" if other == "another" else "none"
    said = f"batch of step 2: expected the same on both (rows='{rows}'), got batches on rank 0 and {got} on rank 1"
    refused_on_both(DataError, said, config_of(tmp_path, **layout), batches, rows=rows)


BATCHES: dict[str, Any] = {"batches": [batch_of(0)]}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "batches": ({}, {"batches": 3}, InvalidArgument, "batches: expected an iterable of Batch, got int"),
    "rows": ({}, {**BATCHES, "rows": "some"}, InvalidArgument, "rows: expected 'all' or 'own', got 'some'"),
    "loss": ({}, {**BATCHES, "loss": "mse"}, InvalidArgument, "loss: expected a function or a CudaLoss, got 'mse'"),
    "callback": ({}, {**BATCHES, "callbacks": [Callback]}, InvalidArgument, "[<class 'kos.train.program.Callback'>"),
    "val_batches": ({}, {**BATCHES, "val_batches": iter([])}, InvalidArgument,
                    "val_batches: expected a list, or what else can be iterated again, got <list_iterator"),
    "no val batches": ({}, {**BATCHES, "val_batches": []}, DataError, "a target that the loss counts, got none"),
    "data": ({"data": "text.txt"}, BATCHES, ConfigError, "--data: expected stdlib with batches of one's own"),
    "resume": ({"resume": "auto"}, BATCHES, ConfigError, "--resume: expected batches with state_dict and load_state_d"),
    "elastic": ({"elastic": "1"}, BATCHES, ConfigError, "--elastic: expected batches with state_dict and load_state_d"),
    "prompt": ({"sample_tokens": 3, "prompt": "Hello"}, BATCHES, DataError, "expected token numbers below 32"),
    "epochs": ({"epochs": 2, "steps": 1}, BATCHES, ConfigError, "epochs"),
    "fit": ({"fit": "whole"}, BATCHES, ConfigError, "--fit: expected none with batches of one's own, got whole"),
    "best": ({"keep_best": "val_loss"}, BATCHES, ConfigError, "--keep-best: expected none with batches of one's own"),
    "patience": ({"patience": 1}, BATCHES, ConfigError, "--patience: expected none with batches of one's own, got val"),
    "eval_data": ({"eval_data": ["a=x"]}, BATCHES, ConfigError, "--eval-data: expected none with batches of one's own"),
    "both": ({"eval_data": ["a=x"]}, {"val_batches": ()}, ConfigError,
             "--eval-data: expected none with batches of one's own, got a=x"),
    "best of a source": ({"data": ["a:1", "b:1"], "keep_best": "val_loss/a"}, {"val_batches": ()}, ConfigError,
                         "--keep-best: expected none or val_loss with batches of one's own, got val_loss/a"),
    "vocabulary": ({"model": {**SHAPE, "vocab_size": None}}, BATCHES, ConfigError,
                   "--tokenizer: expected bytes, a tokenizer.json, or auto with --vocab-size, got auto"),
    "result": ({}, {**BATCHES, "loss": lambda logits, batch: logits}, InvalidArgument,
               "loss: expected losses and their gradient, of shapes [(32,), (32, 32)], got ndarray"),
    "losses": ({}, {**BATCHES, "loss": lambda logits, batch: (logits, logits)}, InvalidArgument,
               "of shapes [(32,), (32, 32)], got [(32, 32), (32, 32)]"),
    "integers": ({}, {**BATCHES, "loss": lambda logits, batch: (logits[:, 0], logits.astype(int))}, InvalidArgument,
                 "loss: expected a floating-point gradient, got int64"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what, tmp_path):
    changes, program, kind, said = REFUSED[what]
    with pytest.raises(kind, match=re.escape(said)):
        fit(config_of(tmp_path, backend="mock", **changes), **program, verbose=False)


def test_a_loss_of_ones_own_is_refused_with_tp(tmp_path):
    said = "--tp: expected 1 with a loss of one's own, which needs logits of the whole vocabulary, got 2"
    refused_on_both(ConfigError, said, config_of(tmp_path, tp=2), lambda rank: batches_of(), loss=cross_entropy)


def test_ranks_that_bring_other_things_are_refused(tmp_path):
    def of(rank):
        return {"loss": cross_entropy if rank else None}

    said = "loss: expected the same on all ranks, got False on rank 0 and True on rank 1"
    with pytest.raises(ConfigError, match=said):
        on_ranks(2, config_of(tmp_path), of, batches=batches_of())


def test_other_arguments_are_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="config: expected a kos.train.TrainConfig, got {'steps': 3}"):
        fit({"steps": 3})
    with pytest.raises(TypeError, match="unexpected keyword argument 'batch'"):
        fit(config_of(tmp_path, backend="mock"), batch=[])
