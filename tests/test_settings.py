"""tests/settings.py runs a command under each setting, and leaves nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import settings

PROGRAM = """
import os, shutil, signal, socket, sys, sysconfig, tempfile
def writable(path):
    try:
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False
def ipv6():
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
            return True
    except OSError:
        return False
print({
    "background": lambda: signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    "nohup": lambda: signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
    "one-cpu": lambda: len(os.sched_getaffinity(0)) == 1,
    "core-intel": lambda: os.environ["KOS_CPU_VENDOR"] == "intel",
    "core-other": lambda: os.environ["KOS_CPU_VENDOR"] == "other",
    "no-core": lambda: os.environ["KOS_CORE"] == "0",
    "no-valgrind": lambda: not shutil.which("valgrind") and shutil.which("sh"),
    "no-gcc": lambda: not any(map(shutil.which, ("gcc", "cc", "c++"))) and shutil.which("sh"),
    "no-headers": lambda: not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"),
    "long-tmpdir": lambda: len(tempfile.gettempdir()) > 160,
    "read-only-home": lambda: not writable(os.path.expanduser("~")),
    "no-shm": lambda: not writable("/dev/shm"),
    "no-ipv6": lambda: not ipv6(),
}.get(sys.argv[1], lambda: True)() and "changed")
sys.exit(3)
"""


@pytest.mark.parametrize("name", [name for name in settings.SETTINGS if name != "nobody"])  # it covers /root
def test_a_setting_changes_what_it_says(name: str) -> None:
    python = sorted(os.listdir(sys.base_prefix))
    command = [sys.executable, settings.__file__, name, sys.executable, "-c", PROGRAM, name]
    done = subprocess.run(command, cwd=settings.ROOT, capture_output=True, text=True, timeout=120)
    assert sorted(os.listdir(sys.base_prefix)) == python, "a setting mounts it, and must not remove it"
    tools = ("unshare", "mount", "setpriv", "taskset", " ip: ")
    if done.returncode != 3 and any(tool in done.stderr for tool in tools):
        pytest.skip(f"needs root and namespaces: {done.stderr.strip().splitlines()[-1]}")
    assert (done.returncode, done.stdout) == (3, "changed\n"), done.stderr


def test_an_unknown_setting_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings.main(["no", "true"]) == settings.main(["as-is"]) == settings.main([]) == 2
    assert "long-tmpdir" in capsys.readouterr().err
