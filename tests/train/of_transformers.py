"""Models of transformers with weights of kos.

Tests use them to make recorded results (``tests.goldens``).
"""

import functools
import json
from typing import Any
from unittest import mock

from kos.train.model import huggingface
from kos.train.model.llama import LlamaConfig
from kos.train.ops.parameters import Parameters
from tests.packages import Package
from tests.train.models import tensors_of

transformers, torch = Package("transformers"), Package("torch")
rope_utils = Package("transformers.modeling_rope_utils")


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


class Rotary:
    """Their rotary embedding, with frequencies and angles in float64; theirs are float32."""

    def __init__(self, config: Any) -> None:
        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
            self.frequencies, self.length = config.rope_parameters["rope_theta"] ** -half, 1.0
        else:
            with mock.patch("torch.float", torch.float64):
                self.frequencies, self.length = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
            assert self.frequencies.dtype == torch.float64

    def __call__(self, x: Any, position_ids: Any = None, **_: Any) -> Any:
        angles = position_ids[..., None].double() * self.frequencies.repeat(2)
        return (angles.cos() * self.length).to(x.dtype), (angles.sin() * self.length).to(x.dtype)


def rms_norm(theirs: Any, x: Any) -> Any:
    """Theirs computes it in float32."""
    return torch.nn.functional.rms_norm(x, theirs.weight.shape, theirs.weight, theirs.variance_epsilon)


def precise(config: LlamaConfig, weights: Any, dtype: str = "float64") -> Any:
    """transformers' model with these weights, whose rotary positions and norms have the dtype of all else."""
    model = theirs_of(config, weights, dtype)
    if config.model_type != "gpt2":  # whose positions are learned
        model.model.rotary_emb.forward = Rotary(model.config)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(rms_norm, module)
    return model
