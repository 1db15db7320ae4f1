"""Try an installed kos as a new user would: PYTHON tests/installed.py [MPIRUN].  PYTHON has kos[train] from a wheel.

Prints each command, and ends with status 1 at the first that fails.  The commands run in an empty folder, so no clone
is found.  Two ranks also run under MPIRUN, or the environment's own mpirun, if there is one.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

BIN = Path(sys.executable).parent  # not resolved: the environment's own
SECONDS = 180
EXAMPLE = """
import kos, numpy as np

with kos.init() as comm:
    x = np.full(4, comm.rank + 1, np.float32)
    comm.all_reduce(x)
    assert x.tolist() == [comm.size * (comm.size + 1) / 2] * 4, x
    print(f"{comm.rank} {comm.size} {kos.__file__}")
"""
THREADS = """
import numpy as np
from kos.testing import spawn

assert [x.tolist() for x in spawn(lambda comm: comm.all_reduce(np.ones(2)), 3)] == [[3, 3]] * 3
"""
TORCHRUN = """
import os, socket, subprocess, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    port = str(server.getsockname()[1])
places = [{"RANK": str(i), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} for i in range(2)]
ranks = [subprocess.Popen([sys.executable, "example.py"], env=os.environ | place) for place in places]
sys.exit(max([rank.wait() for rank in ranks]))
"""
SMALL = "--hidden-size 32 --num-hidden-layers 2 --intermediate-size 48 --batch-size 8 --seq-len 32 --eval-batches 2"
FEW = "-b 1K -e 4K -f 2 -n 4 -w 1 -o max -d float64 --device host"


def environment() -> dict[str, str]:
    """As a user has it, where root may start ranks, and more of them than there are cores."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe")
    more = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PATH": f"{BIN}:{os.environ['PATH']}"}
    return environ | dict.fromkeys(root, "1") | more


def run(folder: Path, *command: str, expected: str = "") -> None:
    """Run a program, whose output must contain ``expected``."""
    print("$", *command, flush=True)
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=SECONDS)
    if done.returncode or expected not in done.stdout:
        sys.exit(f"expected status 0 and {expected!r}, got status {done.returncode} and\n{done.stdout}{done.stderr}")


def main() -> None:
    python, kos = sys.executable, str(BIN / "kos")
    train = (kos, "train", *SMALL.split(), "--out")
    launchers = sys.argv[1:] or [str(path) for path in BIN.glob("mpirun")]
    ranks = [*launchers, "-n", "2"] if launchers else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for program, text in {"example": EXAMPLE, "threads": THREADS, "torchrun": TORCHRUN}.items():
            (folder / f"{program}.py").write_text(text)
        run(folder, python, "example.py", expected=f"0 1 {sys.prefix}")
        run(folder, python, "threads.py")
        run(folder, python, "torchrun.py", expected=f"1 2 {sys.prefix}")
        run(folder, kos, "doctor", expected=f" at {sys.prefix}")
        backends = ["--backend", "mpi,mpi-native"] * bool(ranks)  # without those of torch, which may be installed
        run(folder, *ranks, kos, "bench", *FEW.split(), *backends, expected="0 wrong elements")
        run(folder, *train, "run", "--steps", "2", expected="step 2/2  loss ")
        run(folder, *train, "run", "--steps", "3", "--resume", "auto", expected="step 3/3  loss ")
        if ranks:
            run(folder, *ranks, python, "example.py", expected=f"1 2 {sys.prefix}")
            run(folder, *ranks, kos, "doctor", expected="exact on 2 ranks")
            run(folder, *ranks, *train, "two", "--steps", "2", expected="step 2/2  loss ")
    print("passed")


if __name__ == "__main__":
    main()
