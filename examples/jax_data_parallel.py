"""Data parallel training in JAX: each rank has a part of the batch, kos averages the gradients.

mpirun -n 2 python examples/jax_data_parallel.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import kos
from kos.interop.jax import all_reduce

STEPS, BATCH, WIDTH, RATE = 5, 64, 32, 0.1


def initial_weights():
    random = np.random.default_rng(0)
    return {name: jnp.asarray(random.normal(size=(WIDTH, WIDTH)), jnp.float32) / WIDTH**0.5 for name in ("in", "out")}


def batch_of(step):
    x = np.random.default_rng(1 + step).normal(size=(BATCH, WIDTH)).astype(np.float32)
    return x, np.sin(x)


def loss_of(weights, x, y):
    return jnp.mean((jnp.tanh(x @ weights["in"]) @ weights["out"] - y) ** 2)


def update(weights, gradients):
    return jax.tree.map(lambda w, g: w - RATE * g, weights, gradients)


def main():
    with kos.init() as comm:
        devices = jax.local_devices()  # JAX sees all GPUs of the host; this rank uses the one that kos gave it
        jax.config.update("jax_default_device", devices[(comm.device or 0) % len(devices)])
        gradients_of, apply = jax.jit(jax.value_and_grad(loss_of)), jax.jit(update)
        weights, size = initial_weights(), BATCH // comm.size
        mine = slice(comm.rank * size, (comm.rank + 1) * size)
        for step in range(STEPS):
            x, y = batch_of(step)
            results = gradients_of(weights, x[mine], y[mine])
            loss, gradients = all_reduce(comm, results, kos.ReduceOp.AVG)  # a pytree: one batch
            weights = apply(weights, gradients)
            if comm.rank == 0:
                print(f"step {step}: loss {float(loss):.9g}", flush=True)


if __name__ == "__main__":
    main()
