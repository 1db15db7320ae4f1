"""--plan: layouts proposed and refused, memory as the device plans it, times beside those measured."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kos.commands import mpirun, python
from kos.errors import ConfigError
from kos.testing import spawn
from kos.train.__main__ import main
from kos.train.config.flags import make_parser, parse
from kos.train.device import choose, costs
from kos.train.device.costs import gpu_rates
from kos.train.parallel.mesh import Layout
from kos.train.tools import plan as planning
from kos.train.tools.plan import make_job, parse_plan, predict
from kos.train.trainer import Trainer
from tests.train.dry_runs import SHAPE, SLOW, D, V
from tests.train.host_kernels.communicator import DeviceComm

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEMORY_PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "layouts.md").read_text()


def planned(ranks, *flags, speed=SLOW):
    config, given, _, ranks, _, network = parse_plan(["--plan", "--ranks", str(ranks), *SHAPE, *flags])
    return planning.plan(config, given, ranks, speed, config.model_config_for(V), network)


def factorisations(ranks):
    return sum(
        ranks % (a * b * c) == 0 for a in range(1, ranks + 1) for b in range(1, ranks + 1) for c in range(1, ranks + 1)
    )


def as_run(prediction, ranks):
    """What the trainer makes of the proposal: its layout and settings, or the error with which it refuses."""
    flags = planning.command(prediction, SHAPE).partition(" -m kos.train ")[2].split()
    config = parse(flags)
    layout = choose.layout_of(config, ranks)
    return config.for_world(layout.dp, "cpu"), layout


def test_a_proposal_names_each_flag_once():
    words = ["--preset=tiny", "--dp", "2", "--zero=1"]
    (line,) = [each for each in planning.report(["--plan", "--ranks", "2", "--gpu=H200", *words]).splitlines()
               if each.startswith("proposal: ")]  # fmt: skip
    assert line.partition(" -m kos.train ")[2].startswith(shlex.join(words))
    flags = [word.partition("=")[0] for word in line.split() if word.startswith("--")]
    assert len(flags) == len(set(flags)) > 4


@pytest.mark.parametrize("ranks", [1, 6, 8])
def test_every_layout_is_proposed_or_refused_with_its_reason(ranks):
    legal, refused = planned(ranks)
    assert len(legal) + len(refused) == factorisations(ranks)
    assert all("expected" in reason and "got" in reason for _, reason in refused)
    for each in legal:
        config, layout = as_run(each, ranks)
        asked = {axis: getattr(config, axis) for axis in ("dp", "tp", "pp", "cp")}
        assert (config, layout) == (each.job.config.model_copy(update=asked), each.job.layout)
        model = config.model_config_for(V)
        for stage in range(each.job.schedule.stages):
            model.local(0, layout.tp, stage, each.job.schedule.stages_of_ranks)
    speeds = [each.seconds for each in legal if each.memory.fits]
    assert speeds == sorted(speeds) and (ranks == 1 or len(speeds) > 1)


def test_compressed_gradients_that_muon_would_not_shard():
    """ZeRO-1 is not tried, nor are layouts in which a block would have two tensors; the reason is given."""
    legal, refused = planned(4, "--compress=int8", "--optimizer=muon")
    reasons = {tuple(sizes.values()): reason for sizes, reason in refused}
    assert {each.job.config.zero for each in legal} == {0} and Layout(dp=4) in {each.job.layout for each in legal}
    expected = "--compress: expected tensors of a multiple of 64 elements with --tp, got model.norm.weight of 32"
    assert reasons[2, 2, 1, 1] == expected and Layout(tp=2, pp=2) in {each.job.layout for each in legal}


def test_what_does_not_divide_is_refused():
    refused = {tuple(sizes.values()): reason for sizes, reason in planned(8, *ONE_CHOICE[2:])[1]}
    assert "--tp 8: expected num_attention_heads to be a multiple of 8, got 4" in refused[1, 8, 1, 1]
    assert (2, 4, 1, 1) not in refused  # of 2 kv heads, four ranks hold a copy each
    assert "--pp 8: expected at most 5 stages (layers + 1), got 8" in refused[1, 1, 8, 1]
    assert "--batch-size: expected a multiple of 16 (--micro-batch-size 2 × 8 ranks), got 8" in refused[8, 1, 1, 1]
    refused = {tuple(sizes.values()): reason for sizes, reason in planned(4, *ONE_CHOICE[2:], "--seq-len", "18")[1]}
    assert "--seq-len: expected a multiple of" in refused[1, 1, 1, 4]


def test_what_is_given_stays():
    legal, refused = planned(8, "--tp", "2", "--zero", "0", "--recompute", "block", "--pp-schedule", "zero-bubble-v")
    assert {each.job.layout.tp for each in legal} == {2} and {sizes["tp"] for sizes, _ in refused} <= {2}
    settings = {(x.zero, x.recompute, x.pp_schedule, x.micro_batch_size) for x in (each.job.config for each in legal)}
    assert settings == {(0, "block", "zero-bubble-v", 2)}


def test_the_settings_of_a_run_are_given_where_it_changed_them(tmp_path):
    """The config.json of a run has all settings; those with their default values do not count as given."""
    for name, flags in (("default", []), ("tp", ["--tp=2", "--zero=1"])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"config": parse([*SHAPE, *flags]).to_json()}))
    file = ["--config", str(tmp_path / "default.json")]
    assert {each.job.layout for each in planned(4, *file)[0]} == {each.job.layout for each in planned(4)[0]}
    file = ["--config", str(tmp_path / "tp.json"), "--pp", "1"]
    assert {(x.job.layout.tp, x.job.layout.pp, x.job.config.zero) for x in planned(4, *file)[0]} == {(2, 1, 1)}


def test_of_what_does_not_fit_the_least_is_shown():
    config, given, _, ranks, *_ = parse_plan(["--plan", "--ranks=1", "--preset=8b"])
    config = config.model_copy(update={"device": "cuda"})
    legal, _ = planning.plan(config, given, ranks, gpu_rates("A100", 128), config.model_config_for(256))
    assert legal and not any(each.memory.fits for each in legal)
    assert {each.job.config.recompute for each in legal} == {"block"}
    assert {each.job.config.micro_batch_size for each in legal} == {1}


# --- memory and time -------------------------------------------------------------------------------------


def plan_of(trainer):
    """The plan of a run's memory; its files are closed."""
    with trainer.held:
        return trainer.device.plan


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}])
def test_memory_is_the_plan_of_the_device(sizes, tmp_path):
    (tmp_path / "text").write_bytes(b"the quick brown fox " * 200)
    flags = [*SHAPE, "--data", str(tmp_path / "text"), "--steps", "1", "--eval-batches", "0", "--sample-tokens", "0"]
    flags += ["--zero", "1", "--out", str(tmp_path / "run")]
    config = parse([*flags, *(f"--{axis}={size}" for axis, size in sizes.items())])
    plans = spawn(lambda comm: plan_of(Trainer(config, comm)), 2, timeout=100)
    job = make_job(config, config.model_config_for(V), Layout(**sizes), SLOW)
    for rank in range(sizes.get("pp", 1)):
        assert job.memory(rank).uses == plans[rank].uses and job.memory(rank).savings == plans[rank].savings


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}])
def test_memory_is_the_plan_of_the_device_of_gpus(emulated, sizes, tmp_path):
    """On the emulated device, of three multiprocessors: what blocks of theirs add up is not the same."""
    (tmp_path / "text").write_bytes(b"the quick brown fox " * 200)
    flags = [*SHAPE[1:], "--device=cuda", "--eval-batches=0", f"--data={tmp_path / 'text'}", f"--out={tmp_path}/run"]
    config = parse([*flags, *(f"--{axis}={size}" for axis, size in sizes.items())])
    plans = spawn(lambda comm: plan_of(Trainer(config, DeviceComm(comm))), 2, timeout=100)
    job = make_job(config, config.model_config_for(V), Layout(**sizes), gpu_rates("H200", 8))
    for rank in range(sizes.get("pp", 1)):
        ours, theirs = job.memory(rank), plans[rank]
        assert ours.slot == theirs.slot and ours.uses.keys() == theirs.uses.keys()
        differ = {use for use, size in ours.uses.items() if size != theirs.uses[use]}
        assert len(differ) <= 1 and 0 <= ours.total - theirs.total == ours.scratch - theirs.scratch < 132 * 4 * D


