"""The doctor: what it says where things work, and that it says something, in time, where they do not."""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from kos import _core
from kos.cuda.devices import DeviceInfo
from kos.doctor import checks, ranks
from kos.doctor.checks import BAD, NO, OK, Check
from kos.doctor.report import Report
from kos.errors import install
from tests.comm.fake_nccl import no_gpu
from tests.forked import python
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program

PATIENT = "import kos.doctor.__main__ as d\nd.GRACE = 1e3"  # for a slow machine


def run(*arguments: str, launcher: tuple[str, ...] = (), code: str = "", **environment: str) -> tuple[int, str]:
    """Exit code and output of the doctor in processes of its own; ``code`` runs before it, in forked ones."""
    code = f"{code}\nimport sys, kos.doctor.__main__ as d\nsys.exit(d.main())" if code else ""
    start = (*python(), "-c", code) if code else (sys.executable, "-m", "kos.doctor")
    pipes = {"capture_output": False, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = run_program(*launcher, *start, *arguments, env={**OUTSIDE, **environment}, **pipes)
    return done.returncode, done.stdout


CLOSED = ("sh", "-c", 'exec "$@" 2>&-', "sh")
"""Starts a command without stderr."""


@pytest.mark.parametrize("launcher", [(), CLOSED], ids=["", "stderr is closed"])
def test_alone(launcher):
    code, said = run("--json", launcher=launcher)
    report = json.loads(said)  # and nothing else, on stderr either
    assert code == 0 and report["will_train"] and report["ranks"] == 1
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert verdicts["Python"] == verdicts["MPI"] == verdicts["all_reduce"] == OK
    assert "CUDA" in verdicts and any(line.startswith("mpi ") for line in report["backends"])


@needs_mpirun
def test_under_mpirun():
    code, said = run("--json", launcher=(MPIRUN, "-n", "2"), code=PATIENT)
    report = json.loads(said)
    assert code == 0 and report["will_train"] and report["ranks"] == 2
    assert next(check for check in report["checks"] if check["name"] == "all_reduce")["ranks"] == [0, 1]
    row = next(line.split() for line in report["backends"] if line.startswith("all_reduce"))
    assert row[:2] == ["all_reduce", "mpi"] and (row[2:4] == ["shared", "memory"]) == (not _core.unavailable)


@needs_mpirun
def test_a_rank_that_does_not_reach_mpi_init():
    late = 'test "$OMPI_COMM_WORLD_RANK" = 1 && sleep 300; exec "$@"'
    code = "import kos.doctor.__main__ as d\nd.GRACE = 1.0\n"
    code += "d.faulthandler.dump_traceback_later = lambda *_, **__: None"  # for waits that hold Python's lock
    status, said = run("--timeout", "1", launcher=(MPIRUN, "-n", "2", "sh", "-c", late, "sh"), code=code)
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert status == 1 and "bad finding the other ranks no end within 1 s" in lines


def place(rank: int, size: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**where, "KOS_SECRET": "x"}  # else the user's own, in a home that may be read-only


def test_a_rank_that_does_not_come():
    code, said = run("--timeout", "1", code=PATIENT, **place(0, 2))
    assert code == 1 and "These" not in said
    assert "did not arrive within 1 s" in said and "ok   Python" in said
    assert said.splitlines()[-1] == "This rank cannot communicate or train, see: finding the other ranks."
    code, said = run("--timeout", "1", code=PATIENT, **place(1, 2))
    assert code == 1 and said.count("\n") == 1
    assert said.startswith("kos: error: rank 1: finding the other ranks: rendezvous: rank 1 did not reach rank 0")


def test_ranks_by_environment():
    """As torchrun starts them; JSON on rank 0's stdout alone."""
    where = place(0, 2)
    other = threading.Thread(target=lambda: told.append(run("--json", code=PATIENT, **{**where, "RANK": "1"})))
    told = []
    other.start()
    code, said = run("--json", code=PATIENT, **where)
    other.join()
    assert code == 0 and json.loads(said)["ranks"] == 2 and told[0] == (0, "")


def test_another_mpirun():
    code, said = run(OMPI_COMM_WORLD_SIZE="3", OMPI_COMM_WORLD_RANK="0")
    assert code == 1 and "expected 3 ranks in MPI_COMM_WORLD, got 1" in said


@pytest.mark.parametrize(
    ("wait", "told"),
    [
        pytest.param("time.sleep(99)", "bad  finding the other ranks", id="wait"),
        pytest.param("ctypes.PyDLL(None).sleep(99)", "Timeout (0:00:0", id="wait that holds the GIL"),
    ],
)
def test_what_hangs_is_told_and_ended(wait, told):
    code = "import ctypes, time, kos.doctor.__main__ as d\nd.GRACE = 0.5\n"
    code += f"d.default_rendezvous = lambda timeout, watched: {wait}"
    if "Timeout" not in told:
        code += "\nd.faulthandler.dump_traceback_later = lambda *_, **__: None"  # else it may come first
    status, said = run("--timeout", "1", code=code)
    assert status == 1 and told in said
    assert "Timeout" in said or "no end within 1 s" in said


@pytest.mark.parametrize(
    ("code", "finding"),
    [
        ("import kos.doctor.__main__ as d\nd.ranks.trial = lambda comm: 1 / 0", "ZeroDivisionError: division"),
        (
            "from kos.comm import Communicator as C\nf = C.all_reduce\nC.all_reduce = lambda self, x: f(self, x) + 1",
            "in memory of the host: 1000003 of 1000003 elements are wrong",
        ),
    ],
)
def test_an_all_reduce_that_fails_or_is_wrong(code, finding):
    status, said = run(code=code)
    assert status == 1 and "bad  all_reduce" in said and finding in said and "backend  usable" in said
    assert said.splitlines()[-1] == "This rank cannot communicate or train, see: all_reduce."


def test_a_check_that_fails_or_hangs_is_a_finding():
    def fails():
        raise OSError("the disk is on fire")

    assert checks.bounded("it", fails) == [Check("it", NO, "OSError: the disk is on fire")]
    forever = threading.Event()
    assert checks.bounded("it", lambda: [Check("it", OK, str(forever.wait()))], 0.05) == [
        Check("it", NO, "did not answer within 0.05 s")
    ]
    forever.set()


@pytest.mark.parametrize(
    ("extra", "missing", "kernel_driver", "remedy"),
    [
        ("train", ["rich"], True, install("train")),
        ("cuda", ["nccl4py"], True, install("cuda")),
        ("cuda", ["nccl4py", "cuda-core"], False, ""),  # without a GPU none wants it
    ],
)  # fmt: skip
def test_missing_packages(extra, missing, kernel_driver, remedy):
    versions = {name: None if name in missing else "1.0" for name in checks.EXTRAS[extra]}
    title, names = f"packages ({extra})", [name for name in versions if name in missing]
    found = checks.check_packages(extra, versions, kernel_driver)
    assert len(names) == len(missing) and found == Check(title, NO, f"not installed: {', '.join(names)}", remedy)
    rest = checks.check_packages(extra, dict.fromkeys(versions, "1.0"), kernel_driver)
    assert rest == Check(title, OK, ", ".join(f"{name} 1.0" for name in versions))


@pytest.mark.parametrize(("capability", "noted"), [((9, 0), False), ((8, 0), True), ((10, 0), True), ((12, 0), True)])
def test_a_gpu_of_an_architecture_on_which_kos_has_not_run(capability, noted):
    gpus = [DeviceInfo(i, "a GPU", f"{i}", capability, 80 << 30, 108, f"{i}", 0, False) for i in range(2)]
    found = [checks.check_gpu(info, nvlinks=4) for info in gpus]
    assert [check.name for check in found] == ["GPU 0", "GPU 1"] and {check.verdict for check in found} == {OK}
    about = f"{'.'.join(map(str, capability))}, 80 GiB, 108 SMs, 0, NUMA node 0, 4 NVLinks"
    assert found[0].found == f"a GPU, compute capability {about}"
    assert checks.check_gpu(gpus[0], nvlinks=None).found.endswith("unknown NVLinks")
    report = Report()
    report.add([found])
    line = "-> kos has run on Hopper (compute capability 9.0) only; tests compile its kernels for other GPUs"
    assert report.to_text().count(line) == noted, "one line for both GPUs"
    assert [bool(check["remedy"]) for check in report.to_json()["checks"]] == [noted] * 2


def test_versions_of_the_driver_and_of_nccl_need_no_visible_gpu(monkeypatch):
    with no_gpu(monkeypatch) as fake:
        fake.cu.cuDriverGetVersion = lambda: (0, 13000)
        facts = checks.facts()
    assert (facts["CUDA driver"], facts["NCCL"]) == (13000, "2.28.9")


def _facts(**changes: object) -> dict[str, object]:
    return {
        "host": "a", "host_id": "a1", "pid_namespace": "pid:[1]", "ipc_namespace": "ipc:[1]", "kos": "0.1.0",
        "numpy": "2.4", "NCCL": "2.28.9", "CUDA driver": 13000, "gpus": ["x", "y", "z"], **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("others", "name", "verdict", "said"),
    [
        ([{"kos": "0.2.0"}], "kos of the ranks", BAD, "0.1.0 on rank 0; 0.2.0 on rank 1"),
        ([{}, {"NCCL": "2.27.3"}], "NCCL of the ranks", NO, "2.28.9 on ranks 0-1; 2.27.3 on rank 2"),
        ([{"CUDA driver": 12080}], "CUDA driver of the ranks", NO, "12080 on rank 1"),
        ([{"ipc_namespace": "ipc:[2]"}], "ipc namespaces", NO, "ranks 0-1 of a are in different ipc"),
        ([{"gpus": []}], "GPUs of the ranks", NO, "rank 1 sees none"),
        ([{"gpus": []}, {}, {"gpus": []}], "GPUs of the ranks", NO, "ranks 1, 3 see none"),
        ([{}, {}, {}], "GPUs of the ranks", NO, "ranks 0-3 of a share 3 GPUs"),
    ],
)
def test_ranks_that_do_not_fit(others, name, verdict, said):
    found = list(ranks.compare([_facts(), *(_facts(**other) for other in others)]))
    assert [check.name for check in found] == ["hosts", name]
    assert found[1].verdict == verdict and said in found[1].found and found[1].remedy


def test_ranks_that_fit():
    found = list(ranks.compare([_facts(), _facts(), _facts(host="b", host_id="b1", ipc_namespace="ipc:[9]")]))
    assert found == [Check("hosts", OK, "a: ranks 0-1; b: rank 2")]


def test_the_report_says_what_is_common_once():
    report = Report(size=3)
    same, mine = Check("one", OK, "alike"), Check("two", NO, "differs", "mend it")
    report.add([[same, mine], [same, Check("two", NO, "differs more", "mend it")], [same, Check("two", BAD, "broken")]])
    said = report.to_text()
    assert "ok   one  alike\n" in said and "no   two  differs  (rank 0)\n          -> mend it\n" in said
    assert said.count("mend it") == 1
    assert "bad  two  broken  (rank 2)" in said
    assert said.endswith("These 3 ranks cannot communicate or train, see: two.") and not report.to_json()["will_train"]


def test_ranks_without_the_trainer_communicate():
    report = Report(checks={Check("all_reduce", OK, "exact"): [0], Check("packages (train)", NO, "not installed"): [0]})
    assert report.to_text().endswith("This rank can communicate; to train, see: packages (train).")
    said = report.to_json()
    assert not report.bad and said["will_communicate"] and not said["will_train"]


@pytest.mark.gpu
def test_gpus_of_one_process():
    if len(ranks.visible_devices()) < 2:
        pytest.skip("needs two GPUs")
    assert ranks.gpus_of_this_process(20).verdict == OK


def test_variables_that_are_set(monkeypatch):
    for name in [name for name in os.environ if name.startswith("KOS_")]:
        monkeypatch.delenv(name)
    assert [*checks.variables()] == [Check("variables", OK, "none of kos is set")]
    for name, value in {"KOS_CLAIM": "5 x", "KOS_SECRET": "1234", "KOS_NVTX": "1", "KOS_RECODER_DIR": "/tmp"}.items():
        monkeypatch.setenv(name, value)
    found, unknown = checks.variables()
    assert (found.verdict, found.found) == (OK, "KOS_SECRET=..., KOS_NVTX=1")
    assert (unknown.verdict, unknown.found, unknown.remedy) == (
        NO, "kos does not read KOS_RECODER_DIR", "did you mean KOS_RECORDER_DIR?"
    )  # fmt: skip


def test_a_switch_of_the_compiled_core_is_0_or_1():
    done = run_program(sys.executable, "-c", "import kos._core", env={**OUTSIDE, "KOS_CORE": "off"})
    assert done.stderr.endswith("InvalidArgument: KOS_CORE: expected 0 or 1 in the environment, got 'off'\n")


@pytest.mark.parametrize(
    ("switch", "how"), [("0", "unset KOS_CORE"), ("1", "install kos again beside a C compiler")], ids=["off", "missing"]
)
def test_the_remedy_without_the_compiled_core(switch, how):
    code = """import sys
sys.modules["kos._core.native"] = None  # cannot be imported
from kos import _core
from kos.doctor import checks
(check,) = checks.compiled_core()
assert (check.verdict, check.found) == (checks.NO, _core.unavailable) and _core.unavailable, check
print(check.remedy)"""
    done = run_program(sys.executable, "-c", code, env={**OUTSIDE, "KOS_CORE": switch})
    assert done.stdout == f"ranks of one host share no memory: {how}\n", done.stderr
