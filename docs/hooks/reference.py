"""The text in docs/reference that comes from the code: docstrings, commands with their arguments, variables.

In a page, a name of the API is a line ``- `kos.init```, and the site shows its docstring instead.  The commands are
between ``<!-- commands -->`` and ``<!-- end -->``: ``python -m docs.hooks.reference`` writes their headings, and the
site adds their arguments.  It also writes the table of ``kos.environment`` after ``<!-- variables -->``.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from docs.hooks.commands import outline, sections  # python -m mkdocs puts the repository on the path
from kos import environment

log = logging.getLogger("mkdocs.hooks.reference")

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"^- `(?P<name>kos[\w.]*)`$", re.M)
COMMANDS = re.compile(r"(?<=^<!-- commands -->\n\n).*?(?=\n<!-- end -->$)", re.M | re.S)
VARIABLES = re.compile(r"(?<=^<!-- variables -->\n\n).*?(?=\n<!-- end -->$)", re.M | re.S)

ALL = ("members: null",)
WITH_INIT = ("merge_init_into_class: true",)
OPTIONS: dict[str, tuple[str, ...]] = {
    "kos.PremulSum": WITH_INIT,
    "kos.comm.Batch": ("members: [wait, works]",),
    "kos.comm.NCCLOptions": ALL,
    "kos.comm.contract.Backend": ALL,
    "kos.comm.contract.Request": ALL,
    "kos.comm.control.base.ControlPlane": ALL,
    "kos.comm.operation.Operation": ("members: [collective]",),
    "kos.comm.prepared.Prepared": ALL,
    "kos.comm.recorder.Recorder": ("members: [entries, to_dict, dump, try_dump]",),
    "kos.comm.recorder.analysis.Dump": ("members: [last_operation]",),
    "kos.comm.schedules.Schedule": ("members: [rounds, units, spaces, start]",),
    "kos.comm.schedules.schedule.Moves": WITH_INIT,
    "kos.cuda.DeviceInfo": ALL,
    "kos.cuda.Graph": ("members: [keep, replay, close]",),
    "kos.cuda.Kernel": ("members: [__call__, bind]", "filters: []"),
    "kos.cuda.on_device": WITH_INIT,
    "kos.dtypes.DType": ALL,
    "kos.errors.KosError": ("members: [on_every_rank, ranks, unasked]",),
    "kos.interop.flashinfer.CommBackend": (*ALL, *WITH_INIT),
    "kos.interop.ray.Collectives": ALL,
    "kos.interop.torch.Options": ALL,
    "kos.memory.Array": (
        "members: [empty, zeros, from_numpy, from_dlpack, size, ndim, nbytes, reshape, view, __getitem__, copy_from, "
        "copy_to, fill_bytes, numpy]",
        "filters: []",
    ),
    "kos.memory.Buffer": ("members: [result, nbytes, address, place, overlaps]",),
    "kos.testing.Fault": WITH_INIT,
}
"""What the site shows of a class besides its docstring: options of mkdocstrings."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put a directive of mkdocstrings for each name, and the arguments of commands; warn if the page is outdated."""
    if not page.file.src_uri.startswith("reference/"):
        return markdown
    if renewed(markdown) != markdown:
        log.warning("%s: expected what the code says: python -m docs.hooks.reference", page.file.src_uri)
    return COMMANDS.sub(lambda _: sections(), NAME.sub(directive, markdown))


def directive(line: re.Match[str]) -> str:
    """The directive that mkdocstrings replaces by the docstring."""
    options = OPTIONS.get(line["name"], ())
    return "\n".join([f"\n::: {line['name']}", *["    options:"] * bool(options), *(f"      {o}" for o in options), ""])


def renewed(text: str) -> str:
    """The page with the current commands and variables."""
    return VARIABLES.sub(lambda _: variables(), COMMANDS.sub(lambda _: outline(), text))


def variables() -> str:
    """The table of the variables of kos."""
    lines = ["| variable | default | what it does | read by |", "|---|---|---|---|"]
    for each in environment.VARIABLES.values():
        default = f"`{each.default}`" if each.default.isdigit() else each.default
        lines.append(f"| `{each}` | {default} | {each.about} | {each.read_by} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    for path in sorted((ROOT / "docs" / "reference").glob("*.md")):
        path.write_text(renewed(path.read_text()))
