"""What the flight recorder costs a call: python -m benchmarks.recorder

Times the record of a launched operation and of its completion apart from everything else, as the
communicator makes them; prints nanoseconds a call, the best of some runs.
"""

from __future__ import annotations

from time import perf_counter_ns, time_ns

import numpy as np

from kos.comm.operation import Operation
from kos.comm.recorder import COMPLETED, Group
from kos.comm.reduction import ReduceOp, resolve
from kos.dtypes import dtype_of
from kos.memory import as_buffer

CALLS, RUNS = 20_000, 30


def main() -> None:
    group = Group.world(0, 1, "mock")
    recorder = group.recorder
    buffer = as_buffer(np.zeros((4, 4), np.float32), "x", writable=True)
    reduction = resolve(ReduceOp.SUM, dtype_of(buffer.dtype.numpy), 1)
    operation = Operation("all_reduce", 0, buffer, buffer, reduction, timeout=120.0, sequence=0)

    def empty() -> None:
        pass

    def launch() -> None:
        recorder.record(group, operation, 1)

    def complete() -> None:
        record = operation.record
        if record is not None:
            record[COMPLETED] = time_ns()

    def best(call: object) -> float:
        times = []
        for _ in range(RUNS):
            began = perf_counter_ns()
            for _ in range(CALLS):
                call()
            times.append((perf_counter_ns() - began) / CALLS)
        return min(times)

    nothing = best(empty)
    launched, over = best(launch) - nothing, best(complete) - nothing
    print(f"launch {launched:.0f} ns + completion {over:.0f} ns = {launched + over:.0f} ns a call")


if __name__ == "__main__":
    main()
