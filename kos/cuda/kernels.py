"""Kernels: ``.cu`` files compiled by NVRTC on first use, and cached on disk for later processes.

One file is compiled once per (architecture, macros): ``-D`` macros choose dtype, operation and constants,
``#include "x.cuh"`` finds files beside the one that names them.  Kernels are ``extern "C"`` and use no
CUDA headers (cuda/atomic alone costs a second): inline PTX replaces them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import dirname, join, normpath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.cuda import driver, streams
from kos.cuda.devices import device_info
from kos.cuda.driver import call, cu, relaxed_capture
from kos.errors import BackendUnavailable, CompileError, CudaError, InvalidArgument, install
from kos.files import cache_folder, replace_file

log = logging.getLogger(__name__)

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_ERROR = re.compile(r"^(?P<file>.*)\((?P<line>\d+)\): (?:catastrophic )?error: (?P<text>.*)$", re.MULTILINE)
_TOOL_ERROR = re.compile(r"^(?:ptxas|nvrtc)\b.*\b(?:error|fatal)\b.*$", re.MULTILINE)
_DEFAULT_SHARED_LIMIT = 48 * 1024

Define = str | int | bool


@dataclass(frozen=True, slots=True)
class Address:
    """An address in array ``number`` (0 or 1) of a launch, known when that begins: ``offset`` bytes after its first."""

    number: int
    offset: int
    alignment: int
    """Address of the array modulo 16."""

    def __add__(self, nbytes: int) -> Address:
        return Address(self.number, self.offset + nbytes, self.alignment)

    def __mod__(self, divisor: int) -> int:
        assert 16 % divisor == 0
        return (self.alignment + self.offset) % divisor


def resolved(address: Any, arrays: Sequence[Any]) -> Any:
    """An Address, or a number, as a number.  If ``arrays`` are Addresses, it remains an Address."""
    return arrays[address.number] + address.offset if type(address) is Address else int(address)


SEND, RECV, STREAM = (Address(number, 0, 0) for number in range(3))
"""The two arrays of a launch, and its stream, as arguments of a ``Launch``."""


_CONFIG_BYTES = 56
"""Of a CUlaunchConfig."""


class Launch(NamedTuple):
    """A call of a C function that queues work on a stream."""

    call: Callable[..., Any]
    """The function as Python calls it.  It raises errors."""
    function: int
    """Its address, for the compiled core."""
    arguments: Sequence[Any]
    """Numbers; each is an ``Address`` if it differs between two launches."""
    error: Callable[[int], Exception]
    """The error to raise if the function has returned this status to the core."""
    context_up_to: int = 0
    """If the handle of the stream is at most this number, the context of its GPU must be current for the core; 0: it
    need never be."""
    kernel: int = 0
    config: bytes = bytes(_CONFIG_BYTES)
    closes: int = 0
    """The function is called even if one of so many launches before it has failed."""

    def __call__(self, stream: int, send: int = 0, recv: int = 0) -> None:
        """Queue it, with the addresses of the two arrays."""
        values = send, recv, stream
        self.call(*[values[x.number] + x.offset if type(x) is Address else x for x in self.arguments])


def copy_launch(target: Any, source: Any, nbytes: int, device: int) -> Launch:
    """The launch of a copy on a GPU; each address may be an ``Address``."""

    def copy(target: int, source: int, nbytes: int, stream: int) -> None:
        if target == source:
            return
        if stream > streams.PER_THREAD and cu.cuMemcpyDtoDAsync(target, source, nbytes, stream) == (0,):
            return  # on the stream's device; the call fails if the thread has no current device
        with driver.on_device(device):
            call(cu.cuMemcpyDtoDAsync, target, source, nbytes, stream)

    def error(status: int) -> Exception:
        return driver.error_of("cuMemcpyDtoDAsync", cu.CUresult(status))

    arguments = target, source, nbytes, STREAM
    return Launch(copy, driver.address("cuMemcpyDtoDAsync_v2"), arguments, error, sys.maxsize)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the calls of one kind queue on a GPU: steps, in order.

    A step is a ``Launch``, a ``BoundKernel``, another Plan, or any function of a stream and two addresses.  The
    compiled core repeats a call if it has launches and kernels only.
    """

    steps: Sequence[Any] | Callable[[int, Sequence[Any]], Sequence[Any]]
    """If they depend on the stream, for example by scratch memory, a function of the stream and the two arrays.  The
    arrays are addresses or, for launches of any arrays, ``Address``es."""
    name: str | None = None
    """The name of the kernel, if its choice depends on more than the arguments.  kos checks that all ranks have chosen
    the same."""
    kernels: tuple[Any, ...] = ()
    """What describes kernels of kos among the steps, equally on all ranks."""
    waits: bool = True
    """Whether it waits for other ranks; False for the copy of a group of one rank."""
    cacheable: bool = True
    """Whether later calls may use it; not if the first call connects ranks."""
    about: Any = None
    """What the route that has made it must know when it starts it."""
    memories: Sequence[Any] = ()
    """The memory of windows that the steps use, which outlives the graphs that capture them."""

    def on(self, stream: int, arrays: Sequence[Any]) -> list[Any]:
        """The steps on a stream, without Plans among them."""
        steps = self.steps(stream, arrays) if callable(self.steps) else self.steps
        return [each for step in steps for each in (step.on(stream, arrays) if type(step) is Plan else (step,))]

    def __call__(self, stream: int, send: int = 0, recv: int = 0) -> None:
        """Queue the steps.  If one raises, those that close a group are still called."""
        steps = self.on(stream, (send, recv))
        for number, step in enumerate(steps):
            try:
                step(stream, send, recv)
            except BaseException:
                for distance, later in enumerate(steps[number + 1 :], 1):
                    if type(later) is Launch and distance <= later.closes:
                        later(stream, send, recv)
                raise

    def launches(self, stream: int) -> list[Launch] | None:
        """The steps on a stream, outside of a graph and for any arrays; None if the core cannot make them."""
        steps = [each.launch() if isinstance(each, BoundKernel) else each for each in self.on(stream, (SEND, RECV))]
        return steps if all(type(each) is Launch for each in steps) else None


