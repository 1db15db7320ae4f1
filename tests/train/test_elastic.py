"""``--elastic``: ranks are lost, leave and join, and the run has the bits of one in which nothing happened."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm import groups
from kos.comm.communicator import Communicator
from kos.errors import (
    BackendUnavailable,
    CheckpointError,
    CollectiveError,
    CollectiveMismatch,
    ConfigError,
    RankLost,
    RendezvousError,
)
from kos.testing import Fault, spawn
from kos.train import elastic
from kos.train.checkpoint import checkpoint, saving
from kos.train.config.options import TrainConfig
from kos.train.device.base import Device
from kos.train.device.cpu import CpuDevice, plan_memory
from kos.train.joining import Newcomer
from kos.train.model.llama import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.optim.adamw import AdamW
from kos.train.optim.base import Optimizer
from kos.train.output import ADDRESS
from kos.train.parallel import schedules
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.parallel.stopping import LEAVE, Left, Stop
from kos.train.run import Trainer
from kos.train.tools import commands
from kos.train.tools.metrics import read_metrics
from kos.train.train import Step
from tests.train import elastic_faults
from tests.train.emulated_runs import emulated
from tests.train.host_kernels.engine import DeviceComm
from tests.train.sharded import tensors_of_run

__all__ = ["emulated"]

RANKS, STEPS = 4, 6
SHAPE = {
    "vocab_size": 257, "hidden_size": 22, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 6,
}  # fmt: skip
"""Its 14,212 parameters are no multiple of 3: the layouts of 3 and of 4 ranks end at different places."""

Before = Callable[[Trainer], None]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "letters.txt"
    path.write_bytes(np.random.default_rng(7).integers(97, 110, 4000, np.uint8).tobytes())
    return path


def config_of(text: Path, out: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "steps": STEPS, "batch_size": 8, "seq_len": 8, "lr": 3e-3, "warmup_steps": 0, "eval_every": 3,
        "eval_batches": 2, "sample_tokens": 0, "save_every": 2, "device": "cpu", "deterministic": True, "model": SHAPE,
        "timeout": 30.0,
    }  # fmt: skip
    return TrainConfig.from_preset("tiny", data=str(text), out=out, **{**values, **changes})


def result(out: Path) -> tuple[Any, Any]:
    """What must not depend on what happened to ranks: the numbers of each step, weights and state."""
    rows = [[row.get(name) for name in ("step", "loss", "grad_norm", "lr", "val_loss")] for row in read_metrics(out)]
    return rows, tensors_of_run(out.parent)


def train(
    text: Path, out: Path, faults: Sequence[Fault] = (), before: Before = lambda trainer: None, ranks: int = RANKS,
    **changes: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """A run; ``before`` gets each rank's trainer before its first step. A rank that leaves just ends."""
    config = config_of(text, out, **{"elastic": "1", **changes})

    def run(comm: Communicator) -> None:
        trainer = Trainer(config, comm)
        before(trainer)
        try:
            trainer.run()
        except Left:
            pass

    spawn(run, ranks, timeout=60, faults=faults)
    return result(out / "metrics.jsonl")


