"""A trained model in Python: computes logits and losses, and generates text and chat answers.

The model computes on the CPU in float32, or on a GPU in bfloat16.  The ranks of a communicator can hold it together.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kos.errors import CheckpointError, ConfigError, InvalidArgument, SettingError, install, raised_as
from kos.train import checkpoint
from kos.train.checkpoint import adapter
from kos.train.data.chat import ChatTemplate, read_chat_template
from kos.train.data.documents import Document
from kos.train.data.tokenizers import NumberTokenizer, Tokenizer, has_tokenizer, make_tokenizer
from kos.train.generate import Decoder, Sampling, continue_texts, prompt_ids
from kos.train.model import peft
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import make_whole
from kos.train.ops import Batch
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import Parameters
from kos.train.parallel.failures import same_on_all, together
from kos.train.parallel.mesh import ALONE, Axis

if TYPE_CHECKING:
    from kos.comm.communicator import Communicator

GENERATION = "generation_config.json"

Message = Mapping[str, Any]
"""A message of a chat, with ``role`` and ``content``."""


class TrainedModel:
    """A model that ``load`` returns.

    ``config`` is the model's configuration, and ``tokenizer`` its tokenizer.  ``weights`` has its arrays by Hugging
    Face's names.  ``ends`` are the tokens that end a text.

    If several ranks hold the model together (``comm`` of ``load``), ``weights`` has the parts of this rank.
    ``logits``, ``loss``, ``generate``, ``stream`` and ``chat`` are then collective: all ranks must call them with the
    same arguments, and get the same results.  All ranks must read the same number of pieces of a ``stream``.  If the
    arguments differ, these methods raise ConfigError on all ranks.  They can also raise RankLost and CollectiveTimeout.
    """

    def __init__(
        self, config: LlamaConfig, weights: Parameters, tokenizer: Tokenizer, *, folder: Path = Path(),
        ends: Sequence[int] = (), ops: Any = numpy_ops, tp: Axis = ALONE,
    ) -> None:  # fmt: skip
        self.config, self.weights, self.tokenizer, self.ends = config, weights, tokenizer, tuple(ends)
        self._model, self._folder, self._ops, self._tp = make_whole(config, ops, tp), folder, ops, tp

    def __repr__(self) -> str:
        return f"<TrainedModel of {self.config.num_parameters():,} parameters, {self.config!r}>"

    def logits(self, tokens: str | ArrayLike) -> NDArray[np.float32]:
        """The logits of the next token after each token.

        For a text, or for token ids (T,), the logits are (T, V).  For token ids (B, T), they are (B, T, V).

        Raises:
            InvalidArgument: ``tokens`` is empty or longer than the context, or a token is outside the vocabulary.
        """
        self._compare(tokens=tokens)
        ids = self._ids(tokens)
        rows = np.asarray(self._model.logits(self.weights, np.atleast_2d(ids)), np.float32)
        return rows.reshape(*ids.shape, self.config.vocab_size)

    def loss(self, tokens: str | ArrayLike, targets: ArrayLike | None = None) -> float:
        """The mean cross-entropy in nats per token.

        ``targets`` are token ids in the shape of ``tokens``; -1 excludes a position.  Without ``targets``, each token
        is the target of the token before it.  Raises InvalidArgument for other shapes or values.
        """
        self._compare(tokens=tokens, targets=targets)
        ids = np.atleast_2d(self._ids(tokens, 1 if targets is None else 0))
        if targets is None:
            ids, targets = ids[:, :-1], ids[:, 1:]
            if not ids.size:
                raise InvalidArgument("loss: expected at least two tokens, got one")
        wanted = np.atleast_2d(np.asarray(targets))
        same = wanted.shape == ids.shape and wanted.dtype.kind in "iu"
        if not same or not -1 <= wanted.min() <= wanted.max() < self.config.vocab_size:
            expected = f"integer targets of shape {ids.shape} from -1 to {self.config.vocab_size - 1}"
            got = f"{wanted.dtype} {wanted.shape}, {reprlib.repr(wanted.tolist())}"
            raise InvalidArgument(f"loss: expected {expected}, got {got}")
        return self._model.loss(self.weights, Batch(ids, wanted.astype(np.int32)).map(np.ascontiguousarray))

    @overload
    def generate(self, prompt: str = "", tokens: int = 200, **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], tokens: int = 200, **options: Any) -> list[str]: ...
    def generate(self, prompt: str | Sequence[str] = "", tokens: int = 200, **options: Any) -> str | list[str]:
        """``prompt`` and up to ``tokens`` sampled tokens, as one text, as ``kos sample`` prints it.

        Several prompts return a list of texts.  Each text is the one that its prompt gives alone.  ``options`` are
        those of ``stream``.  Raises the errors of ``stream``.
        """
        prompts = [prompt] if isinstance(prompt, str) else [*prompt]
        texts = [*prompts]
        for index, piece in self.stream(prompts, tokens, **options):
            texts[index] += piece
        return texts[0] if isinstance(prompt, str) else texts

    def stream(
        self, prompts: Sequence[str], tokens: int = 200, *, stop: Sequence[str] = (), **sampling: Any
    ) -> Iterator[tuple[int, str]]:
        """Generate the texts that follow ``prompts``.  Yields (index of the prompt, piece of its text).

        A text ends after ``tokens`` tokens, at a token of ``ends``, or before a text of ``stop``.  The options of
        ``sampling`` are ``temperature`` (0.8; 0 takes the most likely token), ``top_k`` (40; 0: no limit), ``top_p``
        (1), ``min_p`` (0), ``repetition_penalty`` (1) and ``seed`` (0); see ``kos.train.generate.Sampling``.
        When a text outgrows the context, it continues from its last tokens, as many as half of the context.  A warning
        of ``logging`` reports this once.

        Raises:
            InvalidArgument: a setting is out of range, or a prompt has more tokens than the context.
            DataError: the tokenizer cannot encode a prompt.
        """
        self._compare(prompts=[*prompts], tokens=tokens, stop=stop, **sampling)
        ids = [prompt_ids(self.tokenizer, prompt) for prompt in prompts]
        if (longest := max(map(len, ids), default=0)) > (most := self.config.max_position_embeddings):
            raise InvalidArgument(f"prompt: expected at most {most} tokens, the model's context, got {longest}")
        return self._stream(ids, tokens, stop, sampling)

    def chat(
        self, messages: Sequence[Message], tokens: int = 1000, *, tools: Sequence[Any] | None = None,
        on_text: Callable[[str], object] = lambda text: None, stop: Sequence[str] = (), **sampling: Any,
    ) -> str:  # fmt: skip
        """The assistant's answer to ``messages``; each message is a dict with ``role`` and ``content``.

        The model's chat template writes the prompt, with ``tools`` as it writes the ``tools`` of training data.  A tool
        call in the answer stays text.  ``on_text`` is called with each piece of the answer.  The other
        options are those of ``stream``.  A chat that outgrows the context continues as a text of ``stream`` does.

        Raises:
            ConfigError: the model has no chat template, or jinja2 is not installed.
            DataError: the template cannot render the messages, or does not use the tools.
            InvalidArgument: a setting is out of range.
        """
        self._compare(messages=messages, tokens=tokens, tools=tools, stop=stop, **sampling)
        (prompt, after), answer = self.chat_prompt(messages, tools), ""
        rendered = Document(((prompt, True),), rendered=True)
        ids = np.concatenate([part.tokens for part in self.tokenizer.encode_documents([rendered], False)]).tolist()
        stops = [*stop, *filter(None, [after.strip()])]
        for _, piece in self._stream([ids], tokens, stops, sampling):
            answer += piece
            on_text(piece)
        return answer

    def _stream(
        self, prompts: Sequence[Sequence[int]], tokens: int, stop: Sequence[str], sampling: Mapping[str, Any]
    ) -> Iterator[tuple[int, str]]:
        if not tokens >= 0:
            raise InvalidArgument(f"tokens: expected 0 or more, got {tokens}")
        if isinstance(stop, str) or not all(stop):
            raise InvalidArgument(f"stop: expected a list of texts that are not empty, got {stop!r}")
        context, how = self.config.max_position_embeddings, Sampling(**sampling)
        capacity = min(context, max(map(len, prompts), default=0) + tokens + 1)
        decoder = Decoder(self.config, self._ops, self.weights, len(prompts), capacity, self._tp)
        return continue_texts(
            decoder, context, self.tokenizer, prompts, tokens, how, ends=self.ends, stop=stop,
            warns=self._tp.rank == 0, tp=self._tp,
        )  # fmt: skip

    def chat_prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[str, str]:
        """The prompt of ``chat``, and the text that the template writes after an answer.  Raises as ``chat`` does."""
        return self._template.prompt(messages, "chat", tools)

    @cached_property
    def _template(self) -> ChatTemplate:
        if (found := read_chat_template(str(self._folder))) is None:
            raise ConfigError(f"chat: expected a chat template in {self._folder}, got none; add chat_template.jinja")
        return found

    def _compare(self, **given: Any) -> None:
        """Raise ConfigError on all ranks if they have been given different arguments."""
        if self._tp.size > 1:
            same_on_all(self._tp.comm, {name: getattr(x, "tolist", lambda x=x: x)() for name, x in given.items()})

    def _ids(self, tokens: str | ArrayLike, more: int = 0) -> NDArray[np.int32]:
        given = np.asarray(self.tokenizer.encode(tokens) if isinstance(tokens, str) else tokens)
        most = self.config.max_position_embeddings + more
        if given.ndim not in (1, 2) or given.dtype.kind not in "iu" or not given.size or given.shape[-1] > most:
            expected = f"a text or integers (T,) or (B, T), T from 1 to {most}"
            raise InvalidArgument(f"tokens: expected {expected}, got {given.dtype} {given.shape}")
        if not 0 <= given.min() <= given.max() < self.config.vocab_size:
            expected = f"0 to {self.config.vocab_size - 1}"
            raise InvalidArgument(f"tokens: expected {expected}, got {given.min()} to {given.max()}")
        return np.ascontiguousarray(given, np.int32)


def load(folder: str | os.PathLike[str], device: str = "cpu", comm: Communicator | None = None) -> TrainedModel:
    """Read the model in ``folder``, which is the folder of a run, of a checkpoint, or of a Hugging Face model.

    In the folder of a run, the newest complete checkpoint is read.  For a Hugging Face folder without tokenizer.json,
    the model gets a tokenizer whose texts are token numbers.  ``device`` is ``cpu``, with weights in float32, or
    ``cuda`` or ``cuda:N``, with weights in bfloat16.  Adapters are added to their base model, whether a run with
    ``--lora`` or the library peft wrote them.

    With a ``comm``, the call is collective: its ranks split the tensors by tensor parallelism, and each rank reads and
    holds its part.  On ``cuda``, each rank uses the GPU of its communicator.  Errors are raised on all ranks.

    Raises:
        CheckpointError: the folder has no model, or the model is damaged or of an unknown type.
        ConfigError: ``device`` is none of these, or the packages for it are missing; ``comm`` has no memory of GPUs; or
            the model cannot be split over its ranks, because of the family, the heads, or another size; or ``comm`` is
            no communicator.
        BackendUnavailable: no GPU can be used.
    """
    if comm is None:
        return _load(folder, device, ALONE)
    from kos.comm.communicator import Communicator

    if not isinstance(comm, Communicator):
        raise ConfigError(f"comm: expected a communicator of kos, such as kos.init() returns, got {comm!r}")

    def part() -> TrainedModel:
        try:
            return _load(folder, device, Axis(comm.rank, comm.size, comm))
        except SettingError as error:  # the other ranks raise a ConfigError
            raise ConfigError(str(error).replace(f"--tp {comm.size}:", f"comm of {comm.size} ranks:")) from None

    return together(comm, part)


def copy_of(run: Any) -> TrainedModel:
    """A copy of the model of a ``Trainer``, on the CPU in float32.  InvalidArgument if a rank has a part of it."""
    if run.mesh.model_parallel.size > 1:
        got = run.mesh.layout.describe()
        raise InvalidArgument(f"model: expected ranks that hold the whole model, got {got}; save it and load that")
    whole, to_host, config = run.device.whole_weights(), run.device.step.models[0].ops.to_host, run.model_config
    copy = Parameters(config.parameter_shapes(), groups=config.fused_groups())
    in_8 = {name for each in run.device.step.quantized.values() for name in each.members}
    base: Any = run.base_weights() if in_8 else None  # as they are before they are quantized
    for name, weight in copy.items():
        weight[...] = base.read(name) if name in in_8 else to_host(whole[name])
    tokenizer = run.data.tokenizer
    return TrainedModel(config, copy, tokenizer, ends=[] if tokenizer.eos is None else [tokenizer.eos])


def _load(folder: str | os.PathLike[str], device: str, tp: Axis) -> TrainedModel:
    ops, dtype = _ops_of(device, tp)
    path = checkpoint.find_weights(Path(folder))
    config, source = adapter.whole_model(path)
    part = config.local(tp.rank, tp.size)
    weights = Parameters(config.parameter_shapes(part), dtype, config.fused_groups(part), ops.zeros)
    for name, place in config.placements(part).items():
        ops.copy(np.ascontiguousarray(source.read(name, place.rows(0, place.local[0])), dtype), weights[name])
    generates = path if (path / GENERATION).is_file() else peft.base_of(path)
    path = Path(adapter.tokenizer_folder(str(path)) or path)
    tokenizer = make_tokenizer(str(path)) if has_tokenizer(path) else NumberTokenizer(config.vocab_size)
    return TrainedModel(config, weights, tokenizer, folder=path, ends=_ends(generates, tokenizer), ops=ops, tp=tp)


def _ops_of(device: str, tp: Axis) -> tuple[Any, np.dtype]:
    """The operations of a device, and the dtype of weights on it."""
    if device == "cpu":
        return numpy_ops, np.dtype(np.float32)
    name, _, number = device.partition(":")
    if name != "cuda" or not (number.isdecimal() or device == "cuda"):
        raise ConfigError(f"device: expected cpu, cuda or cuda:N, got {device!r}")
    if tp.group is not None:
        if tp.comm.device is None or number not in ("", str(tp.comm.device)):
            raise ConfigError(f"device: expected cpu, or the GPU of the communicator, got {device!r} with {tp.comm!r}")
        number = str(tp.comm.device)
    try:
        from kos.cuda import device_info
        from kos.train.ops.cuda import CudaOps

        return CudaOps(device_info(int(number or 0)).index), np.dtype(ml_dtypes.bfloat16)
    except ImportError as error:
        raise ConfigError(f"device {device}: expected its packages ({install('cuda')}), got: {error}") from error


def _ends(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """The tokens that end a text: the tokenizer's end token and those of generation_config.json, as in transformers."""
    path, found = folder / GENERATION, [tokenizer.eos]
    if path.is_file():
        damage = OSError, ValueError, AttributeError, RecursionError
        with raised_as(CheckpointError, f"{path}: expected JSON with eos_token_id", *damage):
            given = json.loads(path.read_text("utf-8")).get("eos_token_id")
            found += given if isinstance(given, list) else [given]
        if wrong := [each for each in found if not isinstance(each, int | None)]:
            raise CheckpointError(f"{path}: expected token numbers as eos_token_id, got {reprlib.repr(wrong[0])}")
    return [each for each in found if each is not None]
