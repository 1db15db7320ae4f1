"""vLLM: its workers pull their weights from a publisher (``kos.transfer``), by a weight-transfer engine named "kos".

    llm = LLM(model, weight_transfer_config=WeightTransferConfig(backend="kos"))
    llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"address": "trainer:29600"}))
    llm.start_weight_update()
    llm.update_weights(WeightTransferUpdateRequest(update_info={"timeout": 30}))
    llm.finish_weight_update()

vLLM calls ``register`` in each of its processes, because kos has an entry point in the group ``vllm.general_plugins``.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from kos.errors import InvalidArgument, TransferError
from kos.interop.weights import bind


def register() -> None:
    """Make the engine "kos" known to vLLM's factory in this process.

    A vLLM that has no such engines starts without it, with a warning: an error here would end it.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        engine = _engine()
    except ImportError as error:
        logging.getLogger(__name__).warning('vLLM has no weight-transfer engine "kos": %s', error)
        return
    with suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine("kos", engine)


class Workers:
    """The methods of a communicator that ``Subscriber`` calls, for a group of vLLM's workers (``GroupCoordinator``)."""

    def __init__(self, group: Any) -> None:
        self.rank, self._group = int(group.rank_in_group), group.cpu_group

    def all_gather_bytes(self, data: bytes, timeout: float) -> list[bytes]:
        """The bytes of all workers, in rank order.  Raises TransferError after ``timeout`` seconds."""
        sizes = self._all_gather(np.array([len(data)]), timeout)
        padded = np.zeros(max(int(size[0]) for size in sizes), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        pairs = zip(self._all_gather(padded, timeout), sizes, strict=True)
        return [each[: int(size[0])].tobytes() for each, size in pairs]

    def _all_gather(self, array: np.ndarray, timeout: float) -> list[np.ndarray]:
        import torch

        found = [torch.from_numpy(np.empty_like(array)) for _ in range(self._group.size())]
        work = torch.distributed.all_gather(found, torch.from_numpy(array), self._group, async_op=True)
        try:
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise TransferError(f"expected an answer of all vLLM workers, got: {error}") from error
        return [each.numpy() for each in found]


def _engine() -> type:
    """The class of the engine, which inherits from vLLM's."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.distributed.parallel_state import get_world_group
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        """``address`` of the publisher; how long to wait for it, in seconds; options of ``Subscriber``."""

        address: str
        timeout: float = 60.0
        transport: str = "auto"
        streams: int = 4
        staged: bool = True

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        """The arguments of ``Subscriber.update``."""

        timeout: float = 60.0
        verify: bool = False

    class KosWeightTransferEngine(WeightTransferEngine):
        """Pulls the newest version into the parameters of this worker's model: the same version on all workers."""

        init_info_cls, update_info_cls, supports_draft_weight_update = InitInfo, UpdateInfo, False
        subscriber: Any = None

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            """Raises InvalidArgument for a quantized model, because vLLM rewrites its parameters after loading."""
            if (method := self.model_config.quantization) is not None:
                raise InvalidArgument(f"expected a model that vLLM does not quantize, got quantization {method!r}")
            self.shutdown()
            options = {"transport": init_info.transport, "streams": init_info.streams, "staged": init_info.staged}
            self.subscriber = bind(
                init_info.address, self.model, rules="vllm", rank=get_tensor_model_parallel_rank(),
                ranks=self.parallel_config.tensor_parallel_size, timeout=init_info.timeout,
                comm=Workers(get_world_group()), **options,
            )  # fmt: skip

        def start_weight_update(self) -> None:
            """Does nothing, because the parameters change in place."""

        finish_weight_update = start_weight_update

        def receive_weights(self, update_info: UpdateInfo) -> None:
            """Raises the errors of ``Subscriber.update``."""
            if self.subscriber is None:
                raise InvalidArgument("expected init_weight_transfer_engine before update_weights, got none")
            self.subscriber.update(update_info.timeout, verify=update_info.verify)

        def shutdown(self) -> None:
            """Close the connections to the publisher."""
            if self.subscriber is not None:
                self.subscriber.close()
                self.subscriber = None

    return KosWeightTransferEngine
