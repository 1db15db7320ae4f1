"""A publisher on a GPU, as a process of its own.

``python -m tests.transfer.gpu_process DEVICE '{"memory": "device"}'`` prints its address.  Then it publishes each
version whose number is a line of its input, and prints how many subscribers were late.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import numpy as np

from kos.memory import Array
from kos.transfer import Placement, Publisher
from tests.transfer.publishing import SHAPES, contents

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
EMULATED = ["tests.transfer.emulated_gpu"]


def main(device: int, options: dict[str, Any]) -> None:
    first = contents(0)
    arrays = {name: Array.from_numpy(first[name], device) for name in SHAPES if name != "norm"}
    held: dict[str, Any] = {name: (array, Placement.whole(array.shape)) for name, array in arrays.items()}
    if more := options.pop("more", 0):  # bytes that nobody reads
        held["more"] = Array.zeros((more,), np.uint8, device), Placement.whole((more,))
    norm = np.zeros(SHAPES["norm"], np.float32)  # of the host
    with Publisher(None, {**held, "norm": (norm, Placement.whole(norm.shape))}, **options) as publisher:
        print(publisher.address, flush=True)
        for line in sys.stdin:
            version = int(line)
            found = contents(version)
            norm[...] = found["norm"]
            for name, array in arrays.items():
                array.copy_from(found[name])
            print(publisher.publish(version), flush=True)


class Program:
    """``python -m ARGUMENTS``, which answers lines with lines.  Killed when the block ends, or after ``SECONDS``."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, **environment},
        )  # fmt: skip
        self.limit = threading.Timer(SECONDS, self.process.kill)
        self.limit.daemon = True
        self.limit.start()

    def write_line(self, line: object) -> None:
        print(line, file=self.process.stdin, flush=True)

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the program has ended"
        return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.limit.cancel()
        self.process.kill()
        self.process.communicate()


class OtherPublisher(Program):
    """A publisher on the GPU ``device``, as a process of its own: it runs ``main``, with ``options``."""

    def __init__(self, device: int, emulated: bool, **options: Any) -> None:
        arguments = [*EMULATED * emulated, "tests.transfer.gpu_process", str(device), json.dumps(options)]
        super().__init__(*arguments, KOS_SECRET="of the tests")
        self.address = self.read_line()

    def publish(self, version: int) -> int:
        self.write_line(version)
        return int(self.read_line())


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
