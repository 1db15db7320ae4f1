"""A model, or a rank's stage of one: a list of sublayers, between a lookup and a head.

A family (``kos.train.model.llama``, ``gpt2``) says which sublayers. This is the driver that runs them, forward and
backward. ``forward`` and ``backward`` are those of a rank's stage of the pipeline. ``make_stage`` makes it,
in the order of sums that is the same in every layout, or the fastest.

Suffixes name dimensions: N = B T tokens, n those of them in this rank's residual stream (all, but for tensor
parallelism), D hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kos.errors import ConfigError, SettingError
from kos.memory.arena import Arena
from kos.train.layers import PassContext
from kos.train.layers.attention import Attention, Cache
from kos.train.layers.sublayer import Activations, Sublayer
from kos.train.model.llama import LlamaConfig, Local
from kos.train.ops import Array, Batch, Loss
from kos.train.ops.fp8 import Fp8Ops, check_sizes, linears
from kos.train.ops.linear import LinearOps, Wrapper
from kos.train.parallel import fixed_order
from kos.train.parallel.context import ContextParallel, FixedContext, Masks
from kos.train.parallel.fixed_order import LEAST_CHUNK, FixedOrder, Split, most_parts
from kos.train.parallel.gradients import Gradients, Weights
from kos.train.parallel.mesh import ALONE, Axis, Layout, Mesh
from kos.train.parallel.tensor import FixedTensorParallel, Half, PlainTensorParallel, TensorParallel

if TYPE_CHECKING:
    from kos.train.config.options import TrainConfig


class SublayerCall(NamedTuple):
    """A sublayer's forward: the arrays that it writes, and its output. Without an output it ends at what is saved."""

    sublayer: Sublayer
    saved: Activations
    out_nD: Array | None

    @property
    def has_output(self) -> bool:
        """Whether the second product is computed."""
        return self.out_nD is not None or self.saved.branch is not None


