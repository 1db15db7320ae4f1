"""Packs a CUDA kernel with its launch configuration and parameters, as ``Group.launch`` expects it."""

from __future__ import annotations

import struct

_FORMAT = "@PP7IPPIQN"  # kos_kernel of core.h, without the parameters


def pack_kernel(
    launch: int, function: int, grid: tuple[int, int, int], block: tuple[int, int, int], parameters: bytes,
    fingerprint: int, shared: int = 0, attributes: tuple[int, int] = (0, 0),
) -> bytes:  # fmt: skip
    """A kernel that ``Group.launch(kernel, sequence, stream, *words)`` starts; ``words`` replace its first parameters.

    ``launch`` is the address of cuLaunchKernelEx, ``function`` a CUfunction, ``shared`` the dynamic shared memory of a
    block in bytes.  ``parameters`` are the kernel's, at its own offsets.  ``attributes`` are the address and the number
    of CUlaunchAttributes, which the caller keeps.  The device must be current when the kernel is launched.
    """
    fields = (launch, function, *grid, *block, shared, 0, *attributes, fingerprint, len(parameters))
    return struct.pack(_FORMAT, *fields) + parameters
