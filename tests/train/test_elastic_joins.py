"""``--join``: newcomers join an elastic run, which has the bits of one in which nothing happened."""

import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kos
from kos.comm import groups
from kos.comm.communicator import Communicator
from kos.errors import BackendUnavailable, CollectiveError, ConfigError, RankLost, RendezvousError, TrainingError
from kos.testing import Fault
from kos.train import checkpoint, elastic
from kos.train.checkpoint import saving
from kos.train.data import packing
from kos.train.folder import ADDRESS
from kos.train.trainer import Trainer
from tests.train.elastic_runs import RANKS, config_of, ranks_of, text, train, unhurt, until
from tests.train.newcomers import ended, invite
from tests.train.test_loss_masks import write_lines

__all__ = ["text", "unhurt"]


@pytest.mark.parametrize("newcomers", [1, 2])
@pytest.mark.parametrize("zero", [0, 1])
def test_newcomers_get_all_from_the_ranks(zero, newcomers, text, tmp_path, unhurt, before_call):
    """It replaces a lost rank. Or two join one: with ZeRO-1 ranks hold different parts of what one rank held whole."""
    asked = {"ranks": 3} if newcomers == 1 else {"at": 2, "count": 2}
    threads = invite(before_call, text, tmp_path, zero=zero, **asked)
    if newcomers == 1:
        assert train(text, tmp_path, [Fault("crash", 1, 4, call="all_to_all")], zero=zero) == unhurt
        assert ranks_of(tmp_path) == [(4, 0)] * 2 + [(3, 1)] + [(4, 2)] * 3
    else:
        assert train(text, tmp_path, ranks=1, zero=zero, elastic="1:3") == unhurt
        assert ranks_of(tmp_path) == [(1, 0)] * 3 + [(3, 1)] * 3
    assert ended(threads) == [[]] * len(threads)
    assert len(threads) == newcomers


def test_newcomers_know_of_skipped_steps(text, tmp_path, before_call):
    """Of two steps, the first of which was skipped, they continue after one update."""
    how = {"skip_outliers": 1.42}
    alone = train(text, tmp_path / "alone", ranks=1, elastic=None, **how)
    assert [norm > 1.42 for _, _, norm, *_ in alone[0]][:3] == [True, False, False]
    threads = invite(before_call, text, tmp_path / "run", at=1, count=2, **how)
    assert train(text, tmp_path / "run", ranks=1, elastic="1:3", **how) == alone
    assert ranks_of(tmp_path / "run")[1:3] == [(1, 0), (3, 1)] and ended(threads) == [[], []]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_checkpoint_is_completed_before_ranks_leave_or_join(leaves, text, tmp_path, unhurt, before_call):
    """No rank waits for its files: the run goes on with the same ranks until they are complete."""
    may_end = threading.Event()

    def start_step(elastic, step, stop_request):
        run = elastic.run
        if leaves and step == 2 and run.mesh.world.rank == 3:
            run.stop.request(signal.SIGUSR1)
        if step == 4 and (files := run.saving) is not None:
            may_end.set()
            until(lambda: files.done)

    before_call(saving, "write_tensors", lambda *_: may_end.wait(60))
    before_call(elastic.Elastic, "start_step", start_step)
    threads = [] if leaves else invite(before_call, text, tmp_path)
    assert train(text, tmp_path, elastic="1:5", keep=10, save_async=True, save_every=3) == unhurt
    assert [step for step, _ in checkpoint.steps_in(tmp_path / "checkpoints")] == [3, 6]
    assert ranks_of(tmp_path) == [(4, 0)] * 5 + [(3 if leaves else 5, 1)]
    assert ended(threads) == [[]] * len(threads)


def test_some_ranks_know_of_a_loss_where_others_grow(text, tmp_path, unhurt, before_call):
    """One has called shrink, and the others grow, each of them late: all go on without the rank that is lost."""
    calls = Counter[int]()

    def admit(self):
        if self.run.epoch == 0:
            if (rank := self.run.comm.rank) == 1:
                raise RankLost("a rank is lost")  # as in a validation that has ended on the other ranks
            until(lambda: calls[1] >= max(1, rank))  # the others before it have made rank 1 begin again

    before_call(Communicator, "shrink", lambda comm: calls.update([comm.rank]))
    invite(before_call, text, tmp_path, admit=admit)
    assert train(text, tmp_path, elastic="1:5") == unhurt
    assert calls[1] == RANKS and elastic.TRIES < RANKS


def test_a_newcomer_without_the_backend_does_not_end_the_run(text, tmp_path, unhurt, before_call, capsys):
    def communicator(*arguments, **options):
        arguments[2].close()
        raise BackendUnavailable("nccl: rank 4: no module named nccl")

    before_call(groups, "communicator", communicator)
    invite(before_call, text, tmp_path)
    assert train(text, tmp_path, elastic="1:5") == unhurt
    assert "no rank joined: nccl: rank 4: no module named nccl" in capsys.readouterr().out


