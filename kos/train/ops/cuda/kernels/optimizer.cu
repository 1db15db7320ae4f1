// What every optimizer has in common, over flat arrays: gradient norm, clipping and learning rate, all on the device.
//
// `squares` leaves the sum of squares of each chunk of the gradients, `finish_norm` adds them up (between the two,
// ranks that hold parts of the gradients may add up each other's).  The chunks do not depend on how many ranks there
// are, so neither do the bits of the norm.  In a pipeline the chunks differ too.  There `reproducible_squares` adds squares
// without rounding, in units that follow from the `largest` gradient of all ranks.  `prepare`, one thread, reads the
// step counter, evaluates the schedule, folds averaging and clipping into one factor, and counts the step.  It counts
// the update too unless this is skipped: the bias of Adam's moments depends on the number of updates.  A norm that is
// not finite leaves everything as it is, in this step and all later ones.  If outliers are skipped, a norm that is not
// finite or too large skips its own step only.
//
// -DMASTER -DGRADIENT -DWEIGHT -DCOPY as in optimizers.cuh
#include "optimizers.cuh"

// partial (all chunks,): fp32 within 16 bytes, double beyond.
extern "C" __global__ void __launch_bounds__(256) squares(const GRADIENT* gradients, const Chunk* chunks,
                                                          double* partial) {
    constexpr int V = 16 / sizeof(GRADIENT);
    const Chunk chunk = chunks[blockIdx.x];
    const GRADIENT* g = gradients + chunk.start;
    const int packs = wide(g, 16) ? chunk.length / V : 0;
    double total = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < packs; i += 256) {
        float x[V], sum = 0;
        load(x, g + i * V);
#pragma unroll
        for (int j = 0; j < V; ++j) sum += x[j] * x[j];
        total += sum;
    }
    for (int i = packs * V + threadIdx.x; i < chunk.length; i += 256) total += double(widen(g[i])) * widen(g[i]);
    total = block_sum(total);
    if (threadIdx.x == 0) partial[chunk.index] = total;
}

// most: the bits of the largest magnitude so far.  Bits have the order of magnitudes, and a NaN's exceed all others.
extern "C" __global__ void __launch_bounds__(256) largest(const GRADIENT* gradients, const Chunk* chunks, int* most) {
    constexpr int V = 16 / sizeof(GRADIENT);
    const Chunk chunk = chunks[blockIdx.x];
    const GRADIENT* g = gradients + chunk.start;
    const int packs = wide(g, 16) ? chunk.length / V : 0;
    int bits = 0;
    auto see = [&](int other) { bits = bits < other ? other : bits; };
    auto magnitude = [](float x) { return int(__float_as_uint(x) & 0x7fffffffu); };
#pragma unroll 4
    for (int i = threadIdx.x; i < packs; i += 256) {
        float x[V];
        load(x, g + i * V);
#pragma unroll
        for (int j = 0; j < V; ++j) see(magnitude(x[j]));
    }
    for (int i = packs * V + threadIdx.x; i < chunk.length; i += 256) see(magnitude(widen(g[i])));
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) see(__shfl_xor_sync(~0u, bits, offset));
    if (threadIdx.x % 32 == 0) atomicMax(most, bits);
}

// partial (2, stride): sums that add up over chunks and ranks without rounding, for at most 2^count_bits gradients
// (see `reproducible_squares` of kos.train.ops.numpy_optimizer).  If a gradient is not finite, its chunk's sum is not either.
extern "C" __global__ void __launch_bounds__(256)
reproducible_squares(const GRADIENT* gradients, const Chunk* chunks, double* partial, long stride, const int* most,
              int count_bits) {
    constexpr int V = 16 / sizeof(GRADIENT);
    const Chunk chunk = chunks[blockIdx.x];
    const GRADIENT* g = gradients + chunk.start;
    const int packs = wide(g, 16) ? chunk.length / V : 0;
    const float magnitude = __uint_as_float(*most);
    const bool exact = magnitude > 0 && isfinite(magnitude);
    const int scale = exact ? 2 * (ilogbf(magnitude) + 1) + count_bits - 52 : 0;
    const double unit = ldexp(1.0, scale), small = ldexp(unit, count_bits - 53);
    const double per_unit = ldexp(1.0, -scale), per_small = ldexp(per_unit, 53 - count_bits);
    double total = 0, rest = 0;
    auto add = [&](double x) {
        const double square = x * x, high = exact ? rint(square * per_unit) * unit : square;
        total += high;
        if (exact) rest += rint((square - high) * per_small) * small;
    };
#pragma unroll 2
    for (int i = threadIdx.x; i < packs; i += 256) {
        float x[V];
        load(x, g + i * V);
#pragma unroll
        for (int j = 0; j < V; ++j) add(x[j]);
    }
    for (int i = packs * V + threadIdx.x; i < chunk.length; i += 256) add(widen(g[i]));
    total = block_sum(total);
    rest = block_sum(rest);
    if (threadIdx.x == 0) partial[chunk.index] = total, partial[stride + chunk.index] = rest;
}