NOTHING = Plan(())
"""The plan of an operation that moves no elements."""


class KernelCache:
    """Compiled kernels on disk, shared by all processes of the user.

    Entries are written atomically and carry a checksum.  Processes that miss at the same time compile at the same
    time.  An unusable folder causes one warning and is then ignored.  ``FileStreamProgramCache`` of cuda.core cannot
    replace this class: it has no checksums, and raises an error if the folder cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._warned = False

    def get(self, key: str) -> bytes | None:
        """The entry, or None if it is missing or damaged."""
        path = self.directory / f"{key}.cubin"
        try:
            data = path.read_bytes()
        except OSError:
            return None
        digest, cubin = data[:32], data[32:]
        if hashlib.sha256(cubin).digest() == digest:
            return cubin
        log.warning("kernel cache: %s is damaged and will be compiled again", path)
        return None

    def put(self, key: str, cubin: bytes) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            replace_file(self.directory / f"{key}.cubin", hashlib.sha256(cubin).digest() + cubin)
        except OSError as error:
            if not self._warned:
                log.warning("kernel cache: %s cannot be used, compiling again: %s", self.directory, error)
                self._warned = True


@functools.cache
def _cache(directory: Path) -> KernelCache:
    return KernelCache(directory)


def compile_kernels(
    path: str | Path, arch: str, defines: Mapping[str, Define] | None = None, cache: KernelCache | None = None
) -> bytes:
    """The cubin of ``path`` for ``arch`` ("sm_90a"); needs NVRTC, but no GPU.

    ``defines`` become ``-D`` macros, which also reach NVRTC's own headers: ``DTYPE`` is a safe name, ``T`` is not.
    ``cache`` is the user's by default ($XDG_CACHE_HOME/kos/kernels).  Raises CompileError with file, line and the
    compiler's log, and BackendUnavailable without NVRTC.
    """
    cache = cache or _cache(cache_folder() / "kernels")
    path = Path(path)
    source, headers = read_sources(path)
    version, options = nvrtc_version(), _options(path, arch, defines or {})
    flags = b" ".join(options.as_bytes("nvrtc")).decode()
    parts = ["kos-2", repr(version), flags, path.name, source]
    parts += [text for header in sorted(headers.items()) for text in header]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    cubin = cache.get(key)
    if cubin is None:
        started = time.perf_counter()
        cubin = _compile(path, source, options)
        log.debug("compiled %s in %.0f ms: %s", path, 1e3 * (time.perf_counter() - started), flags)
        cache.put(key, cubin)
    return cubin


def read_sources(path: Path) -> tuple[str, dict[str, str]]:
    """The text of ``path``, and the texts of all files that it includes, by their paths relative to that file."""
    headers: dict[str, str] = {}

    def read(name: str) -> str:
        try:
            text = (path.parent / name).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or f"expected UTF-8, got {error}"
            raise CompileError(f"{path}: cannot read {path.parent / name}: {reason}") from error
        for included in _INCLUDE.findall(text):
            if (header := normpath(join(dirname(name), included))) not in headers:
                headers[header] = ""  # a file that includes itself ends here
                headers[header] = read(header)
        return text

    return read(path.name), headers


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Version of the compiler. Raises BackendUnavailable if there is none."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise BackendUnavailable(f"NVRTC is not installed: {install('cuda')} ({reason})") from error
    if importlib.util.find_spec("cuda.core") is None:  # torch requires the bindings only
        raise BackendUnavailable(f"NVRTC needs the package cuda-core, which is not installed: {install('cuda')}")
    return major, minor


def _options(path: Path, arch: str, defines: Mapping[str, Define]) -> Any:
    from cuda.core import ProgramOptions

    macros = [(name, str(int(value) if isinstance(value, bool) else value)) for name, value in sorted(defines.items())]
    return ProgramOptions(name=str(path), arch=arch, std="c++17", lineinfo=True, define_macro=macros or None)


def _compile(path: Path, source: str, options: Any) -> bytes:
    from cuda.core import Program

    try:
        return bytes(Program(source, "c++", options).compile("cubin").code)
    except Exception as error:  # cuda.core gives its NVRTCError no public name
        raise _compile_error(path, str(error), options) from error


def _compile_error(path: Path, text: str, options: Any) -> CompileError:
    """The error, headed by the compiler's first error; warnings may precede that in the log."""
    text = text.rpartition("compilation log:")[2].strip("\0 \n")
    found, other = _ERROR.search(text), _TOOL_ERROR.search(text)
    where = f"{path}: " + (other[0] if other else text.partition("\n")[0])
    if found:
        where = f"{found['file']}:{found['line']}: {found['text']}"
    return CompileError(f"{where} ({b' '.join(options.as_bytes('nvrtc')).decode()})\n{text}")


