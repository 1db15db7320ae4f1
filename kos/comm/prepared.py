"""Prepared: how the calls of one signature run.  It starts them, each as a Work.

A signature has everything that a call depends on but its memory: operation, dtype, shapes, reduce op, ranks, counts,
options, flags or alignment, device.  A backend prepares each signature once, and every call of it uses the result, on
any arrays.  On GPUs the addresses in windows belong to the signature: kernels reach these windows on other ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from sys import _getframe
from time import time_ns
from typing import Any

from kos.comm.one_thread import check_one_thread, raise_if_two_threads
from kos.comm.operation import Operation
from kos.comm.recorder import LAST_SLOT, Group
from kos.comm.work import Steps, Work
from kos.cuda.streams import is_captured
from kos.errors import CollectiveMismatch

MOST_STORED = 256
"""Prepared calls of a communicator; one more drops all.  Ranks publish as many descriptions."""


TEXTS, TEXT_BYTES = 256, 1024
"""The number of call descriptions that a rank keeps and publishes, and the bytes of each."""


class Prepared:
    """How the calls of one signature run on this rank.  Immutable once its communicator has it."""

    __slots__ = (
        "backend",
        "collective",
        "description",
        "fingerprint",
        "fixed",
        "gets",
        "kernel",
        "lasting",
        "launch",
        "name",
        "operation",
        "route",
        "text",
        "values",
        "waits",
        "work",
    )  # fmt: skip

    def __init__(
        self, operation: Operation, backend: Any, launch: Callable[[Any], Steps | None], route: Any = None,
        kernel: str | None = None, lasting: bool = True,
    ) -> None:  # fmt: skip
        """``launch`` begins a Work: it returns the steps that are left, or None if the Work is complete or queued."""
        self.operation, self.name, self.collective = operation, operation.name, operation.collective
        self.backend = backend
        """The backend that runs it; under ``auto``, one of its backends."""
        self.launch, self.route, self.kernel = launch, route, kernel
        """``route`` is the backend's own.  ``kernel``, if any, must be the same on all ranks."""
        self.work, self.gets = backend.work, operation.recv is not None
        """The class of its Works, and whether this rank has a result."""
        self.lasting = lasting
        """Whether later calls may use it; not if the first call connects ranks."""
        self.fixed = True
        """Whether calls take the same route inside and outside a graph."""
        self.waits = not operation.options.overlap
        self.values = operation.values(backend.name, kernel)
        """What must be equal on all ranks."""
        self.fingerprint = 0
        """A number that stands for ``values``; 0 if nobody compares the calls."""
        self.text = b""
        """What the other ranks show of such a call if theirs differs."""
        self.description: tuple[Any, ...] = (None,)
        """What the flight recorder has of each start."""

    def belongs_to(self, group: Group) -> Prepared:
        """Completes it for a communicator, which is ``group`` to the flight recorder."""
        self.description = group, self.operation
        return self

    def start(self, comm: Any, work: Work[Any], waits: bool = True, depth: int = 2, left: Any = None) -> Any:
        """Number ``work``, record it for the caller ``depth`` frames up, and launch it.

        Of a call that the core has begun, which is numbered and recorded, complete what is ``left``.  Returns the
        result, or the Work itself with ``async_op`` or without ``waits``.
        """
        collective, backend = self.collective, self.backend
        if left is None:
            if comm._batch is not None:
                return comm._batch.add(work)
            if comm._closed:
                comm._check_open()
            if collective and comm._active is not None:
                check_one_thread(comm, work)
        if collective:
            comm._active = work
        try:
            try:
                if left is not None:
                    steps = backend.resume(work, left)
                else:
                    note(comm, work, depth + 1)
                    if backend.failures.first is not None:
                        backend.refuse(work)
                    if comm._tracing is None:
                        steps = self.launch(work)
                    else:
                        with comm._tracing((work,), False, not self.waits):
                            steps = self.launch(work)
                if steps is not None:
                    backend.engine.begin(work, steps)
            except BaseException as error:
                comm._fail_if_interrupted(error, work)
                raise
            return self._result(work) if waits and self.waits else work
        except CollectiveMismatch:
            raise_if_two_threads(comm)
            raise
        finally:
            if collective:
                comm._active = None

    def _result(self, work: Work[Any]) -> Any:
        if work.steps is not None or work._error is not None:
            return work.wait()
        work.reported = True
        array, work.array, work.held = work.array, None, None  # a backend keeps its last Work
        return array if work.convert is None else work.convert(array)


