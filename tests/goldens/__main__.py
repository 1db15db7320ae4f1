"""Make or check the recorded results of other libraries: see ``tests.goldens``."""

import os
import sys

import pytest

from tests.goldens import MODE, write


class OnlyGoldens:
    """A plugin that keeps the tests that compare with recorded results, and writes what they have made."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            parts["golden" in getattr(item, "fixturenames", ())].append(item)
        config.hook.pytest_deselected(items=parts[False])
        items[:] = parts[True]

    def pytest_sessionfinish(self) -> None:
        write(self.keeps)


if __name__ == "__main__":
    check = "--check" in sys.argv
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are small: threads would wait for one another
    os.environ[MODE] = "check" if check else "make"
    asked = [word for word in sys.argv[1:] if word != "--check"]
    part = any(word.startswith("-") or "::" in word for word in asked)
    options = ["-q", "-p", "no:cacheprovider", *([] if check else ["-p", "no:xdist"])]
    sys.exit(pytest.main([*options, *(asked or ["tests/train"])], [OnlyGoldens(part)]))
