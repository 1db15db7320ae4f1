"""``kos.interop.vllm``, on a stand-in for the interface that vLLM 0.32 publishes."""

import json
import sys
from typing import Any

import numpy as np
import pytest

from kos.errors import InvalidArgument
from kos.interop.vllm import register
from kos.transfer import Placement, Publisher
from tests.interop.vllm_stand_in import TENSORS, install, make_engine, tensor
from tests.packages import needs
from tests.transfer.gpu_process import Program

pytestmark = needs("torch")


def ask(worker: Program, name: str, **argument: Any) -> None:
    worker.write_line(json.dumps([name, argument]))


def test_workers_of_tensor_parallelism(monkeypatch, tmp_path):
    """Both get the same version in place, also if the publisher goes on between their calls."""
    monkeypatch.setenv("KOS_SECRET", "of the tests")
    held = {name: (np.zeros(shape, np.float32), Placement.whole(shape)) for name, shape in TENSORS.items()}
    made = [Program("tests.interop.vllm_stand_in", str(rank), "2", str(tmp_path / "store")) for rank in range(2)]
    with made[0], made[1], Publisher(None, held) as publisher:
        assert [each.read_line() for each in made] == ["ready"] * 2

        def publish(version):
            for name, (array, _) in held.items():
                array[...] = tensor(name, version)
            publisher.publish(version)

        publish(0)
        for each in made:
            ask(each, "init", address=publisher.address)
        places = [json.loads(each.read_line()) for each in made]
        for version in (1, 2):
            publish(version)
            ask(made[0], "update", timeout=60)
            publish(version + 1)
            ask(made[1], "update", timeout=60)
            found = [json.loads(each.read_line()) for each in made]
            got = found[0][0]
            assert found[1][0] == got and got in (version, version + 1)
            for rank, (_, *rest) in enumerate(found):
                rows = [np.split(tensor(f"{name}_proj.weight", got), 2)[rank] for name in "qkv"]
                columns = np.split(tensor("o_proj.weight", got), 2, axis=1)[rank]
                assert rest == [*places[rank], np.concatenate(rows).tolist(), columns.tolist()]
        ask(made[0], "update", timeout=1.0)  # the other worker does not come
        assert "expected an answer of all vLLM workers" in made[0].read_line()


def test_what_is_refused(monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("", ".distributed", ".distributed.parallel_state", ".distributed.weight_transfer",
                     ".distributed.weight_transfer.base", ".distributed.weight_transfer.factory"):  # fmt: skip
            patch.setitem(sys.modules, f"vllm{name}", None)
        install(0, None)
        engine = make_engine(1)
        with pytest.raises(InvalidArgument, match="expected init_weight_transfer_engine before update_weights"):
            engine.update_weights({})
        with pytest.raises(InvalidArgument, match="that vLLM does not quantize, got quantization 'fp8'"):
            make_engine(1, "fp8").init_transfer_engine(engine.parse_init_info({"address": "127.0.0.1:1"}))


def test_a_vllm_without_such_engines_starts(monkeypatch, caplog):
    """vLLM catches no errors of ``register``."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    register()
    assert 'vLLM has no weight-transfer engine "kos": ' in caplog.text
