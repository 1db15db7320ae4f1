"""Collectives of kos and other libraries, measured: ``mpirun -n 4 kos bench``.

The rows have the columns of nccl-tests (https://github.com/NVIDIA/nccl-tests): size, count, type, redop, time, algbw,
busbw and #wrong, out of place and in place.  These things are different:

- There are three modes.  ``eager`` measures a batch of calls, one directly after the other, as a training step makes
  them.  ``graph`` (GPUs) captures the same batch in a CUDA graph and measures its replay, after an untimed graph that
  runs for 200 us or more.  ``single_shot`` measures each call alone, after a barrier, from the call to its result.
  This is the time that a user who waits for the result sees.
- Implementations take turns, batch by batch, so that other load on the machine affects all of them equally.
- ``time_us`` is the median of the samples, and ``p99_us`` their 99th percentile, on the slowest rank.  A sample is one
  call in ``single_shot``, otherwise the mean call of a batch.
- ``cpu_us`` for host memory is the CPU time of a rank per call, with its threads and system calls.  It includes the
  time in which the rank waits, because a waiting rank spins.  On a GPU, it is the time until the call returns; in
  ``graph`` mode, it is the time until the replay returns, divided by the number of operations in it.  One rank
  (``mpirun -n 1``) and 4 bytes show what Python adds to a call, beside the cost of the library.
- ``sms``, in ``graph`` mode, is the number of thread blocks of the call's largest kernel, at most the SMs of the GPU.

The data of every timed call is checked.  A batch has a slot, with its own input and output, for each of its calls.
Before the batch, all outputs are filled with NaN, and all inputs with values that follow from (seed, rank, iteration,
position) and differ between neighbouring iterations.  Then the calls are timed.  Then every element of every output is
compared with the expected value, bit by bit.  ``wrong`` counts the elements that differ over all ranks and
iterations.  The values are small integers, so that sums are exact in the type and independent of their order.

The operations that end in ``_v`` have uneven parts: ranks 0, 2, ... have half of an equal part, ranks 1, 3, ... one and
a half.  The last of an odd number of ranks has an equal part.  In ``all_to_all_v``, what a rank sends to itself has the
first of these sizes, what it sends to the next rank has the second, and so on.  NCCL has no such functions.  Its rows
are groups of sends and receives, or for ``reduce_scatter_v`` groups of reduces.

``routing`` is measured only if it is named.  It is the ``all_to_all_v`` of a mixture of experts.  Each token has 7,168
elements and goes to the ranks of its 8 experts out of 64, once to each rank.  The experts are drawn uniformly, with a
fixed seed.  The size is that of the tokens of a rank: ``--collective routing --dtype bfloat16 --sizes 1792K,112M``
measures 128 and 8,192 tokens per rank.  The busbw of a row is the number of bytes that the busiest rank sends to
others, or receives from them, divided by the time.

``--arrays 1,100`` measures calls on the same array, and on 100 arrays in rotation (fewer, if these exceed 64 MB).  A
batch has many calls on each array, out of place (broadcast: in place), and is checked at its end.  There are further
rows: calls with ``async_op`` and ``wait``; Open MPI measured a second time (``mpi-again``), which shows the noise; and
Open MPI called from C, as the OSU micro-benchmarks do (``mpi-c``, if mpicc is found).  A table has the times of kos
divided by those of Open MPI.

``mpirun -n N kos bench --write-table`` measures the table by which ``auto`` chooses between ``peer`` and ``nccl``, with
a rank for each GPU: every operation and size, in graphs and as eager calls, and every kernel of peer's all-reduce.
Ranks on several hosts measure phases (``hierarchical``) and ``nccl`` instead, for this number of hosts.

``barrier`` is measured only if it is named, and without a size: its rows show one element, which no call moves.

``limit_us`` is the physical limit of the row.  On hosts, every rank must read its input and write its output.  So the
limit is the time in which all ranks at once copy as many bytes, plus the round trip of a flag to another rank.  Slots,
batches and mode are those of the row.  On GPUs, it is the sum of three times: the launch of an empty kernel in a
graph, half the round trip of a flag, and busbw factor x bytes / bandwidth of a pair.  All are measured in the same run
(``limits.py``).
"""
