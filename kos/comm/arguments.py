"""Checks of a call's arguments: what is wrong is named, with expected and got, before anything is sent."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from kos.comm.backend import COLLECTIVE_TAGS
from kos.errors import InvalidArgument
from kos.memory import Buffer, as_buffer

Array = np.ndarray[Any, Any]


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


def in_and_out(x: Any, out: Any) -> tuple[Buffer, Buffer]:
    """The buffers of an operation whose output is as large as its input; the same one twice if in place."""
    if out is None or out is x:
        buffer = as_buffer(x, "x", writable=True)
        return buffer, buffer
    send, recv = as_buffer(x, "x", writable=False), as_buffer(out, "out", writable=True)
    expect_dtype("out", recv, send)
    if recv.array.shape != send.array.shape:
        raise InvalidArgument(f"out: expected shape {send.array.shape}, got {recv.array.shape}")
    if recv.same_memory(send):
        return recv, recv
    refuse_overlap(send, recv)
    return send, recv


def expect_dtype(what: str, got: Buffer, expected: Buffer) -> None:
    """Both have the same element type."""
    if got.dtype is not expected.dtype:
        raise InvalidArgument(f"{what}: expected dtype {expected.dtype}, got {got.dtype}")


def refuse_overlap(send: Buffer, recv: Buffer, allowed: Array | None = None) -> None:
    """In and out share no memory, unless the smaller is exactly its ``allowed`` part of the larger."""
    if not send.overlaps(recv):
        return
    smaller = send.flat if send.count < recv.count else recv.flat
    if allowed is not None and smaller.size == allowed.size and _address(smaller) == _address(allowed):
        return
    raise InvalidArgument("out: expected memory apart from x, got arrays that overlap")


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