def test_a_newcomer_whose_ranks_die_meanwhile_says_so(text, tmp_path, before_call):
    """It knows nothing of the run yet."""

    def dies(run):
        raise TrainingError("the machine goes down")

    before_call(elastic, "facts_of", dies)
    threads = invite(before_call, text, tmp_path)
    with pytest.raises(TrainingError, match="the machine goes down"):
        train(text, tmp_path, elastic="1:5")
    for (error,) in ended(threads):
        said = "expected a rank that has the state of the run, got newcomers alone"
        assert type(error) is CollectiveError and said in str(error)
        assert str(error).startswith("while joining the run at threads:")


@pytest.mark.parametrize(("changes", "said"), [
    ({"seed": 5}, "--seed: expected 1337, which the run has, got 5"),
    ({"fit": "whole"}, "--fit: expected cut, which the run has, got whole; add --fit cut"),
    ({}, "--data: expected letters.txt ([0-9a-f]{12}), which the run has, got other.txt"),
])  # fmt: skip
def test_a_newcomer_with_other_settings_is_refused(changes, said, text, tmp_path, unhurt, before_call, capsys):
    """By name, on its side and on theirs; the ranks go on, and say nothing of a rank that is gone."""
    (other := tmp_path / "other.txt").write_bytes(text.read_bytes()[::-1])
    threads = invite(before_call, text if changes else other, tmp_path, **changes)
    assert train(text, tmp_path, elastic="1:5") == unhurt
    ((error,),) = ended(threads)
    assert type(error) is ConfigError
    assert re.match(re.escape(said).replace(re.escape("[0-9a-f]{12}"), "[0-9a-f]{12}"), str(error))
    out = capsys.readouterr().out
    assert f"a newcomer was refused: {error}" in out and " left " not in out and " lost " not in out
    assert {ranks for ranks, _ in ranks_of(tmp_path)} == {RANKS}


@pytest.mark.parametrize("how", ["held out", "packed", "by address"])
def test_a_newcomer_reads_the_data_as_a_resumed_run(how, text, tmp_path, monkeypatch, before_call, capsys):
    """With the flags of the run, which holds out what it did before, and keeps a plan that an older version made."""
    by_address, changes = kos.join, dict[str, Any](eval_batches=0)

    def by_file(where, timeout):  # ``kos.join`` reads addresses of TCP alone
        return by_address(Path(where).read_text() if Path(where).is_file() else where, timeout=timeout)

    monkeypatch.setattr(kos, "join", by_file)
    made = packing.make_plan
    if how == "packed":
        text = write_lines(tmp_path / "texts.jsonl", [{"text": "ring " * (1 + n % 3)} for n in range(99)])
        changes = {"fit": "whole", "seq_len": 32}
    with monkeypatch.context() as patched:
        patched.setattr(packing, "make_plan", lambda tokens, length, seed, skips: made(tokens, length, seed + 1, skips))
        train(text, tmp_path / "out", ranks=1, **{**changes, "steps": 2, "eval_batches": 2})
    address = "" if how == "by address" else str(tmp_path / "out" / ADDRESS)
    threads = invite(before_call, text, tmp_path / "out", at=3, address=address, **changes)
    train(text, tmp_path / "out", ranks=1, resume="auto", elastic="1:5", **changes)
    (errors,) = ended(threads)
    if how == "by address":
        assert str(errors[0]) == "--hold-out: expected 0.1, which the run has, got 0; add --hold-out 0.1"
        threads = invite(before_call, text, tmp_path / "out", at=7, hold_out=0.1, **changes)
        train(text, tmp_path / "out", ranks=1, resume="auto", elastic="1:5", **changes, steps=10)
        (errors,) = ended(threads)
    assert not errors and ranks_of(tmp_path / "out")[-1] == (2, 1), capsys.readouterr().out


def test_a_newcomer_takes_settings_that_change_no_number(text, tmp_path, unhurt, before_call):
    changes = {"log_every": 7, "keep": 9, "tracker": ("tensorboard",), "save_every": 1, "timeout": 29.0}
    threads = invite(before_call, text, tmp_path, **changes)
    assert train(text, tmp_path, elastic="1:5") == unhurt
    assert ended(threads) == [[]] and ranks_of(tmp_path)[-1] == (5, 1)


def test_a_spare_waits_for_the_run(text, tmp_path, before_call):
    """Longer than the timeout: until it has written its address; once that is gone, the run is over."""
    address, calls = tmp_path / ADDRESS, list[float]()

    def nobody(where, timeout):
        calls.append(timeout)
        assert address.exists()
        if len(calls) == 2:
            address.unlink()
        time.sleep(timeout)
        raise RendezvousError("join: nobody admits newcomers")

    before_call(kos, "join", nobody)
    threading.Timer(0.2, address.write_text, ["127.0.0.1:9"]).start()
    with pytest.raises(RendezvousError, match="join: nobody"):
        Trainer(config_of(text, tmp_path, elastic="1", join=str(address), timeout=0.01))
    assert len(calls) == 2


def test_nobody_is_there(text, tmp_path):
    with pytest.raises(RendezvousError, match="join: "):
        Trainer(config_of(text, tmp_path, elastic="1", join="127.0.0.1:9", timeout=0.5))
