"""How ``tests/lines.py`` counts, and the bounds that hold."""

from __future__ import annotations

import pytest

from tests import lines

PYTHON = '''"""A docstring
of two lines."""

from __future__ import annotations  # code


class Half(list):
    # A comment.

    size = 1
    """The docstring of an attribute."""

    def text(self) -> str:
        """Of a function."""
        return """text,

# and no comment
"""
'''
CUDA = """// a comment
/* one of
   two lines */ int x;  // code

const char* name = "/* no comment */";
/* another */
char quote = '"';  /* it ends
here */
"""


def test_what_counts_as_code() -> None:
    python = lines.count("comm", "kos/comm/half.py", PYTHON)
    assert (python.code, python.total, python.classes, python.functions) == (8, 18, 1, (("text", 5),))
    cuda = lines.count("comm", "kos/comm/half.cuh", CUDA)
    assert (cuda.language, cuda.code, cuda.total) == ("CUDA", 3, 8)


def test_a_bound_that_is_exceeded_names_what_exceeds_it() -> None:
    """In the message of ``test_bounds``, since its failure is all that a developer sees."""
    long = "def long():\n" + "    x = 1\n" * lines.MOST_IN_FUNCTION
    files = [lines.count("train", "kos/train/a.py", long), lines.count("comm", "kos/comm/b.py", "\n" * 501)]
    said = [str(bound) for bound in lines.bounds(files) if bound.value > bound.most]
    assert len(said) == 2 and "kos/train/a.py: long: 61" in said[0] and "kos/comm/b.py: 501" in said[1]


def test_bounds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints every bound and its value. None may be exceeded."""
    counted = list(lines.files())
    assert {file.folder for file in counted} <= set(lines.FOLDERS)
    monkeypatch.setattr(lines, "files", lambda: counted)
    lines.main()
    printed = capsys.readouterr().out
    for bound in lines.bounds(counted):
        assert f"{bound.value:>8,}{bound.most:>9,}" in printed
        assert bound.value <= bound.most, bound
    assert "exceeded" not in printed
    print(printed)
