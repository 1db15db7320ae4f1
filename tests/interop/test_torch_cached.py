"""Cached calls of the process group of kos, on stand-ins for tensors of a GPU and on tensors of the host."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from kos.comm.gpu import nccl_binding
from kos.dtypes import DTYPES
from kos.errors import InvalidArgument
from tests.comm.fake_gpu import captures
from tests.comm.fake_nccl import FakeNCCL, launching_alone, no_gpu
from tests.comm.gpu_ranks import Prepared
from tests.comm.shared_ranks import needs_core
from tests.interop.ranks import LATE, run

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


@pytest.fixture(scope="module", autouse=True)
def _torch():
    """Imported only when these tests run: the import takes seconds, and every worker collects the tests."""
    global CUDA, SIDE, Options, ProcessGroupKos, connect_gpu, dist, tensors_of_a_gpu, torch
    import torch
    import torch.distributed as dist

    from kos.interop.torch import Options, ProcessGroupKos
    from tests.interop.torch_on_host import CUDA, SIDE, connect_gpu, tensors_of_a_gpu


PROGRAMS = "tests.interop.torch_cached_programs"
LIMIT = timedelta(seconds=20)
FLOAT32 = nccl_binding.CODE_OF[DTYPES["float32"]]


class OneRank:
    """A process group of one rank over the stand-in for NCCL, and what that was called with."""

    def __init__(self, fake: FakeNCCL, cuda: CUDA) -> None:
        self.cuda, self.calls = cuda, list[tuple[Any, ...]]()
        fake.all_reduce = lambda *args: self._called("all_reduce", args)  # type: ignore[method-assign]
        self.group = ProcessGroupKos(dist.HashStore(), 0, 1, LIMIT, [0], Options())
        self.comm = connect_gpu(self.group)
        self.prepared = Prepared(self.comm)

    def _called(self, name: str, args: tuple[Any, ...]) -> None:
        *args, _, stream = args
        self.calls.append((name, *args[:1], *args[2:], stream))
        self.cuda.log.append(("run", max(stream, 1)))

    def all_reduce(self, x: Any, op: Any = None, overlap: bool = False, **options: Any) -> Any:
        opts = dist.AllreduceOptions()
        opts.reduceOp, opts.asyncOp = op or dist.ReduceOp.SUM, overlap
        for name, value in options.items():
            setattr(opts, name, value)
        return self.group.allreduce([x], opts)

    def last(self) -> tuple[Any, ...]:
        return self.calls[-1]

    def cache(self, x: Any, **options: Any) -> None:
        """Make the call until it is prepared."""
        for _ in range(2):
            self.all_reduce(x, **options)
        assert not self.prepared.by(lambda: self.all_reduce(x, **options))


@pytest.fixture
def rank(monkeypatch):
    launching_alone(monkeypatch)
    with no_gpu(monkeypatch) as fake, tensors_of_a_gpu(monkeypatch) as cuda:
        rank = OneRank(fake, cuda)
        yield rank
        rank.group.shutdown()


def ones(count: int = 12, **options: Any) -> Any:
    return torch.ones(count, **options)


def test_later_calls_are_recorded_as_the_first(rank):
    x = ones()
    for overlap in (False, True):
        assert overlap or rank.prepared.by(lambda: rank.all_reduce(x))
        rank.cache(x, overlap=overlap)
    entries = rank.comm.recorder.entries()
    assert [entry["collective_seq_id"] for entry in entries] == list(range(len(rank.calls)))
    for key in ("profiling_name", "input_sizes", "input_dtypes", "reduce_op", "timeout_ms", "process_group"):
        assert all(entry[key] == entries[0][key] for entry in entries)
    assert rank.group._get_sequence_number_for_group() == len(rank.calls)


def test_another_call_on_the_same_memory_is_another(rank):
    x = ones()
    rank.cache(x)
    stream, external = rank.cuda.Stream(), rank.cuda.Stream(handle=9000, stream_id=9000)
    place = x.data_ptr()
    rank.all_reduce(x)
    assert rank.last() == ("all_reduce", place, 12, FLOAT32, nccl_binding.SUM, 1)
    assert rank.prepared.by(lambda: rank.all_reduce(x, dist.ReduceOp.AVG))
    assert rank.last() == ("all_reduce", place, 12, FLOAT32, nccl_binding.AVG, 1)
    assert not rank.prepared.by(lambda: rank.all_reduce(x, overlap=True)), "which is a matter of streams here"
    assert rank.last() == ("all_reduce", place, 12, FLOAT32, nccl_binding.SUM, SIDE)
    for other in (stream, external):
        for _ in range(4):
            with rank.cuda.stream(other):
                prepares = rank.prepared.by(lambda: rank.all_reduce(x))
            assert not prepares and rank.last()[-1] == other.cuda_stream
            assert not rank.prepared.by(lambda: rank.all_reduce(x)) and rank.last()[-1] == 1
    y = x.view(3, 4)
    assert rank.prepared.by(lambda: rank.all_reduce(y)), "its shape is recorded"
    assert rank.comm.recorder.entries()[-1]["input_sizes"] == [[3, 4]]


def test_factors_of_a_premultiplied_sum_are_different_calls(rank, before_call):
    x, factors = ones(), list[float]()
    before_call(nccl_binding, "premultiplied_sum", lambda comm, factor, dtype: factors.append(factor))
    for factor in (2.0, 2.0, 2.0, 3.0, 2.0):
        rank.all_reduce(x, dist._make_nccl_premul_sum(factor))
    assert factors == [2.0, 2.0, 2.0, 3.0, 2.0]


@needs_core
def test_tensors_that_kos_takes_as_they_are():
    from kos.interop.torch.tensors import is_plain

    x, other, here = ones().view(3, 4), torch.empty(1, device="meta"), -1  # ``get_device()`` of a tensor on the host
    assert all(is_plain(each, here) for each in (x, x[1:], x[:0], x.view(-1)[2], x.bfloat16(), x > 0))
    refused = {
        "strided": x.T, "expanded": x[:1].expand(3, 4), "negated": torch._neg_view(x), "sparse": x.to_sparse(),
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(), "without memory": other,
        "zeros": torch._efficientzerotensor((2,)), "requires a gradient": ones(requires_grad=True),
        "a parameter": torch.nn.Parameter(x, requires_grad=False),
    }  # fmt: skip
    assert not [what for what, each in refused.items() if is_plain(each, here)]
    assert not is_plain(x, 0), "of another device"


@needs_core
def test_a_cached_call_aside_leaves_the_current_stream(rank, monkeypatch):
    x, y = ones(), ones()
    rank.cache(x, overlap=True)
    monkeypatch.setattr("torch._C._cuda_setStream", None)
    rank.all_reduce(x, overlap=True, timeout=timedelta(seconds=7))
    assert rank.last()[-1] == SIDE and rank.comm.recorder.entries()[-1]["timeout_ms"] == 7000
    rank.group.all_gather_single(y, x)
    assert rank.comm.recorder.entries()[-1]["profiling_name"] == "nccl:all_gather"


def test_the_same_arguments_of_another_operation_are_another_call(rank):
    x, y = ones(), ones()
    for _ in range(3):
        rank.group.all_gather_single(y, x)
    rank.group.alltoall([y], [x])
    names = [entry["profiling_name"] for entry in rank.comm.recorder.entries()]
    assert names == ["nccl:all_gather"] * 3 + ["nccl:all_to_all_v"]


def test_memory_of_another_gpu_is_refused(rank, monkeypatch):
    x = ones()
    rank.cache(x)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 1))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1)
    with pytest.raises(InvalidArgument, match=r"expected memory of cuda:0, as in earlier calls, got cuda:1"):
        rank.all_reduce(x)


def test_a_cached_call_on_the_host_keeps_no_tensor_alive():
    group, opts = ProcessGroupKos(dist.HashStore(), 0, 1, LIMIT, [0], Options()), dist.AllreduceOptions()
    opts.asyncOp = False
    prepared, memory = Prepared(group._host), np.ones(12, np.float32)
    tensors = [torch.from_numpy(memory)]
    for turn in range(5):
        assert prepared.by(lambda: group.allreduce(tensors, opts)) == (turn == 0)
    opts.asyncOp = True
    assert not prepared.by(lambda: group.allreduce(tensors, opts).wait())
    alive = weakref.ref(memory)
    del memory
    tensors.clear()
    gc.collect()
    assert alive() is None
    group.shutdown()


def test_a_call_aside_follows_the_current_stream_and_a_wait_follows_the_call(rank):
    x, stream, log = ones(), rank.cuda.Stream(), rank.cuda.log
    for turn in range(4):
        log.clear()
        with rank.cuda.stream(stream):
            work = rank.all_reduce(x, overlap=True)
        before, follow, ran = log
        assert before[:2] == ("record", stream.cuda_stream) and follow == ("wait", SIDE, before[2]), turn
        assert ran == ("run", SIDE)
        log.clear()
        work.wait()
        after, waits = log
        assert after[:2] == ("record", SIDE) and waits == ("wait", 0, after[2])
        del work


def test_record_stream_is_called_unless_the_callers_stream_has_waited(rank):
    x, stream, used = ones(), rank.cuda.Stream(), ("use", SIDE)
    alive = weakref.ref(memory := np.ones(12, np.float32))
    rank.cache(x, overlap=True)
    for streams, marked in (([], True), ([stream], True), ([None], False), ([stream, None], False)):
        rank.cuda.log.clear()
        work = rank.all_reduce(x, overlap=True)
        for each in streams:
            with rank.cuda.stream(each):
                work.wait()
        assert used not in rank.cuda.log, "not while the Work holds its tensors"
        del work
        assert (used in rank.cuda.log) == marked, streams
    work = rank.all_reduce(torch.from_numpy(memory), overlap=True)
    del memory
    gc.collect()
    assert alive() is not None and work.result()[0].numel() == 12
    work.wait()
    del work
    gc.collect()
    assert alive() is None


def test_a_wait_does_not_follow_later_calls(rank):
    x, log = ones(), rank.cuda.log
    for _ in range(4):
        first, polled = (rank.all_reduce(x, overlap=True) for _ in range(2))
        assert polled.is_completed()
        log.clear()
        second = rank.all_reduce(x, overlap=True)
        assert ("record", SIDE) not in [entry[:2] for entry in log], "polled has its event"
        log.clear()
        third = rank.all_reduce(x, overlap=True)
        (recorded, stream, event), *_, ran = log
        assert (recorded, stream) == ("record", SIDE) and ran == ("run", SIDE), "an event of the second first"
        log.clear()
        for work in (first, polled, second, second):
            work.wait()
        events = [entry[2] for entry in log]
        assert [entry[:2] for entry in log] == [("wait", 0)] * 4 and events[2:] == [event] * 2
        assert len(set(events)) == 3
        log.clear()
        third.wait()
        assert [entry[:2] for entry in log] == [("record", SIDE), ("wait", 0)] and log[0][2] not in events


def test_a_future_is_complete_on_the_stream_of_the_call(rank):
    x, log = ones(), rank.cuda.log
    for _ in range(3):
        work = rank.all_reduce(x, overlap=True)
        for device in (0, 1):
            rank.cuda.device, before = device, rank.cuda.current
            log.clear()
            assert work.get_future().value()[0] is x
            assert log == [("future", SIDE)]
            assert rank.cuda.current is before and rank.cuda.device == device
        rank.cuda.device = 0
        del work
        log.clear()
        rank.all_reduce(x, overlap=True)
        assert ("record", SIDE) not in [entry[:2] for entry in log], "nobody can wait for it"


def test_the_flight_recorder_of_torch_leaves_groups_of_kos_alone(monkeypatch):
    """That of torch 2.15 attaches to C++ groups alone, and failed on one in Python."""
    from kos.interop import autoload

    monkeypatch.setattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", recorders := set(), raising=False)
    autoload.register()
    assert recorders == {"kos"}


def test_messages_to_this_rank_are_copied_in_their_order(rank):
    first, second = torch.arange(6.0).view(2, 3), torch.arange(4.0) + 10
    x, y = torch.zeros(6), torch.zeros(4)
    send, recv = rank.group.send, rank.group.recv
    works = [recv([x], 0), send([first], 0), send([second], 0), recv([y], 0)]
    for work in works:
        work.wait()
    assert x.tolist() == first.flatten().tolist() and y.tolist() == second.tolist()
    assert not rank.calls  # NCCL was not asked


@pytest.mark.parametrize("given", [(3, "float32"), (4, "float64")])
def test_a_message_to_this_rank_that_does_not_fit(rank, given):
    count, dtype = given
    out = torch.zeros(count, dtype=getattr(torch, dtype))
    rank.group.send([ones(4)], 0)
    with pytest.raises(InvalidArgument, match=rf"expected \(4, torch.float32\) .* got \({count}, torch.{dtype}\)"):
        rank.group.recv([out], 0).wait()
    assert not out.any()


def test_messages_of_parameters_to_this_rank(rank):
    """Autograd records nothing, as of messages to other ranks."""
    x, out = (torch.nn.Parameter(ones(4)) for _ in range(2))
    x.data.fill_(3)
    works = [rank.group.send([x], 0), rank.group.recv([out], 0)]
    assert all(work.wait() for work in works)
    assert out.tolist() == [3.0] * 4 and out.is_leaf and out.requires_grad


def test_a_message_that_was_not_launched_is_not_complete(rank):
    work = rank.group.send([ones(4)], 0)
    with pytest.raises(InvalidArgument, match="as many sends as receives in a batch, got 1 sends and 0 receives"):
        work.wait()
    for wait in (work.wait, work.is_completed, work.get_future):
        with pytest.raises(torch.distributed.DistBackendError, match="send: not launched, because messages"):
            wait()


def test_a_captured_call_is_launched_in_the_capture(rank):
    x = ones()
    rank.cache(x)
    with captures():
        before = len(rank.calls)
        rank.all_reduce(x)
        assert len(rank.calls) == before + 1
    assert not rank.prepared.by(lambda: rank.all_reduce(x))


def test_every_collective_gives_what_gloo_gives_when_it_is_cached():
    for ours, theirs in zip(run(f"{PROGRAMS}:on_stand_ins"), run(f"{PROGRAMS}:collectives", 2, "gloo"), strict=True):
        sums = [1.0 + 2 * turn for turn in range(4)]
        assert ours == [theirs] * 4 + [[[total] * 6, [total, 0.0, total]] for total in sums]


def test_calls_on_the_host_give_what_gloo_gives_when_they_are_cached():
    assert run(f"{PROGRAMS}:on_the_host") == run(f"{PROGRAMS}:on_the_host", 2, "gloo")


def test_a_tensor_with_a_sign_to_be_applied_is_reduced_in_place():
    assert run(f"{PROGRAMS}:signs") == [[2.0 * turn for turn in range(4) for _ in range(2)]] * 2


def test_failures_of_cached_calls_are_named():
    for rank, (mismatch, again, destroyed, *late) in enumerate(run(f"{PROGRAMS}:cached_errors")):
        assert "count 3 against 4" in mismatch and "failed before" in again and "is closed" in destroyed
        assert all("timeout" in text and f"not complete after 0.5 s; {LATE}" in text for text in late)
        assert len(late) == 1 - rank
