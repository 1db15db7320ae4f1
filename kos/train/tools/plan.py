"""``--plan --ranks N``: the layouts that N ranks can train in, with memory, bytes sent and predicted step time.

Nothing here knows a model or a parallelism. Memory is that of the device's own plan. Time and bytes are those of a step
of each pipeline rank in which nothing is computed (``kos.train.device.dry_run``). A pipeline takes the time of its
schedule with each stage's passes, and what a rank does besides: ZeRO-1's gathers and the sums of gradients as far as
nothing hides them, norm and update. Of many micro-batches a few run, and one in the middle stands for the others.

``--hosts N --network GBIT``: ranks are on N hosts, as many on each, and what leaves a host takes its time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kos.commands import mpirun, python
from kos.errors import ConfigError, plural
from kos.reporting import Parser, aligned
from kos.train.config import flag_of, weighted
from kos.train.config.flags import add_plan, parse, read_command_line
from kos.train.config.options import CUDA_MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS, TrainConfig
from kos.train.data.corpus import read_corpus
from kos.train.data.loading import lines_of
from kos.train.data.tokenizers import ByteTokenizer
from kos.train.device.choose import layout_of
from kos.train.device.costs import GPUS, ONE_HOST, Network, Rates, cpu_rates, gpu_here, gpu_rates
from kos.train.device.dry_run import AXES, GIB, DryRun, Job, MemoryPlan, slow_attention
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import check_blocks, check_fp8, check_groups
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.parallel.schedules import SCHEDULES, build, simulate


class Prediction(NamedTuple):
    """A step of a job: of the rank that takes most of each, the memory and the bytes sent by axis; seconds.

    ``sent["hosts"]``: bytes that leave a host.
    """

    job: Job
    memory: MemoryPlan
    sent: dict[str, float]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.job.config.batch_size * self.job.config.seq_len / self.seconds


def predict(job: Job, memory: MemoryPlan) -> Prediction:
    """From a dry step of every rank of the pipeline."""
    pp, whole = job.layout.pp, job.schedule
    few = min(whole.micro_batches, 3)
    job_of_few = job._replace(schedule=build(whole.name, pp, few))
    typical = max(0, min(1, few - 2))  # neither the first micro-batch, which adds to nothing, nor the last
    dry: dict[Any, DryRun] = {}
    costs = {kind: [0.0] * whole.stages for kind in "FIW"}
    keys = [*AXES, *["hosts"] * (job.network.hosts > 1)]
    besides, message, sent = 0.0, 0.0, dict.fromkeys(keys, 0.0)
    for rank in range(pp):
        kind = job.kind(rank)
        step = dry[kind] = dry.get(kind) or DryRun.timed(job_of_few, rank)
        clock = step.clock
        assert clock is not None
        each = {action: spent for action, spent in step.actions.items() if action.micro_batch == typical}
        for action, spent in each.items():
            costs["I" if action.kind == "B" else action.kind][whole.stage(rank, action.chunk)] += spent["seconds"]
        total = {key: sum(spent.get(key, 0.0) for spent in each.values()) for key in (*keys, "seconds")}
        besides = max(besides, clock.spent["seconds"] - few * total["seconds"])
        message = max(message, clock.message)
        more = whole.micro_batches - few
        sent = {axis: max(most, clock.spent[axis] + more * total[axis]) for axis, most in sent.items()}
    seconds, crossing = simulate(whole, costs, message).makespan + besides, sent.get("hosts", 0.0)
    return Prediction(job, memory, sent, max(seconds, crossing / job.network.rate) if crossing else seconds)


def make_job(
    config: TrainConfig, model: LlamaConfig, layout: Layout, rates: Rates, network: Network = ONE_HOST,
    **settings: Any,
) -> Job:  # fmt: skip
    """The job with these settings.  ConfigError if a run would refuse it, or hosts are not alike."""
    config = config.model_copy(update={"pp": layout.pp, **settings}).for_world(layout.dp, config.device)
    assert config.micro_batch_size is not None
    for axes in (("dp", "cp"), ("tp",), ("cp",), ("pp",)):
        network.local(layout, *axes)
    steps = config.batch_size // (config.micro_batch_size * layout.dp)
    schedule = build(config.pp_schedule, layout.pp, steps)
    job = Job(config, model, layout, schedule, rates, network)
    for rank in range(layout.pp):
        check_fp8(config, model, Mesh.dry(layout, layout.rank({"pp": rank})), job.parts(rank))
    check_blocks(config, model, layout)
    check_groups(config, model)
    return job


def best(
    config: TrainConfig, given: set[str], model: LlamaConfig, layout: Layout, rates: Rates, network: Network
) -> Prediction:
    """The fastest job of a layout that fits; if none does, the one that takes least memory. ConfigError: none is legal.

    What was ``given`` stays. What is recomputed only costs time, so that the first of these that fits is the fastest.
    """
    each = max(1, config.batch_size // layout.dp)
    most = MICRO_BATCH_TOKENS if config.device == "cpu" else CUDA_MICRO_BATCH_TOKENS
    sizes = [n for n in range(1, each + 1) if each % n == 0 and n * config.seq_len <= max(most, config.seq_len)]
    options: dict[str, list[Any]] = {
        "micro_batch_size": sizes,
        "pp_schedule": [*SCHEDULES] if layout.pp > 1 else ["1f1b"],
        "zero": [int(layout.dp * layout.cp > 1 and not (config.optimizer == "muon" and config.compress != "none"))],
        "recompute": ["none", "norms", "block"],
    }
    options |= {name: [getattr(config, name)] for name in options if name in given}
    recompute, reasons = options.pop("recompute"), list[ConfigError]()
    fitting, over = list[Prediction](), list[tuple[MemoryPlan, Job]]()

    def take(**settings: Any) -> None:
        for how in recompute:
            job = make_job(config, model, layout, rates, network, recompute=how, **settings)
            by_slots = sorted(range(layout.pp), key=job.schedule.slots.__getitem__)
            most_of_kind = {job.kind(rank): rank for rank in by_slots}.values()
            memory = max(map(job.memory, most_of_kind), key=lambda plan: plan.total - plan.free)
            if memory.fits:
                return fitting.append(predict(job, memory))
            over.append((memory, job))

    for chosen in itertools.product(*options.values()):
        try:
            take(**dict(zip(options, chosen, strict=True)))
        except ConfigError as error:
            reasons.append(error)
    if not fitting and not over:
        raise reasons[0]
    if not fitting:
        memory, job = min(over, key=lambda each: each[0].total)
        return predict(job, memory)
    fastest = min(fitting, key=lambda each: each.seconds)
    if fastest.job.config.zero and "zero" not in given:
        take(**{**{name: getattr(fastest.job.config, name) for name in options}, "zero": 0})
    return min(fitting, key=lambda each: each.seconds)


def layouts(ranks: int) -> Iterator[dict[str, int]]:
    """Every dp, tp, pp and cp whose product is ``ranks``."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for tp, pp, cp in itertools.product(divisors, repeat=3):
        if ranks % (tp * pp * cp) == 0:
            yield {"dp": ranks // (tp * pp * cp), "tp": tp, "pp": pp, "cp": cp}


def plan(
    config: TrainConfig, given: set[str], ranks: int, rates: Rates, model: LlamaConfig, network: Network = ONE_HOST
) -> tuple[list[Prediction], list[tuple[dict[str, int], str]]]:
    """The legal layouts, the fastest that fits first, and the others with the reason."""
    legal, refused = [], []
    asked = [sizes for sizes in layouts(ranks) if all(sizes[key] == getattr(config, key) for key in given & {*sizes})]
    for sizes in asked or [{}]:  # the error of {} gives the reason why there is none
        try:
            layout = layout_of(config.model_copy(update=sizes), ranks)
            legal.append(best(config, given, model, layout, rates, network))
        except ConfigError as error:
            refused.append((sizes, str(error)))
    return sorted(legal, key=lambda each: (not each.memory.fits, each.seconds)), refused


def between_hosts(job: Job) -> str:
    """How the gradients of a job can be summed between hosts, with what each way sends and the time of a step."""
    if job.network.local(job.layout, "dp", "cp") == job.layout.dp * job.layout.cp:
        return "no gradients leave a host"
    form = job.config.compress if job.config.compress != "none" else "int8"
    ring, phases = "exact, a ring of all ranks", "exact, in phases"
    ways = {ring: "none", phases: "none", f"--compress {form}": form}
    rows = [["gradients between hosts", "GB out of a host", "ms", "tokens/s"]]
    for name, compress in ways.items():
        network = job.network._replace(phases=name != ring)
        try:
            other = make_job(job.config, job.model, job.layout, job.rates, network, compress=compress)
            found = predict(other, other.memory(0))
            out = found.sent["hosts"]
            cells = [f"{out / 1e9:.3g}", f"{1e3 * found.seconds:.4g}", f"{found.tokens_per_second:,.0f}"]
        except ConfigError as error:
            cells = [f"refused: {error}"]
        rows.append([name, *cells])
    widths = [max(len(row[column]) for row in rows if len(row) == len(rows[0])) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def table(predictions: Sequence[Prediction]) -> str:
    axes = [*predictions[0].sent]
    rows = [["dp", "tp", "pp", "cp", "zero", "recompute", "micro-batch", "schedule", "GiB", *axes, "ms", "tokens/s"]]
    for each in predictions:
        config, layout = each.job.config, each.job.layout
        settings = [getattr(layout, axis) for axis in ("dp", "tp", "pp", "cp")]
        settings += [config.zero, config.recompute, config.micro_batch_size]
        settings += [config.pp_schedule if layout.pp > 1 else "-"]
        settings += [f"{each.memory.total / GIB:.2f}{'!' * (not each.memory.fits)}"]
        settings += [f"{each.sent[axis] / 1e9:.3g}" if each.sent[axis] else "-" for axis in axes]
        rows.append([*map(str, settings), f"{1e3 * each.seconds:.4g}", f"{each.tokens_per_second:,.0f}"])
    return "\n".join(aligned(rows))


def parse_plan(
    argv: Sequence[str],
) -> tuple[TrainConfig, set[str], list[str], int, str | None, Network]:
    """As ``parse``, for a command line with ``--plan``.

    Returns the config, the names of the settings that were given, the words of the command line for the trainer, the
    number of ranks, the GPU and the hosts.  A setting of a file counts as given if it differs from its default, since
    the config.json of a run has every setting.
    """
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    add_plan(parser)
    arguments, words = parser.parse_known_args(argv)
    config, ranks = parse(words), getattr(arguments, "ranks", None)
    defaults = {key: field.default for key, field in TrainConfig.model_fields.items()}
    given = {key for source, values in read_command_line(words) for key, value in values.items()
             if value is not None and (source == "flags" or value != defaults[key])}  # fmt: skip
    if ranks is None or ranks < 1:
        raise ConfigError(f"--plan: expected --ranks N of at least 1, got {'none' if ranks is None else ranks}")
    hosts, rate = getattr(arguments, "hosts", 1), getattr(arguments, "network", None)
    if hosts < 1 or ranks % hosts:
        raise ConfigError(f"--hosts: expected a divisor of {ranks} (--ranks), got {hosts}")
    if (rate is None) == (hosts > 1) or not (rate is None or 0 < rate < math.inf):
        expected = "the Gbit/s that leave each host, with --hosts" if hosts > 1 else "none without --hosts"
        raise ConfigError(f"--network: expected {expected}, got {'none' if rate is None else rate}")
    network = ONE_HOST if rate is None else Network(hosts, rate * 1e9 / 8)
    return config, given, words, ranks, getattr(arguments, "gpu", None), network


def report(argv: Sequence[str]) -> str:
    """The output of ``--plan``. ConfigError if no layout is legal."""
    config, given, words, ranks, gpu, network = parse_plan(argv)
    vocabulary = config.model.vocab_size
    if vocabulary is None and config.tokenizer not in ("auto", "bytes"):
        raise ConfigError(f"--plan: expected --vocab-size, got a tokenizer to be read, {config.tokenizer}")
    if vocabulary is None and config.tokenizer == "auto":
        name = next(iter(weighted(config.data)))
        vocabulary = read_corpus(name, lines=lines_of(config)).vocab_size  # None for text
    if config.deterministic:
        raise ConfigError("--plan: expected no --deterministic, whose sums in order are not predicted, got it")
    model = config.model_config_for(vocabulary or ByteTokenizer.vocab_size)
    assumed = False
    if config.device == "cpu":
        rates = cpu_rates(ranks // network.hosts)
    elif config.dtype == "float32":
        raise ConfigError("--dtype: expected bfloat16 or fp8 with --plan for GPUs, whose rates are known, got float32")
    else:
        config = config.model_copy(update={"device": "cuda"})
        gpu = gpu or gpu_here()
        rates, assumed = gpu_rates(gpu or "H200", model.head_dim), gpu is None
        if config.dtype == "fp8" and not rates.fp8:
            raise ConfigError(f"--dtype fp8: expected --gpu of one that multiplies in 8 bits, got {rates.name}")
        if config.compress == "fp8" and not rates.fp8 and ranks > 1:
            raise ConfigError(f"--compress: expected int8 or int4 on {rates.name}, which has no fp8, got fp8")
    legal, refused = plan(config, given, ranks, rates, model, network)
    if not legal:
        raise ConfigError(f"--plan: expected a layout of {plural(ranks, 'rank')}, got none: {refused[0][1]}")
    several = network.hosts > 1
    on = f", {network.hosts} hosts with {network.rate * 8 / 1e9:g} Gbit/s each" * several
    return "\n".join([
        f"{plural(ranks, 'rank')} on {rates.name}{' (no GPU is here: see --gpu)' * assumed}{on}, "
        f"{model.num_parameters():,} parameters, "
        f"{config.batch_size} x {config.seq_len} tokens a step",
        "memory (GiB), and bytes sent a step over each axis (GB): those of the rank that has most"
        + "; those that leave a host" * several,
        table(legal),
        *["!: more than is free on a rank"] * (not legal[-1].memory.fits),
        f"proposal: {command(legal[0], words)}" if legal[0].memory.fits else "no layout fits",
        *[between_hosts(legal[0].job)] * (several and legal[0].memory.fits),
        *(f"note: {note}" for note in notes(legal[0].job) if legal[0].memory.fits),
        *(f"refused: {' '.join(f'{axis} {n}' for axis, n in sizes.items())}: {reason}" for sizes, reason in refused),
    ])  # fmt: skip


def notes(job: Job) -> list[str]:
    """What a prediction leaves out, and the parts of a proposal for GPUs that no run has confirmed."""
    layout, found = job.layout, list[str]()
    compares = job.network.local(layout, "dp", "cp") < layout.dp * layout.cp  # see between_hosts
    if compares or (job.config.compress != "none" and layout.dp * layout.cp > 1):
        found.append("the time to compress and to add what came compressed is left out")
    if job.network.hosts > 1:
        found.append("no run on several machines has confirmed its prediction")
    if job.config.device == "cpu":
        return found
    if why := slow_attention(job.model, GPUS[job.rates.name], job.config.compute_dtype):
        found.append(f"attention is slower than predicted: {why}")
    if layout.ranks > 4 and layout.dp < layout.ranks:
        found.append("on more than 4 GPUs only dp has been run, see docs/guides/layouts.md")
    elif layout.ranks > 2 and layout.ranks not in (layout.dp, layout.tp, layout.pp, layout.cp):
        found.append("on more than 2 GPUs no two axes have been run together, see docs/guides/layouts.md")
    if layout.ranks > 8 and job.network.hosts == 1:
        found.append("all ranks are taken to be on one machine")
    if job.config.dtype == "fp8":
        found.append("no run in fp8 has confirmed its prediction")
    if "H200" not in job.rates.name:
        found.append("the rates are scaled from those measured on H200")
    return found


def command(proposal: Prediction, words: Sequence[str]) -> str:
    """The command of the proposed run: the settings in ``words``, then the others."""
    typed = {word.partition("=")[0] for word in words}
    layout, config = proposal.job.layout, proposal.job.config
    chosen = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "cp") if getattr(layout, axis) > 1}
    chosen |= {"micro_batch_size": config.micro_batch_size, "zero": config.zero, "recompute": config.recompute}
    chosen |= {"pp_schedule": config.pp_schedule} if layout.pp > 1 else {}
    named = {flag: str(value) for name, value in chosen.items() if (flag := flag_of(name)) not in typed}
    flags = [word for pair in named.items() for word in pair]
    return shlex.join([*mpirun(layout.ranks, here=config.device == "cpu"), python(), "-m", "kos.train", *words, *flags])
