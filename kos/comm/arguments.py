"""Checks of a call's arguments: what is wrong is named, with expected and got, before anything is sent."""

from __future__ import annotations

import operator
from typing import Any

from kos.comm.backend import COLLECTIVE_TAGS
from kos.errors import InvalidArgument
from kos.memory import Buffer, as_buffer


def whole_number(what: str, value: Any) -> int:
    """``value`` as an int, if it is one of some kind (NumPy's, for one)."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{what}: expected a whole number, got {value!r}") from None


def check_tag(what: str, tag: Any) -> int:
    """A message's tag."""
    tag = whole_number(what, tag)
    if not 0 <= tag < COLLECTIVE_TAGS:
        raise InvalidArgument(f"{what}: expected a number from 0 to {COLLECTIVE_TAGS - 1}, got {tag}")
    return tag


def in_and_out(x: Any, out: Any, stream: Any) -> tuple[Buffer, Buffer]:
    """The buffers of an operation whose output is as large as its input; the same one twice if in place."""
    if out is None or out is x:
        buffer = as_buffer(x, "x", writable=True, stream=stream)
        return buffer, buffer
    send = as_buffer(x, "x", writable=False, stream=stream)
    recv = as_buffer(out, "out", writable=True, stream=stream)
    expect_alike("out", recv, send)
    if recv.shape != send.shape:
        raise InvalidArgument(f"out: expected shape {send.shape}, got {recv.shape}")
    if recv.same_memory(send):
        return recv, recv
    refuse_overlap(send, recv)
    return send, recv


def expect_alike(what: str, got: Buffer, expected: Buffer) -> None:
    """Both have the same element type and lie in the same memory."""
    if got.dtype is not expected.dtype:
        raise InvalidArgument(f"{what}: expected dtype {expected.dtype}, got {got.dtype}")
    expect_place(what, got, expected)


def expect_place(what: str, got: Buffer, expected: Buffer) -> None:
    """Both lie in the memory of the host, or of the same GPU."""
    if got.device != expected.device:
        raise InvalidArgument(f"{what}: expected memory of {expected.place}, got memory of {got.place}")


def refuse_overlap(send: Buffer, recv: Buffer, own: int | None = None) -> None:
    """In and out share no memory, unless the smaller is exactly the ``own``-th such part of the larger."""
    if not send.overlaps(recv):
        return
    small, large = (send, recv) if send.count < recv.count else (recv, send)
    if own is None or small.address != large.address + own * small.nbytes:
        raise InvalidArgument("out: expected memory apart from x, got arrays that overlap")
