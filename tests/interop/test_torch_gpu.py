"""torch.distributed over kos on GPUs: streams, CUDA graphs, messages, failures, and the losses of DDP and FSDP2.

Two ranks have a GPU each, or share one; then ``peer`` carries all, and there is no result of NCCL to compare with.
"""

from importlib.util import find_spec

import pytest

from kos import cuda
from tests.interop.ranks import run

PROGRAMS, MODELS, ON_GPUS = (f"tests.interop.torch_{kind}" for kind in ("programs", "model_programs", "gpu_programs"))
COUNT = 0 if cuda.unavailable() or find_spec("torch") is None else len(cuda.visible_devices())
needs_two = pytest.mark.skipif(COUNT < 2, reason="needs 2 GPUs")
BACKENDS = [pytest.param("auto", marks=needs_two), pytest.param("nccl", marks=needs_two), "peer"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 1, reason="needs a GPU, and torch")]


@pytest.mark.parametrize("gpu", BACKENDS)
def test_collectives_give_what_gloo_gives(gpu):
    assert run(f"{ON_GPUS}:gpu_collectives", 2, "kos", gpu=gpu) == run(f"{PROGRAMS}:collectives", 2, "gloo")


@pytest.mark.parametrize("gpu", BACKENDS)
def test_all_ranks_may_send_first(gpu):
    for rank, found in enumerate(run(f"{ON_GPUS}:gpu_messages", 2, "kos", gpu=gpu)):
        assert all(values == [1 - rank + 0.5 + ("batch" in name)] * 2 for name, values in found.items()), found


@pytest.mark.parametrize("gpu", BACKENDS)
def test_operations_are_ordered_on_streams_and_the_host_does_not_wait(gpu):
    for found in run(f"{ON_GPUS}:gpu_streams", 2, "kos", gpu=gpu):
        assert all(values == [True, True] for values in found.values()), found


@pytest.mark.parametrize("gpu", BACKENDS)
def test_operations_are_captured_in_graphs(gpu):
    expected = [[2.0 * (1 + 2 * turn)] * 2 + [float(turn)] * 2 for turn in range(3)]
    assert run(f"{ON_GPUS}:gpu_graph", 2, "kos", gpu=gpu) == [expected] * 2


@pytest.mark.parametrize("gpu", BACKENDS)
def test_the_death_of_a_rank_ends_the_wait_for_a_stream(gpu):
    text, seconds = run(f"{ON_GPUS}:gpu_killed", 2, "kos", gpu=gpu)[0]
    assert "rank 1 is gone" in text and seconds < 30


@needs_two
@pytest.mark.parametrize("program", ["ddp", "ddp_join", "fsdp", "tensor_parallel"])
def test_what_is_built_on_it_gives_the_losses_of_nccl(program):
    ours = run(f"{MODELS}:{program}", 2, "kos", "cuda", gpu="nccl")
    assert ours == run(f"{MODELS}:{program}", 2, "nccl", "cuda")
