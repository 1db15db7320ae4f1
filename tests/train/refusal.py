"""What every refusal of the trainer looks like."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kos.errors import KosError


@contextmanager
def refused(error: type[KosError], *parts: str) -> Iterator[None]:
    """What is inside raises ``error``: one line that names what was expected and got, with ``parts`` in it."""
    with pytest.raises(error) as caught:
        yield
    line = str(caught.value)
    assert "\n" not in line and "expected" in line and "got" in line, line
    assert all(part in line for part in parts), line
