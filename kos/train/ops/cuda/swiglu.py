"""SwiGLU on a GPU: kernels of its own, or its backward within the matmul before it (``kernels/swiglu_hopper.cu``)."""

from __future__ import annotations

from typing import Any

from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops.cuda.attention import Tokens
from kos.train.ops.cuda.cublaslt import fastest

HOPPER = "sm_90a"
ROWS, COLUMNS, THREADS = 128, 256, 384  # of a tile, of a block
SHARED = 2048 + 4 * 2 * 64 * (ROWS + COLUMNS)  # bytes: four stages, and what aligns them
APART, FUSED = "apart", "fused"  # the values of ``algorithms``: two kernels, or one


class SwigluOps:
    """SwiGLU of ``CudaOps``, which launches its kernels."""

    search = False
    """Whether shapes that ``algorithms`` lacks are measured."""

    hopper = False
    """Whether this GPU has the tensor cores of the kernels in ``*_hopper.cu``."""

    algorithms: dict[str, str]
    multiprocessors: int
    stream: Any
    launch: Any
    linear_input_gradient: Any
    _elementwise: Any

    def swiglu(self, gate_up: Array, out: Array, arena: Arena) -> None:
        self._elementwise("swiglu", out, gate_up, out, row=out.shape[1], COLUMNS=out.shape[1])

    def swiglu_backward(self, d_out: Array, gate_up: Array, out: Array | None, d_gate_up: Array, arena: Arena) -> None:
        columns = d_out.shape[1]
        self._elementwise("swiglu_backward", d_out, d_out, gate_up, d_gate_up, row=columns, COLUMNS=columns)

    def fuses_swiglu(self, d_out: Any, weight: Any, gate_up: Array, arena: Arena) -> bool:
        operands = d_out, weight, gate_up
        taken = all(type(x) is Array and x.dtype.name == "bfloat16" and x.pointer % 16 == 0 for x in operands)
        if not (self.hopper and taken) or weight.shape[1] % 64 or d_out.shape[1] % 8:
            return False
        name = f"linear_swiglu_backward {d_out.shape} {weight.shape}"
        if name not in self.algorithms and self.search:
            with arena.scope():
                d_inner = arena.take((len(gate_up), weight.shape[1]), gate_up.dtype)
                d_gate_up = arena.take(gate_up.shape, gate_up.dtype)

                def apart() -> None:
                    self.linear_input_gradient(d_out, weight, d_inner)
                    self.swiglu_backward(d_inner, gate_up, None, d_gate_up, arena)

                def fused() -> None:
                    self.linear_swiglu_backward(d_out, weight, gate_up, d_gate_up, arena)

                apart()  # finds the algorithm of the matmul
                self.algorithms[name] = (APART, FUSED)[fastest([apart, fused], self.stream)]
        return self.algorithms.get(name, FUSED) == FUSED  # --deterministic times nothing; FUSED is usually faster

    def linear_swiglu_backward(
        self, d_out: Array, weight: Array, gate_up: Array, d_gate_up: Array, arena: Arena
    ) -> None:
        (m, k), n = d_out.shape, weight.shape[1]
        blocks = min(-(-m // ROWS) * -(-n // COLUMNS), self.multiprocessors)
        maps = (Tokens(x, 1, len(x)) for x in (d_out, weight, gate_up, d_gate_up))
        self.launch("swiglu_hopper.cu", "linear_swiglu_backward", blocks, THREADS, *maps, m, n, k, shared=SHARED)