def results(name):
    result = json.loads((RESULTS / name).read_text())
    gpu = " ".join(result["hardware"].split()[2:4])
    return [pytest.param(gpu, row, id=f"{row['ranks']}-{row['preset']}-{row['batch_size']}")
            for row in result["rows"] if row["implementation"] == "kos"]  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "row"), [*results("train-h100-1.json"), *results("train-h100-2.json"), *results("train-h200-4.json")]
)
def test_predicted_times_are_near_those_measured(gpu, row):
    preset, ranks = row["preset"], row["ranks"]
    flags = ["--preset", preset.partition("-4")[0], "--seq-len", str(row["seq_len"]), "--grad-dtype", "bfloat16"]
    flags += ["--batch-size", str(row["batch_size"] * ranks), "--micro-batch-size", str(row["batch_size"])]
    if preset == "8b-4-layers":
        flags += ["--num-hidden-layers", "4", "--vocab-size", "32000", "--tie-word-embeddings"]
    config = parse([*flags, "--zero", str(int("zero1" in row["layout"]))]).model_copy(update={"device": "cuda"})
    model = config.model_config_for(256)
    job = make_job(config, model, Layout(dp=ranks), gpu_rates(gpu, model.head_dim))
    memory = job.memory(0)
    assert 1e3 * predict(job, memory).seconds == pytest.approx(row["step_ms"], rel=0.2)
    assert memory.total == pytest.approx(row["peak_memory_bytes"], abs=1.5 * 2**30)


