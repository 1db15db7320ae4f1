"""What one process finds out by itself: software, MPI, memory to share, CUDA, GPUs, network cards.

Each check is a function that returns what it found; one that raises, or does not answer, has found that.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from itertools import groupby
