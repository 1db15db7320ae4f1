"""Every error that kos raises on purpose, in one hierarchy.

Each message names what was expected and what was got.  ``KosError`` catches all of them; those that
stand for a builtin condition also inherit the builtin (``ValueError``, ``TimeoutError``).
"""


class KosError(RuntimeError):
    """Base of every error that kos raises on purpose."""

    on_every_rank = False
    """Whether every rank of the job is known to raise this same error, so that one of them may speak for all."""
    ranks: tuple[int, ...] = ()
    """The ranks that failed first, as ranks of the world, where the error is about other ranks and they are known."""


class InvalidArgument(KosError, ValueError):
    """An argument was refused before anything was sent."""


class BackendUnavailable(KosError):
    """A backend asked for by name cannot run here; the message says why."""


class RendezvousError(KosError):
    """The ranks could not find each other, or disagree about who they are."""


class CollectiveError(KosError):
    """A collective failed after its arguments were accepted."""


class Interrupted(CollectiveError):
    """An operation that a Ctrl-C, or another signal's exception, cut short in the middle of a step."""


class CollectiveMismatch(CollectiveError):
    """Two ranks made calls that do not belong together; names both ranks and what differs."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """An operation was not completed in time; names it and the ranks that did not arrive."""


class RankLost(CollectiveError):
    """Another rank exited, was killed, or aborted while this one was waiting for it."""


class ConfigError(KosError, ValueError):
    """A configuration value, file or flag was refused."""


class DataError(KosError, ValueError):
    """Training data is missing, unreadable, too short or of the wrong format."""


class CheckpointError(KosError):
    """A checkpoint cannot be written, or is incomplete, damaged or of another model."""


class TrainingError(KosError):
    """Training cannot go on: a loss or a gradient is not finite."""


class OutOfMemory(KosError, MemoryError):
    """A device or a planned area has too little memory; names what was asked and what is free."""


class CudaError(KosError):
    """A call of the CUDA driver failed; names the call, the error's code and its description."""


class CompileError(CudaError):
    """A kernel was refused by the compiler; first line: file, line and message, then the whole log."""


class PeerMemoryError(CudaError):
    """Memory of another rank cannot be mapped here; the message gives the cause."""
