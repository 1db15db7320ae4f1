"""torch.compile over kos gives what it gives over gloo: every collective, DDP, FSDP2, tensor parallelism.

On two GPUs it gives what it gives over NCCL.
"""

import shutil
from importlib.util import find_spec

import pytest

from kos import cuda
from tests.host_compiler import PYTHON_HEADERS
from tests.interop.torch_compiled import COMPILERS, IN_GRAPH, PARTS, compare

pytestmark = [pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"), pytest.mark.timeout(560)]

COMPILES = PYTHON_HEADERS and shutil.which("g++") is not None
INDUCTOR = [pytest.mark.slow, pytest.mark.skipif(not COMPILES, reason="inductor needs g++ and Python.h")]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The cache of inductor."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.mark.parametrize(
    ("compiler", "parts"),
    [
        *((compiler, parts) for compiler in COMPILERS[:2] for parts in (PARTS[:2], PARTS[2:])),
        pytest.param("inductor", IN_GRAPH, marks=INDUCTOR),  # other calls of kos break the graph, as in eager
    ],
    ids=lambda x: x if isinstance(x, str) else "+".join(x),
)
def test_compiled_programs_give_what_gloo_gives(compiler, parts, cache):
    found = compare(parts, compiler, "cpu", cache)
    differ = {case: results for case, results in found.items() if results != "equal"}
    assert found and not {case: x for case, x in differ.items() if "gloo does not support" not in str(x)}


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda.unavailable()) or len(cuda.visible_devices()) < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_programs_give_what_nccl_gives(compiler, cache):
    found = compare(PARTS, compiler, "cuda", cache)
    assert found and not {case: results for case, results in found.items() if results != "equal"}


@pytest.mark.parametrize("missing", ["_FrameAction", "set_code_exec_strategy"])
def test_a_torch_without_these_internals_works_too(monkeypatch, missing):
    import torch

    from kos.interop.torch import dynamo, works

    monkeypatch.delattr(torch._C._dynamo.eval_frame, missing)
    dynamo.disable(works)
    assert works.HostWork.wait._torchdynamo_disable
