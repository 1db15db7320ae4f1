"""Layouts on GPUs, by the command line: the run of one rank, in a graph and not, over ranks that may share GPUs."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kos.train import checkpoint
from kos.train.model.families import FAMILIES
from kos.train.parallel.schedules import SCHEDULES
from kos.train.tools import read_metrics
from tests.launcher import MPIRUN, OUTSIDE, nccl_ranks

SECONDS = 240  # of a run, which takes some 6 alone; where others share the GPU, loading kernels takes long
STEPS = 8
FLAGS = f"""
--preset tiny --device cuda --steps {STEPS} --eval-batches 2 --save-every 0 --sample-tokens 4 --timeout 60
--hidden-size 512 --intermediate-size 1408 --num-hidden-layers 5 --num-attention-heads 8 --num-key-value-heads 4
--vocab-size 4096 --batch-size 8 --micro-batch-size 1 --seq-len 256 --lr 5e-4 --warmup-steps 2 --schedule constant
--check-replicas 4
""".split()

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3 * SECONDS), pytest.mark.skipif(not MPIRUN, reason="needs mpirun")]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Rows of metrics and the last checkpoint's tensors, of a run that is made once."""
    known = {}

    def run(ranks, *flags):
        if (ranks, *flags) not in known:
            out = tmp_path_factory.mktemp("run")
            launcher = [MPIRUN, "-n", str(ranks)] if ranks > 1 else []
            command = [*launcher, sys.executable, "-m", "kos.train", *FLAGS, "--out", str(out), *flags]
            done = subprocess.run(command, env=OUTSIDE, capture_output=True, text=True, timeout=SECONDS)
            assert done.returncode == 0, done.stderr[-2500:] + done.stdout[-500:]
            known[ranks, *flags] = _rows(out), _tensors(out)
        return known[ranks, *flags]

    return run


def _rows(out: Path) -> np.ndarray:
    rows = np.array([(row["loss"], row["grad_norm"]) for row in read_metrics(out / "metrics.jsonl")])
    assert len(rows) == STEPS and rows[-1, 0] < rows[0, 0] - 0.1, f"it learns nothing: {rows}"
    return rows


def _tensors(out: Path) -> dict[str, np.ndarray]:
    found = checkpoint.latest(out / "checkpoints")
    assert found is not None
    return {name: each for file in found.path.glob("*.safetensors") for name, each in load_file(file).items()}


def check(train, ranks: int, backend: str, *flags: str, dtype: str = "float32", alone: tuple[str, ...] = ()) -> None:
    if backend != "peer" and ranks > nccl_ranks():
        pytest.skip(f"{backend} needs {ranks} GPUs, can have {nccl_ranks()} ranks")
    rows, tensors = train(ranks, "--dtype", dtype, "--backend", backend, *flags)
    expected, whole = train(1, "--dtype", dtype, *alone)
    np.testing.assert_allclose(rows, expected, rtol=2e-5 if dtype == "float32" else 2e-2)
    assert tensors.keys() == whole.keys()
    if dtype == "float32":
        for name, tensor in tensors.items():
            if not name.startswith("exp_avg"):
                np.testing.assert_allclose(tensor, whole[name], rtol=1e-4, atol=1e-4, err_msg=name)


