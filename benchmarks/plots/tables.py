"""The tables by name, and where they stand in the pages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.plots import measured, tables_hosts, tables_slower
from benchmarks.plots import tables_collectives as collectives
from benchmarks.plots import tables_training as training
from benchmarks.plots.results import RESULTS, ROOT, gpus, load, newest, ratio, result_files, table, us
from kos.bench.report import size

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted((DOCS / "benchmarks").glob("*.md")), DOCS / "how-it-works" / "fp8.md"]
MARKED = re.compile(r"(?P<begin>^<!-- table (?P<name>\S+) -->\n)(?P<body>.*?)(?P<end>^<!-- end -->$)", re.M | re.S)


def link(name: str) -> str:
    """To a file of results; ``from_page`` makes it relative to its page."""
    return f"[{name}](benchmarks/results/{name})"


def provenance(*names: str | tuple[str, int]) -> str:
    """Files of results by hardware and software, with their dates; they hold the commit and the command too.

    A pair is a subject and a number of GPUs, and stands for the newest file.
    """
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name in (each if isinstance(each, str) else newest(*each) for each in names):
        result = load(name)
        versions = result["versions"]
        libraries = {"NCCL": "libnccl", "Open MPI": "openmpi", "PyTorch": "torch"}
        known = [f"{title} {versions[key]}" for title, key in libraries.items() if key in versions]
        hardware = result["hardware"]
        if isinstance(hardware, dict):
            hardware = f"{hardware['cores']} cores of {hardware['cpu']}"
        elif "NVIDIA" in hardware:
            hardware = gpus(name)
        group = groups.setdefault((hardware.replace("(R)", ""), ", ".join(known)), [])
        group.append((link(f"{name}.json"), result["date"][:10]))
    rows = [[", ".join(file for file, _ in files), *group, ", ".join(dict.fromkeys(date for _, date in files))]
            for group, files in groups.items()]  # fmt: skip
    return table(["files", "hardware", "software", "date"], rows)


def readme() -> str:
    """The figures of README."""
    rows = []
    host, mpi = (measured.on_host(2, name) for name in ("kos", "Open MPI"))
    for nbytes in (8, 1 << 20):
        rows.append([f"microseconds to sum {size(nbytes)} over 2 processes on {measured.cores(2)}", us(host[nbytes]),
                     f"{us(mpi[nbytes])} (Open MPI)", ratio(mpi[nbytes] / host[nbytes]),
                     link("host-calls-2.json")])  # fmt: skip
    for ranks, nbytes, kind in ((2, 1 << 10, "symmetric"), (2, 1 << 20, "any"), (8, 1 << 10, "symmetric")):
        ours = measured.on_gpus(ranks, f"kos, {kind} buffers")[nbytes]
        name = "NCCL" if kind == "any" else "NCCL, symmetric windows"
        theirs = measured.on_gpus(ranks, name)[nbytes]
        rows.append([f"microseconds to sum {size(nbytes)} over {measured.on(ranks)}", us(ours),
                     f"{us(theirs)} ({name})", ratio(theirs / ours),
                     link(f"{newest('collectives', ranks)}.json")])  # fmt: skip
    for ranks, label, parameters in ((1, "124m, 32 x 1,024", "124 million"), (8, "8b, 2 x 8,192", "8 billion")):
        file = newest("train", ranks)
        row = next(row for row in measured.trained(ranks) if row.label == label)
        how = "compiled" + ", FSDP2" * ("fsdp" in row.torch["variant"])
        rows.append([f"tokens per second, training {parameters} parameters on {gpus(file)}", training.tokens(row.kos),
                     f"{training.tokens(row.torch)} (PyTorch, {how})", ratio(row.ratio),
                     link(f"{file}.json")])  # fmt: skip
    row = next(row for row in load("cpu-epyc-zen5")["rows"] if (row["row"], row["kernels"]) == ("two-ranks", "all"))
    kos, torch = (f"{row[name]['tokens_per_second']:,.0f}" for name in ("kos", "torch"))
    rows.append(["tokens per second, `make train` on 2 EPYC cores", kos, f"{torch} (PyTorch, DDP)",
                 ratio(row["ratio_wall"][0]), link("cpu-epyc-zen5.json")])  # fmt: skip
    return table(["what is measured", "kos", "compared with", "times as fast", "file"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "all-reduce": collectives.all_reduce_gpus,
    "outside-graphs": collectives.outside_graphs,
    "auto": collectives.auto_routes,
    "all-reduce-files": partial(
        provenance, ("collectives", 2), ("collectives", 4), ("collectives", 8)
    ),
    "collectives-2": partial(collectives.every_operation, 2, "graph", collectives.GRAPH_SIZES),
    "collectives-eager": partial(collectives.every_operation, 2, "eager", collectives.EAGER_SIZES),
    "compressed": collectives.compressed,
    "gpu-calls": collectives.cpu_of_calls,
    "routing": collectives.routing,
    "collectives-files": partial(
        provenance, ("collectives", 1), ("collectives", 2), *filter(None, [measured.other_nccl(2)]),
        ("collectives", 4), ("compressed", 2),
    ),
    "slower-gpus": tables_slower.gpus,
    "slower-hosts": tables_slower.hosts,
    "hosts-ratios-2": partial(tables_hosts.every_operation, 2),
    "hosts-ratios-4": partial(tables_hosts.every_operation, 4, ("same array",)),
    "hosts-means": tables_hosts.means,
    "hosts-instructions": tables_hosts.instructions,
    "hosts-files": partial(provenance, "host-calls-2", "host-calls-4"),
    "training": training.training,
    "training-types": training.training_types,
    "optimizer-rates": training.optimizer_rates,
    "optimizer-losses": training.optimizer_losses,
    "fp8-losses": training.fp8_losses,
    "training-cpu": training.training_cpu,
    "training-files": partial(
        provenance, *(("train", ranks) for ranks in measured.TRAINED_ON), ("train-fp8", 1),
        "train-h200-8-float32-grads", "cpu-epyc-zen5", "train-tiny-epyc-2", "baby-h200",
        "optimizer-losses-h100-1", "power-h200-1",
    ),
    "profiles": training.profiles,
    "power": training.power,
    "baby": training.baby,
    "layouts": training.layouts,
    "layouts-of-four": training.layouts_of_four,
    "layouts-peers": training.layouts_peers,
    "layouts-files": partial(
        provenance, *result_files("layouts", 2), *result_files("layouts-peers", 2), "layouts-h200-4"
    ),
    "attention": training.attention,
    "kernels-files": partial(
        provenance, ("kernels", 1), ("kernels-124m", 1), measured.attention_file()
    ),
    "torch-backend": collectives.torch_backend,
    "torch-steps": collectives.torch_steps,
    "torch-files": partial(provenance, measured.torch_file()),
}  # fmt: skip


def renewed(text: str, page: Path) -> str:
    """The page with every marked table regenerated.  LookupError if a table is unknown."""

    def write(found: re.Match[str]) -> str:
        if found["name"] not in TABLES:
            raise LookupError(f"{page.name}: expected a table of {', '.join(TABLES)}, got {found['name']!r}")
        body = TABLES[found["name"]]().replace("](benchmarks/results/", f"]({to_results(page)}")
        return f"{found['begin']}\n{body}\n{found['end']}"

    return MARKED.sub(write, text)


def to_results(page: Path) -> str:
    """The folder of results as a link of this page names it."""
    return os.path.relpath(RESULTS, page.parent) + "/"
