"""docs/reference/errors.md quotes the messages of the code; those that can be provoked here are."""

import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos
import kos.errors
from kos.comm.control.env import env_rendezvous
from kos.errors import KosError
from kos.testing import Fault, spawn
from kos.transfer import Subscriber
from tests.literals import VALUE, literals, texts_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "errors.md"
BLOCKS = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
QUOTED = [line for block in BLOCKS for line in block.splitlines()]


def split(line: str) -> tuple[str, str]:
    """The class of a quoted message, if the page names it, and the message."""
    kind, _, text = line.partition(": ")
    return ("", text.removeprefix("error: ")) if kind == "kos" else (kind, text)


def test_messages_are_quoted():
    assert len(QUOTED) > 80
    classes = {kind for kind, _ in map(split, QUOTED) if kind}
    known = {name for name, kind in vars(kos.errors).items() if isinstance(kind, type)} | {"Deadlock"}
    assert classes <= known, classes - known


def provoked(action: Callable[[], Any]) -> KosError:
    with pytest.raises(KosError) as caught:
        action()
    return caught.value


def differ(comm: kos.Communicator) -> None:
    comm.all_reduce(np.ones(3 + comm.rank))


def go_on(comm: kos.Communicator) -> None:
    with pytest.raises(KosError):
        differ(comm)
    comm.barrier()


def close(comm: kos.Communicator) -> None:
    comm.close()
    comm.barrier()


def late(comm: kos.Communicator) -> None:
    comm.recv(np.ones(3), src=1 - comm.rank, timeout=0.1 if comm.rank else None)


def both_send(comm: kos.Communicator) -> None:
    comm.send(np.ones(1), 1 - comm.rank)
    comm.recv(np.ones(1), 1 - comm.rank)


def unreceived(comm: kos.Communicator) -> None:
    if comm.rank == 0:
        comm.send(np.ones(1), 1)


def write(comm: kos.Communicator) -> None:
    x = np.ones(3)
    work = comm.all_reduce(x, async_op=True)
    x[comm.rank] = 5
    work.wait()


def writes() -> None:
    spawn(write, 2)


def alone(call: str) -> Callable[[], Any]:
    """``call`` on a group of one."""

    def run() -> None:
        with kos.init() as comm:
            eval(call, {"comm": comm, "np": np, "kos": kos, "x": np.ones(4), "SUM": kos.ReduceOp.SUM})

    return run


def by_environment(**environ: str) -> Callable[[], Any]:
    return lambda: env_rendezvous(0.2, {"MASTER_ADDR": "127.0.0.1", "KOS_SECRET": "x", **environ})


def at_a_used_port() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        by_environment(RANK="0", WORLD_SIZE="2", MASTER_PORT=str(sock.getsockname()[1]))()