// A block for each row of partial (rows, chunks).
extern "C" __global__ void __launch_bounds__(1024) finish_norm(const double* partial, long chunks, State* state) {
    double total = 0;
#pragma unroll 8
    for (long i = threadIdx.x; i < chunks; i += 1024) total += partial[blockIdx.x * chunks + i];
    total = block_sum(total);
    if (threadIdx.x == 0) (blockIdx.x == 0 ? state->sum_of_squares : state->rest) = total;
}

// shape: 0 cosine, 1 constant, 2 wsd, as kos.train.ops.numpy_optimizer.LearningRate.
__device__ double learning_rate(long step, int shape, double lr, double min_lr, long steps, long warmup, long decay) {
    if (step < warmup) return lr * (step + 1) / warmup;
    if (shape == 1) return lr;
    const long start = shape == 0 ? warmup : (warmup > steps - decay ? warmup : steps - decay);
    const double span = steps - start > 1 ? steps - start : 1;
    double progress = step > start ? (step - start) / span : 0;
    progress = progress < 1 ? progress : 1;
    const double share = shape == 0 ? 0.5 * (1 + cospi(progress)) : 1 - progress;
    return min_lr + share * (lr - min_lr);
}

// If one of the flags (``Communicator.abort_flags``) is not 0, the sums of this rank are undefined: its report then gets an
// epoch that no rank has, so that no rank applies the step.  One thread.
extern "C" __global__ void invalidate_if_aborted(const unsigned long long* addresses, int count, double* report) {
    for (int i = 0; i < count; i++)
        if (*reinterpret_cast<volatile unsigned long long*>(addresses[i])) report[1] = -1;
}

// reports (ranks, columns): of each rank whether it stops, its epoch and its step, as in this rank's own `report`.  No
// step counts any more once one differs: a collective that was ended leaves the report of an earlier step, or none.
extern "C" __global__ void __launch_bounds__(32)
check_in_step(const double* report, const double* reports, int ranks, int columns, State* state) {
    for (int rank = threadIdx.x; rank < ranks; rank += 32) {
        const double* theirs = reports + long(rank) * columns;
        if (theirs[1] != report[1] || theirs[2] != report[2] || theirs[1] < 0) state->halted = 1;
    }
}

// One thread.  Gradients are sums over `micro_batches`; max_norm 0 turns clipping off.  Steps of a norm
// beyond `outlier` are skipped; 0: none are.  So are those whose `count` of targets is infinite: the loss counts none.
extern "C" __global__ void prepare(State* state, int shape, double lr, double min_lr, long steps, long warmup,
                                   long decay_steps, double beta1, double beta2, double micro_batches,
                                   double max_norm, double outlier, const float* count) {
    const double average = 1 / micro_batches, norm = sqrt(state->sum_of_squares + state->rest) * average;
    const bool good = isfinite(norm) && !(outlier > 0 && norm > outlier);
    state->norm = norm;
    if (!good && !(outlier > 0)) state->halted = 1;
    state->finite = good && state->halted == 0 && !(count && isinf(*count));
    if (state->halted != 0) return;
    const double rate = learning_rate(long(state->step), shape, lr, min_lr, steps, warmup, decay_steps);
    state->step += 1;
    const double t = state->updates += state->finite;
    const double clip = max_norm / (norm + 1e-6);
    state->lr = rate;
    state->scale = average * (max_norm > 0 && clip < 1 ? clip : 1);
    if (!state->finite) return;
    state->step_size = rate / (1 - pow(beta1, t));
    state->root = 1 / sqrt(1 - pow(beta2, t));
}
