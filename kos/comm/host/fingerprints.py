"""Fingerprints of calls: numbers that are equal on two ranks exactly if their calls match.

A description of the call goes with each, for the error of a rank whose call differs.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import numpy as np

from kos.comm.prepared import Prepared
from kos.dtypes import DTYPES

TEXTS, TEXT_BYTES = 256, 1024
"""Descriptions of calls kept per rank, and bytes of each."""

_DTYPES = [entry.numpy for entry in DTYPES.values()]
DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
"""The number that stands for a dtype in a message."""


def dtype_of_code(code: int) -> np.dtype[Any]:
    return _DTYPES[code % len(_DTYPES)]


class Fingerprints:
    """The fingerprints of one rank's calls."""

    def __init__(self) -> None:
        self.texts: dict[int, bytes] = {}  # the descriptions of the last calls, by fingerprint
        self._places: dict[int, int] = {}  # and where they are published

    def add(self, prepared: Prepared) -> Prepared:
        """Set the fingerprint of a collective and its description, and publish that."""
        if not prepared.collective:
            return prepared
        values, texts = prepared.values, self.texts
        exact = json.dumps(values, sort_keys=True).encode()
        prepared.fingerprint = fingerprint = int.from_bytes(blake2b(exact, digest_size=7).digest(), "little") + 1
        if fingerprint not in texts:
            place = len(texts)
            if place == TEXTS:
                oldest = next(iter(texts))
                place = self._places.pop(oldest)
                del texts[oldest]
            arguments = prepared.operation.text(prepared.backend.group_suffix)[:200]
            text = json.dumps([fingerprint, arguments, {k: _brief(v) for k, v in values.items()}]).encode()
            texts[fingerprint], self._places[fingerprint] = text, place
            self._publish(place, text)
        prepared.text = texts[fingerprint]
        return prepared

    def _publish(self, index: int, text: bytes) -> None:
        """Publish a description to other ranks."""


def described(text: bytes, sequence: int, fingerprint: int | None = None) -> tuple[str, dict[str, Any]]:
    """The call that a rank described, as text and as fingerprint values.

    Raises KeyError if it has another ``fingerprint``, ValueError if it is incomplete.
    """
    known, arguments, call = json.loads(text)
    if fingerprint not in (None, known):
        raise KeyError(fingerprint)
    return f"{call['operation']} #{sequence}{arguments}", call


def _brief(value: Any) -> Any:
    """A value of a fingerprint, with long lists shortened to their head and a digest."""
    if isinstance(value, list) and len(value) > 16:
        digest = blake2b(json.dumps(value).encode(), digest_size=4).hexdigest()
        return f"[{', '.join(map(str, value[:8]))}, ... {len(value)} in all, digest {digest}]"
    return value