class InFlight:
    """A micro-batch in flight: what its forward saves for its backward, in ``arena``.

    Several in flight have an arena each and share the model's scratch memory.  One alone may save in that: a backward
    gives back nothing before its end, so that what is saved lies below all scratch.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._reset()

    def _reset(self) -> None:
        self.batch: Batch | None = None  # its fields are (N,)
        self.seq_len = 0
        self.masks: Mapping[int | None, Masks] = {}  # for each window that a layer has
        self.inputs: list[Array] = []  # of each layer
        self.saved: list[list[Activations]] = []  # of each sublayer; none where whole layers are computed again
        self.out_nD: Array | None = None
        self.pending: list[Callable[[PassContext], None]] = []  # of weights' gradients, deferred by a backward
        self.d_out_nD: Array | None = None  # where another stage of this rank has left it
        self.sent: Any = None  # the send of ``out_nD``

    def clear(self) -> None:
        """Prepare for another micro-batch; the data of this one is no longer needed, once it is sent."""
        if self.sent is not None:
            self.sent.wait()
        self.arena.release(0)
        self._reset()


class Model:
    """The layers of ``local`` over ``ops``, a dialect or what wraps one. Holds no weights: only shapes, and scratch.

    ``weights`` and ``gradients`` are mappings from names to arrays that also know the names of
    ``config.fused_groups()`` (``kos.train.ops.parameters.Parameters``).  Fields of a batch
    are (B, T), on the host or where ``ops`` has its arrays.

    ``recompute`` names the arena of what a forward saves (``_save``). What is cheap to make again are the outputs of
    norms and activation functions, a third of all:

    ======  ==============  ===============================  ===================================
    policy  a layer's input  products, attention              cheap to make again
    ======  ==============  ===============================  ===================================
    none    in flight       in flight                        in flight
    norms   in flight       in flight                        scratch; made again in the backward
    block   in flight       scratch; a second forward        scratch; made again in the backward
    ======  ==============  ===============================  ===================================
    """

    def __init__(
        self, config: LlamaConfig, ops: Any, *, head_rows: int | None = None, recompute: str = "none",
        local: Local | None = None, tensor: TensorParallel | None = None, context: ContextParallel | None = None,
        arena: Arena | None = None, loss: Loss | None = None,
    ) -> None:  # fmt: skip
        self.config, self.local, self.recompute = config, local or config.local(), recompute
        ops = ops if isinstance(ops, Wrapper) else LinearOps(ops)
        self.tensor, self.context = tensor or TensorParallel(ops), context or ContextParallel(ops)
        self.arena = arena or ops.make_arena()
        self._ctx = PassContext(ops, self.arena, self.tensor, self.context)
        self.embedding, self.layers, self.head = config.embed(), config.layers(self.local.layers), config.make_head()
        self.head.rows, self.head.custom_loss = head_rows or self.head.rows, loss
        self.attentions = [each for layer in self.layers for each in layer if isinstance(each, Attention)]
        self.windows = {each.window for each in self.attentions}
        self.holds_first, self.holds_last = self.local.first, self.local.last  # or another stage of this rank is that
        self.fp8: Fp8Ops | None = None  # the operations that compute products in 8 bits, if they are

    @property
    def ops(self) -> Any:
        """The operations of the dialect, which can be replaced."""
        return self._ctx.ops.innermost().inner

    @ops.setter
    def ops(self, ops: Any) -> None:
        self._ctx.ops.innermost().inner = ops

    # --- a rank's stage of the pipeline --------------------------------------------------------------------

    def forward(
        self, weights: Weights, flight: InFlight, batch: Batch, x_nD: Array | None = None, saves: bool = True,
        cache: Cache | None = None,
    ) -> Array:  # fmt: skip
        """The output of this rank's stage for a micro-batch, whose tokens the first stage looks up.

        ``x_nD`` is what the stage before gave, in memory of ``flight``, which saves what ``backward`` needs.  If
        ``saves`` is false, there is no backward: all layers use the same memory, and overwrite ``x_nD``. With a
        ``cache`` the batch is one prompt, or the next token of each of its sequences.
        """
        keep = flight.arena if saves else self.arena
        flight.batch = batch.map(lambda field: self.ops.indices(field.reshape(-1), keep))
        flight.seq_len = batch.tokens.shape[1]
        starts, (samples, length) = flight.batch.document_starts, batch.tokens.shape
        flight.masks = {window: self.context.masks(starts, window, samples, length, keep) for window in self.windows}
        ctx = self._ctx._replace(weights=weights, masks=flight.masks, cache=cache)
        if x_nD is None:
            x_nD = self.embedding.forward(ctx, flight.batch.tokens, flight.seq_len, flight.arena)
        if cache is not None and flight.seq_len == 1:
            cache.turn(ctx, {each.rope for each in self.attentions if each.rope is not None}, x_nD.dtype)
        after = [flight.arena.take(x_nD.shape, x_nD.dtype) if saves else x_nD for _ in self.layers]
        *flight.inputs, flight.out_nD = x_nD, *after
        if saves and self.recompute != "block":
            each = zip(self.layers, flight.inputs, strict=True)
            flight.saved = [self._save(layer, x, flight.seq_len, flight.arena) for layer, x in each]
        with self.arena.scope():
            saved = flight.saved
            if flight.inputs and not saved:  # nothing is saved, so layers of the same adapters use the same memory
                shared = dict[Any, list[Activations]]()
                for layer, x in zip(self.layers, flight.inputs, strict=True):
                    kind = tuple(sublayer.adapted for sublayer in layer)
                    if kind not in shared:
                        shared[kind] = self._save(layer, x_nD, flight.seq_len, self.arena)
                    first, *others = shared[kind]
                    saved = [*saved, [first._replace(x_nD=x), *others]]
            self._forward(ctx, [*itertools.chain(*map(_calls, self.layers, saved, after))])
        return flight.out_nD

    def backward(
        self, weights: Weights, flight: InFlight, into: Gradients, dx_nD: Array, *, loss: Array | None = None,
        count: Array | None = None, deferred: bool = False,
    ) -> None:  # fmt: skip
        """The gradients of this rank's stage for a micro-batch; if ``deferred``, those of matrices are left pending.

        ``dx_nD`` enters as the gradient of the stage's output and leaves as that of its input.  The last stage only
        writes it. The mean loss over the targets goes to ``loss`` (1,), float64.  Sums over targets are divided by
        ``count`` (1,), of ``ops.statistics_dtype``; default: the number of targets.
        """
        assert flight.batch is not None and flight.out_nD is not None  # there was a forward
        keep, pending = (flight.arena, flight.pending) if deferred else (self.arena, None)
        ctx = self._ctx._replace(
            weights=weights, into=into, keep=keep, masks=flight.masks, pending=pending, batch=flight.batch
        )
        if self.local.last:
            assert loss is not None
            self.head.backward(ctx, flight.out_nD, flight.batch.targets, dx_nD, loss, count, self.holds_first)
        with self.arena.scope():
            if flight.inputs or self.local.first:
                d_out_ND = self.tensor.gather(dx_nD, keep)
            for layer in reversed(self.layers):
                x_nD = flight.inputs.pop()
                with self.arena.scope():
                    saved = flight.saved.pop() if flight.saved else self._again(ctx, layer, x_nD, flight.seq_len)
                    for sublayer in reversed(layer):
                        more = self.local.first or bool(flight.inputs) or sublayer is not layer[0]
                        d_out_ND, dx_ND = self._kept(ctx, sublayer, dx_nD, d_out_ND, more)
                        d_out_ND = sublayer.backward(ctx, saved.pop(), dx_nD, d_out_ND, dx_ND, more)
            if self.local.first:
                self.embedding.backward(ctx, flight.batch.tokens, flight.seq_len, d_out_ND, self.holds_last)

    def weight_gradients(self, flight: InFlight, into: Gradients) -> None:
        """Those that a backward has left pending."""
        for gradient in flight.pending:
            gradient(self._ctx._replace(into=into))
        flight.pending.clear()

    # --- without a backward --------------------------------------------------------------------------------

    def loss(self, weights: Weights, batch: Batch) -> float:
        """The mean loss over the targets, of the whole model."""
        return self._of_whole(weights, batch, Model.loss_of)

    def logits(self, weights: Weights, tokens: Array) -> Array:
        """The logits (B, T, V), on the host; of the whole model."""
        logits = self._of_whole(weights, Batch(tokens), partial(Model.logits_of, rows=slice(0, tokens.size)))
        return logits.reshape(*tokens.shape, -1)

    def next_logits(self, weights: Weights, tokens: Array, cache: Cache | None = None) -> Array:
        """The logits (V,) of the token that follows ``tokens`` (1, T), on the host; of the whole model.

        A ``cache`` of one sequence keeps their keys and values.
        """
        last = slice(tokens.shape[1] - 1, tokens.shape[1])
        return self._of_whole(weights, Batch(tokens), partial(Model.logits_of, rows=last), cache)[0]

    def queue_next_logits(self, weights: Weights, tokens: Array, cache: Cache, out: Array) -> None:
        """out (parts, B, V / parts), float32, = the logits that follow ``tokens`` (B, 1), as in ``gather_logits``.

        ``tokens`` are the next tokens of the sequences of ``cache``.  All arrays are in the device's memory, so that a
        GPU can capture this step in a graph.
        """
        with self.ops.step(self.arena):
            self.forward(weights, flight := InFlight(self.arena), Batch(tokens), saves=False, cache=cache)
            self.ops.copy(self._logits(weights, flight, slice(0, len(tokens))), out)

    def _of_whole(self, weights: Weights, batch: Batch, result: Result, cache: Cache | None = None) -> Any:
        """``result`` of a forward of a model that is one stage."""
        with self.ops.step(self.arena):
            self.forward(weights, flight := InFlight(self.arena), batch, saves=False, cache=cache)
            found = result(self, weights, flight)
            self.tensor.check()
            return found

    def loss_of(self, weights: Weights, flight: InFlight, count: float | None = None) -> float:
        """The loss of the last stage's output: the sum over the targets, by ``count`` or, by default, their number."""
        assert flight.batch is not None and flight.out_nD is not None  # there was a forward
        ops, loss, divisor = self.ops, self.arena.take((1,), np.dtype(np.float64)), None
        if count is not None:
            divisor = self.arena.take((1,), ops.statistics_dtype(flight.out_nD.dtype))
            ops.copy(np.full_like(ops.to_host(divisor), count), divisor)
        ctx = self._ctx._replace(weights=weights, batch=flight.batch)
        self.head.loss(ctx, flight.out_nD, flight.batch.targets, loss, divisor)
        return float(ops.to_host(loss)[0])

    def losses_of(self, weights: Weights, flight: InFlight) -> np.ndarray:
        """Of each of this rank's samples, the sum of the losses of its targets, (B,), float64, on the host."""
        assert flight.batch is not None and flight.out_nD is not None  # there was a forward
        ctx = self._ctx._replace(weights=weights, batch=flight.batch)
        losses_N = self.arena.take((len(flight.batch.targets),), self.ops.statistics_dtype(flight.out_nD.dtype))
        self.head.losses(ctx, flight.out_nD, losses_N)
        each: np.ndarray = self.ops.to_host(losses_N).reshape(-1, flight.seq_len)
        return each.sum(axis=1, dtype=np.float64)

    def logits_of(self, weights: Weights, flight: InFlight, rows: slice) -> Array:
        """The logits of some rows of the last stage's output, on the host.

        They are this rank's part of them if ``tensor`` splits the rows.
        """
        return join_parts(self.ops.to_host(self._logits(weights, flight, rows)))

    def _logits(self, weights: Weights, flight: InFlight, rows: slice) -> Array:
        ctx = self._ctx._replace(weights=weights)
        logits = self.head.logits(ctx, self.head.normed(ctx, flight.out_nD)[rows])
        return self.tensor.gather_logits(logits, self.arena)

    # --- the driver ----------------------------------------------------------------------------------------

    def _save(self, layer: Sequence[Sublayer], x_nD: Array, seq_len: int, arena: Arena) -> list[Activations]:
        """Memory for what a layer's forward writes; what is cheap to make again has none, unless all is saved."""
        saved, recomputed = list[Activations](), arena if self.recompute == "none" else None
        for sublayer in layer:
            x_nD = arena.take(x_nD.shape, x_nD.dtype) if saved else x_nD
            saved.append(sublayer.save(self._ctx, x_nD, seq_len, arena, recomputed))
        return saved

    def _again(self, ctx: PassContext, layer: Sequence[Sublayer], x_nD: Array, seq_len: int) -> list[Activations]:
        """A second forward of a layer, up to what its backward needs."""
        saved = self._save(layer, x_nD, seq_len, ctx.keep)
        if saved[-1].branch is None:  # its second product is not computed again, and so not what adapters keep of it
            saved[-1] = saved[-1]._replace(row_lora_hidden=())
        self._forward(ctx, _calls(layer, saved, None))
        return saved

    def _kept(
        self, ctx: PassContext, sublayer: Sublayer, dx_nD: Array, d_out_ND: Array, more: bool
    ) -> tuple[Array, Array]:
        """The gradient of a sublayer's output, and memory for that of its input, both for all ranks' rows.

        A pending gradient of the second matrix still reads the first when the rest of the backward is over.
        """
        if ctx.pending is None or not (ctx.trains(sublayer.row) and ctx.ops.reads_16(sublayer.row.bias)):
            return d_out_ND, d_out_ND
        if d_out_ND is dx_nD and sublayer.after is None:  # the rest of the backward adds to dx_nD
            d_out_ND = ctx.keep.take(dx_nD.shape, dx_nD.dtype)
            ctx.ops.copy(dx_nD, d_out_ND)
        return d_out_ND, self.tensor.empty_rows(dx_nD, ctx.keep) if more else d_out_ND

    def _forward(self, ctx: PassContext, calls: Sequence[SublayerCall]) -> None:
        """The forward of these sublayers, one after another. The halves of the tokens take turns.

        A turn ends where a half waits for a collective, or where the other half can start one. The second half is one
        turn behind::

            half 0: gather | qkv |        | attention, o, sum |     | add, gather |                   | gate_up |
            half 1:              | gather |                   | qkv |             | attention, o, sum |         | …

        So each collective overlaps a matrix product of the other half, except at the first and last of ``calls``.
        """
        if not calls:
            return
        with self.arena.scope():
            exchange_ND = self.tensor.empty_rows(calls[0].saved.x_nD, self.arena)
            terms_ND = self.tensor.empty_terms(calls[0].saved.x_nD, self.arena, exchange_ND)
            calls = self._with_scratch(ctx, calls)
            halves = self.tensor.halves(len(calls[0].saved.columns_NW))
            memory = exchange_ND, terms_ND
            steps = [self._overlap_steps(ctx, calls, *memory, half, half is halves[-1]) for half in halves]
            next(steps[0])
            for _ in itertools.zip_longest(*steps):
                pass

    def _overlap_steps(
        self, ctx: PassContext, calls: Sequence[SublayerCall], exchange_ND: Array, terms_ND: Array, half: Half,
        last: bool,
    ) -> Iterator[None]:  # fmt: skip
        """Yields at the end of each turn. Memory: ``exchange_ND`` for gathered rows, ``terms_ND`` for terms of sums."""
        for call in calls:
            sublayer, saved, out_nD = call
            arrived = sublayer.gather_in(ctx, saved, exchange_ND, half)
            yield
            yield from sublayer.compute(ctx, saved, arrived(), half, last)
            if not call.has_output:
                return
            complete = sublayer.reduce_out(ctx, saved, terms_ND, out_nD, half)
            yield
            complete()

    def _with_scratch(self, ctx: PassContext, calls: Sequence[SublayerCall]) -> Sequence[SublayerCall]:
        """Scratch memory, the same for all, for what the calls do not save; the last that has no output needs less."""
        first, inner = calls[0].saved, dict[int, Array]()
        if all(call.saved.normed_nD is not None for call in calls):
            return calls
        unsaved = (call for call in calls if call.saved.normed_nD is None)
        fused = all(each.norm.fused(ctx, saved.x_nD, saved.statistics_n) is not None for each, saved, _ in unsaved)
        normed_nD = None if fused else self.arena.take(first.x_nD.shape, first.x_nD.dtype)

        def filled(call: SublayerCall) -> SublayerCall:
            sublayer, saved, _ = call
            inner_NF, features = saved.inner_NF, sublayer.row.columns
            if inner_NF is None and call.has_output:
                if features not in inner:
                    tokens, dtype = len(saved.columns_NW), saved.columns_NW.dtype
                    inner[features] = sublayer.empty_inner(self._ctx, tokens, dtype, self.arena)
                inner_NF = inner[features]
            own = normed_nD if saved.normed_nD is None else saved.normed_nD
            return call._replace(saved=saved._replace(normed_nD=own, inner_NF=inner_NF))

        return [*map(filled, calls)]


