"""The benchmark of transfers between GPUs, on emulated ones."""

import json

from benchmarks import transfer_gpu
from benchmarks.transfer_gpu import ZERO, Size, main, measure
from tests.train.host_kernels.ops import needs_compiler
from tests.transfer.gpu_process import EMULATED

COMMAND = [*transfer_gpu.COMMAND, *EMULATED]


@needs_compiler
def test_slices_of_zero_to_tensor_parallelism():
    found = measure(Size("tiny", 1, 1, 2, COMMAND), ZERO, 120, cases=(False,))
    assert found["bytes of a subscriber"] == 2 * (160 * 64 + 64 * (64 + 16 + 16 + 64 + 3 * 96) // 2 + 3 * 64)
    assert {*found["GB/s"]} == {"shared, unstaged", "limit of shared, unstaged"}


def test_a_part_that_is_late_does_not_cost_the_others(tmp_path):
    out = tmp_path / "found.json"
    words = ["--model", "tiny", "--gpus", "1", "--only", "o", "--seconds", "0.1", "--out", str(out)]
    assert main(words, COMMAND) == 1
    rows = json.loads(out.read_text())["rows"]
    assert [(row["part"], "its end" in row["error"]) for row in rows] == [("one GPU", True), ("over TCP", True)]
