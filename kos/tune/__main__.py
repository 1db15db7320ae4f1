"""``mpirun -n N python -m kos.tune``: measure the tuning table of this machine."""

import sys

from kos.tune.measure import main

if __name__ == "__main__":
    sys.exit(main())
