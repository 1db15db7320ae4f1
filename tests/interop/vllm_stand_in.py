"""What ``kos.interop.vllm`` uses of vLLM 0.32, as its documentation describes it, and a worker process on it.

``python -m tests.interop.vllm_stand_in RANK RANKS STORE`` is a worker of tensor parallelism.  Each line of its input is
a method of the engine and its argument in JSON; it prints the result or the error.
"""

import json
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from kos.interop.vllm import register

TENSORS = {
    "q_proj.weight": (8, 4), "k_proj.weight": (4, 4), "v_proj.weight": (4, 4), "o_proj.weight": (4, 8), "more": (3,)
}  # fmt: skip


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


class WeightTransferEngine(ABC):
    """https://docs.vllm.ai/en/v0.32.0/training/weight_transfer/base/"""

    init_info_cls: type
    update_info_cls: type

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config, self.parallel_config = config, vllm_config.parallel_config
        self.model_config, self.device, self.model = vllm_config.model_config, device, model

    def parse_init_info(self, given: dict[str, Any]) -> Any:
        return self.init_info_cls(**given)

    def update_weights(self, given: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**given))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class WeightTransferEngineFactory:
    """Engines by name."""

    engines: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register_engine(cls, name: str, engine: Any) -> None:
        if name in cls.engines:
            raise ValueError(f"{name} is registered")
        cls.engines[name] = engine

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        return cls.engines[config.backend](config, vllm_config, device, model)


def install(rank: int, group: Any) -> None:
    """Make these classes importable as vLLM's."""
    def module(name: str, **contents: Any) -> None:
        made = sys.modules[f"vllm{name}"] = ModuleType(f"vllm{name}")
        vars(made).update(contents, __path__=[])

    module("")
    module(".distributed", get_tensor_model_parallel_rank=lambda: rank)
    module(".distributed.parallel_state", get_world_group=lambda: SimpleNamespace(rank_in_group=rank, cpu_group=group))
    module(".distributed.weight_transfer")
    bases = WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
    module(".distributed.weight_transfer.base", **{each.__name__: each for each in bases})
    module(".distributed.weight_transfer.factory", WeightTransferEngineFactory=WeightTransferEngineFactory)
    register()
    register()  # vLLM may call it again


def make_engine(ranks: int, quantization: str | None = None) -> Any:
    """The engine of a worker with a layer of its model."""
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = torch.nn.Linear(4, 16 // ranks, bias=False, dtype=torch.bfloat16)
            self.o_proj = torch.nn.Linear(8 // ranks, 4, bias=False)

    about = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(quantization=quantization),
    )
    return WeightTransferEngineFactory.create_engine(
        SimpleNamespace(backend="kos"), about, torch.device("cpu"), Layer()
    )


def main(rank: int, ranks: int, store: str) -> None:
    import torch

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, ranks), rank=rank, world_size=ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    install(rank, torch.distributed.group.WORLD)
    engine = make_engine(ranks)
    print("ready", flush=True)
    for line in sys.stdin:
        name, argument = json.loads(line)
        try:
            if name == "init":
                engine.init_transfer_engine(engine.parse_init_info(argument))
                found: Any = [each.data_ptr() for each in engine.model.parameters()]
            else:
                engine.start_weight_update()
                engine.update_weights(argument)
                engine.finish_weight_update()
                found = [engine.subscriber.version] + [each.data_ptr() for each in engine.model.parameters()]
                found += [each.float().tolist() for each in engine.model.parameters()]
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        print(json.dumps(found), flush=True)
    engine.shutdown()


def tensor(name: str, version: int) -> np.ndarray:
    """Numbers that bfloat16 has."""
    return (np.arange(np.prod(TENSORS[name])).reshape(TENSORS[name]) + 50 * version).astype(np.float32)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
