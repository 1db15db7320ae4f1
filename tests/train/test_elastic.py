"""``--elastic``: ranks are lost and leave, and the run has the bits of one in which nothing happened."""

import contextlib
import itertools
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.comm.communicator import Communicator
from kos.errors import (
    CheckpointError,
    CollectiveError,
    CollectiveMismatch,
    ConfigError,
    CudaError,
    InvalidArgument,
    RankLost,
    RendezvousError,
)
from kos.testing import Fault, spawn
from kos.train import checkpoint, report
from kos.train.device import Device
from kos.train.device.dry_run import DryOps, plan_memory
from kos.train.folder import ADDRESS
from kos.train.ops.parameters import Parameters
from kos.train.optim import Optimizer
from kos.train.optim.adamw import AdamW
from kos.train.parallel import schedules
from kos.train.parallel.failures import Left, Stop
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.step import Step
from kos.train.tools import read_metrics
from kos.train.trainer import Trainer
from tests.train import elastic_faults
from tests.train.elastic_runs import RANKS, SHAPE, STEPS, config_of, ranks_of, result, text, train, unhurt
from tests.train.host_kernels.communicator import DeviceComm

__all__ = ["text", "unhurt"]


FAULTS: dict[str, list[Fault]] = {
    "within a step": [Fault("crash", 2, 4, call="all_to_all")],
    "the first rank": [Fault("crash", 0, 5, call="all_to_all")],
    "in a validation": [Fault("crash", 2, 23, call="all_gather")],
    "at a checkpoint": [Fault("crash", 3, 21, call="all_gather")],
    "two at once": [Fault("crash", 0, 4, call="all_to_all"), Fault("crash", 2, 4, call="all_to_all")],
    "another one meanwhile": [Fault("crash", 3, 4, call="all_to_all"), Fault("crash", 1, 20, call="all_gather")],
}
"""A step has two all_to_all, of the embedding's two gradients."""


@pytest.mark.parametrize(
    ("where", "zero"),
    [("the first rank", 1), ("two at once", 0), ("two at once", 1), ("another one meanwhile", 1)],
)
def test_a_lost_rank_changes_no_bit(where, zero, text, tmp_path, unhurt, capsys):
    assert train(text, tmp_path, FAULTS[where], zero=zero) == unhurt
    assert ranks_of(tmp_path)[-1][0] == RANKS - len(FAULTS[where])
    assert " lost after step " in capsys.readouterr().out
    assert checkpoint.find(tmp_path).step == STEPS


