"""The physical limits of rows (defined in ``__init__.py``), measured in the same run.

Host: (input + output) / 2 bytes are copied by every rank at once, in slots, batches and mode of the row: each byte
of the input is read once, each of the output written once.  For an all_reduce in place the copy is one pass that
reads and writes its array.  GPU: flags travel by release stores and acquire loads of one thread on each of two
GPUs; the bandwidth is what one copy engine sends while all other links are idle; factor x bytes is what must leave
and enter each GPU, without multicast or reductions in the switch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kos.bench.cases import ROOT, Case
from kos.bench.implementations import Call
from kos.bench.measure import Job, Run
from kos.comm.host.shared import open_segment
from kos.cuda import streams

_ROUNDS, _REPEATS = 200, 15
_DEVICE_FLAG_ROUNDS = 1000
_COPY_BYTES = 256 << 20
_FLAG_CYCLES = 4_000_000_000  # a deadline of about two seconds


class CopySpace:
    """Slots of the copy that a host row is held against, in the caches as a row's are."""

    def __init__(self, nbytes: int, in_place: bool, slots: int) -> None:
        words = -(-nbytes // 8)
        self._in_place = in_place
        self._arrays = [np.empty((1 if in_place else 2, words), np.uint64) for _ in range(slots + 1)]

    def calls(self) -> Sequence[Call]:
        if self._in_place:
            return [partial(np.invert, array[0], array[0]) for array in self._arrays]
        return [partial(np.copyto, array[1], array[0]) for array in self._arrays]

    def fill(self, slot: int, iteration: int) -> None:
        array = self._arrays[slot]
        array[-1].fill(-1 % 2**64)
        array[0].fill(iteration)

    def check(self, slot: int, iteration: int) -> None:
        pass  # nobody's result

    def wrong(self) -> int:
        return 0


def copy_run(case: Case, rank: int, slots: int) -> Run:
    """The copy of ``case`` on a rank that has an input, an output or both."""
    op, at_root = case.op.removesuffix("_v"), rank == ROOT
    elements = case.sends(rank) * (at_root or op not in ("broadcast", "scatter"))
    elements += case.receives(rank) * (at_root or op not in ("reduce", "gather"))
    in_place = case.in_place and case.op == "all_reduce"
    space: Any = CopySpace(max(1, elements * case.dtype.itemsize // 2), in_place, slots)
    return Run("copy", space, space.calls())


def host_flag_us(job: Job) -> float:
    """The round trip of a flag through shared memory to another process of this host, in us; 0 if there is none."""
    if job.is_mock or job.size == 1 or (os.cpu_count() or 1) < 2:
        return 0.0
    segment, _ = open_segment(job.comm.rendezvous)
    best = 0.0
    if segment is not None:
        words = segment.bytes[segment.texts : segment.texts + 3 * 128].cast("Q")
        if segment.rank < 2:
            mine, other = (0, 16) if segment.rank == 0 else (16, 0)
            best = min(_ping_pong(words, mine, other, segment.rank == 0, r * _ROUNDS) for r in range(_REPEATS))
            words[32] = 1
        while not words[32]:
            time.sleep(0.001)  # the others leave their cores to the two
        words.release()
        segment.close()
    return float(job.gather([best])[:, 0].max())


def _ping_pong(words: Any, mine: int, other: int, first: bool, start: int) -> float:
    began = time.perf_counter_ns()
    for value in range(start + 1, start + _ROUNDS + 1):
        if first:
            words[mine] = value
        while words[other] != value:
            pass
        if not first:
            words[mine] = value
    return (time.perf_counter_ns() - began) / _ROUNDS / 1e3


class DeviceLimits:
    """What this rank's GPU and its links can do: ``launch_us``, ``flag_us`` (there and back), ``pair_gbps``."""

    def __init__(self, job: Job, device: int, stream: Any) -> None:
        from kos.cuda import load_kernel

        self._stream, self._handle = stream, int(stream.handle)
        source = Path(__file__).with_name("device.cu")
        empty = load_kernel(source, "empty", device).bind(1, 32)
        self.launch_us = self._graph_us([partial(empty, stream)] * 100, 20)
        self.flag_us, self.pair_gbps = 0.0, 0.0
        if job.size > 1:
            self._measure_links(job, device, load_kernel(source, "ping_pong", device))

    def _measure_links(self, job: Job, device: int, ping_pong: Any) -> None:
        from kos.cuda.driver import call, cu
        from kos.memory.symmetric import SymmetricMemory

        with SymmetricMemory(job.comm.rendezvous, 2 * _COPY_BYTES + 4096, device) as slab:
            flag = -1.0
            if job.rank < 2:
                pointers = slab.pointers
                arguments = pointers[job.rank], pointers[1 - job.rank], _DEVICE_FLAG_ROUNDS, int(job.rank == 0)
                # Once: the flags count from zero.
                run = ping_pong.bind(1, 1, *arguments, _FLAG_CYCLES)
                flag = self._us([partial(run, self._stream)]) / _DEVICE_FLAG_ROUNDS
            self.flag_us = float(job.gather([flag])[:2, 0].min())  # the second to start waits for nobody
            best = float("inf")
            if job.rank == 0:
                target = slab.pointers[1] + 4096 + _COPY_BYTES
                copy = partial(call, cu.cuMemcpyAsync, target, slab.pointer + 4096, _COPY_BYTES, self._handle)
                best = min(self._us([copy] * 4) / 4 for _ in range(6))
            self.pair_gbps = _COPY_BYTES / float(job.gather([best])[0, 0]) / 1e3
            job.barrier()

    def _us(self, calls: Sequence[Call]) -> float:
        """Time of ``calls`` on the stream."""

        def run() -> None:
            for one in calls:
                one()

        return 1e3 * streams.milliseconds(run, self._stream)

    def _graph_us(self, calls: Sequence[Call], replays: int) -> float:
        """The best time of one of ``calls`` in a graph of them."""
        from kos.cuda import capture

        with capture(self._stream, keep=calls) as graph:
            for one in calls:
                one()
        best = min(self._us([partial(graph.replay, self._stream)]) for _ in range(replays))
        return best / len(calls)

    def limit_us(self, case: Case) -> float:
        if case.ranks == 1:
            return self.launch_us
        wire = case.busbw_factor * case.nbytes / self.pair_gbps / 1e3
        return self.launch_us + self.flag_us / 2 + wire

    def figures(self) -> dict[str, float]:
        return {"launch_us": self.launch_us, "flag_round_trip_us": self.flag_us, "pair_gbps": self.pair_gbps}
