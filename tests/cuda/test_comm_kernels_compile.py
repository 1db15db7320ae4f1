"""The kernels of kos.comm compile for every architecture, without a GPU; none uses multicast."""

from __future__ import annotations

import re

import pytest

from kos.comm.gpu.peer.engine import KERNELS
from kos.cuda import kernels
from kos.cuda.kernels import compile_kernels
from kos.errors import BackendUnavailable
from tests.host_compiler import KEPT

try:
    kernels.nvrtc_version()
except BackendUnavailable as error:
    pytestmark = pytest.mark.skip(reason=str(error))

PACKETS = [b"one_shot", b"two_shot", b"reduce_scatter", b"ring", b"tree"]
COMPRESSED = [b"encode", b"decode", b"add_encoded", b"feed_back"]
ONE_KERNEL = [b"all_reduce_compressed"]
ORDERED = [b"reduce_ordered", b"scan_ordered", b"scale"]
CASES = [
    ("barrier.cu", {}, [b"barrier"]),
    ("exchange.cu", {}, [b"exchange"]),
    ("all_gather.cu", {}, [b"all_gather", b"all_to_all"]),
    ("copy_box.cu", {"FROM": "float32", "TO": "bfloat16", "AXES": 2}, [b"copy_box"]),
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
    ("all_reduce_packets.cu", {"DTYPE": "uint8", "OP": "BXOR", "BROKEN": 1}, PACKETS),
    ("all_reduce_push.cu", {"DTYPE": "bfloat16", "OP": "SUM"}, [b"push", b"reduce_scatter"]),
    ("all_reduce_push.cu", {"DTYPE": "float64", "OP": "MAX", "STALL": 1000}, [b"push", b"reduce_scatter"]),
    ("all_reduce_specialized.cu", {"DTYPE": "bfloat16", "OP": "SUM"}, [b"specialized"]),
    ("all_reduce_specialized.cu", {"DTYPE": "int8", "OP": "MAX", "STALL": 1000}, [b"specialized"]),
    ("all_reduce_copies.cu", {"DTYPE": "bfloat16", "OP": "SUM", "THREADS": 512}, [b"copies"]),
    ("all_reduce_direct.cu", {"DTYPE": "bfloat16", "OP": "SUM"}, [b"direct"]),
    ("all_reduce_direct.cu", {"DTYPE": "int64", "OP": "MIN", "UNROLL": 2}, [b"direct"]),
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
    ("reduce_ordered.cu", {"DTYPE": "uint8", "RESULT": "uint8", "OP": "BOR"}, ORDERED),
]


FIRST = [case for i, case in enumerate(CASES) if case[0] not in {file for file, *_ in CASES[:i]}]  # one of each file
ASKED = [("sm_90a", 8, *case) for case in CASES] + [("sm_90a", 2, *case) for case in FIRST]
ASKED += [(arch, 8, *case) for arch in ("sm_80", "sm_100") for case in FIRST if case[0] != "quantize_blocks.cu"]
ASKED += [(arch, 8, "quantize_blocks.cu", {}, [b"quantize_blocks"]) for arch in ("sm_89", "sm_100")]  # sm_80 has no fp8


@pytest.mark.parametrize(("arch", "ranks", "file", "macros", "names"), ASKED)
def test_compiles(arch: str, ranks: int, file: str, macros: dict, names: list[bytes]) -> None:
    cubin = compile_kernels(KERNELS / file, arch, {**macros, "RANKS": ranks}, KEPT)
    assert cubin[:4] == b"\x7fELF"
    assert all(b".text." + name in cubin for name in names)


def test_no_multicast() -> None:
    texts = [path.read_text() for path in KERNELS.glob("*.cu*")]
    assert texts and not any(word in text for text in texts for word in ("multimem", "Multicast", "multicast"))


def test_layout_is_the_hosts() -> None:
    """The offsets that the package peer computes are those of the headers."""
    from kos.comm.gpu.peer import compressed, exchange
    from kos.comm.gpu.peer import engine as peer
    from kos.comm.gpu.peer import record as words

    text = (KERNELS / "channel.cuh").read_text() + (KERNELS / "packets.cuh").read_text()
    assert f"#define CHANNELS {peer.CHANNELS}\n" in text
    assert f"#define LINE_BYTES {peer._LINE_BYTES}\n" in text
    assert f"#define CAPACITY {peer._CAPACITY} " in text
    pieces = (KERNELS / "pieces.cuh").read_text()
    assert f"#define BOX_PACKETS {exchange.BOX_PACKETS}\n" in pieces
    (number,) = re.findall(r"#define NUMBER (\d+)\n", pieces)  # the tag's other bits: a kind, and bytes
    assert 1 << 63 - int(number) > peer.CHANNELS * exchange.BOX_PACKETS * exchange.PACKET_BYTES
    fused = (KERNELS / "all_reduce_compressed.cu").read_text()
    assert f"constexpr int SLOTS = {compressed._SLOTS}, " in fused
    record = text[text.index("struct Record {") :].split("}")[0]
    names = re.findall(r"\b\w+(?=[,;])", record)
    assert [getattr(words, name.upper().removesuffix("_NS")) for name in names] == [*range(words.WAITS + 1)]
