"""Random kills, stops, leaves and joins of elastic runs: every run must end with the bits of one unhurt.

``python -m tests.train.elastic_faults --runs 100`` prints a line of JSON per run and one with the counts.  Ranks are
processes without a launcher; spares wait to join where a rank is gone.  Steps are short, so that faults hit anything.
``--device cuda --backend peer``: on GPUs, which ranks share where they are more.
"""

import argparse
import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from kos.bench.report import provenance, to_json
from kos.cuda.devices import visible_devices
from kos.train.tools import read_metrics
from tests.launcher import OUTSIDE

RANKS, SPARES = 4, 2
SECONDS = 400  # of a run at most
STARTS = 4  # tries: on a busy machine ranks may not meet in time
TIMEOUT = 8  # of ranks: what a stopped one costs
FLAGS = [
    "--deterministic", "--batch-size=8", "--eval-batches=2", "--sample-tokens=0", "--lr=3e-3", "--warmup-steps=0",
    "--vocab-size=256", "--num-attention-heads=4", "--num-key-value-heads=2", f"--timeout={TIMEOUT}",
]  # fmt: skip
DEVICES = {
    "cpu": (60, ["--seq-len=16", "--hidden-size=36", "--intermediate-size=29", "--num-hidden-layers=2",
                  "--head-dim=6", "--eval-every=10", "--save-every=20"]),
    "cuda": (400, ["--seq-len=64", "--hidden-size=256", "--intermediate-size=704", "--num-hidden-layers=4",
                   "--head-dim=64", "--eval-every=50", "--save-every=100"]),
}  # fmt: skip
"""The steps of a run, and its other flags, by device."""
COMPILING = "--timeout=120"  # of the first run on a GPU, which compiles the kernels of all
START = """
import sys, time
from pathlib import Path
from kos.train import __main__, trainer
ready, begin, *flags = sys.argv[1:]
Path(ready).touch()
while not Path(begin).exists():
    time.sleep(0.01)
sys.exit(__main__.main(flags))
"""
"""A rank: on a busy machine imports take long, so all begin together."""
KINDS = ("kill", "stop", "leave", "kill two")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGUSR1}


def letters(path: Path) -> Path:
    """A file to train on."""
    path.write_bytes(np.random.default_rng(7).integers(97, 110, 20_000, np.uint8).tobytes())
    return path


