"""Every figure of a machine, at one commit: ``python -m benchmarks.all --gpus N``; ``--gpus 0`` measures hosts.

    python -m benchmarks.all --gpus 2 --list                     # subjects, their commands and expected seconds
    python -m benchmarks.all --gpus 2 --minutes 9                # again and again, until all is there
    python -m benchmarks.all --gpus 2 --nccl /tmp/libnccl.so.2   # collectives of another NCCL too

A subject is a file of results, such as ``collectives-h100-2.json``, measured in pieces of under ten minutes.  A piece
is a command of benchmarks/programme.py, whose rows go to ``--parts``.  The same call goes on with the pieces that this
commit lacks there, and begins none that is expected to end after ``--minutes``.  The last piece of a subject writes its
file to ``--json``.  Tables and pictures follow if that is benchmarks/results.  The exit code is 1 while a subject lacks
a piece.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.plots.results import RESULTS, ROOT
from benchmarks.programme import Piece, Programme, programme
from kos.bench.report import Row, read, to_json
from kos.commands import near, program
from kos.errors import ConfigError, KosError
from kos.files import replace_file

ENDING = {signal.SIGINT, signal.SIGTERM}

LONGEST = 590  # seconds of a piece
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}  # fmt: skip


def machine() -> str:
    """The name of the first GPU as files have it: h100."""
    from kos.cuda import device_info

    name = device_info(0).name
    found = re.search(r"\b[A-Z]+\d{2,4}\b", name)
    return (found[0] if found else name.split()[-1]).lower()


def commit_of(clone: Path = ROOT) -> str | None:
    """KOS_COMMIT, or that of ``clone``, "-dirty" where it differs in other files than those that this writes."""
    if named := os.environ.get("KOS_COMMIT"):
        return named
    written = [":!benchmarks/results", ":!docs", ":!README.md"]
    status = ("status", "--porcelain", "--untracked-files=no", "--", ".", *written)
    head, changes = (
        subprocess.run(["git", "-C", str(clone), *words], capture_output=True, text=True)
        for words in (("rev-parse", "--short=8", "HEAD"), status)
    )
    return None if head.returncode else head.stdout.strip() + "-dirty" * bool(changes.stdout)


def measured_at(path: Path, commit: str | None) -> bool:
    return path.exists() and read(path, "commit")["commit"] == commit


def measure(piece: Piece, path: Path, name: str, commit: str | None) -> str:
    """Run a piece, whose rows come to ``path``.  What went wrong, or nothing."""
    unfinished = path.parent / "unfinished" / name
    unfinished.unlink(missing_ok=True)
    words = [sys.executable if word == "python" else word for word in shlex.split(piece.command)]
    environment = {**ENVIRONMENT, **os.environ} | ({"LD_PRELOAD": piece.preload} if piece.preload else {})
    environment |= {"KOS_COMMIT": commit} if commit else {}
    with path.with_suffix(".log").open("w") as log:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until the piece can be ended
        try:
            process = subprocess.Popen([*words, "--json", str(unfinished)], cwd=ROOT, env=environment, stdout=log,
                                       stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                                       preexec_fn=heed_sigint)  # fmt: skip
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            return str(error)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            code = process.wait(LONGEST)
        except BaseException as error:
            end(process)
            if isinstance(error, subprocess.TimeoutExpired):
                return f"expected its end within {LONGEST} s; see {near(log.name)}"
            raise
    if code or not unfinished.exists():
        return f"exit code {code}; see {near(log.name)}"
    unfinished.replace(path)
    return ""


def heed_sigint() -> None:
    """In a piece: ``end`` sends it SIGINT, which a shell without job control makes jobs in the background ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def end(process: subprocess.Popen[bytes]) -> None:
    """The command and all of its ranks; first as Ctrl-C does, so that they clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(10)


def join(parts: list[Row]) -> Row:
    """One result with the rows of all; ConfigError if they were measured apart."""
    for key in ("hardware", "driver", "commit"):
        if len(found := {str(part[key]) for part in parts}) > 1:
            raise ConfigError(f"expected parts of the same {key}, got {', '.join(sorted(found))}")
    whole = {**parts[0], "date": max(part["date"] for part in parts),
             "command": " && ".join(part["command"] for part in parts)}  # fmt: skip
    return whole if len(parts) == 1 else {**whole, "rows": [row for part in parts for row in part["rows"]]}


def run(wanted: Programme, options: argparse.Namespace) -> bool:
    """Whether all subjects are there."""
    commit, end = commit_of(), time.monotonic() + 60 * options.minutes
    complete = True
    for subject, pieces in wanted.items():
        parts = [options.parts / f"{subject}.{number}.json" for number in range(len(pieces))]
        for number, (piece, part) in enumerate(zip(pieces, parts, strict=True), 1):
            if measured_at(part, commit):
                continue
            print(f"{subject} {number}/{len(pieces)}: {piece.command}", flush=True)
            if time.monotonic() + piece.seconds > end:
                print(f"  not begun: expected {piece.seconds} s, which --minutes {options.minutes:g} does not leave")
                continue
            begun = time.monotonic()
            failed = measure(piece, part, f"{subject}.json", commit)
            print(f"  {f'failed: {failed}; ' * bool(failed)}{time.monotonic() - begun:.0f} s, {piece.seconds} expected")
        if all(measured_at(part, commit) for part in parts):
            whole = join([read(part, "hardware", "commit", "date", "command") for part in parts])
            replace_file(options.json / f"{subject}.json", to_json({"rows": [], **whole}).encode())
        else:
            complete = False
    return complete


def main(words: list[str] | None = None, measured: Callable[..., Programme] = programme) -> int:
    parser = argparse.ArgumentParser(
        program("benchmarks.all"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="0: hosts")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no piece that would end later")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="subjects whose names begin with these words")
    parser.add_argument("--nccl", metavar="PATH", help="measure this libnccl too")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="DIR", help="where the files of subjects go")
    parser.add_argument("--parts", type=Path, default=ROOT / "build" / "figures", metavar="DIR")
    parser.add_argument("--list", action="store_true", help="measure nothing")
    options = parser.parse_args(words)
    if options.gpus < 0:
        parser.error(f"--gpus: expected 0 or more, got {options.gpus}")
    try:
        gpu = machine() if options.gpus and not options.list else "GPU"
    except KosError as error:
        parser.error(f"--gpus {options.gpus}: {error}")
    wanted = measured(options.gpus, gpu, options.nccl)
    wanted = {name: pieces for name, pieces in wanted.items() if not options.only or name.startswith((*options.only,))}
    if not wanted:
        parser.error(f"--only: expected the beginning of a subject, got {' '.join(options.only)}")
    if options.list:
        for subject, pieces in wanted.items():
            print(f"{subject}: {sum(piece.seconds for piece in pieces)} s")
            print(*(f"  {piece.command}" for piece in pieces), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the piece too
    for folder in (options.parts / "unfinished", options.json):
        folder.mkdir(parents=True, exist_ok=True)
    complete = run(wanted, options)
    if complete and options.json.resolve() == RESULTS:
        return subprocess.call([sys.executable, "-m", "benchmarks.plots"], cwd=ROOT)
    return 0 if complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
