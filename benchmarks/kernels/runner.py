"""Checks and times cases."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.kernels import ON_REQUEST, OPERATIONS
from benchmarks.kernels.zoo import DEVICE, EAGER, Case, Zoo, size_of, to_host
from kos import cuda
from kos.cuda import streams

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-24}  # float64: sums of float32
CHECKED_TOKENS = 96
ROTATED = 256 << 20  # bytes of inputs in rotation
REPLAYS, LEAST_REPLAYS = 9, 3
LONG = 300_000  # microseconds: what takes longer is replayed less often


def make_case(zoo: Zoo, name: str, tokens: int) -> Case:
    subject = "attention" if name in ON_REQUEST else next(key for key, names in OPERATIONS.items() if name in names)
    return getattr(importlib.import_module(f"benchmarks.kernels.{subject}"), name)(zoo, tokens)


def check(zoo: Zoo, name: str, tokens: int = CHECKED_TOKENS) -> dict[str, float]:
    """The errors of both versions in rounding units, the worst of all outputs."""
    errors = {}
    for version in ("fast", "naive"):
        case = make_case(zoo, name, tokens)
        torch.cuda.synchronize()
        run = getattr(case, version)
        if run is None:
            continue
        expected = case.expected()
        run()
        torch.cuda.synchronize()
        of_each = [
            np.linalg.norm((to_host(got) - right).ravel()) / (np.linalg.norm(right) or 1) / UNIT[got.dtype]
            for got, right in zip(case.writes, expected, strict=True)
        ]
        errors[version] = float(np.max(of_each))  # NaN where one is
    return errors


def measure(zoo: Zoo, name: str, tokens: int, compiled: bool) -> dict[str, Any]:
    """Microseconds of one call of each version."""
    zoo.functions = dict(EAGER)
    cases = _cases(zoo, name, tokens)
    row: dict[str, Any] = {"op": name, "bytes": cases[0].nbytes, "flops": cases[0].flops}
    with torch.cuda.stream(zoo.stream):
        if fast := [case.fast for case in cases if case.fast]:
            row["fast_us"] = _time_graph(zoo, fast)
        if naive := [case.naive for case in cases if case.naive]:
            row["naive_us"] = _time_graph(zoo, naive) / cases[0].naive_share
        row["torch_us"] = _time_eager(zoo, [case.torch for case in cases])
        if compiled and cases[0].compiled:
            row["torch_compiled_us"] = _time_eager(zoo, [case.compiled for case in cases if case.compiled])
    function = name if name in EAGER else name.removesuffix("_backward")
    if compiled and function in EAGER:
        zoo.functions[function] = torch.compile(EAGER[function])
        torch._functorch.config.donated_buffer = False  # a backward is run many times
        cases = _cases(zoo, name, tokens)
        with torch.cuda.stream(zoo.stream):
            row["torch_compiled_us"] = _time_eager(zoo, [case.torch for case in cases])
    return row


def copy_speed(zoo: Zoo) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    with torch.cuda.stream(zoo.stream):
        times = [_time(zoo, lambda: target.copy_(source)) for _ in range(5)]
    return 2 * size_of(source) / (statistics.median(times) * 1e-6)


def _cases(zoo: Zoo, name: str, tokens: int) -> list[Case]:
    """As many as are larger than the cache together, and at most 4."""
    first = make_case(zoo, name, tokens)
    cases = [first, *(make_case(zoo, name, tokens) for _ in range(min(3, ROTATED // first.nbytes)))]
    torch.cuda.synchronize()
    return cases


def _time_graph(zoo: Zoo, runs: list[Callable[[], None]]) -> float:
    runs[0]()
    once = _time(zoo, runs[0])
    if once * len(runs) * LEAST_REPLAYS > LONG:
        runs = runs[:1]
    for run in runs[1:]:
        run()
    with cuda.capture(zoo.ops.stream) as graph:
        for run in runs:
            run()
    replays = max(LEAST_REPLAYS, min(REPLAYS, int(LONG / (once * len(runs)))))
    times = [_time(zoo, lambda: graph.replay(zoo.ops.stream)) for _ in range(replays)]
    graph.close()
    return statistics.median(times[replays // 4 :]) / len(runs)


def _time_eager(zoo: Zoo, runs: list[Callable[[], Any]]) -> float:
    def all_of_them() -> None:
        for _ in range(4):
            for run in runs:
                run()

    times = [_time(zoo, all_of_them) for _ in range(7)]
    return statistics.median(times[2:]) / (4 * len(runs))


def _time(zoo: Zoo, run: Callable[[], object]) -> float:
    return 1e3 * streams.milliseconds(run, zoo.ops.stream)
