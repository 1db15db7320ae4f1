"""Which copies of a linear layer's tensors are made in 8 bits, and which product reads which, from the layer itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from docs.drawings.svg import COLOURS, GREY, LIGHT, PALE, Picture
from kos.memory.arena import Arena
from kos.train.ops import numpy as ops
from kos.train.ops.fp8 import BACKWARD, FORWARD, WEIGHTS, Fp8Ops, Quantized, fp8_weights

N, D, F = 48, 16, 32
TENSORS = {"input": (N, D), "weights": (F, D), "output's gradient": (N, F)}
FORMS = {FORWARD: "E4M3", BACKWARD: "E5M2"}
NAMES = {N: "N", D: "D", F: "F"}


class Recorder:
    """The operations of a layer, which notes what is quantized, and which copies are multiplied."""

    one_scale = False

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.of = {id(x): name for name, x in tensors.items()}
        self.copies: dict[tuple[str, str], np.ndarray] = {}
        self.products: list[list[tuple[str, str]]] = []

    def quantize(self, x: Any, rows: Any, columns: Any, arena: Arena) -> None:
        for kind, made in (("rows", rows), ("columns", columns)):
            if made is not None:
                self.copies[self.of[id(x)], kind] = made.values

    def scaled_product(self, a: Any, b: Any, out: Any, *more: Any) -> None:
        copy_of = {id(made): copy for copy, made in self.copies.items()}
        self.products.append([copy_of[id(a.values)], copy_of[id(b.values)]])


def recorded() -> Recorder:
    """A forward and a backward of one layer."""
    tensors = {name: np.zeros(shape, np.float32) for name, shape in TENSORS.items()}
    x, weight, d_out = tensors.values()
    recorder, arena = Recorder(tensors), Arena(1 << 16)
    ops_8 = Fp8Ops(recorder, arena, alone=True)
    store = {"w": Quantized.empty((F, D), WEIGHTS, ops, np.zeros, np.zeros, name="w")}
    weights = fp8_weights({"w": weight}, store, recorder, arena)  # type: ignore[arg-type]
    saved = ops_8.empty_transposed((N, D), arena)
    assert saved is not None
    ops_8.linear(saved.of(x), weights["w"], np.zeros((N, F)))
    d = ops_8.gradient(d_out, arena)
    ops_8.linear_input_gradient(d, weights["w"], np.zeros((N, D)))
    ops_8.linear_weight_gradient(d, saved, np.zeros((F, D)), False, arena)
    return recorder


def copies_in_8_bits() -> str:
    recorder = recorded()
    picture = Picture("The tensors of a linear layer, their copies in 8 bits, and the three matmuls",
                      "N tokens, D features in, F out; sums run along the rows of both operands")  # fmt: skip
    top, step, places = picture.top + 8, 40, dict[tuple[str, str], float]()
    for index, (copy, made) in enumerate(recorder.copies.items()):
        places[copy] = top + index * step + 14
        picture.rect(240, top + index * step, 150, 28, LIGHT[list(TENSORS).index(copy[0])])
        shape = " x ".join(NAMES[size] for size in made.shape)
        picture.text(315, top + index * step + 18, f"{copy[1]}, {shape}, {FORMS[made.dtype]}")
    for name, shape in TENSORS.items():
        own = [y for (of, _), y in places.items() if of == name]
        middle = sum(own) / len(own)
        picture.rect(14, middle - 14, 160, 28, PALE)
        picture.text(94, middle + 4, f"{name}, {NAMES[shape[0]]} x {NAMES[shape[1]]}")
        for y in own:
            picture.line(174, middle, 238, y, GREY, head=True)
    titles = ("output, N x F", "input's gradient, N x D", "weights' gradient, F x D")
    for index, (title, operands) in enumerate(zip(titles, recorder.products, strict=True)):
        y = top + (2 * index + 0.5) * step + 14
        picture.rect(500, y - 14, 186, 28, PALE, COLOURS[index])
        picture.text(593, y + 4, title, colour=COLOURS[index])
        for copy in operands:
            picture.line(390, places[copy], 498, y, COLOURS[index], 1.5, head=True)
    return picture.svg(top + len(places) * step + 4)