@pytest.fixture(scope="module")
def unhurt(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return train(text, tmp_path_factory.mktemp("unhurt"), elastic=None)


def until(true: Callable[[], Any]) -> None:
    """Wait until it is ``true``. The test's timeout limits it."""
    while not true():
        time.sleep(0.001)


def ranks_of(out: Path) -> list[tuple[int, int]]:
    return [(row["ranks"], row["epoch"]) for row in read_metrics(out / "metrics.jsonl")]


FAULTS: dict[str, list[Fault]] = {
    "within a step": [Fault("crash", 2, 4, call="all_to_all")],
    "the first rank": [Fault("crash", 0, 5, call="all_to_all")],
    "at the last exchange of a step": [Fault("crash", 1, 27, call="all_gather")],
    "in a validation": [Fault("crash", 2, 19, call="all_gather_v")],
    "at a checkpoint": [Fault("crash", 3, 21, call="all_gather_v")],
    "two at once": [Fault("crash", 0, 4, call="all_to_all"), Fault("crash", 2, 4, call="all_to_all")],
    "another one meanwhile": [Fault("crash", 3, 4, call="all_to_all"), Fault("crash", 1, 20, call="all_gather_v")],
}
"""A step has two all_to_all, of the embedding's two gradients."""


@pytest.fixture(autouse=True)
def no_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of its steps depends on time."""
    monkeypatch.setattr(CpuDevice, "dry_run", lambda self: None)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("where", FAULTS)
def test_a_lost_rank_changes_no_bit(
    where: str, zero: int, text: Path, tmp_path: Path, unhurt: Any, capsys: Any
) -> None:
    assert train(text, tmp_path, FAULTS[where], zero=zero) == unhurt
    assert ranks_of(tmp_path)[-1][0] == RANKS - len(FAULTS[where])
    assert " lost after step " in capsys.readouterr().out
    assert checkpoint.find(tmp_path).step == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("rank", range(RANKS))
def test_every_operation(rank: int, zero: int, text: Path, tmp_path: Path, unhurt: Any) -> None:
    """A rank ends before each of its operations, from the first validation on."""
    for operation in range(32 + zero, 70 + 18 * zero):
        assert train(text, tmp_path / str(operation), [Fault("crash", rank, operation)], zero=zero) == unhurt, operation


def interrupt(steps: Sequence[int], ranks: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have these ranks lose the others right before the update of these steps; returns who applied one afterwards."""
    applied, left, calls = list[int](), {(each, step) for each in ranks for step in steps}, Counter[int]()
    whole, device_apply = Step.apply, Device.apply

    def apply(self: Step) -> None:
        rank = self.mesh.world.rank
        calls[rank] += 1
        if (rank, calls[rank] - 1) in left:
            raise RankLost("as the test wants")
        whole(self)

    def again(self: Device) -> None:
        applied.append(self.comm.rank)
        device_apply(self)

    monkeypatch.setattr(Step, "apply", apply)
    monkeypatch.setattr(Device, "apply", again)
    return applied


def on_gpus(text: Path, out: Path, faults: Sequence[Fault] = (), **changes: Any) -> tuple[Any, Any]:
    """A run on emulated GPUs."""
    config = config_of(text, out, device="cuda", dtype="float32", steps=4, **changes)
    spawn(lambda comm: Trainer(config, DeviceComm(comm)).run(), RANKS, timeout=60, faults=faults)
    return result(out / "metrics.jsonl")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("zero", "graph"), [(0, True), (1, True), (1, False)])
