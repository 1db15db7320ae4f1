"""Commands that errors print do what they say when they are pasted, whatever characters the path has."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kos.errors import KosError
from kos.train.checkpoint import huggingface
from kos.train.data.tokenizers import make_tokenizer

FOLDERS = ["plain", "it's", 'a "quoted" one', "$HOME `date` \\ *", "é %s {0} !x"]

TRANSFORMERS = """
import pathlib
class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, folder):
        made = cls()
        made.folder = folder
        return made
    def save_pretrained(self, folder):
        assert self.folder == folder
        pathlib.Path(folder, "saved").write_text(type(self).__name__)
class AutoModelForCausalLM(AutoTokenizer):
    pass
"""


def paste(error: Callable[[], object]) -> None:
    """Run what follows ``run: `` in the error, in this folder."""
    with pytest.raises(KosError) as caught:
        error()
    command = str(caught.value).partition("run: ")[2]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}\n{done.stderr}"


@pytest.mark.parametrize("name", FOLDERS)
def test_of_transformers(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (folder := tmp_path / name).mkdir()
    (folder / "vocab.json").write_text("{}")
    paste(lambda: make_tokenizer(str(folder)))
    assert (folder / "saved").read_text() == "AutoTokenizer"
    (folder / "pytorch_model.bin").write_bytes(b"x")
    paste(lambda: huggingface.check_weights(folder))
    assert (folder / "saved").read_text() == "AutoModelForCausalLM"
