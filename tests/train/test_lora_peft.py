"""Adapters beside the library peft: logits, the gradients of a step, and folders both ways.

The results of peft, in float64, are recorded (``tests.goldens``).
"""

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kos.train import load
from kos.train.checkpoint import adapter, huggingface
from kos.train.config.flags import parse
from kos.train.layers.lora import is_adapter
from kos.train.model.families import GPT2Config, Olmo2Config, Qwen2Config, Qwen3Config
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import Model
from kos.train.model.peft import CONFIG, model_of, to_peft
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import Parameters
from tests.goldens import distance, sketch
from tests.packages import Package
from tests.train.models import loss_and_gradients, random_weights, save_model
from tests.train.of_transformers import precise, torch
from tests.train.runs import run

peft = Package("peft")

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**{**SHAPE, "head_dim": 16}, tie_word_embeddings=True),
    "olmo2": Olmo2Config(**SHAPE),
    "gpt2": GPT2Config(**{**SHAPE, "num_key_value_heads": 4, "intermediate_size": 128, "tie_word_embeddings": True}),
}
LLAMAS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ["q_proj", "v_proj"]
TARGETS = {**dict.fromkeys(FAMILIES, LLAMAS), "gpt2": (["c_attn", "c_proj", "c_fc"], ["c_attn"])}
TOKENS, NEXT = np.random.default_rng(2).integers(0, 97, (2, 3, 20), dtype=np.int32)


@pytest.fixture(scope="module", params=FAMILIES)
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / request.param
    save_model(folder, FAMILIES[request.param], base_weights(request.param))
    return Path(folder)


def base_weights(family: str) -> Parameters:
    return random_weights(FAMILIES[family], np.random.default_rng(1))


def drawn(name: str, shape: list[int]) -> np.ndarray:
    """An adapter's values, none of which is 0."""
    return (np.random.RandomState(crc32(name.encode())).standard_normal(shape) * 0.2).astype(np.float32)


def adapted(family: str, targets: list[str] | str, rank: int = 5, **more: Any) -> Any:
    """The model of peft."""
    model = precise(FAMILIES[family], base_weights(family))
    settings = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **more)
    return peft.get_peft_model(model, settings)


def of_peft(family: str, targets: list[str] | str, folder: Path, rank: int = 5, **more: Any) -> dict[str, Any]:
    """The folder that peft writes, its logits, its loss, and the gradients of the adapters."""
    model = adapted(family, targets, rank, **more)
    adapters = {name.replace(".default", ""): w for name, w in model.named_parameters() if "lora" in name}
    with torch.no_grad():
        for name, weight in adapters.items():
            weight.copy_(torch.tensor(drawn(name, [*weight.shape])))
    logits = model(torch.tensor(TOKENS)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(NEXT).flatten().long())
    loss.backward()
    model.save_pretrained(folder)
    saved = json.loads((folder / CONFIG).read_text())
    del saved["base_model_name_or_path"], saved["peft_version"]
    if isinstance(saved["target_modules"], list):
        saved["target_modules"].sort()
    return {
        "config": saved, "logits": sketch(logits.detach().numpy()), "loss": loss.item(),
        "shapes": {name: [*tensor.shape] for name, tensor in load_file(folder / adapter.WEIGHTS).items()},
        "gradients": {name: sketch(weight.grad.numpy()) for name, weight in adapters.items()},
    }  # fmt: skip


