"""Discovery: which rank takes which GPU, what sysfs says, and what is said where CUDA cannot be used."""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kos import cuda
from kos.comm.gpu import devices as choice
from kos.cuda import devices, driver
from kos.cuda.devices import assign_devices
from kos.errors import BackendUnavailable, install
from kos.memory import ipc
from kos.memory.array import Array
from tests.fake_cuda import GPU, Contexts, installed


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected"),
    [
        ([None] * 4, [None] * 4, [0, 1, 2, 3]),
        ([None] * 4, [None], [0, 0, 0, 0]),
        ([None] * 5, [None] * 2, [0, 1, 0, 1, 0]),
        ([1, 1, 0, 0], [0, 0, 1, 1], [2, 3, 0, 1]),
        ([1, 1, 1, 0], [0, 0, 1, 1], [2, 3, 0, 1]),
        ([None, 0, 1], [0, 0, 1, 1], [0, 1, 2]),
        ([7, 0], [0, 1], [0, 1]),
    ],
)
def test_assign_devices(ranks, nodes, expected):
    assert assign_devices(ranks, nodes) == expected


def test_assign_devices_without_any():
    with pytest.raises(BackendUnavailable, match="a device for 2 ranks, got none"):
        assign_devices([None, None], [])


@pytest.mark.parametrize(
    ("given", "place", "expected"),
    [
        (["", ""], 1, 1),
        (["b", ""], 1, 0),  # rank 0 of two was lost: the newcomer takes its GPU
        (["b", "a", ""], 2, 0),
        (["b", "a", "b", ""], 3, 0),
        (["", "a", ""], 0, 1),
        (["", "a", ""], 2, 0),
    ],
)
def test_a_rank_without_a_gpu_takes_the_one_that_the_fewest_were_given(given, place, expected, monkeypatch):
    ranks = [(rank, None) for rank in range(len(given))]
    group = SimpleNamespace(device=None, place_on_machine=place, on_machine=ranks, requested_gpus=given)
    with installed(monkeypatch, SimpleNamespace(), [GPU(uuid="a"), GPU(uuid="b")]):
        assert choice.device_of(group).index == expected


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    """A machine with two nodes, and one GPU on the second."""
    mine = sorted(os.sched_getaffinity(0))
    files = {
        "devices/system/node/node0/cpulist": "1000-1003",
        "devices/system/node/node1/cpulist": f"{','.join(map(str, mine))},900-902",
        "bus/pci/devices/0000:1b:00.0/numa_node": "1\n",
        "bus/pci/devices/0000:1c:00.0/numa_node": "-1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(devices, "SYSFS", tmp_path)
    return tmp_path


def test_sysfs(sysfs):
    assert devices.process_numa_node() == 1
    assert devices._numa_node(sysfs / "bus/pci/devices/0000:1b:00.0") == 1
    assert devices._numa_node(sysfs / "bus/pci/devices/0000:1c:00.0") is None
    assert devices._cpu_list(sysfs / "devices/system/node/node0/cpulist") == {1000, 1001, 1002, 1003}


def test_arch():
    archs = [devices.arch_of(capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 0))]
    assert archs == ["sm_80", "sm_89", "sm_90a", "sm_100a"]


