"""Random kills, stops, leaves and joins of elastic runs on CPUs: every run must end with the bits of one unhurt.

``python -m tests.train.elastic_faults --runs 100`` prints a line of JSON per run and one with the counts.  Ranks are
processes without a launcher; spares wait to join where a rank is gone.  Steps are short, so that faults hit anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from kos.train.tools.metrics import read_metrics
from tests.launcher import OUTSIDE

ROOT = Path(__file__).resolve().parents[2]
RANKS, SPARES, STEPS = 4, 2, 160
SECONDS = 200  # of a run at most
TIMEOUT = 8  # of ranks: what a stopped one costs
FLAGS = [
    "--device=cpu", "--deterministic", f"--steps={STEPS}", "--batch-size=8", "--seq-len=16", "--hidden-size=36",
    "--intermediate-size=29", "--num-hidden-layers=2", "--num-attention-heads=4", "--num-key-value-heads=2",
    "--head-dim=6", "--vocab-size=256", "--eval-every=20", "--eval-batches=2", "--sample-tokens=0", "--save-every=40",
    "--lr=3e-3", "--warmup-steps=0", f"--timeout={TIMEOUT}",
]  # fmt: skip
KINDS = ("kill", "stop", "leave", "kill two")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGUSR1}


class Run:
    """Ranks and spares of a run in ``folder``, on ``text``."""

    def __init__(self, folder: Path, text: Path, *flags: str, spares: int = 0) -> None:
        self.folder, self.out = folder, folder / "run"
        folder.mkdir()
        self.flags = [*FLAGS, f"--data={text}", f"--out={self.out}", *flags]
        port = 20_000 + random.SystemRandom().randrange(12_000)
        place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes = [self.start(f"rank-{rank}", {**place, "RANK": str(rank)}) for rank in range(RANKS)]
        self.spares = [self.start(f"spare-{n}", {}, f"--join={self.out}/address") for n in range(spares)]

    def start(self, name: str, environment: dict[str, str], *flags: str) -> subprocess.Popen[bytes]:
        with (self.folder / name).open("wb") as output:
            environment = {**OUTSIDE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
            command = [sys.executable, "-m", "kos.train", *self.flags, *flags]
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.out / "metrics.jsonl")

    def result(self) -> tuple[Any, Any]:
        """What must have the bits of any other run: the numbers of all steps, and the last weights and state."""
        numbers = [[row.get(key) for key in ("step", "loss", "grad_norm", "val_loss")] for row in self.rows()]
        files = sorted((self.out / "checkpoints" / f"step-{STEPS}").glob("*.safetensors"))
        tensors: dict[str, np.ndarray] = {}
        for file in files:
            tensors |= load_file(file)
        return numbers, {name: tensor.tobytes() for name, tensor in sorted(tensors.items())}

    def said(self) -> list[str]:
        """What the first ranks said of changes; their seconds are those of the pauses."""
        texts = [path.read_text() for path in sorted(self.folder.glob("*-*")) if path.is_file()]
        return [line for text in texts for line in text.splitlines() if re.search(r" now, [\d.]+ s later", line)]

    def wait(self, seconds: float) -> list[int | None]:
        """The exit codes; None: it had to be killed."""
        deadline, codes = time.monotonic() + seconds, list[int | None]()
        for process in (*self.processes, *self.spares):
            try:
                codes.append(process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(None)
        return codes


def hurt(run: Run, kinds: random.Random, zero: bool) -> list[str]:
    """Faults of a run, until a few have happened or it is over."""
    done, alive = list[str](), [*run.processes]
    for _ in range(kinds.randrange(1, 4)):
        time.sleep(kinds.uniform(0.0, 2.5))
        rows = run.rows()
        if rows and rows[-1]["step"] > STEPS - 20:
            break
        kind = kinds.choice(KINDS[: 3 if zero else 4])
        for process in kinds.sample(alive, min(2 if kind == "kill two" else 1, len(alive) - 1)):  # one has the state
            alive.remove(process)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(SIGNALS[kind.partition(" ")[0]])
        done.append(f"{kind} after step {rows[-1]['step'] if rows else 0}")
        epoch, deadline = rows[-1]["epoch"] if rows else 0, time.monotonic() + 30
        while zero and time.monotonic() < deadline:  # the next holder of a part must have it again
            time.sleep(0.05)
            if (rows := run.rows()) and (rows[-1]["epoch"] > epoch or rows[-1]["step"] == STEPS):
                break
        if len(alive) < 2:
            break
    return done


def one(folder: Path, text: Path, expected: Any, seed: int) -> dict[str, Any]:
    """A run with the faults of ``seed``, beside what is ``expected``."""
    kinds = random.Random(seed)
    zero = kinds.random() < 0.5
    run = Run(folder, text, "--elastic=1", f"--zero={int(zero)}", spares=SPARES)
    began = time.monotonic()
    while len(run.rows()) < 3:
        assert time.monotonic() < began + SECONDS, run.processes[0].poll()
        time.sleep(0.02)
    faults = hurt(run, kinds, zero)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and len(run.rows()) < STEPS:
        time.sleep(0.1)
    for process in run.processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)  # who was stopped finds that it is out, and ends
    codes = run.wait(40)
    numbers, tensors = run.result()
    same = (numbers == expected[0], tensors == expected[1])
    rows = run.rows()
    epochs = rows[-1]["epoch"] if rows else None
    return {
        "seed": seed, "zero": int(zero), "same": all(same), "numbers": same[0], "tensors": same[1], "rows": len(rows),
        "hang": None in codes, "faults": faults, "epochs": epochs, "codes": codes, "said": run.said(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the runs that fail")
    arguments = parser.parse_args()
    counts, pauses = Counter[str](), list[float]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = folder / "letters.txt"
        text.write_bytes(np.random.default_rng(7).integers(97, 110, 20_000, np.uint8).tobytes())
        plain = Run(folder / "plain", text)
        assert plain.wait(SECONDS) == [0] * RANKS, (folder / "plain" / "rank-0").read_text()
        expected = plain.result()
        for seed in range(arguments.seed, arguments.seed + arguments.runs):
            found = one(folder / str(seed), text, expected, seed)
            counts["same"] += found["same"]
            counts["hang"] += found["hang"]
            counts["runs"] += 1
            counts.update(each.partition(" after")[0] for each in found["faults"])
            counts["changes"] += found["epochs"] or 0
            pauses += [float(x) for line in found["said"] for x in re.findall(r" now, ([\d.]+) s later", line)]
            print(json.dumps(found), flush=True)
            if arguments.keep and (not found["same"] or found["hang"]):
                os.rename(folder / str(seed), arguments.keep / str(seed))
    pauses.sort()
    share = {"median": len(pauses) // 2, "p90": len(pauses) * 9 // 10, "max": len(pauses) - 1}
    print(json.dumps({**counts, "pauses": {name: pauses[at] for name, at in share.items() if pauses}}))


if __name__ == "__main__":
    main()