def test_gpus(zero: int, graph: bool, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost rank; without a graph, also ranks that are behind by a step."""
    plain = on_gpus(text, tmp_path / "plain", zero=zero, graph=graph)
    how: dict[str, Any] = {"zero": zero, "graph": graph, "elastic": "1"}
    assert on_gpus(text, tmp_path / "hurt", [Fault("crash", 1, 4, call="all_to_all")], **how) == plain
    assert ranks_of(tmp_path / "hurt")[-1] == (3, 1)
    if not graph:
        applied = interrupt([2], [0, 3], monkeypatch)
        assert on_gpus(text, tmp_path / "behind", **how) == plain and sorted(applied) == [0, 3]


@pytest.mark.parametrize("zero", [0, 1])
def test_who_is_behind_applies_the_step_from_its_own_sums(
    zero: int, text: Path, tmp_path: Path, unhurt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied = interrupt([3], [1, 2], monkeypatch)
    assert train(text, tmp_path, zero=zero) == unhurt
    assert sorted(applied) == [1, 2] and ranks_of(tmp_path) == [(4, 0)] * 4 + [(4, 1)] * 2


def test_a_step_that_nobody_applied_is_computed_again(
    text: Path, tmp_path: Path, unhurt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied = interrupt([3], range(RANKS), monkeypatch)
    assert train(text, tmp_path) == unhurt
    assert not applied and ranks_of(tmp_path) == [(4, 0)] * 3 + [(4, 1)] * 3


def test_an_update_needs_the_same_step_of_all_ranks() -> None:
    weights = Parameters({"w": (3, 2)})
    optimizer, report = Optimizer(AdamW(), weights), np.array([0.0, 2.0, 7.0, 0.0, 1.5])
    others = np.stack([report, report])
    optimizer.agree(weights, report, others)
    for column in (1, 2):
        wrong = others.copy()
        wrong[1, column] -= 1
        with pytest.raises(CollectiveMismatch, match="expected step 7 of epoch 2 on every rank, got 7 of epoch 2; "):
            optimizer.agree(weights, report, wrong)


def test_both_holders_of_a_part_are_lost(text: Path, tmp_path: Path) -> None:
    faults = [Fault("crash", rank, 4, call="all_to_all") for rank in (1, 2)]
    with pytest.raises(CheckpointError, match="expected one of ranks 1-2, which hold a part of the state, got neither"):
        train(text, tmp_path, faults, zero=1)


@pytest.mark.parametrize("where", ["within a step", "in a validation", "at a checkpoint"])
def test_fewer_ranks_than_the_least_save_and_end(where: str, text: Path, tmp_path: Path, unhurt: Any) -> None:
    """What is saved is the step that is done, also if its validation or its row was not."""
    with pytest.raises(CollectiveError, match=r"expected at least 4 ranks \(--elastic\), got 3.*resume with"):
        train(text, tmp_path, FAULTS[where], elastic="4", save_every=0 if where == "within a step" else 2)
    assert checkpoint.find(tmp_path).step == len(read_metrics(tmp_path / "metrics.jsonl")) > 0
    assert train(text, tmp_path, ranks=2, elastic=None, resume="auto") == unhurt


@pytest.mark.parametrize(("zero", "leaving"), [(0, [0]), (0, [1, 2]), (1, [1, 2]), (1, [3])])
def test_a_rank_leaves_between_steps(
    zero: int, leaving: list[int], text: Path, tmp_path: Path, unhurt: Any, capsys: Any
) -> None:
    """Of two that hold a part of the state, one leaves a step later."""

    def ask(trainer: Trainer) -> None:
        trainer.stop.number, rank, show = signal.SIGUSR1, trainer.comm.rank, trainer.device.show

        def shown(what: str, share: float) -> None:
            trainer.stop.asked |= rank in leaving and what == "step 2"
            show(what, share)

        trainer.device.show = shown

    assert train(text, tmp_path, before=ask, zero=zero) == unhurt
    at_once = not zero or len(leaving) == 1
    after = [(4, 0)] * 2 + ([(4 - len(leaving), 1)] * 4 if at_once else [(3, 1)] + [(2, 2)] * 3)
    assert ranks_of(tmp_path) == after
    assert " left after step 2: " in capsys.readouterr().out


def test_where_too_few_would_be_left_all_stop(text: Path, tmp_path: Path) -> None:
    def ask(trainer: Trainer) -> None:
        trainer.stop.number, trainer.stop.asked = signal.SIGTERM, trainer.comm.rank > 1

    config = config_of(text, tmp_path, elastic="3")

    def run(comm: Communicator) -> None:
        trainer = Trainer(config, comm)
        show = trainer.device.show

        def shown(what: str, share: float) -> None:
            if what == "step 2":
                ask(trainer)
            show(what, share)

        trainer.device.show = shown
        trainer.run()

    spawn(run, RANKS, timeout=60)
    assert checkpoint.find(tmp_path).step == 2


@pytest.mark.parametrize("when", ["while data is read", "in the first validation"])
def test_a_rank_that_is_asked_before_the_first_step_leaves_alone(
    when: str, text: Path, tmp_path: Path, unhurt: Any
) -> None:
    config = config_of(text, tmp_path, elastic="1")

    def run(comm: Communicator) -> None:
        stop, asked = Stop(), comm.rank == 2
        stop.number, stop.asked = signal.SIGTERM, asked and when == "while data is read"
        trainer = Trainer(config, comm, stop)
        stop.asked = asked
        with pytest.raises(Left) if asked else contextlib.nullcontext():
            trainer.run()

    spawn(run, RANKS, timeout=60)
    assert result(tmp_path / "metrics.jsonl") == unhurt
    assert ranks_of(tmp_path) == [(4, 0)] + [(3, 1)] * 5


def test_a_newcomer_that_is_asked_before_it_joins_leaves(text: Path, tmp_path: Path) -> None:
    (stop := Stop()).asked = True
    with pytest.raises(Left, match="left before it joined the run, as asked"):
        Newcomer(config_of(text, tmp_path, elastic="1", join="127.0.0.1:9"), stop)


def test_an_exchange_of_gpus_alone_finds_the_loss(
    text: Path, tmp_path: Path, unhurt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their validation ends in an exchange of the rendezvous (backend nccl), which raises its own error."""
    evaluate = Device.evaluate

    def other(self: Device) -> float:
        try:
            return evaluate(self)
        except RankLost as error:
            raise RendezvousError(str(error)) from error

    monkeypatch.setattr(Device, "evaluate", other)
    assert train(text, tmp_path, FAULTS["in a validation"]) == unhurt
    assert ranks_of(tmp_path)[-1] == (3, 1)


@pytest.mark.parametrize("error", ["expected the run in epoch 0, got 1: these ranks are out", "shrink: rank 3 is out"])
def test_ranks_that_others_have_left_out_do_not_continue(
    error: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wake up after the others have gone on; what is the others' stays."""
    drop, address = Trainer.drop_save, tmp_path / ADDRESS

    def woken(self: Trainer) -> None:
        with (tmp_path / "metrics.jsonl").open("a") as rows:
            rows.write('{"step": 5, "epoch": 1}\n')
        address.write_text("of the others")
        drop(self)

    def refuse(self: Communicator) -> Communicator:
        raise CollectiveError(error)

    monkeypatch.setattr(Trainer, "drop_save", woken)
    if error.startswith("shrink"):
        monkeypatch.setattr(Communicator, "shrink", refuse)
    with pytest.raises(CollectiveError, match=rf": {error}[^;]*; join the run again with --join {address}\n"):
        train(text, tmp_path, FAULTS["within a step"])
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 5 and address.read_text() == "of the others"


@pytest.mark.parametrize(("environment", "options", "warned"), [
    ({"OMPI_COMM_WORLD_SIZE": "4"}, [], 1),
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_mpi_ft_enable": "1"}, [], 0),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, ["--enable-recovery"], 0),
    ({"PMI_SIZE": "4", "SLURM_PROCID": "0"}, [], 0),
    ({}, [], 0),
])  # fmt: skip
def test_an_mpirun_that_ends_all_ranks_is_warned_of(
    environment: dict[str, str], options: list[str], warned: int, text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_MCA_mpi_ft_enable", "PMI_SIZE", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(commands, "mpirun", lambda ranks: ["mpirun", *options])
    train(text, tmp_path, ranks=2, steps=1, eval_batches=0)
    assert capfd.readouterr().err.count("kos: --elastic: this mpirun ends all ranks when one is lost") == warned


def test_other_runs_agree_on_nothing(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, agree = Counter[bool](), Optimizer.agree

    def counted(self: Optimizer, *arguments: Any) -> None:
        calls[changes] += 1
        agree(self, *arguments)

    monkeypatch.setattr(Optimizer, "agree", counted)
    for changes in (False, True):
        train(text, tmp_path / str(changes), elastic="1" if changes else None)
    assert calls == {True: RANKS * STEPS}


def test_ctrl_c_stops_the_run() -> None:
    stop = Stop()
    stop.leaves, stop.asked = True, True
    wishes = []
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        stop.number = number
        wishes.append(stop.wish)
    stop.asked = False
    assert [*wishes, stop.wish] == [2, 2, 1, 0]


def join(text: Path, out: Path, address: str, **changes: Any) -> tuple[threading.Thread, list[BaseException]]:
    """A newcomer, on a thread of its own, and its error."""
    errors = list[BaseException]()

    def run() -> None:
        try:
            newcomer = Newcomer(config_of(text, out, elastic="1", join=address, **changes))
            try:
                newcomer.run()
            finally:
                place: Any = newcomer.comm.rendezvous
                place.threads.world.end(place.rank, "its function returned")  # as ``spawn`` does for its ranks
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("zero", [0, 1])
def test_a_newcomer_gets_all_from_the_ranks(
    zero: int, text: Path, tmp_path: Path, unhurt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces a lost rank."""
    threads, start = list[tuple[threading.Thread, list[BaseException]]](), elastic.Elastic.start_step

    def start_step(self: elastic.Elastic, step: int, wish: int) -> None:
        comm = self.run.comm
        if comm.size == 3 and comm.rank == 0 and not threads:
            threads.append(join(text, tmp_path, comm.address, zero=zero))
            while not comm.newcomers():  # it reads the data first
                time.sleep(0.01)
        start(self, step, wish)

    monkeypatch.setattr(elastic.Elastic, "start_step", start_step)
    assert train(text, tmp_path, [Fault("crash", 1, 4, call="all_to_all")], zero=zero) == unhurt
    ((thread, errors),) = threads
    thread.join(30)
    assert not errors and not thread.is_alive()
    assert ranks_of(tmp_path) == [(4, 0)] * 2 + [(3, 1)] + [(4, 2)] * 3


@pytest.mark.parametrize("zero", [0, 1])
def test_two_join_one(
    zero: int, text: Path, tmp_path: Path, unhurt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ZeRO-1 ranks hold different parts of what one rank held whole."""
    threads, start = list[tuple[threading.Thread, list[BaseException]]](), elastic.Elastic.start_step

    def start_step(self: elastic.Elastic, step: int, wish: int) -> None:
        comm = self.run.comm
        if step == 2 and not threads:
            threads.extend([join(text, tmp_path, comm.address, zero=zero) for _ in range(2)])
            while comm.newcomers() < 2:
                time.sleep(0.01)
        start(self, step, wish)

    monkeypatch.setattr(elastic.Elastic, "start_step", start_step)
    assert train(text, tmp_path, ranks=1, zero=zero, elastic="1:3") == unhurt
    for thread, errors in threads:
        thread.join(30)
        assert not errors and not thread.is_alive()
    assert ranks_of(tmp_path) == [(1, 0)] * 3 + [(3, 1)] * 3


def invite(
    text: Path, out: Path, monkeypatch: pytest.MonkeyPatch, admit: Callable[[elastic.Elastic], None], **changes: Any
) -> list[tuple[threading.Thread, list[BaseException]]]:
    """A newcomer calls at step 3 of a run of at most 5 ranks; ``admit`` is called before the ranks let it join."""
    threads, start = list[tuple[threading.Thread, list[BaseException]]](), elastic.Elastic.start_step

    def start_step(self: elastic.Elastic, step: int, wish: int) -> None:
        comm = self.run.comm
        if step == 2 and comm.rank == 0 and not threads:
            threads.append(join(text, out, comm.address, **changes))
            while not comm.newcomers():
                time.sleep(0.01)
        if self._last is not None and self._last[1].joining:
            admit(self)
        start(self, step, wish)

    monkeypatch.setattr(elastic.Elastic, "start_step", start_step)
    return threads


@pytest.mark.parametrize("leaves", [True, False])
def test_a_checkpoint_is_completed_before_ranks_leave_or_join(
    leaves: bool, text: Path, tmp_path: Path, unhurt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank waits for its files: the run goes on with the same ranks until they are complete."""
    write, start, may_end = saving.write_tensors, elastic.Elastic.start_step, threading.Event()

    def slow(*arguments: Any) -> Any:
        may_end.wait(60)
        return write(*arguments)

    def start_step(self: elastic.Elastic, step: int, wish: int) -> None:
        files = self.run.saving
        if step == 4 and files is not None:
            may_end.set()
            until(lambda: files.done)
        start(self, step, LEAVE if leaves and step > 1 and self.run.mesh.world.rank == 3 else wish)

    monkeypatch.setattr(saving, "write_tensors", slow)
    monkeypatch.setattr(elastic.Elastic, "start_step", start_step)
    threads = [] if leaves else invite(text, tmp_path, monkeypatch, lambda self: None)
    assert train(text, tmp_path, elastic="1:5", keep=10, save_async=True, save_every=3) == unhurt
    assert [step for step, _ in checkpoint.steps_in(tmp_path / "checkpoints")] == [3, 6]
    assert ranks_of(tmp_path) == [(4, 0)] * 5 + [(3 if leaves else 5, 1)]
    for thread, errors in threads:
        thread.join(30)
        assert not errors and not thread.is_alive()


def test_some_ranks_know_of_a_loss_where_others_grow(
    text: Path, tmp_path: Path, unhurt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has called shrink, and the others grow, each of them late: all go on without the rank that is lost."""
    shrink, calls = Communicator.shrink, Counter[int]()

    def counted(self: Communicator) -> Communicator:
        calls[self.rank] += 1
        return shrink(self)

    def admit(self: elastic.Elastic) -> None:
        if self.run.epoch == 0:
            if (rank := self.run.comm.rank) == 1:
                raise RankLost("a rank is lost")  # as in a validation that has ended on the other ranks
            until(lambda: calls[1] >= max(1, rank))  # the others before it have made rank 1 begin again

    monkeypatch.setattr(Communicator, "shrink", counted)
    invite(text, tmp_path, monkeypatch, admit)
    assert train(text, tmp_path, elastic="1:5") == unhurt
    assert calls[1] == RANKS and elastic.TRIES < RANKS


def test_a_newcomer_without_the_backend_does_not_end_the_run(
    text: Path, tmp_path: Path, unhurt: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def communicator(*arguments: Any, **options: Any) -> Any:
        arguments[2].close()
        raise BackendUnavailable("nccl: rank 4: no module named nccl")

    monkeypatch.setattr(groups, "communicator", communicator)
    invite(text, tmp_path, monkeypatch, lambda self: None)
    assert train(text, tmp_path, elastic="1:5") == unhurt
    assert "no rank joined: nccl: rank 4: no module named nccl" in capsys.readouterr().out


@pytest.mark.parametrize(("changes", "said"), [
    ({"seed": 5}, "--seed: expected 1337, which the run has, got 5"),
    ({"model": {**SHAPE, "rope_theta": 5.0}}, "--rope-theta: expected 10000.0, which the run has, got 5.0"),
    ({}, "--data: expected letters.txt ([0-9a-f]{12}), which the run has, got other.txt"),
])  # fmt: skip
def test_a_newcomer_with_other_settings_is_refused(
    changes: dict[str, Any], said: str, text: Path, tmp_path: Path, unhurt: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:  # fmt: skip
    """By name, on its side and on theirs; the ranks go on, and say nothing of a rank that is gone."""
    (other := tmp_path / "other.txt").write_bytes(text.read_bytes()[::-1])
    threads = invite(text if changes else other, tmp_path, monkeypatch, lambda self: None, **changes)
    assert train(text, tmp_path, elastic="1:5") == unhurt
    ((thread, errors),) = threads
    thread.join(30)
    assert [type(error) for error in errors] == [ConfigError]
    assert re.match(re.escape(said).replace(re.escape("[0-9a-f]{12}"), "[0-9a-f]{12}"), str(errors[0]))
    out = capsys.readouterr().out
    assert f"a newcomer was refused: {errors[0]}" in out and " left " not in out and " lost " not in out
    assert {ranks for ranks, _ in ranks_of(tmp_path)} == {RANKS}


def test_a_newcomer_takes_settings_that_change_no_number(
    text: Path, tmp_path: Path, unhurt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"log_every": 7, "keep": 9, "tracker": ("tensorboard",), "save_every": 1, "timeout": 29.0}
    threads = invite(text, tmp_path, monkeypatch, lambda self: None, **changes)
    assert train(text, tmp_path, elastic="1:5") == unhurt
    ((thread, errors),) = threads
    thread.join(30)
    assert not errors and ranks_of(tmp_path)[-1] == (5, 1)


def test_a_spare_waits_for_the_run(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the timeout: until it has written its address; once that is gone, the run is over."""
    address, calls = tmp_path / ADDRESS, list[float]()

    def nobody(where: str, timeout: float) -> Communicator:
        calls.append(timeout)
        assert address.exists()
        if len(calls) == 2:
            address.unlink()
        time.sleep(timeout)
        raise RendezvousError("join: nobody admits newcomers")

    monkeypatch.setattr(kos, "join", nobody)
    threading.Timer(0.2, address.write_text, ["127.0.0.1:9"]).start()
    with pytest.raises(RendezvousError, match="join: nobody"):
        Newcomer(config_of(text, tmp_path, elastic="1", join=str(address), timeout=0.01))
    assert len(calls) == 2


def test_nobody_is_there(text: Path, tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="join: "):
        Newcomer(config_of(text, tmp_path, elastic="1", join="127.0.0.1:9", timeout=0.5))


def test_uneven_runs_are_the_same_batch(text: Path, tmp_path: Path, unhurt: Any) -> None:
    for ranks in (3, 1):
        assert train(text, tmp_path / str(ranks), ranks=ranks, elastic="1:8") == unhurt


def test_without_deterministic_the_curve_is_the_same(text: Path, tmp_path: Path) -> None:
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
def test_refused(changes: dict[str, Any], said: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        config_of(text, tmp_path, **changes)


def test_the_ranks_fit_the_batch(text: Path, tmp_path: Path) -> None:
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


def test_other_layouts_say_what_a_loss_means(text: Path, tmp_path: Path, capsys: Any) -> None:
    model = {**SHAPE, "hidden_size": 24, "intermediate_size": 32, "num_key_value_heads": 2, "vocab_size": 256}
    changes = {"steps": 1, "eval_batches": 0, "deterministic": False, "model": model}
    config = config_of(text, tmp_path, elastic="1", tp=2, **changes)
    spawn(lambda comm: Trainer(config, comm).run(), 2, timeout=60)
    assert "in this layout a lost rank ends the run at the last checkpoint" in capsys.readouterr().out


def test_the_second_part_is_planned(text: Path, tmp_path: Path) -> None:
    model: LlamaConfig = config_of(text, tmp_path).model_config_for(256)

    def state(**changes: Any) -> tuple[str, int]:
        config = config_of(text, tmp_path, zero=1, **changes).for_world(RANKS)
        schedule = schedules.build("1f1b", 1, 2, None)
        plan = plan_memory(config, model, Mesh.dry(Layout(dp=RANKS)), schedule, 1)
        return next((name, size) for name, size in plan.uses.items() if name.startswith("weights, gradients"))

    (_, once), (name, twice) = state(), state(elastic="1")
    whole = 4 * 2 * 16_384 * RANKS  # both moments of the one bucket
    assert name.endswith("held twice") and twice - once == whole // RANKS


def test_processes_end_as_promised(tmp_path: Path) -> None:
    """A run with random faults; a rank that left ends with 75, one that others left out by itself."""
    text = elastic_faults.letters(tmp_path / "letters.txt")
    plain = elastic_faults.Run(tmp_path / "plain", text)
    assert plain.wait(100) == [0] * RANKS, plain.output()
    found = elastic_faults.one(tmp_path / "hurt", text, plain, seed=102)
    assert found["same"] and not found["hang"], found
    kinds, codes = [fault.partition(" after")[0] for fault in found["faults"]], Counter(found["codes"])
    assert kinds and found["epochs"] >= len(kinds), found
    assert codes[75] == kinds.count("leave") and codes[-9] == kinds.count("kill") + 2 * kinds.count("kill two"), found


@pytest.mark.slow
def test_an_error_of_all_is_told_by_the_rank_that_is_the_first_now(tmp_path: Path) -> None:
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
