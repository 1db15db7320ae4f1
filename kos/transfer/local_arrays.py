"""The arrays of a publisher rank or a subscriber rank, in host memory or on GPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kos.cuda import streams
from kos.dtypes import DType
from kos.errors import InvalidArgument, TransferTimeout
from kos.memory.array import Array
from kos.memory.buffer import as_buffer, handle_and_owner
from kos.memory.libraries import plain_array
from kos.transfer.gpu import PIECE, Copiers, Launch, whole
from kos.transfer.placement import Arrays, Flat, current
from kos.transfer.plan import Array as Described
from kos.transfer.scales import BlockScales


class LocalArrays:
    """The flattened memory of the arrays, their layout, and a copier for each of their GPUs.

    ``writable`` is True on a subscriber, which writes to its arrays, and False on a publisher.  The layout numbers the
    GPUs from 1 on.  It does not contain a subscriber's arrays of scales.  Raises InvalidArgument.
    """

    def __init__(self, arrays: Arrays, writable: bool) -> None:
        self._arrays, self._writable, self._places = dict(arrays), writable, dict[str, tuple[int | None, int]]()
        self.flat, self.layout, self.copiers = dict[str, Flat](), dict[str, Described](), Copiers()
        self._prepared = dict[tuple[int, int], list[Launch]]()
        for name, (array, placement) in arrays.items():
            buffer = as_buffer(current(array), name, writable)
            self.flat[name], self._places[name], gpu = buffer.flat, (buffer.device, buffer.address), 0
            if (device := buffer.device) is not None:
                self.copiers.of(device)
                gpu = [*self.copiers].index(device) + 1
                self.flat[name] = Array(buffer.pointer, (buffer.count,), buffer.dtype, device, owner=array)
            if writable and isinstance(placement, BlockScales):
                continue
            if buffer.shape != placement.shape:
                expected = f"an array of shape {placement.shape}, the shape of its placement"
                raise InvalidArgument(f"{name}: expected {expected}, got {buffer.shape}")
            placed = placement.named(name)
            placed.check(name)
            self.layout[name] = Described(buffer.dtype, placed, gpu)

    def follow(self) -> None:
        """Order the next copies behind the work that is queued on the streams of the arrays.

        Raises InvalidArgument if one of these streams is being captured, or if the memory of an array has changed.
        """
        found = dict[tuple[int, int], str]()  # (device, stream) -> the name of an array
        for name, (array, _) in self._arrays.items():
            place, stream = self._place_of(name, current(array))
            if place != self._places[name] and self.flat[name].size:
                was, now = (f"{'the host' if gpu is None else f'cuda:{gpu}'}, {address:#x}"
                            for gpu, address in (self._places[name], place))  # fmt: skip
                raise InvalidArgument(f"{name}: expected the same memory as before ({was}), got {now}")
            if place[0] is not None and place[0] in self.copiers:  # an empty array may have moved
                found[place[0], stream] = name
        for (gpu, stream), name in found.items():
            if streams.is_captured(stream):
                raise InvalidArgument(f"{name}: expected a stream that is not being captured, got one that is")
            self.copiers[gpu].follow(stream)

    def _place_of(self, name: str, array: Any) -> tuple[tuple[int | None, int], int]:
        """The GPU and the address of an array, and its stream.

        Every publish and update asks for each array: on a GPU without a Buffer, which takes some microseconds more.
        """
        on_gpu = array if type(array) is Array else None if type(array) is np.ndarray else plain_array(array)
        if on_gpu is None or getattr(on_gpu.owner, "closed", False) or (self._writable and on_gpu.readonly):
            buffer = as_buffer(array, name, self._writable)
            return (buffer.device, buffer.address), buffer.stream
        return (on_gpu.device, on_gpu.pointer), handle_and_owner(on_gpu.stream)[0]

    def copy(self, key: int, pairs: Sequence[tuple[Flat, Flat]], deadline: float = math.inf) -> None:
        """Copy arrays; on GPUs, queue the copies.  Each pair has a target and a source, one of which is this rank's.

        Calls with the same ``key`` must always copy the same memory, because their copies are prepared only once.
        Raises TransferTimeout if the copies on the host are not complete at the deadline.
        """
        for device, copier in self.copiers.items():
            boxes = ((whole(to), whole(x)) for to, x in pairs if isinstance(x, Array) and x.device == device)
            copier.copy_all(boxes, self._prepared, (device, key))
        on_host = [(t, x) for t, x in pairs if isinstance(t, np.ndarray) and isinstance(x, np.ndarray)]
        copied = 0
        for target, source in on_host:
            step = PIECE // target.itemsize
            for start in range(0, target.size, step):
                if time.monotonic() > deadline:
                    got = f"got {copied:,} of {sum(each.nbytes for each, _ in on_host):,} bytes"
                    raise TransferTimeout(f"the host: expected the end of the copy before the deadline, {got}")
                np.copyto(target[start : start + step], source[start : start + step])
                copied += target[start : start + step].nbytes

    def staging(self, dtypes: Mapping[str, DType]) -> dict[str, Flat]:
        """Uninitialised memory for the named arrays, in these dtypes."""
        found = dict[str, Flat]()
        for name, dtype in dtypes.items():
            flat = self.flat[name]
            if isinstance(flat, Array):
                found[name] = Array.empty((flat.size,), dtype, flat.device, label="staging memory of kos.transfer")
            else:
                found[name] = np.empty(flat.size, dtype.numpy)
        for device in {each.device for each in found.values() if isinstance(each, Array)}:
            streams.synchronize(None, device)  # from now on, every stream may use the memory
        return found
