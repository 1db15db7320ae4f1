"""Launches the operations of one call of torch on a communicator of kos."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from sys import _getframe
from typing import Any, TypeAlias

import torch

import kos
from kos.comm.call_guards import in_library
from kos.interop.torch.tensors import Arrays, Tensor, as_array

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


class Recording(Arrays):
    """One launch: ``launch(name, ...)`` calls that operation of the communicator."""

    def __init__(self, comm: kos.Communicator, options: dict[str, Any]) -> None:
        super().__init__()
        self._comm, self._options, self.works = comm, options, list[Any]()

    def __call__(self, name: str, *args: Any) -> None:
        self.works.append(getattr(self._comm, name)(*args, **self._options))

    def on_tensors(self, name: str, x: Tensor, *args: Any) -> None:
        """Call an operation that reads ``x`` and writes the tensor in ``args``; without one it writes ``x``."""
        if any(torch.is_tensor(each) for each in args):
            self(name, as_array(x), *(self.output(each) if torch.is_tensor(each) else each for each in args))
        else:
            self(name, self.in_place(x), *args)


Call: TypeAlias = list[tuple[str, tuple[Any, ...]]] | Callable[[Recording], None]
"""Names of operations with their arguments, for ``on_tensors``; or a function that calls the operations."""


def run(call: Call, comm: kos.Communicator, options: dict[str, Any], asynchronous: bool, batch: bool) -> Recording:
    """Run ``call``.  Operations of a ``batch``, and several operations of a list, are launched together."""
    since = comm.recorder.count
    try:
        return _run(call, comm, options, asynchronous, batch)
    finally:
        set_call_site(comm, since)


def set_call_site(comm: kos.Communicator, since: int) -> None:
    """Set the call site of operations since the recorder's count was ``since``: the program's line.

    That is the innermost frame outside kos, torch and Python's library.
    """
    try:
        frame = _getframe(5)  # inner frames are those of kos; to check a frame takes 0.2 us
    except ValueError:  # called from C
        frame = _getframe(3)
    while _in_library(frame.f_code.co_filename) and (outer := frame.f_back) is not None:
        frame = outer
    comm.recorder.set_call_site(since, frame)


@cache
def _in_library(file: str) -> bool:
    """Whether ``file`` is part of kos, torch or Python's library, or wraps functions that torch deprecates."""
    return in_library(file) or file.startswith(_TORCH) or file.endswith("/typing_extensions.py")


def _run(call: Call, comm: kos.Communicator, options: dict[str, Any], asynchronous: bool, batch: bool) -> Recording:
    if not batch and (not isinstance(call, list) or len(call) == 1):
        launch = Recording(comm, {**options, "async_op": True} if asynchronous else options)
        _call(call, launch)
        return launch
    launch = Recording(comm, options)
    with comm.batch(async_op=asynchronous) as operations:
        _call(call, launch)
    launch.works = operations.works
    return launch


def _call(call: Call, launch: Recording) -> None:
    if isinstance(call, list):
        for name, args in call:
            launch.on_tensors(name, *args)
    else:
        call(launch)
