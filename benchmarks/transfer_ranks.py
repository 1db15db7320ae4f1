"""The processes of ``benchmarks.transfer_gpu``: a publisher rank or a subscriber rank with arrays on a GPU.

``python -m benchmarks.transfer_ranks JSON`` starts one such rank.  It first prints a line of JSON: a publisher prints
its address, and a subscriber the bytes of its arrays.  Each line of its input is a call, ``[METHOD, ARGUMENTS...]``.
The rank answers it by a line with the result of this method.  If a side has several ranks, they form a communicator
over TCP.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

import kos
from kos import cuda
from kos.cuda import driver, streams
from kos.cuda.driver import call, cu
from kos.memory import Array, ipc
from kos.transfer import Placement, Publisher, Subscriber

MODELS = {"8b": (4096, 1024, 14336, 128256), "tiny": (64, 16, 96, 160)}
"""Hidden size, rows of k and v, inner size, vocabulary: LLaMA 3 8B, and one for tests."""
EXACT = "0."
"""The tensors of this layer are compared in full once; of the others, the first and the last row."""
Sizes = tuple[int, ...]


def tensors(model: str, layers: int) -> dict[str, tuple[Sizes, int | None]]:
    """The shapes of a model's tensors, and the axis along which tensor parallelism splits each of them."""
    hidden, kv, inner, vocabulary = MODELS[model]
    layer = {
        "q": ((hidden, hidden), 0), "k": ((kv, hidden), 0), "v": ((kv, hidden), 0), "o": ((hidden, hidden), 1),
        "gate": ((inner, hidden), 0), "up": ((inner, hidden), 0), "down": ((hidden, inner), 1),
        "norm": ((hidden,), None), "norm2": ((hidden,), None),
    }  # fmt: skip
    found = {f"{index}.{name}": each for index in range(layers) for name, each in layer.items()}
    ends = (vocabulary, hidden), 0
    return {"embedding": ends, **found, "norm": ((hidden,), None), "head": ends}


