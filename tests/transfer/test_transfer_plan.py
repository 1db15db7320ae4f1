"""Plans read every element exactly once: random layouts of both sides, against NumPy."""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kos.dtypes import DTYPES
from kos.errors import InvalidArgument
from kos.transfer import Array, Offers, Part, Placement, Plan, placements
from kos.transfer.placement import box
from kos.transfer.plan import Layout
from tests.transfer.publishing import held

F32 = DTYPES["float32"]
Tensors = dict[str, np.ndarray]


def carry_out(plan: Plan, sources: Sequence[Layout], tensors: Tensors) -> None:
    """Copy as the plan says, and compare with the tensors; each element is written once."""
    memory = [{name: held(array.placement, tensors) for name, array in layout.items()} for layout in sources]
    for rank, layout in enumerate(plan.wants):
        into = {name: np.full(array.placement.count, -2.0, np.float32) for name, array in layout.items()}
        times = {name: np.zeros(array.placement.count, int) for name, array in layout.items()}
        for copy in plan.copies(rank):
            source = copy.source.part.view(memory[copy.source.rank][copy.source.array], copy.start, copy.size)
            copy.part.view(into[copy.array], copy.start, copy.size)[...] = source
            view = copy.part.view(times[copy.array], copy.start, copy.size)
            view += 1
        for name, array in layout.items():
            assert (times[name] == 1).all()
            assert (into[name] == held(array.placement, tensors)).all()


@st.composite
def layouts(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]]) -> list[Layout]:
    """What some ranks hold: every tensor whole, cut along an axis, or as slices of the flattened tensor."""
    ranks = draw(st.integers(1, 4))
    found: list[dict[str, Array]] = [{} for _ in range(ranks)]
    for name, shape in shapes.items():
        kind = draw(st.sampled_from(["whole", "cut", "flat", "transposed"]))
        axis = draw(st.integers(0, max(0, len(shape) - 1)))
        length = shape[axis] if kind == "cut" and shape else math.prod(shape)
        ends = sorted(draw(st.lists(st.integers(0, length), min_size=ranks - 1, max_size=ranks - 1)))
        bounds = [0, *ends, length]
        for rank in range(ranks):
            low, high = bounds[rank], bounds[rank + 1]
            if kind == "cut" and shape:
                placed = Placement.cut(shape, axis, low, high - low)
                placed = placed.transposed if high > low and draw(st.booleans()) else placed
            elif kind in ("flat", "cut"):
                placed = Placement.whole(shape).flat(low, high)
            else:
                placed = Placement.whole(shape)
                placed = placed.transposed if kind == "transposed" else placed
                placed = placed.flat(low, high) if kind == "transposed" and draw(st.booleans()) else placed
            found[rank][f"array {name}"] = Array(F32, placed.named(name))
    return [*found]


SHAPES = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=3
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_element_is_read_once(data):
    shapes = data.draw(SHAPES)
    tensors = {
        name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + 1000 * index
        for index, (name, shape) in enumerate(shapes.items())
    }
    offers, wants = data.draw(layouts(shapes)), data.draw(layouts(shapes))
    for layout in (*offers, *wants):
        for name, array in layout.items():
            array.placement.check(name)
    plan = Plan(Offers.of(offers), wants)
    plan.check()
    carry_out(plan, offers, tensors)
    counted = {}
    for rank, layout in enumerate(wants):
        for copy in plan.copies(rank):
            key = copy.source.rank, rank
            counted[key] = counted.get(key, 0) + copy.nbytes(layout[copy.array].dtype)
    assert plan.traffic() == counted


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Placement.whole((4, 4), "v"), r"v: expected a tensor of the publisher, got none of that name \(closest: w\)"),
        (Placement.whole((4, 5), "w"), r"w: .* has shape \(4, 4\), got parts of a tensor of shape \(4, 5\)"),
        (Placement.whole((4, 4), "w"), "w: expected every element on a publisher rank, got none for 3:4, 0:4"),
        (Placement.whole((2,), "i"), "i: expected int32, as published, got float32"),
    ],
)
def test_what_cannot_be_read_is_named(wanted, expected):
    whole = Array(DTYPES["int32"], Placement.whole((2,), "i"))
    offers = Offers.of([{"w": Array(F32, Placement.cut((4, 4), 0, 0, 3, "w")), "i": whole}])
    with pytest.raises(InvalidArgument, match=expected):
        Plan(offers, [{"x": Array(F32, wanted)}]).check()


