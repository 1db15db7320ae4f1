"""``mpirun -n N python -m kos.train``: train a LLaMA; ``--help`` shows every setting."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence

import kos
from kos.comm.rendezvous import launched_rank
from kos.errors import ConfigError, KosError
from kos.train.config import parse


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done (also when a signal asked to stop and the run was saved), 1 failed, 2 bad settings."""
    rank = launched_rank()
    logging.basicConfig(format=f"kos: rank {rank}: %(message)s", level=logging.WARNING, stream=sys.stderr)
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    try:
        config = parse(arguments)
    except ConfigError as error:
        return _report(error, rank, debug)
    comm = None
    try:
        from kos.train.loop import Trainer

        comm = kos.init(config.backend, timeout=config.timeout)
        Trainer(config, comm).run()
        comm.close()
    except KosError as error:
        code = _report(error, rank, debug)
        if comm is not None and not error.on_every_rank:
            comm.abort(code)
        return code
    return 0


def _report(error: KosError, rank: int, debug: bool) -> int:
    """Say an error on one line, once for all ranks where all have it; the exit code it stands for."""
    shared = error.on_every_rank or isinstance(error, ConfigError)
    if rank == 0 or not shared:
        if debug:
            traceback.print_exception(error)
        where = "" if shared else f"rank {rank}: "
        print(f"kos: error: {where}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
