"""Make or check the recorded results of other libraries: see ``tests.goldens``."""

import os
import sys

import pytest

from tests.goldens import MODE, write


class OnlyGoldens:
    """A plugin that keeps the tests that compare with recorded results, and writes what they have made."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        others = [item for item in items if "golden" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]

    def pytest_sessionfinish(self) -> None:
        write()


if __name__ == "__main__":
    check = "--check" in sys.argv
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are small: threads would wait for one another
    os.environ[MODE] = "check" if check else "make"
    asked = [word for word in sys.argv[1:] if word != "--check"]
    options = ["-q", "-p", "no:cacheprovider", *([] if check else ["-p", "no:xdist"])]
    sys.exit(pytest.main([*options, *(asked or ["tests/train"])], [OnlyGoldens()]))