class Run:
    """Ranks and spares of a run in ``folder`` on ``device``."""

    def __init__(
        self, folder: Path, text: Path, *flags: str, spares: int = 0, device: str = "cpu", backend: str = "auto"
    ) -> None:
        self.folder, self.out = folder, folder / "run"
        folder.mkdir()
        self.ready = list[Path]()
        self.steps, more = DEVICES[device]
        about = [f"--device={device}", f"--backend={backend}", f"--steps={self.steps}", *more]
        self.flags = [*FLAGS, *about, f"--data={text}", f"--out={self.out}", *flags]
        port = 20_000 + random.SystemRandom().randrange(12_000)
        place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes = [self.start(f"rank-{rank}", {**place, "RANK": str(rank)}) for rank in range(RANKS)]
        self.spares = [self.start(f"spare-{n}", {}, f"--join={self.out}/address") for n in range(spares)]
        deadline = time.monotonic() + SECONDS
        while not all(path.exists() for path in self.ready):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)
        (folder / "begin").touch()

    def start(self, name: str, environment: dict[str, str], *flags: str) -> subprocess.Popen[bytes]:
        with (self.folder / name).open("wb") as output:
            environment = {**OUTSIDE, "OMP_NUM_THREADS": "1", **environment}
            begin, self.ready = self.folder / "begin", [*self.ready, self.folder / f"{name}.ready"]
            command = [sys.executable, "-c", START, str(self.ready[-1]), str(begin), *self.flags, *flags]
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def begins(self) -> bool:
        """Wait for the first steps; False: a rank came too late to meet the others, before there was anything to hurt.

        AssertionError if the run does not begin for another reason.
        """
        deadline = time.monotonic() + SECONDS
        while len(self.rows()) < 3:
            if any(process.poll() is not None for process in self.processes):
                self.wait(0)
                output = self.output()
                assert re.search(r"did not (arrive|connect|answer|reach)|gave no answer", output), output
                return False
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)
        return True

    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.out / "metrics.jsonl")

    def result(self) -> tuple[Any, Any]:
        """What must have the bits of any other run: the numbers of all steps, and the last weights and state."""
        numbers = [[row.get(key) for key in ("step", "loss", "grad_norm", "val_loss")] for row in self.rows()]
        files = sorted((self.out / "checkpoints" / f"step-{self.steps}").glob("*.safetensors"))
        tensors: dict[str, np.ndarray] = {}
        for file in files:
            tensors |= load_file(file)
        return numbers, {name: tensor.tobytes() for name, tensor in sorted(tensors.items())}

    def output(self) -> str:
        """What the ranks have printed."""
        texts = [f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*-*")) if path.suffix == ""]
        return "\n".join(texts)

    def changes(self) -> list[str]:
        """What the first ranks said of changes; their seconds are those of the pauses."""
        return [line for line in self.output().splitlines() if re.search(r" now, [\d.]+ s later", line)]

    def lost(self) -> int:
        """In how many changes ranks were lost or left."""
        return sum(re.search(r" (lost|left) (and|after)", line) is not None for line in self.changes())

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
    done, alive, taken = list[str](), [*run.processes], [row["step_seconds"] for row in run.rows()]
    seconds = run.steps * sum(taken) / len(taken)  # of the run unhurt
    for _ in range(kinds.randrange(1, 4)):
        time.sleep(kinds.uniform(0.0, seconds / 4))
        rows = run.rows()
        if rows[-1]["step"] > run.steps * 7 // 8:
            break
        kind = kinds.choice(KINDS[: 3 if zero else 4])
        for process in kinds.sample(alive, min(2 if kind == "kill two" else 1, len(alive) - 1)):  # one has the state
            alive.remove(process)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(SIGNALS[kind.partition(" ")[0]])
        done.append(f"{kind} after step {rows[-1]['step']}")
        deadline = time.monotonic() + SECONDS
        while zero and run.lost() < len(done):  # the next holder of a part must have it again
            if time.monotonic() > deadline or run.rows()[-1]["step"] == run.steps:
                return done
            time.sleep(0.05)
        if len(alive) < 2:
            break
    return done


def one(folder: Path, text: Path, plain: Run, seed: int, **how: str) -> dict[str, Any]:
    """A run with the faults of ``seed``, beside the unhurt run ``plain``."""
    for _ in range(STARTS):
        kinds = random.Random(seed)
        zero = kinds.random() < 0.5
        run = Run(folder, text, "--elastic=1", f"--zero={int(zero)}", spares=SPARES, **how)
        if run.begins():
            break
        shutil.rmtree(folder)
    faults = hurt(run, kinds, zero)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and len(run.rows()) < run.steps:
        time.sleep(0.1)
    said = run.changes()
    for process in run.processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)  # who was stopped finds that it is out, and ends
    codes = run.wait(40)
    (numbers, tensors), expected, rows = run.result(), plain.result(), run.rows()
    same = (numbers == expected[0], tensors == expected[1])
    pauses = [float(x) for line in said for x in re.findall(r" now, ([\d.]+) s later", line)]
    return {
        "seed": seed, "zero": int(zero), "same": all(same), "numbers": same[0], "tensors": same[1], "rows": len(rows),
        "hang": None in codes, "faults": faults, "epochs": rows[-1]["epoch"] if rows else 0, "codes": codes,
        "pauses": pauses, "said": said,
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all runs, and the seconds of pauses: with a stopped rank they have a timeout of the ranks or two."""
    counts = Counter(fault.partition(" after")[0] for row in rows for fault in row["faults"])
    about: dict[str, Any] = {"runs": len(rows), "same": sum(row["same"] for row in rows)}
    about |= {"hang": sum(row["hang"] for row in rows), "faults": dict(counts)}
    about["joins"] = sum(
        int(x) for row in rows for line in row["said"] for x in re.findall(r"(\d+) ranks? joined", line)
    )
    for name, stopped in (("pauses", False), ("pauses with a stopped rank", True)):
        chosen = [row for row in rows if any("stop" in fault for fault in row["faults"]) == stopped]
        if pauses := sorted(x for row in chosen for x in row["pauses"]):
            at = {"median": len(pauses) // 2, "p90": len(pauses) * 9 // 10, "max": len(pauses) - 1}
            about[name] = {"changes": len(pauses), **{share: pauses[place] for share, place in at.items()}}
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--keep", type=Path, help="a folder for the runs that fail")
    parser.add_argument("--json", type=Path, help="where to write the runs")
    arguments = parser.parse_args()
    how, rows = {"device": arguments.device, "backend": arguments.backend}, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(arguments.jobs) as pool:
        folder = Path(temporary)
        text = letters(folder / "letters.txt")
        plain = Run(folder / "plain", text, COMPILING, **how)
        assert plain.wait(SECONDS) == [0] * RANKS, plain.output()
        seeds = range(arguments.seed, arguments.seed + arguments.runs)
        for found in pool.map(lambda seed: one(folder / str(seed), text, plain, seed, **how), seeds):
            rows.append(found)
            print(json.dumps(found), flush=True)
            where = folder / str(found["seed"])
            if arguments.keep and (not found["same"] or found["hang"]):
                shutil.copytree(where, arguments.keep / where.name)
            shutil.rmtree(where)
            if arguments.json is not None:
                about = {"device": arguments.device, "ranks": RANKS, "spares": SPARES, "timeout": TIMEOUT}
                arguments.json.write_text(to_json(machine(arguments.device) | about | summary(rows) | {"rows": rows}))
    print(json.dumps(summary(rows)))


def machine(device: str) -> dict[str, Any]:
    """What was measured where."""
    if device == "cpu":
        return provenance("tests.train.elastic_faults", None, 1)
    return provenance("tests.train.elastic_faults", 0, len(visible_devices()))


if __name__ == "__main__":
    main()
