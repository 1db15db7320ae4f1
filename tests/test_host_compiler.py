"""What the host's compiler made of kernels, loaded into one process."""

import ctypes

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
