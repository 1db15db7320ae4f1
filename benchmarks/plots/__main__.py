"""The command: ``python -m benchmarks.plots [--only NAME …] [--check]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plots
from benchmarks.plots.pictures import PICTURES
from benchmarks.plots.results import ROOT
from benchmarks.plots.tables import PAGES, renewed
from kos.commands import near, program
from kos.errors import install

IMAGES = ROOT / "docs" / "images"


def main(words: list[str] | None = None, pages: Sequence[Path] = PAGES) -> int:
    parser = argparse.ArgumentParser(
        program("benchmarks.plots"), description=plots.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PICTURES, help="draw only these pictures, write no table")
    parser.add_argument("--check", action="store_true", help="write nothing; name the pages whose tables differ")
    arguments = parser.parse_args(words)
    stale = 0
    for page in [] if arguments.only else pages:
        text = page.read_text()
        new = renewed(text, page)
        if new != text:
            stale += 1
            print(f"{near(page)}: {'tables differ' if arguments.check else 'tables written'}")
            if not arguments.check:
                page.write_text(new)
    if arguments.check:
        return 1 if stale else 0
    try:
        import matplotlib

        from benchmarks.plots import style
    except ImportError as error:
        raise SystemExit(f"kos: error: pictures need matplotlib: {install('plot')}") from error
    IMAGES.mkdir(exist_ok=True)
    for name in arguments.only or PICTURES:
        path = IMAGES / f"{name}.png"
        with matplotlib.rc_context(style.SETTINGS):
            style.save(PICTURES[name](), path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
