"""The backend of docs/guides/writing-a-backend.md keeps the promises of the conformance suite.

Its variants with defects do not.
"""

import logging
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kos
from kos.comm.operation import COLLECTIVE_TAGS
from kos.testing.conformance import cases, failures, intact, run
from tests.comm.tcp_ranks import TIMEOUT, run_ranks
from tests.forked import python

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "writing-a-backend.md"
BLOCK = r"^<!-- not run: the test runs all blocks together -->\n```python\n(.*?)^```$"
BLOCKS = re.findall(BLOCK, PAGE.read_text(), re.M | re.S)
SEND, PROGRESS = "sends_need_no_further_call", "one_poll_advances_all_messages"


@pytest.fixture(autouse=True)
def files():
    names = {"__name__": "files"}
    exec(compile("\n".join(BLOCKS), str(PAGE), "exec"), names)
    yield names["Files"]
    del kos.comm.BACKENDS["files"]


def test_on_ranks_that_connect_as_processes_do():
    """Every operation runs on few dtypes, and messages on all.

    Files hold bytes, so other dtypes make no difference.
    """
    left_out = re.compile(r"(?!messages).* (bfloat16|int32|bool|PROD|MIN|MAX|AVG|fp8|int4|large)\b.*")

    def body(rendezvous):
        with kos.init("files", rendezvous=rendezvous, timeout=TIMEOUT) as world:
            for case in (case for case in cases() if not left_out.fullmatch(case.name) and case.applies(world)):
                case.call(world)

    run_ranks(2, body, limit=6 * TIMEOUT)  # a busy machine takes minutes


def on_files(size: int, body: Any, timeout: float = TIMEOUT) -> list[Any]:
    def rank(rendezvous: Any) -> Any:
        with kos.init("files", rendezvous=rendezvous, timeout=timeout) as world:
            return body(world)

    return run_ranks(size, rank)


def test_the_parts_that_a_backend_must_have_suffice(files):
    for name in ("agree", "absent", "report_failure"):
        delattr(files, name)
    for promise in (SEND, PROGRESS, "float32 SUM"):
        assert on_files(3, lambda world, promise=promise: run(world, only=promise)) == [{}] * 3


def without_agree(backend: Any) -> None:
    backend.agree = lambda backend, call, local: None


def without_failed(backend: Any) -> None:
    del backend.report_failure


def without_cancel(backend: Any) -> None:
    backend.cancel = lambda backend, cancelled: None


def without_last(backend: Any) -> None:
    """A defect: the last element of a message is not written."""

    def take(self: Any, receive: Any, take: Any = backend.take) -> None:
        last = receive.array[-1:].copy()
        take(self, receive)
        receive.array[-1:] = last

    backend.take = take


def without_root(backend: Any) -> None:
    """A defect: rank 0 is the root of every broadcast."""

    def native(self: Any, call: Any, spaces: Any, collective: str) -> None:
        if collective == "broadcast":
            call.prepared.operation = replace(call.operation, root=0)

    backend.native = native


def without_order(backend: Any) -> None:
    """A defect: of two messages with the same tag and length, the second is received first."""

    def take(self: Any, receive: Any, take: Any = backend.take) -> None:
        stem, number = f"{receive.peer}-{self.rank}-{receive.tag}-", self.taken[receive.peer, receive.tag]
        first, second = (Path(self.folder.path, f"{stem}{number + n}") for n in (0, 1))
        mine = self.posted[receive.peer, receive.tag][0] is receive
        if mine and receive.tag < COLLECTIVE_TAGS and first.exists() and second.exists():
            contents = [file.read_bytes() for file in (first, second)]
            if len(contents[0]) == len(contents[1]):
                first.write_bytes(contents[1])
                second.write_bytes(contents[0])
        take(self, receive)

    backend.take = take


BUFFER = 1 << 16  # bytes; longer messages wait, as on a network


class Unwritten:
    """A send whose file is not there until ``done`` is called."""

    def __init__(self, isend: Any, files: Any, array: Any, *place: int) -> None:
        data = array.copy()
        self.write: Any = lambda: isend(files, data, *place)

    def done(self) -> bool:
        if self.write is not None:
            self.write()
        self.write = None
        return True