def write_folder(theirs: dict[str, Any], base: Path, folder: Path) -> Path:
    """The folder of peft, with its settings and the names and shapes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({**theirs["config"], "base_model_name_or_path": str(base)}))
    save_file({name: drawn(name, shape) for name, shape in theirs["shapes"].items()}, folder / adapter.WEIGHTS)
    return folder


@pytest.mark.parametrize("kind", ["all-matrices", "some-matrices", "all-linear"])
def test_logits_and_gradients_of_a_folder_of_peft(base, kind, tmp_path, golden):
    """For ``all-linear``, peft writes the full name of each matrix."""
    targets = TARGETS[base.name][kind == "some-matrices"] if kind != "all-linear" else kind
    theirs = golden(f"{base.name}, {kind}", lambda: of_peft(base.name, targets, tmp_path / "theirs"))
    assert (kind == "all-linear") == all(".0." in each or ".1." in each for each in theirs["config"]["target_modules"])
    check_folder(theirs, base, write_folder(theirs, base, tmp_path))


PATTERN = {"gpt2": r".*\.(0\.attn\.c_attn|1\.mlp\.c_(fc|proj))"}
OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {  # the settings of peft, and the flags of kos
    "rslora": ({"use_rslora": True}, ["--rslora"]),
    "layers": ({"layers_to_transform": [1]}, ["--lora-layers=1"]),
    "pattern": ({}, []),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_settings_of_peft(base, kind, tmp_path, golden):
    """A run with the flags of kos writes the same settings."""
    targets, (more, flags) = TARGETS[base.name][1], OTHERS[kind]
    pattern = PATTERN.get(base.name, r".*\.0\..*(q|v)_proj|.*1\.mlp\.(up|down)_proj")
    wanted = targets if kind != "pattern" else pattern
    theirs = golden(f"{base.name}, {kind}", lambda: of_peft(base.name, wanted, tmp_path / "theirs", **more))
    folder = write_folder(theirs, base, tmp_path / "written")
    check_folder(theirs, base, folder)
    flags = [f"--init-from={base}", "--lora=5", "--lora-alpha=8", *flags]
    flags += [f"--lora-targets={wanted if kind == 'pattern' else ','.join(wanted)}"]
    for of_run in (flags, [f"--init-from={folder}"]):
        lora = parse(of_run).model_config_for(97).lora
        assert lora == model_of(folder).lora
    settings = to_peft(model_of(folder), str(base))
    expected = {**theirs["config"], "base_model_name_or_path": str(base)}
    assert settings == {name: expected[name] for name in settings} | {"inference_mode": True}


def check_folder(theirs: dict[str, Any], base: Path, folder: Path) -> None:
    """The logits, the loss and the gradients of kos are those of peft."""
    assert distance(load(folder).logits(TOKENS), theirs["logits"]) < 1e-5
    config = model_of(folder)
    weights = Parameters(config.parameter_shapes(), np.float32, config.fused_groups())
    files = adapter.Joined(huggingface.weight_files(base, config.base.parameter_shapes()),
                           adapter.files_of(folder, config))  # fmt: skip
    for name, weight in weights.items():
        weight[...] = files.read(name)
    gradients = Parameters({name: shape for name, shape in weights.shapes.items() if is_adapter(name)})
    got = loss_and_gradients(Model(config, numpy_ops), weights, TOKENS, NEXT, gradients, accumulate=False)
    assert got == pytest.approx(theirs["loss"], rel=1e-5)
    found = {huggingface.name_as_saved(name): gradient for name, gradient in gradients.items()}
    assert found.keys() == theirs["gradients"].keys()
    for name, gradient in found.items():
        assert distance(gradient, theirs["gradients"][name]) < 1e-5, name


def loads(family: str, targets: list[str], saved: Path, ours: np.ndarray) -> bool:
    """Whether peft loads a folder, and has the same logits."""
    model = precise(FAMILIES[family], base_weights(family))
    theirs = peft.PeftModel.from_pretrained(model, saved)
    assert any(weight.abs().max() > 0 for name, weight in theirs.named_parameters() if "lora_B" in name)
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    return bool(np.linalg.norm(ours - expected) < 1e-5 * np.linalg.norm(expected))


def test_a_run_saves_a_folder_of_peft_and_goes_on_from_one(base, tmp_path, golden):
    """Its settings and tensors are those that peft writes; its logits are those of kos."""
    data, numbers = tmp_path / "numbers.bin", np.random.default_rng(3).integers(0, 97, 4000).astype("<u2")
    np.append(np.array([20240520, 1, len(numbers)] + [0] * 253, "<i4").view("<u2"), numbers).tofile(data)  # llm.c's
    flags = [f"--data={data}", "--steps=3", "--batch-size=4", "--seq-len=32", "--eval-batches=0", "--sample-tokens=0",
             "--device=cpu"]  # fmt: skip
    out = tmp_path / "run"
    lora = ["--lora=3", "--lora-alpha=8", f"--init-from={base}", "--lr=1e-2"]
    run(parse([*flags, *lora, f"--out={out}", "--dp=2" if base.name == "gpt2" else "--pp=2"]), 2)
    saved = out / "checkpoints" / "step-3"
    settings, tensors = json.loads((saved / CONFIG).read_text()), load_file(saved / adapter.WEIGHTS)
    targets = settings["target_modules"]
    theirs = golden(f"{base.name}, of a run", lambda: of_peft(base.name, targets, tmp_path / "theirs", 3))
    assert {name: [*tensor.shape] for name, tensor in tensors.items()} == theirs["shapes"]
    expected = {**theirs["config"], "base_model_name_or_path": settings["base_model_name_or_path"]}
    assert {**settings, "target_modules": sorted(targets)} == {name: expected[name] for name in settings}
    assert any(abs(tensor).max() > 0 for name, tensor in tensors.items() if "lora_B" in name)
    ours = load(out).logits(TOKENS)
    assert golden(f"{base.name}, is loaded", lambda: loads(base.name, targets, saved, ours))
    folder = write_folder(theirs, base, tmp_path / "again")
    run(parse([*flags, "--lr=1e-9", f"--init-from={folder}", f"--out={tmp_path / 'more'}"]))
    assert distance(load(tmp_path / "more").logits(TOKENS), theirs["logits"]) < 1e-4
