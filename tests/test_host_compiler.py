"""What the host's compiler made of kernels, loaded into one process."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

from tests import host_compiler
from tests.host_compiler import compiled, needs_compiler
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


@needs_compiler
def test_libraries_share_no_variables():
    """A kernel compiled for 1000 words would write behind the memory of the one that was loaded first, for 1."""
    found = (ctypes.c_void_p * 2)(), (ctypes.c_void_p * 2)()
    for words, there in zip((1, 1000), found, strict=True):
        compiled({"kernels.cc": SOURCE}, [f"-DN={words}"]).places(there)
    for first, second in zip(*found, strict=True):
        assert first and second and not -4 < first - second < 4000  # bytes: one has 4, the other 4000


@needs_compiler
def test_each_text_is_compiled_once(monkeypatch, before_call, tmp_path):
    texts = []
    monkeypatch.setattr(host_compiler, "FOLDER", tmp_path)
    before_call(host_compiler, "_compile", lambda files, command, kept: texts.append(kept))
    with ThreadPoolExecutor(3) as pool:
        for running in [pool.submit(compiled, {"kernels.cc": SOURCE}, ["-DN=3"]) for _ in range(3)]:
            assert running.result(120).places
    assert len(texts) == 1
