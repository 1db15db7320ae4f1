"""A small model and slow machines, for steps that are simulated."""

from kos.train.device.costs import Rates

SLOW = Rates("the CPU", 1e9, (1e9, 1e9), 1e9, 1e-6, 1e9, 1e-5, False)
D, F, V, A, W, LAYERS, T, B = 32, 48, 256, 32, 64, 4, 16, 2  # of the flags below; W: q, k and v together
SHAPE = [
    "--device=cpu", "--hidden-size=32", "--intermediate-size=48", "--num-attention-heads=4", "--num-key-value-heads=2",
    "--num-hidden-layers=4", "--seq-len=16", "--batch-size=8", "--micro-batch-size=2", "--no-tie-word-embeddings",
]  # fmt: skip
