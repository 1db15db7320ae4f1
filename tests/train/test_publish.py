"""``--publish``: servers get the weights of a run in every layout, as its checkpoints have them."""

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kos.comm import Communicator
from kos.errors import ConfigError
from kos.testing import spawn
from kos.train import Callback, TrainConfig, Trainer
from kos.train.export import export
from kos.transfer import Placement, Subscriber, read_catalogue
from tests.comm.tcp_ranks import free_port

STEPS = 4
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", **{**SHAPE, "num_key_value_heads": 4}}


class Server(Callback):
    """Updates after each step, and keeps a copy of every version."""

    def __init__(self, address: str) -> None:
        self.address, self.seen = address, dict[int, dict[str, np.ndarray]]()
        self.subscriber: Subscriber | None = None

    def on_step(self, trainer: Any, metrics: Any) -> None:
        self.update()

    def update(self) -> None:
        if self.subscriber is None:
            shapes = read_catalogue(self.address).offers.shapes
            wholes = {name: Placement.whole(shape) for name, shape in shapes.items()}
            self.arrays = {name: (np.zeros(each.shape, np.float32), each) for name, each in wholes.items()}
            self.subscriber = Subscriber(self.address, self.arrays)
        update = self.subscriber.update(30)
        self.seen[update.version] = {name: array.copy() for name, (array, _) in self.arrays.items()}

    def on_end(self, trainer: Any) -> None:
        assert self.subscriber is not None
        self.subscriber.close()


def run(tmp_path: Path, ranks: int, **changes: Any) -> dict[int, dict[str, np.ndarray]]:
    """The versions that a server gets."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    address = f"127.0.0.1:{free_port()}"
    values: dict[str, Any] = {
        "steps": STEPS, "batch_size": 8, "micro_batch_size": 1, "seq_len": 32, "eval_every": 0, "eval_batches": 0,
        "sample_tokens": 0, "save_every": 2, "keep": 9, "device": "cpu", "model": SHAPE, "out": tmp_path / "out",
        "data": str(tmp_path / "text.txt"), "publish": address,
    }  # fmt: skip
    config = TrainConfig.from_preset("tiny", **{**values, **changes})
    server = Server(address)

    def train(comm: Communicator) -> None:
        Trainer(config, comm, callbacks=[server] if comm.rank == 0 else [], verbose=False).run()

    spawn(train, ranks, timeout=120)
    return server.seen


def saved(folder: Path) -> dict[str, np.ndarray]:
    """The weights of a checkpoint, under the names of its files."""
    files = [path for kind in ("model", "adapter_model") for path in folder.glob(f"{kind}*.safetensors")]
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(1, {"freeze": ("model.layers.0.*",)}, id="one rank, frozen tensors"),
        pytest.param(3, {"zero": 1, "batch_size": 6, "model": GPT2}, id="dp 3 with ZeRO-1, GPT-2"),
        pytest.param(2, {"pp": 2, "model": {**SHAPE, "tie_word_embeddings": True}}, id="pp, tied"),
        pytest.param(2, {"pp": 2, "pp_schedule": "zero-bubble-v"}, id="pp, two stages a rank"),
        pytest.param(4, {"tp": 2, "zero": 1}, id="dp x tp with ZeRO-1"),
        pytest.param(4, {"tp": 4}, id="tp with copies of key/value heads"),
        pytest.param(2, {"cp": 2, "optimizer": "muon", "zero": 1}, id="cp with Muon and ZeRO-1"),
    ],
)
def test_versions_are_those_of_checkpoints(ranks, changes, tmp_path):
    seen = run(tmp_path, ranks, **changes)
    assert [*seen] == [1, 2, 3, 4]
    for step in (2, 4):
        right = saved(tmp_path / "out" / "checkpoints" / f"step-{step}")
        assert right.keys() == seen[step].keys()
        for name, tensor in right.items():
            assert (seen[step][name] == tensor).all(), name
    assert any((seen[2][name] != seen[4][name]).any() for name in seen[2])


def test_every_k_steps_and_the_last(tmp_path):
    assert [*run(tmp_path, 2, publish_every=3)] == [0, 3, 4]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Models to adapt, by type."""
    folder, found = tmp_path_factory.mktemp("bases"), dict[str, Path]()
    for name, shape in (("llama", SHAPE), ("gpt2", GPT2)):
        (folder / name).mkdir()
        run(folder / name, 1, model=shape, steps=1)
        found[name] = folder / name / "out" / "checkpoints" / "step-1"
    return found


