"""All-reduce over peer memory: every variant of every kernel, checked and timed in one run, beside NCCL.

    mpirun -n 8 python -m benchmarks.peer_kernels [--quick] [--out results.json]

Times are microseconds an operation inside a CUDA graph of back-to-back operations (bf16, out of place): median
over replays, maximum over ranks.  The data of the checked graphs changes with every operation and every element
of every output is compared with the exact sum in rank order (NCCL's with a tolerance of none: it is only timed).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from kos import cuda
from kos.comm.launches import Launch
from kos.comm.peer import PeerEngine, Run
from kos.comm.reduction import ReduceOp
from kos.comm.rendezvous import MPIRendezvous
from kos.cuda import load_kernel, streams
from kos.cuda.driver import call, cu
from kos.dtypes import DTYPES
from kos.memory.array import Array
from kos.memory.symmetric import SymmetricMemory

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
SIZES = [KB, 8 * KB, 32 * KB, 128 * KB, 256 * KB, 512 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB, GB]
GOALS = dict(zip(SIZES, [5.0, 5.0, 6.0, 7.5, 9.5, 9.5, 12, 28, 92, 350.5, 1305, 5078], strict=True))  # us, 8 GPUs
BF16 = DTYPES["bfloat16"]


def variants(nbytes: int, quick: bool) -> list[tuple[str, Launch]]:
    """(name, launch) of what is worth trying at that size; a name ending in "staged" uses ordinary memory."""
    chosen: list[tuple[str, Launch]] = []
    if nbytes <= 256 * KB:
        for threads in (64, 128, 256):
            chosen.append((f"one_shot t{threads}", Launch("one_shot", threads=threads)))
    if 32 * KB <= nbytes <= 4 * MB:
        for blocks, threads in ((0, 64), (0, 128), (0, 256), (32, 512), (128, 256)):
            chosen.append((f"two_shot b{blocks or 'auto'} t{threads}", Launch("two_shot", blocks, threads=threads)))
    if 128 * KB <= nbytes <= 8 * MB:
        for blocks, threads in ((8, 512), (16, 512), (24, 512), (32, 512), (48, 512), (64, 256), (64, 512)):
            chosen.append((f"direct b{blocks} t{threads}", Launch("direct", blocks, threads)))
    if 256 * KB <= nbytes <= 16 * MB:
        for blocks, tile, stages in ((16, 4096, 4), (32, 4096, 6), (64, 4096, 6)):
            if stages * tile * blocks * 8 <= 4 * nbytes:
                launch = Launch("bulk", blocks, 256, tile=tile, stages=stages)
                chosen.append((f"bulk b{blocks} tile{tile} s{stages}", launch))
    if nbytes >= 512 * KB:
        for blocks, threads in ((32, 512), (64, 512), (128, 512), (128, 256)):
            chosen.append((f"push b{blocks} t{threads}", Launch("push", blocks, threads)))
    if nbytes >= 4 * MB:
        chosen.append(("push b64 staged", Launch("push", 64, 512)))
        chosen.append(("push b128 staged", Launch("push", 128, 512)))
    if nbytes >= 16 * MB:
        chosen.append(("direct b128", Launch("direct", 128, 512)))
        for blocks, tile, stages in ((128, 4096, 4),):
            launch = Launch("bulk", blocks, 256, tile=tile, stages=stages)
            chosen.append((f"bulk b{blocks} tile{tile} s{stages}", launch))
        for pieces in (1, 2) if nbytes >= 64 * MB else ():
            chosen.append((f"copies p{pieces}", Launch("copies", pieces=pieces)))
    return chosen[::4] if quick else chosen


class Bench:
    """One rank: its engine, its buffers, its stream."""

    def __init__(self, rendezvous: MPIRendezvous, largest: int, overlap: bool) -> None:
        self.rendezvous = rendezvous
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.device = rendezvous.local_rank % len(cuda.visible_devices())
        cuda.set_device(self.device)
        self.engine = PeerEngine(rendezvous, self.device, timeout=10.0, overlap=overlap)
        self.memory = SymmetricMemory(rendezvous, 2 * largest + MB, self.device)
        self.engine.register(self.memory)
        self.source = self.memory.array(largest // 2, "bfloat16")
        self.target = self.memory.array(largest // 2, "bfloat16")
        self.stream = cuda.create_stream(self.device)
        self.turn = Array.zeros(1, "uint32", self.device)
        self.wrong = Array.zeros(1, "uint64", self.device)
        kernels = Path(__file__).with_name("peer_check.cu")
        self.fill, self.check, self.advance = (
            load_kernel(kernels, name, self.device) for name in ("fill", "check", "advance")
        )

    def time(self, run: Run, nbytes: int) -> float:
        """Microseconds an operation."""
        depth = 200 if nbytes <= MB else 10 if nbytes <= 16 * MB else 4 if nbytes <= 256 * MB else 2
        with cuda.capture(self.stream) as graph:
            for _ in range(depth):
                run(self.stream)
        begin, end = (call(cu.cuEventCreate, 0) for _ in range(2))
        handle, times = streams.handle(self.stream), []
        for turn in range(13 if nbytes <= 16 * MB else 5):
            self.rendezvous.barrier()
            call(cu.cuEventRecord, begin, handle)
            graph.replay(self.stream)
            call(cu.cuEventRecord, end, handle)
            streams.synchronize(self.stream, self.device)
            if turn:
                times.append(1e3 * call(cu.cuEventElapsedTime, begin, end) / depth)
        graph.close()
        everybody = self.rendezvous.allgather(json.dumps(median(times)).encode())
        return max(map(json.loads, everybody))

    def verify(self, run: Run, source: int, target: int, count: int, nbytes: int) -> int:
        """Wrong elements on all ranks, over changing data back to back in a graph."""
        self.wrong.fill_bytes(0, self.stream)
        with cuda.capture(self.stream) as graph:
            for _ in range(8 if nbytes <= MB else 2):
                self.advance(self.stream, 1, 1, self.turn.pointer)
                self.fill(self.stream, 264, 512, source, target, count, self.rank, self.turn.pointer)
                run(self.stream)
                self.check(self.stream, 264, 512, target, count, self.size, self.turn.pointer, self.wrong.pointer)
        self.rendezvous.barrier()
        for _ in range(10 if nbytes <= MB else 1):
            graph.replay(self.stream)
        wrong = int(self.wrong.numpy(self.stream)[0])
        graph.close()
        return sum(int(data) for data in self.rendezvous.allgather(str(wrong).encode()))

    def bind(self, name: str, launch: Launch, nbytes: int) -> tuple[Run, Any, Any]:
        source, target = self.source, self.target
        if name.endswith("staged"):
            source, target = (Array.empty(nbytes // 2, "bfloat16", self.device) for _ in range(2))
        run = self.engine.bind_all_reduce(
            source.pointer, target.pointer, nbytes // 2, BF16, ReduceOp.SUM, launch=launch
        )
        return run, source, target


def nccl(bench: Bench) -> Callable[[int], Run]:
    """NCCL's all-reduce on the same buffers."""
    import nccl.core as core
    from nccl.bindings import nccl as bindings

    unique = core.get_unique_id() if bench.rank == 0 else None
    data = bench.rendezvous.allgather(unique.as_bytes if unique else b"")[0]
    comm = core.Communicator.init(bench.size, bench.rank, unique or core.UniqueId.from_bytes(data))
    handle = streams.handle(bench.stream)
    raw = getattr(comm, "_comm", comm)

    def make(nbytes: int) -> Callable[[], None]:
        return lambda stream: bindings.all_reduce(
            bench.source.pointer, bench.target.pointer, nbytes // 2, int(core.BFLOAT16), int(core.SUM), raw, handle
        )

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the variants")
    parser.add_argument("--smallest", type=int, default=0, help="bytes")
    parser.add_argument("--largest", type=int, default=GB, help="bytes")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--seconds", type=float, default=80.0, help="stop after this long")
    parser.add_argument("--out", default="")
    parser.add_argument("--no-overlap", action="store_true", help="launch after the former kernel's end")
    parser.add_argument("--no-nccl", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    sizes = [size for size in SIZES if options.smallest <= size <= options.largest]
    bench = Bench(MPIRendezvous(timeout=60.0), sizes[-1], not options.no_overlap)
    say = print if bench.rank == 0 else (lambda *_, **__: None)
    plan = [(size, *variant) for size in sizes for variant in variants(size, options.quick)]
    plan = [row for row in plan if options.only in row[1]]
    launches = list(dict.fromkeys(plan))
    for i in range(bench.rank, len(launches), bench.size):  # each rank compiles its share
        bench.bind(launches[i][1], launches[i][2], launches[i][0])
    bench.rendezvous.barrier()
    say(f"{bench.size} ranks, {len(plan)} variants, ready in {time.monotonic() - began:.1f} s", flush=True)
    make = None
    if not options.no_nccl:
        try:
            make = nccl(bench)
        except Exception as error:
            say(f"no NCCL: {error!r}")
    barrier = bench.time(bench.engine.bind_barrier(), KB)
    say(f"barrier kernel {barrier:.2f} us", flush=True)
    results: list[dict[str, Any]] = [{"name": "barrier", "bytes": 0, "us": barrier}]
    for size in sizes:
        rows = []
        for _, name, launch in (row for row in plan if row[0] == size):
            late = time.monotonic() - began > options.seconds
            if any(json.loads(x) for x in bench.rendezvous.allgather(json.dumps(late).encode())):
                break
            run, source, target = bench.bind(name, launch, size)
            cuda.synchronize(bench.device)
            bench.rendezvous.barrier()
            wrong = bench.verify(run, source.pointer, target.pointer, size // 2, size)
            us = bench.time(run, size)
            bench.engine.check(f"{name} of {size} bytes")
            rows.append({"name": name, "bytes": size, "us": us, "wrong": wrong})
        if make is not None:
            rows.append({"name": "NCCL", "bytes": size, "us": bench.time(make(size), size), "wrong": 0})
        results += rows
        rows.sort(key=lambda row: row["us"])
        say(f"{size:>10} bytes  goal {GOALS[size]:g} us")
        for row in rows:
            busbw = 2 * (bench.size - 1) / bench.size * size / row["us"] / 1e3
            flag = f"  WRONG {row['wrong']}" if row["wrong"] else ""
            say(f"    {row['us']:9.2f} us {busbw:7.1f} GB/s  {row['name']}{flag}", flush=True)
    if options.out and bench.rank == 0:
        with open(options.out, "w") as file:
            json.dump(results, file, indent=1)
    bench.engine.close()
    bench.memory.close()


if __name__ == "__main__":
    main()