def at_a_free_port(rank: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    by_environment(RANK=rank, WORLD_SIZE="2", MASTER_PORT=str(port))()


def closed_subscriber() -> None:
    subscriber = Subscriber("127.0.0.1:1", None)
    subscriber.close()
    subscriber.update()


def flags(*words: str) -> Callable[[], Any]:
    pytest.importorskip("pydantic")
    from kos.train.config.flags import parse

    return lambda: parse(words)


def shrink_alone(comm: kos.Communicator, over: threading.Event = threading.Event()) -> None:  # noqa: B008
    comm.rendezvous.timeout = 0.2
    if comm.rank:
        over.wait(20)
        return
    try:
        comm.shrink()
    finally:
        over.set()


ERRORS: dict[str, Callable[[], Any]] = {
    "CollectiveMismatch: …: rank … called … but rank … called …: they differ in …": lambda: spawn(differ, 2),
    "CollectiveMismatch: …: the communicator failed before: …": lambda: spawn(go_on, 2),
    "CollectiveError: <Communicator …> is closed": lambda: spawn(close, 2),
    "CollectiveTimeout: …: not complete after … s; rank … sent nothing with tag …": lambda: spawn(
        late, 2, check_deadlock=False
    ),
    "CollectiveTimeout: …: not complete after … s; ranks … did not arrive": lambda: spawn(
        lambda comm: comm.barrier(), 2, 0.5, faults=[Fault("stall", 1)], check_deadlock=False
    ),
    "RankLost: …: rank … is gone: …": lambda: spawn(lambda comm: comm.barrier(), 2, faults=[Fault("crash", 1)]),
    "RendezvousError: …: shrink: ranks … did not arrive within … s": lambda: spawn(shrink_alone, 2),
    "RendezvousError: …: grow …: … of … newcomers joined at … within … s": lambda: spawn(
        lambda comm: comm.grow(1, timeout=0.2), 2, check_deadlock=False
    ),
    "RendezvousError: join: expected members at … that admit newcomers within … s, got none: …": lambda: spawn(
        lambda comm: kos.join(comm.address, timeout=0.2), 1
    ),
    "Deadlock: deadlock: every rank waits, and none can continue:…": lambda: spawn(both_send, 2),
    "CollectiveError: spawn: messages that no rank received: …": lambda: spawn(
        unreceived, 2, buffer_bytes=float("inf")
    ),
    "CollectiveError: …: rank … wrote to its array while the operation was in flight, or another operation did": writes,
    "InvalidArgument: faults: expected all to happen, got none of …": lambda: spawn(
        lambda comm: None, 2, faults=[Fault("crash", 1)]
    ),
    "InvalidArgument: x: expected a C-contiguous array, got shape … with strides …": alone(
        "comm.all_reduce(np.ones((4, 4))[:, :2])"
    ),
    "InvalidArgument: x: expected an array, got …": alone("comm.all_reduce([1, 2])"),
    "InvalidArgument: dtype: expected one of …; got …": alone("comm.all_reduce(np.array(['a']))"),
    "InvalidArgument: op: expected one of … for …, got …": alone("comm.all_reduce(np.ones(3, int), kos.ReduceOp.AVG)"),
    "InvalidArgument: x: expected a multiple of … elements, got …": lambda: spawn(
        lambda comm: comm.reduce_scatter(np.ones(3)), 2
    ),
    "InvalidArgument: out: expected … elements (shape …), got shape …": alone("comm.all_gather(x, np.ones(5))"),
    "InvalidArgument: out: expected dtype …, got …": alone("comm.all_gather(x, np.ones(4, np.float32))"),
    "InvalidArgument: out: expected memory that does not overlap x, got arrays that overlap": alone(
        "comm.all_to_all(x, x)"
    ),
    "InvalidArgument: root: expected a rank from 0 to …, got …": alone("comm.broadcast(x, root=3)"),
    "InvalidArgument: dst: expected a rank from 0 to …, got …": alone("comm.send(x, 3)"),
    "InvalidArgument: tag: expected a number from 0 to …, got …": lambda: spawn(
        lambda comm: comm.recv(np.ones(1), 1 - comm.rank, tag=-1), 2
    ),
    'InvalidArgument: color: expected a whole number or None or "host", got …': alone("comm.split('rack')"),
    "InvalidArgument: shape: expected a whole number, got …": alone("comm.allocate(2.5, 'float32')"),
    "InvalidArgument: dst: expected another rank, got this rank, …": alone("comm.send(x, 0)"),
    "InvalidArgument: counts: expected … numbers from 0 on, got …": alone("comm.gather_v(x, [1, 2])"),
    "InvalidArgument: algorithm: expected 'auto' or one of … for …, got …": alone(
        "comm.all_reduce(x, algorithm='none')"
    ),
    "InvalidArgument: timeout: expected a positive number of seconds, got …": lambda: kos.init(timeout=0),
    "InvalidArgument: stream: expected None, as no GPU is used here, got …": alone("comm.barrier(stream=5)"),
    "InvalidArgument: nccl: expected None without the backend nccl, got … on …": lambda: kos.init(
        "mock", nccl={"max_ctas": 8}
    ),
    "InvalidArgument: backend: expected auto or one of …, got …": lambda: kos.init("none"),
    "RendezvousError: …: expected values beside those of …, got none (a process without any of …": by_environment(
        RANK="0", WORLD_SIZE="2"
    ),
    "RendezvousError: RANK: expected a whole number from 0 to …, got …": by_environment(
        RANK="7", WORLD_SIZE="2", MASTER_PORT="1"
    ),
    "RendezvousError: MASTER_PORT: expected a whole number from 1 to 65535, got …": by_environment(
        RANK="0", WORLD_SIZE="2", MASTER_PORT="80000"
    ),
    "RendezvousError: MASTER_PORT: expected port … to be free for rank 0, got one in use …": at_a_used_port,
    "RendezvousError: rendezvous: ranks … of … did not arrive within … s (rank 0 listens at …)": lambda: at_a_free_port(
        "0"
    ),
    "RendezvousError: rendezvous: rank … did not reach rank 0 within … s: …": lambda: at_a_free_port("1"),
    "RendezvousError: KOS_SECRET: expected a secret, got an empty one": by_environment(
        RANK="0", WORLD_SIZE="2", MASTER_PORT="29500", KOS_SECRET=""
    ),
    "TransferError: …: expected an open …, got a closed one": closed_subscriber,
    "kos: error: expected a flag that --help lists…, got …": lambda: flags("--stepps", "3")(),
    "kos: error: --…: expected …, got …": lambda: flags("--batch-size", "0")(),
    "kos: error: --config: expected a .toml or .json file, got …": lambda: flags("--config", "x.yaml")(),
}


@pytest.mark.parametrize("line", ERRORS)
def test_a_provoked_message_is_as_quoted(line, monkeypatch):
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "KOS_SECRET"):
        monkeypatch.delenv(variable, raising=False)
    error, (kind, text) = provoked(ERRORS[line]), split(line)
    pattern = ".*".join(map(re.escape, text.split(VALUE)))
    assert re.fullmatch(pattern, str(error), re.S), f"{PAGE.relative_to(ROOT)}: expected {line}, got {error}"
    assert line in QUOTED and kind in ("", type(error).__name__)


@pytest.mark.parametrize("line", [line for line in QUOTED if line not in ERRORS])
def test_the_words_of_a_quoted_message_are_in_the_code(line):
    fragments = [each.strip(" ,;:()<>'\"") for each in split(line)[1].split(VALUE)]
    missing = [each for each in fragments if each and not found(each)]
    assert not missing, f"{line}: no string of kos/ has {missing}"


def found(fragment: str) -> bool:
    """Whether the words are in a literal; or in several, where a message is put together of clauses."""
    clauses, texts = re.split(r"; |: |, | \(|(?<=expected) ", fragment), literals(ROOT / "kos")
    return fragment in texts or all(clause.strip("()") in texts for clause in clauses)


def test_the_texts_of_timeouts_are_in_one_file():
    words = re.compile("(not complete|not begun by all ranks|running) after … s|within … s"
                       "|went no further|still waiting|… (did not arrive|did not receive|sent nothing with)")
    others = [path for path in sorted((ROOT / "kos").rglob("*.py"))
              if path.relative_to(ROOT / "kos").parts[0] in ("comm", "interop", "testing")
              and path.name not in ("timeouts.py", "analysis.py", "ray.py")]  # the flight recorder's, and Ray's actors'
    assert [path.name for path in others for text in texts_of(path) if words.search(text)] == []