Result = Callable[[Model, Weights, InFlight], Any]
"""What is computed of the last stage's output, while scratch memory is in use: ``Model.loss_of``, ``logits_of``."""


def _calls(layer: Sequence[Sublayer], saved: Sequence[Activations], out_nD: Array | None) -> list[SublayerCall]:
    """A layer's forward: the output of a sublayer is the input of the next."""
    return [*map(SublayerCall, layer, saved, [*(each.x_nD for each in saved[1:]), out_nD])]


def join_parts(logits: np.ndarray) -> np.ndarray:
    """Logits (N, V) from parts of the vocabulary, (parts, N, V / parts), on the host."""
    return logits.swapaxes(0, 1).reshape(logits.shape[1], -1)


def split_of(config: TrainConfig, model: LlamaConfig, mesh: Mesh) -> Split | None:
    """How the sums within a layer are split, in every layout.  None: not split, as in a family with dp alone.

    On GPUs only long sequences are split, and features as --deterministic-parts says.  ConfigError if a rank would not
    hold whole subtrees, or for a setting whose bits depend on the layout.
    """
    parts = config.deterministic_parts
    if not config.deterministic or model.axes == ("dp",):
        if parts is not None:
            why = "none for a family with dp alone" if config.deterministic else "--deterministic"
            raise SettingError("--deterministic-parts", why, parts, also=["deterministic"])
        return None
    sizes = model.num_attention_heads, model.num_key_value_heads, model.intermediate_size, model.vocab_size
    on_gpu, tp, cp = config.device != "cpu", mesh.tp.size, mesh.cp.size
    if config.dtype == "fp8" and max(tp, parts or 1) > 1:
        option, got = ("--tp", tp) if tp > 1 else ("--deterministic-parts", parts)
        why = "1 with --deterministic in fp8, where sums over features are not split"
        raise SettingError(option, why, got, also=["deterministic", "dtype"])
    most = most_parts(sizes)
    for option, got in (("--deterministic-parts", parts or 1), (f"--deterministic --tp {tp}", tp)):
        if most % got:
            which = "the largest of 8, 4, 2 and 1 that divides heads, key/value heads, intermediate size and vocabulary"
            raise SettingError(option, f"a divisor of {most}, {which}", got, also=["tp"])
    if on_gpu and tp > 1 and config.master_weights == "none":  # the random bits depend on an element's place
        raise SettingError("--master-weights", f"float32 with --deterministic --tp {tp}", "none", also=["tp"])
    least = fixed_order.LEAST_CHUNK_ON_GPUS if on_gpu else LEAST_CHUNK
    parts = parts or (1 if on_gpu or config.dtype == "fp8" else most)
    split = Split.of(parts, config.seq_len, least)
    split.check(tp, cp, config.seq_len, least)
    return None if split == Split() and (on_gpu or config.dtype == "fp8") else split