def test_a_wrong_plan_is_found():
    """``check`` does not trust the code that makes plans."""
    layout = {"w": Array(F32, Placement.whole((4,), "w"))}
    for wrong in (
        lambda piece: [piece._replace(size=(3,))],
        lambda piece: [piece, piece._replace(size=(1,))],
        lambda piece: [piece._replace(size=(3,)), piece._replace(start=(1,), size=(1,))],
        lambda piece: [piece._replace(size=(5,))],
        lambda piece: [piece._replace(holders=[])],
    ):
        offers = Offers.of([layout])
        pieces = offers.pieces(layout["w"].placement.parts[0])
        pieces[:] = wrong(pieces[0])
        with pytest.raises(InvalidArgument, match="w: expected"):
            Plan(offers, [layout]).check()


def test_wrong_placements():
    for make, expected in (
        (lambda: Placement.cut((4, 4), 0, 3, 2), "expected a slice within shape"),
        (lambda: Placement.whole((4,)).flat(2, 5), "expected a slice of 4 elements"),
        (lambda: Placement.joined([]), "in their first axis only, got \\[\\]"),
        (lambda: Placement.joined([Placement.whole((2, 3)), Placement.whole((2, 4))]), "in their first axis only"),
        (lambda: Placement.joined([Placement.whole((2,))] * 2).transposed, "a placement of one part"),
        (lambda: Placement((3,), (Part("w", (2,), (0,), (2,), 0, (1,)),)).check("w"), "each element in one part"),
        (lambda: Placement((2,), (Part("w", (2,), (0,), (2,), 0, (0,)),)).check("w"), "each element in one part"),
        (lambda: Placement((2,), (Part("w", (2,), (0,), (2,), 1, (1,)),)).check("w"), "^w: .* within an array of 2"),
    ):
        with pytest.raises(InvalidArgument, match=expected):
            make()


HF = {"l.q_proj.weight": (8, 4), "l.k_proj.weight": (4, 4), "l.v_proj.weight": (4, 4), "l.o_proj.weight": (4, 8)}


