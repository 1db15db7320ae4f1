"""The operations of a process group, with the names and arguments of torch.

An operation is a list of calls of the communicator on tensors, or a function of a ``Recording``, which provides the
communicator's methods, and several tensors as one array.
torch's C++ calls only the operations that DDP and the functional collectives use; Python calls all of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kos.errors import InvalidArgument
from kos.interop.torch.launch import Recording
from kos.interop.torch.tensors import Tensor, as_array, check_parts, reduce_op, split_counts
from kos.interop.torch.works import NONE

_C: Any = torch._C
_ProcessGroup: Any = dist.ProcessGroup  # Any: one signature cannot override its overloads

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}  # parameter -> field of torch's options


def _overloaded(kind: Any, other: str) -> Callable[[Any], Any]:
    """Allow calls of a method in the form of torch's other overload, whose parameters are ``other``.

    The method takes tensors, and then options of the class ``kind``.  The other overload takes the same without the
    outer lists, and then the options one by one: ``allreduce(tensor, op, timeout)``.  Both can be called by name.
    """
    names = other.split()

    def decorate(method: Any) -> Any:
        own = list(inspect.signature(method).parameters)[1:-1]  # without self and the options
        count, renamed = len(own), dict(zip(own, names, strict=False))

        @functools.wraps(method)
        def call(self: Any, *args: Any, **keywords: Any) -> Any:
            if not keywords and len(args) == count + 1 and isinstance(args[count], kind):
                return method(self, *args)
            options = args[count] if len(args) > count and hasattr(args[count], "timeout") else None
            values = [*args[:count], *args[count + 1 :]] if options is not None else args
            given = {**dict(zip(names, values, strict=False)), **{renamed.get(n, n): x for n, x in keywords.items()}}
            options = given.pop("opts", options)
            if len(values) > len(names) or not set(names[:count]) <= given.keys() <= set(names):
                expected = f"({', '.join([*own, 'opts'])}) or ({', '.join(names)})"
                raise TypeError(f"{method.__name__}: expected {expected}, got {len(args)} and {list(keywords)}")
            tensors = [given.pop(name) for name in names[:count]]
            if names[:count] != own and any(map(torch.is_tensor, tensors)):
                tensors = [[x] for x in tensors]
            if options is None:
                options = kind()
                for name, value in given.items():
                    if value is not None:
                        setattr(options, _FIELDS[name], value)
            return method(self, *tensors, options)

        return call

    return decorate


class Operations(_ProcessGroup):
    """The operations of ``ProcessGroupKos``, which launches them: ``_launch``, and ``_post`` for messages on a GPU."""

    # Collectives.

    @_overloaded(_C._distributed_c10d.AllreduceOptions, "tensor op timeout")
    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce each tensor over all ranks, in place.  Raises DistBackendError, InvalidArgument."""
        op = opts.reduceOp
        return self._launch([("all_reduce", (x, reduce_op(op, x))) for x in tensors], tensors, opts, "allreduce")

    allreduce_coalesced = allreduce

    @_overloaded(_C._distributed_c10d.BroadcastOptions, "tensor root timeout")
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Copy each tensor of rank ``rootRank`` to all ranks, in place.  Raises DistBackendError, InvalidArgument."""
        root = opts.rootRank
        return self._launch([("broadcast", (x, root)) for x in tensors], tensors, opts, "broadcast")

    @_overloaded(_C._distributed_c10d.ReduceOptions, "tensor root op timeout")
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce the tensor to rank ``rootRank``, in place.  Raises DistBackendError, InvalidArgument."""
        x = tensors[0]
        return self._launch([("reduce", (x, opts.rootRank, reduce_op(opts.reduceOp, x)))], tensors, opts, "reduce")

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """``output`` receives all inputs in rank order.  Raises DistBackendError, InvalidArgument."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """``all_gather_single`` of several pairs, in one batch.  Raises DistBackendError, InvalidArgument."""
        calls = [("all_gather", (x, out)) for x, out in zip(inputs, outputs, strict=True)]
        return self._launch(calls, [*outputs, *inputs], opts, "all_gather_single")

    @_overloaded(_C._distributed_c10d.AllgatherOptions, "output_tensors input_tensor timeout")
    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> Any:
        """Gather input i of rank r to ``output_tensors[i][r]``, any size.  Raises DistBackendError, InvalidArgument."""
        for parts in output_tensors:
            check_parts(parts, self.size(), "allgather")

        def call(launch: Recording) -> None:
            for input, parts in zip(input_tensors, output_tensors, strict=True):
                sizes, joined = [part.numel() for part in parts], launch.joined_output(parts)
                if len(set(sizes)) == 1:
                    launch("all_gather", as_array(input), joined)
                else:
                    launch("all_gather_v", as_array(input), sizes, joined)

        tensors = [*(part for parts in output_tensors for part in parts), *input_tensors]
        return self._launch(call, tensors, opts, "allgather", len(input_tensors) > 1)

    def allgather_coalesced(self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None) -> Any:
        """``output_lists[r][i]`` receives input i of rank r.  Raises DistBackendError, InvalidArgument."""
        outputs = [list(parts) for parts in zip(*output_lists, strict=True)]
        return self.allgather(outputs, input_list, opts=opts)

    @_overloaded(_C._distributed_c10d.GatherOptions, "output_tensors input_tensor root timeout")
    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> Any:
        """``output_tensors[0][r]`` of ``rootRank`` receives input r.  Raises DistBackendError, InvalidArgument."""
        parts = output_tensors[0] if self.rank() == opts.rootRank else []
        if parts:
            check_parts(parts, self.size(), "gather")

        def call(launch: Recording) -> None:
            launch("gather", as_array(input_tensors[0]), opts.rootRank, launch.joined_output(parts) if parts else None)

        return self._launch(call, [*parts, *input_tensors], opts, "gather")

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        """``output`` of ``rootRank`` receives all inputs in rank order.  Raises DistBackendError, InvalidArgument."""
        outputs = [output] if self.rank() == opts.rootRank else []

        def call(launch: Recording) -> None:
            launch("gather", as_array(input), opts.rootRank, launch.output(output) if outputs else None)

        return self._launch(call, [*outputs, input], opts, "gather_single")

    gather_into_tensor = gather_single

    @_overloaded(_C._distributed_c10d.ScatterOptions, "output_tensor input_tensors root timeout")
    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> Any:
        """Rank r receives ``input_tensors[0][r]`` of rank ``rootRank``.  Raises DistBackendError, InvalidArgument."""
        parts = input_tensors[0] if self.rank() == opts.rootRank else []
        if parts:
            check_parts(parts, self.size(), "scatter")

        def call(launch: Recording) -> None:
            launch("scatter", launch.joined(parts) if parts else None, launch.output(output_tensors[0]), opts.rootRank)

        return self._launch(call, [*output_tensors, *parts], opts, "scatter")

    @_overloaded(_C._distributed_c10d.ReduceScatterOptions, "output input op timeout")
    def reduce_scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> Any:
        """Reduce ``input_tensors[0][r]`` to rank r; sizes may differ.  Raises DistBackendError, InvalidArgument."""
        output, parts, op = output_tensors[0], input_tensors[0], opts.reduceOp
        check_parts(parts, self.size(), "reduce_scatter")

        def call(launch: Recording) -> None:
            sizes = [part.numel() for part in parts]
            if len(set(sizes)) == 1:
                launch("reduce_scatter", launch.joined(parts), launch.output(output), reduce_op(op, output))
            else:
                launch("reduce_scatter_v", launch.joined(parts), sizes, launch.output(output), reduce_op(op, output))

        return self._launch(call, [output, *parts], opts, "reduce_scatter")

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Any:
        """Rank r receives shard r of the reduction along dimension 0.  Raises DistBackendError, InvalidArgument."""
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """``reduce_scatter_single`` of several pairs, in one batch.  Raises DistBackendError, InvalidArgument."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        calls = [("reduce_scatter", (x, out, reduce_op(op, out))) for x, out in zip(inputs, outputs, strict=True)]
        return self._launch(calls, [*outputs, *inputs], opts, "reduce_scatter_single")

    @_overloaded(_C._distributed_c10d.AllToAllOptions, "output input output_split_sizes input_split_sizes timeout")
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], opts: Any
    ) -> Any:
        """Shard r goes to rank r; splits are rows, none: equal ones.  Raises DistBackendError, InvalidArgument."""
        call: tuple[str, tuple[Any, ...]] = "all_to_all", (input, output)
        if output_split_sizes or input_split_sizes:
            splits = (input, input_split_sizes), (output, output_split_sizes)
            counts = (split_counts(x, rows, self.size()) for x, rows in splits)
            call = "all_to_all_v", (input, *counts, output)
        return self._launch([call], [output, input], opts, "all_to_all_single")

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> Any:
        """``output_tensors[r]`` receives what rank r has for this one.  Raises DistBackendError, InvalidArgument."""
        for parts in (output_tensors, input_tensors):
            check_parts(parts, self.size(), "alltoall")

        def call(launch: Recording) -> None:
            send, recv = ([part.numel() for part in parts] for parts in (input_tensors, output_tensors))
            launch("all_to_all_v", launch.joined(input_tensors), send, recv, launch.joined_output(output_tensors))

        return self._launch(call, [*output_tensors, *input_tensors], opts, "alltoall")

    # The names of torch 2.11 and 2.12.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @_overloaded(_C._distributed_c10d.BarrierOptions, "timeout")
    def barrier(self, opts: Any) -> Any:
        """Wait for all ranks and for their current streams.  Raises DistBackendError, InvalidArgument."""
        if self._gpu is not None:
            torch.cuda.current_stream(self.device).synchronize()
        return self._launch(lambda launch: launch("barrier"), [torch.empty(0)], opts, "barrier")

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the first missing rank after ``timeout``, or with ``wait_all_ranks`` all of them.

        ``timeout`` None is the group's.  Raises ``dist.DistBackendError`` with the texts of ``dist.monitored_barrier``.
        """
        opts = dist.BarrierOptions()
        opts.timeout = timedelta(seconds=self._timeout) if timeout is None else timeout
        if opts.timeout <= NONE:
            after = f"after {opts.timeout.total_seconds():g} s"
            raise dist.DistBackendError(f"kos: Rank {self.rank()} timed out in monitoredBarrier {after}")
        try:
            self.barrier(opts).wait()
        except dist.DistBackendError as error:
            ranks = getattr(error.__cause__, "ranks", ())
            missing = f"Ranks {', '.join(map(str, ranks))}" if wait_all_ranks else f"Rank {min(ranks, default='?')}"
            raise dist.DistBackendError(f"{error}: {missing} failed to pass monitoredBarrier") from error.__cause__

    # Messages.

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:
        """Send one tensor; on a GPU ``tag`` is ignored.  Raises DistBackendError, InvalidArgument."""
        if tensors[0].is_cuda:
            return self._post(tensors, "send", dstRank)
        return self._launch(lambda launch: launch("send", as_array(tensors[0]), dstRank, tag), tensors, None, "send")

    def recv(self, tensors: list[Tensor], srcRank: int | None, tag: int = 0) -> Any:
        """Receive one tensor of the sent size and dtype, in place.  Raises DistBackendError, InvalidArgument."""
        x = tensors[0]
        if x.is_cuda:
            return self._post(tensors, "recv", srcRank)
        return self._launch(lambda launch: launch("recv", launch.output(x), srcRank, tag), tensors, None, "recv")

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive from any rank, in host memory; see ``source_rank``.  Raises DistBackendError, InvalidArgument."""
        if tensors[0].is_cuda:
            raise InvalidArgument("recv: expected a source rank for a tensor on a GPU, got any")
        return self.recv(tensors, None, tag)
