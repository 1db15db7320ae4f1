"""kos: collective communication without torch, and a LLaMA trainer that stands on it."""

from kos import errors
from kos.comm import Communicator, PremulSum, ReduceOp, Work, init

__version__ = "0.1.0"

__all__ = ["Communicator", "PremulSum", "ReduceOp", "Work", "__version__", "errors", "init"]