@pytest.mark.parametrize("changes", [{"zero": 1}, {"freeze": ("*lora_A*",)}], ids=["ZeRO-1", "A is frozen"])
def test_adapters_are_published_alone(changes, tmp_path, bases):
    base = bases["llama"]
    seen = run(tmp_path, 2, out=tmp_path / "lora", init_from=str(base), lora=2, **changes)
    right = saved(tmp_path / "lora" / "checkpoints" / f"step-{STEPS}")
    assert right.keys() == seen[STEPS].keys() and all("lora_" in name for name in right)
    assert all((seen[STEPS][name] == tensor).all() for name, tensor in right.items())


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(1, {"freeze": ("*lora_A*",)}, id="one rank, A is frozen"),
        pytest.param(3, {"dtype": "fp8", "zero": 1, "batch_size": 6}, id="dp 3 with ZeRO-1, 8 bits"),
        pytest.param(4, {"tp": 2, "zero": 1}, id="dp x tp with ZeRO-1"),
        pytest.param(2, {"pp": 2, "lora_targets": ("q_proj", "down_proj")}, id="pp, two targets"),
        pytest.param(2, {"model": GPT2, "deterministic": True}, id="GPT-2, deterministic"),
    ],
)
def test_adapters_are_published_merged(ranks, changes, tmp_path, bases):
    """As ``kos export --merge`` writes them, under the names of the base."""
    base = bases["gpt2" if "model" in changes else "llama"]
    about = {"init_from": str(base), "lora": 2, "publish_merged": True, "lr": 1e-2}
    seen = run(tmp_path, ranks, out=tmp_path / "lora", **about, **changes)
    for step in (2, STEPS):
        export(tmp_path / "lora" / "checkpoints" / f"step-{step}", tmp_path / f"merged-{step}", "float32", merge=True)
        right = saved(tmp_path / f"merged-{step}")
        assert right.keys() == seen[step].keys()
        for name, tensor in right.items():
            assert np.allclose(seen[step][name], tensor, rtol=1e-5, atol=1e-7), name
    of_base = saved(base)
    adapted = {name for name in of_base if (seen[STEPS][name] != of_base[name]).any()}
    assert {name.split(".")[-2] for name in adapted} >= ({"c_attn"} if "model" in changes else {"q_proj", "down_proj"})


def test_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='--publish nowhere: address: expected "HOST:PORT"'):
        run(tmp_path, 1, publish="nowhere")
    with socket.create_server(("127.0.0.1", 0)) as other:
        busy = f"127.0.0.1:{other.getsockname()[1]}"
        for address, expected in (("192.0.2.1:0", "expected an address of this host"), (busy, "cannot listen there")):
            with pytest.raises(ConfigError, match=f"--publish {address}: (address: )?{expected}"):  # before it reads
                run(tmp_path, 2, publish=address, data=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="publish_every: expected 1 without --publish, got 5"):
        TrainConfig.from_preset("tiny", publish_every=5)
    with pytest.raises(ConfigError, match=r"publish: expected none \(argument: elastic\), got"):
        TrainConfig.from_preset("tiny", publish="127.0.0.1:0", elastic="1")
    to = {"publish": "127.0.0.1:0"}
    for given, missing in ((to, "--lora"), ({"lora": 2}, "--publish"), ({}, "--lora and --publish")):
        with pytest.raises(ConfigError, match=f"publish_merged: expected false without {missing}, got"):
            TrainConfig.from_preset("tiny", publish_merged=True, **given)
