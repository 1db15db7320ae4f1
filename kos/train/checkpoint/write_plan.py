"""Which rank writes which tensors of a checkpoint, and to which files.

Tensors are whole in the files, so that a checkpoint is a Hugging Face folder and loads in any layout. Each tensor has
one writer. The ranks of a pipeline stage write its tensors side by side, about equally many bytes each. Megatron-LM's
fully parallel saving shares the work so among data-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

from kos.train.model.llama import LlamaConfig, Stages
from kos.train.model.parameters import Shape
from kos.train.parallel.mesh import Layout

State = Mapping[str, Container[str]]
"""What an optimizer keeps, by name, and the names of the tensors of which it does."""


RESIDUAL = "residual"
"""The beginning of the names of files that hold what compressed gradients have lost, and of the tensors in them."""


class WritePlan:
    """``writers`` names the rank that writes each tensor; ``shapes`` are those of the whole tensors.

    ``state`` names what the optimizer keeps, and of which tensors. Files hold fp32.  With ``compress`` each rank of dp
    and cp, a replica, also keeps its residual.
    """

    def __init__(
        self, model: LlamaConfig, layout: Layout, stages: Stages, state: State, compress: str = "none"
    ) -> None:
        self.state = state
        self.shapes: Mapping[str, Shape] = model.parameter_shapes()
        self.writers: dict[str, int] = {}
        several = layout.dp * layout.cp > 1 and compress != "none"
        self.residuals = [dict[str, int]() for _ in range(layout.dp * layout.cp * several)]
        """The rank that writes each tensor of a replica's residual: one of those that hold a part of it."""
        self._layout = layout
        for pp in range(layout.pp):
            names = model.placements(*model.parts(0, layout.tp, pp, stages))
            sizes = {name: math.prod(self.shapes[name]) for name in names if name not in self.writers}
            first = layout.rank({"pp": pp})
            self.writers |= _shared_out(sizes, first, layout.ranks // layout.pp)
            for replica, writers in enumerate(self.residuals):
                writers |= _shared_out(sizes, first + replica * layout.tp, layout.tp)
        self.ranks = sorted(set(self.writers.values()))
        """The ranks that write any."""

    def names(self, rank: int) -> list[str]:
        """The tensors that a rank writes, in the order of the layout."""
        return [name for name in self.shapes if self.writers[name] == rank]

    def file(self, kind: str, rank: int) -> str:
        """The name of the ``model`` or ``optimizer`` file of a rank."""
        place = f"-{self.ranks.index(rank) + 1:05}-of-{len(self.ranks):05}" if len(self.ranks) > 1 else ""
        return f"{kind}{place}.safetensors"

    def contents(self, rank: int) -> dict[str, dict[str, Shape]]:
        """File -> the tensors that a rank writes to it, in order."""
        files = dict[str, dict[str, Shape]]()
        if shapes := {name: self.shapes[name] for name in self.names(rank)}:
            files[self.file("model", rank)] = shapes
            files[self.file("optimizer", rank)] = state_shapes(self.state, shapes)
        for replica, writers in enumerate(self.residuals):
            mine = {name: shape for name, shape in self.shapes.items() if writers[name] == rank}
            if mine:
                file = f"{RESIDUAL}-{rank + 1:05}-of-{self._layout.ranks:05}.safetensors"
                files[file] = residual_shapes(replica, mine)
        return files

    def index(self) -> dict[str, object]:
        """Hugging Face's index of the weights' files."""
        size = sum(4 * math.prod(shape) for shape in self.shapes.values())
        weight_map = {name: self.file("model", self.writers[name]) for name in self.shapes}
        return {"metadata": {"total_size": size}, "weight_map": weight_map}

    def host_bytes(self, rank: int, all_at_once: bool) -> int:
        """Host memory that a rank takes at most to save: a tensor, and either its part of the state or two more."""
        files = self.contents(rank).values()
        sizes = [4 * math.prod(shape) for shapes in files for shape in shapes.values()]
        share, most = sum(sizes), max(sizes, default=0)
        return most + (share if all_at_once else min(share, 2 * most))


def _shared_out(sizes: Mapping[str, int], first: int, ranks: int) -> dict[str, int]:
    """Tensors by the rank that writes each, of so many from ``first`` on."""
    given, writers = [0] * ranks, dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rank = given.index(min(given))
        given[rank] += sizes[name]
        writers[name] = first + rank
    return writers


def residual_shapes(replica: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The names in files of a replica's residual, ``residual.0.NAME``, and the shapes."""
    return {f"{RESIDUAL}.{replica}.{name}": shape for name, shape in shapes.items()}


def state_shapes(state: State, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The names in files of an optimizer's state, ``exp_avg.NAME``, and the shapes."""
    return {f"{kept}.{name}": shape for kept, of in state.items() for name, shape in shapes.items() if name in of}
