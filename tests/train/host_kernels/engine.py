"""CudaEngine on the emulated device: streams run at once, events are over when they are recorded, no graphs."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np

from kos.train.engines import cuda as engine_module
from kos.train.engines import feed, memory_plan
from tests.train.host_kernels import emulator


class Event:
    def __init__(self, device):
        pass

    def record(self, stream):
        pass

    hold = record

    def done(self):
        return True

    def synchronize(self):
        pass


class Capture:
    """Runs what is captured where it stands, and at every replay again."""

    queued = None

    def __init__(self, stream):
        pass

    def __enter__(self):
        return SimpleNamespace(replay=lambda stream: Capture.queued(), close=lambda: None)

    def __exit__(self, *_):
        pass


def host_engine(monkeypatch) -> None:
    """Let ``kos.train.engines.cuda`` run on host memory."""
    emulator.host_memory(monkeypatch)

    class Sizing(memory_plan._Sizing, emulator.HostOps):
        def __init__(self, ops):
            emulator.HostOps.__init__(self)
            self._ground = emulator.Array.empty(1 << 16, np.uint8, 0)

        def launch(self, *arguments, **defines):
            pass

        matmul = attention = launch

        def attention_backward(self, d_out, *rest):
            rest[-1].take((1 << 10,), np.float32)

    about = SimpleNamespace(name="host", uuid="host", compute_capability=(9, 0))
    fakes = {
        (engine_module, "driver"): SimpleNamespace(set_device=lambda device: None),
        (engine_module, "device_info"): lambda device: about,
        (engine_module, "Event"): Event,
        (engine_module, "capture"): Capture,
        (engine_module, "CudaOps"): lambda device: emulator.HostOps(),
        (engine_module, "pinned_empty"): lambda shape, dtype, device: np.empty(shape, dtype),
        (engine_module, "call"): lambda function, *arguments: (1 << 30, 2 << 30),
        (feed, "Event"): Event,
        (feed, "create_stream"): lambda device: None,
        (feed, "pinned_empty"): lambda shape, dtype, device: np.empty(shape, dtype),
        (memory_plan, "_Sizing"): Sizing,
        (memory_plan, "capture"): Capture,
        (memory_plan, "relaxed_capture"): contextlib.nullcontext,
        (memory_plan, "call"): lambda function, *arguments: (1 << 30, 2 << 30),
    }
    for (module, name), fake in fakes.items():
        monkeypatch.setattr(module, name, fake)