def check_blocks(config: TrainConfig, model: LlamaConfig, layout: Layout) -> None:
    """ConfigError if ``--compress`` would give the ranks of tp, or both ends of a pipeline, different gradients.

    Codes depend on the other elements of a block.  So where one tensor is held beside different ones, no block may have
    two tensors.
    """
    tied = model.tie_word_embeddings and layout.pp > 1
    if config.compress == "none" or layout.dp * layout.cp == 1 or not (tied or layout.tp > 1):
        return
    from kos.comm.compression import BLOCK

    for name, shape in model.parameter_shapes(model.local(0, layout.tp)).items():
        if (size := math.prod(shape)) % BLOCK:
            axis, where = ("tp", "--tp") if layout.tp > 1 else ("pp", "--pp and a tied embedding")
            expected = f"tensors of a multiple of {BLOCK} elements with {where}"
            raise SettingError("--compress", expected, f"{name} of {size}", also=[axis])


def check_groups(config: TrainConfig, model: LlamaConfig) -> None:
    """ConfigError for parameter groups that miss a tensor, train none, or freeze a part of a matrix."""
    groups = config.all_groups(model)
    frozen = {name: group.frozen for group in groups for name in group.names}
    several = sum(len(group.names) for group in groups) != len(frozen)
    if several or frozen.keys() != model.parameter_shapes().keys() or all(frozen.values()):
        got = f"{[sorted(group.names) for group in groups]}"
        raise ConfigError(f"parameter groups: expected each tensor in one, and a tensor to train, got {got}")
    for names in model.fused_groups().values():
        if some := [name for name in names if frozen[name]] and [name for name in names if not frozen[name]]:
            which = f"{', '.join(names)}, which are one matrix, all frozen or all trained"
            raise ConfigError(f"parameter groups: expected {which}, got {some[0]} trained")


