"""The extension module built from the C files of this folder; module.c describes the owner of a group."""

from array import array
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

LINE: int
RING: int
TEXTS: int
TEXT_BYTES: int
MAX_RANKS: int
MISMATCH: int
REPORTED: int
FORKED: int
CLOSED: int
COUNTS: int
MESSAGE: int
REFUSED_MESSAGE: int
WORD_SEQUENCE: int
AWAITS_READ: int
AWAITS_MESSAGE: int
MOST_WORDS: int
PLAN_AT: int
ROWS_OF_TASK: int
"""How many rows ``rms_norm_backward`` adds up in one row of ``sums``."""

def dtype(code: int, /) -> str:
    """The name of the dtype with this number; "" for none."""

def layout(size: int, /) -> tuple[int, int, int, int, int, int]:
    """Bytes from the start of a segment to its lines, rings, resized calls, texts and mailboxes, and of the whole."""

def encode(bits: int, top: int, dtype: int, x: Any, out: Any, /) -> None:
    """``Format.encode``: ``dtype`` as in ``compression.CARRIED``, the arrays as bytes.  ValueError: they do not fit."""

def decode(bits: int, top: int, dtype: int, data: Any, out: Any, add: bool, /) -> None:
    """``Format.decode``, likewise."""

def kernels(name: str, /) -> tuple[str, ...]:
    """Use the kernels of that name for the operations below; returns the names that this CPU has, the fastest last."""

def threads(count: int, /) -> None:
    """How many threads, the caller's included, such an operation uses."""

# Operations of training, on arrays of float32. They return False if they do not take the arrays, and have then computed
# nothing. Matrices are (features, tokens), as ``empty_columns`` has them in memory, or (rows, columns) of norms.

def rms_norm(x: Any, scale: Any, out: Any, rstd: Any, eps: float, /) -> bool: ...
def rms_norm_backward(d_out: Any, x: Any, scale: Any, rstd: Any, dx: Any, sums: Any, /) -> bool: ...
def cross_entropy(logits: Any, targets: Any, losses: Any, share: float, backward: bool, /) -> bool: ...
def swiglu(gate: Any, up: Any, out: Any, /) -> bool: ...
def swiglu_backward(gate: Any, up: Any, d_out: Any, d_gate: Any, d_up: Any, /) -> bool: ...
def adamw(
    gradient: Any, weights: Any, first: Any, second: Any, beta1: float, beta2: float, step_size: float, root: float,
    eps: float, shrink: float, /,
) -> bool: ...  # fmt: skip
def rope(x: Any, cos: Any, sin: Any, heads: int, sign: float, /) -> bool: ...
def attention(
    qkv: Any, out: Any, log_sum_exp: Any, first_key: Any, heads: int, kv_heads: int, scale: float, /
) -> bool: ...
def attention_backward(
    qkv: Any, out: Any, log_sum_exp: Any, first_key: Any, d_out: Any, d_qkv: Any, heads: int, kv_heads: int,
    scale: float, /,
) -> bool: ...  # fmt: skip

class Owner(Protocol):
    def failed(self, code: int, rank: int, word: int, *counts: int) -> NoReturn:
        """``counts``, of COUNTS: the receiver, the bytes that it expects, and those that are sent."""

class Work:
    def done(self) -> bool:
        """Advance all Works of the group; whether this one is complete."""
    def wait(self) -> Work | None:
        """Advance it until 10 ms pass without progress; None if it is complete."""
    def cancel(self) -> None:
        """End a message that is not complete."""
    def missing(self, rank: int, /) -> int:
        """Whether this Work waits for that rank; of a message AWAITS_READ, AWAITS_MESSAGE or both."""

class State:
    """The fields of ``kos.comm.work.Work``, and a ``wait`` that needs no Python if the core completes the call."""

def readable(x: Any, /) -> bool:
    """Whether calls take ``x`` without conversion: a contiguous tensor of the type given to ``tensors``.

    It is real, not negated, in memory, and requires no gradient.
    """

def tensors(kind: type, /) -> bool:
    """Take arrays of that type, which has DLPack's C exchange API; False if another type was taken before."""

def arrays(example: Any, /) -> bool:
    """Take arrays of the type of ``example``, ``kos.memory.Array``; False if its layout is another one."""

def windows(ranges: bytes, /) -> None:
    """The windows of this process: an address and a number of bytes each, as uint64."""

def factors(kind: type, /) -> None:
    """Compare arguments of that type, ``kos.PremulSum``, by their ``factor``."""

class Group:
    direct: int
    spin_ns: int
    yields: int
    parks: int
    """Waits without the GIL so far."""
    off: bool
    """Whether operations go to the methods of the communicator."""
    last_source: int
    hits: int
    """Calls that needed no method so far."""
    compare_at: int
    """The collective at which Python compares calls on GPUs again: it makes that one."""
    def __init__(self, memory: Any, rank: int, size: int, owner: Owner, /) -> None: ...
    def prepare(
        self, operation: int, dtype: int, op: int, root: int, count: int, varies: bool,
        send_counts: bytes | None, recv_counts: bytes | None, dst: int, src: int, tag: int, recv_tag: int,
        fingerprint: int, sizeless: int = 0, /,
    ) -> Any:  # fmt: skip
        """A call for any arrays, for ``start``; None if it is not supported.  The counts are of uint64, by rank."""
    def start(self, prepared: Any, sequence: int, waits: bool, send: Any, recv: Any, /) -> Work | None:
        """Begin a call, and ``wait`` for it if it ``waits``; None if it is complete.

        Arrays are objects with the buffer protocol; None where this rank has none, one array for a call in place.
        """
    def publish(self, sequence: int, fingerprint: int, /) -> None:
        """Publish a call that the core does not run."""
    def compare(self, sequence: int, fingerprint: int, /) -> tuple[int, int] | None:
        """Compare that call of this rank, and those before it, with the calls of the other ranks so far.

        Returns the first call that differs, and the rank that made it; None if none differs.
        """
    def fail(self, sequence: int, /) -> None:
        """Fail that call and later ones on all ranks, unless an earlier failure does."""
    def failure(self) -> int:
        """The failure word, after which its text may be read; 0 for none."""
    def held(self) -> tuple[int, int, bool]:
        """Messages that have arrived without a receive, answers in use, and whether Works are outstanding."""
    def arrived(self, rank: int, tag: int, /) -> tuple[int, int] | None:
        """Bytes and dtype of the first message with that tag from that rank that has no receive; None if none has."""
    def close(self) -> None: ...
    def bind(
        self, example: Any, address: int, comm: Any, failures: Any, node: Any, status: Any, active: list[Any],
        counter: array[int], slots: list[list[Any]], collectives: Iterator[int], messages: Iterator[int], /,
    ) -> bool:  # fmt: skip
        """Make the operations of ``comm`` that need no Python (``module_eager.c``); False if the group is bound.

        ``example`` is an array at ``address``, 2 x 3 of float64; False too if NumPy's layout of it is another one.
        """
    def method(self, name: str, start: Callable[..., Any], docstring: str, /) -> Callable[..., Any]:
        """The object that replaces that method of the communicator.

        For calls that it does not know, it calls ``start(args, options, has_key)``, which is like
        ``Operations._start_uncached``.
        """
    def forget(self) -> None:
        """Forget all calls."""
