"""Generate text with a trained model: ``python -m kos.train.sample RUN --prompt "def "``.

RUN is the folder of a run (its newest complete checkpoint is used) or the folder of a checkpoint. With ``--tp N`` under
``mpirun -n N``, N ranks hold the model together, and rank 0 prints.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import kos
from kos.commands import program
from kos.errors import ConfigError, InvalidArgument, KosError, SettingError, raised_as
from kos.files import printing
from kos.launcher import launched_place
from kos.reporting import ArgumentParser, end_command

FLAGS: dict[str, tuple[Any, str]] = {
    "temperature": (0.8, "divide the logits by this number; 0 always takes the most likely token"),
    "top_k": (40, "draw among the K most likely tokens; 0 draws among all"),
    "top_p": (1.0, "draw among the fewest most likely tokens whose probabilities sum to P; 1 draws among all"),
    "min_p": (0.0, "draw among the tokens that are at least P times as likely as the most likely; 0 draws among all"),
    "repetition_penalty": (1.0, "divide the logits of tokens that the text already has by this number; 1 changes none"),
    "seed": (0, "seed of the random numbers; a prompt gives the same text alone and in a batch"),
}
"""The settings of ``Sampling``, whose module needs packages of the extra: their defaults, and what they do."""


def make_parser(module: str, doc: str, tokens: int) -> argparse.ArgumentParser:
    """The flags that ``kos sample`` and ``kos chat`` have in common."""
    parser = ArgumentParser(prog=program(module), description=doc.partition("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, of a checkpoint or of Hugging Face")
    parser.add_argument("--tokens", type=int, default=tokens, help="the most tokens to generate (default: %(default)s)")
    for name, (default, what) in FLAGS.items():
        about = f"{what} (default: {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=about)
    about = "end the text before TEXT; the flag may be repeated"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=about)
    parser.add_argument("--device", default="cpu", help="compute on cpu, cuda or cuda:N (default: cpu)")
    about = "the number of ranks, which hold the model together by tensor parallelism (default: 1)"
    parser.add_argument("--tp", type=int, default=1, metavar="N", help=about)
    return parser


def run(arguments: argparse.Namespace, use: Callable[[Any, Mapping[str, Any], Any], None]) -> int:
    """Load the model and ``use`` it with the settings of ``stream``; the exit status.  An error is one line.

    ``use`` also takes the communicator, None for one rank.  It runs on all ranks, and only rank 0 prints.
    """
    options, (rank, ranks) = {name: getattr(arguments, name) for name in ("tokens", "stop", *FLAGS)}, launched_place()
    try:
        from kos.train import load  # of which packages may be missing

        if arguments.tp != ranks:
            how = [f"start it with mpirun -n {arguments.tp}"] * (arguments.tp > 0)
            how += [f"set --tp {ranks}"] * (ranks > 1 or not how)
            raise SettingError("--tp", f"{ranks}, the number of ranks", arguments.tp, hint=" or ".join(how))
        with ExitStack() as stack:
            comm = None
            if ranks > 1:
                comm = stack.enter_context(kos.init())
                _begin_together(comm, arguments)
            if rank > 0:
                stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            use(load(arguments.run, arguments.device, comm), options, comm)
    except KosError as error:
        name, _, said = str(error).partition(": ")
        if isinstance(error, InvalidArgument) and (name in options or name == "prompt"):  # by its flag
            error = ConfigError(f"--{name.replace('_', '-')}: {said}")
        if name == f"comm of {ranks} ranks":  # of ``load``, whose errors are raised on all ranks
            error = ConfigError(f"--tp {ranks}: {said}")
            error.on_every_rank = True
        return end_command(error, rank, ranks, arguments.run.exists())
    return 0


def _begin_together(comm: Any, arguments: argparse.Namespace) -> None:
    """Compare the arguments of all ranks, and divide the cores among them."""
    from kos.train.machine import limit_threads
    from kos.train.parallel.failures import same_on_all

    same_on_all(comm, {f"--{name.replace('_', '-')}": str(value) for name, value in vars(arguments).items()})
    limit_threads(comm)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("kos.train.sample", __doc__ or "", 500)
    parser.add_argument("--prompt", action="append", help="a text to continue; several prompts form a batch")
    about = "a file with one prompt on each line, which are added to the batch"
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=about)
    arguments = parser.parse_args(argv)

    def say(model: Any, options: Mapping[str, Any], comm: Any) -> None:
        prompts = [*(arguments.prompt or []), *_lines(arguments.prompts)] or [""]
        pieces = model.stream(prompts, **options)
        with printing():
            if len(prompts) == 1:
                print(prompts[0], end="", flush=True)
                for _, piece in pieces:
                    print(piece, end="", flush=True)
                print()
            else:
                texts = [*prompts]
                for index, piece in pieces:
                    texts[index] += piece
                for number, text in enumerate(texts, 1):
                    print(f"--- {number} ---\n{text}")
        if comm is not None:
            deque(pieces, maxlen=0)  # if nobody reads the output, the other ranks still compute it

    return run(arguments, say)


def _lines(file: Path | None) -> list[str]:
    with raised_as(ConfigError, "--prompts: expected a file of text", OSError, UnicodeDecodeError):
        return [] if file is None else file.read_text("utf-8").splitlines()


if __name__ == "__main__":
    sys.exit(main())
