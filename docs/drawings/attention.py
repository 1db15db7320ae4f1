"""Which blocks of queries and keys attention computes under a mask, from ``attention_mask`` itself."""

from __future__ import annotations

import numpy as np

from docs.drawings.svg import COLOURS, GREY, LIGHT, PALE, WIDTH, Picture
from kos.train.ops import Mask
from kos.train.ops import numpy as ops

BLOCK, BLOCKS = 128, 12
LENGTHS = (200, 500, 60, 300, 476)
"""Of documents, in tokens."""
WINDOW = 300
PANELS = (("causal", False, None), ("documents", True, None), (f"window of {WINDOW}", False, WINDOW),
          ("both", True, WINDOW))  # fmt: skip


def attention_blocks() -> str:
    length = BLOCK * BLOCKS
    begins = np.cumsum((0, *LENGTHS))
    starts = begins[np.searchsorted(begins, np.arange(length), side="right") - 1].astype(np.int32)[None]
    documents = ", ".join(map(str, LENGTHS))
    picture = Picture("Blocks of queries (down) and keys (across) that attention computes",
                      f"{length:,} tokens in blocks of {BLOCK}; documents of {documents} tokens")  # fmt: skip
    side, size = (WIDTH - 28) / len(PANELS), 12
    top = picture.top + 14
    for panel, (name, of_documents, window) in enumerate(PANELS):
        mask = Mask(*np.zeros((2, 1, length), np.int32))
        ops.attention_mask(starts if of_documents else None, window, mask)
        computed, left = 0, 14 + panel * side + (side - size * BLOCKS) / 2
        for q, k in np.ndindex(BLOCKS, BLOCKS):
            low, high = mask.first_key[0][[q * BLOCK, q * BLOCK + BLOCK - 1]]
            seen = low // BLOCK <= k <= q
            fill = PALE if not seen else LIGHT[0] if k == q or k * BLOCK < high else COLOURS[0]
            picture.rect(left + k * size, top + q * size, size - 1, size - 1, fill)
            computed += bool(seen)
        middle, bottom = left + size * BLOCKS / 2, top + size * BLOCKS
        picture.text(middle, top - 8, name, bold=True)
        picture.text(middle, bottom + 16, f"{computed} blocks", colour=GREY)
    legend = (("computed", COLOURS[0]), ("computed, some scores hidden", LIGHT[0]), ("skipped", PALE))
    for x, (words, colour) in zip((120, 280, 530), legend, strict=True):
        picture.rect(x - 18, bottom + 28, 12, 12, colour)
        picture.text(x, bottom + 38, words, anchor="start")
    return picture.svg(bottom + 52)
