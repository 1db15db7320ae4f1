"""What compressed gradients have lost so far (``--compress``), as checkpoints hold it: each replica's own.

A replica is one of the ranks of dp and cp, which hold the same weights.  ``residual-*.safetensors`` have whole tensors,
``residual.0.NAME`` those of the first.  Only their sum over replicas matters: another number of them shares it out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kos.train.checkpoint.checkpoint import whole
from kos.train.checkpoint.extra_files import MANIFEST
from kos.train.checkpoint.huggingface import TensorFiles
from kos.train.checkpoint.write_plan import RESIDUAL, residual_shapes
from kos.train.config.options import TrainConfig
from kos.train.model.parameters import Shape

_log = logging.getLogger(__name__)


class Residuals:
    """The residual of replica ``rank`` of ``ranks``, from those of ``saved`` replicas in a checkpoint.

    ``local`` neighbours, a host, share those of ``local`` replicas: each needs the sum over them of what it keeps.
    Gradients are sums over the micro-batches of a step: in a run with ``scale`` times as many, what is missing of them
    is as much larger.
    """

    def __init__(self, files: TensorFiles, saved: int, rank: int, ranks: int, scale: float, local: int = 1) -> None:
        self._files, self.saved, self._scale = files, saved, np.float32(scale)
        self._own = [each for each in range(saved) if each % ranks // local == rank // local]

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor, or a slice of it: the sum over this replica's share of those that are saved."""
        terms = [self._files.read(f"{RESIDUAL}.{replica}.{name}", index) for replica in self._own or [0]]
        total = terms[0] * (self._scale if self._own else 0)
        for term in terms[1:]:
            total += term * self._scale
        return np.asarray(total)


def saved_residuals(
    path: Path, shapes: Mapping[str, Shape], config: TrainConfig, rank: int, ranks: int, local: int
) -> Residuals | None:
    """Those in a checkpoint of a model of these shapes, for a run of ``config``; None if it has none."""
    with whole(path):
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = [name for name in manifest["files"] if name.startswith(RESIDUAL)]
        if not files:
            return None
        saved = manifest["layout"]["dp"] * manifest["layout"]["cp"]
        theirs = manifest["config"]["config"] | manifest["config"]["derived"]
        batch, micro = theirs["batch_size"], theirs["micro_batch_size"]
        assert config.micro_batch_size is not None
        scale = config.batch_size * micro / (batch * config.micro_batch_size)
    named = {name: shape for replica in range(saved) for name, shape in residual_shapes(replica, shapes).items()}
    return Residuals(TensorFiles(path, files, named), saved, rank, ranks, scale, local)


def warn_of_residuals(path: Path, found: Residuals | None, config: TrainConfig, ranks: int) -> None:
    """Log what becomes of residuals if not each of so many replicas gets its own of the checkpoint at ``path``."""
    saved, keeps = 0 if found is None else found.saved, config.compress != "none" and ranks > 1
    if saved and not keeps:
        why = "--compress is none" if config.compress == "none" else "one rank sends no gradients"
        _log.warning("%s: what compressed gradients of %d ranks have lost is left out: %s", path, saved, why)
    elif keeps and not saved:
        _log.warning("%s: expected residuals of compressed gradients, got none: they begin as zeros", path)
    elif keeps and saved != ranks:
        _log.warning("%s: the residuals of %d ranks are shared out over %d; their sum stays", path, saved, ranks)
