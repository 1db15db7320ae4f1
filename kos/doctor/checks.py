"""Checks that one process makes by itself: software, MPI, shared memory, CUDA, GPUs.

Each check is a function that returns its findings.  An error, or no answer in time, is a finding too.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from importlib import metadata
from pathlib import Path

import kos
from kos import _core, commands, cuda
from kos.comm.control.base import machine_id
from kos.comm.gpu import nccl_binding
from kos.comm.waits import call_with_timeout
from kos.cuda import compile_kernels, devices, driver
from kos.cuda.kernels import KernelCache
from kos.environment import KOS_CLAIM, KOS_CORE, KOS_SECRET, VARIABLES
from kos.errors import in_words, install
from kos.launcher import under_mpirun
from kos.memory.ipc import Origin, pretended_host

OK, NO, BAD = "ok", "no", "bad"
"""Verdicts: it works; it does not, but communication does not need it; communication will not work."""

CHECK_SECONDS = 30.0
SMALL_SHM = 1 << 30
KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
_HOPPER = 9  # the major compute capability of the GPUs on which kos has run
_NEVER_RUN = (
    "kos has run on Hopper (compute capability 9.0) only; tests compile its kernels for other GPUs: "
    "mpirun -n N kos bench --collective all compares every element here"
)
EXTRAS = {
    "": ("numpy", "ml_dtypes", "mpi4py"),
    "train": ("pydantic", "rich", "safetensors", "threadpoolctl"),
    "tokenizers": ("tokenizers",),
    "chat": ("jinja2",),
    "parquet": ("pyarrow",),
    **({"zstd": ("backports.zstd",)} if sys.version_info < (3, 14) else {}),  # later Pythons have it
    "cuda": ("cuda-core", "cuda-bindings", "cuda-pathfinder", "nccl4py", "nvmath-python"),
    "plot": ("matplotlib",),
}
"""By extra, the packages that the doctor looks for."""
TRAINER = "packages (train)"
"""The check without which ranks communicate and cannot train."""
_LIBRARIES = ("nvrtc", "cudart", "nccl", "cublasLt")
_MPI_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
lines = open("/proc/self/maps").read().splitlines()
paths = sorted({line.split()[-1] for line in lines if "/libmpi." in line or "/libmpi_" in line})
print(json.dumps([MPI.Get_library_version().split(",")[0].splitlines()[0].strip(), paths[:1]]))
"""


@dataclass(frozen=True)
class Check:
    """One check: the verdict, the finding or the reason, and the remedy."""

    name: str
    verdict: str
    found: str
    remedy: str = ""


def bounded(name: str, function: Callable[[], Iterable[Check]], seconds: float = CHECK_SECONDS) -> list[Check]:
    """The findings of ``function``.  Its error, or no answer within ``seconds``, is a finding too."""
    found: list[Check] = []
    try:
        answered = call_with_timeout(lambda: found.extend(function()), seconds)
    except Exception as error:
        return [*found, Check(name, NO, in_words(error))]
    return [*found] if answered else [*found, Check(name, NO, f"did not answer within {seconds:g} s")]


def local_checks() -> list[Check]:
    """All checks that need no other rank."""
    checks = (python, variables, packages, mpi, compiled_core, shared_memory, cuda_driver, cuda_libraries, nvrtc, gpus)
    return [check for each in checks for check in bounded(each.__name__.replace("_", " "), each)]


def facts() -> dict[str, object]:
    """The facts that ranks compare with each other."""
    return {
        **asdict(Origin.here()),
        "host_id": f"{machine_id()} {pretended_host()}",
        "kos": kos.__version__,
        "numpy": _version("numpy"),
        "NCCL": _or_none(nccl_binding.version),
        "CUDA driver": _or_none(lambda: driver.call(driver.cu.cuDriverGetVersion)),  # that needs no GPU
        "gpus": [device.uuid for device in cuda.visible_devices()],
    }


def python() -> Iterator[Check]:
    found = f"{platform.python_version()} at {sys.executable}, kos {kos.__version__} at {kos.__path__[0]}"
    yield Check("Python", OK, found)


def variables() -> Iterator[Check]:
    """The variables of kos that are set, and set names that kos does not know."""
    mine = [name for name in os.environ if name.startswith("KOS_") and name != KOS_CLAIM.name]
    known = [f"{name}={'...' if name == KOS_SECRET.name else os.environ[name]}" for name in VARIABLES if name in mine]
    yield Check("variables", OK, ", ".join(known) or "none of kos is set")
    for name in sorted({*mine} - VARIABLES.keys()):
        near = get_close_matches(name, VARIABLES, 1)
        yield Check("variables", NO, f"kos does not read {name}", f"did you mean {near[0]}?" if near else "")


def packages() -> Iterator[Check]:
    for extra, names in EXTRAS.items():
        yield check_packages(extra, {name: _version(name) for name in names}, bool(_kernel_driver()))


def check_packages(extra: str, versions: dict[str, str | None], kernel_driver: bool) -> Check:
    """The check of an extra, from the ``versions`` of its packages: None for a package that is not installed.

    ``kernel_driver``: whether NVIDIA's kernel module is loaded.
    """
    missing, title = [name for name, version in versions.items() if version is None], f"packages ({extra or 'core'})"
    if missing:
        remedy = install(extra) if extra != "cuda" or kernel_driver else ""
        return Check(title, NO if extra else BAD, f"not installed: {', '.join(missing)}", remedy)
    return Check(title, OK, ", ".join(f"{name} {version}" for name, version in versions.items()))


