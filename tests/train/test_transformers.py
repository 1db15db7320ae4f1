"""Folders that ranks of any layout save, in Hugging Face transformers."""

import numpy as np
import pytest

from kos.train.checkpoint import huggingface
from kos.train.model.gpt2 import GPT2Config
from kos.train.model.llama import LlamaConfig
from kos.train.parallel.mesh import Layout
from tests.train.of_transformers import needs_transformers, transformers
from tests.train.sharded import save_in, whole_state

pytestmark = needs_transformers
GPT2 = GPT2Config(83, 64, 200, 3, 4, 4, 16, 130, tie_word_embeddings=True)


@pytest.mark.parametrize("layout", [Layout(dp=3), Layout(tp=2, pp=2), Layout(dp=2, tp=4), Layout()], ids=str)
def test_what_ranks_of_any_layout_save_is_read_by_them(tmp_path, layout):
    """Of a LLaMA, and of a GPT-2 by one rank."""
    config = LlamaConfig(80, 64, 88, 3, 8, 4, 8, tie_word_embeddings=layout.pp > 1) if layout.ranks > 1 else GPT2
    whole = whole_state(config)
    path = save_in(layout, tmp_path, 1, config, whole, zero=layout.ranks > 1)
    assert (path / huggingface.INDEX).exists() == (layout.ranks > 1)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, parameter in theirs.named_parameters():
        assert np.array_equal(parameter.detach().float().numpy(), huggingface.as_saved(name, whole[name])), name
