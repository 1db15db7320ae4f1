"""mpirun as tests find it, and an environment that knows nothing of a job that the tests themselves are run by."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

_FOUND = shutil.which(
    os.environ.get("MPIRUN") or "mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
)
MPIRUN = os.path.abspath(_FOUND) if _FOUND else ""
needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="mpirun was not found beside Python or in PATH")
OUTSIDE = {k: v for k, v in os.environ.items() if not k.startswith(("PMIX_", "PMI_", "OMPI_COMM_"))}
