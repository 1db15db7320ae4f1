"""Transfer from and to GPUs: a publisher process and a subscriber, on one GPU or on two."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from kos import cuda
from kos.cuda.driver import call, cu
from kos.errors import InvalidArgument, TransferError
from kos.memory import Array
from kos.transfer import Placement, Publisher, Subscriber
from tests.transfer import gpu_checks as checks
from tests.transfer.faults import KINDS, campaign
from tests.transfer.gpu_process import OtherPublisher
from tests.transfer.test_block_scales import PLACED
from tests.transfer.test_block_scales import check as check_scales

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["one GPU", "two GPUs"])
def devices(request, monkeypatch):
    """Of the publisher and of the subscriber."""
    monkeypatch.setenv("KOS_SECRET", "of the tests")
    if request.param == "one GPU":
        return 0, 0
    if len(cuda.visible_devices()) < 2:
        pytest.skip("there is one GPU")
    return 1, 0


@pytest.fixture
def start(devices):
    return partial(OtherPublisher, devices[0], False)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("where", ["device", "host"])
def test_layouts(start, devices, where, transport, staged):
    checks.check_layouts(start, devices[1], where, transport, staged)


def test_the_host_does_not_map_a_gpu(start):
    checks.check_that_the_host_does_not_map_a_gpu(start)


def test_a_version_that_is_replaced_while_it_is_read(start, devices):
    checks.check_stale(start, devices[1])


def test_a_killed_publisher(start, devices):
    checks.check_killed(start, devices[1])


def test_no_torn_version(start, devices):
    checks.check_no_torn_version(start, devices[1], 60)


def test_the_memory_of_a_killed_publisher(start, devices):
    """It is free once an update has failed, so that its successor has enough."""
    nbytes, wanted = 1 << 30, {"a.weight": checks.WANTED["a.weight"]}
    def free():
        with cuda.on_device(devices[0]):
            return int(call(cu.cuMemGetInfo)[0])

    before = free()
    with start(more=nbytes) as publisher:
        publisher.publish(1)
        with Subscriber(publisher.address, checks.on_gpu(devices[1], wanted), transport="shared") as subscriber:
            subscriber.update(60)
            publisher.kill()
            with pytest.raises(TransferError):
                subscriber.update(60)
            assert free() > before - nbytes // 2  # the arrays and the context of this process are less


def test_one_process_on_two_gpus():
    """Arrays of both sides on different GPUs, and in one process."""
    if len(cuda.visible_devices()) < 2:
        pytest.skip("there is one GPU")
    x = np.arange(96, dtype=np.float32).reshape(12, 8)
    sources = {f"w{d}": (Array.from_numpy(x + d, d), Placement.whole((12, 8))) for d in range(2)}
    into = {f"w{d}": (Array.zeros((12, 8), np.float32, 1 - d), Placement.whole((12, 8))) for d in range(2)}
    with Publisher(None, sources) as publisher, Subscriber(publisher.address, into) as subscriber:
        publisher.publish(1)
        subscriber.update(60)
        for d in range(2):
            assert (into[f"w{d}"][0].numpy() == x + d).all()


def late(torch: Any) -> None:
    """Keep the current stream busy for some milliseconds."""
    x = torch.ones(4096, 4096, device="cuda")
    for _ in range(10):
        x @ x


@pytest.mark.parametrize("memory", ["device", "host"])
def test_publish_comes_after_the_work_of_the_stream(memory):
    """And update before what is queued afterwards; on torch's current stream, which is not the default one."""
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    x, y = (torch.zeros(1 << 20, device="cuda") for _ in range(2))
    placed = Placement.whole((1 << 20,))
    torch.cuda.synchronize()
    with (
        Publisher(None, {"w": (x, placed)}, memory=memory) as publisher,
        Subscriber(publisher.address, {"w": (y, placed)}) as subscriber,
        torch.cuda.stream(stream),
    ):
        for version in range(1, 6):
            late(torch)
            x.fill_(version)
            publisher.publish(version)
            x.fill_(-1)
            late(torch)
            held = y.clone()  # before the update
            subscriber.update(60)
            assert bool((held == version - 1).all()) and bool((y == version).all())


def test_a_captured_stream_is_refused():
    torch = pytest.importorskip("torch")
    x = torch.zeros(64, device="cuda")
    with Publisher(None, {"w": (x, Placement.whole((64,)))}) as publisher:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            x.add_(1)
            with pytest.raises(InvalidArgument, match="w: expected a stream that is not being captured"):
                publisher.publish(1)
        publisher.publish(1)


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("block", [(128, 128), (1, 1000)], ids=["blocks", "rows"])
@pytest.mark.parametrize("placed", PLACED.values(), ids=PLACED)
def test_block_scales(placed, block, transport):
    check_scales(placed, block, np.float32, transport, True, lambda x: Array.from_numpy(x, 0))


@pytest.mark.parametrize("target", checks.NAMES)
@pytest.mark.parametrize("source", checks.NAMES)
def test_conversions(source, target):
    checks.check_conversions(source, target)


@pytest.mark.timeout(600)
def test_random_faults():
    """Each kind twice; ``python -m tests.transfer.faults --gpus 2 --faults 50`` runs more."""
    assert campaign(2 * len(KINDS), 1, gpus=len(cuda.visible_devices())) == []
