"""``kos.train.fit`` and ``Trainer``: batches, a loss and callbacks of the program's own."""

import gc
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos.train
from kos.errors import CollectiveError, ConfigError, DataError, InvalidArgument, KosError
from kos.testing import Fault, spawn
from kos.train import Callback, Trainer, fit, read_metrics
from kos.train.data.batches import load_data
from kos.train.data.tokenizers import NumberTokenizer
from tests.train.fits import (
    LAYOUTS,
    SHAPE,
    STEPS,
    VOCABULARY,
    OnStep,
    Stream,
    batch_of,
    batches_of,
    column,
    config_of,
    on_ranks,
    part,
    result,
)  # fmt: skip
from tests.train.newcomers import ended, invited


@pytest.mark.parametrize(
    ("rows", "name"),
    [("all", "one"), ("all", "dp"), ("own", "dp"), ("own", "zero"), ("all", "pp"), ("own", "cp"), ("all", "tp")],
)
def test_the_same_batches_give_the_run_of_the_command(rows, name, tmp_path):
    """Batches that are taken from ``--data`` train as it does, bit for bit."""
    ranks, layout = LAYOUTS[name]
    (text := tmp_path / "text").write_bytes(np.random.default_rng(7).integers(97, 110, 2000, np.uint8).tobytes())
    config = config_of(tmp_path / "data", data=str(text), eval_batches=2, model={**SHAPE, "vocab_size": 256}, **layout)
    on_ranks(ranks, config)
    data, dp = load_data(config), ranks if not {"pp", "cp", "tp"} & layout.keys() else 1
    batches = [data.batch(step) for step in range(STEPS)]
    own = config.model_copy(update={"data": "stdlib", "out": tmp_path / "own"})

    def of(rank):
        return {"batches": (batch if rows == "all" or dp == 1 else part(batch, rank, dp) for batch in batches)}

    last = on_ranks(ranks, own, of, rows=rows)[-1]
    assert result(tmp_path / "own") == result(tmp_path / "data")
    assert last.step == last.metrics["step"] == STEPS and not last.stopped
    assert last.checkpoint == tmp_path / "own" / "checkpoints" / "step-4"


def test_validation_is_the_mean_over_all_targets(tmp_path):
    """Of batches with any number of sequences, on any ranks."""
    val, found = [batch_of(7, 5), batch_of(8, 1), batch_of(9, 8)], []

    def run(comm):
        with Trainer(config_of(tmp_path / str(comm.size), zero=comm.size - 1), comm, batches=()) as trainer:
            trainer.step(batch_of(0))
            found.append(trainer.evaluate(val)["val_loss"])
            model = trainer.model
            counts = [np.count_nonzero(each.targets >= 0) for each in val]
            expected = np.average([model.loss(each.tokens, each.targets) for each in val], weights=counts)
            assert found[-1] == pytest.approx(expected, rel=1e-5)

    for ranks in (1, 2):
        spawn(run, ranks, timeout=100)
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


def test_a_program_makes_the_steps_itself(tmp_path):
    with Trainer(config_of(tmp_path, backend="mock"), batches=(), verbose=False) as trainer:
        assert trainer.model.logits([1, 2]).shape == (2, VOCABULARY) and trainer.steps_done == 0
        before, tokens = trainer.evaluate([batch_of(0)])["val_loss"], trainer.model.logits([1, 2])
        rows = [trainer.step(batch_of(0)) for _ in range(STEPS + 2)]
        assert [row["step"] for row in rows] == [*range(1, STEPS + 3)]
        assert trainer.evaluate([batch_of(0)])["val_loss"] < before == pytest.approx(rows[0]["loss"], rel=1e-5)
        assert not np.array_equal(trainer.model.logits([1, 2]), tokens)
        saved = trainer.save()
        np.testing.assert_allclose(kos.train.load(saved).logits([1, 2]), trainer.model.logits([1, 2]), rtol=1e-6)
        with pytest.raises(DataError, match="batch of step 7: expected one more, got none"):
            trainer.step()
        with pytest.raises(InvalidArgument, match="evaluate: expected batches"):
            trainer.evaluate()
    assert read_metrics(tmp_path) == rows


def test_the_model_of_a_trainer_ends_texts_as_a_loaded_one(tmp_path, monkeypatch):
    monkeypatch.setattr(NumberTokenizer, "eos", 3)
    with Trainer(config_of(tmp_path, backend="mock"), batches=()) as trainer:
        trainer.step(batch_of(0))
        assert trainer.model.ends == (3,)


