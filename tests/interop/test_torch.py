"""torch.distributed over kos, on CPUs: operations, errors, and what is built on them gives what gloo gives."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from kos.errors import InvalidArgument
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import free_port
from tests.comm.test_jobs import environment
from tests.forked import PATHS
from tests.interop.ranks import LATE, run
from tests.launcher import MPIRUN, needs_mpirun, run_program

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
PROGRAMS, MODELS = "tests.interop.torch_programs", "tests.interop.torch_model_programs"
ROOT = Path(__file__).resolve().parents[2]
SLOW = pytest.param("ddp_hooks", marks=pytest.mark.slow)
BUILT_ON_IT = ["ddp", "ddp_join", "fsdp1", "fsdp", "tensor_parallel", "pipeline", SLOW]


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_give_what_gloo_gives(size):
    assert run(f"{PROGRAMS}:collectives", size) == run(f"{PROGRAMS}:collectives", size, "gloo")


@pytest.mark.parametrize("backend", ["kos", "gloo"])
def test_ddp_with_compressed_gradients(backend):
    """Beside a group of kos, and of another backend: near the losses of exact gradients, the same model everywhere."""
    exact = run(f"{MODELS}:compressed", 2, backend, "none")
    for name, most in [("fp8", 0.02), ("int8", 0.01), ("int4", 0.05)][: 3 if backend == "kos" else 1]:
        for mine, theirs in zip(run(f"{MODELS}:compressed", 2, backend, name), exact, strict=True):
            assert mine[0] == theirs[0] and mine[1:100] != theirs[1:], "was it compressed?"
            assert abs(sum(mine[50:100]) / sum(theirs[50:]) - 1) < most


def test_compress_takes_ddp_only():
    import torch

    from kos.interop.torch import compress

    with pytest.raises(InvalidArgument, match="model: expected a DistributedDataParallel, got Linear"):
        compress(torch.nn.Linear(3, 3), "int8")


def test_booleans_are_true_if_their_bytes_are_not_0():
    either, both = [1, 1, 0], [1, 0, 0]
    found = {"SUM": either, "PRODUCT": both, "MIN": both, "MAX": either, "BAND": both, "BOR": either, "BXOR": [0, 1, 0]}
    assert run(f"{PROGRAMS}:booleans") == [found] * 2


def test_a_gather_to_one_tensor():
    assert run(f"{PROGRAMS}:gather_single") == [[], [2.0, 2.0, 12.0, 12.0]]


def test_groups_take_the_other_overloads_of_their_methods():
    assert run(f"{PROGRAMS}:overloads") == run(f"{PROGRAMS}:overloads", backend="gloo")


def test_storages_can_be_resized_after_an_operation():
    assert run(f"{PROGRAMS}:resized") == [[64] * 4] * 2


def test_operations_are_in_the_profiles_of_torch():
    assert run(f"{PROGRAMS}:profiled") == [["kos:allreduce", "kos:broadcast"]] * 2


def test_messages_give_what_gloo_gives():
    assert run(f"{PROGRAMS}:messages") == run(f"{PROGRAMS}:messages", 2, "gloo")


def test_receives_from_any_rank_give_what_gloo_gives():
    """Sizes and dtypes differ between messages with one tag, also from a named rank."""
    found = run(f"{PROGRAMS}:any_source", 3)
    assert found == run(f"{PROGRAMS}:any_source", 3, "gloo")
    assert found[0][0] == [[1, [1.0]], [2, [2.0]]] and found[0][3] == [2] * 4


def test_a_receive_from_any_rank_that_nobody_answers_ends_with_the_group():
    """The rank that is later may see first that the other one has closed its communicator."""
    errors, own = run(f"{PROGRAMS}:any_source_left_over"), "recv: the process group was closed"
    for error in errors:
        assert error.endswith((own, "is gone: it closed its communicator")), error
    assert any(error.endswith(own) for error in errors), errors


def test_a_group_can_be_named_by_device():
    assert run(f"{PROGRAMS}:messages", 2, "cpu:kos,cuda:kos") == run(f"{PROGRAMS}:messages", 2, "gloo")


def test_a_split_of_a_group_and_its_timeout():
    (sums, wrong, late), outside, _ = run(f"{PROGRAMS}:split", 3)
    assert sums == [[4.0], "pair", 2] and outside == []
    assert wrong == "InvalidArgument: timeout: expected a positive number of seconds, got 0.0"
    assert "caught collective operation timeout in process group pair" in late


def test_errors_name_what_was_expected():
    texts = run(f"{PROGRAMS}:group_errors")[0]
    sparse, parts, missing, unknown, meta, fake, expanded, negative, mismatch, timeout = texts
    assert "allreduce: expected dense tensors, all on cpu, got one of torch.sparse_coo on cpu" in sparse
    assert "allgather: expected a list of 2 tensors, one for each rank, got 1" in parts
    assert "count 3 against 4" in mismatch
    assert missing == "TypeError: broadcast: expected (tensors, opts) or (tensor, root, timeout), got 0 and ['root']"
    assert "reduce: expected (tensors, opts) or (tensor, root, op, timeout), got 2 and ['rank']" in unknown
    assert "allreduce: expected tensors in host or GPU memory, got Tensor on meta" in meta
    assert "allreduce: expected tensors in host or GPU memory, got FakeTensor on cpu" in fake
    assert negative == "InvalidArgument: timeout: expected a positive number of seconds, got -1.0"
    assert "expected a result whose elements do not share memory, got strides (0,)" in expanded
    assert "caught collective operation timeout in process group" in timeout and LATE in timeout


def test_call_sites_are_those_of_the_program():
    """Also those of functional collectives, which C++ calls, and of the all-reduces in a backward of DDP."""
    for sites, first, last in run(f"{PROGRAMS}:call_sites"):
        assert len(sites) >= 12, sites
        assert all(file == "torch_programs.py" and first < line < last for file, line in sites), sites


@needs_core
def test_a_monitored_barrier_names_the_missing_ranks():
    none, first, every = run(f"{PROGRAMS}:monitored", 3)[0]
    assert "Rank 0 timed out in monitoredBarrier after 0 s" in none
    assert first.endswith("ranks [1, 2] did not arrive: Rank 1 failed to pass monitoredBarrier")
    assert every.endswith("ranks [1, 2] did not arrive: Ranks 1, 2 failed to pass monitoredBarrier")


def test_a_backend_for_gpus_that_does_not_exist():
    from kos.interop.torch import Options

    with pytest.raises(InvalidArgument, match="gpu: expected auto, nccl or peer, got 'foo'"):
        Options(gpu="foo")


def test_the_death_of_a_rank_is_raised_soon():
    text, seconds, *later = run(f"{PROGRAMS}:killed")[0]
    assert "rank 1 is gone" in text and seconds < 30
    assert len(later) == 3 and all("DistBackendError" in each and "rank 1 is gone" in each for each in later), later


def test_a_result_that_cannot_be_copied_fails_its_future_alone():
    failed, later = run(f"{PROGRAMS}:failed_copy")[0]
    assert "it cannot be written to" in failed and later == "[2.0, 2.0, 2.0]"


def test_a_closed_group_raises():
    (destroyed, aborted), (_, others) = run(f"{PROGRAMS}:use_after_destroy")
    assert "is closed" in destroyed and "is closed" in aborted
    assert "rank 0 is gone: it aborted the process group" in others


def test_a_communicator_of_kos_among_the_ranks_of_a_group():
    found = run(f"{PROGRAMS}:communicator", 3, "gloo")
    outside = ["group: expected one that has this rank, got one without it"]
    assert found == [outside, ["tcp", 0, [3.0] * 3, True], ["tcp", 1, [3.0] * 3, True]]


@pytest.mark.parametrize("program", BUILT_ON_IT)
def test_what_is_built_on_it_gives_the_losses_of_gloo(program):
    ours = run(f"{MODELS}:{program}")
    assert ours == run(f"{MODELS}:{program}", 2, "gloo") and any(ours)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="Accelerate is not installed")
def test_a_program_of_accelerate_has_the_losses_of_gloo():
    def launched(backend):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
        command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        command += ["--main_process_port", str(free_port()), "tests/interop/accelerate_program.py", backend]
        env = os.environ | {"PYTHONPATH": PATHS, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    (kind, used, losses), (_, _, expected) = launched("kos"), launched("gloo")
    assert (kind, used) == ("DistributedDataParallel", "kos") and losses == expected and len(losses) == 4


def test_a_sharded_checkpoint_continues_with_the_same_losses(tmp_path):
    ours = run(f"{MODELS}:checkpoint", 2, "kos", str(tmp_path / "kos"))
    assert ours[0][0] == ours[0][1]
    assert ours == run(f"{MODELS}:checkpoint", 2, "gloo", str(tmp_path / "gloo"))


@needs_mpirun
def test_the_program_of_the_guide_started_by_mpirun_as_the_guide_says(tmp_path):
    guide = (ROOT / "docs" / "guides" / "pytorch.md").read_text()
    patterns = r"```python\n(.*?)```", r"mpirun -n.*?py'"
    program, command = (re.findall(pattern, guide, re.DOTALL)[0] for pattern in patterns)
    check = "assert x.tolist() == [2.0] * 4 and dist.get_backend() == 'kos', x\n"
    (tmp_path / "program.py").write_text("import kos.interop.torch\n" + program.replace("model =", f"{check}model ="))
    path = os.pathsep.join([str(Path(sys.executable).parent), str(Path(MPIRUN).parent), os.environ["PATH"]])
    env = environment() | {"PATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run_program("sh", "-c", command, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr


def test_torch_registers_it_by_its_entry_point(tmp_path):
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    (tmp_path / "kos-0.dist-info").mkdir()
    (tmp_path / "kos-0.dist-info" / "METADATA").write_text("Name: kos\nVersion: 0\n")
    lines = ["[torch.backends]", *(f"{name} = {place}" for name, place in table.items())]
    (tmp_path / "kos-0.dist-info" / "entry_points.txt").write_text("\n".join(lines))
    code = "import sys, json, torch.distributed as dist\n"
    code += "print(json.dumps(['kos' in dist.Backend.backend_list, 'kos.comm' in sys.modules]))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), PATHS]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, False]
