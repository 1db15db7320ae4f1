"""Join several results into one: ``python -m kos.bench.join FILE... --json JOINED``.

For a run that is too long for one command.  A row replaces the row of the same case in an earlier file.  If the files
are of several commits, each row names its commit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kos.bench.report import KEYS, Row, read, to_json
from kos.errors import ConfigError, KosError
from kos.reporting import ArgumentParser

CASE = ("op", "backend", "algorithm", "dtype", "bytes", "ranks", "mode", "redop", "in_place", "call")


def join(results: list[Row]) -> Row:
    """One result with all rows.  ConfigError if they were measured on different machines."""
    for key in ("hardware", "driver"):
        if len(found := {result[key] for result in results}) > 1:
            raise ConfigError(f"expected results of the same {key}, got {', '.join(sorted(map(str, found)))}")
    commits = {row.get("commit") or result["commit"] for result in results for row in result["rows"]}
    rows: dict[tuple[Any, ...], Row] = {}
    for result in results:
        for row in result["rows"]:
            own = {"commit": row.get("commit") or result["commit"]} if len(commits) > 1 else {}
            rows[tuple(row[key] for key in CASE)] = {**row, **own}
    ops = list(dict.fromkeys(row["op"] for row in rows.values()))
    versions = {
        name: " and ".join(dict.fromkeys(result["versions"][name] for result in results if name in result["versions"]))
        for name in {name: None for result in results for name in result["versions"]}
    }
    whole: Row = {}
    for result in reversed(results):
        whole |= {key: value for key, value in result.items() if key in ("limits", "skipped") or key not in KEYS}
    return {
        **{key: results[0][key] for key in ("hardware", "driver")},
        "versions": versions,
        "date": max(result["date"] for result in results),
        "commit": commits.pop() if len(commits) == 1 else None,
        "command": " && ".join(dict.fromkeys(result["command"] for result in results)),
        **whole,
        "rows": sorted(rows.values(), key=lambda row: ops.index(row["op"])),
    }


def main() -> None:
    parser = ArgumentParser(prog="python -m kos.bench.join", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="JOINED", required=True)
    options = parser.parse_args()
    try:
        options.json.write_text(to_json(join([read(file, *KEYS) for file in options.files])))
    except (KosError, OSError) as error:
        parser.exit(2, f"kos: error: {error}\n")


if __name__ == "__main__":
    main()
