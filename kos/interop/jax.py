"""JAX: collectives on ``jax.Array``, which never changes: each call returns new arrays.

    gradients = kos.interop.jax.all_reduce(comm, gradients, kos.ReduceOp.AVG)

Every function takes an array or a pytree of arrays; the leaves of a pytree are one batch.  Called with arrays, it works
where they live, on the CPU or the GPU of the communicator, and shares memory with JAX by DLPack, without copies.  On
a GPU the call is ordered with JAX's work and does not wait.

Within ``jax.jit`` a call is an ordered host callback (``jax.experimental.io_callback``).  XLA then waits for the call,
and copies the arrays to the callback and back, from and to the GPU too.  JAX defines neither ``grad`` nor ``vmap`` of
such a callback: take gradients first, then reduce them.  A failure within ``jit`` is JAX's ``JaxRuntimeError`` with the
text of kos's error; the next call on the communicator raises kos's own.

All ranks call the same functions in the same order, with leaves of the same shapes and dtypes.  ``options`` are those
of the method of ``kos.Communicator`` with that name, but for ``out`` and ``async_op``: ``timeout`` is in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import kos
from kos.errors import InvalidArgument
from kos.memory.arena import allocate_host
from kos.memory.array import Array
from kos.memory.dlpack import ON_GPU
from kos.memory.libraries import as_jax

Shape = tuple[int, ...]


def all_reduce(comm: kos.Communicator, tree: Any, op: Any = kos.ReduceOp.SUM, **options: Any) -> Any:
    """The reduction over all ranks of each leaf, of the leaf's shape.

    Raises InvalidArgument, and what ``Communicator.all_reduce`` raises.
    """
    return _call(comm, "all_reduce", tree, lambda shape: shape, op=op, **options)


def broadcast(comm: kos.Communicator, tree: Any, root: int = 0, **options: Any) -> Any:
    """The leaves of rank ``root``; the other ranks pass leaves of the same shapes and dtypes.

    Raises InvalidArgument, and what ``Communicator.broadcast`` raises.
    """
    return _call(comm, "broadcast", tree, lambda shape: shape, root=root, **options)


def all_gather(comm: kos.Communicator, tree: Any, **options: Any) -> Any:
    """All ranks' leaves in rank order: shape ``(size, *leaf.shape)``.

    Raises InvalidArgument, and what ``Communicator.all_gather`` raises.
    """
    return _call(comm, "all_gather", tree, lambda shape: (comm.size, *shape), **options)


def reduce_scatter(comm: kos.Communicator, tree: Any, op: Any = kos.ReduceOp.SUM, **options: Any) -> Any:
    """Rank r's of ``size`` equal shards of the reduction, along the first axis, which ``size`` divides.

    Raises InvalidArgument, and what ``Communicator.reduce_scatter`` raises.
    """
    return _call(comm, "reduce_scatter", tree, _shard_of(comm), op=op, **options)


def all_to_all(comm: kos.Communicator, tree: Any, **options: Any) -> Any:
    """Shard r of every rank's leaf in rank order, along the first axis, which ``size`` divides; the leaf's shape.

    Raises InvalidArgument, and what ``Communicator.all_to_all`` raises.
    """
    shard = _shard_of(comm)
    return _call(comm, "all_to_all", tree, lambda shape: (comm.size * shard(shape)[0], *shape[1:]), **options)


def _shard_of(comm: kos.Communicator) -> Callable[[Shape], Shape]:
    def shard(shape: Shape) -> Shape:
        if not shape or shape[0] % comm.size:
            raise InvalidArgument(f"tree: expected a first axis that {comm.size} ranks divide, got shape {shape}")
        return (shape[0] // comm.size, *shape[1:])

    return shard


def _call(comm: kos.Communicator, name: str, tree: Any, result: Callable[[Shape], Shape], **arguments: Any) -> Any:
    """Call the operation ``name`` on each leaf; ``result`` is the shape of a leaf's result."""
    import jax
    from jax.experimental import io_callback

    for option in arguments.keys() & {"async_op", "out"}:
        raise InvalidArgument(f"{option}: expected none, as calls return new arrays, and on a GPU they do not wait")
    leaves, structure = jax.tree.flatten(tree)
    leaves = [leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf) for leaf in leaves]
    if any(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves):
        raise InvalidArgument("tree: expected arrays of numbers, got a PRNG key: pass jax.random.key_data(key)")
    shapes = [result(leaf.shape) for leaf in leaves]

    def on_host(*arrays: Any) -> list[Any]:
        xs = [np.asarray(array) for array in arrays]
        return _launch(comm, name, xs, [np.empty(s, x.dtype) for s, x in zip(shapes, xs, strict=True)], arguments)

    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        if comm.host is None:
            raise InvalidArgument(f"comm: expected a backend that moves host memory in jit, got {comm.backend_name}")
        kinds = [jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)]
        results = io_callback(on_host, kinds, *leaves, ordered=True)
    else:
        if any(leaf.is_deleted() for leaf in leaves):
            raise InvalidArgument("tree: expected arrays with memory, got one that was deleted or donated")
        outs = [_empty(leaf, shape) for leaf, shape in zip(leaves, shapes, strict=True)]
        _launch(comm, name, leaves, outs, arguments)
        # ``device_put`` for host memory: NumPy's DLPack has no bfloat16 and no float8.
        results = [
            as_jax(out) if isinstance(out, Array) else jax.device_put(out, leaf.sharding)
            for out, leaf in zip(outs, leaves, strict=True)
        ]
    return jax.tree.unflatten(structure, results)


def _launch(comm: kos.Communicator, name: str, xs: list[Any], outs: list[Any], arguments: dict[str, Any]) -> list[Any]:
    """Call the operation from each of ``xs`` to its ``out``, all in one batch; returns ``outs``."""
    with comm.batch():
        for x, out in zip(xs, outs, strict=True):
            getattr(comm, name)(x, out=out, **arguments)
    return outs


def _empty(leaf: Any, shape: Shape) -> Any:
    """An uninitialised array of ``shape`` where ``leaf`` lives, which JAX can take without a copy."""
    try:
        kind, device = leaf.__dlpack_device__()
    except BufferError as error:
        raise InvalidArgument(f"tree: expected arrays on one device, got {leaf.sharding}: {error}") from error
    if kind in ON_GPU:
        return Array.empty(shape, leaf.dtype, device)
    memory = allocate_host(math.prod(shape) * leaf.dtype.itemsize)  # aligned to 64 bytes, else JAX copies it
    return memory.view(leaf.dtype).reshape(shape)
