"""torch.compile over kos beside another process group, by case and compiler: ``torch_compiled_programs.matrix``.

    python -m tests.interop.torch_compiled          # CPUs, beside gloo
    python -m tests.interop.torch_compiled cuda     # two GPUs, beside NCCL; parts of the matrix may follow

On 2 ranks.  Writes for each case the compilers with which kos gives equal results to ``torch_compiled.json``, under the
version of torch and the device.  ``gpu`` of kos is "auto".
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.interop.ranks import run

TABLE = Path(__file__).with_suffix(".json")
REFERENCE = {"cpu": "gloo", "cuda": "nccl"}
PARTS, COMPILERS = ("collectives", "functional", "models"), ("none", "eager", "aot_eager", "inductor")
IN_GRAPH = ("together", "gradients_of_functional", "tensor_parallel")
"""The cases in which collectives are compiled: all calls of "functional" in one graph, and two models."""


def compare(parts: Sequence[str], compiler: str, kind: str, cache: str) -> dict[str, Any]:
    """For each case "equal", or the results of kos and of the other process group, by rank.

    ``parts`` may name single models too.  Only models round, and only a compiler that changes operations changes the
    rounding.  In other cases, the other process group runs without a compiler.
    """
    ours = _results("kos", parts, compiler, kind, cache)
    exact = compiler == "eager" or {*parts} <= {*PARTS[:2]}
    theirs = _results(REFERENCE[kind], parts, "none" if exact else compiler, kind, cache)
    rows = {case: [[each[case] for each in ranks] for ranks in (ours, theirs)] for case in ours[0]}
    return {case: "equal" if kos == other and not _failed(kos) else [kos, other] for case, (kos, other) in rows.items()}


def _results(backend: str, parts: Sequence[str], compiler: str, kind: str, cache: str) -> list[dict[str, Any]]:
    """What each rank has for each case; that without a compiler is kept for the calls to come."""
    key = (backend, *parts, kind)
    if compiler == "none" and key in _plain:
        return _plain[key]
    found = run("tests.interop.torch_compiled_programs:matrix", 2, backend, parts, compiler, kind, cache)
    return _plain.setdefault(key, found) if compiler == "none" else found


_plain: dict[tuple[str, ...], list[dict[str, Any]]] = {}


def _failed(ranks: list[Any]) -> bool:
    return any(isinstance(result, str) for result in ranks)


def main(kind: str = "cpu", *parts: str) -> None:
    import torch

    equal: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for compiler in COMPILERS:
            for part in parts or PARTS:
                for case, found in compare([part], compiler, kind, cache).items():
                    equal.setdefault(case, []).extend([compiler] if found == "equal" else [])
                    print(compiler, case, found, flush=True)
    device = kind if kind == "cpu" else torch.cuda.get_device_name()
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    rows = table.setdefault(f"torch {torch.__version__}, {device}", {})
    rows |= {case: " ".join(compilers) for case, compilers in equal.items()}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
