"""Kernels: ``.cu`` files compiled by NVRTC on first use, kept on disk for every later process.

One file is compiled once per (architecture, macros): ``-D`` macros choose dtype, operation and constants,
``#include "x.cuh"`` finds files beside the one that names them.  Kernels are ``extern "C"`` and use no
CUDA headers (cuda/atomic alone costs a second): inline PTX says what the language cannot.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kos.cuda import driver, streams
from kos.cuda.devices import device_info
from kos.cuda.driver import call, cu
from kos.errors import BackendUnavailable, CompileError, CudaError, InvalidArgument, install
from kos.files import cache_folder, replace_file

log = logging.getLogger(__name__)

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_ERROR = re.compile(r"^(?P<file>.*)\((?P<line>\d+)\): (?:catastrophic )?error: (?P<text>.*)$", re.MULTILINE)
_TOOL_ERROR = re.compile(r"^(?:ptxas|nvrtc)\b.*\b(?:error|fatal)\b.*$", re.MULTILINE)
_DEFAULT_SHARED_LIMIT = 48 * 1024
_LOCK_TIMEOUT = 120.0  # seconds; the largest kernels compile in a few

Define = str | int | bool


class KernelCache:
    """Compiled kernels on disk, shared by all processes of the user.

    An entry is written under another name and then renamed, and carries its own checksum.  A cache that
    cannot be read or written is told of once, by a warning, and then does nothing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._warned = False

    def get(self, key: str, *, quiet: bool = False) -> bytes | None:
        """The entry, or None where there is no sound one; ``quiet`` does not warn of a damaged one."""
        try:
            data = (self.directory / f"{key}.cubin").read_bytes()
        except OSError:
            return None
        digest, cubin = data[:32], data[32:]
        if hashlib.sha256(cubin).digest() == digest:
            return cubin
        if not quiet:
            log.warning("kernel cache: %s is damaged and will be compiled anew", self.directory / f"{key}.cubin")
        return None

    def put(self, key: str, cubin: bytes) -> None:
        try:
            replace_file(self.directory / f"{key}.cubin", hashlib.sha256(cubin).digest() + cubin)
        except OSError as error:
            self._warn(error)

    @contextmanager
    def lock(self, key: str, timeout: float = _LOCK_TIMEOUT) -> Iterator[None]:
        """Hold ``key`` against other processes and threads, or go on without it after ``timeout`` seconds.

        A process that dies lets its lock go.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = (self.directory / f"{key[:2]}.lock").open("w")
        except OSError as error:
            self._warn(error)
            yield
            return
        with file:
            deadline = time.monotonic() + timeout
            while not _try_lock(file.fileno()):
                if time.monotonic() > deadline:
                    log.warning("kernel cache: %s held for over %g s, compiling without it", file.name, timeout)
                    break
                time.sleep(0.005)
            yield

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            log.warning("kernel cache: %s cannot be used, compiling anew: %s", self.directory, error)
            self._warned = True


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: compile twice rather than not at all
        return True
    return True


def default_cache() -> KernelCache:
    """The user's cache: $XDG_CACHE_HOME/kos/kernels, or ~/.cache/kos/kernels."""
    return _cache(cache_folder() / "kernels")


@functools.cache
def _cache(directory: Path) -> KernelCache:
    return KernelCache(directory)


def compile_kernels(
    path: str | Path,
    arch: str,
    defines: Mapping[str, Define] | None = None,
    cache: KernelCache | None = None,
) -> bytes:
    """The cubin of ``path`` for ``arch`` ("sm_90a"); needs NVRTC, but no GPU.

    ``defines`` become ``-D`` macros; they also reach NVRTC's own headers, so ``DTYPE`` is a good name and
    ``T`` is none.  Raises CompileError with file, line and the compiler's log, and BackendUnavailable
    without NVRTC.
    """
    cache = cache or default_cache()
    path = Path(path)
    source, headers, places = _read_sources(path)
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--generate-line-info"]
    options += [f"-D{name}={int(value) if isinstance(value, bool) else value}"
                for name, value in sorted((defines or {}).items())]  # fmt: skip
    parts = ["kos-1", repr(nvrtc_version()), *options, path.name, source]
    parts += [text for header in sorted(headers.items()) for text in header]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    cubin = cache.get(key, quiet=True)
    if cubin is None:
        with cache.lock(key):
            cubin = cache.get(key)
            if cubin is None:
                cubin = _compile(path, source, headers, places, options)
                cache.put(key, cubin)
    return cubin


