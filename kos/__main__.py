"""The command ``kos NAME [arguments]``, as ``python -m kos NAME [arguments]``: each name is a module that is run."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

import kos
from kos import commands
from kos.errors import ConfigError, install
from kos.files import printing
from kos.reporting import report

COMMANDS = {
    "train": ("kos.train", "train a LLaMA: mpirun -n N kos train"),
    "sample": ("kos.train.sample", "generate text with a trained model"),
    "plot": ("kos.train.tools.plot", "draw loss, learning rate, gradient norm and tokens/s of runs: kos plot RUN…"),
    "doctor": ("kos.doctor", "report what this machine and job can use"),
    "tune": ("kos.tune", "measure the tuning table of this machine's GPUs"),
    "schedules": ("kos.comm.schedules", "list, verify, draw and predict algorithms"),
    "recorder": ("kos.comm.recorder", "read the dumps of the flight recorder"),
    "bench": ("benchmarks", "run a benchmark (in a clone of kos): kos bench [collectives|kernels|train|…]"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command.  Returns an exit status if there was none to run: 0 after help, 2 for an unknown name."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        names = "\n".join(f"  {each:<11}{what}" for each, (_, what) in COMMANDS.items())
        with printing():
            print(f"usage: kos NAME [arguments]\n\n{names}\n\nkos NAME --help lists the arguments of a command.")
        return 0
    if name == "--version":
        with printing():
            print(f"kos {kos.__version__}")
        return 0
    if name not in COMMANDS:
        return _refuse(f"expected one of {', '.join(COMMANDS)}, got {name!r}")
    module = COMMANDS[name][0]
    if name == "bench":
        benchmark, rest = (rest[0], rest[1:]) if rest and not rest[0].startswith("-") else ("collectives", rest)
        if problem := _no_benchmark(benchmark):
            return _refuse(f"bench: {problem}")
        module, name = f"benchmarks.{benchmark}", f"bench {benchmark}"
    commands.typed = f"kos {name}"
    sys.argv = [commands.typed, *rest]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)  # most commands end the process
    except KeyboardInterrupt:  # end the process by the signal, without a traceback
        with printing():
            pass  # flush the output
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        commands.typed = ""
    return 0


def _refuse(problem: str) -> int:
    """Report the problem, once for all ranks that mpirun started; returns the exit status."""
    from kos.comm.rendezvous.choose import launched_rank  # which takes a tenth of a second

    report(ConfigError(problem), launched_rank())
    return 2


def _no_benchmark(name: str) -> str:
    """Why there is no benchmark of that name; empty if there is one."""
    clone = Path(kos.__file__).resolve().parent.parent
    folder = clone / "benchmarks"
    if not (folder / "__init__.py").exists():
        remedy = f"{install('')}, or in that folder: {sys.executable} -m benchmarks.NAME"
        return f"expected a clone of kos with the folder benchmarks, got the package installed in {clone}; {remedy}"
    if str(clone) not in sys.path:
        sys.path.insert(0, str(clone))
    files = {path.stem: path for path in folder.glob("*.py")}
    files |= {path.parent.name: path for path in folder.glob("*/__main__.py")}
    programs = sorted(name for name, path in files.items() if b'\nif __name__ == "__main__":' in path.read_bytes())
    return "" if name in programs else f"expected one of {', '.join(programs)}, got {name!r}"


if __name__ == "__main__":
    sys.exit(main())
