"""The formats of compressed collectives: bytes, errors within the published bounds, infinities and NaN, refusals."""

import ml_dtypes
import numpy as np
import pytest

import kos
from kos import ReduceOp
from kos.comm import compression
from kos.comm.compression import BLOCK, FORMATS, Format
from kos.errors import CollectiveMismatch, InvalidArgument
from kos.testing import spawn
from kos.testing.conformance import results
from kos.testing.conformance.values import near_the_bounds
from tests.comm.compression_bounds import errors_are_within_the_bounds, largest_errors
from tests.comm.ranks import on_each_rank

formats = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)


def decoded(form: Format, x: np.ndarray) -> np.ndarray:
    out = np.full(x.size, np.nan, x.dtype)
    form.decode(form.encode(x), out)
    return out


@formats
def test_bytes_of_bf16(form):
    """The bytes that are sent, as a fraction of those of bf16."""
    limit = {"fp8": 0.53, "int8": 0.53, "int4": 0.28}[form.name]
    assert form.nbytes(1 << 20) == form.encode(np.zeros(1 << 20, np.float32)).size <= limit * 2 * (1 << 20)
    assert form.nbytes(0) == 0 and form.nbytes(1) == form.nbytes(BLOCK) < form.nbytes(BLOCK + 1)


@formats
@dtypes
def test_errors_are_within_the_bounds(form, dtype, seed):
    """For random bits, normal values of every size, outliers, one-hot blocks, and values near the bounds."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((600, BLOCK))
    normal[::6, 0] = 1e4
    normal[1::6] = np.eye(BLOCK)[np.arange(100) % BLOCK]
    normal[2::6, 1:] *= 2.0**-40
    bits = rng.integers(0, 256, 2000 * BLOCK * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    with np.errstate(all="ignore"):
        sizes = [np.ldexp(normal, power).astype(dtype).reshape(-1) for power in (0, 5, -5, 20, -20, 100, -100, -140)]
    x = np.concatenate([*sizes, bits, near_the_bounds(rng, 2000, dtype)])
    with np.errstate(invalid="ignore"):
        wide, got = x.astype(np.float64), decoded(form, x).astype(np.float64)
    _, bound = largest_errors(form, abs(wide), np.dtype(dtype))
    finite = np.isfinite(wide)
    ratio = abs(got[finite] - wide[finite]) / bound[finite]
    assert ratio.max() <= 1
    assert ratio.max() > 0.85, "the bound is far from what happens"


@pytest.mark.parametrize(
    ("form", "dtype", "size"), [("int8", ml_dtypes.bfloat16, 1.0), ("fp8", np.float16, 1e-6), ("int8", np.float32, 0.0)]
)
def test_small_scales_and_the_rounding_to_the_dtype_count(form, dtype, size, seed):
    """Ordinary bfloat16, small float16, and float32 below the smallest scale lose more than a code and its scale."""
    rng = np.random.default_rng(seed)
    x = (size * np.exp(rng.normal(0, 2, 1000 * BLOCK))).astype(dtype) if size else np.full(BLOCK, 1e-38, dtype)
    wide = x.astype(np.float64)
    error = abs(decoded(FORMATS[form], x).astype(np.float64) - wide)
    before, after = largest_errors(FORMATS[form], wide, np.dtype(dtype))
    assert (error <= after).all() and (error > (before if size else wide / 250)).any()


HOSTS = [(2, 2), (3, 3), (2, 2, 2)]


@pytest.mark.parametrize(("dtype", "hosts"), zip(DTYPES, HOSTS, strict=True), ids=str)
def test_errors_between_hosts_are_within_the_bounds(dtype, hosts, seed):
    """The sum of each host is encoded once, and so is the total.

    The bound adds both, for any number of ranks per host.
    """
    spawn(lambda comm: errors_are_within_the_bounds(comm, seed, np.dtype(dtype)), sum(hosts), hosts=hosts)


@pytest.mark.parametrize(("form", "dtype", "hosts"), [
    ("fp8", "bfloat16", (2, 2)),
    ("int8", "float32", (3, 3)),  # a sum of 3 ranks of a host shows in which order they were added
    ("int4", "float16", (2, 2, 2)),
], ids=str)  # fmt: skip
def test_bits_between_hosts(form, dtype, hosts, seed):
    """Each host adds exactly, in rank order; only the sums of the hosts are compressed.  Also with error feedback."""

    def body(comm):
        assert comm.exact_group_size() == hosts[0]
        results.compressed(comm, seed, form, np.dtype(dtype))
        results.feedback_keeps_what_is_lost(comm, seed, form, np.dtype(dtype))

    spawn(body, sum(hosts), hosts=hosts, timeout=120)


@pytest.mark.parametrize("hosts", [(4,), (3, 1), (1, 1, 1, 1)], ids=str)
def test_bits_on_other_hosts(hosts, seed):
    """All ranks compress what they send: on one host, on hosts of unequal numbers of ranks, with one rank per host."""

    def body(comm):
        assert comm.exact_group_size() == 1
        results.compressed(comm, seed, "int8", np.dtype(np.float32))

    spawn(body, 4, hosts=hosts)


def test_in_rank_order_all_ranks_of_hosts_compress(seed):
    """``deterministic`` promises the same bits as on a single host."""

    def body(comm):
        x = np.random.default_rng((seed, comm.rank)).standard_normal(1000).astype(np.float32)
        return [comm.all_reduce(x.copy(), compress="int8", deterministic=ordered).tobytes() for ordered in (0, 1)]

    (one, of_one), (several, of_several) = spawn(body, 4)[0], spawn(body, 4, hosts=(2, 2))[0]
    assert one == of_one == of_several != several


@pytest.mark.parametrize(("count", "hosts"), [*zip((1, 64, 1000), HOSTS, strict=True), (4096 + 65, (2, 2))], ids=str)
def test_feedback_of_an_all_reduce(count, hosts, seed):
    """What is lost is added to later calls.  The sum of many calls is nearer to the exact sum than without feedback."""

    def body(comm, fed_back):
        x = np.random.default_rng((seed, comm.rank)).standard_normal(count).astype(np.float32)
        residual, total = (np.zeros_like(x), np.zeros(count)) if fed_back else (None, np.zeros(count))
        for _ in range(20):
            out = comm.all_reduce(x.copy(), compress="int4", residual=residual)
            total += out
        return total, x

    with_feedback, without = (spawn(lambda comm, f=f: body(comm, f), sum(hosts), hosts=hosts) for f in (True, False))
    exact = 20 * np.sum([x.astype(np.float64) for _, x in with_feedback], 0)
    assert all(total.tobytes() == with_feedback[0][0].tobytes() for total, _ in with_feedback)
    near, far = (np.linalg.norm(each[0][0] - exact) for each in (with_feedback, without))
    step = sum(np.abs(x).max() for _, x in with_feedback) / FORMATS["int4"].top
    assert near < 0.8 * far or near < step  # a single element may lose little without feedback too


def _any_floats(rng: np.random.Generator, count: int, kind: int) -> np.ndarray:
    """Any bits; all exponents; one exponent, denormals too; infinities, NaN and signed zeros; ties; outliers."""
    if kind == 0:
        return rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    x = rng.standard_normal(count).astype(np.float32)
    if kind in (1, 2):
        x = np.ldexp(x, rng.integers(-160, 128, count if kind == 1 else 1)).astype(np.float32)
    elif kind == 3:
        special = np.array([np.inf, -np.inf, np.nan, -np.nan, 0, -0.0, 3e38, 1e-45], np.float32)
        x = np.where(rng.random(count) < 0.02, rng.choice(special, count), x)
    elif kind == 4:
        x = (rng.integers(-600, 600, count) / rng.choice([1, 2, 3, 17, 256])).astype(np.float32)
    else:
        x[:: rng.integers(2, 90)] *= np.float32(2.0 ** rng.integers(0, 60))
    return x


@pytest.mark.skipif(compression.native is None, reason="needs the compiled core")
@formats
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_core_has_the_bits_of_numpy(form, dtype, seed, monkeypatch):
    """Encoded, decoded and added, for any floats and lengths, also those for which NumPy's loop over blocks repeats."""
    rng = np.random.default_rng(seed)
    core = compression.native
    for kind in [*range(6)] * 5:
        with np.errstate(all="ignore"):
            x, before = (_any_floats(rng, int(rng.integers(1, 5000)) + (kind == 0) * 512 * 64, kind) for _ in range(2))
            x, before = x.astype(dtype), np.resize(before, x.size)
        results = []
        for native in (core, None):
            monkeypatch.setattr(compression, "native", native)
            data, out, total = form.encode(x), np.empty_like(x), before.copy()
            form.decode(data, out)
            form.decode(data, total, add=True)
            results.append((data.tobytes(), out.tobytes(), total.tobytes()))
        assert results[0] == results[1]


