"""A stop is agreed on at any moment: nothing is lost but what is under way.  What a run will take is said before."""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from kos.errors import CollectiveTimeout, ConfigError
from kos.testing import spawn
from kos.train import checkpoint
from kos.train.config.options import TrainConfig
from kos.train.device import cpu, dry_run
from kos.train.device.dry_run import DryOps, plan_memory
from kos.train.model.families import resolve
from kos.train.model.model import InFlight, Model
from kos.train.ops import Batch
from kos.train.ops.parameters import Parameters
from kos.train.parallel import schedules
from kos.train.parallel.failures import KILLED, Stop, Stopped, alone
from kos.train.parallel.gradients import Gradients
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.tools import read_metrics
from kos.train.trainer import Trainer
from tests.forked import python
from tests.launcher import MPIRUN, SECONDS, needs_mpirun, run_program, running_program
from tests.train.commands import ENVIRONMENT, SHAPE
from tests.train.elastic_runs import until
from tests.train.runs import _config, _train


def test_a_stop_does_not_wait_for_the_first_validation(text, tmp_path):
    """Before the first step, there is nothing to save."""
    stop, seen = Stop(), []

    def run(comm):
        early = Stop()
        early.requested = True
        with pytest.raises(Stopped):  # before the data are read
            Trainer(_config(text, tmp_path), comm, early)
        trainer = Trainer(_config(text, tmp_path, save_every=0, eval_every=2), comm, stop)

        def shown(what, share):
            seen.append((what, share))
            stop.request(signal.SIGINT)

        trainer.device.show = shown
        with pytest.raises(Stopped):
            trainer.run()

    spawn(run, 1)
    assert seen == [("validation", 0.0)]


STUCK = """if True:
    import sys, time
    from kos.errors import CollectiveTimeout
    from kos.train import __main__ as program, trainer
    from kos.train.device import Device

    def late(*_):
        raise CollectiveTimeout("rank 1 did not arrive")

    program.CLOSE_SECONDS, trainer.train, Device.close = 0.5, late, lambda *_: time.sleep(1000)
    program.main(sys.argv[1:])
"""


def test_a_run_that_cannot_close_what_it_holds_ends(text, tmp_path):
    """CUDA frees no memory before the GPU is idle, which it may never be."""
    flags = ["--data", str(text), "--out", str(tmp_path), "--steps=3", "--eval-every=0", "--sample-tokens=0"]
    done = run_program(*python(), "-c", STUCK, *SHAPE, "--device=cpu", *flags, env=ENVIRONMENT)
    assert done.returncode == 1, done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith("kos: error: ") and "rank 1 did not arrive" in said and "could not be closed" in said


@pytest.mark.parametrize(("ranks", "moment"), [(1, "step 3"), (2, "step 3"), (2, "validation")])
def test_a_stop_comes_after_the_step(text, tmp_path, ranks, moment, capsys):
    """The last rank is asked within it; a validation after a step belongs to that."""
    config = _config(text, tmp_path, save_every=0, eval_every=2)

    def run(comm):
        stop, seen = Stop(), []
        trainer = Trainer(config, comm, stop)
        show = trainer.device.show

        def shown(what, share):
            assert 0 <= share < 1
            seen.append(what)
            stop.requested |= comm.rank == comm.size - 1 and what == moment and "step 2" in seen
            show(what, share)

        trainer.device.show = shown
        trainer.run()

    spawn(run, ranks, timeout=100)
    assert "stopped on request after step 3; resume with: " in capsys.readouterr().out
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert checkpoint.find(tmp_path).step == len(rows) == 3 and "val_loss" in rows[1]


def test_a_path_that_is_no_text_reaches_all_ranks():
    def run(comm):
        path = alone(comm, lambda: os.fsdecode(b"runs/\xff"))

        def fail():
            raise ConfigError(f"--out {path}: no")

        with pytest.raises(ConfigError) as caught:
            alone(comm, fail)
        return str(caught.value)

    assert spawn(run, 2, timeout=100) == ["--out runs/\udcff: no"] * 2


def test_a_rank_that_is_stopped_at_a_save_is_missed_by_the_timeout():
    """And the save is made."""
    over, made = threading.Event(), threading.Event()

    def run(comm):
        if comm.rank == 1:
            assert over.wait(60), "rank 0 waits for longer than the timeout"
            return
        comm.timeout = 0.2
        try:
            with pytest.raises(CollectiveTimeout):
                alone(comm, made.set)
            assert made.is_set()
        finally:
            over.set()

    spawn(run, 2, timeout=100)