class Kernel:
    """One compiled function on one device, ready to launch.

    Arguments of a launch are pointers and integers as ``int`` (64 bits wide; a narrower parameter takes the
    low ones), and NumPy or ctypes scalars for everything else: a Python ``float`` goes as double.
    """

    __slots__ = ("_configs", "_function", "_launch", "_max_active_blocks", "_shared", "device", "handle", "name")

    def __init__(self, cubin: bytes, name: str, device: int) -> None:
        from cuda.core import ObjectCode, launch

        with driver.on_device(device):
            try:
                self.handle = ObjectCode.from_cubin(cubin).get_kernel(name)
            except Exception as error:  # cuda.core gives its CUDAError no public name
                if driver.broken():
                    raise driver.library_error(f"loading kernel {name!r}", error) from error
                raise InvalidArgument(f"kernel {name!r} does not load on cuda:{device}: {error}") from error
            # Load now: at the first launch CUDA would wait for running kernels, which may wait for this one.
            call(cu.cuFuncLoad, call(cu.cuKernelGetFunction, int(self.handle.handle)))
            self._function = cu.CUfunction(int(self.handle.handle))
        self.name = name
        self.device = device
        self._launch = launch
        self._shared = _DEFAULT_SHARED_LIMIT
        self._max_active_blocks: dict[int, int] = {}
        self._configs: dict[tuple[Any, ...], Any] = {}

    def __call__(self, stream: Any, grid: Any, block: Any, *arguments: Any, shared: int = 0) -> None:
        """Queue the kernel on ``stream`` once, by cuda.core's launch; ``bind`` explains the options.

        An argument may also be a TMA descriptor of cuda.core, which is 128 bytes long.  The device must be current.
        """
        key = grid, block, shared
        try:
            config = self._configs.get(key)
            if config is None:
                from cuda.core import LaunchConfig

                self._allow(shared)
                with driver.on_device(self.device):
                    config = LaunchConfig(grid=grid, block=block, shmem_size=shared)
                self._configs[key] = config
            self._launch(streams.as_stream(None) if stream is None else stream, config, self.handle, *arguments)
        except Exception as error:
            if type(error).__name__ != "CUDAError":  # to which cuda.core gives no public name
                raise
            raise CudaError(f"launch of {self.name} failed: {error}") from error

    def bind(
        self, grid: Any, block: Any, *arguments: Any, shared: int = 0, cooperative: bool = False, overlap: bool = False
    ) -> BoundKernel:
        """A function that launches the kernel with these arguments on a stream.

        ``grid`` and ``block`` are int or tuple, ``shared`` the dynamic shared memory of a block in bytes.
        ``cooperative`` guarantees that all blocks run at once, or refuses.  ``overlap`` lets the launch begin before
        the kernel queued before it has ended (programmatic dependent launch): the kernel must wait for it itself.
        For a launch on a default stream the device must be current; any other stream has its own context.  It takes the
        addresses of the arrays after the stream, if arguments are an ``Address``.  Any thread may call it.
        """
        self._allow(shared)
        return BoundKernel(self, _launch_config(grid, block, shared, cooperative, overlap), arguments)

    def max_active_blocks(self, threads: int) -> int:
        """How many blocks of ``threads`` threads, without dynamic shared memory, a multiprocessor holds at once."""
        if threads not in self._max_active_blocks:
            with driver.on_device(self.device):
                occupancy = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor
                self._max_active_blocks[threads] = int(call(occupancy, self._function, threads, 0))
        return self._max_active_blocks[threads]

    def _allow(self, shared: int) -> None:
        """Request dynamic shared memory of more than 48 KB."""
        if shared > self._shared:
            limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            with driver.on_device(self.device):
                call(cu.cuKernelSetAttribute, limit, shared, int(self.handle.handle), self.device)
            self._shared = shared


