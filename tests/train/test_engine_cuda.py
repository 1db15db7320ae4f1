"""Whole runs on GPUs: beside the CPU's, replayed and resumed bit for bit, over ranks, with and without ZeRO-1."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kos.train.tools import read_metrics
from tests.launcher import MPIRUN, OUTSIDE
from tests.train.beside_torch import losses_beside_torch
from tests.train.sharded import tensors_of_run

SECONDS = 200  # of a run, much more than it needs
MODEL = """
--hidden-size 256 --num-hidden-layers 3 --num-attention-heads 4 --num-key-value-heads 2 --intermediate-size 512
--batch-size 16 --seq-len 64 --lr 3e-3 --warmup-steps 10 --eval-batches 2 --eval-every 10 --sample-tokens 0
--steps 20 --save-every 10 --timeout 30
""".split()  # noqa: SIM905 (as it is typed)

# At the rate of 3e-3 training amplifies rounding: by step 50 to 1e-5, from another seed to 1e-3, on one CPU too.
FLOAT32 = ["--dtype", "float32", "--steps", 50, "--lr", "1e-3"]

TAKEN = """
from kos.cuda import driver
driver.set_device(0)
free, total = driver.call(driver.cu.cuMemGetInfo)
print(total - free)
"""  # bytes that are taken where a process has a context there and nothing else

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = ["ring ", "tree ", "one shot ", "two shot ", "all reduce\n", "barrier ", "rank "]
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_text("".join(rng.choice(words, 20_000)))
    return path


def run(text: Path, out: Path, *flags: object, ranks: int = 1, error: str = "", **environment: str) -> str:
    """What a run says; with ``error``, what it is refused with."""
    launcher = [MPIRUN, "-n", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "kos.train", "--data", text, "--out", out, *MODEL, *flags]
    done = subprocess.run(
        list(map(str, command)), env={**OUTSIDE, **environment}, capture_output=True, text=True, timeout=SECONDS
    )
    if error:
        said = [line for line in done.stderr.splitlines() if line.startswith("kos: error:")]
        assert done.returncode and len(said) == 1 and error in said[0], done.stderr[-1500:]
        return said[0]
    assert done.returncode == 0, done.stderr[-1500:] + done.stdout[-500:]
    return done.stdout


def column(out: Path, name: str = "loss") -> list[float]:
    return [row[name] for row in read_metrics(out / "metrics.jsonl")]


@pytest.fixture(scope="module")
def one(text, tmp_path_factory):
    """The run that others are held against: one GPU, bf16, a graph, four micro-batches a step."""
    out = tmp_path_factory.mktemp("one") / "run"
    said = run(text, out, "--device", "cuda", "--micro-batch-size", 4)
    graph = "one CUDA graph a step; memory of each rank"
    for expected in (graph, "activations, recompute none", " MFU ", " GiB"):
        assert expected in said, said[:2000]
    return out


def test_float32_is_the_cpu(text, tmp_path):
    for device in ("cpu", "cuda"):
        run(text, tmp_path / device, "--device", device, *FLOAT32, "--micro-batch-size", 8)
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-3), ("lr", 1e-12)):
        np.testing.assert_allclose(column(tmp_path / "cuda", name), column(tmp_path / "cpu", name), rtol=tolerance)


def test_packed_completions_are_those_of_the_cpu(tmp_path):
    """And a batch in which the loss counts nothing moves nothing: the first of these two steps has a target alone."""
    rng, path = np.random.default_rng(0), tmp_path / "pairs.jsonl"
    parts = [["word " * n for n in rng.integers(1, 8, 2)] for _ in range(300)]
    path.write_text("".join(f'{{"prompt": "{prompt}", "completion": "{answer}"}}\n' for prompt, answer in parts))
    for device in ("cpu", "cuda"):
        run(path, tmp_path / device, "--device", device, *FLOAT32, "--micro-batch-size", 8, "--steps", 20)
    # Losses come near 0, where the rounding of logits in float32 is what is left of them.
    np.testing.assert_allclose(column(tmp_path / "cuda"), column(tmp_path / "cpu"), rtol=1e-5, atol=1e-6)
    path.write_text(f'{{"prompt": "{"x" * 40}", "completion": "yes"}}\n' * 2)
    for flags in ([], ["--no-graph"], ["--optimizer", "muon"]):
        out, how = tmp_path / "-".join(["long", *flags]), ["--save-every", 1, "--seq-len", 16, "--batch-size", 2]
        how += ["--fit", "cut", "--seed", 3]  # which orders the sequences so, and leaves none out
        run(path, out, "--device", "cuda", *how, *flags, "--steps", 2, "--eval-batches", 0, "--weight-decay", 0.5)
        assert [row.get("no_targets") for row in read_metrics(out / "metrics.jsonl")] == [None, True]
        first, second = (tensors_of_run(out / "checkpoints" / f"step-{step}") for step in (1, 2))
        assert first == second


def test_gpt2(text, tmp_path):
    """LayerNorm, GELU, biases and learned positions: the CPU's losses in fp32, and in bf16 the same bits twice."""
    gpt2 = ["--model-type", "gpt2", "--num-key-value-heads", 4, "--micro-batch-size", 8]
    run(text, tmp_path / "cpu", *gpt2, "--device", "cpu")
    run(text, tmp_path / "gpu", *gpt2, "--device", "cuda", "--dtype", "float32")
    np.testing.assert_allclose(column(tmp_path / "gpu"), column(tmp_path / "cpu"), rtol=1e-4)
    for out in ("first", "second"):
        run(text, tmp_path / out, *gpt2, "--device", "cuda")
    assert column(tmp_path / "first")[-1] < 0.6 * column(tmp_path / "first")[0]
    assert tensors_of_run(tmp_path / "first") == tensors_of_run(tmp_path / "second")