@pytest.mark.parametrize(("ranks", "key_rows"), [(1, 4), (2, 2), (4, 2)])
def test_vllm_names_fuse_and_cut(ranks, key_rows):
    """``qkv_proj`` has this rank's rows of q, k and v; with 4 ranks and 2 key/value heads, two ranks share one."""
    tensors = {name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for name, shape in HF.items()}
    for rank in range(ranks):
        q, share = 8 // ranks, 4 // key_rows
        shapes = {"l.qkv_proj.weight": (q + 2 * key_rows, 4), "l.o_proj.weight": (4, 8 // ranks)}
        made = placements(shapes, HF, "vllm", rank, ranks)
        first = rank * share // ranks * key_rows
        rows = [tensors["l.q_proj.weight"][rank * q : (rank + 1) * q]]
        rows += [tensors[f"l.{name}_proj.weight"][first : first + key_rows] for name in "kv"]
        assert (held(made["l.qkv_proj.weight"], tensors) == np.concatenate(rows).reshape(-1)).all()
        columns = tensors["l.o_proj.weight"][:, rank * 8 // ranks : (rank + 1) * 8 // ranks]
        assert (held(made["l.o_proj.weight"], tensors) == columns.reshape(-1)).all()


@pytest.mark.parametrize(("ranks", "rows"), [(1, [100]), (2, [64, 36]), (4, [32, 32, 32, 4]), (8, [16] * 6 + [4, 0])])
def test_vllm_pads_the_vocabulary(ranks, rows):
    """To a multiple of 64 rows: those that no tensor has are not written."""
    tensors = {"embed_tokens.weight": (100, 3)}
    for rank in range(ranks):
        made = placements({"embed_tokens.weight": (128 // ranks, 3)}, tensors, "vllm", rank, ranks)
        assert made["embed_tokens.weight"].shape == (rows[rank], 3)
        assert made["embed_tokens.weight"].parts[0].start == (sum(rows[:rank]), 0)
    for shape in ((192, 3), (128, 4)):
        with pytest.raises(InvalidArgument, match=r"expected shape \(100, 3\) of embed_tokens.weight on"):
            placements({"embed_tokens.weight": shape}, tensors, "vllm")


def test_rules_of_ones_own(tmp_path):
    """A file may name transposed parameters; wrong names and shapes are refused."""
    path = str(tmp_path / "mine.toml")
    Path(path).write_text("transposed = 'c_fc\\.weight'\nrows = 'c_fc\\.weight'\n")
    whole = {"h.c_fc.weight": (3, 4)}  # as transformers stores it: (in, out)
    tensors = {"h.c_fc.weight": np.arange(12, dtype=np.float32).reshape(3, 4)}
    made = placements({"h.c_fc.weight": (2, 3)}, whole, path, 1, 2)["h.c_fc.weight"]
    assert (held(made, tensors).reshape(2, 3) == tensors["h.c_fc.weight"].T[2:]).all()
    with pytest.raises(InvalidArgument, match=r"expected shape \(2, 3\) of h.c_fc.weight on rank 0 of 2, got \(4, 3\)"):
        placements({"h.c_fc.weight": (4, 3)}, whole, path, 0, 2)
    with pytest.raises(InvalidArgument, match="expected the publisher to have x, got no such tensor"):
        placements({"x": (4, 3)}, whole)


def test_thousands_of_ranks_are_planned_in_seconds():
    """A quarter of a model of 8 billion weights: 2048 ranks train (tp 8, ZeRO over the rest), and 2048 serve (tp 4)."""
    shapes = {f"{layer}.{name}": (4096, 4096) for layer in range(8) for name in "abcd"}
    tp, zero, half = 8, 8, 2048
    trainer = []
    for part in range(zero):
        for rank in range(tp):
            cut = {name: Placement.shard(shape, 0, rank, tp, name) for name, shape in shapes.items()}
            each = {n: p.flat(p.count * part // zero, p.count * (part + 1) // zero) for n, p in cut.items()}
            trainer.append({name: Array(F32, placed) for name, placed in each.items()})
    servers = [
        {n: Array(DTYPES["bfloat16"], Placement.shard(shape, 1, rank, 4, n)) for n, shape in shapes.items()}
        for rank in range(4)
    ]
    began = time.process_time()
    offers = Offers.of([trainer[rank % len(trainer)] for rank in range(half)])
    plan = Plan(offers, [servers[rank % 4] for rank in range(half)])
    plan.check()
    traffic = plan.traffic()
    assert time.process_time() - began < 15  # about 1 s on one core
    whole = 2 * sum(math.prod(shape) for shape in shapes.values())
    assert sum(traffic.values()) == half // 4 * whole
    sent = [sum(n for (source, _), n in traffic.items() if source == rank) for rank in (0, half - 1)]
    assert sent[0] == sent[1]


def test_a_box_is_no_larger_than_its_array():
    """Whatever a message says: strides of 0 would make the memory of an answer as large as its sender likes."""
    assert box(np.zeros(6), 1, (2, 2), (3, 1)).shape == (2, 2)
    for offset, size, strides in ((0, (1 << 40,), (0,)), (0, (7,), (1,)), (5, (2,), (1,)), (-1, (1,), (1,))):
        with pytest.raises(InvalidArgument, match="box: expected elements within an array of 6"):
            box(np.zeros(6), offset, size, strides)
