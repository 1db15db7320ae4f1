"""``python -m kos.comm.schedules``: list, print, verify and draw schedules, or predict their times."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from kos.comm.schedules import algorithms, build, collectives, describe
from kos.comm.schedules.draw import draw, text
from kos.comm.schedules.schedule import IN_PLACE, Schedule
from kos.comm.schedules.simulate import calibration, simulate, topology
from kos.comm.schedules.verify import verify
from kos.commands import program
from kos.errors import InvalidArgument, KosError, plural
from kos.files import check_picture, printing
from kos.reporting import ArgumentParser

PIPELINES = (1, 4, 16, 64, 256)
"""Numbers of chunks that --predict tries, for algorithms that pipeline a whole vector."""

MAX_SHOWN = 256
"""The largest number of ranks whose steps are printed and verified."""

MAX_CHUNKS = 1024
"""The largest number of chunks."""

MAX_BLOCKS = 8192
"""The largest product of ranks and chunks whose steps are printed and verified."""

MAX_PREDICTED = 1 << 16
"""The largest number of ranks in --scales.  The prediction of some algorithms takes tens of seconds at this size."""

MAX_BYTES = 1 << 62
"""The largest size in --sizes, in bytes."""

LARGEST_NODE = 8
"""The largest node that hierarchical takes by default."""

EXAMPLES = """examples:
  python -m kos.comm.schedules                                    lists all algorithms
  python -m kos.comm.schedules ring --ranks 8 --draw ring.png
  python -m kos.comm.schedules pairwise --collective all_to_all --ranks 6
  python -m kos.comm.schedules --predict --scales 8,64,1024
  python -m kos.comm.schedules mine --import my_schedules --ranks 4    an algorithm that my_schedules.py registers
  python -m kos.comm.schedules hierarchical --predict --scales 16384 --sizes 1M,1G

In the steps of a schedule, + marks a message that is added to what the receiver has. Other messages replace it.
In the table of --predict, * marks the fastest algorithm.
"""


def _numbers(given: str) -> list[int]:
    """``8,64`` or ``1K,4M,1G`` (powers of 1024)."""
    try:
        numbers = [int(part.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(part[-1:], 0)
                   for part in given.upper().split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers like 8,64 or 1K,4M,1G, got {given!r}")
    return numbers


def _parser() -> argparse.ArgumentParser:
    p = ArgumentParser(prog=program("kos.comm.schedules"), description=__doc__, epilog=EXAMPLES,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("algorithm", nargs="?", help="the name of an algorithm (default: list or predict all)")
    p.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE",
                   help="first import this module, which registers algorithms; the working folder is searched too")
    p.add_argument("--collective", help="the collective of the algorithm (default: all_reduce; in a list, all)")
    p.add_argument("--ranks", type=int, default=8, help="the number of ranks (default: 8); --predict uses --scales")
    p.add_argument("--chunks", type=int, help=f"number of pipelined chunks, up to {MAX_CHUNKS:,} (default: "
                                              "1; with --predict: the best of several)")
    p.add_argument("--root", type=int, default=0, help="root of broadcast, reduce, gather and scatter (default: 0)")
    p.add_argument("--ranks-per-node", type=int,
                   help="for hierarchical (default: the largest divisor of --ranks up to 8)")
    p.add_argument("--draw", metavar="FILE", help="draw the schedule to a .svg or .png (needs matplotlib)")
    p.add_argument("--predict", action="store_true", help="print predicted times instead of the schedule")
    p.add_argument("--topology", default="h200-cluster", help=f"one of {', '.join(calibration())}; "
                                                              "default: h200-cluster")
    p.add_argument("--scales", type=_numbers, default=[8, 64, 512, 4096],
                   help=f"the numbers of ranks for --predict, up to {MAX_PREDICTED:,}")
    p.add_argument("--sizes", type=_numbers, default=[1 << k for k in (10, 15, 20, 24, 28, 30)],
                   help="the sizes for --predict: the bytes of the larger buffer of a rank")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.draw and (args.predict or args.algorithm is None):
        parser.error("--draw: expected the name of an algorithm, and no --predict")
    try:
        for name in args.modules:
            _import(name)
        listed = [args.collective] if args.collective else collectives()
        args.collective = args.collective or "all_reduce"
        if (args.chunks or 0) > MAX_CHUNKS:
            raise InvalidArgument(f"--chunks: expected up to {MAX_CHUNKS:,}, got {args.chunks:,}")
        if args.draw:
            check_picture(Path(args.draw))
        with printing():
            if args.predict:
                _predict(args)
            elif args.algorithm is None:
                for collective in listed:
                    print(collective)
                    for name in algorithms(collective):
                        print(f"  {name:18}" + describe(collective, name).partition("\n")[0])
            else:
                _show(args)
    except (KosError, OSError) as e:
        print(f"kos: error: {e}", file=sys.stderr)
        return 2
    return 0


def _import(name: str) -> None:
    """Import the user's module.  Raises InvalidArgument if it cannot be imported."""
    sys.path.insert(0, "")  # console scripts do not search the working folder
    try:
        importlib.import_module(name)
    except KosError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise InvalidArgument(f"--import: expected a module such as my_schedules, got {name!r}: {got}") from error
    finally:
        sys.path.remove("")


