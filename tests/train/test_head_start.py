"""What a rank begins before it knows the others."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from kos.comm.gpu import nccl_binding
from kos.comm.rendezvous import mpi_job
from kos.cuda import driver, kernels
from kos.errors import BackendUnavailable, install
from kos.testing import spawn
from kos.train.config.flags import parse
from kos.train.config.presets import PRESETS
from kos.train.engine import head_start
from kos.train.engine.machine import limit_threads, provenance
from kos.train.ops.cuda import cublaslt
from kos.train.parallel.mesh import Layout
from tests.forked import python

ROOT = Path(__file__).resolve().parents[2]


class Driver:
    """That of a machine with 4 GPUs; ``called`` gets what was initialised: it, or a GPU."""

    def __init__(self, called: list[Any]) -> None:
        self.called = called

    def cuInit(self, flags: int) -> int:
        self.called.append("cuInit")
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 4
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> None:
        handle._obj.value = 100 + index

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> None:
        self.called.append(handle.value - 100)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is begun on a machine that has a driver; weights alone are."""
    head_start.thread_pools.cache_clear()
    names: list[str] = []

    class Executor(ThreadPoolExecutor):
        def submit(self, work: Any, *arguments: Any) -> Any:
            if arguments and work.__name__ not in ("cuInit", "_make_context", "_load"):
                return super().submit(work, *arguments)
            if work.__name__ == "_load":
                arguments[0].set()
            looked_up = bool(head_start.thread_pools.cache_info().currsize)
            assert looked_up is (work.__name__ != "cuInit"), "an import beside the look-up of BLAS"
            names.append(work.__name__)
            return None

    monkeypatch.setattr(head_start, "DRIVER", tmp_path)
    monkeypatch.setattr(head_start, "ctypes", SimpleNamespace(CDLL=lambda name: Driver([])))
    monkeypatch.setattr(head_start, "ThreadPoolExecutor", Executor)
    return names


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        ([], True),
        (["--preset", "1b", "--device", "cuda"], True),
        (["--hidden-size=64"], True),
        (["--device", "cpu"], False),
        (["--device=cpu"], False),
        (["--preset", "1b", "--help"], False),
        (["-h"], False),
        (["--config", "of-what-device.toml"], False),
        (["--config=of-what-device.toml"], False),
    ],
)
def test_cuda_begins_where_it_may_be_wanted(begun: list[str], arguments: list[str], starts: bool) -> None:
    head_start.begin_cuda(arguments)
    assert begun == ["cuInit", "_make_context"] * starts


def test_the_loader_is_asked_for_blas_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is held meanwhile: a thread that imports an extension then would never end."""
    head_start.thread_pools()
    monkeypatch.setattr(ThreadpoolController, "_load_libraries", None)
    assert spawn(lambda comm: (limit_threads(comm, 1), provenance(comm)["blas"]), 1)[0][1]


def test_blas_is_there_when_it_is_looked_up() -> None:
    """Before all else, in a process of its own."""
    code = "from kos.train import __main__\nfrom kos.train.engine import head_start\n"
    code += "print(head_start.thread_pools().info())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    assert "'user_api': 'blas'" in done.stdout


@pytest.mark.parametrize(
    ("environ", "nodes", "bound", "device"),
    [
        ({"LOCAL_RANK": "2"}, 1, True, 2),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "5"}, 2, False, 1),
        ({"LOCAL_RANK": "2"}, 2, True, None),
        ({}, 1, False, 0),
        ({}, 2, True, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1, False, None),
    ],
)
def test_the_context_is_that_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environ: dict[str, str], nodes: int, bound: bool, device: int
) -> None:
    """Where that is clear before the ranks have met."""
    called: list[Any] = []
    for name in (*head_start._LOCAL_RANKS, *mpi_job._LAUNCHER_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for node in range(nodes):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
    monkeypatch.setattr("kos.cuda.devices.SYSFS", tmp_path)
    monkeypatch.setattr("kos.cuda.devices.process_numa_node", lambda: 0 if bound else None)
    head_start._make_context(Driver(called))
    assert called == ["cuInit"] + [device] * (device is not None)


def test_without_a_driver_nothing_begins(begun: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(head_start, "DRIVER", tmp_path / "none")
    head_start.begin_cuda(["--device", "cuda"])
    head_start.begin(parse(["--device", "cuda"]), None, list)
    assert begun == []


def test_the_device_of_a_preset_or_flag_decides(begun: list[str]) -> None:
    for flags in ([], ["--device", "cuda"], ["--device", "cpu"]):
        head_start.begin(parse(flags), None, list)
    assert begun == ["_load"] * 2
    assert not [name for name, preset in PRESETS.items() if preset.values.get("device", "auto") != "auto"]


def test_libraries_are_loaded_before_the_driver_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever are missing; that is said where they are needed."""
    asked: list[str] = []
    loading = threading.Event()

    def missing(name: str) -> None:
        asked.append(name)
        with ThreadPoolExecutor(1) as other:
            assert loading.is_set() and not other.submit(driver.starting.acquire, False).result(60)
        raise BackendUnavailable("not installed")

    for module, name in ((kernels, "nvrtc_version"), (cublaslt, "_library"), (nccl_binding, "library")):
        monkeypatch.setattr(module, name, partial(missing, name))
    monkeypatch.setattr(head_start, "import_module", asked.append)
    monkeypatch.setattr(driver, "cu", None)
    head_start._load(loading)
    assert asked == ["nvrtc_version", "_library", "library", "cuda.core"]


