"""An engine's training beside torch's: the same weights, tokens, schedule and AdamW."""

import math

import pytest

import kos
from kos.train.config.flags import parse
from kos.train.data.batches import load_data
from kos.train.device.choose import make_device
from kos.train.model.initial import init_weights
from kos.train.ops.parameters import Parameters
from kos.train.parallel.mesh import Mesh

SETTINGS = """
--hidden-size 256 --num-hidden-layers 3 --num-attention-heads 4 --num-key-value-heads 2 --intermediate-size 512
--batch-size 16 --seq-len 64 --lr 1e-3 --warmup-steps 10 --documents cross
""".split()  # noqa: SIM905 (as it is typed)
"""For some 300 steps on Python's sources, of which those see a small part: nothing is learned by heart, and rounding
does not grow (at three times the rate two runs in fp32 end 1% apart).  ``torch_llama`` knows no documents, so attention
crosses them: which sequences have a boundary depends on Python's version."""


def torch_llama(torch, config, weights, tokens):
    """The logits, by the book: K and V repeated, scores whole, frequencies as in transformers."""
    F = torch.nn.functional
    B, T = tokens.shape
    H, K, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    inverse = 1.0 / config.rope_theta ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    if config.rope_scaling:
        s, wavelength = config.rope_scaling, 2 * math.pi / inverse
        context = s.original_max_position_embeddings
        smooth = (context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        between = (1 - smooth) * inverse / s.factor + smooth * inverse
        scaled = torch.where(wavelength > context / s.low_freq_factor, inverse / s.factor, between)
        inverse = torch.where(wavelength < context / s.high_freq_factor, inverse, scaled)
    angles = torch.arange(T, dtype=torch.float64)[:, None] * torch.cat([inverse, inverse])[None]
    dtype = next(iter(weights.values())).dtype
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def norm(x, name):
        return weights[name] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps))

    def rotate(x):
        return x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin

    x = weights["model.embed_tokens.weight"][tokens]
    mask = torch.full((T, T), -torch.inf, dtype=dtype).triu(1)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."

        def linear(x, name, layer=layer):
            return x @ weights[f"{layer}{name}.weight"].T

        y = norm(x, layer + "input_layernorm.weight")
        q, k, v = (
            linear(y, f"self_attn.{name}_proj").view(B, T, heads, d).transpose(1, 2)
            for name, heads in (("q", H), ("k", K), ("v", K))
        )
        q, k = rotate(q), rotate(k)
        k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)
        p = (q @ k.transpose(-1, -2) / math.sqrt(d) + mask).softmax(-1)
        x = x + linear((p @ v).transpose(1, 2).reshape(B, T, H * d), "self_attn.o_proj")
        y = norm(x, layer + "post_attention_layernorm.weight")
        x = x + linear(F.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj")
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return norm(x, "model.norm.weight") @ head.T


def losses_beside_torch(device, dtype, steps, *flags):
    """The losses of an engine, and of a plain model and ``torch.optim.AdamW`` with fp32 weights, cast for the pass."""
    torch = pytest.importorskip("torch")
    flags = [*SETTINGS, "--steps", str(steps), "--device", device, "--dtype", dtype, *flags]
    config = parse(flags).for_world(1, device)
    data = load_data(config)
    shape = config.model_config_for(data.tokenizer.vocab_size)
    with kos.init() as comm:
        training = make_device(config, shape, data, Mesh(comm))
        drawn = Parameters(shape.parameter_shapes())
        init_weights(shape, drawn, config.seed)
        weights = {name: torch.tensor(value, device=device).requires_grad_() for name, value in drawn.items()}
        training.draw_weights()
        ours = []
        for step in range(steps):
            training.start_step(step, False)
            ours.append(training.finish_step(step).loss)
        training.close()
    groups = [
        {"params": [w for w in weights.values() if (w.ndim > 1) == decayed], "weight_decay": decay}
        for decayed, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps)
    schedule, theirs = config.learning_rate(), []
    with torch.device(device):
        for step in range(steps):
            tokens, targets = (torch.tensor(x, dtype=torch.int64) for x in data.batch(step)[:2])
            rounded = {name: w.to(getattr(torch, dtype)) for name, w in weights.items()}
            logits = torch_llama(torch, shape, rounded, tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), config.grad_clip)
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
            optimizer.step()
            theirs.append(float(loss.detach()))
    return ours, theirs
