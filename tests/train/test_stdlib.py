"""The corpus that is there without data: Python's own sources. The cache of the user."""

import os
import sys
from pathlib import Path

from kos.errors import DataError
from kos.files import cache_folder
from kos.train.data.corpus import TRAIN, VAL, read_corpus, read_stdlib
from tests.train.refusal import refused


def test_the_standard_librarys_own_sources():
    assert len(set(TRAIN) | set(VAL)) == len(TRAIN) + len(VAL), "a file is in one split, once"
    for names in (TRAIN, VAL):
        assert list(names) == sorted(names)
        assert {name.partition("/")[0] for name in names} <= sys.stdlib_module_names
    train, val = read_stdlib()
    assert 4e6 < sum(map(len, train)) < 8e6
    assert 1.5e5 < sum(map(len, val)) < 5e5
    root = Path(os.__file__).parent
    assert (root / f"{TRAIN[0]}.py").read_text("utf-8") == train[0]
    got = read_corpus("stdlib").splits
    assert (got.train, got.val) == (train, val) and got.held_out.endswith(" and 14 more")


def test_a_python_without_sources_is_refused(tmp_path):
    with refused(DataError, "sources", str(tmp_path), "--data PATH"):
        read_stdlib(tmp_path)


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kos"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for none in ("", "relative/cache", "~/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert cache_folder() == tmp_path / "home" / ".cache" / "kos"
