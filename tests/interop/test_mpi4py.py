"""kos beside mpi4py in one program: the table of docs/guides/other-libraries.md, row by row, on one set of data."""

import re
from pathlib import Path

from tests.comm.test_jobs import mpirun, program
from tests.launcher import needs_mpirun

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "other-libraries.md"
TEXT = """
import mpi4py.MPI as MPI
from kos.errors import InvalidArgument
world = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)      # other ranks than the world's
n, r = world.size, world.rank
with kos.init(rendezvous=world) as kos_comm:
    assert (kos_comm.rank, kos_comm.size, kos_comm.backend_name) == (r, n, "mpi")

    def run(comm, row):
        x = np.arange(4.0 * n) * (r + 1)
        total, y, part, rows = np.zeros_like(x), np.zeros_like(x), np.zeros(4), np.zeros((n, 4 * n))
        names = dict(comm=comm, MPI=MPI, kos=kos, x=x, total=total, y=y, part=part, rows=rows, dest=(r + 1) % n,
                     src=(r - 1) % n)
        exec(row, names)
        return [a.tolist() for a in (x, total, y, part, rows)]

    for theirs, ours in ROWS:
        assert run(world, theirs) == run(kos_comm, ours), (theirs, ours)
    for wrong in (MPI.COMM_NULL, "MPI.COMM_WORLD"):
        try:
            kos.init(rendezvous=wrong)
        except InvalidArgument:
            pass
        else:
            raise AssertionError(wrong)
print("ok", flush=True)
"""


@needs_mpirun
def test_each_row_of_the_page_does_the_same(tmp_path):
    table = re.findall(r"^\| `(comm\.\w+\(.*?\))` \| `(comm\..*?\))` \|$", PAGE.read_text(), re.M)
    table = [row for row in table if "Wait" not in row[0] and "status" not in row[0]]  # test_any_source.py has these
    assert len(table) == 8
    done = mpirun(3, program(tmp_path, f"ROWS = {table!r}\n{TEXT}"))
    assert (done.returncode, done.stdout.count("ok")) == (0, 3), done.stderr
