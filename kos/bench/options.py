"""The command line of the benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

from kos.bench import __doc__ as METHOD
from kos.bench.cases import BARRIER, MEASURED, OPERATIONS, REDUCE_OPS, ROUTING
from kos.bench.implementations import GPU_BACKENDS, choices
from kos.bench.tables import LARGEST, SMALLEST
from kos.commands import program
from kos.errors import ConfigError
from kos.reporting import Parser

HOST_BACKENDS = ("mpi", "tcp", "mock", "mpi-native", "mpi-again", "mpi-c", "gloo")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def parse_size(text: str) -> int:
    """Bytes from "64", "1K", "64M" or "1G" (powers of 1024)."""
    unit = UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 512, 64K or 16M, got {text!r}")
    return int(digits) * unit


def parse_sizes(text: str) -> list[int]:
    """Bytes from a list such as "64K,1M"."""
    return [parse_size(each) for each in text.split(",")]


def sizes_of(options: argparse.Namespace) -> list[int]:
    """Bytes of the rows: those of ``--sizes``, or from the smallest to the largest."""
    ends = {"-b": options.min_bytes, "-e": options.max_bytes, "-f": options.factor}
    given = [flag for flag, value in ends.items() if value is not None]
    if options.sizes is not None:
        if given:
            raise ConfigError(f"--sizes: expected no -b, -e or -f beside it, got {', '.join(given)}")
        return list(options.sizes)
    first = options.min_bytes or min(1 << 10, options.max_bytes or 1 << 10)
    last = options.max_bytes or max(64 << 20, first)
    factor = 4 if options.factor is None else options.factor
    if last < first:
        raise ConfigError(f"-e/--max-bytes: expected at least the {first} of -b, got {last}")
    if factor < 2:
        raise ConfigError(f"-f/--factor: expected a number from 2 on, got {factor}")
    return [first * factor**power for power in range(64) if first * factor**power <= last]


def numbers_of(options: argparse.Namespace) -> list[int]:
    """The numbers of ``--arrays``; empty without the flag."""
    words = options.arrays.split(",") if options.arrays else []
    if wrong := [word for word in words if not word.isdecimal() or not 0 < int(word) <= 1000]:
        raise ConfigError(f"--arrays: expected numbers from 1 to 1000 such as 1,100, got {wrong[0]!r}")
    return [int(word) for word in words]


_names = ", ".join


def _parser() -> Parser:
    parser = Parser(
        prog=program("kos.bench"),
        description=METHOD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    named = f"or {BARRIER} and {ROUTING}, by name only"
    add("--collective", default="all_reduce", help=f"all, or some of {_names(OPERATIONS)}; {named}")
    add("-b", "--min-bytes", type=parse_size, metavar="SIZE", help="smallest size, such as 512 or 64K (default 1K)")
    add("-e", "--max-bytes", type=parse_size, metavar="SIZE", help="largest size (default 64M)")
    add("-f", "--factor", type=int, metavar="N", help="each size is N times the one before (default 4)")
    add("--sizes", type=parse_sizes, metavar="SIZES", help="these sizes, such as 8,1K,1M, instead of -b, -e and -f")
    add("-d", "--dtype", default="float32", help=f"element type: one of {_names(MEASURED)} (default %(default)s)")
    add("-o", "--op", default="sum", choices=REDUCE_OPS, help="reduce operation (default %(default)s)")
    add("--backend", help=f"measure only these backends: some of {_names([*HOST_BACKENDS, *GPU_BACKENDS])}")
    add("--algorithm", default="auto", help="an algorithm of kos, or deterministic (default %(default)s)")
    add("--mode", help="some of graph (GPUs), eager, single_shot (default: all)")
    add("--place", choices=("in", "out", "both"), default="both", help="in place or out of place (default %(default)s)")
    add("--device", choices=("host", "gpu"), help="the memory of the arrays (default: gpu if there is one)")
    about = "timed calls for each row, or with --arrays for each batch; large sizes take fewer (default %(default)s)"
    add("-n", "--iterations", type=int, default=200, metavar="N", help=about)
    about = "untimed calls before these, in whole batches (default %(default)s)"
    add("-w", "--warmup", type=int, default=1, metavar="N", help=about)
    about = "on hosts: measure calls on so many arrays in rotation, such as 1,100; also measures async calls, the "
    about += "noise, and MPI called from C"
    add("--arrays", metavar="N,N", help=about)
    add("--ranks", type=int, default=2, help="threads to use if no mpirun has started ranks (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of the values that are sent (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the rows, and the hardware and software, to this file")
    where = "the picture of latency and bus bandwidth by size (default: beside --json, or bench-*.png)"
    add("--plot", type=Path, metavar="FILE", help=where)
    add("--no-plot", action="store_true", help="draw no picture")
    about = "on GPUs: measure the table by which auto chooses a backend, up to -e (default 1G), and write it to --json "
    add("--write-table", action="store_true", help=about + "(default: in the user's cache)")
    about = "with --write-table: also measure this backend of another package; the flag may be repeated"
    add("--with", dest="others", action="append", default=[], metavar="NAME", help=about)
    return parser


def _check_table(parser: Parser, options: argparse.Namespace) -> None:
    """Raise ConfigError for flags that do not go together with ``--write-table``."""
    for name, value in vars(options).items():
        if name not in ("write_table", "others", "max_bytes", "json") and value != parser.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"--write-table: expected only the flags -e, --with and --json with it, got {flag}")
    if not SMALLEST <= (options.max_bytes or SMALLEST) <= LARGEST:
        raise ConfigError(f"-e/--max-bytes: expected a size from 1K to 4G with --write-table, got {options.max_bytes}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; raises ConfigError for wrong ones."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.write_table:
        _check_table(parser, options)
        return options
    if options.others:
        raise ConfigError("--with: expected --write-table beside it")
    options.sizes = sizes_of(options)
    names = options.collective.split(",")
    options.collective = [name for each in names for name in (OPERATIONS if each == "all" else (each,))]
    options.backend = options.backend.split(",") if options.backend else None
    options.algorithm = options.algorithm.split(",")
    options.place = {"in": (True,), "out": (False,), "both": (False, True)}[options.place]
    options.mode = options.mode.split(",") if options.mode else None
    options.arrays = numbers_of(options)
    for what, known in (
        ("collective", (*OPERATIONS, BARRIER, ROUTING)),
        ("backend", (*HOST_BACKENDS, *GPU_BACKENDS)),
        ("mode", ("graph", "eager", "single_shot")),
    ):
        for name in getattr(options, what) or ():
            if name not in known:
                raise ConfigError(f"--{what}: expected some of {_names(known)}, got {name!r}")
    algorithms = dict.fromkeys(name for op in options.collective for name in choices(op))
    for name in options.algorithm:
        if name not in algorithms:
            raise ConfigError(f"--algorithm: expected some of {_names(algorithms)}, got {name!r}")
    if options.dtype not in MEASURED:
        raise ConfigError(f"--dtype: expected one of {_names(MEASURED)}, got {options.dtype!r}")
    if options.seed < 0:
        raise ConfigError(f"--seed: expected a number from 0 on, got {options.seed}")
    if options.iterations < 1 or options.ranks < 1 or options.warmup < 0:
        got = f"{options.iterations}, {options.ranks} and {options.warmup}"
        raise ConfigError(f"--iterations, --ranks, --warmup: expected numbers from 1, 1 and 0 on, got {got}")
    if options.plot and options.no_plot:
        raise ConfigError("--plot, --no-plot: expected one of the two, got both")
    return options