@pytest.fixture
def all_visible(monkeypatch):
    """As on a machine whose user has hidden no GPU: kos says first that none is visible."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def _say(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    code = f"from kos import cuda, errors\n{code}\nprint(cuda.unavailable(), cuda.visible_devices())\n"
    code += "try: cuda.require()\nexcept errors.BackendUnavailable as error: print(error)\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_NO_PACKAGES = "import sys; sys.modules['cuda.bindings'] = None"


def _some_library() -> bytes:
    """A library that loads, and has nothing of a driver."""
    other = re.search(r"/.*/libm[.-].*", Path("/proc/self/maps").read_text())
    assert other
    return Path(other[0]).read_bytes()


_OTHER_BINDINGS = """
import sys, types
sys.modules["cuda.bindings"] = types.ModuleType("cuda.bindings")
sys.modules["cuda.bindings"].__version__ = "12.9.10"
sys.modules["cuda.bindings"].driver = types.ModuleType("cuda.bindings.driver")
"""


_BINDINGS_ALONE = """
import types
sys.modules["cuda.bindings"].__version__ = "13.0.0"
sys.modules["cuda"] = types.ModuleType("cuda")
sys.modules["cuda"].__path__ = []
"""


@pytest.mark.usefixtures("all_visible")
@pytest.mark.parametrize(
    ("code", "why"),
    [
        (_NO_PACKAGES, "the CUDA packages are not installed"),
        (_OTHER_BINDINGS, "expected the packages of CUDA 13, got cuda-bindings 12.9.10"),
        (_OTHER_BINDINGS + _BINDINGS_ALONE, "the package cuda-core is not installed"),  # as torch installs them
    ],
    ids=["none", "of CUDA 12", "bindings alone"],
)
def test_packages_that_are_missing_or_old(code, why, tmp_path):
    (tmp_path / "libcuda.so.1").write_bytes(_some_library())
    said = _say(code, LD_LIBRARY_PATH=f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}")
    assert said == f"{why}: {install('cuda')} ()\nCUDA: {why}: {install('cuda')}\n"


@pytest.fixture
def machine(monkeypatch):
    """A machine with one GPU, the ``version`` of its driver, and how packages are imported."""
    machine = SimpleNamespace(version=13000, import_module=lambda name: None, util=importlib.util)
    monkeypatch.setattr(driver, "importlib", machine)
    with installed(monkeypatch, SimpleNamespace(cuDriverGetVersion=lambda: (0, machine.version))):
        yield machine


@pytest.mark.parametrize(
    ("version", "expected"),
    [(12040, "expected a driver of CUDA 13 (580 or newer), got one of CUDA 12.4"), (13000, None), (13010, None)],
)
def test_a_driver_of_cuda_12(version, expected, machine):
    machine.version = version
    assert driver.unavailable() == expected


@pytest.mark.skipif("no CUDA driver" not in (cuda.unavailable() or ""), reason="there is a CUDA driver")
@pytest.mark.parametrize("code", ["", _NO_PACKAGES], ids=["packages", "no packages"])
def test_without_a_driver(code):
    """Packages would not help."""
    assert _say(code).count("no CUDA driver (libcuda.so.1) on this machine") == 2


@pytest.mark.usefixtures("all_visible")
def test_a_driver_that_cannot_be_used(tmp_path):
    """In the words of who refused it: of the loader, or of the bindings, which miss what they need in a library."""
    pytest.importorskip("cuda.core")
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(b"")
    path = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    assert _say("", LD_LIBRARY_PATH=path).count(f"the CUDA driver does not load: {library}: file too short") == 2
    library.write_bytes(_some_library())
    said = _say("", LD_LIBRARY_PATH=path)
    missed = r'Failed to get cuGetProcAddress|Function "cuInit" not found'  # by version of the bindings
    assert len(re.findall(rf"the CUDA driver \(libcuda\.so\.1\) does not work: (?:{missed})", said)) == 2


@pytest.mark.gpu
def test_all_gpus_hidden():
    assert "CUDA_VISIBLE_DEVICES=''" in _say("", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_discovery():
    found = cuda.visible_devices()
    for index, info in enumerate(found):
        print(info, f"NVLinks {devices.nvlinks(index)}")
        assert info.index == index and info.name and len(info.uuid) == 32
        assert info.memory > 1 << 30 and info.multiprocessors > 0
        assert Path("/sys/bus/pci/devices", info.pci_address).exists()
    with pytest.raises(BackendUnavailable, match="expected a device in 0"):
        cuda.device_info(len(found))


def test_threads_import_the_packages_one_at_a_time(machine):
    begun, second, together = threading.Event(), threading.Event(), []

    def load(name):
        assert name == "cuda.core"
        if threading.current_thread() is threads[0]:
            begun.set()
            together.append(second.wait(0.3))
        else:
            second.set()

    machine.import_module = load
    threads = [threading.Thread(target=driver.unavailable.__wrapped__, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert begun.wait(10)
    for thread in threads:
        thread.join(10)
    assert together == [False] and second.is_set()


def test_a_device_is_current_within_a_block(monkeypatch):
    """Of a driver that keeps a stack: what is current is not pushed, and comes back after whatever happens inside."""
    contexts, functions = Contexts(), SimpleNamespace()
    contexts.install(functions)
    with installed(monkeypatch, functions, [GPU(), GPU()]), driver.on_device(0):
        assert contexts.stack == [0] and driver.is_current(0)
        with contextlib.suppress(ZeroDivisionError), driver.on_device(1):
            assert driver.is_current(1) and not driver.is_current(0)
            with driver.on_device(0), driver.on_device(0):
                assert contexts.stack == [0, 1, 0]
            assert contexts.stack == [0, 1]
            _ = 1 / 0
        assert contexts.stack == [0]


@pytest.mark.gpu
def test_the_device_of_memory():
    """Also of an array that names none, whatever device is current."""
    for index in range(len(cuda.visible_devices())):
        cuda.set_device(0)
        memory = ipc.DeviceMemory(4096, index)
        assert driver.device_of(memory.pointer) == index
        interface = {"shape": (8,), "typestr": "<f4", "data": (memory.pointer, False), "version": 3}
        assert Array.from_dlpack(SimpleNamespace(__cuda_array_interface__=interface)).device == index
        memory.close()
