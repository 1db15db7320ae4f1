"""Prepared: how the calls of one signature run.  ``Operations.start`` starts them, each as a Work.

``_signature`` in ``collectives.py`` computes the signature of a call.  It has everything that the call depends on
except its memory, such as operation, dtype, shapes, reduce op, ranks, counts, options, flags or alignment, and device.
A backend prepares each signature once, and every call of it uses the result, on any arrays.  On GPUs the addresses in
windows belong to the signature, because kernels reach these windows on other ranks, and so does the address of a
``residual``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from math import prod
from typing import Any

from kos.comm.operation import ANY, NOBODY, POINT_TO_POINT, Operation
from kos.comm.work import Steps, Work
from kos.cuda.kernels import Address
from kos.memory import Buffer, windows

MOST_STORED = 2048
"""Prepared calls of a communicator; one more drops the oldest.  Ranks publish as many descriptions."""

APART = (1 << 64) - 1
"""The distance of two arrays that do not overlap."""

TEXTS, TEXT_BYTES = 2048, 1024
"""The number of call descriptions that a rank keeps and publishes, and the bytes of each."""


class Prepared:
    """How the calls of one signature run on this rank.  Immutable once its communicator has it."""

    __slots__ = (
        "arguments", "backend", "blocking", "cacheable", "capture_invariant", "collective", "description",
        "fingerprint", "has_output", "in_core", "launch", "name", "operation", "plan", "route", "sizeless", "text",
        "values", "work",
    )  # fmt: skip

    def __init__(
        self, operation: Operation, backend: Any, launch: Callable[[Any], Steps | None], plan: Any = None,
        route: Any = None,
    ) -> None:  # fmt: skip
        """``launch`` begins a Work: it returns the steps that are left, or None if the Work is complete or queued."""
        self.operation, self.name, self.collective = operation, operation.name, operation.name not in POINT_TO_POINT
        self.backend, self.route = backend, route or backend
        """The backend of the communicator, and the route of that backend that runs the calls."""
        self.launch, self.plan, self.cacheable = launch, plan, getattr(plan, "cacheable", True)
        """``plan``: on a GPU, a ``Plan``; in shared memory, what the core has prepared, and which arrays it uses."""
        self.in_core = False
        """Whether the core can start the calls on host memory by itself."""
        self.work, self.has_output = backend.work, operation.recv is not None
        """The class of its Works, and whether this rank has a result."""
        self.capture_invariant = True
        """Whether calls take the same route inside and outside a graph."""
        self.blocking = not operation.options.overlap
        self.values = _values(operation, self.route.name, getattr(plan, "name", None))
        """What must be equal on all ranks."""
        self.arguments = _arguments(operation, backend.group_suffix)
        """`` of float32[4] by SUM``: what follows the number of a call in texts."""
        self.fingerprint = 0
        """A number that stands for ``values``; 0 if nobody compares the calls."""
        self.sizeless = 0
        """The same for ``values`` without the count.  The core makes the fingerprints of other sizes from it."""
        self.text = b""
        """The description of such a call.  Other ranks show it if their call differs."""
        self.description: tuple[Any, ...] = (None,)
        """What the flight recorder has of each start, once the communicator has it: its group, and the operation."""

def nothing(work: Work[Any]) -> None:
    """The launch of a message to or from NOBODY, which is complete."""


def without_memory(o: Operation) -> Operation:
    """The same request of any arrays that are alike."""
    send = None if o.send is None else _alike(o.send, 0)
    recv = send if o.recv is o.send else None if o.recv is None else _alike(o.recv, 1)
    kept = o.residual and replace(o.residual, array=None, flat=_NO_VIEW, stream_owner=None, convert=None)
    return replace(o, send=send, recv=recv, residual=kept)


_NO_VIEW: Any = None


def resized(
    o: Operation, sent: tuple[int, ...] | None, received: tuple[int, ...] | None, *counts: tuple[int, ...]
) -> Operation:
    """The same request of arrays of other shapes (None where this rank has no such array), and with other counts."""
    given = iter(counts)
    send_counts, recv_counts = (next(given) if known and counts else known for known in (o.send_counts, o.recv_counts))
    send = o.send and replace(o.send, shape=sent or (), count=prod(sent or ()))
    recv = send if o.recv is o.send else o.recv and replace(o.recv, shape=received or (), count=prod(received or ()))
    return replace(o, send=send, recv=recv, send_counts=send_counts, recv_counts=recv_counts)


def _alike(x: Buffer, number: int) -> Buffer:
    """The description of ``x``, for calls on any memory.

    On a GPU its ``pointer`` is the address if it lies in a window, which the other ranks reach, else the Address of
    array ``number`` of a launch.
    """
    near = x.device is None or (windows.memories and windows.place(x.pointer) == x.pointer)
    pointer: Any = x.pointer if near else Address(number, 0, x.pointer % 16)
    return replace(x, array=None, flat=_NO_VIEW, pointer=pointer, stream_owner=None, convert=None)


def _values(o: Operation, backend: str, kernel: str | None) -> dict[str, Any]:
    """All properties of a call that must be equal on all ranks.

    The count is that of the elements that each rank contributes or gets, None where ranks may differ.
    """
    buffer, counted = o.send or o.recv, o.recv if o.name in ("scatter", "reduce_scatter") else o.send or o.recv
    values: dict[str, Any] = {
        "operation": o.name,
        "dtype": buffer.dtype.name if buffer else None,
        "count": counted.count if counted and not o.name.endswith("_v") else None,
        "op": o.reduction.op.name if o.reduction else None,
        "root": o.root,
        "algorithm": o.options.algorithm,
        "deterministic": o.options.deterministic,
        "purpose": o.options.purpose or None,
        "compress": o.options.compress or None,
        "backend": backend,
        "kernel": kernel,
    }
    if o.name in ("all_gather_v", "reduce_scatter_v", "gather_v", "scatter_v"):
        values["counts"] = list(o.recv_counts or o.send_counts or ())
    return values


def _arguments(o: Operation, group_suffix: str) -> str:
    """`` of float32[4] by SUM``; ``group_suffix`` follows the number of a rank."""
    text, message, buffer = "", o.message, o.send or o.recv
    if buffer is not None:
        text += f" of {buffer.dtype.name}{list(buffer.shape)}"
    if o.reduction is not None:
        text += f" by {o.reduction.op.name}"
    if o.options.compress:
        text += f", compressed by {o.options.compress}"
    if o.root is not None:
        text += f", root {o.root}{group_suffix}"
    same = message.dst is not None and (message.dst, message.tag) == (message.src, message.recv_tag)
    if message.dst is not None:
        destination = "nobody" if message.dst == NOBODY else f"rank {message.dst}{group_suffix}"
        text += f", to {'and from ' * same}{destination} with tag {message.tag}"
    if message.src is not None and not same:
        source = {int(ANY): "any rank", int(NOBODY): "nobody"}.get(message.src, f"rank {message.src}")
        tag = "any tag" if message.recv_tag == ANY else f"tag {message.recv_tag}"
        text += f", from {source}{group_suffix * (message.src != NOBODY)} with {tag}"
    if o.options.purpose:
        text += f", for {o.options.purpose}"
    return text


class Fingerprints:
    """The fingerprints of one rank's calls: numbers that are equal on two ranks exactly if their calls match.

    A description of the call goes with each, for the error of a rank whose call differs.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        """``memory``: where the other ranks of the host read the descriptions."""
        self.texts: dict[int, bytes] = {}  # the descriptions of the last calls, by fingerprint
        self._added = 0  # texts so far
        self._memory = memory

    def add(self, prepared: Prepared) -> Prepared:
        """Set the fingerprint of a collective and its description, and publish that."""
        if not prepared.collective:
            return prepared
        values, texts = prepared.values, self.texts
        exact = json.dumps(values | {"count": None, "counts": None}, sort_keys=True).encode()
        prepared.sizeless = int.from_bytes(blake2b(exact, digest_size=7).digest(), "little") + 1
        fingerprint = sized(prepared.sizeless, values["count"] or 0)
        for count in values.get("counts", ()):
            fingerprint = sized(fingerprint, count)
        prepared.fingerprint = fingerprint
        if fingerprint not in texts:
            place, self._added = self._added % TEXTS, self._added + 1
            if len(texts) == TEXTS:
                del texts[next(iter(texts))]  # the oldest, which was published in the same place
            text = texts[fingerprint] = _description(prepared, fingerprint)
            if (memory := self._memory) is not None:  # another thread may close it, which keeps it mapped here
                memory[TEXT_BYTES * place : TEXT_BYTES * (place + 1)] = text.ljust(TEXT_BYTES)
        prepared.text = texts[fingerprint]
        return prepared


