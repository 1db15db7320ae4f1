"""Checks of a call's arguments, made before anything is sent; errors name expected and got."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypedDict

import numpy as np

from kos.comm.operation import ANY, AUTO, COLLECTIVE_TAGS, NOBODY
from kos.comm.schedules import algorithms, collectives
from kos.errors import InvalidArgument
from kos.memory import Buffer, as_buffer
from kos.memory.array import Array
from kos.memory.libraries import converter, empty_like, kept_stream

_LONGEST_TIMEOUT = 1e6
"""Seconds: poll(2) takes a C int of milliseconds, 25 days at most."""

_MOST_ELEMENTS = 1 << 58
"""Elements of an array: its bytes fit in 63 bits for any dtype, so a larger request fails for lack of memory."""

_MOST_DIMENSIONS = 64
"""NumPy's limit."""


def check_timeout(timeout: Any) -> float:
    """``timeout`` in seconds, capped at 1e6 (12 days); raises InvalidArgument unless it is positive."""
    real = isinstance(timeout, int | float | np.integer | np.floating)
    if not real or isinstance(timeout, bool | np.timedelta64) or not timeout > 0:
        raise InvalidArgument(f"timeout: expected a positive number of seconds, got {timeout!r}")
    return float(min(timeout, _LONGEST_TIMEOUT))


def check_int(what: str, value: Any, instead: str = "") -> int:
    """``value`` as an int; accepts integers of any library, but no bool.  ``instead``: see ``number_in``."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except (TypeError, OverflowError):
        pass
    raise InvalidArgument(f"{what}: expected a whole number{instead}, got {value!r}")


def check_bool(what: str, value: Any) -> bool:
    """``value`` as a bool; accepts Python's and NumPy's, 0 and 1."""
    if isinstance(value, int | np.bool_) and value in (0, 1):
        return bool(value)
    raise InvalidArgument(f"{what}: expected True or False, got {value!r}")


def check_shape(shape: Any) -> tuple[int, ...]:
    """The shape as a tuple; a number is a shape of one dimension."""
    dimensions = shape if isinstance(shape, tuple | list) else (shape,)
    number_in("shape", len(dimensions), 0, _MOST_DIMENSIONS, kind="number of dimensions")
    sizes = tuple(number_in("shape", size, 0, _MOST_ELEMENTS) for size in dimensions)
    number_in("shape", math.prod(size or 1 for size in sizes), 0, _MOST_ELEMENTS, kind="product")
    return sizes


def number_in(what: str, value: Any, low: int, high: int, instead: str = "", kind: str = "number") -> int:
    """``value`` as an int from ``low`` to ``high``; ``instead`` names the other allowed values in the error."""
    value = check_int(what, value, instead)
    if not low <= value <= high:
        raise InvalidArgument(f"{what}: expected a {kind} from {low} to {high}{instead}, got {value}")
    return value


def check_tag(tag: Any) -> int:
    """A message's tag."""
    return number_in("tag", tag, 0, COLLECTIVE_TAGS - 1)


def check_recv_tag(tag: Any) -> int:
    """The tag of a receive or probe, or ANY."""
    return ANY if tag is ANY else check_tag(tag)


def check_rank(what: str, rank: Any, size: int) -> int:
    """A rank of a group of ``size``."""
    return number_in(what, rank, 0, size - 1, kind="rank")


def check_ranks(what: str, ranks: Any, size: int) -> list[int]:
    """Different ranks of a group of ``size``, at least one."""
    try:
        members = [check_rank(what, rank, size) for rank in ranks]
    except TypeError:  # not a sequence
        members = []
    if not members or len(set(members)) < len(members):
        raise InvalidArgument(f"{what}: expected different ranks from 0 to {size - 1}, got {ranks!r:.80}")
    return members


def check_peer(what: str, rank: Any, me: int, size: int) -> int:
    """A rank of a group of ``size`` that is not this one, or NOBODY."""
    if rank is NOBODY:
        return NOBODY
    rank = check_rank(what, rank, size)
    if rank == me:
        raise InvalidArgument(f"{what}: expected another rank, got this rank, {me}")
    return rank


