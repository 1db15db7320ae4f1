"""What ``benchmarks.all`` measures: the commands of each subject, and the seconds that each is expected to take."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple


class Piece(NamedTuple):
    """``command``: without ``--json``; ``preload``: a library that its processes load first."""

    command: str
    seconds: int
    preload: str = ""


Programme = dict[str, list[Piece]]
"""The pieces of each subject."""
ROOTED = "all_gather,reduce_scatter,all_to_all,broadcast,reduce,gather,scatter,send_recv"
COUNTS = "all_to_all_v,all_gather_v,gather_v,reduce_scatter_v,scatter_v,scan,exscan"
LAYERS = "--preset 8b --name 8b-4-layers --num-hidden-layers 4 --vocab-size 32000 --tie-word-embeddings --seq-len 4096"
MODELS = {  # flags, PyTorch's variants, steps
    "124m-4": ("--preset 124m --per-rank 4", "cudnn-master-graphs,flash-master-graphs", 40),
    "124m": ("--preset 124m --per-rank 32", "cudnn-master,flash-master", 12),
    "1b": ("--preset 1b --per-rank 2", "cudnn-master,flash-master", 10),
    "8b-4-layers": (f"{LAYERS} --per-rank 2", "cudnn-master,flash-master", 10),
}
LAYOUTS = ("--dp 2", "--tp 2", "--pp 2 --pp-schedule zero-bubble-v --micro-batch-size 1", "--cp 2")
ATTENTION = "attention attention_backward"
SEEN = "attention_documents attention_documents_backward attention_window attention_window_backward"


def hosts() -> Programme:
    sizes, peers = "--sizes 8,1K,4K,64K,1M,16M --arrays 1,100", "--backend mpi,mpi-native,mpi-again,mpi-c"
    bench = f"python -m kos.bench --device host {sizes} {peers} --no-plot"
    parts = ("all_reduce,reduce,broadcast,send_recv,barrier", "all_to_all,all_gather,gather,reduce_scatter,scatter",
             "all_to_all_v,all_gather_v,gather_v", "reduce_scatter_v,scatter_v,scan,exscan")  # fmt: skip
    calls = {
        f"host-calls-{ranks}": [
            Piece(f"taskset -c 0,1 mpirun -n {ranks} {bench} -n {each} --collective {ops}", seconds)
            for ops in parts
        ]
        for ranks, each, seconds in ((2, 1000, 120), (4, 100, 240))
    }
    between = "python -m benchmarks.between_hosts --sizes 8 64K 1M 16M --rate"
    return {**calls, "between-hosts": [Piece(f"{between} {rate}", 150) for rate in ("1gbit", "10gbit")]}


def collectives(gpus: int, backends: str, rows: str = "graph,eager") -> list[Piece]:
    bench = f"mpirun -n {gpus} python -m kos.bench --dtype bfloat16 --place out --no-plot --mode {rows} --iterations 20"
    return [
        Piece(f"{bench} --backend {backends} --collective {ops} --sizes {sizes}", seconds)
        for ops, sizes, seconds in (
            (ROOTED, "1K,8K,128K,1M,16M,256M,1G", 60), (COUNTS, "1K,8K,128K,1M,16M,256M", 40),
            ("routing", "1792K,112M", 20),
        )
    ]  # fmt: skip


def gpus_of_one(gpu: str) -> Programme:
    """Training, and kernels."""
    train = "python -m benchmarks.train --repeats 2 --device cuda --limit 100"
    torch = [
        Piece(f"{train} --compare torch --grad-dtype bfloat16 {flags} --torch {variants} --steps {steps}", 130)
        for flags, variants, steps in MODELS.values()
    ]
    torchao = "--torch fp8,flash-master-tensorwise,flash-master-rowwise" if find_spec("torchao") else ""
    eight = [
        Piece(f"{train} --compare fp8 --apart {MODELS[name][0]} --steps 10 {more}".rstrip(), seconds)
        for name, more, seconds in (("124m", "", 40), ("1b", "", 50), ("8b-4-layers", torchao, 150))
    ]
    kernels = "python -m benchmarks.kernels"
    one = "mpirun -n 1 python -m kos.bench --dtype bfloat16 --place out --no-plot --mode graph,eager --iterations 20"
    return {
        f"collectives-{gpu}-1": [Piece(f"{one} --backend auto,nccl,nccl-window --collective all --sizes "
                                       "8K,1M,16M,256M", 30)],
        f"train-{gpu}-1": torch,
        f"train-fp8-{gpu}-1": eight,
        f"kernels-{gpu}-1": [Piece(f"{kernels} --preset 1b --compile", 100)],
        f"kernels-124m-{gpu}-1": [Piece(f"{kernels} --preset 124m --tokens 32768 --compile", 60)],
        f"attention-{gpu}-1": [
            Piece(f"{kernels} --preset 8b --tokens 8192 --seq-len 8192 --only {ATTENTION} {SEEN}", 30),
            Piece(f"{kernels} --preset 1b --only {ATTENTION}", 20),
            Piece(f"{kernels} --preset 124m --tokens 32768 --only {ATTENTION}", 20),
        ],
        f"fp8-{gpu}-1": [Piece("python -m benchmarks.fp8 --preset 8b", 110)],
        f"optimizers-{gpu}-1": [Piece("python -m benchmarks.optimizers --preset 124m", 20)],
    }  # fmt: skip


def gpus_of_several(gpus: int, gpu: str, nccl: str | None) -> Programme:
    """Collectives of kos and its peers, torch.distributed over kos, training in each layout."""
    all_reduce = "--place both --iterations 40 --sizes 1K,8K,32K,128K,512K,1M,4M,16M,64M,256M,1G"
    # ``auto`` includes kernels of ``peer``: in a job with both, the launches of the two communicators do not overlap.
    apart = (("auto,kos-nccl,nccl,nccl-window,torch-nccl,torch-symm", 50), ("peer", 15))
    bench = f"mpirun -n {gpus} python -m kos.bench --dtype bfloat16 --no-plot"
    train = f"python -m benchmarks.train --repeats 2 --device cuda --limit 100 --ranks {gpus}"
    found = {
        f"collectives-{gpu}-{gpus}": [
            *(Piece(f"{bench} --algorithm auto,deterministic {all_reduce} --mode {mode} --backend {each}", seconds)
              for mode in ("graph", "eager", "single_shot") for each, seconds in apart),
            *collectives(gpus, "auto,nccl,nccl-window"),
        ],
        f"compressed-{gpu}-{gpus}": [
            Piece(f"mpirun -n {gpus} python -m benchmarks.compressed --sizes 1M 16M 64M", 40)
        ],
        f"torch-backend-{gpu}-{gpus}": [Piece(f"python -m benchmarks.torch_backend --ranks {gpus}", 150)],
        f"train-{gpu}-{gpus}": [
            Piece(f"{train} --compare torch --grad-dtype bfloat16 --zero 1 {MODELS[name][0]} --torch cudnn-master "
                  f"--steps {MODELS[name][2]}", 110)
            for name in ("124m", "1b", "8b-4-layers")
        ],
    }  # fmt: skip
    if gpus == 2:
        found[f"gpu-calls-{gpu}-2"] = [Piece("mpirun -n 2 python -m benchmarks.gpu_calls", 60)]
        found[f"layouts-{gpu}-2"] = [
            Piece(f"{train} --preset 1b --batch-size 16 --steps 6 {layout}", 60) for layout in LAYOUTS
        ]
        found[f"layouts-peers-{gpu}-2"] = [
            Piece(f"{train} --preset 8b --name 8b-8-layers --num-hidden-layers 8 --batch-size 4 --micro-batch-size 1 "
                  "--steps 5 --tp 2 --compare torch --torch cudnn-master,cudnn-master-async", 200),
            Piece(f"{train} --preset 1b --seq-len 65536 --batch-size 1 --micro-batch-size 1 --steps 4 --cp 2 "
                  "--apart --compare torch --torch cudnn-master,cudnn-master-alltoall", 200),
        ]  # fmt: skip
    if nccl:
        raw = "kos-nccl,nccl,nccl-window"
        first = Piece(f"{bench} {all_reduce} --backend {raw}", 80)
        found[f"other-nccl-{gpu}-{gpus}"] = [
            Piece(command, seconds, nccl) for command, seconds, _ in (first, *collectives(gpus, raw))
        ]
    return found


def programme(gpus: int, gpu: str, nccl: str | None = None) -> Programme:
    if not gpus:
        return hosts()
    return gpus_of_one(gpu) if gpus == 1 else gpus_of_several(gpus, gpu, nccl)