def _build(args: argparse.Namespace, name: str, ranks: int, chunks: int) -> Schedule:
    return build(args.collective, name, ranks, chunks, args.root, ranks_per_node=args.ranks_per_node)


def _show(args: argparse.Namespace) -> None:
    if args.ranks > MAX_SHOWN:
        raise InvalidArgument(f"--ranks: expected up to {MAX_SHOWN}, got {args.ranks}; --predict accepts more")
    if args.ranks * (args.chunks or 1) > MAX_BLOCKS:
        shown = f"{args.ranks} ranks with {plural(args.chunks, 'chunk')}"
        raise InvalidArgument(f"--ranks times --chunks: expected up to {MAX_BLOCKS:,}, got {shown}")
    schedule = _build(args, args.algorithm, args.ranks, 1 if args.chunks is None else args.chunks)
    verify(schedule)
    print(describe(args.collective, args.algorithm), text(schedule), sep="\n\n")
    order = ", adds in rank order" if schedule.ordered else ""
    print(f"\nproved right: {_counts(schedule)}{order}")
    if args.algorithm == "hierarchical" and args.ranks_per_node is None and args.ranks <= LARGEST_NODE:
        print("all ranks are in one node: --ranks-per-node makes several")
    if args.draw:
        draw(schedule, args.draw)
        print(f"drawn to {args.draw}")


def _counts(schedule: Schedule) -> str:
    """The rounds, those that are steps of the network, and the most that a rank sends of its larger buffer."""
    sent = [[step for steps in ranks for step in steps if step.kind == "send"] for ranks in schedule.rounds]
    most = max((sum(step.span for steps in rank for step in steps if step.kind == "send")
                for rank in zip(*schedule.rounds, strict=True)), default=0)
    rounds = f"{plural(len(schedule.rounds), 'round')}, {sum(map(bool, sent))} with messages"
    largest = schedule.parts * max(schedule.units.values())
    return f"{rounds}; a rank sends at most {most / largest:.2f} S (bytes of the larger buffer)"


def _predict(args: argparse.Namespace) -> None:
    for option, numbers, most in (("--scales", args.scales, MAX_PREDICTED), ("--sizes", args.sizes, MAX_BYTES)):
        if max(numbers) > most:
            raise InvalidArgument(f"{option}: expected numbers up to {most:,}, got {max(numbers):,}")
    names = [args.algorithm] if args.algorithm else algorithms(args.collective)
    where, entry = topology(args.topology), calibration()[args.topology]
    print(f"{args.collective}, predicted microseconds on {args.topology}: {entry['description']} "
          f"({entry['provenance']['hardware']}; {entry['provenance']['date']}); * marks the fastest")
    for ranks in args.scales:
        candidates = [[_build(args, name, ranks, chunks) for chunks in _chunks(args, name, ranks)] for name in names]
        print(f"\n{plural(ranks, 'rank')}\n{'bytes':>13}" + "".join(f"{name:>18}" for name in names))
        for nbytes in args.sizes:
            times = [min(simulate(schedule, where, nbytes) for schedule in each) for each in candidates]
            cells = [f"{t * 1e6:,.1f}{' *' if t == min(times) else '  '}" for t in times]
            print(f"{nbytes:13,}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def _chunks(args: argparse.Namespace, name: str, ranks: int) -> tuple[int, ...]:
    """The numbers of chunks to try."""
    if args.chunks is not None:
        return (args.chunks,)
    pipelined = args.collective in IN_PLACE and not name.endswith("_shot") and _build(args, name, ranks, 1).parts <= 2
    return PIPELINES if pipelined else (1,)


if __name__ == "__main__":
    raise SystemExit(main())