@pytest.mark.skipif(compression.native is None, reason="needs the compiled core")
@pytest.mark.parametrize(
    "wrong", [(8, 127, 3, 64, 66), (8, 127, 0, 256, 65), (8, 127, -1, 256, 66), (4, 7, 0, 256, 66)]
)
def test_the_core_refuses_wrong_bytes(wrong):
    bits, top, dtype, nbytes, encoded = wrong
    with pytest.raises(ValueError, match="expected"):
        compression.native.encode(bits, top, dtype, bytes(nbytes), bytearray(encoded))


@formats
def test_zeros_stay(form):
    x = np.array([0.0, -0.0] * 100, np.float32)
    assert decoded(form, x).tobytes() == np.zeros(200, np.float32).tobytes()


@formats
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_infinities_and_nan_arrive_where_they_were(form, seed, dtype):
    """They are in blocks of their own, or beside finite numbers, which arrive within the bounds."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(50 * BLOCK).astype(np.float32)
    special = rng.choice([np.inf, -np.inf, np.nan], x.size)
    x = np.where(rng.random(x.size) < np.repeat([0, 1 / BLOCK, 0.5, 1, 0], x.size // 5), special, x).astype(dtype)
    got = decoded(form, x).astype(np.float64)
    wide = x.astype(np.float64)
    _, bound = largest_errors(form, abs(wide), np.dtype(dtype))
    for known in (np.isnan, np.isposinf, np.isneginf):
        assert known(wide).any() and (known(got) == known(wide)).all()
    finite = np.isfinite(wide)
    assert (abs(got[finite] - wide[finite]) <= bound[finite]).all()


@formats
@dtypes
@pytest.mark.parametrize("special", [False, True], ids=["numbers", "with inf"])
def test_the_largest_numbers_stay_finite(form, seed, dtype, special):
    rng, largest = np.random.default_rng(seed), float(ml_dtypes.finfo(dtype).max)
    x = (largest * rng.uniform(0.9, 1, (500, BLOCK)) * rng.choice([-1, 1], (500, BLOCK))).astype(dtype)
    x[:, 0] = (largest * np.linspace(0.97, 1, 500)).astype(dtype)
    x[-1, 1] = -largest
    x[::2, 2:] = 0
    if special:
        x[:, -1] = np.inf
    wide, got = x.astype(np.float64), decoded(form, x.reshape(-1)).reshape(x.shape).astype(np.float64)
    assert (np.isfinite(got) == np.isfinite(wide)).all()
    bound = largest_errors(form, abs(wide).reshape(-1), np.dtype(dtype))[1].reshape(x.shape)
    finite = np.isfinite(wide)
    assert (abs(got[finite] - wide[finite]) <= bound[finite]).all()


@formats
@dtypes
def test_only_sums_beyond_the_largest_number_are_infinite(form, dtype):
    """As without compression.

    The blocks add the largest number and 0, twice 0.49 of it, and twice the number; one is mixed.
    """
    largest = float(ml_dtypes.finfo(dtype).max)

    def body(comm):
        x = np.zeros(4 * BLOCK, dtype)
        x[:BLOCK] = largest if comm.rank == 0 else 0
        x[BLOCK : 2 * BLOCK] = 0.49 * largest
        x[2 * BLOCK : 3 * BLOCK] = largest
        x[3 * BLOCK :: 2], x[3 * BLOCK + 1 :: 2] = largest * (comm.rank == 1), largest
        return comm.all_gather(x, compress=form.name)[comm.rank], comm.all_reduce(x.copy(), compress=form.name)

    for own, total in spawn(body, 2):
        assert np.isfinite(own.astype(np.float64)).all()
        infinite = np.isinf(total.astype(np.float64)).reshape(4, BLOCK)
        assert infinite.sum(1).tolist() == [0, 0, BLOCK, BLOCK // 2] and infinite[3, 1::2].all()


@formats
def test_what_is_decoded_is_encoded_alike(form, seed):
    """Ranks that forward what they received lose nothing more, beyond the rounding of the scale."""
    x = np.random.default_rng(seed).standard_normal(1000).astype(np.float32)
    once = decoded(form, x)
    twice = decoded(form, once)
    assert abs(twice - once).max() <= abs(x).max() * 2.0**-7


def test_what_cannot_be_compressed(seed):
    with kos.init("mock") as comm:
        x = np.zeros(8, np.float32)
        for dtype in (np.float64, np.int32, np.complex64, np.bool_, ml_dtypes.float8_e5m2):
            with pytest.raises(
                InvalidArgument, match=f"x: expected float32, float16, bfloat16 with compress, got {np.dtype(dtype)}"
            ):
                comm.all_gather(np.zeros(8, dtype), compress="int8")
        for op in (ReduceOp.MAX, kos.PremulSum(0.5)):
            with pytest.raises(InvalidArgument, match="op: expected SUM or AVG with compress, got (MAX|PREMUL_SUM)"):
                comm.all_reduce(x, op, compress="int8")
        with pytest.raises(InvalidArgument, match="algorithm: expected 'auto' with compress, got 'ring'"):
            comm.all_reduce(x, algorithm="ring", compress="int8")


def test_what_a_residual_may_be():
    with kos.init("mock") as comm:
        x, out = np.zeros(64, np.float32), np.zeros(64, np.float32)
        for residual in (x, x[:4], out):
            with pytest.raises(InvalidArgument, match="residual: expected memory of its own, got an array that over"):
                comm.all_reduce(x, out=out, compress="int8", residual=residual)
        with pytest.raises(InvalidArgument, match="residual: expected dtype float32, as x has, got float16"):
            comm.all_reduce(x, compress="int8", residual=np.zeros(64, np.float16))
        with pytest.raises(InvalidArgument, match="residual: expected None without compress, got ndarray"):
            comm.all_reduce(x, residual=np.zeros_like(x))
        with pytest.raises(InvalidArgument, match="residual: expected at least 64 elements, as many as .* got 63"):
            comm.reduce_scatter(x, compress="int8", residual=np.zeros(63, np.float32))
        fixed = x.copy()
        fixed.flags.writeable = False
        with pytest.raises(InvalidArgument, match="x: expected a writable array"):
            comm.reduce_scatter(fixed, compress="int8", residual=out)
        with pytest.raises(TypeError, match="residual"):
            comm.all_gather(x, compress="int8", residual=out)
        for shared in ("residual", "input"):
            batch = comm.batch()
            batch.__enter__()
            for _ in range(2):
                given, kept = (x.copy(), out) if shared == "residual" else (x, np.zeros_like(x))
                comm.all_reduce(given, out=np.zeros_like(x), compress="int8", residual=kept)
            with pytest.raises(InvalidArgument, match="batch: expected no memory that another operation writes"):
                batch.__exit__(None, None, None)
        with comm.batch():
            for given in (x, x.copy()):
                comm.reduce_scatter(given, given, compress="int8", residual=np.zeros_like(x))


@on_each_rank(spawn, 4, hosts=(2, 2))
def test_a_residual_between_hosts_has_a_shard_and_calls_of_other_ones_stay_apart(comm, /, seed):
    x = np.random.default_rng((seed, comm.rank)).standard_normal(200).astype(np.float32)
    kept, other = np.zeros(200, np.float32), np.zeros(128, np.float32)
    y = x.copy()
    comm.all_reduce(x.copy(), compress="int4", residual=kept)
    assert not other.any()
    comm.all_reduce(y, compress="int4", residual=other)
    own = (128, 72)[comm.rank % 2]
    assert kept[:own].any() and not kept[own:].any() and other[:own].tobytes() == kept[:own].tobytes()
    y[:] = x
    comm.all_reduce(y, compress="int4", residual=other)
    assert other.tobytes() != kept[:128].tobytes()


def test_a_group_of_one_keeps_every_bit(seed):
    with kos.init("mock") as comm:
        x = np.random.default_rng(seed).standard_normal(100).astype(np.float32)
        for call in (comm.all_reduce, comm.all_gather, comm.all_to_all, comm.reduce_scatter):
            assert call(x.copy(), compress="int4").tobytes() == x.tobytes()


@pytest.mark.parametrize("theirs", [None, "fp8"])
@on_each_rank(spawn, 2)
def test_ranks_that_compress_differently(comm, /, theirs):
    with pytest.raises(CollectiveMismatch, match="compress"):
        comm.all_reduce(np.ones(100, np.float32), compress="int8" if comm.rank else theirs)


@pytest.mark.parametrize("count", [20, 70])
@on_each_rank(spawn, 3)
def test_counts_that_disagree(comm, /, count):
    """Also if the counts are within one block, so that equally many bytes are sent.

    The error has ranks of the world.
    """
    if (pair := comm.group([1, 2])) is not None:
        x, mine, theirs = np.ones(20, np.float32), [10, 10], [10, 10] if pair.rank else [10, count]
        with pytest.raises(CollectiveMismatch, match="rank 1 of world expected .* from rank 2 of world") as caught:
            pair.all_to_all_v(x, mine, theirs, compress="int8")
        assert caught.value.ranks == (1, 2) and caught.value.expected and caught.value.got
