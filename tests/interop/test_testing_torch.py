"""kos.testing.torch: ranks of torch.distributed as forked processes, their results, errors, deadlines and faults."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kos.errors import CollectiveTimeout, InvalidArgument, RankLost
from tests.forked import PATHS
from tests.packages import Package, needs

pytestmark = needs("torch")
torch, dist, testing = Package("torch"), Package("torch.distributed"), Package("kos.testing.torch")

HERE = Path(__file__).name
LIMIT = 60.0


def line(text):
    """``file:line`` of the line of this file that ends with the comment ``text``."""
    lines = Path(__file__).read_text().splitlines()
    return f"{HERE}:{next(n for n, each in enumerate(lines, 1) if each.endswith(f'# {text}'))}"


def children():
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = children()
    yield
    assert children() <= before


@pytest.mark.parametrize("size", [1, 2, 5])
def test_results_come_by_rank(size):
    captured = torch.arange(3.0)

    def program(rank):
        x = captured * rank
        dist.all_reduce(x)
        return {"sum": x, "rank": (rank, dist.get_rank()), "backend": dist.get_backend(), "array": x.numpy()}

    for rank, found in enumerate(testing.spawn(program, size, LIMIT)):
        assert found["rank"] == (rank, rank) and found["backend"] == "kos"
        assert found["sum"].equal(captured * sum(range(size))) and (found["array"] == found["sum"].numpy()).all()


def test_a_result_that_cannot_be_returned_is_named():
    with pytest.raises(InvalidArgument, match="result of rank 0: expected tensors, arrays, .* got another object"):
        testing.spawn(lambda: Path("x"), 1, LIMIT)


def test_what_ranks_print_comes_with_their_ranks(capfd):
    def program(rank):
        print("hello")
        os.write(2, b"from C\n")

    testing.spawn(program, 2, LIMIT)
    assert capfd.readouterr().out == "".join(f"[rank {rank}] hello\n[rank {rank}] from C\n" for rank in (0, 1))


class OwnError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.two = two


def test_the_first_error_is_raised_with_its_rank_and_line():
    def program(rank):
        if rank == 1:
            raise OwnError("this", 4)  # raised
        dist.barrier()

    with pytest.raises(OwnError, match="this and 4") as caught:
        testing.spawn(program, 3, LIMIT)
    assert caught.value.two == 4 and caught.value.__notes__ == ["raised on rank 1 of 3"]
    assert f"{HERE}:{caught.traceback[-1].lineno + 1}" == line("raised")


def test_a_failed_assertion_is_shown_as_pytest_shows_it(pytester_or_path):
    found = pytester_or_path("""
        import pytest
        import torch
        import torch.distributed as dist

        @pytest.mark.parametrize("world_size", [3])
        def test_sum(torch_ranks):
            def program(rank):
                x = torch.ones(2)
                dist.all_reduce(x)
                if rank == 2:
                    total = x.tolist()
                    assert total == [3.0, 4.0]
            torch_ranks(program)

        def test_skip(torch_ranks):
            torch_ranks(lambda: pytest.skip("not here"))
    """)
    assert "assert [3.0, 3.0] == [3.0, 4.0]" in found and "raised on rank 2 of 3" in found
    assert re.search(r"test_it\.py:\d+: AssertionError", found) and "kos/testing" not in found
    assert "1 failed, 1 skipped" in found


@pytest.fixture
def pytester_or_path(tmp_path):
    def run(text, *arguments):
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["kos.testing.plugin"]\n')
        (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-q", *arguments]
        env = {**os.environ, "PYTHONPATH": PATHS}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250)
        return done.stdout + done.stderr

    return run


def test_under_xdist(pytester_or_path):
    found = pytester_or_path("""
        import pytest
        import torch
        import torch.distributed as dist

        @pytest.mark.parametrize("number", range(4))
        def test_sum(torch_ranks, number):
            def program(rank):
                x = torch.full((2,), float(number))
                dist.all_reduce(x)
                return x
            assert torch_ranks(program)[1].tolist() == [2.0 * number] * 2
    """, "-n", "2")  # fmt: skip
    assert "4 passed" in found, found


def test_the_deadline_ends_all_processes_and_names_the_lines():
    def program(rank):
        if rank == 1:
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            while True:
                time.sleep(0.1)  # sleeps
        dist.barrier()  # waits

    with pytest.raises(CollectiveTimeout, match=re.escape("ranks [0, 1] of 2 are still running after 1.5 s")) as caught:
        testing.spawn(program, 2, 1.5)
    assert line("sleeps") in str(caught.value) and line("waits") in str(caught.value)


def test_an_interrupt_ends_all_processes():
    def program(rank):
        if rank == 0:
            os.kill(parent, signal.SIGUSR1)
        while True:
            time.sleep(0.1)

    def handler(*_):
        raise KeyboardInterrupt

    parent, before = os.getpid(), signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            testing.spawn(program, 2, LIMIT)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_killed_caller_leaves_no_process(tmp_path):
    program = f"""
        import os, time
        from kos.testing.torch import spawn

        def program(rank):
            open(f"{tmp_path}/{{os.getpid()}}", "w").close()
            time.sleep(600)

        spawn(program, 2, 600)
    """
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    caller = subprocess.Popen([sys.executable, file], env={**os.environ, "PYTHONPATH": PATHS})
    deadline = time.monotonic() + 120
    while len(ranks := [each.name for each in tmp_path.iterdir() if each.name.isdecimal()]) < 2:
        assert time.monotonic() < deadline and caller.poll() is None
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    while any(Path("/proc", rank).exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_program_that_makes_its_own_group_of_any_backend_gets_kos():
    def program():
        dist.init_process_group("nccl", init_method="tcp://10.0.0.1:2", world_size=2, rank=int(os.environ["RANK"]))
        group = dist.new_group([0, 1], backend="gloo")
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        dist.destroy_process_group()
        return x, group.name()

    assert testing.spawn(program, 2, LIMIT, init=False) == [(torch.tensor([2.0]), "kos")] * 2


def test_a_script_runs_with_its_arguments(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        if __name__ == "__main__":
            dist.init_process_group("gloo")
            x = torch.tensor(float(sys.argv[1]))
            dist.all_reduce(x)
            print(x.item(), dist.get_backend())
    """))
    assert testing.spawn([script, 4], 2, LIMIT) == [None, None]
    assert capsys.readouterr().out == "[rank 0] 8.0 gloo\n[rank 1] 8.0 gloo\n"


