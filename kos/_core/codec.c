// The codec of compressed collectives: the bits are those of the NumPy one in kos/comm/compression.py, which describes
// the formats.  A block is widened to fp32, and its loops are in a form that compilers vectorise.
#include "objects.h"

#include <float.h>
#include <math.h>

enum { BLOCK = 64, FINITE = 0x7f7fffff, MAGNITUDE = 0x7fffffff };

typedef struct {
    int bits, top;  // of a code; fp8 has the top 256
    float max;      // the largest finite number of the dtype
    kos_reduction dtype;
} codec;

static inline int32_t largest_of(const float *x, int32_t limit) {
    int32_t largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        const int32_t magnitude = (int32_t)(bits_of(x[i]) & MAGNITUDE);
        const int32_t counts = magnitude <= limit ? magnitude : 0;
        largest = counts > largest ? counts : largest;
    }
    return largest;
}

static inline float scale_of(int32_t largest, int levels, float dtype_max) {
    uint32_t bits = bits_of(float_of((uint32_t)largest) / (float)levels);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;  // to the nearest bfloat16
    return fmaxf(fminf(float_of(bits), float_of(bits_of(dtype_max / (float)levels) & 0xffff0000)), FLT_MIN);
}

// All ones if the condition holds: a selection by masks has no branch.
static inline uint32_t mask(int condition) { return 0u - (uint32_t)condition; }

static inline void encode_floats(const float *restrict x, float inverse, uint8_t *restrict codes) {
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t q = bits_of(x[i] * inverse), magnitude = q & MAGNITUDE;
        const uint32_t half = (magnitude + 0xfff + (magnitude >> 13 & 1)) & ~0x1fffu;  // rounded as a float16
        const uint32_t number = ((half + 0x7ffff + (half >> 20 & 1)) >> 20) - (120 << 3);
        const uint32_t small = bits_of(float_of(half) + 0x1p14f) - bits_of(0x1p14f);  // rounded to units of 2**-9
        const uint32_t is_small = mask(half < 121u << 23), is_nan = mask(magnitude > FINITE + 1u);
        uint32_t code = (small & is_small) | (number & ~is_small);
        code = code > 0x7f ? 0x7f : code;
        code |= q >> 31 << 7 & mask(code != 0);
        codes[i] = (uint8_t)((code & ~is_nan) | (0x80 & is_nan));
    }
}

static inline void decode_floats(const uint8_t *restrict codes, float scale, float *restrict x) {
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t code = codes[i], magnitude = code & 0x7f, is_small = mask(magnitude < 8);
        const uint32_t small = bits_of((float)(int32_t)magnitude * 0x1p-9f), number = (magnitude << 20) + (120u << 23);
        const uint32_t is_infinite = mask(magnitude == 0x7f), is_nan = mask(code == 0x80);
        uint32_t bits = (small & is_small) | (number & ~is_small);
        bits = (bits & ~is_infinite) | ((FINITE + 1u) & is_infinite);
        x[i] = float_of(((bits | (code & 0x80) << 24) & ~is_nan) | (0x7fc00000 & is_nan)) * scale;
    }
}

static inline void encode_ints(const float *x, float inverse, int levels, int top, int special, int8_t *codes) {
    for (int i = 0; i < BLOCK; i++) {
        const int32_t q = (int32_t)(bits_of(x[i] * inverse + 0x1.8p23f) - bits_of(0x1.8p23f));  // the sum rounds
        codes[i] = (int8_t)(q > levels ? levels : q < -levels ? -levels : q);
    }
    for (int i = 0; special && i < BLOCK; i++)
        if (!isfinite(x[i]))
            codes[i] = (int8_t)(isnan(x[i]) ? -top - 1 : x[i] > 0 ? top : -top);
}

static inline void decode_ints(const int8_t *codes, float scale, int top, float *x) {
    const float size = fabsf(scale);
    for (int i = 0; i < BLOCK; i++)
        x[i] = (float)codes[i] * size;
    for (int i = 0; signbit(scale) && i < BLOCK; i++)
        if (codes[i] >= top || codes[i] <= -top)
            x[i] = codes[i] == top ? INFINITY : codes[i] == -top ? -INFINITY : NAN;
}

