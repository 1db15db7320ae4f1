"""Check that the tests see defects: plant one at a time in a copy of the tree, and run the tests that should fail.

    python -m tests.mutations [--tree FOLDER] [--all] [WORD ...]

Each line printed is one mutation: `seen` where a test failed, `MISSED` where all passed.  ``--tree`` names another
checkout, ``--all`` adds the tests marked `slow`, and words choose the mutations whose file or text holds one of them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.launcher import MPIRUN, OUTSIDE
from tests.run import NEVER_STARTED, ROOT

SECONDS = 600  # of one mutation's tests


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    tests: str  # pytest's arguments
    ranks: int = 0  # under mpirun with so many; 0: without


PROVED = "tests/comm/schedules/test_schedule_verify.py -k proved"
MUTANTS = "tests/comm/schedules/test_schedule_verify.py -k mutants"
PEER, ONE_KERNEL = "tests/comm/test_peer_logic.py", "tests/comm/test_peer_compressed.py"
KERNELS, OPERATIONS = "tests/train/test_kernels_on_host.py", "tests/train/test_device_ops.py"
CONFORMANCE = "tests/comm/test_conformance.py"
ROWS = "tests/comm/test_scenarios.py -k "  # of the table of failures
HOST, PHASES = "kos/comm/host/", "kos/comm/gpu/hierarchical.py"
SCHEDULES, PEER_KERNELS, TRAIN = "kos/comm/schedules/", "kos/comm/gpu/kernels/", "kos/train/"
PARALLEL, LAYOUTS = TRAIN + "parallel/", "tests/train/test_layouts.py -k "
LAYERS = TRAIN + "layers/"
TENSOR = "tests/train/test_context_parallel.py -k tied-none-None"
HALVES = "tests/train/test_layouts_on_host.py -k test_layout[tp2-block-2]"
FIXED_ON_HOST = "tests/train/test_layouts_on_host.py -k "
TRAIN_KERNELS = TRAIN + "ops/cuda/kernels/"

MUTATIONS = [
    Mutation(SCHEDULES + "trees.py", "depth * up + level - 1,", "depth * up + level,", PROVED),
    Mutation(SCHEDULES + "trees.py", "k * c + np.arange(c)", "np.arange(c)", PROVED + " and double_tree"),
    Mutation(SCHEDULES + "basic.py", "[Moves(root, others, others * c, count=c)]", "[Moves(root, others, 0, count=c)]",
             PROVED + " and two_shot"),
    Mutation(SCHEDULES + "basic.py", "for k in range(p.bit_length() - 1)", "for k in range(min(p.bit_length() - 1, 5))",
             PROVED + " and halving_doubling"),
    Mutation(SCHEDULES + "basic.py", "yield from ring(r, after, r + 1, n, width=c)",
             "yield from ring(r, after, r, n, width=c)", PROVED + " and all_reduce-ring"),
    Mutation(SCHEDULES + "verify.py", "if a.ranks & b.ranks:", "if False:", MUTANTS),
    Mutation(SCHEDULES + "verify.py", "if slot in touched and not", "if False and not", MUTANTS),
    Mutation(SCHEDULES + "execute.py", "if x[0] < start or x[1] > stop]", "if x[0] < start and x[1] > stop]",
             "tests/comm/schedules/test_schedule_execute.py"),
    Mutation("kos/comm/reduction.py", "self.carrier.type(self.size)", "self.carrier.type(self.size + 1)",
             CONFORMANCE + " -k test_all_reduce"),
    Mutation("kos/comm/reduction.py", "ReduceOp.MIN: np.minimum", "ReduceOp.MIN: np.fmin",
             CONFORMANCE + " -k nan_wins"),
    Mutation("kos/comm/gpu/shared.py", 'self._channel.notify("compare", 0)', "pass",
             "tests/comm/test_gpu_hosts.py -k asks_the_hosts"),
    Mutation(PHASES, "part is self._rail and reduction.op is", "reduction.op is not",
             "tests/comm/test_hierarchical.py -k PREMUL_SUM"),
    Mutation("kos/comm/gpu/backend.py", "self.order.enter(route, streams, route.serial)", "pass",
             "tests/comm/test_hierarchical.py -k follow"),
    Mutation("kos/comm/gpu/backend.py", "self.streams.mark(stream)", "pass",
             "tests/comm/test_hierarchical.py -k follow"),
    Mutation(PHASES, "self.node.inspect(work, self._local)", "pass",
             "tests/comm/test_hierarchical_failures.py -k not_come"),
    Mutation("kos/comm/gpu/routes.py", "o.options.deterministic or o.options.compress", "o.options.compress",
             "tests/comm/test_auto.py -k deterministic"),
    Mutation("kos/comm/gpu/links.py", "- within / links", "", "tests/comm/test_hierarchical.py -k prediction"),
    Mutation("kos/comm/failures.py", "self.reported is None or sequence < self.reported[0]", "self.reported is None",
             "tests/comm/test_failure_log.py -k earliest"),
    Mutation("kos/comm/host/shared/calls.py", "and word & native.WORD_SEQUENCE <= sequence", "",
             "tests/comm/test_shared_failures.py -k earlier_call"),
    Mutation("kos/comm/host/mpi.py", "MPI.SUM if o.reduction.op in _SUMS", "MPI.MAX if o.reduction.op in _SUMS",
             "tests/comm/test_jobs.py -k explain"),
    Mutation("kos/comm/reduction.py", "self.op is ReduceOp.PREMUL_SUM:", "False:", CONFORMANCE + " -k PREMUL", 2),
    Mutation("kos/comm/reduction.py", "BXOR: np.bitwise_xor", "BXOR: np.bitwise_or",
             CONFORMANCE + " -k BXOR"),
    Mutation(SCHEDULES + "basic.py", "to_space=to_space or space)]", "to_space=space)]",
             CONFORMANCE + " -k by_algorithm", 4),
    Mutation(PEER_KERNELS + "channel.cuh", "store_release(context->slab[t] + line() + flag",
             "store_relaxed(context->slab[t] + line() + flag", PEER),
    Mutation(PEER_KERNELS + "packets.cuh", "(((epoch & 1) * SLOTS + slot)", "((SLOTS + slot)", PEER),
    Mutation(PEER_KERNELS + "pieces.cuh", "(unsigned(posted[r]) - 1)", "(unsigned(posted[r]) - 2)", PEER + " -k ahead"),
    Mutation(PEER_KERNELS + "exchange.cu", "|| has_room(q, room);", "|| true;", PEER + " -k back_to_back"),
    Mutation(PEER_KERNELS + "pieces.cuh", "return known != comes &&", "return false &&",
             "tests/comm/test_peer_failures.py -k belong"),
    Mutation("kos/comm/gpu/peer/exchange.py", "several = packets > most and", "several = False and",
             PEER + " -k one_after_the_other"),
    Mutation(PEER_KERNELS + "pieces.cuh", "if (!t && takes &&", "if (false &&", PEER + " -k message_behind"),
    Mutation(PEER_KERNELS + "packets.cuh", "store_relaxed(mine + at, 0);", ";", PEER + " -k epochs"),
    Mutation(PEER_KERNELS + "all_reduce_packets.cu", "else if (r <= last)", "else if (r < last)", PEER + " -k scan"),
    Mutation(PEER_KERNELS + "all_reduce_packets.cu", "return in + ends[(own_rank + k) % RANKS]",
             "return in + ends[(own_rank + k + 1) % RANKS]", PEER + " -k parts_of_any"),
    Mutation(PEER_KERNELS + "all_reduce_push.cu", "return blockIdx.x * parts[r].share +",
             "return blockIdx.x * parts[0].share +", PEER + " -k parts_of_any"),
    Mutation(PEER_KERNELS + "all_reduce_push.cu", "longest = max(longest, parts[r].share);",
             "longest = parts[own_rank].share;", PEER + " -k back_to_back"),
    Mutation(PEER_KERNELS + "all_reduce_compressed.cu", "+ ADDED + 4 * t, before)", "+ 252, before)",
             ONE_KERNEL + " -k counted"),
    Mutation(PEER_KERNELS + "all_reduce_compressed.cu", "channel.await(ADDED, before + g, t, 2)", "void()",
             ONE_KERNEL + " -k back_to_back"),
    Mutation(PEER_KERNELS + "all_reduce_compressed.cu", "if (r == rank) one = own;", "", ONE_KERNEL + " -k in_graphs"),
    Mutation(PEER_KERNELS + "codec.cuh", "inverse = __fmaf_rn(__fmaf_rn(-scale, about, 1.f), about, about)",
             "inverse = about", ONE_KERNEL + " -k back_to_back"),
    Mutation("kos/comm/gpu/peer/copies.py", "in (0, capture):", "is not None:",
             "tests/comm/test_peer_memory.py -k beside_the_capture"),
    Mutation("kos/comm/collectives.py", "ranks = o.root, o.send_counts, o.recv_counts",
             "ranks = o.root, o.send_counts, None", "tests/comm/test_repeated.py -k receives"),
    Mutation("kos/comm/collectives.py", "overlap = x is not first and", "overlap = False and",
             "tests/comm/test_cached_calls.py -k on_threads"),
    Mutation(PEER_KERNELS + "reduce_ordered.cu", "x[0] = Op::combine(x[0], x[r]);", "x[0] = Op::combine(x[r], x[r]);",
             "tests/comm/test_nccl_kernels.py"),
    Mutation(TRAIN_KERNELS + "norms.cu", "* (1.0f / D) + eps);", "* (1.0f / D));", OPERATIONS + " -k norm"),
    Mutation(TRAIN_KERNELS + "norms.cu", "__syncthreads();", ";", OPERATIONS + " -k norm"),
    Mutation(TRAIN_KERNELS + "optimizer.cu", "if (!good && !(outlier > 0)) state->halted = 1;", "",
             KERNELS + " -k adamw"),
    Mutation(TRAIN_KERNELS + "adamw.cu", "(1 - beta2) * (g * g)", "(1 - beta2) * g", KERNELS + " -k adamw"),
    Mutation(TRAIN + "optim/adamw.py", "root = 1 / math.sqrt(1 - beta2**number)", "root = 1.0",
             KERNELS + " -k adamw"),
    Mutation(TRAIN + "train.py", "total = config.batch_size // config.micro_batch_size", "total = 1",
             "tests/train/test_loop.py -k number_of_ranks"),
    Mutation(TRAIN + "elastic.py", "if run.device.applied < applied:", "if False:",
             "tests/train/test_elastic.py -k behind"),
    Mutation(TRAIN + "elastic.py", "unfinished = min(", "unfinished = 0 and min(",
             "tests/train/test_elastic.py -k validation"),
    Mutation(TRAIN + "elastic.py", "stop = min(part.stop, end)", "stop = part.stop",
             "tests/train/test_elastic.py -k within"),
    Mutation(TRAIN + "elastic.py", "late - shrinks, tries - (not shrinks)", "late, tries - 1",
             "tests/train/test_elastic_joins.py -k others_grow"),
    Mutation(TRAIN + "train.py", "if self.elastic:", "if True:", "tests/train/test_elastic.py -k agree_on"),
    Mutation(PARALLEL + "failures.py", "if self.wish == STOP and", "if self.asked and",
             "tests/train/test_elastic.py -k asked_before_the_first"),
    Mutation(TRAIN_KERNELS + "optimizer.cu", "if (theirs[1] != report[1] || ", "if (", KERNELS + " -k same_step"),
    Mutation(PARALLEL + "gradients.py", "micro_batch > 0, final", "False, final",
             "tests/train/test_step.py -k gradient"),
    Mutation(TRAIN + "model/initial.py", "name.encode()), number]", "name.encode()), 0]",
             "tests/train/test_model.py -k init_weights"),
    # Each collective of each parallelism.
    Mutation(PARALLEL + "tensor.py", "gather(x_nD[half.own]", "gather(0 * x_nD[half.own]", TENSOR),
    Mutation(PARALLEL + "tensor.py", "scatter(term_ND[half.rows]", "scatter(0 * term_ND[half.rows]", TENSOR),
    Mutation(PARALLEL + "tensor.py", "            work.wait()\n        return out", "            pass\n"
             "        return out", HALVES),
    Mutation(LAYERS + "linear.py", "wait()\n            if later:", "if later:", HALVES),
    Mutation(PARALLEL + "tensor.py", "slice(*map(self.rows, each))", "slice(0, self.rows(tokens) // count)", HALVES),
    Mutation(TRAIN + "model/model.py", "            for _ in itertools.zip_longest(*turns):\n                pass",
             "            for turn in turns:\n                for _ in turn:\n                    pass",
             FIXED_ON_HOST + "test_layout[tp2-True-norms-False]"),
    Mutation(LAYERS + "vocabulary.py", "tp.axis.comm.all_gather(mine, of_all)", "of_all[:] = mine", TENSOR),
    Mutation(PARALLEL + "tensor.py", "self.axis.comm.all_reduce(gradient)", "pass", LAYOUTS + "test_layout[tp2-2]"),
    Mutation(PARALLEL + "pipeline.py", "self._ends.all_reduce(gradient)", "pass",
             LAYOUTS + "test_layout[pp2-5-tied-1f1b]"),
    Mutation(PARALLEL + "data.py", "comm.all_reduce(x, async_op=True, compress=form)",
             "comm.all_gather(x[:1], async_op=True)", LAYOUTS + "test_layout[dp2-2-tied]"),
    Mutation(PARALLEL + "context.py", "self.ops.add(d_kv, d_mine, d_kv)", "pass",
             "tests/train/test_context_parallel.py"),
    Mutation(TRAIN + "train.py", "((self.sums.replicated, self.mesh.tp), (", "((set(), self.mesh.tp), (",
             LAYOUTS + "test_layout[tp2-2]"),
    Mutation(TRAIN + "train.py", "(self.sums.copied, self", "(set(), self", LAYOUTS + "kv_heads[tp4-2]"),
    Mutation(TRAIN + "train.py", "twice = {self.models[0].config.embedding} if", "twice = set[str]() if",
             LAYOUTS + "test_layout[pp2-5-tied-1f1b]"),
    Mutation(PARALLEL + "tensor.py", "self.copies.comm.all_reduce(gradient)", "pass", LAYOUTS + "kv_heads[tp4-2]"),
    Mutation(LAYERS + "__init__.py", "shard // copies * size", "shard * size",
             "tests/train/test_checkpoint_layouts.py -k copies"),
    Mutation(TRAIN + "data/tokenizers.py", 'np.searchsorted(ends, at, side="right")', "np.searchsorted(ends, at)",
             "tests/train/test_loss_masks.py tests/train/test_chats.py"),
    Mutation(TRAIN + "optim/__init__.py", "sums = others.comm.all_gather(np.array(math.fsum(sums)))", "pass",
             LAYOUTS + "test_layout[pp2-3]"),
    Mutation(TRAIN + "checkpoint/state.py", "tp.comm.all_gather(piece, buffer[: tp.size * size])", "pass",
             "tests/train/test_checkpoint_layouts.py"),
    Mutation(TRAIN + "checkpoint/state.py", "range(0, tp.size, placement.copies)", "range(tp.size)",
             "tests/train/test_checkpoint_layouts.py -k copies"),
    Mutation(TRAIN + "checkpoint/state.py", "parallel.all_gather(bucket, values)", "pass",
             "tests/train/test_checkpoint_layouts.py"),
    # The order of sums, with --deterministic.
    Mutation(TRAIN + "ops/fixed_order.py", "self.pieces * math.gcd(self.split.features, of_piece) // self.tp.size", "1",
             LAYOUTS + "test_deterministic[tp2-2-32-8]"),
    Mutation(TRAIN + "ops/fixed_order.py", "axis.comm.all_to_all(x, terms)", "terms[:] = x.reshape(terms.shape)",
             LAYOUTS + "test_deterministic[tp2-2-32-8]"),
    Mutation(PARALLEL + "context.py", "self.axis.comm.all_gather(mine, of_ranks)", "of_ranks[:] = mine",
             LAYOUTS + "test_deterministic[cp2-2-256-8]"),
    Mutation(LAYERS + "vocabulary.py", "name = LOOKUPS if LOOKUPS in of else self", "name = self",
             FIXED_ON_HOST + "test_deterministic[pp2-1f1b-True]"),
    Mutation(TRAIN + "device/cuda.py", "exact=sum(sizes.values()) if config.deterministic else 0", "exact=0",
             FIXED_ON_HOST + "test_deterministic[pp2-1f1b-True]"),
    Mutation(TRAIN + "device/cuda.py", "places=dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), "
             "strict=False))", "places=None", FIXED_ON_HOST + "test_deterministic[dp2-pp2-zero-bubble-v-none-False-1]"),
    Mutation(PARALLEL + "gradients.py", "finish(whole=self.tied_apart)", "finish()",
             "tests/train/test_deterministic.py -k shards_cut"),
    Mutation(TRAIN + "ops/fixed_order.py", "for n in self.rows(len(d_out)):", "for n in [slice(None)]:",
             FIXED_ON_HOST + "shapes_of_one_rank"),
    Mutation(TRAIN + "ops/fixed_order.py", "sum_over_ranks(self.inner, self.arena, self.cp, out)", "pass",
             FIXED_ON_HOST + "test_deterministic[cp2-True-16]"),
    Mutation(PARALLEL + "context.py", "for owner in range(self.chunks // 2):",
             "for owner in dict.fromkeys([*self.mine, *range(self.chunks // 2)]):",
             FIXED_ON_HOST + "test_deterministic[cp2-True-16]"),
    Mutation(TRAIN_KERNELS + "optimizer.cu", "high = exact ? rint(square * per_unit) * unit : square", "high = square",
             KERNELS + " -k cuts"),
    Mutation(PARALLEL + "data.py", "stack[-2][1] == stack[-1][1] and ", "",
             "tests/train/test_data_parallel.py -k tree"),
    # What one kind of host memory, or one backend, sees for the others.
    Mutation(HOST + "shared/calls.py", "self.raise_mismatch(o.group, sequence, local)", "pass",
             "tests/comm/test_scenarios.py -k on_mpi and shared and calls", 2),
    Mutation(HOST + "shared/calls.py", "self.mark_closed(CLOSED_ORDERLY)", "pass", "tests/comm/test_calls.py -k gone"),
    Mutation("kos/comm/failures.py", "next(filter(None, (each.find_failure() for each in self.reporters.copy()))",
             "next(filter(None, ())", "tests/comm/test_on_failure.py -k is_reported"),
    Mutation("kos/comm/watchdog.py", "failure is not None and backend.failures.first is None", "False",
             "tests/comm/test_on_failure.py -k cause"),
    Mutation(HOST + "shared/calls.py", "        killed = self.killed()\n", "        killed = None\n",
             "tests/comm/test_on_failure.py -k mpi"),
    Mutation(HOST + "host_backend.py", "Late(late, timeouts.late(names(late)))", 'Late(late, "")',
             "tests/comm/test_shared_failures.py -k comes_late"),
    Mutation(HOST + "host_backend.py", "Late(late, timeouts.awaited(names(late)))", "Late(late, timeouts.UNKNOWN)",
             "tests/comm/test_last_messages.py -k another_one_is_late"),
    Mutation(HOST + "host_backend.py", "os.register_at_fork(after_in_child=_open.clear)", "",
             "tests/comm/test_jobs.py -k forked"),
    Mutation(HOST + "tcp.py", "ABORT, str(self.failures.first or reason)", 'ABORT, ""',
             "tests/comm/test_host_messages.py -k announced_message"),
    # What the table of failures sees.
    Mutation(HOST + "tcp.py", "WHY_CLOSED, self.failures.closing(), begun)", "WHY_CLOSED, None, begun)",
             ROWS + "on_tcp and none and elsewhere"),
    Mutation(HOST + "threads.py", "if theirs.prepared.values != work.prepared.values:", "if False:",
             ROWS + "on_threads and differ"),
    Mutation(HOST + "mpi.py", "if sequence == o.sequence and theirs[1] != mine[1]:", "if False:",
             ROWS + "on_mpi and none and differ", 2),
    Mutation(HOST + "mpi.py", "if failures.reported is not None:\n            return failures.reported",
             "if False:\n            return failures.reported", ROWS + "on_mpi and none and sender", 2),
    Mutation("kos/comm/failures.py", "if known is not None and known.ranks:", "if known is self.first is not None:",
             ROWS + "on_threads and elsewhere"),
    Mutation("kos/comm/failures.py", "return last if last is not None and last.ranks else None", "return None",
             ROWS + "elsewhere and not mpi"),
    Mutation("kos/comm/gpu/watched.py", "return self.shared.late(work, super().late(work).words)", "return None",
             "tests/comm/test_scenarios_on_fakes.py -k peer and all_reduce and late"),
    Mutation(HOST + "shared/calls.py", "if closed == CLOSED_ORDERLY:", "if False:",
             ROWS + "on_tcp and shared and closes"),
    Mutation(HOST + "shared/calls.py", "self._causes().failure(failures.world[rank]) or (None, 0.0)", "(None, 0.0)",
             ROWS + "on_tcp and shared and elsewhere"),
    Mutation(TRAIN + "tools/console.py", "except OSError:  # the reader", "except KeyError:  # the reader",
             "tests/train/test_cli.py -k nobody_takes"),
]


def verdict(tree: Path, mutation: Mutation, quick: str) -> str:
    """What became of one mutation of this tree."""
    with tempfile.TemporaryDirectory(prefix="kos-mutation-") as folder:
        copy = Path(folder) / "kos-tree"
        shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".*", "build", "runs", "__pycache__", "results"))
        (copy / "build").mkdir()
        (tree / "build" / "kernels").mkdir(parents=True, exist_ok=True)
        (copy / "build" / "kernels").symlink_to(tree / "build" / "kernels")  # by their text: those that are unchanged
        path = copy / mutation.file
        text = path.read_text() if path.exists() else ""
        if mutation.old not in text:
            return "is not there"
        path.write_text(text.replace(mutation.old, mutation.new, 1))
        chosen = mutation.tests.split(" -k ")
        options = ["-q", "--tb=no", "-p", "no:cacheprovider", "--timeout=100", *chosen[0].split()]
        options += ["-k", chosen[1]] if chosen[1:] else []
        options += ["--with-mpi", "-m", f"mpi{quick}"] if mutation.ranks else ["-x", "-m", f"not mpi{quick}"]
        launcher = [MPIRUN, "-n", str(mutation.ranks)] if mutation.ranks else []
        environment = {**OUTSIDE, "PYTHONPATH": f"{copy}:{os.environ.get('PYTHONPATH', '')}", "MPIRUN": MPIRUN}
        process = subprocess.Popen(
            [*launcher, sys.executable, "-m", "pytest", *options], cwd=copy, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + "\nhangs"
        lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        last = (lines or output.splitlines() or [""])[-1]
        if process.returncode == NEVER_STARTED:
            return "mpirun did not start"
        return ("seen" if process.returncode not in (0, 5) else "MISSED") + f"  {last[:100]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant defects and see whether the tests fail.")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    missed = 0
    for number, mutation in enumerate(MUTATIONS, 1):
        if asked.words and not any(word in f"{mutation.file} {mutation.old} {mutation.new}" for word in asked.words):
            continue
        became = verdict(asked.tree.resolve(), mutation, "" if asked.all else " and not slow")
        missed += not became.startswith("seen")
        print(f"{number:2} {mutation.file}: {mutation.old} -> {mutation.new or 'nothing'}: {became}", flush=True)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