def sized(sizeless: int, count: int) -> int:
    """The fingerprint of a call with this count, from 1 to 2^56 (``kos_sized`` in ``prepare.c`` does the same)."""
    h = sizeless ^ count * 0x9E3779B97F4A7C15 % (1 << 64)
    for _ in range(2):
        h ^= h >> 32
        h = h * 0xD6E8FEB86659FD93 % (1 << 64)
    return (h >> 8) + 1


def _description(prepared: Prepared, fingerprint: int) -> bytes:
    """What ``described`` reads, at most ``TEXT_BYTES``."""
    text = json.dumps([fingerprint, prepared.arguments, prepared.values]).encode()
    is_long = len(text) > TEXT_BYTES or "counts" in prepared.values
    for length in (200, 100, 50) if is_long else ():  # of each text
        brief = {name: _brief(value, length) for name, value in prepared.values.items()}
        text = json.dumps([fingerprint, shortened(prepared.arguments, length), brief]).encode()
        if len(text) <= TEXT_BYTES:
            break
    return text


def shortened(text: str, length: int = 200) -> str:
    """``text``; if its JSON has more than ``length`` characters, its beginning and a digest.

    A call that names thousands of ranks so fits where descriptions have a fixed size.
    """
    escaped = json.dumps(text)
    if len(escaped) <= length + 2:
        return text
    digest = blake2b(escaped.encode(), digest_size=4).hexdigest()
    return f"{escaped[1 : length + 1]}... {len(text)} characters in all, digest {digest}"


