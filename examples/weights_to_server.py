"""A server answers while two ranks train its weights, die and come back: ``python examples/weights_to_server.py``."""

import atexit
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from kos import train
from kos.errors import TransferError
from kos.interop.weights import bind
from kos.transfer import Placement, Subscriber

folder = tempfile.TemporaryDirectory(prefix="kos-weights-", ignore_cleanup_errors=True)
port, out = int((*sys.argv, 29_600)[1]), Path(folder.name)
address = f"127.0.0.1:{port}"
flags = "--device cpu --zero 1 --seq-len 64 --batch-size 8 --steps 100000 --save-every 5 --keep 99 --resume auto"


def start_trainer() -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "kos.train", *flags.split(), "--out", out, "--publish", address]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port + 1)}
    return [subprocess.Popen(command, env=env | {"RANK": rank}) for rank in "01"]


trainer = start_trainer()
atexit.register(lambda: [(rank.kill(), rank.wait()) for rank in trainer])  # before the folder is removed
signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that what atexit has runs then, too
while not (checkpoints := list(out.glob("checkpoints/step-*/config.json"))):  # for the model's shape
    assert trainer[1].poll() is None, "the trainer ended before its first checkpoint"
    time.sleep(0.1)
if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
    import torch
    from transformers import AutoModelForCausalLM

    subscriber = bind(address, module := AutoModelForCausalLM.from_pretrained(checkpoints[0].parent))

    def answer() -> str:
        tokens = module.generate(torch.tensor([[*b"import "]]), max_new_tokens=12, do_sample=False)[0]
        return bytes(int(token) % 256 for token in tokens).decode(errors="replace")
else:
    model = train.load(out)
    subscriber = Subscriber(address, {name: (x, Placement.whole(x.shape)) for name, x in model.weights.items()})
    answer = partial(model.generate, "import ", 12, temperature=0)

answers = 0
while answers < 8:
    try:
        update = subscriber.update(timeout=60)
        print(f"version {update.version}{' of a restarted trainer' * update.restarted}: {answer()!r}", flush=True)
        if (answers := answers + 1) == 4:
            trainer[1].kill()
    except TransferError as error:  # the server has the weights from before
        print(f"{error}; version {subscriber.version}: {answer()!r}", flush=True)
        assert trainer[1].poll() in (None, -9), "the trainer ended, and was not killed"
        trainer = start_trainer() if all(rank.poll() is not None for rank in trainer) else trainer
    time.sleep(0.5)
