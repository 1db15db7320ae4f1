"""What a run decides by looking at the machine."""

import math
import os
import re
import shutil
import subprocess

import pytest

import kos
from kos.testing import spawn
from kos.train import machine
from kos.train.machine import free_memory, git_commit, limit_threads, thread_pools
from kos.train.ops.threads import THREADS


def test_ranks_share_the_cores(monkeypatch):
    for name in machine.THREADS_OF_USER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("kos.train.machine.cores_of_quota", lambda root: math.inf)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert spawn(limit_threads, 1) == [8]
    assert spawn(limit_threads, 3) == [2, 2, 2]
    assert spawn(limit_threads, 16) == [1] * 16
    assert spawn(lambda comm: limit_threads(comm, 1), 2) == [1, 1]
    thread_pools().limit(limits=2)
    with kos.init(backend="mock") as comm:
        limit_threads(comm, 1)
        assert THREADS.count == 1
        assert limit_threads(comm, 3) == THREADS.count == 3
    assert {pool["num_threads"] for pool in thread_pools().info()} <= {1}
    THREADS.count = 1


def test_the_variables_of_the_user_hold(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
    assert spawn(limit_threads, 2) == [1, 1]
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    assert spawn(limit_threads, 1) == [3]


def test_of_the_threads_a_control_group_allows_a_part(tmp_path):
    def threads(files, cores=8, sharing=1):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        return machine.threads_of_rank(cores, sharing, {}, tmp_path)

    assert threads({}) == 8
    assert threads({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/cpu.max": "max 100000\n"}) == 8
    assert threads({"sys/fs/cgroup/job/cpu.max": "450000 100000\n"}) == 4
    assert threads({}, sharing=2) == 2
    assert threads({"sys/fs/cgroup/job/cpu.max": "50000 100000\n"}) == 1
    of_first = {"proc/self/cgroup": "4:memory:/docker\n3:cpu,cpuacct:/docker\n"}
    quota = {"sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us": "300000\n"}
    assert threads(of_first | quota | {"sys/fs/cgroup/cpu/docker/cpu.cfs_period_us": "100000\n"}) == 3
    assert threads({"sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us": "-1\n"}) == 8


def test_the_commit_says_where_files_differ(tmp_path, monkeypatch):
    """Files that are only newer do not, and the index is the user's."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    file, index = tmp_path / "kos" / "train" / "machine.py", tmp_path / ".git" / "index"
    monkeypatch.setattr("kos.train.machine.__file__", str(file))

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(("git", *who, *words), cwd=tmp_path, capture_output=True, check=True, text=True).stdout

    assert git_commit() is None
    git("init")
    assert git_commit() is None
    file.parent.mkdir(parents=True)
    file.write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    os.utime(file, (1e9, 1e9))
    before = index.stat().st_mtime_ns, index.read_bytes()
    (tmp_path / "new.txt").write_text("not git's")
    assert git_commit() == commit
    assert (index.stat().st_mtime_ns, index.read_bytes()) == before
    file.write_text("2")
    assert git_commit() == f"{commit}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None


GROUPS = {
    "no container": ({"proc/self/cgroup": "0::/\n"}, 900),
    "a limit from which others have taken": (
        {"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/memory.max": "700\n",
         "sys/fs/cgroup/job/memory.current": "500\n", "sys/fs/cgroup/job/memory.stat": "anon 300\ninactive_file 50\n",
         "sys/fs/cgroup/job/step/memory.max": "max\n", "sys/fs/cgroup/job/step/memory.current": "100\n"},
        250,
    ),
    "a namespace, whose root is the container": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "600\n", "sys/fs/cgroup/memory.current": "20\n"},
        580,
    ),
    "version 1": (
        {"proc/self/cgroup": "9:cpu,cpuacct:/docker\n4:memory:/docker/x\n",
         "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
         "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
         "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "400\n",
         "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "300\n",
         "sys/fs/cgroup/memory/docker/x/memory.stat": "inactive_file 1\ntotal_inactive_file 30\n"},
        130,
    ),
    "more taken than allowed": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "10\n", "sys/fs/cgroup/memory.current": "11\n"}, 0
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "expected"), GROUPS.values(), ids=list(GROUPS))
def test_free_memory_is_what_is_left_of_every_limit(tmp_path, files, expected):
    for name, content in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 900 kB\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        digits = re.sub(r"\b(\d+)$", r"\g<1>000", content, flags=re.MULTILINE) if "cgroup/" in name else content
        (tmp_path / name).write_text(digits)
    assert free_memory(tmp_path) == (900 << 10 if expected == 900 else 1000 * expected)