def mpi() -> Iterator[Check]:
    """Runs in its own process: an incompatible MPI may end the process that loads it."""
    run = partial(subprocess.run, capture_output=True, text=True, timeout=CHECK_SECONDS)
    done = run([sys.executable, "-c", _MPI_PROBE])
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Check("MPI", NO, why, f"{install('mpi')}, or install the system's MPI; torchrun needs none")
        return
    library, paths = json.loads(done.stdout.splitlines()[-1])
    found = f"{library} ({paths[0] if paths else 'linked into mpi4py'}), mpi4py {_version('mpi4py')}"
    launcher, remedy = commands.find_mpirun(), ""
    flavour = commands.mpi_of(launcher) if launcher else ""
    if launcher is None:
        remedy = "install the mpirun of that library, or use torchrun"
    elif flavour and flavour not in library:
        build = commands.pip_install("--no-binary", "mpi4py", "mpi4py")
        remedy = f"start with the mpirun of the library that mpi4py loads, or build mpi4py here: {build}"
    of = "" if flavour and not remedy else f", which is of {flavour or 'an unknown MPI, or does not run'}"
    found += f", {launcher}{of}" if launcher else ", no mpirun"
    verdict = NO if remedy else OK
    if launcher and not remedy and not under_mpirun() and commands.refuses_root(launcher):
        remedy = f"for root: mpirun {commands.AS_ROOT}, or export {' '.join(f'{name}=1' for name in commands.ROOT)}"
    yield Check("MPI", verdict, found, remedy)


def compiled_core() -> Iterator[Check]:
    """Without it ranks of one host share no memory."""
    reason = _core.unavailable
    off = KOS_CORE.get() == "0"
    how = "unset KOS_CORE" if off else "install kos again beside a C compiler"
    remedy = "" if reason is None else f"ranks of one host share no memory: {how}"
    yield Check("compiled core", OK if reason is None else NO, reason or "ranks of one host share memory", remedy)


def shared_memory() -> Iterator[Check]:
    """The container's /dev/shm: NCCL and MPI put their buffers there (kos does not)."""
    space = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm: {space.free / 2**20:,.0f} of {space.total / 2**20:,.0f} MiB free"
    remedy = "" if space.free >= SMALL_SHM else "little for NCCL and MPI: docker run --shm-size=1g, or --ipc=host"
    yield Check("shared memory", NO if remedy else OK, found, remedy)


def cuda_driver() -> Iterator[Check]:
    reason, visible = driver.unavailable(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if reason is not None:
        yield cuda_unavailable(reason, bool(_kernel_driver()))
        return
    from cuda.core import system

    version, bindings = int(driver.call(driver.cu.cuDriverGetVersion)), _version("cuda-bindings")
    kernel = _or_none(lambda: ".".join(map(str, system.get_kernel_mode_driver_version()))) or "unknown to NVML"
    found = f"driver {kernel}, CUDA {version // 1000}.{version % 1000 // 10}, cuda-bindings {bindings}"
    found += "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible}"
    yield Check("CUDA", OK, found)


def cuda_unavailable(reason: str, kernel_driver: bool) -> Check:
    """The check of a machine on which CUDA cannot be used for ``reason``.

    ``kernel_driver``: whether NVIDIA's kernel module is loaded.
    """
    remedy = "the kernel has NVIDIA's driver: start the container with --gpus all" if kernel_driver else ""
    if "CUDA_VISIBLE_DEVICES" in reason:
        remedy = "CUDA_VISIBLE_DEVICES must name GPUs that nvidia-smi -L lists; unset, all are visible"
    return Check("CUDA", NO, reason, "" if "not installed" in reason else remedy)


def cuda_libraries() -> Iterator[Check]:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        return
    for name in _LIBRARIES:
        try:
            found = load_nvidia_dynamic_lib(name)
        except Exception:
            yield Check(f"lib{name}", NO, "not found", install("cuda") if _kernel_driver() else "")
        else:
            version = f" {nccl_binding.version()}" if name == "nccl" else ""
            yield Check(f"lib{name}", OK, f"{found.abs_path}{version} (by {found.found_via})")


def nvrtc() -> Iterator[Check]:
    found = cuda.visible_devices()
    arch = found[0].arch if found else "sm_90a"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cu")
        source.write_text('extern "C" __global__ void empty() {}\n')
        cubin = compile_kernels(source, arch, cache=KernelCache(Path(folder)))
    yield Check("NVRTC", OK, f"compiled a kernel for {arch}, {len(cubin):,} bytes")


def gpus() -> Iterator[Check]:
    return (check_gpu(info, devices.nvlinks(info.index)) for info in cuda.visible_devices())


def check_gpu(info: devices.DeviceInfo, nvlinks: int | None) -> Check:
    major, minor = info.compute_capability
    found = (
        f"{info.name}{' (MIG)' if info.mig else ''}, compute capability {major}.{minor}, "
        f"{info.memory / 2**30:.0f} GiB, {info.multiprocessors} SMs, {info.pci_address}, "
        f"NUMA node {_or_unknown(info.numa_node)}, {_or_unknown(nvlinks)} NVLinks"
    )
    return Check(f"GPU {info.index}", OK, found, "" if major == _HOPPER else _NEVER_RUN)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _kernel_driver() -> str:
    """The version of NVIDIA's kernel module; "" where there is none, and so no GPU."""
    return devices.read(KERNEL_DRIVER)


def _or_none(function: Callable[[], object]) -> object:
    try:
        return function()
    except Exception:
        return None


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)
