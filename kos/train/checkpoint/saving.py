"""Writing a checkpoint: each rank writes its files on a thread, then rank 0 publishes the whole.

A rank's thread leaves the size and SHA-256 of each of its files in ``rank-N.json`` of the temporary folder. Rank 0's
thread waits for those of all ranks, and then writes the manifest and renames the folder. The threads use no
communicator, so training may go on meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from kos.errors import CheckpointError, raised_as
from kos.files import replace_file, sync
from kos.train.checkpoint.huggingface import as_saved, name_as_saved, shape_as_saved
from kos.train.ops.parameters import Shape
from kos.train.parallel.failures import together

if TYPE_CHECKING:
    from kos.comm.communicator import Communicator

SAVED_DTYPES = {"float32": ("F32", np.dtype("<f4")), "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16))}
"""Dtypes of weights in files: safetensors' name and NumPy's."""
WEIGHTS = ("model", "adapter_model")
"""Beginnings of the names of files of weights."""
WRITTEN = 4 << 20  # bytes of a tensor that are written and hashed at once
_LOOK_EVERY = 0.005  # seconds between two looks for what other ranks have written

Files = dict[str, dict[str, Any]]
"""File -> its ``bytes`` and ``sha256``."""


class Saving:
    """This rank's part in the checkpoint of ``step``, which ``publish(files)`` makes of ``temporary`` in the end.

    ``put`` takes the tensors of ``contents``, file by file, in host memory, and None after the last. At most ``ahead``
    of them wait to be written; 0 stands for any number. ``publish`` is called on rank 0 of ``comm``, once all ranks
    have written their files. ``folder`` is what it makes.
    """

    def __init__(
        self, folder: Path, temporary: Path, step: int, contents: Mapping[str, Mapping[str, Shape]],
        comm: Communicator, publish: Callable[[Files], None], ahead: int = 1,
    ) -> None:  # fmt: skip
        self.step, self._folder, self._temporary, self._publish = step, folder, temporary, publish
        self._comm, self._contents = comm, contents
        self._rank, self._others = comm.rank, set(range(comm.size)) - {comm.rank}
        self._tensors: queue.Queue[np.ndarray | None] = queue.Queue(ahead)
        self._cancelled, pool = threading.Event(), ThreadPoolExecutor(1, "kos-checkpoint")
        self._written = pool.submit(self._write_all)
        self._done = pool.submit(self._complete)
        pool.shutdown(wait=False)

    def put(self, tensor: np.ndarray | None) -> None:
        """Pass the next tensor, which must not change afterwards. Waits while too many tensors wait to be written."""
        self._tensors.put(tensor)

    @property
    def done(self) -> bool:
        """Whether this rank has no more to do; on rank 0, whether the checkpoint is complete."""
        return self._done.done()

    def finish(self) -> None:
        """Wait until the checkpoint is complete. Collective: the error of one rank is raised on all."""
        try:
            together(self._comm, partial(self._wait, self._written))
            together(self._comm, partial(self._wait, self._done))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Stop as soon as the current tensor is written. The checkpoint is either complete or absent."""
        self._cancelled.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._tensors.get_nowait()
        self._tensors.put(None)
        wait([self._done])
        if self._rank == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _wait(self, future: Future[Any]) -> None:
        where = f" on rank {self._rank}" * bool(self._others)
        with raised_as(CheckpointError, f"{self._folder}: expected to write a checkpoint{where}"):
            future.result()

    def _write_all(self) -> Files:
        try:
            files = {name: self._write(self._temporary / name, tensors) for name, tensors in self._contents.items()}
            if self._others:
                write_json(self._temporary / f"rank-{self._rank}.json", files)
            return files
        except BaseException:
            while not self._cancelled.is_set() and self._tensors.get() is not None:
                pass  # so that ``put`` does not wait forever
            raise

    def _complete(self) -> None:
        files = self._written.result()
        if self._rank == 0 and self._collect(files):
            self._publish(files)

    def _collect(self, files: Files) -> bool:
        """Add the files that the other ranks have written to ``files``; False if it was cancelled first."""
        for rank in sorted(self._others):
            path = self._temporary / f"rank-{rank}.json"
            while not path.exists():
                if self._cancelled.wait(_LOOK_EVERY):
                    return False
            files |= json.loads(path.read_text())
        for rank in self._others | {self._rank}:
            (self._temporary / f"rank-{rank}.json").unlink(missing_ok=True)
        return True

    def _next(self) -> np.ndarray:
        tensor = self._tensors.get()
        if tensor is None or self._cancelled.is_set():
            raise CheckpointError(f"{self._folder}: expected to write a checkpoint, got a cancelled save")
        return tensor

    def _write(self, path: Path, shapes: Mapping[str, Shape]) -> dict[str, Any]:
        if not path.name.startswith(WEIGHTS):
            return write_tensors(path, shapes, (self._next() for _ in shapes))
        return write_weights(path, shapes, self._finite)

    def _finite(self, name: str) -> np.ndarray:
        tensor = self._next()
        if not np.isfinite(tensor).all():
            expected = f"expected finite weights, got others in {name}; nothing is saved"
            raise CheckpointError(f"{self._folder}: {expected}")
        return tensor


def write_weights(
    path: Path, shapes: Mapping[str, Shape], read: Callable[[str], np.ndarray], dtype: str = "float32"
) -> dict[str, Any]:
    """As ``write_tensors``, but in the format of transformers and peft. ``read`` returns weights by kos's names."""
    saved = {name_as_saved(name): shape_as_saved(name, shape) for name, shape in shapes.items()}
    return write_tensors(path, saved, (as_saved(name, read(name)) for name in shapes), dtype)


def write_tensors(
    path: Path, shapes: Mapping[str, Shape], tensors: Iterable[np.ndarray], dtype: str = "float32"
) -> dict[str, Any]:
    """Write tensors, one at a time, as safetensors (https://github.com/huggingface/safetensors).

    ``dtype`` is one of ``SAVED_DTYPES``. Returns the file's size in bytes and its SHA-256.
    """
    code, kind = SAVED_DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + kind.itemsize * math.prod(shape)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        first = memoryview(len(text).to_bytes(8, "little") + text)
        for content in itertools.chain([first], _contents(tensors, kind)):
            file.write(content)
            digest.update(content)
            size += len(content)
    sync(path)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _contents(tensors: Iterable[np.ndarray], dtype: np.dtype) -> Iterator[memoryview]:
    """Their bytes in ``dtype``, some rows at a time: a tensor may lie in another order in memory."""
    for tensor in tensors:
        rows = max(1, WRITTEN * len(tensor) // max(tensor.nbytes, 1))
        for at in range(0, len(tensor), rows):
            yield np.ascontiguousarray(tensor[at : at + rows], dtype).reshape(-1).view(np.uint8).data


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(value, indent=2).encode() + b"\n")
