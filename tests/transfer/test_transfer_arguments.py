"""Weights from M ranks to N: wrong arguments are refused with a text that names expected and got."""

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kos.dtypes import DTYPES
from kos.errors import InvalidArgument, KosError, TransferError
from kos.interop.weights import bind
from kos.testing import spawn
from kos.transfer import Array, BlockScales, Offers, Part, Placement, Plan, Publisher, Subscriber, placements

Arrays = Mapping[str, tuple[Any, Placement]]


def make_on_all(*arrays: Arrays, **options: list[Any]) -> list[str]:
    """Make a Publisher with a rank for each of ``arrays``; the class and the text of each rank's error."""

    def make(comm):
        mine = {name: values[comm.rank] for name, values in options.items()}
        with pytest.raises(KosError) as raised:
            Publisher(comm, arrays[comm.rank], **mine)
        return f"{type(raised.value).__name__}: {raised.value}"

    return spawn(make, len(arrays))


def one(shape: tuple[int, ...] = (2, 3), dtype: Any = np.float32, name: str = "w", tensor: str = "") -> Arrays:
    return {name: (np.zeros(shape, dtype), Placement.whole(shape, tensor))}


@pytest.mark.parametrize(
    ("arrays", "got"),
    [
        pytest.param([one(), one(), one((2, 4))], "float32 of shape (2, 3) (array w of rank 0) and "
                     "float32 of shape (2, 4) (array w of rank 2)", id="shapes"),
        pytest.param([one(), one(name="v", dtype=np.int32, tensor="w")], "float32 of shape (2, 3) (array w of rank 0) "
                     "and int32 of shape (2, 3) (array v of rank 1)", id="dtypes"),
        pytest.param([one(), one((6, 2), name="v") | one((2, 6), name="u", tensor="v")], "float32 of shape (6, 2) "
                     "(array v of rank 1) and float32 of shape (2, 6) (array u of rank 1)", id="arrays of one rank"),
    ],
)  # fmt: skip
def test_ranks_that_differ_in_a_tensor(arrays, got):
    """All ranks raise the same error when the publisher is made.  Their subscribers need not find the mismatch."""
    tensor = "v" if "array u" in got else "w"
    text = f"InvalidArgument: {tensor}: expected one dtype and one shape of the whole tensor on all ranks, got {got}"
    assert make_on_all(*arrays) == [text] * len(arrays)


NOWHERE = "127.0.0.1:1"
X, WHOLE = one()["w"]
F32 = DTYPES["float32"]
MODULE = SimpleNamespace(named_parameters=dict)
FROZEN = np.zeros(3, np.float32)
FROZEN.flags.writeable = False


