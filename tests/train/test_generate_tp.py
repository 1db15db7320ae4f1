"""Generation by several ranks that hold a model together: the tokens of one rank, and errors that all ranks raise."""

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos.train
from kos import cuda
from kos.errors import ConfigError, InvalidArgument, RankLost
from kos.testing import Fault, spawn
from kos.train.generate import Decoder, Sampling
from kos.train.parallel.mesh import Axis
from tests.comm.tcp_ranks import free_port
from tests.forked import python
from tests.host_compiler import needs_compiler
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program
from tests.train import generate_cases as cases
from tests.train.evaluation_cases import write_model
from tests.train.generation import CASES, GREEDY, PROMPTS, decoder, random_weights, tokens_of
from tests.train.host_kernels.communicator import DeviceComm
from tests.train.host_kernels.emulator import HostOps, host_memory

EVEN = {"vocab_size": 44, "intermediate_size": 28, "max_position_embeddings": 24}
SPLIT = {name: config.replace(**EVEN) for name, config in CASES.items() if "tp" in config.axes}
"""The models of ``CASES`` whose family has tensor parallelism, in sizes that 4 ranks divide."""

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 4 heads, with a chat template."""
    folder = tmp_path_factory.mktemp("generate") / "model"
    write_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize(("name", "drawn", "ranks"), [
    *((name, False, 4 if number % 2 else 2) for number, name in enumerate(SPLIT)), ("llama", True, 4),
])  # fmt: skip
def test_tokens_are_those_of_one_rank(name, drawn, ranks):
    """Prompts of several lengths at once, also beyond the context; 4 ranks have copies of kv heads.

    If they are drawn, by their likelihood, what rank 0 draws counts.
    """
    config, how = SPLIT[name], {"ends": [7]} if drawn else {}
    weights, context = random_weights(config), config.max_position_embeddings

    def sampling(rank):
        return Sampling(seed=rank) if drawn else GREEDY

    expected = tokens_of(decoder(config, weights, 4), config, PROMPTS, 30, sampling(0), **how)

    def run(comm):
        axis = Axis(comm.rank, comm.size, comm)
        source = Decoder(config, cases.reference, cases.part_of(weights, config, axis), 4, context, axis)
        return tokens_of(source, config, PROMPTS, 30, sampling(comm.rank), tp=axis, **how)

    assert spawn(run, ranks) == [expected] * ranks
    assert drawn or all(len(set(tokens)) > 1 for tokens in expected)


@needs_compiler
def test_logits_on_emulated_gpus(monkeypatch):
    host_memory(monkeypatch)
    config = SPLIT["multi-query"]
    weights = random_weights(config)
    expected = cases.logits_of(config, cases.reference, weights, PROMPTS, 2)

    def run(comm):
        ops, axis = HostOps(), Axis(comm.rank, 2, DeviceComm(comm))
        there = cases.weights_on(ops, cases.part_of(weights, config, axis), config, np.dtype(np.float32), axis)
        return cases.logits_of(config, ops, there, PROMPTS, 2, axis)

    for found in spawn(run, 2):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_a_loaded_model_computes(folder, caplog):
    """Logits, loss, texts and chats are those of one rank, on every rank; a warning is logged once."""
    pytest.importorskip("jinja2", reason="needs the extra 'chat'")
    tokens, messages = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], [{"role": "user", "content": "ring"}]
    how = {"temperature": 0.7, "seed": 3}

    def run(comm):
        model = kos.train.load(folder, comm=comm)
        texts = model.generate(["the ring", "", "é"], 70, **how, stop=["q"])
        return model.logits(tokens), model.loss("one ring"), texts, model.chat(messages, 9, **how), repr(model)

    logits, loss, *others = run(None)
    caplog.clear()
    for found in spawn(run, 2):
        np.testing.assert_allclose(found[0], logits, rtol=1e-4, atol=1e-4)
        assert found[0].dtype == np.float32 and found[1] == pytest.approx(loss, rel=1e-5) and [*found[2:]] == others
    assert len([said for said in caplog.messages if "longer than the context" in said]) == 1


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "heads": ({}, 3, "comm of 3 ranks: expected num_attention_heads to be a multiple of 3, got 4; 1, 2 or 4 would do"),
    "family": ({"family": "olmo2"}, 2,
               "comm of 2 ranks: expected 1 in a model of type olmo2, which supports dp, pp, cp only, got 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_split(case, tmp_path):
    changes, ranks, expected = REFUSED[case]
    write_model(tmp_path / "model", **changes)

    def run(comm):
        with pytest.raises(ConfigError) as raised:
            kos.train.load(tmp_path / "model", comm=comm)
        assert raised.value.on_every_rank and type(raised.value) is ConfigError
        return str(raised.value)

    assert spawn(run, ranks) == [expected] * ranks


def test_arguments_that_differ(folder):
    """Also such that one rank alone would refuse: all ranks raise the same error."""

    def run(comm):
        model, mine = kos.train.load(folder, comm=comm), comm.rank
        for call, what in (
            (lambda: model.logits(np.full((1, 2000), mine)), "tokens"),
            (lambda: model.loss("ab", [1, -1 - mine]), "targets"),
            (lambda: model.generate("a" * (64 + mine)), "prompts"),
            (lambda: model.stream(["a"], 5, seed=mine), "seed"),
            (lambda: model.chat([{"role": "user", "content": str(mine)}]), "messages"),
        ):
            with pytest.raises(ConfigError, match=f"{what}: expected the same on all ranks, got .* on rank 0 and "):
                call()
        with pytest.raises(InvalidArgument, match="prompt: expected at most 64 tokens"):
            model.generate("a" * 65)
        with pytest.raises(ConfigError, match="device: expected cpu, or the GPU of the communicator, got 'cuda:1'"):
            kos.train.load(folder, "cuda:1", comm=comm)

    spawn(run, 2)


def test_what_is_no_communicator(folder):
    with pytest.raises(ConfigError, match=r"comm: expected a communicator of kos, .* got 3$"):
        kos.train.load(folder, comm=3)


@pytest.mark.parametrize("call", ["all_reduce", "all_gather"])
def test_a_rank_that_dies_while_it_generates(folder, call):
    def run(comm):
        model = kos.train.load(folder, comm=comm)
        with pytest.raises(RankLost) as raised:
            model.generate("the ring", 40)
        return [*raised.value.ranks]

    assert spawn(run, 4, faults=[Fault("crash", 1, 9, call=call)]) == [[1], None, [1], [1]]


def kos_on_2_ranks(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_program(MPIRUN, "-n", "2", *python(), "-m", "kos", *map(str, arguments), env=OUTSIDE, **options)


@contextlib.contextmanager
def by_environment(
    module: str, *arguments: str, stdin: Any = subprocess.DEVNULL, stderr: Any = subprocess.STDOUT
) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks without a launcher."""
    place = {**OUTSIDE, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [*python(), "-m", module, *arguments]
    how: dict[str, Any] = {"stdin": stdin, "stderr": stderr, "text": True}
    how["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # whatever these tests are started by
    ranks = [subprocess.Popen(command, env={**place, "RANK": rank}, stdout=subprocess.PIPE, **how) for rank in "01"]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def ends_of(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """The exit status and the output of each rank."""
    said = [rank.communicate(timeout=150)[0] for rank in ranks]
    return [(rank.returncode, each) for rank, each in zip(ranks, said, strict=True)]


@pytest.mark.parametrize("launcher", [pytest.param("mpirun", marks=needs_mpirun), "environment"])
def test_a_chat_on_two_ranks(folder, tmp_path, launcher):
    """Rank 0 reads for all ranks.  The end of the input ends them, which Open MPI 5 does not forward."""
    pytest.importorskip("jinja2", reason="needs the extra 'chat'")
    model, messages, expected = kos.train.load(folder), list[dict[str, str]](), list[str]()
    for text in ("ring", "\ud7ff", "/reset", "tree"):
        messages = [] if text == "/reset" else [*messages, {"role": "user", "content": text}]
        if messages:
            expected.append(model.chat(messages, 9, temperature=0))
            messages.append({"role": "assistant", "content": expected[-1]})
    (tmp_path / "lines.txt").write_text("ring\n\ud7ff\n/reset\ntree\n" + "/exit\n" * (launcher == "mpirun"))
    arguments = ["chat", folder, "--tokens=9", "--temperature=0", "--tp=2"]
    with (tmp_path / "lines.txt").open() as lines:
        if launcher == "mpirun":
            done = kos_on_2_ranks(*arguments, stdin=lines)
            status, said = done.returncode, done.stdout
        else:
            with by_environment("kos", *map(str, arguments), stdin=lines) as ranks:
                (status, said), other = ends_of(ranks)
            assert other == (0, "")
    assert status == 0 and said.count("> ") == 5, said
    assert said.replace("> ", "").rstrip("\n") == "\n".join(expected).rstrip("\n")


@pytest.mark.parametrize(
    ("ranks", "tp", "how"),
    [(1, 2, "got 2; start it with mpirun -n 2"), (3, 2, "got 2; start it with mpirun -n 2 or set --tp 3"),
     (2, 1, "got 1; start it with mpirun -n 1 or set --tp 2"), (1, 0, "got 0; set --tp 1")],
)  # fmt: skip
def test_other_ranks_than_there_are(folder, ranks, tp, how):
    """It is seen before the ranks connect."""
    place = {"RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run([*python(), "-m", "kos", "chat", str(folder), f"--tp={tp}"], capture_output=True, text=True,
                          timeout=100, env={**OUTSIDE, **(place if ranks > 1 else {})})  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kos: error: --tp: expected {ranks}, the number of ranks, {how}\n"


def test_a_model_that_the_ranks_cannot_split(folder, tmp_path):
    """The command names its flag, once."""
    write_model(tmp_path / "model", vocab_size=257)
    with by_environment("kos", "sample", str(tmp_path / "model"), "--tp=2") as ranks:
        said = ends_of(ranks)
    expected = "kos: error: --tp 2: expected vocab_size to be a multiple of 2, got 257; 1 would do\n"
    assert said == [(2, expected), (2, "")]


def test_a_reader_that_closes_the_pipe(folder):
    """The ranks end together, without an error."""
    flags = ["--tp=2", "--tokens=60", "--prompt=ring"]
    with by_environment("kos", "sample", str(folder), *flags, stderr=subprocess.PIPE) as ranks:
        assert ranks[0].stdout is not None and ranks[0].stderr is not None
        ranks[0].stdout.close()
        assert ranks[1].communicate(timeout=150) == ("", "")
        assert (ranks[0].stderr.read(), ranks[0].wait(150), ranks[1].returncode) == ("", 0, 0)


def test_ctrl_c_on_rank_0_ends_all_ranks(folder, tmp_path):
    pytest.importorskip("jinja2", reason="needs the extra 'chat'")
    (tmp_path / "lines.txt").write_text("ring\n")
    with (
        (tmp_path / "lines.txt").open() as lines,
        by_environment("kos", "chat", str(folder), "--tokens=99999", "--tp=2", stdin=lines) as ranks,
    ):
        assert ranks[0].stdout is not None
        ranks[0].stdout.read(9)
        ranks[0].send_signal(signal.SIGINT)
        (first, _), (second, said) = ends_of(ranks)
    assert first == -signal.SIGINT and second == 1
    assert "kos: error: rank 1: " in said and "rank 0" in said and "KeyboardInterrupt" in said


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["peer", "auto"])
def test_two_gpus(backend):
    """Also two ranks on one: tokens in float32 are those of a CPU, and the loss of a rank is named.

    The ranks start without mpirun, which would end both.
    """
    if backend == "auto" and len(cuda.visible_devices()) < 2:
        pytest.skip("auto needs 2 GPUs for 2 ranks")
    with by_environment("tests.train.generate_ranks", backend) as ranks:
        (status, said), _ = ends_of(ranks)
    assert status == 0 and json.loads(said.splitlines()[-1]) == [1], said