@pytest.mark.parametrize(
    ("flags", "measured"),
    [
        ("--preset 8b --num-hidden-layers 8 --batch-size 4 --tp 2 --micro-batch-size 1", 31_060_723_504),
        ("--preset 8b --batch-size 8 --tp 4 --micro-batch-size 2", 55_356_603_008),
        ("--preset 1b --batch-size 16 --pp 2 --pp-schedule zero-bubble-v --micro-batch-size 1", 22_667_737_024),
        ("--preset 1b --batch-size 1 --seq-len 65536 --cp 2 --micro-batch-size 1", 65_255_406_872),
    ],
)
def test_the_memory_of_layouts_is_what_they_took(flags, measured):
    """On H100 and H200, by ``benchmarks.train``; the plan also has a reserve."""
    config = parse(flags.split()).model_copy(update={"device": "cuda"})
    model = config.model_config_for(256)
    layout = choose.layout_of(config, config.tp * config.pp * config.cp)
    plan = make_job(config, model, layout, gpu_rates("H200", model.head_dim)).memory(0)
    assert plan.total - plan.uses["kernels, graph, communication"] == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize(("options", "gib", "rate"), re.findall(
    r"^\| (none|`--[^|]*`) \| ([\d.]+) \| ([\d,]+|does not fit) \|$", MEMORY_PAGE, re.M))
def test_the_table_of_the_memory_page(options, gib, rate, capsys):
    flags = "" if options == "none" else options.strip("`")
    flags += "" if "--zero" in flags else " --zero 0"
    flags += "" if "--recompute" in flags else " --recompute none"
    run = f"--plan --ranks 8 --preset 8b --batch-size 8 --gpu H200 --dp 8 --micro-batch-size 1 {flags}"
    assert main(run.split()) == 0
    printed = capsys.readouterr().out
    row = next(line.split() for line in printed.splitlines() if line.startswith(" 8 "))
    fits = "proposal" in printed
    assert (row[8].rstrip("!"), row[-1] if fits else "does not fit") == (gib, rate)


def test_the_example_of_the_memory_page():
    """What an 8B model takes on a CPU, the largest first, and its sum."""
    config = parse(["--device", "cpu", "--preset", "8b", "--eval-batches", "0"])
    uses = make_job(config, config.model_config_for(256), Layout(), SLOW).memory(0).uses
    said = " ".join(re.search(r"got [\d.]+ GiB\n +\((.*?)\);", MEMORY_PAGE, re.S)[0].split())
    parts = "; ".join(f"{use} {size / 2**30:.2f}" for use, size in sorted(uses.items(), key=lambda use: -use[1]))
    assert said == f"got {sum(uses.values()) / 2**30:.2f} GiB ({parts});"


# --- the command -----------------------------------------------------------------------------------------


