"""A rank of ``benchmarks.train``: begins CUDA before it imports what takes time, as ``python -m kos.train`` does."""

import sys

from kos.train.engine import head_start

if __name__ == "__main__":
    head_start.begin_cuda(sys.argv[1:])
    from benchmarks.train import main

    raise SystemExit(main())