def check_fp8(config: TrainConfig, model: LlamaConfig, mesh: Mesh, parts: Sequence[Local]) -> None:
    """ConfigError if cuBLASLt has no product in 8 bits of a size that passes through ``parts`` have."""
    if config.dtype != "fp8" or config.device == "cpu":
        return
    split = split_of(config, model, mesh)
    pieces = (2 * mesh.tp.size if mesh.tp.size > 1 else 1) * (split.tokens if split else mesh.cp.size)
    tokens = {f"--seq-len {config.seq_len} / {pieces}": config.seq_len // pieces}
    if config.fp8_head:
        share = model.vocab_size // mesh.tp.size
        tokens[f"the vocabulary {model.vocab_size} / --tp {mesh.tp.size} (--fp8-head)"] = share
    check_sizes([layer for part in parts for layer in model.layers(part.layers)], mesh.tp.size, tokens)


def make_whole(
    config: LlamaConfig, ops: Any, tp: Axis = ALONE, local: Local | None = None, arena: Arena | None = None
) -> Model:
    """The model, or the stage ``local``, for forward passes only.

    With several ranks of ``tp``, each rank has a part of the tensors, and all rows.

    Raises SettingError as ``LlamaConfig.local`` does.
    """
    local = local or config.local(tp.rank, tp.size)
    tensor = PlainTensorParallel(ops, tp, local.vocabulary.start)
    return Model(config, ops, local=local, tensor=tensor, arena=arena)


def make_stage(
    config: TrainConfig, model: LlamaConfig, ops: Any, local: Local, mesh: Mesh, arena: Arena | None = None,
    **options: Any,
) -> Model:  # fmt: skip
    """The model of ``local``; ``options`` are those of ``Model``, ``arena`` its scratch memory."""
    copies, first = mesh.copies(max(1, mesh.tp.size // model.num_key_value_heads)), local.vocabulary.start
    arena, base = arena or ops.make_arena(), LinearOps(ops)
    tensor, context = TensorParallel(base, mesh.tp, first, copies), ContextParallel(base, mesh.cp)
    in_8 = Fp8Ops(base, arena, mesh.tp.size == 1, config.fp8_head) if config.dtype == "fp8" else None
    wrapped: Any = in_8 or base
    if (split := split_of(config, model, mesh)) is not None:
        matrices = {model.head: (0, [slice(0, len(local.vocabulary))])}
        for linear in linears(model.layers(local.layers)):
            matrices |= linear.splits(mesh.tp.size)
        wrapped = FixedOrder(wrapped, arena, split, mesh.tp, mesh.cp, matrices)
        tensor = FixedTensorParallel(base, mesh.tp, first, copies, arena, wrapped.pieces)
        if split.tokens > 1:
            context = FixedContext(base, mesh.cp, split)
    stage = Model(model, wrapped, local=local, tensor=tensor, context=context, arena=arena, **options)
    stage.fp8 = in_8
    return stage