@pytest.mark.parametrize("zero", [0, 1])
def test_a_rank_is_lost_before_any_operation(zero, text, tmp_path):
    """A rank ends before an operation after the first validation: in steps, in a validation and in checkpoints.

    Without ``zero``, it is rank 0, which writes the files, before every second operation.  With ``zero``, it is each
    rank in turn, before the operations in between.
    """
    how = {"steps": 2, "eval_every": 2, "batch_size": 4, "model": {**SHAPE, "num_hidden_layers": 1}}
    plain = train(text, tmp_path / "plain", elastic=None, **how)
    for operation in itertools.count(20 + zero, 2):
        fault, out = Fault("crash", zero * (operation // 2 % RANKS), operation), tmp_path / str(operation)
        try:
            assert train(text, out, [fault], zero=zero, **how) == plain, operation
        except InvalidArgument:  # the fault did not happen: the run has no more operations
            break
    assert operation > 32


def interrupt(steps: Sequence[int], ranks: Sequence[int], before_call: Any) -> list[int]:
    """Have these ranks lose the others right before the update of these steps; returns who applied one afterwards."""
    applied, left, calls = list[int](), {(each, step) for each in ranks for step in steps}, Counter[int]()

    def lose(step: Step) -> None:
        rank = step.mesh.world.rank
        calls[rank] += 1
        if (rank, calls[rank] - 1) in left:
            raise RankLost("as the test wants")

    before_call(Step, "apply", lose)
    before_call(Device, "apply", lambda device: applied.append(device.comm.rank))
    return applied


def on_gpus(text: Path, out: Path, faults: Sequence[Fault] = (), **changes: Any) -> tuple[Any, Any]:
    """A run on emulated GPUs."""
    config = config_of(text, out, device="cuda", dtype="float32", steps=4, **changes)
    spawn(lambda comm: Trainer(config, DeviceComm(comm)).run(), RANKS, timeout=60, faults=faults)
    return result(out / "metrics.jsonl")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("zero", "graph"), [(0, False), (1, True)])
def test_gpus(zero, graph, text, tmp_path, before_call):
    """A lost rank; without a graph, also ranks that are behind by a step."""
    plain = on_gpus(text, tmp_path / "plain", zero=zero, graph=graph)
    how = {"zero": zero, "graph": graph, "elastic": "1"}
    assert on_gpus(text, tmp_path / "hurt", [Fault("crash", 1, 6, call="all_to_all")], **how) == plain
    assert ranks_of(tmp_path / "hurt")[-1] == (3, 1)
    if not graph:
        applied = interrupt([2], [0, 3], before_call)
        assert on_gpus(text, tmp_path / "behind", **how) == plain and sorted(applied) == [0, 3]


@pytest.mark.parametrize("zero", [0, 1])
def test_who_is_behind_applies_the_step_from_its_own_sums(zero, text, tmp_path, unhurt, before_call):
    applied = interrupt([3], [1, 2], before_call)
    assert train(text, tmp_path, zero=zero) == unhurt
    assert sorted(applied) == [1, 2] and ranks_of(tmp_path) == [(4, 0)] * 4 + [(4, 1)] * 2


def test_a_step_that_nobody_applied_is_computed_again(text, tmp_path, unhurt, before_call):
    applied = interrupt([3], range(RANKS), before_call)
    assert train(text, tmp_path) == unhurt
    assert not applied and ranks_of(tmp_path) == [(4, 0)] * 3 + [(4, 1)] * 3


def test_an_update_needs_the_same_step_of_all_ranks():
    weights = Parameters({"w": (3, 2)})
    optimizer, report = Optimizer(AdamW(), weights), np.array([0.0, 2.0, 7.0, 0.0, 1.5])
    others = np.stack([report, report])
    optimizer.check_in_step(weights, report, others)
    for column in (1, 2):
        wrong = others.copy()
        wrong[1, column] -= 1
        with pytest.raises(CollectiveMismatch, match="expected step 7 of epoch 2 on every rank, got 7 of epoch 2; "):
            optimizer.check_in_step(weights, report, wrong)


def test_both_holders_of_a_part_are_lost(text, tmp_path):
    """All of so small a model is in the part of rank 0, which rank 1 holds too."""
    faults = [Fault("crash", rank, 4, call="all_to_all") for rank in (0, 1)]
    lost = "expected each part of the state on a rank, got none with some of weights: ranks 0-1 had it"
    with pytest.raises(CheckpointError, match=lost):
        train(text, tmp_path, faults, zero=1)


@pytest.mark.parametrize("where", ["within a step", "in a validation", "at a checkpoint"])
def test_fewer_ranks_than_the_least_save_and_end(where, text, tmp_path, unhurt):
    """What is saved is the step that is done, also if its validation or its row was not."""
    with pytest.raises(CollectiveError, match=r"expected at least 4 ranks \(--elastic\), got 3.*resume with"):
        train(text, tmp_path, FAULTS[where], elastic="4", save_every=0 if where == "within a step" else 2)
    assert checkpoint.find(tmp_path).step == len(read_metrics(tmp_path / "metrics.jsonl")) > 0
    assert train(text, tmp_path, ranks=2, elastic=None, resume="auto") == unhurt


def ask_at_step_2(ranks: Sequence[int], number: signal.Signals) -> Callable[[Trainer], None]:
    """A callback by which these ranks act as if they got the signal ``number`` during step 2."""

    def ask(trainer: Trainer) -> None:
        trainer.stop.number, rank, show = number, trainer.comm.rank, trainer.device.show

        def shown(what: str, share: float) -> None:
            trainer.stop.requested |= rank in ranks and what == "step 2"
            show(what, share)

        trainer.device.show = shown

    return ask


@pytest.mark.parametrize(("zero", "leaving"), [(0, [0]), (0, [1, 2]), (1, [1, 2]), (1, [3])])
def test_a_rank_leaves_between_steps(zero, leaving, text, tmp_path, unhurt, capsys):
    """Two ranks hold a part of the state. One of them leaves a step later."""
    assert train(text, tmp_path, before=ask_at_step_2(leaving, signal.SIGUSR1), zero=zero) == unhurt
    at_once = not zero or len(leaving) == 1
    after = [(4, 0)] * 2 + ([(4 - len(leaving), 1)] * 4 if at_once else [(3, 1)] + [(2, 2)] * 3)
    assert ranks_of(tmp_path) == after
    assert " left after step 2: " in capsys.readouterr().out


@pytest.mark.parametrize(("asked", "number", "least"), [([2, 3], signal.SIGTERM, "3"), ([2], signal.SIGINT, "1")])
def test_where_too_few_would_be_left_all_stop(asked, number, least, text, tmp_path):
    """Ctrl-C always asks for the end of the run."""
    train(text, tmp_path, before=ask_at_step_2(asked, number), elastic=least)
    assert checkpoint.find(tmp_path).step == 2


@pytest.mark.parametrize("when", ["while data is read", "in the first validation"])
def test_a_rank_that_is_asked_before_the_first_step_leaves_alone(when, text, tmp_path, unhurt):
    config = config_of(text, tmp_path, elastic="1")

    def run(comm):
        stop, asked = Stop(), comm.rank == 2
        stop.number, stop.requested = signal.SIGTERM, asked and when == "while data is read"
        trainer = Trainer(config, comm, stop)
        stop.requested = asked
        with pytest.raises(Left) if asked else contextlib.nullcontext():
            trainer.run()

    spawn(run, RANKS, timeout=60)
    assert result(tmp_path / "metrics.jsonl") == unhurt
    assert ranks_of(tmp_path) == [(4, 0)] + [(3, 1)] * 5


def test_a_newcomer_that_is_asked_before_it_joins_leaves(text, tmp_path):
    (stop := Stop()).requested = True
    with pytest.raises(Left, match="left before it joined the run, as asked"):
        Trainer(config_of(text, tmp_path, elastic="1", join="127.0.0.1:9"), stop=stop)


def test_an_exchange_of_gpus_alone_finds_the_loss(text, tmp_path, unhurt, monkeypatch):
    """Their validation ends in an exchange of the rendezvous (backend nccl), which raises its own error."""
    evaluate = Device.evaluate

    def other(self):
        try:
            return evaluate(self)
        except RankLost as error:
            raise RendezvousError(str(error)) from error

    monkeypatch.setattr(Device, "evaluate", other)
    assert train(text, tmp_path, FAULTS["in a validation"]) == unhurt
    assert ranks_of(tmp_path)[-1] == (3, 1)


@pytest.mark.parametrize("error", ["expected the run in epoch 0, got 1: other ranks", "shrink: rank 3 was left out"])
def test_ranks_that_others_have_left_out_do_not_continue(error, text, tmp_path, before_call):
    """They wake up after the others have gone on; what is the others' stays."""
    address = tmp_path / ADDRESS

    def woken(trainer):
        with (tmp_path / "metrics.jsonl").open("a") as rows:
            rows.write('{"step": 5, "epoch": 1}\n')
        address.write_text("of the others")

    def refuse(comm):
        raise CollectiveError(error)

    before_call(Trainer, "drop_save", woken)
    if error.startswith("shrink"):
        before_call(Communicator, "shrink", refuse)
    with pytest.raises(CollectiveError, match=rf": {error}[^;]*; join the run again with --join {address}\n"):
        train(text, tmp_path, FAULTS["within a step"])
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 5 and address.read_text() == "of the others"


def test_a_device_that_cannot_be_made_again_is_said(text, tmp_path, before_call):
    """The former one is closed by then."""
    runs = list[Trainer]()

    def broken(run):
        if run in runs:
            raise CudaError("cuMemAlloc: 999, unknown error")
        runs.append(run)

    before_call(Trainer, "make_device", broken)
    with pytest.raises(CudaError, match=r"after step \d: cuMemAlloc: 999, unknown error; the last checkpoint, of step"):
        train(text, tmp_path, FAULTS["within a step"])


@pytest.mark.parametrize(("environment", "options", "warned"), [
    ({"OMPI_COMM_WORLD_SIZE": "4"}, [], 1),
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_mpi_ft_enable": "1"}, [], 0),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, ["--enable-recovery"], 0),
    ({"PMI_SIZE": "4", "SLURM_PROCID": "0"}, [], 0),
    ({}, [], 0),
])  # fmt: skip
def test_an_mpirun_that_ends_all_ranks_is_warned_of(environment, options, warned, text, tmp_path, monkeypatch, capfd):
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_MCA_mpi_ft_enable", "PMI_SIZE", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(report, "mpirun", lambda ranks: ["mpirun", *options])
    train(text, tmp_path, ranks=2, steps=1, eval_batches=0)
    assert capfd.readouterr().err.count("kos: --elastic: this mpirun ends all ranks when one is lost") == warned


def test_other_runs_agree_on_nothing(text, tmp_path, before_call):
    calls = Counter[bool]()
    before_call(Optimizer, "check_in_step", lambda *_: calls.update([changes]))
    for changes in (False, True):
        train(text, tmp_path / str(changes), elastic="1" if changes else None)
    assert calls == {True: RANKS * STEPS}


def test_uneven_runs_are_the_same_batch(text, tmp_path, unhurt):
    for ranks in (3, 1):
        assert train(text, tmp_path / str(ranks), ranks=ranks, elastic="1:8") == unhurt


def test_without_deterministic_the_curve_is_the_same(text, tmp_path):
    plain, _ = train(text, tmp_path / "plain", deterministic=False, micro_batch_size=1, elastic=None)
    hurt, _ = train(text, tmp_path / "hurt", [Fault("crash", 2, 2, call="all_reduce")], deterministic=False)
    np.testing.assert_allclose([row[1] for row in hurt], [row[1] for row in plain], rtol=1e-5)
    assert min(ranks for ranks, _ in ranks_of(tmp_path / "hurt")) == 3


@pytest.mark.parametrize(("changes", "said"), [
    ({"elastic": "0:4"}, "elastic: expected MIN or MIN:MAX ranks, such as 2:4, got 0:4"),
    ({"elastic": "3:2"}, "elastic: expected MIN or MIN:MAX ranks, such as 2:4, got 3:2"),
    ({"elastic": "2", "compress": "int8"}, "compress: expected none (argument: elastic), got int8"),
    ({"elastic": "2", "optimizer": "muon", "zero": 1}, "zero: expected 0 with muon (argument: elastic), got 1"),
])  # fmt: skip
def test_refused(changes, said, text, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(said)):
        config_of(text, tmp_path, **changes)


def test_the_ranks_fit_the_batch(text, tmp_path):
    """Micro-batches do not depend on how many ranks there are at a time."""
    config = config_of(text, tmp_path, elastic="2:4", deterministic=False, batch_size=24)
    assert {config.for_world(ranks).micro_batch_size for ranks in (2, 3, 4)} == {6}
    with pytest.raises(ConfigError, match="with at least 9 micro-batches"):
        config_of(text, tmp_path, elastic="2:9").for_world(4)
    with pytest.raises(ConfigError, match="--elastic: expected 2 to 4 ranks, got 5"):
        config.check_ranks(5)
    with pytest.raises(ConfigError, match="--elastic: expected 2 to 4 ranks, got 1"):
        config.check_ranks(1)
    with pytest.raises(ConfigError, match="--elastic: expected 5 to 5 ranks, got 1"):
        config.model_copy(update={"elastic": "5"}).check_ranks(1)


def test_other_layouts_say_what_a_loss_means(text, tmp_path, capsys):
    model = {**SHAPE, "hidden_size": 24, "intermediate_size": 32, "num_key_value_heads": 2, "vocab_size": 256}
    changes = {"steps": 1, "eval_batches": 0, "deterministic": False, "model": model}
    config = config_of(text, tmp_path, elastic="1", tp=2, **changes)
    spawn(lambda comm: Trainer(config, comm).run(), 2, timeout=60)
    assert "in this layout a lost rank ends the run at the last checkpoint" in capsys.readouterr().out


def test_the_second_part_is_planned(text, tmp_path):
    model = config_of(text, tmp_path).model_config_for(256)

    def state(**changes):
        config = config_of(text, tmp_path, zero=1, **changes).for_world(RANKS)
        schedule = schedules.build("1f1b", 1, 2)
        plan = plan_memory(config, model, DryOps(), Mesh.dry(Layout(dp=RANKS)), schedule)
        return next((name, size) for name, size in plan.uses.items() if name.startswith("both Adam moments"))

    (_, once), (name, twice) = state(), state(elastic="1")
    whole = 4 * 2 * 16_384 * RANKS  # both moments of the one bucket
    assert name.endswith("held twice)") and twice - once == whole // RANKS


def test_processes_end_as_promised(tmp_path):
    """A run with random faults; a rank that left ends with 75, one that others left out by itself."""
    text = elastic_faults.letters(tmp_path / "letters.txt")
    plain = elastic_faults.Run(tmp_path / "plain", text)
    assert plain.wait(100) == [0] * RANKS, plain.output()
    found = elastic_faults.one(tmp_path / "hurt", text, plain, seed=102)
    assert found["same"] and not found["hang"], found
    kinds, codes = [fault.partition(" after")[0] for fault in found["faults"]], Counter(found["codes"])
    assert kinds and found["epochs"] >= len(kinds), found
    assert codes[75] == kinds.count("leave") and codes[-9] == kinds.count("kill") + 2 * kinds.count("kill two"), found


def test_an_error_of_all_is_told_by_the_rank_that_is_the_first_now(tmp_path):
    (text := tmp_path / "letters.txt").write_bytes(b"a few letters of a text " * 800)
    run = elastic_faults.Run(tmp_path / "run", text, "--elastic=4")
    deadline = time.monotonic() + 60
    while len(run.rows()) < 3:
        assert time.monotonic() < deadline, run.processes[0].poll()
        time.sleep(0.05)
    run.processes[0].kill()
    assert run.wait(60)[1:] == [1, 1, 1]
    said = [(run.folder / f"rank-{rank}").read_text() for rank in (1, 2, 3)]
    assert ["expected at least 4 ranks (--elastic), got 3" in each for each in said] == [True, False, False]
