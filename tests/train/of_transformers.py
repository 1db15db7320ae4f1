"""Models of transformers: with weights of kos, and random ones in a folder.

Who imports this has the mark ``needs_transformers``.
"""

import json
from pathlib import Path
from typing import Any

from kos.train.model import huggingface
from kos.train.model.llama import LlamaConfig
from kos.train.ops.parameters import Parameters
from tests.packages import Package, needs
from tests.train.models import tensors_of

needs_transformers = needs("transformers", "torch")
transformers, torch = Package("transformers"), Package("torch")


def theirs_of(config: LlamaConfig, weights: Parameters, dtype: str = "float32") -> Any:
    """The model of a configuration of kos, with these weights."""
    settings = json.loads(json.dumps(huggingface.to_huggingface(config)))
    made = transformers.AutoConfig.for_model(**settings)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa").to(getattr(torch, dtype))
    assert type(model).__name__ == config.architecture
    state = {name: torch.tensor(array) for name, array in tensors_of(weights).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def save_random(config: Any, folder: Path) -> None:
    """Save a random model of a configuration of transformers."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.1 + ("norm" in name))
    model.save_pretrained(folder)