def test_a_save_that_takes_long_is_waited_for_and_logged(caplog):
    def run(comm):
        comm.timeout = 0.2 if comm.rank else 60
        alone(comm, lambda: until(lambda: caplog.messages))

    spawn(run, 2, timeout=100)
    assert caplog.messages == ["waiting for another rank for 0.2 s: it is stopped, or at work (timeout: 3600 s)"]


MOMENTS = {
    "imports": "from kos.train.config import flags\nparse = flags.parse\nflags.parse = lambda a: (go(), parse(a))[1]\n",
    "weights": "from kos.train.model.initial import InitialWeights as W\nlast = W._draw\n"
    "W._draw = lambda *a: (go(), last(*a))[1]\n",
    "checkpoint": "from kos.train import checkpoint\nsave = checkpoint.save\n"
    "checkpoint.save = lambda *a, **k: (go(), save(*a, **k))[1]\n",
    "last step": "from kos.train.device import cpu\nlast = cpu.CpuDevice.start_step\n"
    "cpu.CpuDevice.start_step = lambda self, step, stop: (step == 5 and go(), last(self, step, step == 5))[1]\n",
    "sample": "from kos.train import report\nlast = report.continue_texts\n"
    "report.continue_texts = lambda *a, **k: (go(), last(*a, **k))[1]\n",
}


@needs_mpirun
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_exit_code_is_0_at_any_moment(text, tmp_path, moment):
    code = "import os, signal, sys\nfrom kos.train import __main__ as main\n"
    code += "from kos.launcher import launched_rank\ndef go():\n"
    code += "    if launched_rank() == 0 and not done: os.kill(os.getpid(), signal.SIGTERM)\n"
    code += "    done.append(1)\ndone = []\n"
    flags = ["--data", text, "--out", tmp_path / "run", "--steps=6", "--save-every=3", "--eval-every=0"]
    code += MOMENTS[moment] + "sys.exit(main.main())"
    command = [MPIRUN, "-n", "2", *python(), "-c", code, *SHAPE, *flags]
    done = run_program(*map(str, command), env=ENVIRONMENT)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    early = "kos: stopped before the first step, nothing to save"
    said = [line for line in done.stderr.splitlines() if f"; {KILLED}" not in line]
    assert said == [early] * (moment in ("imports", "weights"))
    steps = {"checkpoint": 4, "last step": 6, "sample": 6}.get(moment)
    assert steps is None or checkpoint.find(tmp_path / "run").step == steps
    assert ("resume with: " in done.stdout) == (moment == "checkpoint"), done.stdout
    assert done.stderr.count("; resume with: ") == (moment in ("checkpoint", "last step")), done.stderr


LONG_STEP = """
import ctypes, os, select, sys, threading
from pathlib import Path
from kos.train import __main__ as main
from kos.train.device.cpu import CpuDevice

def long(self, step, stop):
    if step == 3 and self.comm.rank == 0:
        libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        def wait():
            fifo = os.open(sys.argv.pop(), os.O_RDONLY | os.O_NONBLOCK)
            print("long step", flush=True)
            select.select([fifo], [], [])
            libc.pthread_mutex_unlock(lock)
        libc.pthread_mutex_lock(lock)
        threading.Thread(target=wait).start()
        libc.pthread_mutex_lock(lock)  # no signal interrupts it, so Python calls no handler meanwhile
    start(self, step, stop)

start, CpuDevice.start_step = CpuDevice.start_step, long
sys.exit(main.main(sys.argv[1:-1]))
"""