def expect_text(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        make()
    assert str(raised.value).startswith(text)


ARRAYS = [
    ([(X, WHOLE)], "arrays: expected a dict of name -> (array, Placement), got list"),
    ({3: (X, WHOLE)}, "arrays: expected non-empty strings as names, got 3"),
    ({"w": X}, "w: expected a pair (array, Placement), got ndarray"),
    ({"w": (WHOLE, X)}, "w: expected a pair (array, Placement), got (Placement, ndarray)"),
    ({"w": (X, Placement((2, 3), (1,)))}, "w: expected parts of the class Part, got (1,)"),  # type: ignore[arg-type]
    ({"w": (X, Placement((2, 3), (Part("", (2, 3), (0,), (2, 3), 0, (3, 1)),)))},
     "w: expected parts within the array and their tensors, got start (0,), size (2, 3) and strides (3, 1)"),
    ({"w": (X, Placement((2, 3), (Part("", (2, 2), (0, 0), (2, 3), 0, (3, 1)),)))},
     "w: expected parts within the array and their tensors, got start (0, 0), size (2, 3) and strides"),
]  # fmt: skip
OF_PUBLISHERS = [
    ({"buffers": 0}, "buffers: expected a whole number from 1 on, got 0"),
    ({"patience": -1}, "patience: expected a number of seconds from 0 on, got -1"),
    ({"memory": "gpu"}, "memory: expected 'device' or 'host', got 'gpu'"),
    ({"address": "0.0.0.0:0"}, "address: expected the host of the publisher's rank 0, got 0.0.0.0, which"),
    ({"address": "nowhere"}, 'address: expected "HOST:PORT", got'),
]
OF_SUBSCRIBERS = [
    ({"streams": 0}, "streams: expected a whole number from 1 on, got 0"),
    ({"transport": "rdma"}, "transport: expected 'auto', 'shared' or 'tcp', got 'rdma'"),
    ({"address": "0.0.0.0:29600"}, "address: expected the host of the publisher's rank 0, got 0.0.0.0, which"),
    ({"address": "localhost:0"}, "address: expected the port of the publisher, from 1 to 65535, got 0"),
    ({"arrays": {}}, "arrays: expected at least one"),
    ({"arrays": {"w": (FROZEN, Placement.whole((3,)))}}, "w: expected a writable"),
    ({"comm": X}, "comm: expected a communicator or None, got ndarray"),
]
LAYOUTS = [
    ({"w": (F32, WHOLE)}, "w: expected a kos.transfer.Array, got tuple"),
    ({"w": Array("float32", WHOLE)}, "w: expected a dtype of kos.dtypes.DTYPES, got 'float32'"),
    ({"w": Array(F32, (2, 3))}, "w: expected a Placement, got tuple"),
]
RANKS = [
    ((2, 2), "rank: expected a rank from 0 to 1, got 2"), ((-1, 2), "rank: expected a rank from 0 to 1, got -1"),
    ((0, 0), "ranks: expected a whole number from 1 on, got 0"),
]  # fmt: skip
PARAMETERS = "q_proj.weight", "norm.weight"
"""No rule splits the second one."""
SCALES, Q, S = np.zeros((1, 1), np.float32), (np.zeros((2, 3), "float8_e4m3fn"), WHOLE), BlockScales("q")
NO_MATRIX = "expected the scales of a float8_e4m3fn matrix, got those of q, "
OF_Q = "s: expected float32 of shape {} on the host, as q needs, got {} on the host"
OFFERS = Offers.of([{"w": Array(F32, WHOLE)}])
TURNED: Any = [{"w": Array(F32, Placement.whole((3, 2)).transposed)}]
RIGHT: Any = {"w": Array(F32, WHOLE)}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *((partial(Publisher, None, arrays), text) for arrays, text in ARRAYS),
        *((partial(Subscriber, NOWHERE, arrays), text.replace("Placement)", "Placement or BlockScales)", 1))
          for arrays, text in ARRAYS),
        *((partial(Publisher, None, one(), **options), text) for options, text in OF_PUBLISHERS),
        *((partial(Subscriber, **{"address": NOWHERE, "arrays": one()} | options), text)
          for options, text in OF_SUBSCRIBERS),
        (lambda: Publisher(None, {"w": (X, S)}), "w: expected a pair (array, Placement), got (ndarray, BlockScales)"),
        (lambda: Publisher(X, one()), "comm: expected a communicator or None, got ndarray"),  # type: ignore[arg-type]
        (lambda: Publisher(None, {}), "arrays: expected at least one on some rank"),
        (lambda: Publisher(None, {"w": (X.T, Placement.whole((3, 2)))}), "w: expected a C-contiguous array"),
        (lambda: Publisher(None, {"w": (X.reshape(3, 2), WHOLE)}),
         "w: expected an array of shape (2, 3), the shape of its placement, got (3, 2)"),
        (lambda: Subscriber(NOWHERE, one()).update(-1), "timeout: expected a positive number"),
        # scales
        (lambda: Subscriber(NOWHERE, {"s": (SCALES, S)}), f"s: {NO_MATRIX}but no array has this name"),
        (lambda: Subscriber(NOWHERE, {"q": (X, WHOLE), "s": (SCALES, S)}),
         f"s: {NO_MATRIX}which is float32 of shape (2, 3)"),
        (lambda: Subscriber(NOWHERE, {"q": Q, "s": (SCALES, S), "t": (SCALES, S)}), f"t: {NO_MATRIX}which has"),
        (lambda: Subscriber(NOWHERE, {"q": Q, "s": (SCALES.astype(float), S)}),
         OF_Q.format("(1, 1)", "float64 of shape (1, 1)")),
        (lambda: Subscriber(NOWHERE, {"q": Q, "s": (SCALES, BlockScales("q", (2, 2)))}),
         OF_Q.format("(1, 2)", "float32 of shape (1, 1)")),
        (lambda: BlockScales("w", 128), "block of w: expected (rows, columns), got 128"),
        (lambda: BlockScales("w", (0, 1)), "block of w: expected a whole number from 1 on, got 0"),
        (lambda: BlockScales("w").shape((3,)), "w: expected the shape of a matrix, such as (4, 4), got (3,)"),
        # placements
        (lambda: Placement.whole("23", "w"), "w: expected a shape, such as (4, 4), got '23'"),
        (lambda: Placement.cut((2, 3), 0, 0.5, 1), "cut: start: expected a whole number, got 0.5"),
        (lambda: Placement.shard((4, 4), 0, 2, 2), "shard: rank: expected a rank from 0 to 1, got 2"),
        (lambda: Placement.shard((4, 4), 0, 0, 3, "w", 2), "w: expected a number of ranks that is a multiple of most"),
        (lambda: Placement.shard((5, 4), 0, 0, 2), "shard: expected a multiple of 2 elements along axis 0, for equal"),
        (lambda: Placement.shard((4, 4), 2, 0, 2), "shard: expected an axis of shape (4, 4) from 0 on, got axis 2"),
        (lambda: Placement.whole((4,)).flat(0.5, 2), "flat: start: expected a whole number, got 0.5"),
        (lambda: Placement.joined([3]), "joined: expected Placements, got [3]"),
        # plans
        *((partial(Offers.of, [layout]), text) for layout, text in LAYOUTS),
        *((partial(Plan, OFFERS, [layout]), text) for layout, text in LAYOUTS),
        (lambda: Plan([RIGHT], [RIGHT]), "offers: expected Offers, got list"),  # type: ignore[arg-type]
        (lambda: Plan(OFFERS, RIGHT), "layouts: expected a list with the layout of each rank, got dict"),
        (lambda: Plan(OFFERS, TURNED), "w: expected parts of the published tensor, which has shape (2, 3), got parts "
         "of a tensor of shape (3, 2)"),
        # placements of parameters, by rules
        *((partial(placements, {name: (2, 3)}, {}, "vllm", *ranks), text)
          for name in PARAMETERS for ranks, text in RANKS),
        (lambda: placements({}, ["w"]), "tensors: expected a dict of name -> shape, got list"),
        (lambda: placements({"w": X}, {"w": (2, 3)}), "w: expected a shape, such as (4, 4), got array("),
        (lambda: placements({"w": (3, 4)}, {"w": (4, 3)}), "w: expected shape (4, 3) of w on rank 0 of 1, got (3, 4), "
         "the transpose, which needs the rule `transposed`"),
        # ``bind``, which checks before it waits: nobody listens at the address, and it would raise TransferTimeout
        (lambda: bind(NOWHERE, None), "module: expected a torch.nn.Module, got "),
        (lambda: bind(NOWHERE, MODULE, rules="llamacpp", timeout=0.1), "rules: expected one of huggingface"),
        (lambda: bind(NOWHERE, MODULE, rank=2, ranks=2, timeout=0.1), "rank: expected a rank from 0 to 1, got 2"),
    ],
)  # fmt: skip
def test_what_is_refused(make, text):
    expect_text(make, text)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ("rows = ", "expected a file of rules in TOML, got Invalid value"),
        ("rows = '(('", "rows: expected '((' to be a regular expression, got missing )"),
        ("padded = 64", "padded: expected a table of regular expression = value, got int"),
        ("[padded]\n'x' = 0", "padded: x: expected a whole number from 1 on, got 0"),
        ("[fused]\n'x' = []", "fused: x: expected a list of the names of tensors, got []"),
        ("[fused]\n'(x)' = ['\\2y']", "fused: (x): expected names with the pattern's groups, got invalid group"),
    ],
)
def test_rules(rules, text, tmp_path):
    """A faulty file is refused even if no parameter matches the faulty rule."""
    path = tmp_path / "mine.toml"
    path.write_text(rules)
    expect_text(lambda: placements({}, {}, f"{path}"), f"{path}: {text}")


