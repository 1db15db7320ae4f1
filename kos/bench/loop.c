// MPI's collectives called back to back from C, as the OSU micro-benchmarks call them: what no call from Python is
// faster than.  Built by loop.py with mpicc.
#include <mpi.h>

// In the order of loop.py.
enum {
    BARRIER, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND_RECV,
    ALL_GATHER_V, REDUCE_SCATTER_V, ALL_TO_ALL_V, GATHER_V, SCATTER_V, SCAN, EXSCAN,
};

static MPI_Comm comm;

int setup(void) { return MPI_Comm_dup(MPI_COMM_WORLD, &comm); }

int teardown(void) { return MPI_Comm_free(&comm); }

// One call: `count` floats of the input, `received` of the output, of each rank.  The counts and places of v-forms by
// rank: of what is sent, then of what is received.
static int one(int op, void *x, void *y, int count, int received, const int *sent, const int *from, const int *got,
               const int *to, int right, int left) {
    switch (op) {
    case BARRIER: return MPI_Barrier(comm);
    case ALL_REDUCE: return MPI_Allreduce(x, y, count, MPI_FLOAT, MPI_SUM, comm);
    case REDUCE: return MPI_Reduce(x, y, count, MPI_FLOAT, MPI_SUM, 0, comm);
    case BROADCAST: return MPI_Bcast(x, count, MPI_FLOAT, 0, comm);
    case ALL_GATHER: return MPI_Allgather(x, count, MPI_FLOAT, y, count, MPI_FLOAT, comm);
    case REDUCE_SCATTER: return MPI_Reduce_scatter_block(x, y, received, MPI_FLOAT, MPI_SUM, comm);
    case ALL_TO_ALL: return MPI_Alltoall(x, got[0], MPI_FLOAT, y, got[0], MPI_FLOAT, comm);
    case GATHER: return MPI_Gather(x, count, MPI_FLOAT, y, count, MPI_FLOAT, 0, comm);
    case SCATTER: return MPI_Scatter(x, received, MPI_FLOAT, y, received, MPI_FLOAT, 0, comm);
    case SEND_RECV:
        return MPI_Sendrecv(x, count, MPI_FLOAT, right, 0, y, count, MPI_FLOAT, left, 0, comm, MPI_STATUS_IGNORE);
    case ALL_GATHER_V: return MPI_Allgatherv(x, count, MPI_FLOAT, y, got, to, MPI_FLOAT, comm);
    case REDUCE_SCATTER_V: return MPI_Reduce_scatter(x, y, got, MPI_FLOAT, MPI_SUM, comm);
    case ALL_TO_ALL_V: return MPI_Alltoallv(x, sent, from, MPI_FLOAT, y, got, to, MPI_FLOAT, comm);
    case GATHER_V: return MPI_Gatherv(x, count, MPI_FLOAT, y, got, to, MPI_FLOAT, 0, comm);
    case SCATTER_V: return MPI_Scatterv(x, got, to, MPI_FLOAT, y, received, MPI_FLOAT, 0, comm);
    case SCAN: return MPI_Scan(x, y, count, MPI_FLOAT, MPI_SUM, comm);
    default: return MPI_Exscan(x, y, count, MPI_FLOAT, MPI_SUM, comm);
    }
}

// `calls` calls on `arrays` inputs and outputs in rotation.
int loop(int calls, int arrays, void **x, void **y, int op, int count, int received, const int *sent, const int *from,
         const int *got, const int *to, int right, int left) {
    int error = 0;
    for (int i = 0; i < calls && !error; i++)
        error = one(op, x[i % arrays], y[i % arrays], count, received, sent, from, got, to, right, left);
    return error;
}