def test_weights_are_drawn_once(begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    seed = int(np.random.default_rng().integers(1 << 62))
    config = parse(["--seed", str(seed)])
    model = config.model_config_for(256)
    drawn = []
    real = type(model).draw_share
    monkeypatch.setattr(type(model), "draw_share", lambda *arguments: drawn.append(1) or real(*arguments))
    head_start.weights.cache_clear()
    for resumed in (["--resume", "auto"], ["--init-from", "folder"]):
        head_start.begin(config.model_copy(update={resumed[0][2:].replace("-", "_"): resumed[1]}), model, list)
    assert not drawn
    head_start.begin(config, model, list)
    layout = Layout(dp=3)
    first = head_start.weights(config.model_config_for(256), seed, layout, 1)
    assert np.array_equal(first.result(60), real(model, model.shares(3)[1], seed, 1)) and drawn == [1]
    head_start.unwanted.set()  # an earlier run was stopped
    other = head_start.weights(model, seed + 1, layout, 1)
    assert np.array_equal(other.result(60), real(model, model.shares(3)[1], seed + 1, 1)) and drawn == [1, 1]
    assert not np.array_equal(other.result(60), first.result())
    head_start.weights.cache_clear()


def test_a_failure_is_raised_where_the_weights_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parse([]).model_config_for(256)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(type(model), "draw_share", fail)
    head_start.weights.cache_clear()
    with pytest.raises(MemoryError, match="no room"):
        head_start.weights(model, 1, Layout(), 0).result(60)
    head_start.weights.cache_clear()


def test_a_run_that_is_stopped_does_not_wait_for_its_weights(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be or not to be " * 500)
    code = """if True:
    import atexit, os, pathlib, signal, sys
    import numpy as np
    from kos.train import __main__ as main
    from kos.train.engine import head_start
    from kos.train.model import llama_config
    drawn, usual = [], np.random.default_rng
    def default_rng(seed):
        if isinstance(seed, list) and len(seed) == 3:
            drawn.append(seed)
            if len(drawn) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            head_start.unwanted.wait(100)
        return usual(seed)
    np.random.default_rng, head_start.DRIVER, llama_config.DRAWN = default_rng, pathlib.Path("/"), 1 << 10
    atexit.register(lambda: print(0 < len(drawn) <= os.cpu_count()))
    sys.exit(main.main())
    """
    command = [*python(), "-c", code, "--data", tmp_path / "text", "--out", tmp_path / "run", "--vocab-size", "300"]
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["True"]), done.stderr


def test_a_driver_that_is_of_no_use(tmp_path: Path) -> None:
    """A run on CPUs, or an error on one line: nothing else is printed."""
    (tmp_path / "text").write_text("to be or not to be " * 500)
    code = "import pathlib, sys\nfrom kos.train import __main__ as main; from kos.train.engine import head_start\n"
    code += "head_start.DRIVER = pathlib.Path('/')\nsys.exit(main.main())"
    flags = ["--data", tmp_path / "text", "--out", tmp_path / "run", "--steps", "1", "--sample-tokens", "0"]
    flags += ["--vocab-size", "300", "--seq-len", "16", "--batch-size", "2", "--hidden-size", "32"]
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
    for device, status, errors in (("auto", 0, 0), ("cuda", 2, 1)):
        command = [*python(), "-c", code, *map(str, flags), "--device", device]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == status, done.stderr
        assert done.stderr.count("kos: error: --device cuda: expected a GPU") == done.stderr.count("\n") == errors


def test_a_package_that_is_missing_is_named_with_what_brings_it() -> None:
    code = "import sys\nsys.modules['threadpoolctl'] = None\nfrom kos.train.__main__ import main\nmain([])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"kos: error: expected the trainer's packages ({install('train')}), got: ")
