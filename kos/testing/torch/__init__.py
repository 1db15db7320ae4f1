"""Tests of programs of torch.distributed: ``spawn`` runs ranks that are processes, ``compare`` compares two backends.

docs/guides/testing-pytorch.md shows their use.
"""

from kos.testing import Deadlock, Fault
from kos.testing.torch.monitor import Mistake
from kos.testing.torch.processes import spawn
from kos.testing.torch.programs import compare

__all__ = ["Deadlock", "Fault", "Mistake", "compare", "spawn"]
