"""What the host's compiler made of kernels, loaded into one process."""

from __future__ import annotations

import ctypes
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import host_compiler
from tests.host_compiler import COMPILER, compiled, result_of
from tests.train.host_kernels.emulator import SIMT

SOURCE = f"""#include "{SIMT}"
inline int* ours() {{
    __shared__ int words[N];
    return words;
}}
template <class T> T* ours_too() {{
    static T words[N];
    return words;
}}
extern "C" EXPORTED void places(void** found) {{
    found[0] = ours();
    found[1] = ours_too<int>();
}}
"""


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++ or clang++")


@needs_compiler
def test_libraries_share_no_variables() -> None:
    """A kernel compiled for 1000 words would write behind the memory of the one that was loaded first, for 1."""
    found = (ctypes.c_void_p * 2)(), (ctypes.c_void_p * 2)()
    for words, there in zip((1, 1000), found, strict=True):
        compiled({"kernels.cc": SOURCE}, [f"-DN={words}"]).places(there)
    for first, second in zip(*found, strict=True):
        assert first and second and not -4 < first - second < 4000  # bytes: one has 4, the other 4000


@needs_compiler
def test_each_text_is_compiled_once_and_its_seconds_do_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds, texts, compile_ = [0.0], [], host_compiler._compile

    def lasting(files: Any, command: Any, kept: Path) -> None:
        texts.append(kept)
        seconds[0] += 60
        compile_(files, command, kept)

    monkeypatch.setattr(host_compiler, "FOLDER", tmp_path)
    monkeypatch.setattr(host_compiler, "_compile", lasting)
    monkeypatch.setattr(host_compiler, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    before = host_compiler._clock.now()
    with ThreadPoolExecutor(3) as pool:
        for running in [pool.submit(compiled, {"kernels.cc": SOURCE}, ["-DN=3"]) for _ in range(3)]:
            assert result_of(running, 20).places
    assert len(texts) == 1
    seconds[0] += 1
    assert host_compiler._clock.now() == before + 1


def test_what_does_not_end_is_given_up() -> None:
    with pytest.raises(TimeoutError, match="within 0.01 s"):
        result_of(Future(), 0.01)
