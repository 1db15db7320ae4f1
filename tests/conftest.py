"""What all tests share."""

from __future__ import annotations

import os

# As root, and with more ranks than cores: what a user of the Makefile gets, for tests that start mpirun.
os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
os.environ.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
os.environ.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
