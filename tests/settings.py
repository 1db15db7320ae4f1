"""Run a command on this machine with one setting changed: python tests/settings.py NAME COMMAND…

    python tests/settings.py long-tmpdir python -m pytest tests/comm
    python tests/settings.py nobody make test

NAME is one of those below.  Many need root and unshare (util-linux), for namespaces of their own: nothing of the
machine itself changes.  The exit status is that of the command.  docs/testing.md lists what was tried.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = '"$@"'
HIDE = """
mkdir "$new/bin"
echo "$PATH" | tr : '\\n' | while read -r folder; do
    find "$folder" -maxdepth 1 ! -type d -exec ln -s -t "$new/bin" {{}} + 2>/dev/null || true
done
rm -f {names}
PATH="$new/bin" {run}
"""
"""The first of several programs of one name wins: ``ln`` leaves a link that is there."""
COMPILERS = '"$new"/bin/*gcc* "$new"/bin/cc "$new"/bin/c[89]9* "$new"/bin/*g++* "$new"/bin/c++ "$new"/bin/*clang*'

SETTINGS = {
    "as-is": RUN,
    # Signals.
    "background": f"trap '' INT; {RUN}",
    "nohup": f"nohup {RUN}",
    # Processors.
    "one-cpu": f"taskset -c {min(os.sched_getaffinity(0))} {RUN}",
    "busy": f"(while :; do :; done) & one=$!; (while :; do :; done) & two=$!; trap 'kill $one $two' EXIT; {RUN}",
    "core-intel": f"KOS_CPU_VENDOR=intel {RUN}",
    "core-other": f"KOS_CPU_VENDOR=other {RUN}",
    "no-core": f"KOS_CORE=0 {RUN}",
    # Tools.
    "no-valgrind": HIDE.format(names='"$new"/bin/*valgrind*', run=RUN),
    "no-gcc": HIDE.format(names=COMPILERS, run=f"env -u CC -u CXX {RUN}"),
    "no-headers": f"mount -t tmpfs none {sysconfig.get_paths()['include']}; {RUN}",
    # Files and network.
    "long-tmpdir": f'long="$new/{"long" * 20}/{"path" * 20}"; mkdir -p "$long"; TMPDIR="$long" {RUN}',
    "read-only-home": f'mount -t tmpfs -o ro none "$new"; HOME="$new" {RUN}',
    "no-shm": f"mount -t tmpfs -o ro none /dev/shm; {RUN}",
    "no-ipv6": f"ip link set lo up; mount -t proc none /proc\necho 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; {RUN}",
    # The user: its own copy of the clone, whose folder of packages stays; Python may lie in root's home.
    "nobody": f"""
chmod 755 "$new"
mkdir "$new"/python "$new"/over "$new"/home "$new"/tmp
case "{sys.base_prefix}" in /root/*)
    mount --bind "{sys.base_prefix}" "$new/python"; mount -o remount,bind,ro "$new/python"
    mount -t tmpfs -o mode=755 none /root; mkdir -p "{sys.base_prefix}"; mount --bind "$new/python" "{sys.base_prefix}"
    mount -o remount,bind,ro "{sys.base_prefix}"
esac
mount -t tmpfs none "$new/over"; mkdir "$new/over/upper" "$new/over/work"
mount -t overlay -o lowerdir="{ROOT}",upperdir="$new/over/upper",workdir="$new/over/work" none "{ROOT}"
find "{ROOT}" -path "{ROOT}/.venv" -prune -o -exec chown -h nobody {{}} +
chown nobody "$new/home" "$new/tmp" "{ROOT}/.venv"
cd "{ROOT}"
HOME="$new/home" TMPDIR="$new/tmp" setpriv --reuid=nobody --regid=nogroup --clear-groups {RUN}
""",
}
"""Shell scripts; ``$new`` is an empty folder."""
MOUNTS = ("no-headers", "read-only-home", "no-shm", "nobody")


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit status."""
    name, *command = arguments or ["--help"]
    if name not in SETTINGS or not command:
        print(f"{__doc__}\n{' '.join(SETTINGS)}", file=sys.stderr)
        return 2
    apart = ["--mount"] * (name in MOUNTS)
    apart += ["--net", "--mount", "--pid", "--fork", "--kill-child"] * (name == "no-ipv6")
    new = tempfile.mkdtemp(prefix="kos-")
    words = ["unshare", *apart] * bool(apart) + ["sh", "-ec", f'new="{new}"\n{SETTINGS[name]}', "sh", *command]
    try:
        return subprocess.call(words)
    finally:
        # Mounts are in a namespace of the command.  Were one here, a removal would delete what is mounted.
        if not any(line.split()[1].startswith(new) for line in Path("/proc/mounts").read_text().splitlines()):
            shutil.rmtree(new, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
