"""kos.testing.torch names each mistake of ``torch_mistakes`` with its line, at once."""

import inspect
import re
from pathlib import Path

import pytest

from tests.packages import Package, needs

pytestmark = needs("torch")
testing, torch_mistakes = Package("kos.testing.torch"), Package("tests.interop.torch_mistakes")
NAMES = re.findall(r"^@mistake.*\ndef (\w+)", Path(__file__).with_name("torch_mistakes.py").read_text(), re.MULTILINE)


def test_ddp_raises_the_error_of_a_failed_reduction():
    def program(rank):
        torch_mistakes.a_checkpoint_on_rank_0_only(rank)

    with pytest.raises(RuntimeError, match="they differ in operation barrier against all_reduce"):
        testing.spawn(program, 2, 200)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_named_with_its_line(name):
    program, (error, texts) = getattr(torch_mistakes, name), torch_mistakes.MISTAKES[name]
    lines, first = inspect.getsourcelines(program)
    here = [f"torch_mistakes.py:{first + n}" for n, line in enumerate(lines) if line.endswith("# here\n")]
    with pytest.raises((RuntimeError, TimeoutError)) as caught:
        testing.spawn(program, 4 if "mesh" in name else 2, 200)  # longer than these tests may take
    assert error in [kind.__name__ for kind in type(caught.value).__mro__]
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    for expected in (*texts, *here):
        assert expected in text