@pytest.mark.parametrize(
    "flags", [[], ["--no-graph"], ["--recompute", "norms"], ["--recompute", "block"], ["--resume", "step-10"]], ids=str
)
def test_the_bits_of_the_run(one, text, tmp_path, flags):
    """Repeated, without the graph, recomputed, and resumed, which the CPU does too."""
    losses = column(one)
    assert losses[-1] < 0.6 * losses[0]
    how = ["--micro-batch-size", 4, *(one / "checkpoints" / flag if flag == "step-10" else flag for flag in flags)]
    run(text, tmp_path / "run", "--device", "cuda", *how)
    for name in ("loss", "grad_norm"):
        assert column(tmp_path / "run", name) == column(one, name)[10 * ("--resume" in flags) :]
    assert tensors_of_run(tmp_path / "run") == tensors_of_run(one)
    if "--resume" in flags:
        run(text, tmp_path / "cpu", "--device", "cpu", *how)
        np.testing.assert_allclose(column(tmp_path / "cpu"), losses[10:], rtol=2e-2)


def test_resume_without_master_weights_bit_for_bit(one, text, tmp_path):
    flags = ["--device", "cuda", "--micro-batch-size", 4, "--master-weights", "none"]
    run(text, tmp_path / "run", *flags)
    for name in ("loss", "grad_norm"):  # of the initial weights, which the pass has in bf16 either way
        assert column(tmp_path / "run", name)[0] == column(one, name)[0]
    # Rounding at random is noise in the weights: a late loss of a text learned by heart differs by percents.
    assert np.mean(column(tmp_path / "run")) == pytest.approx(np.mean(column(one)), rel=1e-2)
    run(text, tmp_path / "rest", *flags, "--resume", tmp_path / "run" / "checkpoints" / "step-10")
    assert column(tmp_path / "rest") == column(tmp_path / "run")[10:]
    assert tensors_of_run(tmp_path / "rest") == tensors_of_run(tmp_path / "run")


def test_bfloat16_gradients(text, tmp_path):
    """Of one micro-batch a step: losses within 0.5% of fp32's; again, eager and resumed the same bits."""
    flags = ["--device", "cuda", "--micro-batch-size", 16, "--lr", 1e-4]  # faster, the losses of any two roundings part
    run(text, tmp_path / "fp32", *flags)
    said = run(text, tmp_path / "bf16", *flags, "--grad-dtype", "bfloat16")
    assert "gradients, bfloat16" in said and tensors_of_run(tmp_path / "bf16") != tensors_of_run(tmp_path / "fp32")
    for name in ("loss", "grad_norm"):  # the first are of the same pass
        np.testing.assert_allclose(column(tmp_path / "bf16", name)[0], column(tmp_path / "fp32", name)[0], rtol=1e-3)
    np.testing.assert_allclose(column(tmp_path / "bf16"), column(tmp_path / "fp32"), rtol=5e-3)
    middle = tmp_path / "bf16" / "checkpoints" / "step-10"
    for name, more in (("again", []), ("eager", ["--no-graph"]), ("rest", ["--resume", middle])):
        run(text, tmp_path / name, *flags, "--grad-dtype", "bfloat16", *more)
        assert column(tmp_path / name) == column(tmp_path / "bf16")[10 * (name == "rest") :], name
        assert tensors_of_run(tmp_path / name) == tensors_of_run(tmp_path / "bf16"), name


@pytest.mark.alone
def test_memory_is_within_the_plan(text, tmp_path):
    """The memory in use in the first step, less what was in use before the run.  It counts all memory of the GPU."""
    model = ["--hidden-size", 1024, "--num-hidden-layers", 8, "--intermediate-size", 4096, "--seq-len", 512]
    taken = subprocess.run([sys.executable, "-c", TAKEN], capture_output=True, text=True, check=True)
    said = run(text, tmp_path, "--device", "cuda", *model, "--micro-batch-size", 4, "--steps", 2, "--eval-every", 0)
    planned = float(re.search(r"total +([\d.]+) GiB of", said)[1]) * 2**30
    grown = column(tmp_path, "memory_bytes")[0] - int(taken.stdout)
    print(f"grown by {grown / 2**30:.2f} GiB, planned {planned / 2**30:.2f}")
    assert planned / 2 < grown <= planned + 0.005 * 2**30  # as it is rounded


def test_what_is_refused(text, tmp_path):
    run(text, tmp_path, "--device", "cuda", error="expected a GPU for every rank, got none", CUDA_VISIBLE_DEVICES="")
    run(text, tmp_path, "--device", "cuda", "--intermediate-size", 100_000_000, error="a smaller model")
    much = ["--batch-size", 8192, "--micro-batch-size", 8192, "--seq-len", 2048]
    said = run(text, tmp_path, "--device", "cuda", *much, error="memory: expected at most")
    assert "a --micro-batch-size below 8192 or --recompute norms or block" in said
    run(text, tmp_path, "--device", "cuda", "--lr", "1e30", "--min-lr", "1", error="first in the gradient of")


def test_losses_are_those_of_torch():
    """300 steps in bf16 on the same tokens from the same weights: the last twenty losses, on average, within 0.5%."""
    ours, theirs = losses_beside_torch("cuda", "bfloat16", 300)
    print(f"last losses: kos {np.mean(ours[-20:]):.4f}, torch {np.mean(theirs[-20:]):.4f}")
    assert np.mean(ours[-20:]) == pytest.approx(np.mean(theirs[-20:]), rel=5e-3)
    assert 1.0 < theirs[-1] < 0.5 * theirs[0]  # learned, and not by heart
