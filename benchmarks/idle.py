"""How long each rank of a pipeline computes and how long it waits: ``python -m benchmarks.train --idle --pp 4``.

A rank stamps its clock around each action of its schedule, and around norm and update. On a GPU, a stamp is a kernel
on the engine's stream and so a node of the step's CUDA graph. A rank is idle when it does none of these: it waits for
messages, for gradients to be summed, or for the last rank. A message that slows an action down counts as computing.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from kos.cuda.kernels import load_kernel
from kos.train.parallel.schedules.timeline import simulate


class Stamps:
    """The clock around the passes of ``engine``, made before its first step. ``times``: of the last step, in ns."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.actions = engine, engine.pipeline.actions
        names = ("run", "queue_norm", "queue_update")
        count = 2 * (len(self.actions) + len(names))
        self._next, self._kernels = 0, list[Callable[[Any], None]]()
        self.times: Any = np.zeros(count, np.int64)
        if hasattr(engine, "ops"):
            self.times = engine.ops.zeros(count, np.int64)
            kernel = load_kernel(Path(__file__).with_name("stamp.cu"), "stamp", engine.ops.device)
            self._kernels = [kernel.bind(1, 1, self.times.pointer + 8 * i) for i in range(count)]
        whole = engine.queue_step

        def queue_step() -> None:
            self._next = 0
            self._stamp()
            whole()
            self._stamp()

        engine.queue_step = queue_step
        for name in names:
            setattr(engine, name, self._between(getattr(engine, name)))

    def _between(self, work: Callable[..., None]) -> Callable[..., None]:
        def stamped(*arguments: Any) -> None:
            self._stamp()
            work(*arguments)
            self._stamp()

        return stamped

    def _stamp(self) -> None:
        if self._kernels:
            self._kernels[self._next](self.engine.ops.stream)
        else:
            self.times[self._next] = time.perf_counter_ns()
        self._next += 1

    def facts(self) -> dict[str, Any]:
        """Of the last step, whose results are there. Collective. ``simulated``: with these passes, free messages."""
        engine, times = self.engine, self.times
        times = (engine.ops.to_host(times) if self._kernels else times) / 1e6
        spans = times[1:-1].reshape(-1, 2)
        each = defaultdict[tuple[str, int], list[float]](list)
        for (kind, _, chunk), (start, end) in zip(self.actions, spans, strict=False):
            each[kind, chunk].append(end - start)
        busy, whole = float((spans[:, 1] - spans[:, 0]).sum()), float(times[-1] - times[0])
        update = float((spans[len(self.actions) :, 1] - spans[len(self.actions) :, 0]).sum())
        mine = {
            "layers": [len(part.layers) for part in engine.parts],
            "passes_ms": {f"{kind}{chunk}": mean(times) for (kind, chunk), times in sorted(each.items())},
            "computes_ms": busy, "update_ms": update, "step_ms": whole, "idle": 1 - busy / whole,
        }  # fmt: skip
        world, schedule = engine.mesh.world, engine.pipeline.schedule
        found = [json.loads(text) for text in world.all_gather_bytes(json.dumps(mine).encode())]
        ranks = [engine.mesh.layout.rank({"pp": rank}) for rank in range(schedule.ranks)]
        costs = {kind: [0.0] * schedule.stages for kind in "FIW"}
        for rank, held in enumerate(ranks):
            for name, cost in found[held]["passes_ms"].items():
                costs["I" if name[0] == "B" else name[0]][schedule.stage(rank, int(name[1:]))] = cost
        timeline = simulate(schedule, costs)
        return {
            "ranks": [found[held] for held in ranks], "idle": mean(found[held]["idle"] for held in ranks),
            "simulated_ms": timeline.makespan, "simulated_idle": timeline.idle,
        }  # fmt: skip


def print_facts(facts: dict[str, Any]) -> None:
    """A row for each rank of the pipeline."""
    columns = "".join(f"{name:>10}" for name in ("layers", "computes", "update", "step ms", "idle", "simulated"))
    print(f"{'':8}{columns}  mean ms of a pass, by kind and stage of the rank")
    for rank, (row, simulated) in enumerate(zip(facts["ranks"], facts["simulated_idle"], strict=True)):
        passes = ", ".join(f"{name} {cost:.2f}" for name, cost in row["passes_ms"].items())
        layers, *times = "+".join(map(str, row["layers"])), row["computes_ms"], row["update_ms"], row["step_ms"]
        print(f"rank {rank:<3}{layers:>10}" + "".join(f"{each:10.1f}" for each in times)
              + f"{row['idle']:10.1%}{simulated:10.1%}  {passes}")  # fmt: skip
    print(f"idle, mean of the ranks: {facts['idle']:.1%}; these passes with free messages would take "
          f"{facts['simulated_ms']:.1f} ms, {mean(facts['simulated_idle']):.1%} idle")  # fmt: skip
