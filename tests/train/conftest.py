"""What the trainer's tests share."""

import dataclasses
import os
from functools import cache

import numpy as np
import pytest

from kos.train import data, machine, source
from kos.train.data import documents, loading, packing, pieces
from kos.train.data.batches import Dataset, load_data
from kos.train.layers import vocabulary
from kos.train.model import initial
from kos.train.ops import numpy_attention, numpy_blocks
from tests.train import layouts
from tests.train.emulated_runs import emulated
from tests.train.tokenizer_files import huggingface_file

__all__ = ["emulated", "huggingface_file"]

ASKED_ONCE = {name: cache(getattr(machine, name)) for name in ("git_commit", "versions_of")}
SEED = int(os.environ.get("KOS_TEST_SEED", "0")) or int.from_bytes(os.urandom(4), "little")


@pytest.fixture
def rng():
    print(f"KOS_TEST_SEED={SEED}")
    return np.random.default_rng(SEED)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Of BLAS, for its threads wait by spinning: products are small here, and other tests want the cores."""
    one = machine.limit_threads
    with pytest.MonkeyPatch.context() as patch:
        for module in ("trainer", "elastic"):
            patch.setattr(f"kos.train.{module}.limit_threads", lambda comm, threads=None: one(comm, 1))
        yield


@pytest.fixture(autouse=True)
def _asked_once(monkeypatch):
    """The commit and the versions of packages, which each run records, are the same for all runs of a process."""
    for name, once in ASKED_ONCE.items():
        monkeypatch.setattr(machine, name, once)


@pytest.fixture
def small_blocks(monkeypatch):
    """The operations of the CPU work on blocks so small that every loop over them turns more than once, with a rest."""
    blocks = (numpy_blocks, "BLOCK", 40), (numpy_attention, "QUERY_BLOCK", 4), (vocabulary, "HEAD_ROWS", 7)
    for module, name, value in blocks:
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def small_buckets(monkeypatch):
    """The weights of a small model are drawn in many blocks too."""
    layouts.small_buckets(monkeypatch)
    monkeypatch.setattr(initial, "BLOCK", 500)


@pytest.fixture
def small_pieces(monkeypatch):
    """A function: from its call on, short texts and few tokens are read, cut and packed as long ones are."""
    of_texts = (pieces, "PIECE", 37), (pieces, "PORTION", 99), (documents, "READ", 13)
    of_tokens = (data, "SCANNED", 5), (packing, "CHUNK", 7)

    def use():
        for module, name, value in (*of_texts, *of_tokens):
            monkeypatch.setattr(module, name, value)

    return use


@pytest.fixture
def all_is_kept(monkeypatch):
    """What is read of data is kept for later starts, however little it is."""
    monkeypatch.setattr(loading, "LEAST", 0)


@pytest.fixture
def data_of(monkeypatch):
    """Has runs train on data of a class that is derived from Dataset. Returns the list of the data that they load."""

    def use(kind: type[Dataset]) -> list[Dataset]:
        loaded = []

        def load(*arguments):
            read = load_data(*arguments)
            loaded.append(kind(**{field.name: getattr(read, field.name) for field in dataclasses.fields(read)}))
            return loaded[-1]

        monkeypatch.setattr(source, "load_data", load)
        return loaded

    return use


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Words drawn at random: enough to learn from."""
    rng = np.random.default_rng(0)
    words = ["ring ", "tree ", "one shot ", "two shot ", "all reduce\n", "barrier ", "rank "]
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_text("".join(rng.choice(words, 4000)))
    return path
