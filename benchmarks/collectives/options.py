"""The command line of the benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.collectives import __doc__ as METHOD
from benchmarks.collectives.cases import MEASURED, OPERATIONS, REDUCE_OPS, ROUTING, parse_sizes
from benchmarks.collectives.implementations import GPU_BACKENDS, choices
from kos.commands import program
from kos.errors import ConfigError
from kos.reporting import Parser

HOST_BACKENDS = ("mpi", "tcp", "mock", "mpi-native", "gloo")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; raises ConfigError for wrong ones."""
    parser = Parser(
        prog=program("benchmarks.collectives"),
        description=METHOD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = ", ".join
    add("--collective", default="all_reduce", help=f"all, or some of {names(OPERATIONS)}; or {ROUTING}, by name only")
    add("--sizes", default="1K:64M:x4", help="bytes: first:last:xFACTOR, or a list (default %(default)s)")
    add("--dtype", default="float32", help=f"element type, of {names(MEASURED)} (default %(default)s)")
    add("--op", default="sum", choices=REDUCE_OPS, help="reduce operation (default %(default)s)")
    add("--backend", help=f"only these, of {names([*HOST_BACKENDS, *GPU_BACKENDS])}")
    add("--algorithm", default="auto", help="of ours, by name, or deterministic (default %(default)s)")
    add("--mode", help="some of graph (GPUs), eager, single_shot (default: all)")
    add("--place", choices=("in", "out", "both"), default="both", help="in place, out of place (default %(default)s)")
    add("--device", choices=("host", "gpu"), help="where the arrays lie (default: gpu where there is one)")
    add("--iterations", type=int, default=200, help="timed calls of a row, fewer if large (default %(default)s)")
    add("--ranks", type=int, default=2, help="threads, where no mpirun has started ranks (default %(default)s)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write the rows, with what they were measured on")
    where = "where to draw latency and bus bandwidth over size (default: beside --json, or bench-*.png)"
    add("--plot", type=Path, metavar="FILE", help=where)
    add("--no-plot", action="store_true", help="draw no picture")
    options = parser.parse_args(arguments)

    try:
        options.sizes = parse_sizes(options.sizes)
    except ValueError as error:
        raise ConfigError(f"--sizes: {error}") from error
    options.collective = list(OPERATIONS) if options.collective == "all" else options.collective.split(",")
    options.backend = options.backend.split(",") if options.backend else None
    options.algorithm = options.algorithm.split(",")
    options.place = {"in": (True,), "out": (False,), "both": (False, True)}[options.place]
    options.mode = options.mode.split(",") if options.mode else None
    for what, known in (
        ("collective", (*OPERATIONS, ROUTING)),
        ("backend", (*HOST_BACKENDS, *GPU_BACKENDS)),
        ("mode", ("graph", "eager", "single_shot")),
    ):
        for name in getattr(options, what) or ():
            if name not in known:
                raise ConfigError(f"--{what}: expected some of {names(known)}, got {name!r}")
    algorithms = dict.fromkeys(name for op in options.collective for name in choices(op))
    for name in options.algorithm:
        if name not in algorithms:
            raise ConfigError(f"--algorithm: expected some of {names(algorithms)}, got {name!r}")
    if options.dtype not in MEASURED:
        raise ConfigError(f"--dtype: expected one of {names(MEASURED)}, got {options.dtype!r}")
    if options.seed < 0:
        raise ConfigError(f"--seed: expected a number from 0 on, got {options.seed}")
    if options.iterations < 1 or options.ranks < 1:
        raise ConfigError("--iterations, --ranks: expected numbers from 1 on")
    if options.plot and options.no_plot:
        raise ConfigError("--plot, --no-plot: expected one of them, got both")
    return options
