"""The command ``kos NAME [arguments]``, as ``python -m kos NAME [arguments]``: each name is a module that is run."""

from __future__ import annotations

import os
import runpy
import signal
import sys

import kos
from kos import commands
from kos.errors import ConfigError
from kos.files import printing
from kos.launcher import launched_rank
from kos.reporting import report

COMMANDS = {
    "train": ("kos.train", "train a LLaMA: mpirun -n N kos train"),
    "sample": ("kos.train.sample", "generate text with a trained model"),
    "tokenize": ("kos.train.tokenize", "write text as tokens in a folder that kos train reads"),
    "chat": ("kos.train.chat", "chat with a trained model, by its chat template"),
    "eval": ("kos.train.evaluate", "evaluate checkpoints on text, tokens and multiple-choice questions"),
    "export": ("kos.train.export", "write a checkpoint as a Hugging Face folder, in bfloat16 or float32"),
    "plot": ("kos.train.tools.plot", "draw loss, learning rate, gradient norm and tokens/s of runs: kos plot RUN…"),
    "doctor": ("kos.doctor", "report what this machine and job can use"),
    "schedules": ("kos.comm.schedules", "list, verify, draw and predict algorithms"),
    "recorder": ("kos.comm.recorder", "read the dumps of the flight recorder"),
    "bench": ("kos.bench", "measure collectives, beside MPI, NCCL and PyTorch: mpirun -n N kos bench"),
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
        expected = "kos bench --write-table" if name == "tune" else f"one of {', '.join(COMMANDS)}"
        report(ConfigError(f"expected {expected}, got {name!r}"), launched_rank())
        return 2
    commands.typed = f"kos {name}"
    sys.argv = [commands.typed, *rest]
    try:
        runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)  # most commands end the process
    except KeyboardInterrupt:  # end the process by the signal, without a traceback
        with printing():
            pass  # flush the output
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        commands.typed = ""
    return 0


if __name__ == "__main__":
    sys.exit(main())
