"""Collectives of kos and other libraries, measured: ``mpirun -n 4 kos bench``.

Rows read like those of nccl-tests (https://github.com/NVIDIA/nccl-tests): size, count, type, redop, time, algbw,
busbw and #wrong, out of place and in place.  What differs:

- Three modes.  ``eager``: a batch of calls back to back, as a training step makes them.  ``graph`` (GPUs): the
  same batch captured in a CUDA graph and replayed, after an untimed graph that runs for 200 us or more.
  ``single_shot``: each call alone after a barrier, from the call to its result, which is what a user who waits for
  it sees.
- Implementations take turns, batch by batch, so that other load on the machine affects all of them alike.
- ``time_us`` is the median and ``p99_us`` the 99th percentile of the samples: single calls in ``single_shot``,
  the mean call of a batch otherwise.  The slowest rank counts.
- ``cpu_us``: for host memory the CPU time of a rank per call (its threads, system calls included), where waiting
  is spinning; on a GPU the time until the call has returned to its caller; in ``graph`` mode that of the replay
  divided by its operations.  One rank (``mpirun -n 1``) and 4 bytes show Python's cost of a call,
  beside that of the library's own.
- ``sms``: in ``graph`` mode the thread blocks of the call's largest kernel, at most the SMs of the GPU.

The data of every timed call is checked.  A batch has a slot, with its own input and output, for each of its calls.
Before the batch, all outputs are poisoned and all inputs are written, with values that follow from (seed, rank,
iteration, position) and differ between neighbouring iterations.  Then the calls are timed.  Then every element of every
output is compared with the expected value, bit by bit.  ``wrong`` counts the elements that differ over all ranks and
iterations.  The values are small integers, so that sums are exact in the type and independent of their order.

The operations that end in ``_v`` have uneven parts: ranks 0, 2, ... have half of an equal part, ranks 1, 3, ... one and
a half.  The last of an odd number of ranks has an equal part.  In ``all_to_all_v`` a rank's piece for itself has the
first of these sizes, its piece for the next rank the second, and so on.  NCCL has no such functions: its rows are
groups of sends and receives, and groups of reduces for ``reduce_scatter_v``.

``routing`` is measured only if it is named.  It is the ``all_to_all_v`` of a mixture of experts.  Each token has 7,168
elements and goes to the ranks of its 8 of 64 experts, once to each rank.  The experts are drawn uniformly, with a fixed
seed.  A size is that of a rank's tokens: ``--collective routing --dtype bfloat16 --sizes 1792K,112M`` is 128 and 8,192
tokens a rank.  Its busbw is what the busiest rank sends to others, or receives from them, over the time.

``--arrays 1,100`` measures calls on the same array, and on 100 arrays in rotation, fewer if they exceed 64 MB.  A batch
calls many times on each, out of place (broadcast: in place), and is checked at its end.  It adds rows of ``async_op``
with ``wait``, of Open MPI once more (``mpi-again``: how much it differs from itself is noise), and of Open MPI called
from C as the OSU micro-benchmarks do (``mpi-c``, where mpicc is found).  A table has the times as ratios to Open MPI's.

``barrier`` is measured only if it is named, without a size: its rows show one element, which no call moves.

``limit_us`` is the physical limit of the row.  On hosts every rank must read its input and write its output.  So
it is the time in which all ranks at once copy as many bytes, plus one flag's way to another rank and back.  Slots,
batches and mode are those of the row.  On GPUs it is the sum of three times: the launch of an empty kernel in a
graph, half a flag's round trip, and busbw factor x bytes / bandwidth of a pair.  All are measured in the same run
(``limits.py``).
"""
