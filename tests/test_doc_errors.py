"""docs/reference/errors.md quotes the messages of the code."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos
import kos.errors
from kos.testing import spawn
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


def alone(call: str) -> Callable[[], Any]:
    """``call`` on a group of one."""

    def run() -> None:
        with kos.init() as comm:
            eval(call, {"comm": comm, "x": np.ones(4)})

    return run


OF_RENDEZVOUS = ROOT / "tests" / "comm" / "test_env_rendezvous.py"
"""Its texts are those of the errors that it has met, some of which are put together."""
PUT_TOGETHER: dict[str, Callable[[], Any]] = {
    "InvalidArgument: root: expected a rank from 0 to …, got …": alone("comm.broadcast(x, root=3)"),
    "InvalidArgument: dst: expected a rank from 0 to …, got …": alone("comm.send(x, 3)"),
    "InvalidArgument: tag: expected a number from 0 to …, got …": lambda: spawn(
        lambda comm: comm.recv(np.ones(1), 1 - comm.rank, tag=-1), 2
    ),
    'InvalidArgument: color: expected a whole number or None or "host", got …': alone("comm.split('rack')"),
    "InvalidArgument: algorithm: expected 'auto' or one of … for …, got …": alone(
        "comm.all_reduce(x, algorithm='none')"
    ),
}
"""Messages whose words are put together of more than literals."""


@pytest.mark.parametrize("line", PUT_TOGETHER)
def test_a_message_that_is_put_together_is_as_quoted(line):
    kind, text = split(line)
    pattern = ".*".join(map(re.escape, text.split(VALUE)))
    with pytest.raises(getattr(kos.errors, kind)) as caught:
        PUT_TOGETHER[line]()
    assert re.fullmatch(pattern, str(caught.value), re.S) and line in QUOTED, f"{line}, got {caught.value}"


def test_the_words_of_quoted_messages_are_in_the_code():
    """They are in one literal of kos or of ``OF_RENDEZVOUS``, or each clause of the message is in one."""
    texts, missing = "\n".join([literals(ROOT / "kos"), *texts_of(OF_RENDEZVOUS)]), list[str]()
    for line in [each for each in QUOTED if each not in PUT_TOGETHER]:
        for fragment in [each.strip(" ,;:()<>'\"") for each in split(line)[1].split(VALUE)]:
            clauses = re.split(r"; |: |, | \(|(?<=expected) ", fragment)
            if fragment not in texts and not all(clause.strip("()") in texts for clause in clauses):
                missing.append(f"{line}: {fragment}")
    assert missing == []


def test_the_texts_of_timeouts_are_in_one_file():
    words = re.compile("(not complete|not begun by all ranks|running) after … s|within … s"
                       "|went no further|still waiting|… (did not arrive|did not receive|sent nothing with)")
    others = [path for path in sorted((ROOT / "kos").rglob("*.py"))
              if path.relative_to(ROOT / "kos").parts[0] in ("comm", "interop", "testing")
              and path.name not in ("timeouts.py", "analysis.py", "ray.py")]  # the flight recorder's, and Ray's actors'
    assert [path.name for path in others for text in texts_of(path) if words.search(text)] == []
