"""Every kernel compiles for every architecture, without a GPU, in all the ways it is asked for."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kos.comm.gpu.peer.engine import KERNELS as OF_COMM
from kos.cuda import kernels
from kos.cuda.kernels import compile_kernels
from kos.errors import BackendUnavailable, CompileError
from kos.train import ops
from kos.train.config import OPTIMIZERS
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.device import dry_run
from kos.train.device.costs import GPUS
from kos.train.ops import Normalize
from kos.train.ops.cuda import attention
from kos.train.ops.cuda.attention import KERNELS as ATTENTION
from kos.train.ops.cuda.attention import macros
from kos.train.parallel import schedules
from kos.train.parallel.mesh import Layout, Mesh
from tests.host_compiler import KEPT

try:
    kernels.nvrtc_version()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

KERNELS = Path(ops.__file__).parent / "cuda" / "kernels"
ARCHITECTURES = ["sm_80", "sm_90a", "sm_100"]
BF16 = {"DTYPE": "bfloat16", "WIDTH": 8}
FP32 = {"DTYPE": "float32", "WIDTH": 4}
MATRICES = {"DTYPE": "bfloat16"}
MUON = [b"muon_momentum", b"arrange", b"frobenius", b"normalize", b"muon_update"]
ODD = {"DTYPE": "bfloat16", "WIDTH": 1}
SUMS = {"GRADIENT": "float32", "ACCUMULATE": 1}
CACHE = [b"append", b"attend", b"merge"]
EMBEDDING = [b"embedding", b"count_from", b"digit_counts", b"scan", b"scatter", b"sum_runs", b"join_runs"]
ENTROPY = [b"cross_entropy", b"count_targets", b"mean_loss"]
OF_PARTS = [b"logit_statistics", b"cross_entropy_of_parts"]
OPTIMIZER = [b"squares", b"largest", b"reproducible_squares", b"finish_norm", b"check_in_step", b"prepare"]
OPTIMIZED = [
    {"MASTER": "float32", "GRADIENT": "float32", "WEIGHT": "bfloat16", "COPY": 1},
    {"MASTER": "float32", "GRADIENT": "bfloat16", "WEIGHT": "bfloat16", "COPY": 1},
    {"MASTER": "bfloat16", "GRADIENT": "bfloat16", "WEIGHT": "float32", "COPY": 0},
]
RULES = sorted({TrainConfig.from_preset(optimizer=name).update_rule().kernel for name in OPTIMIZERS})


def of_norms() -> Iterator[tuple[str, dict[str, Any], list[bytes]]]:
    """The kernels of norms with the macros that their operations ask for."""
    launches = defaultdict[Any, dict[bytes, None]](dict)

    class Recorded(dry_run.DryCudaOps):
        def launch(self, file: str, name: str, *arguments: Any, **defines: Any) -> None:
            launches[file, tuple(defines.items())][name.encode()] = None

    ops = Recorded(GPUS["H200"])
    arena = ops.make_arena()
    for dtype, columns, centered in (
        ("bfloat16", 4096, False), ("bfloat16", 37, False), ("float32", 8192, False), ("bfloat16", 768, True),
    ):  # fmt: skip
        x, vector, statistics = (ops.zeros(shape, dtype) for shape in ((512, columns), (columns,), (2, 512)))
        bias = vector if centered else None
        norm = Normalize(vector, 1e-5, bias)
        ops.normalize(x, norm, x, statistics)
        ops.normalize_backward(x, x, norm, statistics, x, vector, False, arena, bias)
    for dtype, size, row, columns in (
        ("bfloat16", 128, 4096, 3072), ("bfloat16", 80, 960, 720), ("float32", 10, 120, 80),
        ("bfloat16", 5120, 15_360, 10_240),
    ):  # fmt: skip
        x, raw, vector = (ops.zeros(shape, dtype) for shape in ((512, row), (512, columns), (size,)))
        norm = Normalize(vector, 1e-5)
        ops.head_norm(x, norm, slice(0, 1), raw)
        ops.head_norm_backward(raw, norm, slice(0, 1), x, vector, False, arena)
    for (file, defines), names in launches.items():
        if file != "sums.cu":
            yield file, dict(defines), [*names]


ELEMENTWISE = [b"add", b"add_tree", b"cast", b"swiglu"]
CASES = [
    ("elementwise.cu", {**BF16, "COLUMNS": 2048, "SOURCE": "float32", "TERMS": 8}, ELEMENTWISE),
    (
        "elementwise.cu",
        {**FP32, "COLUMNS": 2048, "SOURCE": "bfloat16", "TERMS": 1},
        [b"swiglu_backward", b"gelu", b"gelu_backward"],
    ),
    ("elementwise.cu", {**ODD, "COLUMNS": 29, "SOURCE": "float32", "TERMS": 2}, [b"swiglu_backward"]),
    (
        "elementwise.cu",
        {**BF16, "COLUMNS": 1024, "SOURCE": "float32", "TERMS": 1},
        [b"last_columns", b"add_to_last_columns"],
    ),
    *of_norms(),
    *(("linear_few.cu", {**each, "ROWS": rows}, [b"linear_few"]) for each in (BF16, FP32, ODD) for rows in (1, 16)),
    ("cache.cu", {**BF16, "HEAD_DIM": 64, "ROW": 3072, "SCALE": "0.125f", "CHUNK": 128}, CACHE),
    ("sums.cu", {**BF16, **SUMS, "COLUMNS": 1024 * 768}, [b"sum_rows", b"sum_partials"]),
    ("sums.cu", {**ODD, "GRADIENT": "bfloat16", "ACCUMULATE": 0, "COLUMNS": 37}, [b"sum_rows", b"sum_partials"]),
    ("rope.cu", {**BF16, "HALF": 64, "HEADS": 40, "ROW": 6144, "SIGN": -1}, [b"rope"]),
    ("rope.cu", {**FP32, "HALF": 32, "HEADS": 12, "ROW": 2304, "SIGN": 1}, [b"rope"]),
    ("cross_entropy.cu", {**BF16, "BACKWARD": 1, "VOCABULARY": 128_256, "THREADS": 1024, "SLOTS": 14}, ENTROPY),
    ("cross_entropy.cu", {**FP32, "BACKWARD": 0, "VOCABULARY": 32_000, "THREADS": 512, "SLOTS": 0}, ENTROPY),
    ("cross_entropy.cu", {**ODD, "BACKWARD": 1, "VOCABULARY": 50_257, "THREADS": 1024, "SLOTS": 0}, ENTROPY),
    ("cross_entropy.cu", {**BF16, "BACKWARD": 1, "VOCABULARY": 32_064, "THREADS": 512, "SLOTS": 0}, OF_PARTS),
    ("cross_entropy.cu", {**FP32, "BACKWARD": 0, "VOCABULARY": 8000, "THREADS": 512, "SLOTS": 0}, OF_PARTS),
    ("cross_entropy.cu", {**ODD, "BACKWARD": 1, "VOCABULARY": 12_565, "THREADS": 512, "SLOTS": 0}, OF_PARTS),
    ("embedding.cu", {**BF16, **SUMS, "COLUMNS": 768}, EMBEDDING),
    ("embedding.cu", {**ODD, "COLUMNS": 37, "GRADIENT": "bfloat16", "ACCUMULATE": 0}, EMBEDDING),
    *(("optimizer.cu", macros, OPTIMIZER) for macros in OPTIMIZED),
    *((f"{rule}.cu", macros, [rule.encode()]) for rule in RULES for macros in OPTIMIZED),
    ("muon.cu", {**MATRICES, "MASTER": "float32", "GRADIENT": "float32", "WEIGHT": "bfloat16", "COPY": 1}, MUON),
    ("muon.cu", {**MATRICES, "MASTER": "bfloat16", "GRADIENT": "bfloat16", "WEIGHT": "float32", "COPY": 0}, MUON),
    ("muon.cu", {"DTYPE": "float32", "MASTER": "float32", "GRADIENT": "float32", "WEIGHT": "float32", "COPY": 0}, MUON),
]
EIGHT_BITS = [
    {"SOURCE": source, "E5M2": int(source == 2), "ROWS": rows, "COLUMNS": columns, "STAGE": stage}
    for stage, sources, copies in (
        (0, range(4), ((1, 1), (1, 2), (2, 2), (1, 0), (0, 1), (0, 2), (3, 3), (3, 0))),
        (1, [0], ((0, 0), (1, 0), (3, 0))), (2, [0], ((2, 2), (3, 3))),
    ) for source in sources for rows, columns in copies
]  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "gradients", "layout", "dtype"),
    [
        ("1b", "float32", Layout(), "bfloat16"),
        ("gpt2-124m", "bfloat16", Layout(), "bfloat16"),
        ("1b", "bfloat16", Layout(cp=2, tp=4), "bfloat16"),
        ("1b", "float32", Layout(tp=2), "fp8"),
    ],
    ids=str,
)
def test_what_a_step_launches_compiles(preset, gradients, layout, dtype, monkeypatch):
    """Every kernel of a pass, with its own macros, and within what a launch may ask for."""
    launches = {}

    def launch(self, file, name, grid, block, *arguments, shared=0, **defines):
        launches.setdefault((file, tuple(defines.items())), set()).add(name.encode())
        x, y = grid if isinstance(grid, tuple) else (grid, 1)
        assert 0 < x < 1 << 31 and 0 < y < 1 << 16 and 0 < block <= 1024 and shared <= 227 << 10, name

    monkeypatch.setattr(dry_run.DryCudaOps, "launch", launch)
    asked = ["--preset", preset, "--grad-dtype", gradients, "--tp", str(layout.tp), "--cp", str(layout.cp)]
    asked += ["--dtype", dtype]
    config = parse(asked).for_world(layout.ranks, "cuda")
    assert config.grad_dtype == gradients
    model, schedule = config.model_config_for(256), schedules.build("1f1b", 1, 2)
    dry_run.plan_memory(config, model, GPUS["H200"], Mesh.dry(layout), schedule, free=1 << 40)
    assert len(launches) > 9
    assert any("CAUSAL" in dict(defines) for _, defines in launches) == (layout.cp > 1)
    for (file, defines), names in launches.items():
        cubin = compile_kernels(KERNELS / file, "sm_90a", dict(defines), KEPT)
        assert all(name in cubin for name in names), (file, names)


FORWARD, BACKWARD = [b"attention_forward"], [b"attention_backward_q", b"attention_backward_kv"]
ONE_PASS = [b"attention_backward", b"attention_finish"]
PORTABLE = [
    ("mma", "bfloat16", 128, FORWARD + BACKWARD),
    ("mma", "float16", 64, FORWARD + BACKWARD),
    ("mma", "bfloat16", 80, FORWARD + BACKWARD),
    ("mma", "bfloat16", 256, FORWARD + BACKWARD),
    ("simple", "float32", 48, FORWARD + BACKWARD),
    ("simple", "bfloat16", 256, FORWARD + BACKWARD),
    ("statistics", "bfloat16", 64, [b"attention_statistics", b"attention_bounds"]),
    ("statistics", "bfloat16", 80, [b"attention_statistics", b"attention_bounds"]),
    ("mask", "bfloat16", 64, [b"attention_mask"]),
]


@pytest.mark.parametrize(
    ("dtype", "stages", "masked"),
    [("bfloat16", 2, False), ("bfloat16", 3, False), ("float16", 2, False), ("bfloat16", 2, True)],
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("file", "names"), [("forward_hopper", FORWARD), ("backward_hopper", ONE_PASS)])
def test_compiles_for_hopper(file, head_dim, names, dtype, stages, causal, masked):
    tiles = attention.FORWARD if file == "forward_hopper" else attention.BACKWARD
    defines = {**macros(dtype, head_dim, causal, masked), **tiles, "STAGES": stages}
    cubin = compile_kernels(ATTENTION / f"attention_{file}.cu", "sm_90a", defines, KEPT)
    assert all(b".text." + name in cubin for name in names)
    with pytest.raises(CompileError):  # these instructions are Hopper's alone
        compile_kernels(ATTENTION / f"attention_{file}.cu", "sm_80", defines, KEPT)


def tiles_of(file: str, head_dim: int) -> dict[str, int]:
    """The macros that set the tile sizes of this file, for heads of this size."""
    return attention.mma_tiles(head_dim, 227 << 10)[0] if file == "mma" else {}


PACKETS = [b"one_shot", b"two_shot", b"reduce_scatter", b"ring", b"tree"]
COMPRESSED = [b"encode", b"decode", b"add_encoded", b"feed_back"]
ONE_KERNEL = [b"all_reduce_compressed"]
ORDERED = [b"reduce_ordered", b"scan_ordered", b"scale"]
COMM_CASES = [
    ("barrier.cu", {}, [b"barrier"]),
    ("exchange.cu", {}, [b"exchange"]),
    ("all_gather.cu", {}, [b"all_gather", b"all_to_all"]),
    ("copy_box.cu", {"FROM": "float32", "TO": "bfloat16", "AXES": 2}, [b"copy_box"]),
    ("copy_runs.cu", {}, [b"copy_runs"]),
    ("copy_box.cu", {"FROM": "bytes16", "TO": "bytes16", "AXES": 4}, [b"copy_box"]),
    ("quantize_blocks.cu", {}, [b"quantize_blocks"]),
    ("exchange.cu", {"WHOLE": 1}, [b"exchange"]),
    ("exchange.cu", {"SEVERAL": 1}, [b"exchange"]),
    ("exchange.cu", {"LARGE": 1}, [b"exchange"]),
    ("exchange.cu", {"LARGE": 1, "STALL": 1000, "BROKEN": 1}, [b"exchange"]),
    ("all_reduce_packets.cu", {"DTYPE": "bfloat16", "OP": "SUM"}, PACKETS),
    ("all_reduce_packets.cu", {"DTYPE": "bfloat16", "OP": "AVG", "STALL": 1000}, PACKETS),
    ("all_reduce_packets.cu", {"DTYPE": "float16", "OP": "PREMUL_SUM", "PARTIALS": 1}, PACKETS),
    ("all_reduce_packets.cu", {"DTYPE": "float64", "OP": "PROD"}, PACKETS),
    ("all_reduce_packets.cu", {"DTYPE": "bool", "OP": "BXOR", "BROKEN": 1}, PACKETS),
    ("all_reduce_push.cu", {"DTYPE": "bfloat16", "OP": "SUM"}, [b"push", b"reduce_scatter"]),
    ("all_reduce_push.cu", {"DTYPE": "float64", "OP": "MAX", "STALL": 1000}, [b"push", b"reduce_scatter"]),
    ("all_reduce_specialized.cu", {"DTYPE": "bfloat16", "OP": "SUM"}, [b"specialized"]),
    ("all_reduce_specialized.cu", {"DTYPE": "int8", "OP": "MAX", "STALL": 1000}, [b"specialized"]),
    ("all_reduce_copies.cu", {"DTYPE": "bfloat16", "OP": "SUM", "THREADS": 512}, [b"copies"]),
    ("all_reduce_direct.cu", {"DTYPE": "bfloat16", "OP": "SUM"}, [b"direct"]),
    ("all_reduce_direct.cu", {"DTYPE": "int64", "OP": "MIN", "UNROLL": 2}, [b"direct"]),
    ("all_reduce_direct.cu", {"DTYPE": "bool", "OP": "MIN"}, [b"direct"]),
    ("compressed.cu", {"DTYPE": "bfloat16", "OP": "SUM", "INT8": 1}, COMPRESSED),
    ("compressed.cu", {"DTYPE": "float32", "OP": "AVG", "FP8": 1}, COMPRESSED),
    ("compressed.cu", {"DTYPE": "float16", "OP": "SUM", "INT4": 1}, COMPRESSED),
    ("all_reduce_compressed.cu", {"DTYPE": "bfloat16", "OP": "SUM", "INT8": 1}, ONE_KERNEL),
    ("all_reduce_compressed.cu", {"DTYPE": "float32", "OP": "AVG", "FP8": 1, "STALL": 1000}, ONE_KERNEL),
    ("all_reduce_compressed.cu", {"DTYPE": "float16", "OP": "SUM", "INT4": 1, "BROKEN": 1}, ONE_KERNEL),
    ("reduce_ordered.cu", {"DTYPE": "bfloat16", "RESULT": "bfloat16", "OP": "SUM"}, ORDERED),
    ("reduce_ordered.cu", {"DTYPE": "float32", "RESULT": "float16", "OP": "AVG"}, ORDERED),
    ("reduce_ordered.cu", {"DTYPE": "float16", "RESULT": "float32", "OP": "SUM"}, ORDERED),
    ("reduce_ordered.cu", {"DTYPE": "int16", "RESULT": "int16", "OP": "PROD"}, ORDERED),
    ("reduce_ordered.cu", {"DTYPE": "bool", "RESULT": "bool", "OP": "BOR"}, ORDERED),
]


FIRST = [*{case[0]: case for case in reversed(COMM_CASES)}.values()]  # one of each file
ASKED = [("sm_90a", 8, *case) for case in COMM_CASES] + [("sm_90a", 2, *case) for case in FIRST]
ASKED += [(arch, 8, *case) for arch in ("sm_80", "sm_100") for case in FIRST if case[0] != "quantize_blocks.cu"]
ASKED += [(arch, 8, "quantize_blocks.cu", {}, [b"quantize_blocks"]) for arch in ("sm_89", "sm_100")]  # sm_80 has no fp8
IN_8_BITS = [b"largest", b"quantize"]
IN_PARTS = [
    {"PARTS": parts, "APART": apart, "STAGES": stages, "B_ROWS": parts % 3 % 2, "OUT": out}
    for parts, apart, stages, out in ((1, 8, 7, "float32"), (2, 1, 6, "bfloat16"), (8, 1, 4, "bfloat16"))
]
EVERY = [
    *((OF_COMM / file, arch, {**macros, "RANKS": ranks}, names) for arch, ranks, file, macros, names in ASKED),
    *((KERNELS / file, arch, macros, names) for arch in ARCHITECTURES for file, macros, names in CASES),
    *((KERNELS / "linear_parts_hopper.cu", "sm_90a", macros, [b"linear_parts"]) for macros in IN_PARTS),
    *((KERNELS / "fp8.cu", arch, macros, IN_8_BITS) for arch in ("sm_89", "sm_90a", "sm_100") for macros in EIGHT_BITS),
    *((ATTENTION / f"attention_{file}.cu", arch, macros(dtype, d, causal, masked) | tiles_of(file, d), names)
      for arch in ARCHITECTURES for file, dtype, d, names in PORTABLE
      for causal in (True, False) for masked in (True, False)),
]  # fmt: skip


@pytest.mark.parametrize(("path", "arch", "macros", "names"), EVERY, ids=lambda x: getattr(x, "name", None))
def test_compiles(path, arch, macros, names):
    cubin = compile_kernels(path, arch, macros, KEPT)
    assert cubin[:4] == b"\x7fELF"
    assert all(b".text." + name + b"\0" in cubin for name in names)


def test_no_multicast():
    texts = [path.read_text() for path in OF_COMM.glob("*.cu*")]
    assert texts and not any(word in text for text in texts for word in ("multimem", "Multicast", "multicast"))


def test_layout_is_the_hosts():
    """The offsets that the package peer computes are those of the headers."""
    from kos.comm.gpu.peer import bind, exchange
    from kos.comm.gpu.peer import engine as peer
    from kos.comm.gpu.peer import record as words

    text = (OF_COMM / "channel.cuh").read_text() + (OF_COMM / "packets.cuh").read_text()
    assert f"#define CHANNELS {peer.CHANNELS}\n" in text
    assert f"#define LINE_BYTES {peer._LINE_BYTES}\n" in text
    assert f"#define CAPACITY {peer._CAPACITY} " in text
    pieces = (OF_COMM / "pieces.cuh").read_text()
    assert f"#define BOX_PACKETS {exchange.BOX_PACKETS}\n" in pieces
    (number,) = re.findall(r"#define NUMBER (\d+)\n", pieces)  # the tag's other bits: a kind, and bytes
    assert 1 << 63 - int(number) > peer.CHANNELS * exchange.BOX_PACKETS * exchange.PACKET_BYTES
    fused = (OF_COMM / "all_reduce_compressed.cu").read_text()
    assert f"constexpr int SLOTS = {bind._SLOTS}, " in fused
    record = text[text.index("struct Record {") :].split("}")[0]
    names = re.findall(r"\b\w+(?=[,;])", record)
    assert [getattr(words, name.upper().removesuffix("_NS")) for name in names] == [*range(words.WAITS + 1)]
