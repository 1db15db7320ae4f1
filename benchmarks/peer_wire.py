"""How fast every rank can write to, or read from, all others at once, by the order in which it turns to them.

mpirun -n 8 python -m benchmarks.peer_wire
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peer_kernels import KB, MB, Bench
from kos.comm.rendezvous import MPIRendezvous
from kos.cuda import load_kernel


def main() -> None:
    bench = Bench(MPIRendezvous(timeout=60.0), 256 * MB, True)
    kernel = load_kernel(Path(__file__).with_name("peer_wire.cu"), "wire", bench.device)
    barrier = bench.engine.bind_barrier()
    base = bench.time(barrier, KB)
    for per_peer in (512 * KB, 2 * MB, 16 * MB):
        for write in (0, 1):
            for blocks, threads in ((32, 512), (64, 512), (128, 512)):
                round_ = blocks * threads * 16
                line = []
                for turns in (1, 4, 1 << 30):  # vectors of each thread for one peer at a time
                    chunk = min(turns * round_, per_peer)
                    run = kernel.bind(
                        blocks, threads, bench.memory.peer_pointers.pointer, bench.rank, bench.size,
                        per_peer, chunk, write, bench.wrong.pointer,
                    )  # fmt: skip

                    def step(stream: Any, run: Any = run) -> None:
                        barrier(stream)
                        run(stream)

                    us = bench.time(step, per_peer * 8) - base
                    line.append(f"{chunk // KB:>6} KB a turn {(bench.size - 1) * per_peer / us / 1e3:6.1f} GB/s")
                if bench.rank == 0:
                    name = f"{'write' if write else 'read '} {per_peer // KB:>6} KB a peer, {blocks}x{threads}:"
                    print(name, *line, flush=True)
    bench.engine.close()
    bench.memory.close()


if __name__ == "__main__":
    main()
