"""What torch calls at the end of its own import, by the entry-point group ``torch.backends``.

It only registers the name: kos is imported when a process group is made.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make ``torch.distributed.init_process_group("kos")`` known to torch."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    # From torch 2.15 on: those whose calls torch's flight recorder leaves alone. It takes no ProcessGroup in Python.
    recorders: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorders.add("kos")
    if "kos" not in dist.Backend.backend_list:
        dist.Backend.register_backend("kos", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, pg_options: Any = None) -> Any:
    from kos.interop.torch.group import ProcessGroupKos

    return ProcessGroupKos.create(options, pg_options)