ONE_CHOICE = ["--num-hidden-layers=2", "--micro-batch-size=1", "--zero=0", "--recompute=none"]
"""Flags of a small model that leave one choice for each layout, so that few steps are simulated."""


def test_the_command_starts_neither_mpi_nor_cuda():
    program = (
        "import sys; from kos.train.__main__ import main; code = main(sys.argv[1:]); "
        "assert not {'mpi4py.MPI', 'cuda.bindings.driver', 'cuda.core'} & sys.modules.keys(); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, "--plan", "--ranks", "2", "--preset", "tiny", "--gpu", "H200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks on H200, 820,352 parameters, 16 x 128 tokens a step")
    assert lines[1].startswith("memory (GiB), and bytes sent a step over each axis (GB)")
    assert lines[2].split()[:4] == ["dp", "tp", "pp", "cp"]
    start = shlex.join([*mpirun(2, here=False), python(), "-m", "kos.train", "--preset", "tiny", "--"])
    assert any(line.startswith(f"proposal: {start}") for line in lines)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--ranks 4 --head-dim 64 --gpu H200 --dp 4", []),
        ("--ranks 4 --head-dim 64 --gpu H200 --dp 2 --cp 2", ["no two axes have been run together"]),
        ("--ranks 8 --head-dim 64 --gpu H200 --pp 2", ["only dp has been run"]),
        ("--ranks 16 --head-dim 64 --gpu H100 --dp 16", ["on one machine", "scaled from those measured on H200"]),
        ("--ranks 2 --gpu H200 --dp 2 --head-dim 72", ["the fast kernels expect a head size that is a multiple of 16"]),
    ],
)
def test_what_no_run_has_confirmed_is_said(flags, said):
    lines = planning.report([*f"--plan --preset tiny {flags}".split(), *ONE_CHOICE]).splitlines()
    notes = [line for line in lines if line.startswith("note: ")]
    assert len(notes) == len(said) and all(part in note for part, note in zip(said, notes, strict=True))


def test_the_gpu_that_is_here(tmp_path, monkeypatch):
    """Without one, that a GPU is assumed is said.  A run on the CPU needs none."""
    monkeypatch.setattr(costs, "DRIVER", tmp_path)

    def first_line(*flags):
        return planning.report(["--plan", "--preset=tiny", "--ranks=2", *ONE_CHOICE, *flags]).partition("\n")[0]

    assert costs.gpu_here() is None and "2 ranks on the CPU, " in first_line("--device=cpu")
    assert re.match(r"2 ranks on .*H200 \(no GPU is here: see --gpu\), ", first_line())
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    assert costs.gpu_here() == "NVIDIA H100 80GB HBM3" and gpu_rates(costs.gpu_here(), 128).name == "H100"
    assert re.match("2 ranks on .*H100, ", line := first_line()) and "see --gpu" not in line


def test_the_vocabulary_is_that_of_the_data(tmp_path):
    """As in a run, token files of 16 bits have the vocabulary size 50,257."""
    header = np.array([20240520, 1, 300, *[0] * 253], "<i4")
    (tmp_path / "tokens.bin").write_bytes(header.tobytes() + bytes(600))
    flags = ["--plan", "--ranks", "1", "--gpu", "H200", "--data", str(tmp_path / "tokens.bin")]
    flags += ONE_CHOICE[1:]
    for more, vocabulary in (([], 50_257), (["--tokenizer", "bytes"], 256), (["--vocab-size", "60000"], 60_000)):
        model = parse([]).model_config_for(vocabulary)
        assert f" {model.num_parameters():,} parameters" in planning.report([*flags, *more])
    with pytest.raises(ConfigError, match="no such file"):
        planning.report(["--plan", "--ranks=1", "--gpu=H200", f"--data={tmp_path / 'none'}"])


def test_layouts_of_sizes_that_have_no_product_in_8_bits():
    """Are refused, as a run would."""
    flags = ["--plan", "--ranks=4", "--gpu=H100", "--preset=tiny", *ONE_CHOICE[2:], "--pp=1", "--cp=1", "--seq-len=64"]
    said = planning.report([*flags, "--dtype=fp8"])
    assert "refused: dp 1 tp 4 pp 1 cp 1: --dtype fp8: expected --seq-len 64 / 8 to be a multiple of 16, got 8" in said
    assert "seq-len 64 / 8" not in planning.report(flags)


