"""Fingerprints of calls: numbers that are equal on two ranks exactly if their calls match.

A description of the call goes with each, for the error of a rank whose call differs.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import numpy as np

from kos.comm.operation import Call
from kos.dtypes import DTYPES

TEXTS, TEXT_BYTES = 256, 1024
"""Descriptions of calls kept per rank, and bytes of each."""

_DTYPES = [entry.numpy for entry in DTYPES.values()]
DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
"""The number that stands for a dtype in a message."""


def dtype_of_code(code: int) -> np.dtype[Any]:
    return _DTYPES[code % len(_DTYPES)]


class Fingerprints:
    """The fingerprints of one rank's calls, cached by their arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self.texts: dict[int, bytes] = {}  # the descriptions of the last calls, by fingerprint

    def mark(self, call: Call) -> int:
        """The fingerprint of ``call``, also stored in ``call.mark``."""
        o, options, route = call.operation, call.operation.options, call.route
        buffer, reduction, counts = o.send or o.recv, o.reduction, o.send_counts or o.recv_counts
        key = (
            o.name, buffer and buffer.shape, buffer and buffer.dtype, reduction and reduction.op, o.root,
            options.algorithm, options.deterministic, options.purpose, route and route.backend, route and route.kernel,
            counts and (tuple(o.send_counts or ()), tuple(o.recv_counts or ())),
        )  # fmt: skip
        call.mark = self._known.get(key) or self._add(key, call)
        return call.mark

    def _add(self, key: Any, call: Call) -> int:
        """The fingerprint of a new kind of call; publishes its description."""
        print_ = call.fingerprint()
        exact = json.dumps(print_, sort_keys=True).encode()
        fingerprint = int.from_bytes(blake2b(exact, digest_size=7).digest(), "little") + 1
        if len(self._known) == TEXTS:
            self._known.clear()
            self.texts.clear()
        arguments = call.arguments[:200]
        text = json.dumps([fingerprint, arguments, {k: _brief(v) for k, v in print_.items()}]).encode()
        self.texts[fingerprint] = text
        self._publish(len(self._known), text)
        self._known[key] = fingerprint
        return fingerprint

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
