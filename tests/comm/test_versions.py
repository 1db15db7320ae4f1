"""Ranks with different versions of kos, Python or NumPy."""

import threading

import pytest

import kos
from kos.comm.control.threads import ThreadControlPlane
from kos.errors import RendezvousError
from tests.comm.ranks import on_threads

MINE = {"kos": "1.0", "Python": "3.11.7", "NumPy": "2.1"}


def init(monkeypatch: pytest.MonkeyPatch, *ranks: dict[str, str]) -> list[str]:
    """What ``kos.init`` raised on each rank, if anything; the ranks have these versions instead of ``MINE``."""
    monkeypatch.setattr("kos.comm.create.versions", lambda: {**MINE, **ranks[int(threading.current_thread().name)]})
    errors = [""] * len(ranks)

    def rank(rendezvous: ThreadControlPlane) -> None:
        threading.current_thread().name = str(rendezvous.rank)
        try:
            kos.init("mock", rendezvous=rendezvous).close()
        except RendezvousError as error:
            errors[rendezvous.rank] = str(error)

    on_threads(len(ranks), rank)
    return errors


def test_versions_of_kos_that_differ_are_refused(monkeypatch):
    text = "init: expected one version of kos on all ranks, got 1.0 on ranks [0, 2], 0.9 on rank 1"
    assert init(monkeypatch, {}, {"kos": "0.9", "NumPy": "1.0"}, {}) == [text] * 3


@pytest.mark.parametrize("old", [0, 1])
def test_a_rank_of_a_version_that_says_none_is_refused(monkeypatch, old):
    """The data that it sends for comparison has another shape."""
    allgather = ThreadControlPlane.allgather

    def older(self, data):
        return allgather(self, b'["mock", {}]' if self.rank == old and data.startswith(b'{"versions"') else data)

    monkeypatch.setattr(ThreadControlPlane, "allgather", older)
    for text in init(monkeypatch, {}, {}, {}):
        assert text.startswith("init: expected one version of kos on all ranks, got ")
        assert f"an unknown version on rank {old}" in text and f"1.0 on ranks [{1 - old}, 2]" in text


def test_versions_of_python_and_numpy_that_differ_are_a_warning(monkeypatch, caplog):
    ranks = [{}, {"Python": "3.13.0"}, *({"NumPy": "2.4"} for _ in range(10))]
    assert init(monkeypatch, *ranks) == [""] * 12
    assert [each.message for each in caplog.records] == [
        "the ranks have different versions of Python: 3.11.7 on ranks [0, 2, 3, 4, 5, 6, 7, 8] and 3 more, 3.13.0 on "
        "rank 1",
        "the ranks have different versions of NumPy: 2.1 on ranks [0, 1], 2.4 on ranks [2, 3, 4, 5, 6, 7, 8, 9] and 2 "
        "more",
    ]