def test_what_waits_for_its_turn_is_in_8_bits():
    """Of a pipeline that defers the gradients of weights: the gradients of outputs in 16 bits are not kept beside."""
    slots = {}
    for dtype in ("bfloat16", "fp8"):
        flags = ["--preset", "1b", "--ranks", "2", "--pp", "2", "--pp-schedule", "zero-bubble-v", "--dtype", dtype]
        config, *_ = planning.parse_plan(["--plan", *flags, "--device", "cuda", "--micro-batch-size", "1"])
        model = config.model_config_for(32_000)
        job = planning.make_job(config, model, Layout(pp=2), gpu_rates("H100", model.head_dim))
        slots[dtype] = job.memory(0).slot
    assert slots["fp8"] < 0.75 * slots["bfloat16"]


def test_the_ways_between_hosts_are_compared(capsys):
    hosts = ["--hosts=2", "--network=0.001"]
    assert main(["--plan", "--ranks=4", "--dp=4", *SHAPE, *hosts]) == 0
    out = capsys.readouterr().out
    assert "2 hosts with 0.001 Gbit/s each" in out and "no run on several machines has confirmed its prediction" in out
    assert "note: the time to compress and to add what came compressed is left out" in out
    rows = re.findall(r"^(exact, .+?|--compress .+?)  +(\S+) +(\S+) +\S+$", out, re.MULTILINE)
    assert [name for name, *_ in rows] == [
        "exact, a ring of all ranks", "exact, in phases", "--compress int8"
    ]  # fmt: skip
    ring, phases, compressed = (float(ms) for _, _, ms in rows)
    assert compressed < phases < ring
    assert main(["--plan", "--ranks=4", "--pp=2", "--dp=2", *SHAPE, *hosts]) == 0
    assert "\nno gradients leave a host\n" in capsys.readouterr().out


def test_hosts_that_do_not_divide_are_refused(capsys):
    hosts = ["--hosts=2", "--network=1"]
    assert main(["--plan", "--ranks=6", *SHAPE, "--batch-size=12", "--micro-batch-size=1", *hosts]) == 0
    out = capsys.readouterr().out
    assert "refused: dp 3 tp 2 pp 1 cp 1: --hosts 2: expected as many ranks of dp and cp on every host" in out


def test_bad_requests_are_refused():
    for flags, said in (
        ([], "expected --ranks N of at least 1, got none"),
        (["--ranks", "2", "--gpu", "B200"], "--gpu: expected one of H200, H100, A100, got 'B200'"),
        (["--ranks", "2", "--dtype", "float32"], "expected bfloat16 or fp8 with --plan"),
        (["--ranks", "2", "--dtype", "fp8", "--gpu", "A100"], "--dtype fp8: expected --gpu of one that .* got A100"),
        (["--ranks", "4", "--hosts", "3"], r"--hosts: expected a divisor of 4 \(--ranks\), got 3"),
        (["--ranks", "4", "--hosts", "2"], "--network: expected the Gbit/s that leave each host, .*, got none"),
        (["--ranks", "4", "--network", "2"], "--network: expected none without --hosts, got 2.0"),
        (["--ranks", "2", "--compress", "fp8", "--gpu", "A100"], "expected int8 or int4 on A100, .* got fp8"),
        (["--ranks", "3", "--tp", "2"], r"--tp 2: expected a divisor of 3 \(ranks\), got 2; 2 ranks would do$"),
        (["--ranks", "6", "--dp", "2", "--tp", "2"], "--dp 2 --tp 2: .* 6 .* got 2 × 2 = 4; 4 ranks would do$"),
        (["--ranks", "2", "--tokenizer", "none.json"], "expected --vocab-size"),
        (["--ranks", "2", "--deterministic"], "expected no --deterministic"),
    ):
        with pytest.raises(ConfigError, match=said):
            planning.report(["--plan", *flags])
    with pytest.raises(ConfigError, match="--ranks: expected only together with --plan, .* mpirun -n N"):
        parse(["--ranks", "2"])
    with pytest.raises(ConfigError, match="--hosts: expected only together with --plan, got no --plan$"):
        parse(["--hosts", "2"])
    assert "--plan" in make_parser().format_help()
