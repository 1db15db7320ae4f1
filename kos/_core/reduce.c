// Reductions: every reduce operation on every dtype, in rank order, so that the bits are the same on every rank.
//
// Contributions are combined a block at a time, in an accumulator that stays in the first-level cache.  16- and 8-bit
// floats are summed in fp32 and rounded once, to nearest even.  The bits are those of NumPy and ml_dtypes, but for the
// payloads of NaNs.  The loops are in a form that compilers vectorise.  Contraction of a * b + c is off (ISO C): it
// would round differently on machines with that instruction.
#include "core.h"

#include <math.h>
#include <string.h>

enum { BLOCK_BYTES = 4096 };  // of an accumulator

// ivdep: `out` is one of the inputs, or overlaps none.
#define COMBINE(name, type, expression) \
    KOS_WIDE static void name(void *out, const void *first, const void *second, size_t count) { \
        type *to = out; \
        const type *xs = first, *ys = second; \
        _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) { \
            type a = xs[i], b = ys[i]; \
            to[i] = expression; \
        } \
    }

// As in NumPy, the result is NaN if one operand is NaN, and the first operand if both are.  For 0 and -0, the result is
// the second operand.
#define LESSER a < b || a != a ? a : b
#define GREATER a > b || a != a ? a : b

COMBINE(sum_f64, double, a + b)
COMBINE(sum_f32, float, a + b)
COMBINE(prod_f64, double, a * b)
COMBINE(prod_f32, float, a * b)
COMBINE(min_f64, double, LESSER)
COMBINE(min_f32, float, LESSER)
COMBINE(max_f64, double, GREATER)
COMBINE(max_f32, float, GREATER)