def without_copy(backend: Any) -> None:
    """A defect: the send of a long message is done although the next send writes it."""

    def isend(self: Any, array: Any, *place: int, isend: Any = backend.isend) -> Any:
        late: list[Unwritten] = vars(self).setdefault("late", [])
        while late:
            late.pop().done()
        if array.nbytes < BUFFER:
            return isend(self, array, *place)
        late.append(Unwritten(isend, self, array, *place))
        return SimpleNamespace(done=lambda: True)

    backend.isend = isend


def without_progress(backend: Any) -> None:
    """A defect: a rank that polls a receive from one rank does not continue its send to another rank."""

    def isend(self: Any, array: Any, *place: int, isend: Any = backend.isend) -> Any:
        return isend(self, array, *place) if array.nbytes < BUFFER else Unwritten(isend, self, array, *place)

    backend.isend = isend


@pytest.mark.parametrize(("change", "check", "cause"), [
    (without_copy, SEND, r"done\(\) of a send: expected True only if the message arrives without further calls of its "
     r"rank, got .*: recv #\d .*: not complete after 1.0 s"),
    (without_progress, PROGRESS, r"done\(\): expected to advance all messages of its rank, got "),
    (without_last, "broadcast float32", r"broadcast of 1 x float32, root \d: element 0 of 1 wrong: \[nan\] instead of"),
    (without_root, "broadcast float32", r"broadcast of 1 x float32, root 1: element 0 of 1 wrong: \[nan\] instead of"),
    (without_order, "messages_keep_their_order float32", r"messages of one tag: .* \(order.py:\d+: "),
    (without_agree, "op, calls differ", r"AssertionError: expected .* \(failures.py:\d+: "),
    (without_failed, "barrier, rank 0 gives up", r"AssertionError: expected .* \(failures.py:\d+: "),
    (without_cancel, "messages", r"CollectiveTimeout: .* rank \d sent nothing with tag 9 \(intact.py:\d+: comm"),
])  # fmt: skip
def test_the_suite_finds_a_backend_that_lacks_a_part(files, change, check, cause, caplog, monkeypatch):
    for module in (failures, intact):
        monkeypatch.setattr(module, "GRACE", 2.0)
    change(files)

    def body(rendezvous):
        with kos.init("files", rendezvous=rendezvous, timeout=2.0 if check in (SEND, PROGRESS) else TIMEOUT) as world:
            return run(world, only=check)

    with caplog.at_level(logging.INFO, "kos.testing.conformance"):
        results = run_ranks(2, body)
    assert all(check in broken for broken in results)
    assert re.search(rf"\d+ of \d+: {check}$", caplog.text, re.M)
    assert re.search(rf"BROKEN {check}: rank \d: .*{cause}", caplog.text), caplog.text


HANGS = """
import time
from kos.testing import conformance
from kos.testing.conformance.__main__ import main

agree, conformance.CHECK_SECONDS = Files.agree, 2.0

def without_timeout(backend, call, local):
    poll = agree(backend, call, local)
    def wait():
        while not poll():
            time.sleep(0.001)
        return True
    return poll and wait

Files.agree = without_timeout
raise SystemExit(main(["--backend", "files", "--ranks", "2", "--only", "all_reduce, a rank is late"]))
"""


def test_a_check_that_does_not_end_is_named():
    done = subprocess.run([*python(), "-c", "\n".join([*BLOCKS, HANGS])], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout.startswith("1 of 1: all_reduce, a rank is late\n"), done.stderr
    broken = r"^BROKEN all_reduce, a rank is late: rank 0: no end within 2 s:\n(.*\n)+  File .*, in wait$"
    assert re.search(broken, done.stdout, re.M)


def test_a_text_that_no_check_has_is_refused():
    with pytest.raises(kos.errors.InvalidArgument, match="only: expected a part of a promise's name, got 'nonesuch'"):
        run(kos.init("mock"), only="nonesuch")


def test_the_contracts_of_messages_are_checked_first():
    assert [case.name for case in cases()][:2] == [SEND, PROGRESS]