KOS_WIDE static void encode(const codec *c, const uint8_t *x, size_t count, uint8_t *codes, uint16_t *scales) {
    for (size_t at = 0; at < count; at += BLOCK, codes += BLOCK * c->bits / 8) {
        float block[BLOCK];
        int8_t ints[BLOCK];
        const size_t part = kos_min(BLOCK, count - at);
        memset(block + part, 0, (BLOCK - part) * sizeof *block);
        if (c->dtype.widen)
            c->dtype.widen(block, x + at * c->dtype.bytes, part);
        else
            memcpy(block, x + at * sizeof *block, part * sizeof *block);
        const int32_t any = largest_of(block, MAGNITUDE), special = any > FINITE;
        const int levels = c->top - (c->top != 256 && special);
        const float scale = scale_of(special ? largest_of(block, FINITE) : any, levels, c->max), inverse = 1 / scale;
        *scales++ = (uint16_t)(bits_of(scale) >> 16 | (c->top != 256 && special) << 15);
        if (c->top == 256)
            encode_floats(block, inverse, codes);
        else
            encode_ints(block, inverse, levels, c->top, special, c->bits == 8 ? (int8_t *)codes : ints);
        for (int i = 0; c->bits == 4 && i < BLOCK; i += 2)
            codes[i / 2] = (uint8_t)((ints[i] & 15) | (ints[i + 1] & 15) << 4);
    }
}

KOS_WIDE static void decode(const codec *c, const uint8_t *codes, const uint16_t *scales, uint8_t *out, size_t count,
                            int adds) {
    for (size_t at = 0; at < count; at += BLOCK, codes += BLOCK * c->bits / 8) {
        float block[BLOCK], *to = (float *)(void *)(out + at * c->dtype.bytes);
        int8_t ints[BLOCK];
        const size_t part = kos_min(BLOCK, count - at);
        const float scale = float_of((uint32_t)*scales++ << 16);
        if (c->top == 256)
            decode_floats(codes, scale, block);
        for (int i = 0; c->bits == 4 && i < BLOCK; i++)
            ints[i] = (int8_t)((codes[i / 2] >> i % 2 * 4 & 15) ^ 8) - 8;
        if (c->top != 256)
            decode_ints(c->bits == 4 ? ints : (const int8_t *)codes, scale, c->top, block);
        if (c->dtype.narrow)
            c->dtype.narrow(to, block, part);
        else if (!adds)
            memcpy(to, block, part * sizeof *block);
        else
            for (size_t i = 0; i < part; i++)
                to[i] = to[i] + block[i];
    }
}

// encode(bits, top, dtype, x, out), decode(bits, top, dtype, data, out, adds): the dtype as in compression.CARRIED; the
// arrays as bytes.
static PyObject *run(PyObject *args, int decodes) {
    codec c;
    Py_buffer from, to;
    int dtype, adds = 0;
    if (!PyArg_ParseTuple(args, decodes ? "iiiy*w*p" : "iiiy*w*", &c.bits, &c.top, &dtype, &from, &to, &adds))
        return NULL;
    const int known = dtype >= 0 && dtype < 3 && !kos_reduction_of(KOS_FLOAT32 + dtype, KOS_SUM, &c.dtype);
    const size_t count = known ? (size_t)(decodes ? to : from).len / c.dtype.bytes : 0, blocks = (count + 63) / BLOCK;
    const size_t width = (size_t)(BLOCK * c.bits / 8), nbytes = blocks * (width + 2);
    c.max = dtype == 1 ? 65504 : dtype ? 0x1.fep127f : FLT_MAX;
    const int fits = known && (size_t)(decodes ? from : to).len == nbytes && !(adds && dtype);
    Py_BEGIN_ALLOW_THREADS
    if (fits && decodes)
        decode(&c, from.buf, (uint16_t *)(void *)((uint8_t *)from.buf + blocks * width), to.buf, count, adds);
    else if (fits)
        encode(&c, from.buf, count, to.buf, (uint16_t *)(void *)((uint8_t *)to.buf + blocks * width));
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    const char *wrong = "expected a dtype from 0 to 2, which may add if it is 0, and %zu bytes encoded";
    return fits ? Py_NewRef(Py_None) : PyErr_Format(PyExc_ValueError, wrong, nbytes);
}

PyObject *codec_encode(PyObject *self, PyObject *args) { return run(args, 0); }
PyObject *codec_decode(PyObject *self, PyObject *args) { return run(args, 1); }
