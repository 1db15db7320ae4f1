"""Random programs of torch.distributed, and the first difference between two backends as a short program."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from kos.testing.torch.processes import spawn

TYPES = "float32", "float64", "bfloat16", "int32", "int64", "uint8"
OPERATIONS = (
    "dist.all_reduce(x, dist.ReduceOp.{op})",
    "dist.all_reduce(x, dist.ReduceOp.{op}, async_op=True).wait()",
    "dist.all_reduce(x, group=pair) if rank < 2 else None",
    "dist.broadcast(x, {root})",
    "y = x.clone(); dist.reduce(y, {root}, dist.ReduceOp.{op}); x = y if rank == {root} else x",
    "parts = [torch.empty_like(x) for _ in range(size)]; dist.all_gather(parts, x); x = parts[{root}] + rank",
    "out = x.new_empty(size * x.numel()); dist.all_gather_into_tensor(out, x); x = out[rank::size].clone()",
    "out = x.new_empty(x.numel() // size); dist.reduce_scatter_tensor(out, x); x = out.repeat(size)",
    "out = torch.empty_like(x); dist.all_to_all_single(out, x); x = out",
    "parts = [x.clone() for _ in range(size)] if rank == {root} else None; dist.gather(x, parts, {root}); "
    "x = parts[-1] if parts else x",
    "out, parts = torch.empty_like(x), [x + k for k in range(size)]; "
    "dist.scatter(out, parts if rank == {root} else None, {root}); x = out",
    "dist.send(x, {other}) if rank == {root} else dist.recv(x, {root}) if rank == {other} else None",
    "out = torch.empty_like(x); ops = [dist.P2POp(dist.isend, x, (rank + 1) % size), "
    "dist.P2POp(dist.irecv, out, (rank - 1) % size)]; [work.wait() for work in dist.batch_isend_irecv(ops)]; x = out",
    "every = [None] * size; dist.all_gather_object(every, [rank, 'text']); x = x + every[{root}][0]",
    "dist.barrier()",
)
"""What a program may do with ``x``, a tensor of one dimension whose elements every rank can share equally."""


def random_program(seed: int, size: int, length: int = 12) -> list[str]:
    """The lines of a program for ``size`` >= 2 ranks; all sums are exact, so that their order does not matter."""
    choose = random.Random(seed)
    kind, count = choose.choice(TYPES), size * choose.choice((1, 2, 5, 300))
    lines = [f"x = torch.arange({count}).add(rank).remainder(7).to(torch.{kind}); pair = dist.new_group([0, 1])"]
    for _ in range(length):
        root, other = choose.sample(range(size), 2)
        op = choose.choice(("SUM", "MIN", "MAX", "PRODUCT"))
        lines.append(choose.choice(OPERATIONS).format(root=root, other=other, op=op))
    return lines


def run_program(lines: Sequence[str], rank: int) -> list[torch.Tensor]:
    """``x`` after each line, modulo 7."""
    names: dict[str, Any] = {"torch": torch, "dist": dist, "rank": rank, "size": dist.get_world_size()}
    found = []
    for line in lines:
        exec(line, names)
        names["x"] = names["x"].remainder(7)
        found.append(names["x"].clone())
    return found


def compare(
    fn: Callable[..., Any] | None = None, backends: Sequence[str] = ("gloo", "kos"), *, world_size: int = 3,
    programs: int = 50, seed: int = 0, timeout: float = 120.0,
) -> None:  # fmt: skip
    """Raise AssertionError if ``fn`` gives other bits on the second backend than on the first, on any rank.

    Without ``fn``, ``programs`` random programs of the operations of torch.distributed are compared, those of ``seed``,
    ``seed + 1`` and so on, which need at least 2 ranks.  The error then has the first one that differs, shortened to
    the lines that are needed.  A backend in a package of its own must be imported first.
    """
    if fn is not None:
        if difference := _difference(fn, backends, world_size, timeout):
            raise AssertionError(difference)
        return
    texts = [random_program(seed + number, world_size) for number in range(programs)]
    if not _difference(lambda rank: [run_program(lines, rank) for lines in texts], backends, world_size, timeout):
        return

    def differs(lines: list[str]) -> str:
        return _difference(partial(run_program, lines), backends, world_size, timeout)

    for number, lines in enumerate(texts):
        if not differs(lines):
            continue
        for k in reversed(range(1, len(lines))):
            shorter = [*lines[:k], *lines[k + 1 :]]
            lines = shorter if differs(shorter) else lines
        raise AssertionError("\n".join([f"the program of seed {seed + number}: {differs(lines)}", *lines]))
    together = f"the programs of seeds {seed} to {seed + programs - 1} run together"
    raise AssertionError(f"{backends[0]} and {backends[1]} differ only if {together}")


def _difference(fn: Callable[..., Any], backends: Sequence[str], size: int, timeout: float) -> str:
    """How the results of ``fn`` on two backends differ; empty if they are equal."""
    found = []
    for backend in backends:
        try:
            found.append(spawn(fn, size, timeout, backend=backend))
        except Exception as error:
            found.append([f"{type(error).__name__}: {error}"] * size)
    for rank, values in enumerate(zip(*found, strict=True)):
        if where := _first(*values):
            return f"rank {rank}: result{where} ({backends[0]} and {backends[1]})"
    return ""


def _first(a: Any, b: Any) -> str:
    """Where two results first differ, and how; empty if they have the same bits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype):
        one, two = (x.contiguous().view(-1).view(torch.uint8).view(-1, x.element_size()) for x in (a, b))
        wrong = (one != two).any(1).nonzero()
        k = int(wrong[0]) if wrong.numel() else -1
        return "" if k < 0 else f" is {a.reshape(-1)[k]} and {b.reshape(-1)[k]} at element {k}"
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return next((f"[{k}]{where}" for k, pair in enumerate(zip(a, b, strict=True)) if (where := _first(*pair))), "")
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((f"[{key!r}]{where}" for key in a if (where := _first(a[key], b[key]))), "")
    differ = isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or a != b
    return f" is {a!s:.200} and {b!s:.200}" if differ else ""
