"""The pictures of docs/how-it-works, drawn from data: ``python -m docs.drawings`` writes all of them.

Schedules come from their builders, the step on a GPU from the planner's dry step, attention's blocks from its masks,
copies in 8 bits from a layer that runs, the house from the imports of kos.
Protocols are listed message by message.  ``tests/test_doc_reference.py`` compares the files with what is drawn.
"""

from __future__ import annotations

from pathlib import Path

from docs.drawings import protocols
from docs.drawings.attention import attention_blocks
from docs.drawings.collectives import collective
from docs.drawings.fp8 import copies_in_8_bits
from docs.drawings.house import house
from docs.drawings.training import gpu_step, pipeline
from kos.comm.schedules import build
from kos.train.parallel.schedules import SCHEDULES

IMAGES = Path(__file__).resolve().parents[1] / "images" / "how-it-works"


def pictures() -> dict[str, str]:
    """Every picture as SVG, by the name of its file without the suffix."""
    return {
        "ring": collective(build("all_reduce", "ring", 4)),
        "tree": collective(build("all_reduce", "tree", 4, chunks=2)),
        "double-tree": collective(build("all_reduce", "double_tree", 4)),
        "halving-doubling": collective(build("all_reduce", "halving_doubling", 4)),
        "hierarchical": collective(build("all_reduce", "hierarchical", 4, ranks_per_node=2)),
        "one-shot": collective(build("all_reduce", "one_shot", 4)),
        "two-shot": collective(build("all_reduce", "two_shot", 4)),
        "two-shot-broadcast": collective(build("broadcast", "two_shot", 4)),
        "chain": collective(build("scan", "chain", 4, chunks=2)),
        "pairwise": collective(build("all_to_all", "pairwise", 4)),
        "packets": protocols.packets(),
        "batches": protocols.batches(),
        "shared-memory": protocols.shared_memory(),
        "core": protocols.core(),
        "core-gpu": protocols.core_gpu(),
        "messages": protocols.messages(),
        "rendezvous": protocols.rendezvous(),
        "failures": protocols.failures(),
        "replacement": protocols.replacement(),
        "transfer": protocols.transfer(),
        "watchdog": protocols.watchdog(),
        "gpu-step": gpu_step(zero=0),
        "gpu-step-zero": gpu_step(zero=1),
        "attention": attention_blocks(),
        "fp8": copies_in_8_bits(),
        **{name: pipeline(name) for name in SCHEDULES},
        "house": house(),
    }


def write() -> None:
    """Write every picture to ``IMAGES``."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures().items():
        (IMAGES / f"{name}.svg").write_text(svg)
