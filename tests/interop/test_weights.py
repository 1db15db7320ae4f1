"""``kos.interop.weights.bind``: the parameters of a torch module follow a publisher."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos.errors import InvalidArgument
from kos.interop.weights import bind
from kos.transfer import Placement, Publisher, Subscriber
from tests.interop.vllm_stand_in import TENSORS as OF_A_LAYER
from tests.packages import Package, needs

pytestmark = needs("torch")
torch = Package("torch")


def fused() -> Any:
    """A layer and an embedding as vLLM has them, of a rank of 2."""
    module = torch.nn.Module()
    module.embed_tokens = torch.nn.Embedding.from_pretrained(torch.full((64, 3), -1.0))
    module.qkv_proj = torch.nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
    module.o_proj = torch.nn.Linear(4, 4, bias=False)
    return module


TENSORS = OF_A_LAYER | {"embed_tokens.weight": (100, 3)}


def arrays(version: int) -> dict[str, tuple[np.ndarray, Placement]]:
    rng = np.random.default_rng(version)
    return {n: (rng.random(shape, dtype=np.float32), Placement.whole(shape)) for n, shape in TENSORS.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_module_with_fused_parameters(rank):
    """The rows by which the embedding of the last rank is padded are not written."""
    held = arrays(0)
    module = fused()
    with Publisher(None, held) as publisher:
        publisher.publish(0)
        before = [each.data_ptr() for each in module.parameters()]
        with bind(publisher.address, module, rules="vllm", rank=rank, ranks=2) as subscriber:
            for version in (1, 2):
                for name, (array, _) in arrays(version).items():
                    held[name][0][...] = array
                publisher.publish(version)
                assert subscriber.update(30).version == version
                rows = [held[f"{n}_proj.weight"][0] for n in "qkv"]
                rows_of_rank = np.concatenate([each[len(each) // 2 * rank :][: len(each) // 2] for each in rows])
                right = torch.from_numpy(rows_of_rank.astype(ml_dtypes.bfloat16).view(np.int16)).view(torch.bfloat16)
                assert torch.equal(module.qkv_proj.weight, right)
                columns = held["o_proj.weight"][0][:, 4 * rank : 4 * rank + 4]
                assert torch.equal(module.o_proj.weight, torch.from_numpy(columns.copy()))
                embedded = held["embed_tokens.weight"][0][64 * rank : 64 * rank + 64]
                assert (module.embed_tokens.weight[: len(embedded)].numpy() == embedded).all()
                assert (module.embed_tokens.weight[len(embedded) :] == -1).all()
        assert [each.data_ptr() for each in module.parameters()] == before


def test_a_parameter_that_the_publisher_lacks():
    expected = "^expected the publisher to have weight, got no such tensor; it has 6 tensors: .*, "
    with Publisher(None, arrays(0)) as publisher, pytest.raises(InvalidArgument, match=expected):
        bind(publisher.address, torch.nn.Linear(2, 2, bias=True))


def adapted(*adapters: str) -> Any:
    """A linear layer as peft wraps it."""
    module = torch.nn.Module()
    module.base_layer = torch.nn.Linear(4, 6)
    module.lora_A = torch.nn.ModuleDict({each: torch.nn.Linear(4, 2, bias=False) for each in adapters})
    module.lora_B = torch.nn.ModuleDict({each: torch.nn.Linear(2, 6, bias=False) for each in adapters})
    return module


ADAPTERS = {"q_proj.lora_A.weight": (2, 4), "q_proj.lora_B.weight": (6, 2)}


def published_adapters():
    return {name: (np.full(shape, 3, np.float32), Placement.whole(shape)) for name, shape in ADAPTERS.items()}


def test_adapters_of_peft():
    """The other parameters keep their values."""
    module = torch.nn.ModuleDict({"q_proj": adapted("my-own"), "norm": torch.nn.LayerNorm(3)})
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with Publisher(None, published_adapters()) as publisher:
        publisher.publish(1)
        with bind(publisher.address, module) as subscriber:
            assert subscriber.update(30).version == 1
    for name, tensor in module.state_dict().items():
        assert (tensor == 3).all() if "lora_" in name else torch.equal(tensor, before[name]), name


def test_adapters_and_the_rest():
    """Of a publisher that has both."""
    held = published_adapters() | {"q_proj.base_layer.weight": (np.ones((6, 4), np.float32), Placement.whole((6, 4)))}
    module = torch.nn.ModuleDict({"q_proj": adapted("default")})
    with Publisher(None, held) as publisher:
        publisher.publish(1)
        with pytest.raises(InvalidArgument, match="to have q_proj.base_layer.bias, got no such tensor; it has 3 "):
            bind(publisher.address, module)
        module.q_proj.base_layer.bias = None
        with bind(publisher.address, module) as subscriber:
            subscriber.update(30)
    assert (module.q_proj.base_layer.weight == 1).all() and (module.q_proj.lora_B["default"].weight == 3).all()


def test_adapters_that_cannot_be_followed():
    with Publisher(None, published_adapters()) as publisher:
        for module, expected in (
            (torch.nn.Linear(4, 6), "^expected the publisher to have weight, got no such tensor; it has 2 tensors: "
             "q_proj.lora_A.weight, q_proj.lora_B.weight; these are adapters only: --publish-merged publishes"),
            (adapted("first", "second"), "module: expected one adapter, got first, second"),
        ):  # fmt: skip
            with pytest.raises(InvalidArgument, match=expected):
                bind(publisher.address, module)


@pytest.mark.parametrize("replaced", ["data", "parameter"])
def test_a_parameter_whose_memory_was_replaced_is_refused(replaced):
    """It would keep its values."""
    module = torch.nn.Linear(8, 4, bias=False)
    with Publisher(None, {"weight": (np.ones((4, 8), np.float32), Placement.whole((4, 8)))}) as publisher:
        publisher.publish(1)
        with bind(publisher.address, module) as subscriber:
            if replaced == "data":
                module.weight.data = torch.zeros(4, 8)
            else:
                module.weight = torch.nn.Parameter(torch.zeros(4, 8))
            with pytest.raises(InvalidArgument, match="weight: expected the same memory as before"):
                subscriber.update(30)
            assert subscriber.version is None and not module.weight.any()


def test_a_module_in_8_bits():
    """``weight_scale_inv`` beside a fused weight, as vLLM has it."""
    module = torch.nn.Module()
    module.qkv_proj = torch.nn.Module()
    zeros = torch.zeros(256, 200, dtype=torch.float8_e4m3fn), torch.zeros(2, 2)
    for name, tensor in zip(("weight", "weight_scale_inv"), zeros, strict=True):
        setattr(module.qkv_proj, name, torch.nn.Parameter(tensor, requires_grad=False))
    rng = np.random.default_rng(0)
    held = {f"{n}_proj.weight": rng.normal(size=(128 if n == "q" else 64, 200)).astype(np.float32) for n in "qkv"}
    with Publisher(None, {n: (x, Placement.whole(x.shape)) for n, x in held.items()}) as publisher:
        publisher.publish(1)
        with bind(publisher.address, module, rules="vllm") as subscriber:
            subscriber.update(30)
    scales = module.qkv_proj.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :200]
    found, right = (module.qkv_proj.weight.float() * scales).numpy(), np.concatenate([*held.values()])
    assert np.abs(found - right).max() < 0.04 * np.abs(right).max() and found.any()


def test_parameters_that_are_trained_need_no_detach():
    source, target = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    placed = Placement.whole((4, 4))
    with Publisher(None, {"w": (source.weight, placed)}) as publisher:
        publisher.publish(1)
        with Subscriber(publisher.address, {"w": (target.weight, placed)}) as subscriber:
            subscriber.update(30)
            assert torch.equal(target.weight, source.weight) and target.weight.requires_grad