def described(text: bytes, sequence: int, fingerprint: int | None = None) -> tuple[str, dict[str, Any]]:
    """The call that a rank described, as text and as fingerprint values.

    Raises KeyError if it has another ``fingerprint``, ValueError if it is incomplete.
    """
    known, arguments, call = json.loads(text)
    if fingerprint not in (None, known):
        raise KeyError(fingerprint)
    return f"{call['operation']} #{sequence}{arguments}", call


def described_resized(text: bytes, sequence: int, count: int, own: int) -> tuple[str, dict[str, Any]]:
    """Like ``described``, for a call with another ``count`` than the described one; of a v-form, of so many elements.

    ``own`` is the fingerprint of the call itself.
    """
    call, values = described(text, sequence)
    before, shape, after = re.split(r"\[([\d, ]*)\]", call, maxsplit=1)
    if (known := values["count"]) is not None:
        values["count"], count = count, prod(int(each) for each in shape.split(",") if each) * count // known
    elif "counts" in values:
        values["counts"] = f"of digest {own:x}"
    return f"{before}[{count}]{after}", values


def _brief(value: Any, length: int) -> Any:
    """A value of a fingerprint; long lists and texts are shortened to their head and a digest."""
    if isinstance(value, str):
        return shortened(value, length)
    if isinstance(value, list) and len(value) > 16:
        digest = blake2b(json.dumps(value).encode(), digest_size=4).hexdigest()
        return f"[{', '.join(map(str, value[:8]))}, ... {len(value)} in all, digest {digest}]"
    return value


BY_CAPTURE: Any = object()
"""In a Store, the value of a signature whose calls take another route in a CUDA graph.

For such a signature, the key of the Prepared also says whether the stream is being captured.
"""


class Store(dict[Any, Prepared]):
    """The Prepared of a communicator, by signature."""

    core: Any = None
    """The ``kos._core.native.Group`` whose cached calls use these Prepareds, or None."""

    def clear(self) -> None:
        """Drop all."""
        super().clear()
        if self.core is not None:
            self.core.forget()
