"""torch.distributed over kos: ``import kos.interop.torch``, then ``dist.init_process_group("kos")``.

Tensors in host memory move by the tcp backend, which uses shared memory within a host.  Tensors on a GPU move by nccl
and peer, on the streams that ProcessGroupNCCL would use: an operation without ``async_op`` runs on the current stream,
others on a stream of the group, and ``Work.wait()`` makes the current stream wait.  The host never waits for the GPU,
except in ``barrier`` and in a ``wait`` with a timeout.

A group finds its ranks by torch's Store.  kos sets no hooks of the process.
"""

from __future__ import annotations

from kos.interop import autoload
from kos.interop.torch import dynamo, group, operations, reconfigure, works
from kos.interop.torch.compression import Compression, compress
from kos.interop.torch.group import Options, ProcessGroupKos
from kos.interop.torch.store import Store

__all__ = ["Compression", "Options", "ProcessGroupKos", "Store", "compress"]

autoload.register()
dynamo.disable(group, operations, reconfigure, works)
