"""How many ranks the hub of a group serves: python -m benchmarks.hub [--ranks 512 4096 16384] [--json FILE]

Rank 0 is a rank of kos.  The other ranks, 8 to a host, are connections of two processes that read what the hub sends
and check nothing, so that one machine suffices.  Seconds, and the CPU seconds of rank 0:

- init: from the start until all have connected and have the places of all
- exchange: an all-gather of 8 bytes, the median
- death: from the end of one connection until all others know it
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import resource
import select
import socket
import struct
import time
from pathlib import Path
from statistics import median
from typing import Any

from kos.bench.report import provenance, to_json
from kos.comm.control.hub import CLOSE, DATA
from kos.comm.control.network import Network
from kos.comm.control.place import Place, job_rendezvous
from kos.comm.control.wire import Waiting, authenticate, connect, fill, receive_greeting
from kos.commands import program
from kos.errors import RankLost
from kos.files import allow_files, check_writable

SECRET, PURPOSE = b"of the benchmark", b"hub"
SECONDS = 300.0  # limit for each wait
CALL = struct.Struct("!IH8s")  # begins each message: the number of the exchange, the length of its name, the name
HEAD = struct.Struct("!II32s")  # of a message: its length, epoch and HMAC


def place_of(rank: int) -> bytes:
    """What a rank says of itself: its address, and its machine, with a boot id."""
    host = rank // 8
    boot = hashlib.md5(str(host).encode(), usedforsecurity=False).hexdigest()
    return json.dumps([f"10.0.{host >> 8}.{host & 255}", 30000 + rank % 8, f"node{host}{boot}", "", None]).encode()


def answer_to(sock: socket.socket, scratch: memoryview) -> Waiting[None]:
    """Read and discard the next message of the hub."""
    head = memoryview(bytearray(HEAD.size))
    yield from fill(sock, lambda: head)
    left = HEAD.unpack(head)[0]
    while left:
        part = scratch[: min(left, len(scratch))]
        yield from fill(sock, lambda part=part: part)
        left -= len(part)


def member(
    sock: socket.socket, rank: int, size: int, exchanges: int, scratch: memoryview, dead: list[float],
    known: list[float],
) -> Waiting[None]:  # fmt: skip
    """The life of a rank: it joins, makes its exchanges, and ends (the last rank) or learns that another has ended."""
    greeting = yield from receive_greeting(sock)
    connection = yield from authenticate(sock, greeting, Network(SECRET, "", "", True).key(PURPOSE), rank, size)
    for number in range(1, exchanges + 2):
        connection.post(DATA + CALL.pack(number, 8, b"exchange") + (bytes(8) if number > 1 else place_of(rank)))
        yield from connection.flush()
        yield from answer_to(sock, scratch)
    if rank == size - 1:
        dead.append(time.monotonic())
    else:
        yield from answer_to(sock, scratch)
        known.append(time.monotonic())
        connection.post(CLOSE)
        yield from connection.flush()


def play(ranks: list[int], size: int, port: int, exchanges: int, found: Any) -> None:
    """Be these ranks; ``found`` gets the times at which the last one ended, and at which the others knew it."""
    allow_files()
    deadline = time.monotonic() + SECONDS
    poll, scratch = select.epoll(), memoryview(bytearray(1 << 20))
    running, dead, known = dict[int, tuple[int, socket.socket, Waiting[None]]](), list[float](), list[float]()
    while (ranks or running) and time.monotonic() < deadline:
        if ranks:
            try:
                sock = connect("127.0.0.1", port, deadline)
            except ConnectionRefusedError:  # rank 0 does not listen yet
                time.sleep(0.01)
                continue
            rank = ranks.pop()
            running[sock.fileno()] = rank, sock, member(sock, rank, size, exchanges, scratch, dead, known)
            poll.register(sock, select.EPOLLIN)
        for descriptor, _ in poll.poll(0.0 if ranks else 1.0):
            rank, sock, life = running[descriptor]
            try:
                next(life)
                continue
            except StopIteration:
                pass
            except ConnectionError:  # too many were in their handshakes
                ranks.append(rank)
            poll.unregister(sock)
            del running[descriptor]
            sock.close()
    found.send_bytes(json.dumps([dead, known]).encode())


def measure(size: int, exchanges: int) -> dict[str, Any]:
    """One group of ``size`` ranks, from its start to the end of one of them."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results, found = context.Pipe(duplex=False)
    began, cpu = time.monotonic(), time.process_time()
    halves = [[*range(1 + number, size, 2)] for number in range(2)]
    players = [context.Process(target=play, args=(half, size, port, exchanges, found), daemon=True) for half in halves]
    for each in players:
        each.start()
    group = job_rendezvous(Place(0, size, None, "127.0.0.1", [port], PURPOSE, SECRET), SECONDS, host="")
    marks = [(time.monotonic(), time.process_time())]
    for _ in range(exchanges):
        group.allgather(bytes(8))
        marks.append((time.monotonic(), time.process_time()))
    with contextlib.suppress(RankLost):
        group.barrier()
    times = [json.loads(results.recv_bytes()) for _ in players]
    (died,), known = times[0][0] + times[1][0], times[0][1] + times[1][1]
    assert len(known) == size - 2 and group.deaths().keys() == {size - 1}
    group.abort(None)
    for each in players:
        each.join()
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]
    row = {
        "ranks": size, "init": marks[0][0] - began, "init_cpu": marks[0][1] - cpu,
        "exchange": median(step[0] for step in steps), "exchange_cpu": median(step[1] for step in steps),
        "death": max(known) - died, "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }  # fmt: skip
    return {name: round(value, 4) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog=program("benchmarks.hub"), description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--exchanges", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the seconds")
    options = parser.parse_args()
    if options.json is not None:
        check_writable(options.json)
    rows = []
    for size in options.ranks:
        rows.append(measure(size, options.exchanges))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if options.json is not None:
        options.json.write_text(to_json({**provenance("benchmarks.hub", None, 1), "rows": rows}))


if __name__ == "__main__":
    main()