def _read_sources(path: Path) -> tuple[str, dict[str, str], dict[str, Path]]:
    """The text of ``path`` and, by the name they are included under, texts and places of all files that it includes."""
    headers: dict[str, str] = {}
    places: dict[str, Path] = {}

    def read(file: Path) -> str:
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or f"expected UTF-8, got {error}"
            raise CompileError(f"{path}: cannot read {file}: {reason}") from error
        for name in _INCLUDE.findall(text):
            if name not in headers:
                headers[name] = ""  # a file that includes itself ends here
                places[name] = file.parent / name
                headers[name] = read(places[name])
        return text

    return read(path), headers, places


def _nvrtc(name: str, *arguments: Any) -> Any:
    from cuda.bindings import nvrtc

    status, *values = getattr(nvrtc, name)(*arguments)
    if status:
        raise CompileError(f"{name} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Version of the compiler. Raises BackendUnavailable if there is none."""
    try:
        return tuple(_nvrtc("nvrtcVersion"))
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise BackendUnavailable(f"NVRTC is not installed: {install('cuda')} ({reason})") from error


def _compile(
    path: Path, source: str, headers: Mapping[str, str], places: Mapping[str, Path], options: list[str]
) -> bytes:
    from cuda.bindings import nvrtc

    names = [name.encode() for name in headers]
    texts = [text.encode() for text in headers.values()]
    program = _nvrtc("nvrtcCreateProgram", source.encode(), str(path).encode(), len(names), texts, names)
    try:
        started = time.perf_counter()
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status:
            text = b" " * _nvrtc("nvrtcGetProgramLogSize", program)
            _nvrtc("nvrtcGetProgramLog", program, text)
            raise _compile_error(path, places, text.rstrip(b"\0 \n").decode(), options)
        cubin = b" " * _nvrtc("nvrtcGetCUBINSize", program)
        _nvrtc("nvrtcGetCUBIN", program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    log.debug("compiled %s in %.0f ms: %s", path, 1e3 * (time.perf_counter() - started), " ".join(options))
    return cubin


def _compile_error(path: Path, places: Mapping[str, Path], text: str, options: list[str]) -> CompileError:
    """Headed by the first error, which warnings may come before."""
    found, other = _ERROR.search(text), _TOOL_ERROR.search(text)
    where = f"{path}: " + (other[0] if other else text.partition("\n")[0])
    if found:
        where = f"{places.get(found['file'], found['file'])}:{found['line']}: {found['text']}"
    return CompileError(f"{where} ({' '.join(options)})\n{text}")


class Kernel:
    """One compiled function on one device, ready to launch.

    Arguments of a launch are pointers and integers as ``int`` (64 bits wide; a narrower parameter takes the
    low ones), and NumPy or ctypes scalars for everything else: a Python ``float`` goes as double.
    """

    __slots__ = ("_configs", "_launch", "_shared", "device", "handle", "name")

    def __init__(self, cubin: bytes, name: str, device: int) -> None:
        from cuda.core import ObjectCode, launch

        with driver.on_device(device):
            try:
                self.handle = ObjectCode.from_cubin(cubin).get_kernel(name)
            except Exception as error:  # cuda.core gives its CUDAError no public name
                if driver.broken():
                    raise driver.library_error(f"loading kernel {name!r}", error) from error
                raise InvalidArgument(f"kernel {name!r} does not load on cuda:{device}: {error}") from error
        self.name = name
        self.device = device
        self._launch = launch
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._shared = _DEFAULT_SHARED_LIMIT

    def __call__(
        self, stream: Any, grid: Any, block: Any, *arguments: Any, shared: int = 0, cooperative: bool = False
    ) -> None:
        """Queue the kernel on ``stream``; its device must be current on this thread.

        ``grid`` and ``block`` are int or tuple, ``shared`` the dynamic shared memory of a block in bytes.
        ``cooperative`` guarantees that all blocks run at once, or refuses.
        """
        try:
            config = self._configs.get((grid, block, shared, cooperative))
            if config is None:
                config = self._configs[grid, block, shared, cooperative] = self._config(
                    grid, block, shared, cooperative
                )
            self._launch(streams.as_stream(None) if stream is None else stream, config, self.handle, *arguments)
        except Exception as error:
            if type(error).__name__ != "CUDAError":  # to which cuda.core gives no public name
                raise
            raise CudaError(f"launch of {self.name} failed: {error}") from error

    def bind(
        self,
        grid: Any,
        block: Any,
        *arguments: Any,
        shared: int = 0,
        cooperative: bool = False,
        overlap: bool = False,
    ) -> Callable[[Any], None]:
        """A function that launches with these arguments on a stream: everything else is resolved, and loaded, now.

        ``overlap`` lets the launch begin before the kernel queued before it has ended (programmatic dependent
        launch): the kernel must wait for it itself.  One thread at a time may call the function.
        """
        with driver.on_device(self.device):
            self._allow(shared)
            # CUDA would load it at its first launch, and wait for kernels that run, which may wait for this one.
            call(cu.cuFuncLoad, call(cu.cuKernelGetFunction, int(self.handle.handle)))
        config = _launch_config(grid, block, shared, cooperative, overlap)
        parameters, kept = _parameters(arguments)
        function, queue, last = cu.CUfunction(int(self.handle.handle)), cu.cuLaunchKernelEx, None
        config.hStream = streams.LEGACY

        def launch(stream: Any, keep: Any = (self, kept)) -> None:
            nonlocal last
            if stream is not last:
                config.hStream, last = streams.handle(stream), stream
            (status,) = queue(config, function, parameters, 0)
            if status:
                raise driver.error_of("cuLaunchKernelEx", status)

        return launch

    def _config(self, grid: Any, block: Any, shared: int, cooperative: bool) -> Any:
        from cuda.core import LaunchConfig

        with driver.on_device(self.device):
            self._allow(shared)
            return LaunchConfig(grid=grid, block=block, shmem_size=shared, is_cooperative=cooperative)

    def _allow(self, shared: int) -> None:
        """Beyond 48 KB of shared memory a kernel must ask."""
        if shared > self._shared:
            limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(cu.cuKernelSetAttribute, limit, shared, int(self.handle.handle), self.device)
            self._shared = shared


def _parameters(arguments: Sequence[Any]) -> tuple[int, Any]:
    """What cuLaunchKernelEx takes: the address of the arguments' addresses; and what holds both."""
    words = [x if isinstance(x, int) else int.from_bytes(np.asarray(x).tobytes(), "little") for x in arguments]
    words_of = ctypes.c_uint64 * len(words)
    values = words_of(*words)  # which keeps the low bits of an int
    first = ctypes.addressof(values)
    places = words_of(*range(first, first + 8 * len(words), 8))
    return ctypes.addressof(places), (values, places)


def _launch_config(grid: Any, block: Any, shared: int, cooperative: bool, overlap: bool) -> Any:
    """CUDA's own CUlaunchConfig; its stream is set at the launch."""
    kinds, attributes = cu.CUlaunchAttributeID, []
    if cooperative:
        attributes.append(cu.CUlaunchAttribute())
        attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attributes[-1].value.cooperative = 1
    if overlap:
        attributes.append(cu.CUlaunchAttribute())
        attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
    config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
    config.sharedMemBytes = shared
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _three(sizes: Any) -> tuple[int, ...]:
    return (*(sizes if isinstance(sizes, tuple) else (sizes,)), 1, 1)[:3]


def load_kernel(path: str | Path, name: str, device: int, **defines: Define) -> Kernel:
    """The kernel ``name`` of ``path`` for ``device``: compiled, loaded and kept on its first use."""
    return _load(path, name, device, tuple(sorted(defines.items())))


@functools.cache
def _load(path: str | Path, name: str, device: int, defines: tuple[tuple[str, Define], ...]) -> Kernel:
    driver.require()
    return Kernel(compile_kernels(path, device_info(device).arch, dict(defines)), name, device)
