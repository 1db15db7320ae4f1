"""Each mutation of ``tests.mutations`` finds the text that it changes."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, Mutation
from tests.run import ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file}: {mutation.old}")
def test_the_text_is_there(mutation: Mutation) -> None:
    assert mutation.old in (ROOT / mutation.file).read_text()