def test_pretended_hosts():
    def program(rank):
        return [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "KOS_HOST")]

    assert testing.spawn(program, 3, LIMIT, hosts=[1, 2]) == [
        ["0", "1", "0", "host 0"], ["0", "2", "1", "host 1"], ["1", "2", "1", "host 1"],
    ]  # fmt: skip


def test_a_deadlock_names_each_line_and_the_cycle():
    def program(rank):
        x = torch.ones(4)
        dist.send(x, (rank + 1) % 3)  # everybody sends
        dist.recv(x, (rank - 1) % 3)

    with pytest.raises(testing.Deadlock) as caught:
        testing.spawn(program, 3, 600)
    text = str(caught.value)
    assert "every rank waits" in text and text.count(line("everybody sends")) == 3
    assert "the cycle: rank 0 -> rank 1 -> rank 2 -> rank 0" in text


def survive(rank):
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
    except dist.DistBackendError as error:
        return str(error)


def test_a_crashed_rank_has_no_result_and_the_others_raise():
    found = testing.spawn(survive, 3, LIMIT, faults=[testing.Fault("crash", 1, 1, call="all_reduce")])
    assert found[1] is None and "rank 1" in found[0] and "rank 1" in found[2]


def test_a_stopped_rank_is_named_by_the_deadlock():
    with pytest.raises(testing.Deadlock, match="rank 1 has ended: stall before all_reduce") as caught:
        testing.spawn(survive, 3, 600, faults=[testing.Fault("stall", 1, 1)])
    assert caught.value.ranks == (1,)


def test_other_faults():
    def send(rank):
        if rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)  # nothing comes

    with pytest.raises(testing.Deadlock, match=re.escape(line("nothing comes"))):
        testing.spawn(send, 2, 600, faults=[testing.Fault("drop", 0, 0, call="send")])
    assert testing.spawn(survive, 2, LIMIT, faults=[testing.Fault("delay", 1, 2)]) == [None, None]
    with pytest.raises(InvalidArgument, match=r"faults: expected all to happen, got none of .*operation=9"):
        testing.spawn(survive, 2, LIMIT, faults=[testing.Fault("delay", 1, 9)])


def test_a_rank_that_dies_is_named():
    def program(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankLost, match="rank 1 of 2 is gone: it was ended by SIGKILL"):
        testing.spawn(program, 2, LIMIT)


def test_wrong_arguments():
    with pytest.raises(InvalidArgument, match="fn: expected a function"):
        testing.spawn(3, 2)
    with pytest.raises(InvalidArgument, match=r"expected a function or the path of a script, got 'nowhere\.py'"):
        testing.spawn("nowhere.py", 2)
    with pytest.raises(InvalidArgument, match="strict: expected"):
        testing.spawn(survive, 2, strict="yes")


def test_compare_finds_no_difference_between_gloo_and_kos():
    testing.compare(programs=6, seed=3)
    functional = Package("torch.distributed._functional_collectives")
    testing.compare(lambda rank: {"sum": [functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)]}, world_size=2)


def test_compare_shortens_the_first_program_that_differs(monkeypatch):
    wrong = "dist.all_reduce(x) if dist.get_backend() == 'kos' else dist.broadcast(x, 0)"
    monkeypatch.setattr("kos.testing.torch.programs.OPERATIONS", ("dist.barrier()", wrong, "dist.broadcast(x, {root})"))
    with pytest.raises(AssertionError) as caught:
        testing.compare(programs=2, seed=1, world_size=2)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("the program of seed 1: rank ") and len(lines) == 2 and lines[1] == wrong


def test_a_function_without_a_rank_keeps_its_defaults():
    assert testing.spawn(lambda x=3: x, 1, LIMIT) == [3] and testing.spawn(lambda rank=3: rank, 1, LIMIT) == [0]