def placements(spec: Mapping[str, Any]) -> dict[str, Placement]:
    """What a rank holds in its layout: "whole", "tp" (tensor parallelism) or "zero" (slices of flattened tensors)."""
    rank, ranks, found = spec["rank"], spec["ranks"], dict[str, Placement]()
    for name, (shape, axis) in tensors(spec["model"], spec["layers"]).items():
        placed = Placement.whole(shape)
        if spec["layout"] == "tp" and axis is not None:
            placed = Placement.shard(shape, axis, rank, ranks)
        elif spec["layout"] == "zero":
            placed = placed.flat(placed.count * rank // ranks, placed.count * (rank + 1) // ranks)
        found[name] = placed
    return found


def contents(name: str, placement: Placement) -> np.ndarray:
    """Bits that differ between the elements of a tensor: those of its elements that ``placement`` has."""
    flat = np.empty(placement.count, np.uint16)
    for part in placement.named(name).parts:
        index = np.arange(math.prod(part.whole), dtype=np.uint32).reshape(part.whole)
        index = index[tuple(slice(at, at + size) for at, size in zip(part.start, part.size, strict=True))]
        mixed = index * np.uint32(2654435761) + np.uint32(zlib.crc32(name.encode()))
        part.view(flat, part.start, part.size)[...] = mixed >> np.uint32(16)
    return flat


class Rank:
    """The arrays of a rank: slices of one array on a GPU."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.device, self.placed = spec["device"], placements(spec)
        self.flat = Array.empty((sum(each.count for each in self.placed.values()),), "bfloat16", self.device)
        self.arrays, at = dict[str, tuple[Array, Placement]](), 0
        for name, each in self.placed.items():
            self.arrays[name] = self.flat[at : at + each.count].reshape(each.shape), each
            at += each.count
        self.comm = kos.init("tcp", timeout=60) if spec["ranks"] > 1 else None
        self.hello: Any = None


class PublisherRank(Rank):
    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        self.publisher = Publisher(self.comm, self.arrays, memory=spec["memory"], patience=0.0)
        self.hello = self.publisher.address

    def publish(self, version: int) -> float:
        """The seconds of ``publish``.  Every byte is ``version``, but in version 1 ``EXACT`` tensors differ."""
        self.flat.fill_bytes(version)
        for name, (array, placed) in self.arrays.items():
            if version == 1 and name.startswith(EXACT):
                array.reshape(-1).view("uint16").copy_from(contents(name, placed))
        cuda.synchronize(self.device)
        began = time.perf_counter()
        self.publisher.publish(version)
        return time.perf_counter() - began

    def steps(self, seconds: float) -> list[tuple[float, float]] | None:
        """When each of the training steps of that time began and ended (time.monotonic); None without torch.

        A step trains one layer of 8B's sizes on 4,096 tokens: forward, backward, and AdamW.
        """
        try:
            import torch
        except ImportError:
            return None
        place: Any = {"device": f"cuda:{self.device}", "dtype": torch.bfloat16}
        if not hasattr(self, "_layer"):
            hidden, _, inner, _ = MODELS["8b"]
            self._layer = torch.nn.TransformerEncoderLayer(hidden, 32, inner, dropout=0.0, batch_first=True, **place)
            self._optimizer = torch.optim.AdamW(self._layer.parameters(), fused=True)
        x, found = torch.randn(1, 4096, MODELS["8b"][0], **place), list[tuple[float, float]]()
        limit = time.monotonic() + seconds
        while (began := time.monotonic()) < limit:
            self._layer(x).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            torch.cuda.synchronize(self.device)
            found.append((began, time.monotonic()))
        return found


class SubscriberRank(Rank):
    """One of the ranks that subscribe together."""

    _subscriber: Any = None

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        self._address, self._mapped = spec["address"], list[Any]()
        self._limits = list[tuple[int, int, int, Any]]()  # target, source, bytes, stream
        self.hello = self.flat.nbytes

    def open(self, transport: str, staged: bool) -> None:
        """Make the subscriber that ``update`` uses."""
        more: Any = {"transport": transport, "staged": staged}
        if self._subscriber is not None:
            self._subscriber.close()
        self._subscriber = Subscriber(self._address, self.arrays, comm=self.comm, **more)

    def update(self, version: int) -> tuple[float, float]:
        """When the update began and ended (time.monotonic)."""
        self._together()
        began = time.monotonic()
        found = self._subscriber.update(60)
        ended = time.monotonic()
        assert (found.version, found.changed) == (version, True), f"expected version {version}, got {found}"
        for name, (array, placed) in self.arrays.items():
            if version == 1 and name.startswith(EXACT):
                right = contents(name, placed)
                assert (array.reshape(-1).view("uint16").numpy() == right).all(), f"{name}: wrong elements"
            else:
                for row in (array[:1], array[-1:]):
                    assert (row.numpy().view("u1") == version).all(), f"{name}: expected {version} in each byte"
        return began, ended

    def unchanged(self, times: int) -> float:
        """The median of the seconds of updates that find no newer version."""
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            assert not self._subscriber.update(10).changed
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def limit(self) -> float:
        """Seconds in which plain copies move as many bytes from the same GPUs: one for each publisher rank, at once."""
        if not self._limits:
            self._map()
        self._together()
        began = time.monotonic()
        with driver.on_device(self.device):
            for target, source, nbytes, stream in self._limits:
                call(cu.cuMemcpyAsync, target, source, nbytes, streams.handle(stream))
            for *_, stream in self._limits:
                call(cu.cuStreamSynchronize, streams.handle(stream))
        return time.monotonic() - began

    def _map(self) -> None:
        at = self.flat.pointer
        ranks, me = self._subscriber.catalogue().ranks, 0 if self.comm is None else self.comm.rank
        for (rank, _), nbytes in sorted(self._subscriber.plan().traffic().items()):
            handle = ipc.IpcHandle.from_bytes(ranks[rank].gpus[0].encode())
            self._mapped.append(ipc.attach(handle, self.device))
            self._limits.append((at, self._mapped[-1].pointer, nbytes, streams.create_stream(self.device)))
            at += nbytes
        assert at <= self.flat.pointer + self.flat.nbytes, f"rank {me}: more bytes than its arrays have"

    def _together(self) -> None:
        if self.comm is not None:
            self.comm.barrier()


def main() -> None:
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not go between the answers
    rank = PublisherRank(spec) if spec["side"] == "publisher" else SubscriberRank(spec)
    print(json.dumps(rank.hello), file=answers, flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(rank, method)(*arguments)), file=answers, flush=True)
    os._exit(0)  # the driver has what it wants; publishers and subscribers end in any order


if __name__ == "__main__":
    main()
