"""Chat with a trained model, by its chat template: ``python -m kos.train.chat RUN``.

Each line is a message. ``/tool NAME`` enters the result of a tool: the lines after it, up to an empty line.
``/reset`` begins a new chat. ``/exit`` ends the program, and so does Ctrl-D, except under mpirun. Ctrl-C ends an
answer, or with ``--tp`` the program.
"""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from kos.errors import ConfigError, DataError, raised_as
from kos.files import printing
from kos.train.sample import make_parser, run


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("kos.train.chat", __doc__ or "", 1000)
    parser.add_argument("--system", metavar="TEXT", help="a system message at the beginning of each chat")
    parser.add_argument("--tools", type=Path, metavar="FILE", help="a JSON list of the tools that the model may call")
    parser.epilog = (
        "Each line is a message. /tool NAME enters the result of a tool: the lines after it, up to an empty line. "
        "/reset begins a new chat. /exit ends the program, and so does Ctrl-D, except under mpirun: do not press it "
        "there. Ctrl-C ends an answer, or with --tp the program."
    )
    arguments = parser.parse_args(argv)
    with suppress(ImportError):
        import readline  # noqa: F401 (input gets a line editor with a history)

    def talk(model: Any, options: Mapping[str, Any], comm: Any) -> None:
        ask = partial(_ask, comm)
        tools = _tools(arguments.tools)
        beginning = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
        model.stream([""], **options)  # refuse wrong settings before the first message
        model.chat_prompt([*beginning, {"role": "user", "content": "?"}], tools)  # and a model without a template
        messages = [*beginning]
        while (text := ask()) is not None:
            text = text.strip()
            command, _, name = text.partition(" ")
            message = {"role": "user", "content": text}
            if command == "/tool":  # some templates write the name
                if (content := _lines(ask)) is None:
                    break
                message = {"role": "tool", **({"name": name} if name else {}), "content": content}
            if text == "/reset":
                messages = [*beginning]
            elif text:
                messages = _reply(model, [*messages, message], {**options, "tools": tools}, comm)

    return run(arguments, talk)


def _tools(file: Path | None) -> list[Any] | None:
    with raised_as(ConfigError, "--tools: expected a file with JSON", OSError, ValueError, RecursionError):
        tools = None if file is None else json.loads(file.read_text("utf-8"))
    if not isinstance(tools, list | None):
        raise ConfigError(f"--tools: expected a list of tools, got {reprlib.repr(tools)}")
    return tools


def _ask(comm: Any) -> str | None:
    """The user's next line, which rank 0 reads, on all ranks; None at the end of the program."""
    text: str | None = None
    if comm is None or comm.rank == 0:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
    if comm is not None:
        mine = json.dumps(text).encode() if comm.rank == 0 else None
        patience = None if comm.rank == 0 else math.inf  # a user may think for hours
        text = json.loads(comm.broadcast_bytes(mine, timeout=patience))
    return None if text is None or text.strip() == "/exit" else text


def _lines(ask: Callable[[], str | None]) -> str | None:
    """The user's next lines up to an empty one; None at the end of the program."""
    lines = list[str]()
    while (line := ask()) is not None and line.strip():
        lines.append(line)
    return None if line is None else "\n".join(lines)


def _reply(
    model: Any, messages: list[dict[str, str]], options: Mapping[str, Any], comm: Any
) -> list[dict[str, str]]:
    """Print the answer as it is generated; returns ``messages`` with it.

    If the last message cannot be encoded, the result lacks that message.  Several ranks cannot end an answer early.
    """
    pieces = list[str]()

    def say(piece: str) -> None:
        pieces.append(piece)
        with printing():
            print(piece, end="")

    try:
        with suppress(*([KeyboardInterrupt] if comm is None else [])):
            model.chat(messages, on_text=say, **options)
        with printing():
            print()
    except DataError as error:
        if comm is None or comm.rank == 0:
            print(f"kos: error: {error}", file=sys.stderr)
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": "".join(pieces)}]


if __name__ == "__main__":
    sys.exit(main())
