"""Cases: RoPE, repeated K and V, causal attention with grouped queries, also of documents and with a window."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.kernels.zoo import Case, Zoo, as_array, backward_of, in_order, size_of, to_host
from kos.memory.arena import Arena
from kos.train.ops import Attend, Mask
from kos.train.ops import numpy as reference


def rope(zoo: Zoo, n: int, backward: bool = False) -> Case:
    """In place, of q and k; torch's version writes to another array."""
    heads, d, length = zoo.heads + zoo.kv_heads, zoo.head_dim, min(n, 1024)
    qkv = zoo.random(n, (heads + zoo.kv_heads) * d)
    frequencies = [10_000.0 ** (-i / (d // 2)) for i in range(d // 2)]
    tables = zoo.ops.rope_tables(frequencies, range(length), None)
    cos, sin = (torch.tensor(zoo.ops.to_host(t), device=qkv.device)[:, None].repeat(1, 1, 2) for t in tables)
    turned = qkv[:, : heads * d].view(-1, length, heads, d)
    name = "rope_backward" if backward else "rope"

    def expected() -> list[np.ndarray]:
        x, tables64 = to_host(qkv, columns=True), reference.rope_tables(frequencies, range(length), np.float64)
        getattr(reference, name)(x, tables64, d, heads, Arena())
        return [x]

    leaf = turned.detach().requires_grad_(backward)
    theirs = functools.partial(zoo.functions["rope"], leaf, cos, sin)
    row, items, sign = qkv.shape[1], turned.numel() // 2, -1 if backward else 1
    return zoo.case(
        name, qkv, tables, d, heads, zoo.arena, writes=[qkv], expected=expected,
        naive=zoo.naive("rope", items, qkv, np.float32(10_000), length, d // 2, heads, row, sign, items),
        torch=backward_of(theirs(), [leaf], turned) if backward else theirs,
    )  # fmt: skip


rope_backward = functools.partial(rope, backward=True)


def repeat_kv(zoo: Zoo, n: int) -> Case:
    """K and V once for every query head."""
    group, qkv, kv = zoo.heads // zoo.kv_heads, *_packed(zoo, zoo.random, n)
    repeated = zoo.empty(n, 2 * zoo.heads, zoo.head_dim)
    return Case(
        nbytes=size_of(kv, repeated),
        naive=_repeat(zoo, qkv, repeated),
        torch=lambda: zoo.functions["repeat_kv"](kv, group),
        writes=[repeated],
        expected=lambda: [np.repeat(to_host(kv), group, axis=1)],
    )


def repeat_kv_backward(zoo: Zoo, n: int) -> Case:
    """The sum over the query heads of a group, in float32 as atomics leave them."""
    group, d_qkv, d_kv = zoo.heads // zoo.kv_heads, *_packed(zoo, zoo.empty, n)
    d_repeated = zoo.random(n, 2 * zoo.heads, zoo.head_dim, dtype=torch.float32)
    return Case(
        nbytes=size_of(d_repeated, d_kv),
        naive=_repeat_backward(zoo, d_repeated, d_qkv),
        torch=lambda: zoo.functions["repeat_kv_backward"](d_repeated, group, zoo.dtype),
        writes=[d_kv],
        expected=lambda: [to_host(d_repeated).reshape(n, -1, group, zoo.head_dim).sum(2)],
    )


def attention(zoo: Zoo, n: int, backward: bool = False, documents: bool = False, window: bool = False) -> Case:
    """Causal, of samples as long as the preset's; of documents, or with a window, of an eighth of that."""
    heads, kv_heads, d, length = zoo.heads, zoo.kv_heads, zoo.head_dim, min(n, zoo.seq_len)
    qkv, d_out = zoo.random(n, (heads + 2 * kv_heads) * d), zoo.random(n, heads * d)
    out, d_qkv = zoo.empty(*d_out.shape), zoo.empty(*qkv.shape)
    lse = zoo.empty(n // length, heads, length, dtype=torch.float32)
    a_qkv, a_d_out, a_out, a_d_qkv, a_lse = map(as_array, (qkv, d_out, out, d_qkv, lse))
    part = -(-length // 8) if documents or window else length
    mask, mask64 = _masks(zoo, n // length, length, part, documents, window) if part < length else (None, None)

    attend = Attend(a_qkv, heads, kv_heads, a_out, a_lse, mask)

    def run(backward: bool) -> None:
        if backward:
            zoo.ops.attention_backward(attend, a_d_out, a_d_qkv, zoo.arena)
        else:
            zoo.ops.attention(attend, zoo.arena)

    def expected() -> list[np.ndarray]:
        x, dy = to_host(qkv, columns=True), to_host(d_out, columns=True)
        y, dx, lse64 = np.empty_like(dy), np.empty_like(x), np.empty(lse.shape)
        reference.attention(Attend(x, heads, kv_heads, y, lse64, mask64), Arena())
        reference.attention_backward(Attend(x, heads, kv_heads, y, lse64, mask64), dy, dx, Arena())
        return [dx] if backward else [y, lse64]

    if backward:
        torch.cuda.synchronize()
        run(False)
        torch.cuda.synchronize()
    parts = qkv.view(-1, length, heads + 2 * kv_heads, d).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
    leaves = [part.detach().requires_grad_(backward) for part in parts]
    theirs = functools.partial(F.scaled_dot_product_attention, *leaves, is_causal=True, enable_gqa=True)
    naive = _attention_backward if backward else _attention
    tensors = (d_out, qkv, out, lse, d_qkv) if backward else (qkv, out, lse)
    d_theirs = d_out.view(-1, length, heads, d).transpose(1, 2)
    seen = length**2 / 2 if mask64 is None else (np.arange(1, length + 1) - mask64.first_key[0]).sum()
    case = Case(
        nbytes=size_of(*tensors),
        fast=lambda: run(backward),
        naive=naive(zoo, length, *tensors) if mask is None else None,
        torch=backward_of(theirs(), leaves, d_theirs) if backward and mask is None else theirs,
        writes=[d_qkv] if backward else [out, lse],
        expected=expected,
        flops=4.0 * (n // length) * float(seen) * heads * d * (2.5 if backward else 1),
    )
    if mask is None:
        return case
    varlen = functools.partial(_varlen, part if documents else length, part if window else None)
    flex = functools.partial(_flex, part if documents else length, part if window else length)
    return case._replace(
        torch=_built_once(varlen, leaves, d_theirs if backward else None),
        compiled=_built_once(flex, leaves, d_theirs if backward else None),
    )


attention_backward = functools.partial(attention, backward=True)
attention_documents = functools.partial(attention, documents=True)
attention_documents_backward = functools.partial(attention, backward=True, documents=True)
attention_window = functools.partial(attention, window=True)
attention_window_backward = functools.partial(attention, backward=True, window=True)


def _masks(zoo: Zoo, samples: int, length: int, part: int, documents: bool, window: bool) -> tuple[Mask, Mask]:
    """Of documents of ``part`` tokens, or a window of so many: the device's and the host's."""
    starts = np.tile(np.arange(length, dtype=np.int32) // part * part * documents, (samples, 1))
    on_host = Mask(*np.zeros((2, samples, length), np.int32))
    reference.attention_mask(starts, part if window else None, on_host)
    of_device, *both = (zoo.zeros(samples, length, dtype=torch.int32) for _ in range(3))
    of_device.copy_(torch.from_numpy(starts))
    torch.cuda.synchronize()
    mask = Mask(*map(as_array, both))
    zoo.ops.attention_mask(as_array(of_device), part if window else None, mask)
    torch.cuda.synchronize()
    return mask, on_host


def _built_once(
    build: Callable[..., Callable[[], torch.Tensor]], leaves: Sequence[torch.Tensor], d_out: torch.Tensor | None
) -> Callable[[], Any]:
    """A run of what ``build(leaves)`` gives, or with ``d_out`` of its backward; built at the first run."""

    @functools.cache
    def built() -> Callable[[], Any]:
        forward = build(leaves)
        return forward if d_out is None else backward_of(forward(), leaves, d_out)

    return lambda: built()()


def _varlen(document: int, window: int | None, leaves: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Torch's FlashAttention of sequences one after another."""
    from torch.nn.attention.varlen import varlen_attn

    samples, _, length, _ = leaves[0].shape
    ends = [min(at + document, length) for at in range(0, length, document)]
    starts = torch.tensor([0, *(b * length + end for b in range(samples) for end in ends)], dtype=torch.int32)
    starts = starts.to(leaves[0].device)
    more: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        more["enable_gqa"] = True

    def run() -> torch.Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in leaves)
        out = varlen_attn(q, k, v, starts, starts, document, document, **more)
        return out.view(samples, length, *out.shape[1:]).transpose(1, 2)

    return run


def _flex(document: int, window: int, leaves: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    from torch._functorch import config
    from torch.nn.attention.flex_attention import flex_attention

    config.donated_buffer = False  # a backward is run many times
    blocks = _flex_blocks(document, window, leaves[0].shape[2], leaves[0].device)
    return functools.partial(torch.compile(flex_attention), *leaves, block_mask=blocks, enable_gqa=True)


@functools.cache
def _flex_blocks(document: int, window: int, length: int, device: torch.device) -> Any:
    """One for all cases: another function would be compiled again."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (q - k < window) & (q // document == k // document)

    return create_block_mask(sees, None, None, length, length, device=device)


def attention_to(zoo: Zoo, n: int, backward: bool = False) -> Case:
    """Of all queries to the first half of another rank's keys; torch's version merges and adds nothing."""
    heads, kv_heads, d, length = zoo.heads, zoo.kv_heads, zoo.head_dim, min(n, zoo.seq_len)
    queries, keys, wide = slice(0, length), slice(0, length // 2), torch.float32
    qkv, kv, d_out = (zoo.random(n, count * d) for count in (heads + 2 * kv_heads, 2 * kv_heads, heads))
    out = zoo.random(n, heads * d, dtype=zoo.dtype if backward else wide)
    lse = zoo.random(n // length, heads, length, dtype=wide) + 8
    d_qkv, d_kv = (zoo.random(*x.shape, dtype=wide) for x in (qkv, kv))
    a_qkv, a_kv, a_d_out, a_out, a_lse, a_d_qkv, a_d_kv = map(as_array, (qkv, kv, d_out, out, lse, d_qkv, d_kv))
    attend = Attend(a_qkv, heads, kv_heads, a_out, a_lse).to(a_kv, queries, keys)

    def run() -> None:
        if backward:
            zoo.ops.attention_backward(attend, a_d_out, a_d_qkv, zoo.arena, a_d_kv)
        else:
            zoo.ops.attention(attend, zoo.arena)

    def expected() -> list[np.ndarray]:
        x, dy, y, dx = (to_host(array, columns=True) for array in (qkv, d_out, out, d_qkv))
        others, lse64 = np.ascontiguousarray(to_host(kv).T), to_host(lse)
        attend64, d_others = Attend(x, heads, kv_heads, y, lse64).to(others, queries, keys), np.empty_like(others)
        if backward:
            reference.attention_backward(attend64, dy, dx, Arena(), d_others)
            return [dx, d_others.T]
        reference.attention(attend64, Arena())
        return [y, lse64]

    q = qkv.view(-1, length, heads + 2 * kv_heads, d).transpose(1, 2)[:, :heads]
    both = kv.view(-1, length, 2 * kv_heads, d).transpose(1, 2)[:, :, keys].split([kv_heads, kv_heads], 1)
    leaves = [part.detach().requires_grad_(backward) for part in (q, *both)]
    theirs = functools.partial(F.scaled_dot_product_attention, *leaves, enable_gqa=True)
    return Case(
        nbytes=size_of(qkv, kv, out, lse) + (size_of(d_out, d_qkv, d_kv) if backward else size_of(out, lse)),
        fast=run,
        torch=backward_of(theirs(), leaves, d_out.view(-1, length, heads, d).transpose(1, 2)) if backward else theirs,
        writes=[d_qkv, d_kv] if backward else [out, lse],
        expected=expected,
        flops=2.0 * n * length * heads * d * (2.5 if backward else 1),
    )


attention_to_backward = functools.partial(attention_to, backward=True)


# --- the naive versions ------------------------------------------------------------------------------


def _packed(zoo: Zoo, make: Callable[..., torch.Tensor], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """qkv (N, W), and in it the heads of k and v (N, 2K, d)."""
    qkv = make(n, (zoo.heads + 2 * zoo.kv_heads) * zoo.head_dim)
    return qkv, qkv.view(n, -1, zoo.head_dim)[:, zoo.heads :]


def _repeat(zoo: Zoo, qkv: torch.Tensor, repeated: torch.Tensor) -> Callable[[], None]:
    items = repeated.numel()
    return zoo.naive("repeat_kv", items, qkv, repeated, zoo.heads, zoo.kv_heads, zoo.head_dim, items)


def _repeat_backward(zoo: Zoo, d_repeated: torch.Tensor, d_qkv: torch.Tensor) -> Callable[[], None]:
    items = len(d_qkv) * 2 * zoo.kv_heads * zoo.head_dim
    return zoo.naive("repeat_kv_backward", items, d_repeated, d_qkv, zoo.heads, zoo.kv_heads, zoo.head_dim, items)


def _attention(zoo: Zoo, length: int, qkv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Callable[[], None]:
    """On repeated K and V."""
    repeated = zoo.empty(len(qkv), 2 * zoo.heads, zoo.head_dim)
    tensors, sizes = (qkv, repeated, out, lse), (length, zoo.heads, zoo.kv_heads, zoo.head_dim)
    return in_order(_repeat(zoo, qkv, repeated), _by_query(zoo, "attention", *tensors, *sizes))


def _attention_backward(
    zoo: Zoo, length: int, d_out: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    d_qkv: torch.Tensor,
) -> Callable[[], None]:  # fmt: skip
    """dK and dV by atomics, for every query head, then summed over groups."""
    repeated = zoo.empty(len(qkv), 2 * zoo.heads, zoo.head_dim)
    d_repeated = zoo.empty(*repeated.shape, dtype=torch.float32)
    tensors = (d_out, qkv, repeated, out, lse, d_qkv, d_repeated)
    sizes = (length, zoo.heads, zoo.kv_heads, zoo.head_dim)
    return in_order(
        _repeat(zoo, qkv, repeated),
        functools.partial(zoo.ops.zero, as_array(d_repeated)),
        _by_query(zoo, "attention_backward", *tensors, *sizes),
        _repeat_backward(zoo, d_repeated, d_qkv),
    )


def _by_query(zoo: Zoo, name: str, first: torch.Tensor, *more: torch.Tensor | int) -> Callable[[], None]:
    """A block for each head of each query, of whole warps."""
    return zoo.naive(name, len(first) * zoo.heads, first, *more, block=-(-zoo.head_dim // 32) * 32)