def test_a_trainer_of_data_takes_a_batch_too(tmp_path):
    (text := tmp_path / "text").write_bytes(bytes(range(97, 123)) * 40)
    config = config_of(tmp_path / "run", data=str(text), backend="mock", model={**SHAPE, "vocab_size": 256})
    with Trainer(config, verbose=False) as trainer:
        first, second, third = trainer.step(), trainer.step(batch_of(0)), trainer.step()
        assert trainer.evaluate().keys() == {"val_loss"}
    assert first["loss"] == pytest.approx(np.log(256), rel=0.1) and [second["step"], third["step"]] == [2, 3]


class Recorder(Callback):
    def __init__(self) -> None:
        self.events = list[tuple[str, Any]]()

    def on_step(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self.events.append(("step", metrics["step"]))
        assert trainer.steps_done == metrics["step"]

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self.events.append(("evaluate", metrics["step"]))
        assert metrics["val_loss"] == trainer.evaluate()["val_loss"]

    def on_save(self, trainer: Trainer, checkpoint: Path) -> None:
        assert kos.train.load(checkpoint)
        self.events.append(("save", checkpoint.name))

    def on_end(self, trainer: Trainer) -> None:
        self.events.append(("end", trainer.steps_done))


@pytest.mark.parametrize("save_async", [False, True])
def test_callbacks(save_async, tmp_path):
    recorder, losses = Recorder(), list[float]()
    other = OnStep(lambda trainer, metrics: losses.append(metrics["loss"]))
    config = config_of(tmp_path, backend="mock", save_every=2, save_async=save_async)
    fit(config, batches=batches_of(), val_batches=batches_of(1), callbacks=[recorder, other], verbose=False)
    events = [("step", 1), ("step", 2), ("evaluate", 2), ("save", "step-2"), ("step", 3), ("step", 4), ("evaluate", 4),
              ("save", "step-4"), ("end", 4)]  # fmt: skip
    assert sorted(recorder.events) == sorted(events) and (save_async or recorder.events == events)
    assert losses == [row["loss"] for row in read_metrics(tmp_path)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_of_a_callback_on_one_rank_stops_all(ranks, tmp_path):
    def stop(trainer, metrics):
        if metrics["step"] == 2:
            trainer.request_stop()

    def of(rank):
        return {"callbacks": [OnStep(stop)] if rank == ranks - 1 else []}

    results = on_ranks(ranks, config_of(tmp_path), of, batches=batches_of())
    assert [(each.step, each.stopped) for each in results] == [(2, True)] * ranks
    assert len(read_metrics(tmp_path)) == 2 and results[0].checkpoint == tmp_path / "checkpoints" / "step-2"


def test_a_stop_of_the_batches_stops_after_their_step(tmp_path):
    """Where no rank has a callback."""
    def run(comm):
        def batches():
            yield batch_of(0)
            if comm.rank == 1:
                trainer.request_stop()
            yield from map(batch_of, range(1, 9))

        trainer = Trainer(config_of(tmp_path), comm, batches=batches())
        trainer.run()
        return trainer.steps_done

    assert spawn(run, 2, timeout=100) == [2, 2]


def test_an_exception_of_a_callback_ends_all_ranks(tmp_path):
    def fails(trainer, metrics):
        raise ZeroDivisionError("of the program")

    others = list[BaseException]()

    def run(comm):
        try:
            fit(config_of(tmp_path), comm, batches=batches_of(), callbacks=[OnStep(fails)] if comm.rank else [])
        except CollectiveError as error:
            others.append(error)
            raise

    with pytest.raises(ZeroDivisionError, match="of the program"):
        spawn(run, 2, timeout=60)
    assert len(others) == 1 and others[0].ranks == (1,)


def test_an_exception_of_the_batches_keeps_its_type(tmp_path):
    """Also an OSError, which the other ranks raise as a KosError."""
    failed, errors = OSError("disk gone"), dict[int, BaseException]()

    def batches(rank):
        yield batch_of(0)
        if rank:
            raise failed
        yield batch_of(1)

    def run(comm):
        with pytest.raises((OSError, KosError)) as caught:
            fit(config_of(tmp_path), comm, batches=batches(comm.rank))
        errors[comm.rank] = caught.value

    spawn(run, 2, timeout=60)
    assert errors[1] is failed and str(errors[0]) == "OSError: disk gone" and type(errors[0]) is KosError


@pytest.mark.parametrize("rows", ["all", "own"])
def test_batches_that_end_end_the_run(rows, tmp_path, capsys):
    def of(rank):
        batches = batches_of(3)
        return {"batches": batches if rows == "all" else [part(each, rank, 2) for each in batches[: 3 - rank]]}

    (first, second) = on_ranks(2, config_of(tmp_path), of, rows=rows)
    assert (first.step, first.stopped) == (second.step, second.stopped) == (3 if rows == "all" else 2, False)
    assert f"the batches ended after step {first.step}; resume with resume='auto'" in capsys.readouterr().out


@pytest.mark.parametrize(("rows", "ranks"), [("all", 1), ("own", 2)])
def test_a_run_resumes_where_its_batches_were(rows, ranks, tmp_path):
    def of(rank):
        stream = Stream(rank, ranks) if rows == "own" else Stream()
        return {"batches": stream, "callbacks": [OnStep(stop)]}

    def stop(trainer, metrics):
        if stops and metrics["step"] == 2:
            trainer.request_stop()

    stops = False
    on_ranks(ranks, config_of(tmp_path / "whole"), of, rows=rows)
    stops = True
    assert on_ranks(ranks, config_of(tmp_path / "run"), of, rows=rows)[0].step == 2
    stops = False
    on_ranks(ranks, config_of(tmp_path / "run", resume="auto"), of, rows=rows)
    assert result(tmp_path / "run") == result(tmp_path / "whole")
    if rows == "own":
        with pytest.raises(ConfigError, match="with rows='own' on 1 ranks of dp, got rows='own' on 2"):
            on_ranks(1, config_of(tmp_path / "run", resume="auto", steps=9), batches=Stream(), rows="own")
    with pytest.raises(ConfigError, match="--resume: expected a checkpoint of batches with rows="):
        on_ranks(ranks, config_of(tmp_path / "run", resume="auto", steps=9), of, rows="own" if rows == "all" else "all")


def test_a_state_that_json_has_not_is_refused(tmp_path):
    stream = Stream()
    stream.state_dict = lambda: {"step": np.int64(1)}
    with pytest.raises(DataError, match="state_dict of the batches: expected values that JSON has, got "):
        fit(config_of(tmp_path, backend="mock"), batches=stream)


def test_elastic(tmp_path):
    """A lost rank changes no bit: the step is made again with the same batch."""
    how = {"deterministic": True, "eval_every": 0, "micro_batch_size": 1}
    spawn(lambda comm: fit(config_of(tmp_path / "whole", **how), comm, batches=Stream()), 2, timeout=60)
    config, faults = config_of(tmp_path / "hurt", elastic="1", **how), [Fault("crash", 1, 4, call="all_to_all")]
    spawn(lambda comm: fit(config, comm, batches=Stream()), 2, timeout=60, faults=faults)
    assert result(tmp_path / "hurt") == result(tmp_path / "whole")
    assert [row["ranks"] for row in read_metrics(tmp_path / "hurt")][-1] == 1
    with pytest.raises(ConfigError, match="--elastic: expected rows='all': the rows of a lost rank would be lost"):
        fit(config_of(tmp_path / "own", elastic="1"), batches=Stream(), rows="own")


def test_a_rank_that_is_lost_while_it_reads_takes_no_batch_of_the_others(tmp_path):
    class Broken(Stream):
        def __init__(self, breaks):
            super().__init__()
            self.breaks = breaks

        def __iter__(self):
            for batch in super().__iter__():
                if self.breaks and self.step == 3:
                    raise RuntimeError("this rank's data is gone")
                yield batch

    how = {"deterministic": True, "eval_every": 0, "micro_batch_size": 1}
    spawn(lambda comm: fit(config_of(tmp_path / "whole", **how), comm, batches=Stream()), 2, timeout=60)
    config = config_of(tmp_path / "hurt", elastic="1", **how)
    with pytest.raises(RuntimeError, match="this rank's data is gone"):
        spawn(lambda comm: fit(config, comm, batches=Broken(comm.rank == 1)), 2, timeout=60)
    assert result(tmp_path / "hurt") == result(tmp_path / "whole")


@pytest.mark.parametrize("same", [True, False])
def test_a_newcomer_brings_what_the_others_bring(same, tmp_path, before_call):
    """Or is refused; it takes part in what their callbacks need."""
    how = {"deterministic": True, "micro_batch_size": 1, "elastic": "1:2", "timeout": 20.0}
    program = {"verbose": False, "val_batches": batches_of(1)}
    given = program if same else {**program, "val_batches": None}
    joined = []

    def make(address):
        joined.append(Trainer(config_of(tmp_path, join=address, **how), batches=Stream(), **given))
        return joined[0]

    threads = invited(before_call, make, at=1)
    steps = list[int]()
    callbacks = [OnStep(lambda trainer, metrics: steps.append(metrics["step"]))]
    on_ranks(1, config_of(tmp_path, steps=6, **how), batches=Stream(), callbacks=callbacks, **program)
    (errors,) = ended(threads)
    if same:
        assert not errors and joined[0].steps_done == 6
    else:
        assert [*map(str, errors)] == ["val_batches: expected True, as on the ranks of the run, got False"]
    assert steps == [1, 2, 3, 4, 5, 6] and read_metrics(tmp_path)[-1]["ranks"] == 1 + same


def test_states_are_those_of_dp(tmp_path):
    how = {"save_every": 1, "steps": 2}
    on_ranks(4, config_of(tmp_path / "first", tp=2, **how), lambda rank: {"batches": Stream(rank // 2, 2)}, rows="own")
    how |= {"resume": str(tmp_path / "first"), "steps": 4}
    on_ranks(2, config_of(tmp_path / "same", **how), lambda rank: {"batches": Stream(rank, 2)}, rows="own")
    assert [step for step, _ in column(tmp_path / "same", "step", "loss")] == [3, 4]
    said = "expected a checkpoint of batches with rows='own' on 4 ranks of dp, got rows='own' on 2"
    with pytest.raises(ConfigError, match=said):
        on_ranks(4, config_of(tmp_path / "other", **how), lambda rank: {"batches": Stream(rank, 4)}, rows="own")


def test_a_trainer_that_fails_to_begin_gives_its_folder_back(tmp_path, before_call):
    failures = [ZeroDivisionError()]

    def fail_once(out, comm):
        if failures:
            raise failures.pop()

    def run(comm):
        before_call(kos.train.trainer, "check_shared", fail_once)
        with pytest.raises(ZeroDivisionError) as failed:
            Trainer(config_of(tmp_path), comm, batches=())
        with Trainer(config_of(tmp_path), comm, batches=()) as trainer:
            trainer.step(batch_of(0))
        del failed

    spawn(run, 1, timeout=60)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_part_of_a_model_is_no_model(axis, tmp_path):
    def run(comm):
        with Trainer(config_of(tmp_path, **{axis: 2}), comm, batches=()) as trainer:
            trainer.step(batch_of(0))
            with pytest.raises(InvalidArgument, match="model: expected ranks that hold the whole model, got 2 ranks"):
                trainer.model  # noqa: B018

    spawn(run, 2, timeout=60)


def test_runs_one_after_another_in_a_thread_and_in_the_main_one(tmp_path):
    """Signals are the program's before and after, and in another thread meanwhile."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
    before, seen, results = [*map(signal.getsignal, numbers)], [], []

    def look(trainer, metrics):
        seen.append([*map(signal.getsignal, numbers)] == before)

    def run(name):
        config = config_of(tmp_path / name, backend="mock")
        results.append(fit(config, batches=batches_of(), callbacks=[OnStep(look)], verbose=False))

    run("first")
    thread = threading.Thread(target=run, args=["thread"])
    thread.start()
    thread.join(60)
    run("last")
    assert [*map(signal.getsignal, numbers)] == before and signal.set_wakeup_fd(-1) == -1
    assert seen == [False] * STEPS + [True] * STEPS + [False] * STEPS
    first, *others = (column(tmp_path / name, "loss", "grad_norm") for name in ("first", "thread", "last"))
    assert others == [first, first] and [each.step for each in results] == [STEPS] * 3


def test_runs_that_are_stopped_leave_no_files_open(tmp_path):
    def stop(trainer, metrics):
        signal.raise_signal(signal.SIGINT)

    def files():
        for thread in threading.enumerate():
            if thread.name == "kos-signals":
                thread.join(10)
        gc.collect()
        return len([*Path("/proc/self/fd").iterdir()])

    opened = list[int]()
    for number in range(3):
        config = config_of(tmp_path / str(number), backend="mock")
        assert fit(config, batches=batches_of(), callbacks=[OnStep(stop)], verbose=False).stopped
        opened.append(files())
    deadline = time.monotonic() + 10
    while opened[-1] > opened[1] and time.monotonic() < deadline:
        time.sleep(0.05)  # what earlier tests left may still be closing
        opened[-1] = files()
    assert opened[-1] <= opened[1]
