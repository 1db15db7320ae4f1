"""``python -m kos.comm.schedules``: print, prove and draw a schedule, or predict times."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from kos.comm.schedules import algorithms, build, collectives, describe
from kos.comm.schedules.draw import draw, text
from kos.comm.schedules.schedule import IN_PLACE, Schedule
from kos.comm.schedules.simulate import Topology, calibration, simulate, topology
from kos.comm.schedules.verify import verify
from kos.errors import InvalidArgument, KosError

PIPELINES = (1, 4, 16, 64, 256)
"""Numbers of chunks among which --predict takes the best, for algorithms that pipeline a whole vector."""

MAX_SHOWN = 256
"""Most ranks whose steps are printed and proved one by one."""

EXAMPLES = """examples:
  python -m kos.comm.schedules ring --ranks 8 --draw ring.png
  python -m kos.comm.schedules bruck --collective all_to_all --ranks 6
  python -m kos.comm.schedules --predict --scales 8,64,1024
  python -m kos.comm.schedules hierarchical --predict --scales 16384 --sizes 1M,1G
  python -m kos.comm.schedules --list
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def _numbers(given: str) -> list[int]:
    """``8,64`` or ``1K,4M,1G`` (powers of 1024)."""
    try:
        return [int(part.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(part[-1:], 0)
                for part in given.upper().split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers like 8,64 or 1K,4M,1G, got {given!r}") from None


def _parser() -> _Parser:
    p = _Parser(prog="python -m kos.comm.schedules", description=__doc__, epilog=EXAMPLES,
                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("algorithm", nargs="?", help="its name; --list shows all (optional with --predict)")
    p.add_argument("--collective", default="all_reduce", help="default: all_reduce")
    p.add_argument("--ranks", type=int, default=8, help="default: 8")
    p.add_argument("--chunks", type=int, help="pieces that travel behind one another (default: 1; "
                                              "with --predict: the best of several)")
    p.add_argument("--root", type=int, default=0, help="for broadcast, reduce, gather and scatter; default: 0")
    p.add_argument("--ranks-per-node", type=int, help="for hierarchical; default: the largest divisor up to 8")
    p.add_argument("--draw", metavar="FILE", help="draw the schedule to a .svg, or to a .png (needs matplotlib)")
    p.add_argument("--list", action="store_true", help="list the algorithms of every collective")
    p.add_argument("--predict", action="store_true", help="print predicted times instead of the schedule")
    p.add_argument("--topology", default="h200-cluster", help=f"one of {', '.join(calibration())}; "
                                                              "default: h200-cluster")
    p.add_argument("--scales", type=_numbers, default=[8, 64, 512, 4096], help="rank counts for --predict")
    p.add_argument("--sizes", type=_numbers, default=[1 << k for k in (10, 15, 20, 24, 28, 30)],
                   help="bytes for --predict, of the larger buffer of a rank")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = _parser().parse_args(arguments)
    try:
        if args.list:
            _list()
        elif args.predict:
            _predict(args)
        elif args.algorithm is None:
            raise InvalidArgument(f"which algorithm? For {args.collective}: {', '.join(algorithms(args.collective))}")
        else:
            _show(args)
    except BrokenPipeError:  # the reader, head for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (KosError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def _show(args: argparse.Namespace) -> None:
    if args.ranks > MAX_SHOWN:
        raise InvalidArgument(f"prints and proves up to {MAX_SHOWN} ranks, got {args.ranks}; --predict takes more")
    schedule = build(args.collective, args.algorithm, args.ranks, args.chunks, args.root,
                     ranks_per_node=args.ranks_per_node)
    verify(schedule)
    print(describe(args.collective, args.algorithm), end="\n\n")
    print(text(schedule))
    order = ", adds in rank order" if schedule.ordered else ""
    print(f"\nproved right: {len(schedule.rounds)} rounds{order}")
    if args.draw:
        draw(schedule, args.draw)
        print(f"drawn to {args.draw}")


def _list() -> None:
    for collective in collectives():
        print(collective)
        for name in algorithms(collective):
            print(f"  {name:18}{describe(collective, name).splitlines()[0]}")


def _predict(args: argparse.Namespace) -> None:
    names = (args.algorithm,) if args.algorithm else algorithms(args.collective)
    where = topology(args.topology)
    entry = calibration()[args.topology]
    print(f"{args.collective}, predicted seconds on {args.topology}: {entry['description']} "
          f"({entry['provenance']['hardware']}; {entry['provenance']['date']})")
    for ranks in args.scales:
        candidates = {name: _candidates(args, name, ranks) for name in names}
        print(f"\n{ranks} ranks\n{'bytes':>10}" + "".join(f"{name:>18}" for name in names))
        for nbytes in args.sizes:
            times = {name: _best(candidates[name], where, nbytes) for name in names}
            fastest = min(times.values())
            print(f"{_bytes(nbytes):>10}" + "".join(
                f"{_seconds(t) + (' *' if t == fastest and len(names) > 1 else '  '):>18}" for t in times.values()),
                flush=True)


def _candidates(args: argparse.Namespace, name: str, ranks: int) -> list[Schedule]:
    one = build(args.collective, name, ranks, args.chunks, args.root, ranks_per_node=args.ranks_per_node)
    pipelined = args.collective in IN_PLACE and one.parts <= 2 and not name.endswith("_shot")
    if args.chunks or not pipelined:
        return [one]
    return [build(args.collective, name, ranks, chunks, args.root, ranks_per_node=args.ranks_per_node)
            for chunks in PIPELINES]


def _best(schedules: list[Schedule], where: Topology, nbytes: int) -> float:
    return min(simulate(schedule, where, nbytes) for schedule in schedules)


def _bytes(n: int) -> str:
    for shift, unit in ((30, "GB"), (20, "MB"), (10, "KB")):
        if n >= 1 << shift and n % (1 << shift) == 0:
            return f"{n >> shift} {unit}"
    return f"{n} B"


def _seconds(t: float) -> str:
    for scale, unit in ((1e6, "us"), (1e3, "ms"), (1, "s")):
        if t * scale < 1000 or unit == "s":
            return f"{t * scale:.3g} {unit}" if t * scale < 100 else f"{t * scale:.0f} {unit}"
    raise AssertionError


if __name__ == "__main__":
    raise SystemExit(main())
