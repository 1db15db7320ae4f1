"""Text from a trained model: ``python -m kos.train.sample RUN --prompt "def "``.

RUN is a run's folder (its newest complete checkpoint is taken) or a checkpoint's. One process, no MPI.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kos.commands import program
from kos.errors import ConfigError, KosError
from kos.files import printing
from kos.reporting import exit_status


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program("kos.train.sample"),
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, of a checkpoint or of Hugging Face")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--tokens", type=int, default=500, help="tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    parser.add_argument("--top-k", type=int, default=40, help="draw among the k likeliest; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    arguments = parser.parse_args(argv)
    options = {name: getattr(arguments, name) for name in ("seed", "temperature", "top_k")}
    try:
        for name, value in {"tokens": arguments.tokens, **options}.items():
            if not value >= 0:
                raise ConfigError(f"--{name.replace('_', '-')}: expected 0 or more, got {value}")
        from kos.train import load  # of which packages may be missing

        text = load(arguments.run).generate(arguments.prompt, arguments.tokens, **options)
    except KosError as error:
        print(f"kos: error: {error}", file=sys.stderr)
        return exit_status(error) if arguments.run.exists() else 2
    with printing():
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