@needs_mpirun
@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGINT), (2, signal.SIGUSR1)])
def test_ctrl_c_says_within_the_step_what_it_does(text, tmp_path, ranks, number):
    """And the line that it ends with has the command that goes on."""
    os.mkfifo(tmp_path / "fifo")
    flags = [*SHAPE, "--data", text, "--out", tmp_path / "run", "--steps=100", "--eval-every=0", tmp_path / "fifo"]
    launcher = [MPIRUN, "-n", "2"] if ranks == 2 else []
    command = [*launcher, *python(), "-c", LONG_STEP, *flags]
    with running_program("long step\n".__eq__, *command, env=ENVIRONMENT) as process:
        process.send_signal(number)
        plan = f"stopping after this step, then saving to {tmp_path / 'run' / 'checkpoints'}"
        announced, said = f"kos: {plan}; Ctrl-C again to end now\n", list[str]()
        assert process.stdout is not None
        while announced not in said:  # mpirun of Open MPI 4 says that it forwards the signal
            said += [next(process.stdout, "")]
            assert said[-1], f"ended with {process.wait()}: {said}"
        os.close(os.open(tmp_path / "fifo", os.O_WRONLY | os.O_NONBLOCK))  # an error where nobody reads
        said += process.stdout
    assert said.count(announced) == 1, "rank 0 speaks for all"
    (command,) = re.findall("stopped on request after step 4; resume with: (.*)", "".join(said))
    assert process.returncode == 0 and checkpoint.find(tmp_path / "run").step == 4
    command = command.replace(sys.executable, shlex.join(python()))
    more = run_program("sh", "-c", f"{command} --steps 6", env=ENVIRONMENT)
    assert (more.returncode, more.stderr) == (0, ""), more.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [*range(1, 7)]


def test_a_second_signal_ends_at_once(text, tmp_path):
    code = "import os, signal, sys\nfrom kos.train import __main__ as main\n"
    code += "from kos.train import checkpoint\n"
    code += "checkpoint.save = lambda *a, **k: [os.kill(os.getpid(), s) for s in (signal.SIGUSR1, signal.SIGTERM)]\n"
    command = [*python(), "-c", code + "sys.exit(main.main())", *SHAPE, "--data", str(text), "--steps=2"]
    command += ["--out", str(tmp_path)]
    assert subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=SECONDS).returncode == -signal.SIGTERM


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("recompute", ["none", "norms", "block"])
def test_the_memory_plan_is_what_a_pass_takes(kind, recompute):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    heads = rng.choice([2, 4])
    shape = {
        "model_type": kind, "hidden_size": 64 * heads, "num_hidden_layers": rng.choice([2, 3]),
        "num_attention_heads": heads, "num_key_value_heads": None if kind == "gpt2" else heads // 2,
        "intermediate_size": 64 * heads * rng.choice([3, 4]), "vocab_size": rng.choice([256, 4000]),
    }  # fmt: skip
    seq_len, micro = rng.choice([(256, 4), (500, 2)])
    config = TrainConfig.from_preset(
        "tiny", seq_len=seq_len, batch_size=4, micro_batch_size=micro, recompute=recompute, model=shape
    ).for_world(1)
    model = resolve(config.model, 256, seq_len)
    plan = plan_memory(config, model, DryOps(), Mesh.dry(Layout()), schedules.build("1f1b", 1, 1), sharing=1)
    llama = Model(model, cpu.numpy_ops, recompute=recompute)
    weights = Parameters(model.parameter_shapes(), groups=model.fused_groups())
    tokens = np.zeros((micro, seq_len), np.int32)
    slot, gradients, loss = InFlight(cpu.numpy_ops.make_arena()), weights.like(), np.zeros(1)
    dx = np.zeros((tokens.size, model.hidden_size), np.float32)
    with cpu.numpy_ops.step(llama.arena):
        llama.forward(weights, slot, Batch(tokens, tokens))
        into = Gradients(gradients, False, lambda name: None)
        llama.backward(weights, slot, into, dx, loss=loss)
    llama.loss(weights, Batch(tokens, tokens))
    taken = llama.arena.peak + slot.arena.peak
    assert plan.arena == pytest.approx(taken, rel=0.06, abs=3 << 20)
    of_parameters = {use: size for use, size in plan.uses.items() if not use.startswith(("activations", "tensors"))}
    assert of_parameters.pop("both Adam moments, float32") == 8 * weights.flat.size
    assert of_parameters == dict.fromkeys(("weights, float32", "gradients, float32"), 4 * weights.flat.size)


def test_too_little_memory_is_an_error_before_any_is_taken(text, tmp_path, monkeypatch, before_call):
    """Although only one of the ranks lacks it."""
    free = iter([1 << 40, 1 << 20])
    monkeypatch.setattr(dry_run, "free_memory", lambda: next(free))
    before_call(cpu, "plan_buckets", lambda *_, **__: pytest.fail("memory is taken"))
    expected = "expected at most 0.00 GiB, the memory free on this machine for each of 2 ranks, got .* use fewer ranks"
    with pytest.raises(ConfigError, match=expected):
        _train(text, tmp_path, 2)