def test_patience_is_less_than_the_timeout():
    def make(comm):
        text = "patience: expected less than the communicator's timeout of 7 s, got 7"
        expect_text(lambda: Publisher(comm, one(), patience=7), text)

    spawn(make, 1, timeout=7)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"buffers": [2, 3]}, "buffers=2 on all ranks, as on rank 0, got 3 on rank 1"),
        ({"name": ["a", "b"]}, "name='a' on all ranks, as on rank 0, got 'b' on rank 1"),
        ({"checksums": [False, True]}, "checksums=False on all ranks, as on rank 0, got True on rank 1"),
        ({"address": ["127.0.0.1:0", "127.0.0.2:0"]}, "address='127.0.0.1:0' on all ranks, as on rank 0, got '127.0."),
    ],
)
def test_ranks_that_differ_in_a_setting(options, text):
    for found in make_on_all(one(), one(), **options):
        assert found.startswith(f"CollectiveMismatch: Publisher: expected {text}")


def test_an_empty_secret(monkeypatch):
    """It raises TransferError and not RendezvousError, as no ranks connect to each other here."""
    monkeypatch.setenv("KOS_SECRET", "")
    for make in (lambda: Publisher(None, one()), lambda: Subscriber(NOWHERE, one())):
        with pytest.raises(TransferError, match="KOS_SECRET: expected a secret, got an empty one"):
            make()
    assert {text.partition(":")[0] for text in make_on_all(one(), one())} == {"TransferError"}


def test_a_placement_that_names_no_tensor_means_that_of_the_array():
    layout: Any = {"w": Array(F32, WHOLE)}
    plan = Plan(Offers.of([layout, layout]), [layout, layout])
    assert plan.offers.shapes == {"w": (2, 3)} and plan.traffic() == {(0, 0): 24, (1, 1): 24}
    assert "w[0:2, 0:3] float32: rank 0 w+0 -> w+0" in (text := plan.describe())
    assert "2 publisher ranks -> 2 subscriber ranks: 1 tensor, 48 bytes in all; 24 to 24 bytes of each of 2" in text


def test_calls_of_a_publisher_and_a_subscriber():
    with Publisher(None, one()) as publisher:
        expect_text(lambda: publisher.publish(1.5), "version: expected a whole number")
        publisher.publish(1)
        with Subscriber(publisher.address, one(name="v")) as subscriber:
            expect_text(lambda: subscriber.update(5), "v: expected a tensor of the publisher")


def test_the_error_of_one_rank_is_raised_on_all():
    texts = make_on_all({"w": (X, WHOLE)}, {"w": (X, Placement.whole((3, 2)))})
    text = "w: expected an array of shape (3, 2), the shape of its placement, got (2, 3)"
    assert "Publisher: rank 1: w: expected an array of shape (3, 2)" in texts[0]
    assert texts[1] == f"InvalidArgument: {text}"
