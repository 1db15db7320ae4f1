"""The peer of ``benchmarks.train_cpu``: the same LLaMA in eager PyTorch, written to be fast there.

q, k, v and gate, up are one matrix product each, attention and RMSNorm are torch's fused kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kos.train.model import LlamaConfig


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        D, F_, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.input_norm, self.mlp_norm = nn.RMSNorm(D, eps), nn.RMSNorm(D, eps)
        self.qkv = nn.Linear(D, (self.heads + 2 * self.kv_heads) * self.d, bias=False)
        self.o = nn.Linear(self.heads * self.d, D, bias=False)
        self.gate_up = nn.Linear(D, 2 * F_, bias=False)
        self.down = nn.Linear(F_, D, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        B, T, _ = x.shape
        H, K, d = self.heads, self.kv_heads, self.d
        qkv = self.qkv(self.input_norm(x)).view(B, T, H + 2 * K, d).transpose(1, 2)
        qk, v = qkv[:, : H + K], qkv[:, H + K :]
        a, b = qk.chunk(2, -1)
        qk = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        y = F.scaled_dot_product_attention(qk[:, :H], qk[:, H:], v, is_causal=True, enable_gqa=H != K)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, H * d))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class TorchLlama(nn.Module):
    """``forward(tokens, targets) -> loss``; tied embedding."""

    def __init__(self, config: LlamaConfig, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        angles = torch.outer(torch.arange(seq_len), torch.tensor(config.rope_frequencies()))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, 0, config.initializer_range)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
