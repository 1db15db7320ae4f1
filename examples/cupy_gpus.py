"""CuPy on several GPUs: sums of CuPy arrays where they lie, on CuPy's current stream, and in a CUDA graph.

mpirun -n 2 python examples/cupy_gpus.py
"""

import cupy
import numpy as np

import kos

COUNT = 1 << 20


def main():
    with kos.init() as comm, cupy.cuda.Device(comm.device):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            x = cupy.full(COUNT, comm.rank + 1, cupy.float32)
            comm.all_reduce(x)  # in place, after the fill: the host waits for neither
            shards = comm.reduce_scatter(x)  # a new CuPy array
            total = float(cupy.sqrt(shards).sum())  # CuPy's own kernels follow on the same stream
        assert np.isclose(total, COUNT / comm.size * np.sqrt(comm.size**2 * (comm.size + 1) / 2), rtol=1e-4)

        y = cupy.asarray(comm.allocate(COUNT, np.float32))  # memory that kos moves fastest, as a CuPy array
        with stream:
            y[:] = 1
            stream.begin_capture()
            comm.all_reduce(y, kos.ReduceOp.AVG)
            y += 1
            graph = stream.end_capture()
            for _ in range(3):
                graph.launch()
            assert (y == 4).all()
        del graph  # before its communicator is closed: NCCL waits for graphs with its calls
        if comm.rank == 0:
            print(f"{comm.size} GPUs by {comm.backend_name}: {total:,.0f}", flush=True)


if __name__ == "__main__":
    main()
