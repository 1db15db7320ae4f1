"""How long each rank of a pipeline computes and how long it waits: ``python -m benchmarks.train --idle --pp 4``.

A rank records a timestamp before and after each pass of its schedule, the gradient norm and the update. On a GPU, a
timestamp is an event on the device's stream, and therefore a node of the step's CUDA graph. A rank is idle while it
runs none of these: it waits for messages, for sums of gradients, or for the last rank. If messages slow a pass down,
the whole pass counts as computing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy as np

from kos.train.parallel.schedules import simulate
from kos.train.tools.profile import Marks


class Stamps:
    """Timestamps around the passes of the last step of ``device``. Construct it before the device's first step.

    ``make_clock`` gets the device's stream, or None on a CPU.
    """

    def __init__(self, device: Any, make_clock: Callable[[Any], Any] = Marks) -> None:
        self.device, self.actions, step = device, device.pipeline.actions, device.step
        self._clock, self._marks = make_clock(device.ops.stream if hasattr(device, "ops") else None), list[Any]()
        stamped = self._stamped(step.run)

        def run() -> None:
            self._marks.clear()
            stamped()

        step.run = run
        for part, name in ((step, "act"), (step, "norm"), (step.optimizer, "update")):
            setattr(part, name, self._stamped(getattr(part, name)))

    def _stamped(self, work: Callable[..., None]) -> Callable[..., None]:
        """``work`` with a timestamp before and after it."""

        def stamped(*arguments: Any) -> None:
            self._marks.append(self._clock.mark())
            work(*arguments)
            self._marks.append(self._clock.mark())

        return stamped

    def facts(self) -> dict[str, Any]:
        """The times of the last step, in ms, which must be complete, and shares of idle time. Collective.

        ``simulated``: for passes of these times, and messages that take no time.
        """
        device, marks = self.device, self._marks
        times = np.array([self._clock.microseconds(marks[0], mark) / 1e3 for mark in marks])
        spans = times[1:-1].reshape(-1, 2)
        each = defaultdict[tuple[str, int], list[float]](list)
        for (kind, _, chunk), (start, end) in zip(self.actions, spans, strict=False):
            each[kind, chunk].append(end - start)
        busy, whole = float((spans[:, 1] - spans[:, 0]).sum()), float(times[-1] - times[0])
        update = float((spans[len(self.actions) :, 1] - spans[len(self.actions) :, 0]).sum())
        mine = {
            "layers": [len(part.layers) for part in device.parts],
            "passes_ms": {f"{kind}{chunk}": mean(times) for (kind, chunk), times in sorted(each.items())},
            "computes_ms": busy, "update_ms": update, "step_ms": whole, "idle": 1 - busy / whole,
        }  # fmt: skip
        world, schedule = device.mesh.world, device.pipeline.schedule
        found = [json.loads(text) for text in world.all_gather_bytes(json.dumps(mine).encode())]
        ranks = [device.mesh.layout.rank({"pp": rank}) for rank in range(schedule.ranks)]
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
    """Print a row for each rank of the pipeline."""
    columns = "".join(f"{name:>10}" for name in ("layers", "computes", "update", "step ms", "idle", "simulated"))
    print(f"{'':8}{columns}  mean ms of a pass, by kind and stage of the rank")
    for rank, (row, simulated) in enumerate(zip(facts["ranks"], facts["simulated_idle"], strict=True)):
        passes = ", ".join(f"{name} {cost:.2f}" for name, cost in row["passes_ms"].items())
        layers, *times = "+".join(map(str, row["layers"])), row["computes_ms"], row["update_ms"], row["step_ms"]
        print(f"rank {rank:<3}{layers:>10}" + "".join(f"{each:10.1f}" for each in times)
              + f"{row['idle']:10.1%}{simulated:10.1%}  {passes}")  # fmt: skip
    print(f"idle, mean of the ranks: {facts['idle']:.1%}; if messages took no time, these passes would take "
          f"{facts['simulated_ms']:.1f} ms, {mean(facts['simulated_idle']):.1%} idle")  # fmt: skip
