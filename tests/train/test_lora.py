"""Adapters (LoRA) and frozen weights: the layouts of a job, other dtypes, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kos.train.layers.lora import A, B, is_adapter
from kos.train.parallel.mesh import Layout
from tests.train import test_layouts
from tests.train.test_layouts import CpuDevice, Precise

RUN: dict[str, Any] = {"lora": 4, "lr": 3e-2, "weight_decay": 0.1}