def check_algorithm(algorithm: Any, operation: str, deterministic: bool) -> str:
    """The name of a schedule for the operation, or "auto"."""
    if algorithm is AUTO:
        return AUTO
    allowed = algorithms(operation, ordered=True if deterministic else None) if operation in collectives() else ()
    if not isinstance(algorithm, str) or algorithm not in (*allowed, AUTO):
        why = " that add in rank order (deterministic=True)" if deterministic else ""
        names = f" or one of {', '.join(allowed)}{why}" if allowed else ""
        raise InvalidArgument(f"algorithm: expected 'auto'{names} for {operation}, got {algorithm!r}")
    return algorithm


def check_counts(what: str, counts: Sequence[int], size: int, total: Buffer | None = None) -> tuple[int, ...]:
    """The element counts, one for each rank; they sum to the elements of ``total`` if that is given."""
    try:
        numbers = [check_int(what, count) for count in counts]
    except TypeError:  # not a sequence
        raise InvalidArgument(f"{what}: expected {size} numbers from 0 on, got {counts!r}") from None
    if len(numbers) != size or min(numbers) < 0:
        raise InvalidArgument(f"{what}: expected {size} numbers from 0 on, got {numbers}")
    whole = sum(numbers)
    if total is not None and whole != total.count:
        raise InvalidArgument(f"{what}: expected a sum of {total.count}, the elements of x, got {whole}")
    number_in(what, whole, 0, _MOST_ELEMENTS, kind="sum")
    return tuple(numbers)


def check_totals(what: str, totals: Sequence[int], expected: Sequence[int]) -> None:
    """Check the elements of ``what`` on every rank (-1: it has none there), all of which raise the same error."""
    for rank, (got, wanted) in enumerate(zip(totals, expected, strict=True)):
        if got not in (-1, wanted):
            raise InvalidArgument(f"{what}: expected {wanted} elements on rank {rank}, got {got}")


def size_and_place(out: Any, x: Buffer, stream: Any) -> tuple[int, int]:
    """The elements of ``out`` and its ``output_offset``, before counts are known; -1 for both without ``out``."""
    if out is None:
        return -1, -1
    recv = as_buffer(out, "out", writable=True, stream=stream)
    expect_alike(recv, x)
    return recv.count, output_offset(x, recv)