class BoundKernel:
    """A kernel and its arguments; a call launches it on a stream (``Kernel.bind``)."""

    __slots__ = ("_addresses", "_config", "_kernel", "_last", "_lock", "_parameters", "_words")

    def __init__(self, kernel: Any, config: Any, arguments: Sequence[Any]) -> None:
        self._kernel, self._config, self._last = kernel, config, None
        self._addresses = [(i, x.number, x.offset) for i, x in enumerate(arguments) if type(x) is Address]
        self._parameters, self._words = _parameters([0 if type(x) is Address else x for x in arguments])
        self._lock = threading.Lock()  # the driver reads the parameters without Python's lock
        config.hStream = streams.LEGACY

    def __call__(self, stream: Any, *arrays: int) -> None:
        with self._lock:
            for i, number, offset in self._addresses:
                self._words[i] = arrays[number] + offset
            if stream is not self._last:
                self._config.hStream, self._last = streams.handle(stream), stream
            (status,) = cu.cuLaunchKernelEx(self._config, self._kernel._function, self._parameters, 0)
        if status:
            raise self.error(status)

    def error(self, status: Any) -> CudaError:
        """The error of a launch that the driver has refused with ``status``."""
        return driver.error_of(f"launch of {self._kernel.name}: cuLaunchKernelEx", cu.CUresult(status))

    def launch(self) -> Launch:
        """The launch for the compiled core, which needs this object meanwhile."""
        words: list[Any] = self._words[: len(self._words) // 2]
        for i, number, offset in self._addresses:
            words[i] = Address(number, offset, 0)
        config = ctypes.string_at(int(self._config.getPtr()), _CONFIG_BYTES)
        about: dict[str, Any] = {"kernel": int(self._kernel._function), "config": config}
        return Launch(self, driver.address("cuLaunchKernelEx"), words, self.error, streams.PER_THREAD, **about)


def _parameters(arguments: Sequence[Any]) -> tuple[int, Any]:
    """The address of the argument pointers, for cuLaunchKernelEx, and the object that holds the arguments."""
    count = len(arguments)
    words = (ctypes.c_uint64 * (2 * count))()  # the arguments, then their addresses
    first = ctypes.addressof(words)
    for i, x in enumerate(arguments):
        data = b"" if isinstance(x, int) else np.asarray(x).tobytes()
        if len(data) > 8:
            raise InvalidArgument(f"argument {i} of a bound launch: expected 8 bytes at most, got {len(data)}")
        words[i] = int.from_bytes(data, "little") if data else x  # keeps the low bits
        words[count + i] = first + 8 * i
    return first + 8 * count, words


def _launch_config(grid: Any, block: Any, shared: int, cooperative: bool, overlap: bool) -> Any:
    attributes = []
    for wanted, kind, field in (
        (cooperative, "COOPERATIVE", "cooperative"),
        (overlap, "PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed"),
    ):
        if wanted:
            attribute = cu.CUlaunchAttribute()
            attribute.id = getattr(cu.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{kind}")
            setattr(attribute.value, field, 1)
            attributes.append(attribute)
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
    config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
    config.sharedMemBytes = shared
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _three(sizes: Any) -> tuple[int, ...]:
    return (*(sizes if isinstance(sizes, tuple) else (sizes,)), 1, 1)[:3]


_load_locks: dict[int, threading.RLock] = {}  # by device; reentrant: the garbage collector may run while a thread loads
_kernels: dict[tuple[Any, ...], Kernel] = {}


def load_kernel(path: str | Path, name: str, device: int, **defines: Define) -> Kernel:
    """The kernel ``name`` of ``path`` for ``device``: compiled, loaded and cached at its first use.

    CUDA loads a kernel only when all running kernels of the process on the device have ended.  Until then no other
    thread can launch a kernel.  So all threads share one loaded kernel: a second load would wait for
    the kernel that another thread has launched, which may wait for another rank.  A thread that captures a graph may
    call this.
    """
    key = path, name, device, tuple(sorted(defines.items()))
    if (kernel := _kernels.get(key)) is not None:  # without the lock, which a thread holds while it waits for the GPU
        return kernel
    with _load_locks.setdefault(device, threading.RLock()):
        if key not in _kernels:
            driver.require()
            cubin = compile_kernels(path, device_info(device).arch, defines)
            with relaxed_capture():
                _kernels[key] = Kernel(cubin, name, device)
        return _kernels[key]


def is_loaded(path: str | Path, name: str, device: int, **defines: Define) -> bool:
    """Whether ``load_kernel`` has loaded this kernel before."""
    return (path, name, device, tuple(sorted(defines.items()))) in _kernels
