"""A capture from its beginning to its end, without a GPU."""

import gc
from types import SimpleNamespace

import pytest

from kos.cuda import graphs
from tests.fake_cuda import installed


@pytest.fixture
def collecting(monkeypatch):
    """Calls of the driver, and whether garbage was collected then."""
    seen = []

    def function(name):
        def call(*arguments):
            seen.append((name, gc.isenabled()))
            assert name != "cuGraphInstantiate" or arguments[1] == 8  # each node keeps the priority of its stream
            return 0, 5

        return call

    names = ("cuStreamEndCapture", "cuGraphInstantiate", "cuCtxGetDevice", "cuThreadExchangeStreamCaptureMode")
    alone = ("cuStreamBeginCapture", "cuGraphDestroy", "cuGraphExecDestroy")
    cu = SimpleNamespace(
        CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1, CU_STREAM_CAPTURE_MODE_RELAXED=2),
        CUgraphInstantiate_flags=SimpleNamespace(CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY=8),
        **{name: function(name) for name in names},
        **{name: lambda *arguments, name=name: function(name)()[:1] for name in alone},
    )
    assert gc.isenabled()
    with installed(monkeypatch, cu):
        yield seen
    assert gc.isenabled()


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_before_it_has_ended(collecting, fails):
    def record():
        with graphs.capture(77) as graph:
            assert not gc.isenabled()
            if fails:
                raise ZeroDivisionError
        return graph

    if fails:
        with pytest.raises(ZeroDivisionError):
            record()
    else:
        record()
    assert ("cuStreamEndCapture", False) in collecting
    assert [name for name, _ in collecting].count("cuGraphDestroy") == 1