def shard_shape(send: Buffer, size: int) -> tuple[int, ...]:
    """The shape of one of ``size`` equal shards: split along the first dimension if that divides, else 1-D."""
    if send.count % size:
        raise InvalidArgument(f"x: expected a multiple of {size} elements, got {send.count}")
    if send.shape and send.shape[0] % size == 0:
        return (send.shape[0] // size, *send.shape[1:])
    return (send.count // size,)


def output(out: Any, send: Buffer, shape: tuple[int, ...], stream: Any, own: int | None = None) -> Buffer:
    """``out``, checked against ``send``, or a new array of ``shape`` in the same memory, of the same library.

    It may share memory with ``send`` only as ``refuse_overlap`` allows.
    """
    if out is None:
        convert = None
        if type(send.array) not in (np.ndarray, Array):
            out, convert = empty_like(send.array, shape, stream), converter(send.array)
        if out is None and send.device is None:
            out = np.empty(shape, send.dtype.numpy)
        elif out is None:
            assert send.device is not None
            if stream is None:
                stream = send.array.stream if isinstance(send.array, Array) else kept_stream(send.array)
            out = Array.empty(shape, send.dtype, send.device, stream=stream)
        recv = as_buffer(out, "out", writable=True, stream=stream)
        recv.convert = convert
        return recv
    recv = as_buffer(out, "out", writable=True, stream=stream)
    expect_alike(recv, send)
    if recv.count != math.prod(shape):
        raise InvalidArgument(f"out: expected {math.prod(shape)} elements (shape {shape}), got shape {recv.shape}")
    refuse_overlap(send, recv, own)
    return recv


def in_and_out(x: Any, out: Any, stream: Any) -> tuple[Buffer, Buffer]:
    """The buffers of an operation whose output is as large as its input; the same one twice if in place."""
    if out is None or out is x:
        buffer = as_buffer(x, "x", True, stream)
        return buffer, buffer
    send = as_buffer(x, "x", writable=False, stream=stream)
    recv = as_buffer(out, "out", writable=True, stream=stream)
    expect_alike(recv, send)
    if recv.shape != send.shape:
        raise InvalidArgument(f"out: expected shape {send.shape}, got {recv.shape}")
    if recv.overlaps(send):
        if recv.address == send.address:
            return recv, recv
        refuse_overlap(send, recv)
    return send, recv


def expect_alike(out: Buffer, x: Buffer) -> None:
    """Check that the output has the dtype of the input and lies in the same memory."""
    if out.dtype is not x.dtype:
        raise InvalidArgument(f"out: expected dtype {x.dtype}, got {out.dtype}")
    expect_place(out, x)


def expect_place(out: Buffer, x: Buffer) -> None:
    """Check that the output lies in host memory, or in that of the same GPU, as the input does."""
    if out.device != x.device:
        raise InvalidArgument(f"out: expected memory of {x.place}, got memory of {out.place}")


def refuse_overlap(send: Buffer, recv: Buffer, own: int | None = None) -> None:
    """Check that input and output do not overlap, unless the smaller begins at element ``own`` of the larger."""
    check_offset(output_offset(send, recv), own)


def output_offset(send: Buffer, recv: Buffer) -> int:
    """The element of the larger array at which the smaller begins: -1 if they are apart, -2 if it is no part of it."""
    small, large = (send, recv) if send.count < recv.count else (recv, send)
    if not small.count or not send.overlaps(recv):
        return -1
    start, odd = divmod(small.address - large.address, large.dtype.itemsize)
    return start if not odd and 0 <= start <= large.count - small.count else -2


def check_offsets(places: Sequence[int], counts: Sequence[int]) -> None:
    """Check what ``output_offset`` returned on every rank, all of which raise the same error."""
    for rank, (place, own) in enumerate(zip(places, accumulate(counts, initial=0), strict=False)):
        check_offset(place, own, f" on rank {rank}")


def check_offset(place: int, own: int | None, where: str = "") -> None:
    """Check what ``output_offset`` returned, of this rank, or of the rank that ``where`` names."""
    if place not in (-1, own):
        part = "" if own is None else f", or a part that begins at element {own} of the larger array"
        raise InvalidArgument(f"out: expected memory that does not overlap x{part}{where}, got arrays that overlap")


class NCCLOptions(TypedDict, total=False):
    """Settings of an NCCL communicator; see ncclConfig_t in NCCL's documentation.  The same on all ranks."""

    min_ctas: int
    """Least number of thread blocks of a kernel, from 1."""
    max_ctas: int
    """Largest number of thread blocks of a kernel, from 1; fewer leave more of the GPU to other kernels."""
    cga_cluster_size: int
    """Thread blocks of a cluster, from 0 to 8."""
    cta_policy: int
    """0: default; 1: efficiency; 2: no thread blocks where copy engines can move the data; 3: 1 and 2."""
    nvls_ctas: int
    """Thread blocks of kernels that use NVLink SHARP, from 1."""
    n_channels_per_net_peer: int
    """Network channels between two ranks, from 1; NCCL rounds up to a power of two."""
    traffic_class: int
    """Traffic class of the network, from 0."""
    net_name: str
    """Network plugin, such as "IB" or "Socket"."""
    collnet_enable: bool
    """Use of SHARP in InfiniBand switches."""
    nvlink_centric_sched: bool
    """Scheduling that favours NVLink."""
    split_share: bool
    """Whether groups split from this one share its resources."""


_RANGES = {
    "min_ctas": (1, 64), "max_ctas": (1, 64), "cga_cluster_size": (0, 8), "cta_policy": (0, 3), "nvls_ctas": (1, 64),
    "n_channels_per_net_peer": (1, 64), "traffic_class": (0, (1 << 31) - 1),
}  # fmt: skip


def check_nccl(given: Any) -> dict[str, Any]:
    """The options, checked by name and type, in the order of their names; none for None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"nccl: expected a dict of options, got {type(given).__name__}")
    known = NCCLOptions.__annotations__
    checked: dict[str, Any] = {}
    for name in sorted(given, key=str):
        value, what = given[name], f"nccl: {name}"
        if name not in known:
            raise InvalidArgument(f"nccl: expected options among {', '.join(known)}, got {name!r}")
        if name in _RANGES:
            checked[name] = number_in(what, value, *_RANGES[name])
        elif name != "net_name":
            checked[name] = check_bool(what, value)
        elif isinstance(value, str) and value:
            checked[name] = value
        else:
            raise InvalidArgument(f"{what}: expected the name of a network, got {value!r}")
    least, most = checked.get("min_ctas", 1), checked.get("max_ctas", 64)
    if least > most:
        raise InvalidArgument(f"nccl: expected min_ctas of at most max_ctas, got {least} and {most}")
    return checked