def note(comm: Any, work: Work[Any], depth: int) -> None:
    """Number ``work``, and record that the caller ``depth`` frames up launches it now."""
    prepared = work.prepared
    work.sequence = sequence = next(comm._collectives if prepared.collective else comm._messages)
    try:
        frame = _getframe(depth)
    except ValueError:  # called from C
        frame = _getframe(depth - 1)
    recorder = comm.recorder
    count = recorder.counter[0]
    work.record = record = recorder.slots[count & LAST_SLOT]  # a new list would be one more cache miss
    record[:] = prepared.description, time_ns(), frame.f_code, frame.f_lasti, sequence, None, None
    recorder.counter[0] = count + 1


class Fingerprints:
    """The fingerprints of one rank's calls: numbers that are equal on two ranks exactly if their calls match.

    A description of the call goes with each, for the error of a rank whose call differs.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        """``memory``: where the other ranks of the host read the descriptions."""
        self.texts: dict[int, bytes] = {}  # the descriptions of the last calls, by fingerprint
        self._places: dict[int, int] = {}  # and where they are published
        self._memory = memory

    def add(self, prepared: Prepared) -> Prepared:
        """Set the fingerprint of a collective and its description, and publish that."""
        if not prepared.collective:
            return prepared
        values, texts = prepared.values, self.texts
        exact = json.dumps(values, sort_keys=True).encode()
        prepared.fingerprint = fingerprint = int.from_bytes(blake2b(exact, digest_size=7).digest(), "little") + 1
        if fingerprint not in texts:
            place = len(texts)
            if place == TEXTS:
                oldest = next(iter(texts))
                place = self._places.pop(oldest)
                del texts[oldest]
            arguments = prepared.operation.text(prepared.backend.group_suffix)[:200]
            text = json.dumps([fingerprint, arguments, {k: _brief(v) for k, v in values.items()}]).encode()
            texts[fingerprint], self._places[fingerprint] = text, place
            if self._memory is not None:
                self._memory[TEXT_BYTES * place : TEXT_BYTES * (place + 1)] = text.ljust(TEXT_BYTES)
        prepared.text = texts[fingerprint]
        return prepared


def described(text: bytes, sequence: int, fingerprint: int | None = None) -> tuple[str, dict[str, Any]]:
    """The call that a rank described, as text and as fingerprint values.

    Raises KeyError if it has another ``fingerprint``, ValueError if it is incomplete.
    """
    known, arguments, call = json.loads(text)
    if fingerprint not in (None, known):
        raise KeyError(fingerprint)
    return f"{call['operation']} #{sequence}{arguments}", call


def _brief(value: Any) -> Any:
    """A value of a fingerprint, with long lists shortened to their head and a digest."""
    if isinstance(value, list) and len(value) > 16:
        digest = blake2b(json.dumps(value).encode(), digest_size=4).hexdigest()
        return f"[{', '.join(map(str, value[:8]))}, ... {len(value)} in all, digest {digest}]"
    return value


BY_CAPTURE: Any = object()
"""In a Store, of a signature whose calls take another route in a graph: that is part of the key then."""


class Store(dict[Any, Prepared]):
    """The Prepared of a communicator, by signature."""

    generation = 0
    """How often all were dropped because timeouts, windows or tables have changed."""
    eager: Any = None
    """The ``kos._core.native.Group`` that knows some of these calls, or None."""

    def find(self, signature: Any, stream: int) -> Prepared | None:
        """That of a call on ``stream``, or None."""
        prepared = self.get(signature)
        return self.get((signature, is_captured(stream))) if prepared is BY_CAPTURE else prepared

    def add(self, signature: Any, prepared: Prepared, stream: int) -> None:
        """Keep that of a call on ``stream``."""
        if len(self) >= MOST_STORED:
            super().clear()
        if not prepared.fixed:
            self[signature] = BY_CAPTURE
            signature = signature, is_captured(stream)
        self[signature] = prepared

    def clear(self) -> None:
        """Drop all."""
        super().clear()
        self.generation += 1
        if self.eager is not None:
            self.eager.forget()
