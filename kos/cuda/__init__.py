"""A thin layer over the CUDA driver: devices, streams, graphs, and kernels compiled on first use.

Imports without a GPU, a driver or the CUDA packages; ``unavailable()`` names the missing one.
"""

from kos.cuda.devices import DeviceInfo, device_info, visible_devices
from kos.cuda.driver import on_device, require, set_device, synchronize, unavailable
from kos.cuda.graphs import Graph, capture
from kos.cuda.kernels import Kernel, compile_kernels, load_kernel
from kos.cuda.streams import as_stream, create_stream

__all__ = [
    "DeviceInfo", "Graph", "Kernel", "as_stream", "capture", "compile_kernels", "create_stream",
    "device_info", "load_kernel", "on_device", "require", "set_device", "synchronize", "unavailable",
    "visible_devices",
]  # fmt: skip