TWO = ["--tp 2", "--cp 2", "--tp 2 --no-graph --recompute norms", "--cp 2 --no-graph --zero 1 --recompute block"]
TWO += ["--dp 2", "--dp 2 --zero 1 --no-graph"]
TWO += [f"--pp 2 --pp-schedule {name}{graph}" for name in SCHEDULES for graph in ("", " --no-graph")]
FOUR = [
    "--tp 4", "--cp 4", "--pp 4", "--dp 4 --zero 1", "--pp 2 --tp 2", "--dp 2 --tp 2 --zero 1",
    "--dp 2 --cp 2", "--pp 2 --cp 2 --pp-schedule zero-bubble-v", "--dp 2 --pp 2 --pp-schedule zero-bubble-v --zero 1",
]  # fmt: skip
HALVES = ["--seq-len 2048 --batch-size 4 --micro-batch-size 2", "--seq-len 4096 --batch-size 4"]
"""With tensor parallelism: halves of whole sequences, and halves of one sequence."""
EIGHT = ["--dp 4 --pp 2", "--dp 4 --pp 2 --zero 1"]
EIGHT += ["--dp 2 --tp 2 --pp 2", "--cp 2 --tp 2 --pp 2 --pp-schedule zero-bubble-v", "--dp 2 --cp 2 --tp 2 --zero 1"]
ONE_AXIS = ["--tp 2", "--cp 2", "--pp 2 --pp-schedule zero-bubble-v"]
FAMILY_FLAGS = [
    (f"--model-type {family}", flags) for family in sorted(FAMILIES.keys() - {"llama", "gpt2"}) for flags in ONE_AXIS
    if (family, flags) != ("olmo2", "--tp 2")  # which has norms over all heads, and is refused
]  # fmt: skip
RUNS = [  # ranks, flags, those of one rank, dtype
    *((2, flags, "", "float32") for flags in TWO),
    *((2, f"--tp 2 --recompute {how}", halves, "float32") for halves in HALVES for how in ("none", "block")),
    *((ranks, f"--tp {ranks}", f"--num-key-value-heads {ranks // 2}", "float32") for ranks in (2, 4)),
    *((4, flags, "", "float32") for flags in FOUR),
    *((2, flags, "--pad-token-id 101", "float32") for flags in (*ONE_AXIS, "--dp 2 --zero 1")),
]
ON_PEER = [
    *((8, flags, "", "float32") for flags in EIGHT), *((2, flags, "", "bfloat16") for flags in ONE_AXIS),
    *((2, flags, family, dtype) for family, flags in FAMILY_FLAGS for dtype in ("float32", "bfloat16")),
    (2, "--dp 2 --zero 1", "--grad-dtype bfloat16 --micro-batch-size 4", "bfloat16"),  # one rank adds them in fp32
]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "flags", "alone", "dtype", "backend"),
    [*((*run, backend) for run in RUNS for backend in ("peer", "nccl")), *((*run, "peer") for run in ON_PEER)],
)
def test_layout(train, ranks, flags, alone, dtype, backend):
    check(train, ranks, backend, *flags.split(), *alone.split(), dtype=dtype, alone=tuple(alone.split()))


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_zero_and_the_graph_change_no_bit(train, dtype):
    how = ("--dtype", dtype, "--backend", "peer")
    rows, tensors = train(2, *how)
    for flags in ("--zero 1", "--no-graph", "--zero 1 --no-graph"):
        others, there = train(2, *how, *flags.split())
        np.testing.assert_array_equal(others, rows, err_msg=flags)
        assert all(there[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items()), flags


DP = ["--dp 2", "--dp 2 --zero 1 --no-graph"]
FIXED = [f"--pp 2 --pp-schedule {name}" for name in SCHEDULES]
FIXED_MORE = [
    "--pp 2 --pp-schedule zero-bubble-v --no-graph --recompute norms", "--pp 2 --pp-schedule 1f1b --recompute block",
    "--pp 2 --no-tie-word-embeddings", "--pp 2 --pp-schedule zero-bubble-v --master-weights none",
    "--pp 2 --hidden-size 528 --micro-batch-size 2", "--pp 2 --num-hidden-layers 3 --pp-schedule zero-bubble-v",
]  # fmt: skip
FIXED_FOUR = [
    "--dp 4 --zero 1 --master-weights none",
    "--dp 2 --pp 2", "--dp 2 --pp 2 --zero 1 --pp-schedule zero-bubble-v", "--pp 4",
    "--dp 2 --pp 2 --zero 1 --pp-schedule zero-bubble-v",
]  # fmt: skip
LONG = "--seq-len 16384 --batch-size 2 --num-hidden-layers 2"  # in pieces; float32 has no fast attention
FIXED_ROWS = [
    "--cp 2 --seq-len 16384 --batch-size 4",
    "--cp 2 --seq-len 32768 --batch-size 2 --zero 1 --recompute block --no-graph",
    "--pp 2 --seq-len 16384 --batch-size 4 --pp-schedule zero-bubble-v", "--dp 2 --batch-size 2",
]  # fmt: skip
IN_PARTS = [
    "--tp 2 --deterministic-parts 2", "--tp 2 --deterministic-parts 4 --no-graph --recompute norms --batch-size 4",
    "--tp 2 --deterministic-parts 4 --model-type qwen3 --micro-batch-size 2 --recompute block",
    "--tp 2 --deterministic-parts 2 --no-tie-word-embeddings --model-type qwen2",
    "--tp 2 --deterministic-parts 4 --seq-len 4096 --batch-size 8 --micro-batch-size 4",
]  # fmt: skip
"""With tensor parallelism, whose sums over features are added part by part.  With 4,096 tokens, collectives overlap
matmuls, and sums over tokens are split too."""
FIXED_FOUR += ["--tp 4 --deterministic-parts 4 --micro-batch-size 4", "--dp 2 --tp 2 --zero 1 --deterministic-parts 4"]
FIXED_FOUR += ["--pp 2 --tp 2 --deterministic-parts 4 --pp-schedule zero-bubble-v"]
FIXED_FOUR += ["--dp 2 --cp 2 --seq-len 16384 --batch-size 4 --zero 1", "--cp 4 --seq-len 32768 --batch-size 2"]
OF_LAYOUTS = {"--dp", "--tp", "--pp", "--cp", "--pp-schedule", "--zero", "--recompute"}


def same_bits(train, ranks: int, backend: str, *flags: str, dtype: str = "bfloat16") -> None:
    """With --deterministic: losses, norms, weights and moments of one rank."""
    if backend != "peer" and ranks > nccl_ranks():
        pytest.skip(f"{backend} needs {ranks} GPUs, can have {nccl_ranks()} ranks")
    alone = [flag for before, flag in zip(("", *flags), flags, strict=False) if not {before, flag} & OF_LAYOUTS]
    same = ("--deterministic", "--dtype", dtype)
    rows, tensors = train(ranks, *same, "--backend", backend, *flags)
    expected, whole = train(1, *same, *(flag for flag in alone if flag != "--no-graph"))
    np.testing.assert_array_equal(rows, expected)
    assert tensors.keys() == whole.keys()
    others = [name for name in whole if tensors[name].tobytes() != whole[name].tobytes()]
    assert not others, f"{len(others)} of {len(whole)} tensors have other bits: {others[:5]}"


BITS = [  # ranks, flags, dtype
    *((2, flags, "bfloat16") for flags in DP + FIXED + FIXED_MORE + FIXED_ROWS + IN_PARTS),
    *((2, flags, "fp8") for flags in ("--dp 2 --zero 1", "--dp 2 --zero 1 --no-graph")),
]
BITS_ON_PEER = [
    *((2, flags, "float32") for flags in ("--dp 2", "--pp 2 --pp-schedule zero-bubble-v", f"--cp 2 {LONG}")),
    (2, "--tp 2 --deterministic-parts 4", "float32"),
    *((4, flags, "bfloat16") for flags in FIXED_FOUR),
]


@pytest.mark.parametrize(
    ("ranks", "flags", "dtype", "backend"),
    [*((*run, backend) for run in BITS for backend in ("peer", "nccl")), *((*run, "peer") for run in BITS_ON_PEER)],
)
def test_deterministic(train, ranks, flags, dtype, backend):
    same_bits(train, ranks, backend, *flags.split(), dtype=dtype)


def test_deterministic_is_the_same_up_to_rounding(train):
    """A sequence in pieces, compared with the same sequence that is not split."""
    flags = ("--dtype", "float32", *LONG.split())
    np.testing.assert_allclose(train(1, *flags, "--deterministic")[0], train(1, *flags)[0], rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flags", ["--compress int8", "--compress fp8 --zero 1", "--compress int4"])
def test_compressed_gradients(train, flags, dtype):
    """The bits, also of residuals, are the same without a graph and on every backend. Losses are near exact ones."""
    of_bfloat16 = ["--grad-dtype", "bfloat16", "--micro-batch-size", "4"] * (dtype == "bfloat16")
    how = ("--dtype", dtype, *flags.split(), *of_bfloat16)
    rows, tensors = train(2, *how, "--backend", "peer")
    exact = [flag for before, flag in zip(("", *how), how, strict=False) if "--compress" not in (before, flag)]
    near = 2 if "int4" in how else STEPS  # after two int4 updates, losses differ by up to 20%, also on CPUs
    np.testing.assert_allclose(rows[:near, 0], train(2, *exact, "--backend", "peer")[0][:near, 0], rtol=2e-2)
    assert sum(name.startswith("residual.") and tensor.any() for name, tensor in tensors.items()) > 20
    others = [("peer", "--no-graph"), ("nccl",), ("nccl", "--no-graph")]
    for backend, *graph in others if nccl_ranks() >= 2 else others[:1]:
        again, there = train(2, *how, "--backend", backend, *graph)
        np.testing.assert_array_equal(again, rows, err_msg=f"{backend} {graph}")
        assert there.keys() == tensors.keys()
        changed = [name for name in tensors if there[name].tobytes() != tensors[name].tobytes()]
        assert not changed, f"{backend} {graph}: {len(changed)} of {len(tensors)}: {changed[:5]}"


def test_compressed_gradients_go_on(train, tmp_path):
    """From a checkpoint in the middle: the bits of the unbroken run, whose first step was captured with a residual."""
    flags = ("--dtype", "float32", "--compress", "int8", "--backend", "peer")
    rows, tensors = train(2, *flags)
    command = [MPIRUN, "-n", "2", sys.executable, "-m", "kos.train", *FLAGS, *flags, "--out", str(tmp_path)]
    for more in (["--steps", str(STEPS // 2)], ["--resume", "auto"]):
        done = subprocess.run([*command, *more], env=OUTSIDE, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr[-2500:] + done.stdout[-500:]
    np.testing.assert_array_equal(_rows(tmp_path), rows)
    there = _tensors(tmp_path)
    assert there.keys() == tensors.keys() and all(there[x].tobytes() == tensors[x].tobytes() for x in tensors)


@pytest.mark.parametrize("flags", ["--tp 2 --pp 2", "--dp 2 --cp 2"])
def test_another_layout_goes_on(train, flags, tmp_path):
    """Half of a run in a layout, the other half on one rank: the curve of one rank."""
    first = [MPIRUN, "-n", "4", sys.executable, "-m", "kos.train", *FLAGS, "--dtype", "float32", "--backend", "peer"]
    half = ["--steps", str(STEPS // 2), "--out", str(tmp_path)]
    then = [sys.executable, "-m", "kos.train", *FLAGS, "--dtype", "float32", "--out", str(tmp_path), "--resume", "auto"]
    for command in ([*first, *flags.split(), *half], then):
        done = subprocess.run(command, env=OUTSIDE, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr[-2500:] + done.stdout[-500:]
    np.testing.assert_allclose(_rows(tmp_path), train(1, "--dtype", "float32")[0], rtol=2e-5)