// Integers wrap: signed overflow would be undefined, also that of a product of uint16_t, which C computes in int.
#define WRAP(bits) \
    COMBINE(sum_##bits, uint##bits##_t, (uint##bits##_t)(a + b)) \
    COMBINE(prod_##bits, uint##bits##_t, (uint##bits##_t)(UINT64_C(1) * a * b)) \
    COMBINE(and_##bits, uint##bits##_t, a & b) \
    COMBINE(or_##bits, uint##bits##_t, a | b) \
    COMBINE(xor_##bits, uint##bits##_t, a ^ b) \
    COMBINE(min_i##bits, int##bits##_t, a < b ? a : b) \
    COMBINE(max_i##bits, int##bits##_t, a > b ? a : b) \
    COMBINE(min_u##bits, uint##bits##_t, a < b ? a : b) \
    COMBINE(max_u##bits, uint##bits##_t, a > b ? a : b)
WRAP(8)
WRAP(16)
WRAP(32)
WRAP(64)

// A boolean is true if its byte is not 0.
COMBINE(and_bool, uint8_t, (a != 0) & (b != 0))
COMBINE(xor_bool, uint8_t, (a != 0) ^ (b != 0))
KOS_WIDE static void to_0_or_1(void *x, size_t count, int ranks) {
    uint8_t *to = x;
    (void)ranks;
    for (size_t i = 0; i < count; i++) to[i] = to[i] != 0;
}

// Complex numbers.  A product is rounded as in NumPy where the CPU has fused multiply-add, which NumPy then uses.
#define COMPLEX(bits, type, fused) \
    static void sum_c##bits(void *out, const void *first, const void *second, size_t count) { \
        sum_f##bits(out, first, second, 2 * count); \
    } \
    static void prod_c##bits(void *out, const void *first, const void *second, size_t count) { \
        type *to = out; \
        const type *x = first, *y = second; \
        for (size_t i = 0; i < 2 * count; i += 2) { \
            type a = x[i], b = x[i + 1], c = y[i], d = y[i + 1]; \
            to[i] = fused(a, c, -(b * d)); \
            to[i + 1] = fused(a, d, b * c); \
        } \
    }
COMPLEX(32, float, fmaf)
COMPLEX(64, double, fma)

// --- 16- and 8-bit floats ------------------------------------------------------------------------------------------

// A format: bits in all, bits of the mantissa, the exponent's bias, the magnitude of the first value that is no number
// of the format (infinity, or NaN where there is none), and that of NaN.
typedef struct {
    unsigned bits, mantissa, bias, overflow, nan;
} format;

static inline float widen(format f, uint32_t x) {
    uint32_t magnitude = x & ((1u << (f.bits - 1)) - 1), sign = x >> (f.bits - 1) << 31;
    uint32_t shifted = magnitude << (23 - f.mantissa);
    // The product scales the exponent, and is exact for subnormals too.
    uint32_t number = f.bias == 127 ? shifted : bits_of(float_of(shifted) * float_of((254 - f.bias) << 23));
    return float_of((f.bias != 127 && magnitude >= f.overflow ? shifted | 0x7f800000 : number) | sign);
}

static inline int is_nan(format f, uint32_t x) { return widen(f, x) != widen(f, x); }

static inline uint32_t narrow(format f, float x) {
    uint32_t magnitude = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 31 << (f.bits - 1), drop = 23 - f.mantissa;
    uint32_t even = magnitude >> drop & 1;
    uint32_t number = ((magnitude + (1u << (drop - 1)) - 1 + even) >> drop) - ((127 - f.bias) << f.mantissa);
    // A subnormal: the sum rounds, and its last bits count the units of the format.
    uint32_t unit = (151 - f.bias - f.mantissa) << 23;
    uint32_t small = bits_of(float_of(magnitude) + float_of(unit)) - unit;
    number = f.bias != 127 && magnitude < (128 - f.bias) << 23 ? small : number;
    number = number > f.overflow ? f.overflow : number;
    return (magnitude > 0x7f800000 ? f.nan : number) | sign;
}

// NumPy's minimum of float16 is the first of two equal numbers, unlike that of all other types.
#define NARROW(name, type, f, less, greater) \
    KOS_WIDE static void widen_##name(float *out, const void *in, size_t count) { \
        const type *x = in; \
        for (size_t i = 0; i < count; i++) out[i] = widen(f, x[i]); \
    } \
    KOS_WIDE static void narrow_##name(void *out, const float *in, size_t count) { \
        type *to = out; \
        for (size_t i = 0; i < count; i++) to[i] = (type)narrow(f, in[i]); \
    } \
    COMBINE(min_##name, type, widen(f, a) less widen(f, b) || is_nan(f, a) ? a : b) \
    COMBINE(max_##name, type, widen(f, a) greater widen(f, b) || is_nan(f, a) ? a : b)
NARROW(f16, uint16_t, ((format){16, 10, 15, 0x7c00, 0x7e00}), <=, >=)
NARROW(bf16, uint16_t, ((format){16, 7, 127, 0x7f80, 0x7fc0}), <, >)
NARROW(e4m3, uint8_t, ((format){8, 3, 7, 0x7f, 0x7f}), <, >)
NARROW(e5m2, uint8_t, ((format){8, 2, 15, 0x7c, 0x7e}), <, >)

// --- Averages ------------------------------------------------------------------------------------------------------

#define AVERAGE(name, type) \
    static void name(void *x, size_t count, int ranks) { \
        for (size_t i = 0; i < count; i++) ((type *)x)[i] /= (type)ranks; \
    }
AVERAGE(average_f32, float)
AVERAGE(average_f64, double)

// NumPy's quotient of complex numbers (Smith's) with the divisor n + 0i.
#define AVERAGE_COMPLEX(bits, type) \
    static void average_c##bits(void *x, size_t count, int ranks) { \
        type *to = x, zero = (type)0 / (type)ranks, scale = 1 / (ranks + 0 * zero); \
        for (size_t i = 0; i < 2 * count; i += 2) { \
            type a = to[i], b = to[i + 1]; \
            to[i] = (a + b * zero) * scale; \
            to[i + 1] = (b - a * zero) * scale; \
        } \
    }
AVERAGE_COMPLEX(32, float)
AVERAGE_COMPLEX(64, double)

// --- The table -----------------------------------------------------------------------------------------------------

#define INTEGER(n, sign) \
    {sum_##n, prod_##n, min_##sign##n, max_##sign##n, NULL, and_##n, or_##n, xor_##n}, {.bytes = n / 8}
#define SHORT_FLOAT(name, size) \
    {sum_f32, prod_f32, min_##name, max_##name, sum_f32}, {NULL, widen_##name, narrow_##name, average_f32, size, 0}

// In the order of kos/dtypes.py, which Python checks.
static const struct {
    const char *name;
    kos_combine combine[KOS_OPS];  // by operation, NULL: the dtype does not have it
    kos_reduction rest;            // but for its `combine`
} dtypes[] = {
    {"float64", {sum_f64, prod_f64, min_f64, max_f64, sum_f64}, {.finish = average_f64, .bytes = 8}},
    {"float32", {sum_f32, prod_f32, min_f32, max_f32, sum_f32}, {.finish = average_f32, .bytes = 4}},
    {"float16", SHORT_FLOAT(f16, 2)},
    {"bfloat16", SHORT_FLOAT(bf16, 2)},
    {"float8_e4m3fn", SHORT_FLOAT(e4m3, 1)},
    {"float8_e5m2", SHORT_FLOAT(e5m2, 1)},
    {"int8", INTEGER(8, i)},
    {"int16", INTEGER(16, i)},
    {"int32", INTEGER(32, i)},
    {"int64", INTEGER(64, i)},
    {"uint8", INTEGER(8, u)},
    {"uint16", INTEGER(16, u)},
    {"uint32", INTEGER(32, u)},
    {"uint64", INTEGER(64, u)},
    {"bool", {NULL, NULL, and_bool, or_8, NULL, and_bool, or_8, xor_bool}, {.finish = to_0_or_1, .bytes = 1}},
    {"complex64", {sum_c32, prod_c32, NULL, NULL, sum_c32}, {.finish = average_c32, .bytes = 8, .pair = 1}},
    {"complex128", {sum_c64, prod_c64, NULL, NULL, sum_c64}, {.finish = average_c64, .bytes = 16, .pair = 1}},
};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

unsigned kos_bytes_of(int dtype) { return dtype >= 0 && dtype < DTYPES ? dtypes[dtype].rest.bytes : 0; }
const char *kos_name_of(int dtype) { return kos_bytes_of(dtype) ? dtypes[dtype].name : ""; }

int kos_reduction_of(int dtype, int op, kos_reduction *r) {
    if (dtype < 0 || dtype >= DTYPES || op < 0 || op >= KOS_OPS || !dtypes[dtype].combine[op])
        return -1;
    const int accumulates = op == KOS_SUM || op == KOS_PROD || op == KOS_AVG;
    *r = dtypes[dtype].rest;
    r->combine = dtypes[dtype].combine[op];
    if (!accumulates) {
        r->widen = NULL;
        r->narrow = NULL;
    }
    if (op != KOS_AVG && dtypes[dtype].combine[KOS_SUM])  // booleans have no sum, and are finished always
        r->finish = NULL;
    return 0;
}

static void reduce_block(const kos_reduction *r, void *out, const void *const *in, int inputs, size_t at, size_t count,
                         int ranks) {
    _Alignas(64) uint8_t total[BLOCK_BYTES], next[BLOCK_BYTES];
    const size_t start = at * r->bytes;
    const void *sum = total;
    if (r->widen)
        r->widen((float *)total, (const uint8_t *)in[0] + start, count);
    else
        sum = (const uint8_t *)in[0] + start;
    for (int i = 1; i < inputs; i++) {
        const void *theirs = (const uint8_t *)in[i] + start;
        if (r->widen) {
            r->widen((float *)next, theirs, count);
            theirs = next;
        }
        // The last sum goes to its place.  No earlier one may: `out` may be an input.
        void *to = i == inputs - 1 && !r->widen ? (uint8_t *)out + start : total;
        r->combine(to, sum, theirs, count);
        sum = to;
    }
    if (r->finish && r->widen)
        r->finish(total, count, ranks);
    if (r->widen)
        r->narrow((uint8_t *)out + start, (const float *)total, count);
}

void kos_reduce(const kos_reduction *r, void *out, const void *const *in, int inputs, size_t count, int ranks) {
    if (inputs == 1 && !r->widen) {
        if (out != in[0])
            memmove(out, in[0], count * r->bytes);
    } else if (inputs == 2 && !r->widen)
        r->combine(out, in[0], in[1], count);
    else {
        const size_t most = BLOCK_BYTES / (r->widen ? sizeof(float) : r->bytes);
        for (size_t at = 0; at < count; at += most)
            reduce_block(r, out, in, inputs, at, count - at < most ? count - at : most, ranks);
    }
    if (r->finish && !r->widen)
        r->finish(out, count, ranks);
}
