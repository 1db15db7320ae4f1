// The kernels of ops.c, in vectors of LANES floats.  ops.c includes this file once for each instruction set, which
// K(name) names.

enum { K(ROWS) = LANES > 8 ? 8 : 4, K(VECTORS) = 2 };  // of a tile of a product: its sums stay in registers

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

// --- Vectors ---------------------------------------------------------------------------------------------------------

static INLINE vf K(load)(const float *x) {
    vf v;
    memcpy(&v, x, sizeof v);
    return v;
}
static INLINE void K(store)(float *x, vf v) { memcpy(x, &v, sizeof v); }
static INLINE vf K(load_some)(const float *x, size_t count) {  // and zeros
    vf v = {0};
    memcpy(&v, x, count % LANES * sizeof *x);
    return v;
}
static INLINE void K(store_some)(float *x, vf v, size_t count) { memcpy(x, &v, count % LANES * sizeof *x); }
#define LOAD(x, count) ((count) >= LANES ? K(load)(x) : K(load_some)(x, count))
#define STORE(x, v, count) ((count) >= LANES ? K(store)(x, v) : K(store_some)(x, v, count))

static INLINE vf K(all)(float x) { return x - (vf){0}; }
static INLINE vf K(pick)(vi where, vf a, vf b) { return (vf)((where & (vi)a) | (~where & (vi)b)); }
static INLINE vf K(most)(vf a, vf b) { return K(pick)((a > b) | (a != a), a, b); }
static INLINE float K(total)(vf v) {
    float x[LANES];
    memcpy(x, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

// exp to 2 units in the last place; 0 below -87.3, the largest number above 88.7 (Cephes' polynomial, S. Moshier).
static INLINE vf K(exp)(vf x) {
    const vi gone = x < -87.33654f;
    x = K(pick)(x > 88.722f, K(all)(88.722f), x);
    const vf shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vf y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return K(pick)(x != x, x, (vf)(~gone & ((vi)y + ((vi)shifted << 23))));
}

static INLINE vf K(sigmoid)(vf x) { return 1.0f / (1.0f + K(exp)(-x)); }

// c (m, n) = a b, or added to it: a[i * ai + k * ar] b[k * bs + j], of `depth` k.  m is a multiple of ROWS, n of LANES.
static INLINE void K(tile)(float *c, size_t cs, const float *a, size_t ai, size_t ar, const float *b, size_t bs,
                           size_t depth, int add, int vectors) {
    vf sums[K(ROWS)][K(VECTORS)];
    for (int i = 0; i < K(ROWS); i++)
        for (int j = 0; j < vectors; j++) sums[i][j] = add ? K(load)(c + i * cs + j * LANES) : (vf){0};
    for (size_t k = 0; k < depth; k++) {
        vf row[K(VECTORS)];
        for (int j = 0; j < vectors; j++) row[j] = K(load)(b + k * bs + j * LANES);
        for (int i = 0; i < K(ROWS); i++)
            for (int j = 0; j < vectors; j++) sums[i][j] += a[i * ai + k * ar] * row[j];
    }
    for (int i = 0; i < K(ROWS); i++)
        for (int j = 0; j < vectors; j++) K(store)(c + i * cs + j * LANES, sums[i][j]);
}

static void K(product)(float *c, size_t cs, const float *a, size_t ai, size_t ar, const float *b, size_t bs, size_t m,
                       size_t n, size_t depth, int add) {
    size_t j = 0;
    for (; j + K(VECTORS) * LANES <= n; j += K(VECTORS) * LANES)
        for (size_t i = 0; i < m; i += K(ROWS))
            K(tile)(c + i * cs + j, cs, a + i * ai, ai, ar, b + j, bs, depth, add, K(VECTORS));
    for (; j < n; j += LANES)
        for (size_t i = 0; i < m; i += K(ROWS)) K(tile)(c + i * cs + j, cs, a + i * ai, ai, ar, b + j, bs, depth, add, 1);
}

// to (columns, rows) = from (rows, columns), both multiples of 4.
static void K(transpose)(float *to, size_t ts, const float *from, size_t fs, size_t rows, size_t columns) {
    for (size_t i = 0; i < rows; i += 4)
        for (size_t j = 0; j < columns; j += 4) {
            float x[4][4];
            for (int k = 0; k < 4; k++) memcpy(x[k], from + (i + k) * fs + j, sizeof x[k]);
            for (int k = 0; k < 4; k++) {
                const float y[4] = {x[0][k], x[1][k], x[2][k], x[3][k]};
                memcpy(to + (j + k) * ts + i, y, sizeof y);
            }
        }
}

// --- Rows ------------------------------------------------------------------------------------------------------------

// x, scale, out, rstd
static void K(rms_norm)(const void *arguments, size_t task) {
    const operation *o = arguments;
    const size_t width = o->columns[0];
    const float *scale = o->at[1];
    for (size_t n = FIRST(o, task); n < LAST(o, task); n++) {
        const float *x = (float *)o->at[0] + n * o->stride[0];
        float *out = (float *)o->at[2] + n * o->stride[2];
        vf squares = {0};
        for (size_t i = 0; i < width; i += LANES) {
            const vf v = LOAD(x + i, width - i);
            squares += v * v;
        }
        const float rstd = ((float *)o->at[3])[n] = 1.0f / sqrtf(K(total)(squares) / (float)width + o->number[0]);
        for (size_t i = 0; i < width; i += LANES)
            STORE(out + i, LOAD(x + i, width - i) * rstd * LOAD(scale + i, width - i), width - i);
    }
}

// d_out, x, scale, rstd, dx, sums: dx += rstd (d_out scale - x rstd^2 mean(d_out scale x)); the task's sum of
// d_out x rstd is a row of `sums`.
static void K(rms_norm_backward)(const void *arguments, size_t task) {
    const operation *o = arguments;
    const size_t width = o->columns[0];
    const float *scale = o->at[2];
    float *sums = (float *)o->at[5] + task * o->stride[5];
    memset(sums, 0, width * sizeof *sums);
    for (size_t n = FIRST(o, task); n < LAST(o, task); n++) {
        const float *d_out = (float *)o->at[0] + n * o->stride[0], *x = (float *)o->at[1] + n * o->stride[1];
        const float rstd = ((float *)o->at[3])[n];
        float *dx = (float *)o->at[4] + n * o->stride[4];
        vf dot = {0};
        for (size_t i = 0; i < width; i += LANES) {
            const vf p = LOAD(x + i, width - i) * LOAD(d_out + i, width - i);
            dot += p * LOAD(scale + i, width - i);
            STORE(sums + i, LOAD(sums + i, width - i) + p * rstd, width - i);
        }
        const float slope = -K(total)(dot) * rstd * rstd / (float)width;
        for (size_t i = 0; i < width; i += LANES) {
            const size_t left = width - i;
            const vf g = LOAD(d_out + i, left) * LOAD(scale + i, left) + LOAD(x + i, left) * slope;
            STORE(dx + i, LOAD(dx + i, left) + g * rstd, left);
        }
    }
}

// logits, targets, losses; share, backward: the loss of a row, and the gradient of the loss times `share`.
static void K(cross_entropy)(const void *arguments, size_t task) {
    const operation *o = arguments;
    const size_t width = o->columns[0];
    for (size_t n = FIRST(o, task); n < LAST(o, task); n++) {
        float *z = (float *)o->at[0] + n * o->stride[0], top = z[0];
        const int32_t target = ((int32_t *)o->at[1])[n];
        const float share = target < 0 ? 0 : o->number[0], at_target = target < 0 ? 0 : z[target];
        vf tops = K(all)(top), sums = {0};
        size_t i = 0;
        for (; i + LANES <= width; i += LANES) tops = K(most)(K(load)(z + i), tops);
        for (int j = 0; j < LANES; j++) top = tops[j] > top || tops[j] != tops[j] ? tops[j] : top;
        for (; i < width; i++) top = z[i] > top || z[i] != z[i] ? z[i] : top;
        for (i = 0; i < width; i += LANES) {
            STORE(z + i, K(exp)(LOAD(z + i, width - i) - top), width - i);
            sums += LOAD(z + i, width - i);
        }
        const float total = K(total)(sums), factor = share / total;
        ((float *)o->at[2])[n] = target < 0 ? 0 : logf(total) + (top - at_target);
        for (i = 0; o->number[1] != 0 && i < width; i += LANES)
            STORE(z + i, LOAD(z + i, width - i) * factor, width - i);
        if (o->number[1] != 0 && target >= 0)
            z[target] -= share;
    }
}

// --- Elements --------------------------------------------------------------------------------------------------------

#define EACH for (size_t i = FIRST(o, task), left; i < LAST(o, task) && (left = LAST(o, task) - i); i += LANES)
#define IN(k) LOAD((float *)o->at[k] + i, left)
#define OUT(k, v) STORE((float *)o->at[k] + i, v, left)

// gate, up, out
static void K(swiglu)(const void *arguments, size_t task) {
    const operation *o = arguments;
    EACH OUT(2, IN(0) * K(sigmoid)(IN(0)) * IN(1));
}

// gate, up, d_out, d_gate, d_up
static void K(swiglu_backward)(const void *arguments, size_t task) {
    const operation *o = arguments;
    EACH {
        const vf gate = IN(0), up = IN(1), d = IN(2), s = K(sigmoid)(gate);
        OUT(3, d * up * (s + gate * s * (1.0f - s)));
        OUT(4, d * (gate * s));
    }
}

// gradient, weights, moments; beta1, beta2, the step size, 1 / sqrt(1 - beta2^t), eps, and the weights' decay.
static void K(adamw)(const void *arguments, size_t task) {
    const operation *o = arguments;
    const float *f = o->number;
    EACH {
        const vf g = IN(0), m = IN(2) * f[0] + g * (1.0f - f[0]), v = IN(3) * f[1] + g * g * (1.0f - f[1]);
        vf root;
        for (int j = 0; j < LANES; j++) root[j] = sqrtf(v[j]);
        OUT(2, m);
        OUT(3, v);
        OUT(1, IN(1) * f[5] - m / (root * f[3] + f[4]) * f[2]);
    }
}

// x, cos, sin; heads, sign: a task is a pair of rows of a head, (x, y) -> (x cos - y sin, y cos + x sin).
static void K(rope)(const void *arguments, size_t task) {
    const operation *o = arguments;
    const size_t half = o->rows[1], i = task % half;
    float *x = (float *)o->at[0] + (2 * (task - i) + i) * o->stride[0], *y = x + half * o->stride[0];
    const float *cos = (float *)o->at[1] + i * o->stride[1], *sin = (float *)o->at[2] + i * o->stride[2];
    for (size_t start = 0; start < o->columns[0]; start += o->length)
        for (size_t t = 0; t < o->length; t += LANES) {
            const size_t left = o->length - t, at = start + t;
            const vf c = LOAD(cos + t, left), s = LOAD(sin + t, left) * o->number[1];
            const vf p = LOAD(x + at, left), q = LOAD(y + at, left);
            STORE(x + at, p * c - q * s, left);
            STORE(y + at, q * c + p * s, left);
        }
}

// --- Attention -------------------------------------------------------------------------------------------------------
// A task is a sample and a kv head.  Keys and values are packed by blocks of BLOCK tokens, (d, BLOCK) each, and d is
// rounded up to WIDE by zeros.  Scores are (keys, queries).  The softmax is computed online, as in FlashAttention-2
// (Dao 2023, arXiv:2307.08691).

// rows d of x times scale, `count` tokens of them; zeros elsewhere
static INLINE void K(pack)(float *to, const float *x, size_t stride, size_t d, size_t wide, size_t count, float scale) {
    for (size_t i = 0; i < wide; i++, x += stride, to += BLOCK)
        for (size_t t = 0; t < BLOCK; t += LANES) {
            const size_t left = i < d && t < count ? count - t : 0;
            K(store)(to + t, LOAD(x + t, left) * scale);
        }
}

static void K(pack_all)(float *to, const float *x, const operation *o) {
    for (size_t at = 0; at < o->length; at += BLOCK, to += o->wide * BLOCK)
        K(pack)(to, x + at, o->stride[0], o->d, o->wide, o->length - at < BLOCK ? o->length - at : BLOCK, 1);
}

// Makes the scores of keys that a query does not see -inf.
static INLINE void K(hide)(float *s, const operation *o, const int32_t *first, size_t key, size_t query) {
    if (key + BLOCK <= query && !(first && first[MIN(query + BLOCK, o->length) - 1] > (int32_t)key))
        return;
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (size_t j = 0; j < BLOCK; j += LANES) {
        vi least = {0};
        const size_t at = query + j, left = at < o->length ? o->length - at : 0;
        if (first && left)
            memcpy(&least, first + at, MIN(left, LANES) * sizeof *first);
        for (size_t k = 0; k < BLOCK; k++) {
            const int32_t this = (int32_t)(key + k);
            const vi hidden = (lane + (int32_t)at < this) | (least > this);
            K(store)(s + k * BLOCK + j, K(pick)(hidden, K(all)(-INFINITY), K(load)(s + k * BLOCK + j)));
        }
    }
}

// The first block of keys that a block of queries sees.
#define BEGIN(query) (first ? (size_t)first[query] / BLOCK * BLOCK : 0)

static void K(attention)(const void *arguments, size_t task) {
    const operation *o = arguments;
    const size_t sample = task / o->kv_heads, kv = task % o->kv_heads, group = o->heads / o->kv_heads, wide = o->wide;
    const size_t blocks = (o->length + BLOCK - 1) / BLOCK, column = sample * o->length, of_block = wide * BLOCK;
    const int32_t *first = o->columns[3] ? (int32_t *)o->at[3] + sample * o->length : NULL;
    float *keys = scratch(o, 2 * blocks * of_block + 2 * of_block + BLOCK * BLOCK);
    if (!keys)
        return;
    float *values = keys + blocks * of_block, *q = values + blocks * of_block, *sums = q + of_block, *s = sums + of_block;
    K(pack_all)(keys, (float *)o->at[0] + (o->heads + kv) * o->d * o->stride[0] + column, o);
    K(pack_all)(values, (float *)o->at[0] + (o->heads + o->kv_heads + kv) * o->d * o->stride[0] + column, o);
    for (size_t head = kv * group; head < (kv + 1) * group; head++)
        for (size_t at = 0; at < o->length; at += BLOCK) {
            const size_t count = MIN(BLOCK, o->length - at), start = BEGIN(at);
            vf top[BLOCK / LANES], total[BLOCK / LANES];
            const float *from = (float *)o->at[0] + head * o->d * o->stride[0] + column + at;
            K(pack)(q, from, o->stride[0], o->d, wide, count, o->number[2]);
            memset(sums, 0, of_block * sizeof *sums);
            for (int j = 0; j < BLOCK / LANES; j++) {
                top[j] = K(all)(-FLT_MAX);  // not -inf: a query may see none of the keys of a block
                total[j] = (vf){0};
            }
            for (size_t key = start; key <= at; key += BLOCK) {
                K(product)(s, BLOCK, keys + key * wide, 1, BLOCK, q, BLOCK, BLOCK, BLOCK, o->d, 0);
                K(hide)(s, o, first, key, at);
                for (size_t j = 0; j < BLOCK / LANES; j++) {
                    vf most = top[j], sum = {0};
                    for (size_t k = 0; k < BLOCK; k++) most = K(most)(K(load)(s + k * BLOCK + j * LANES), most);
                    for (size_t k = 0; k < BLOCK; k++) {
                        const vf p = K(exp)(K(load)(s + k * BLOCK + j * LANES) - most);
                        K(store)(s + k * BLOCK + j * LANES, p);
                        sum += p;
                    }
                    const vf shrink = K(exp)(top[j] - most);
                    total[j] = total[j] * shrink + sum;
                    top[j] = most;
                    for (size_t i = 0; key > start && i < o->d; i++)
                        K(store)(sums + i * BLOCK + j * LANES, K(load)(sums + i * BLOCK + j * LANES) * shrink);
                }
                K(product)(sums, BLOCK, values + key * wide, BLOCK, 1, s, BLOCK, wide, BLOCK, BLOCK, 1);
            }
            float *out = (float *)o->at[1] + head * o->d * o->stride[1] + column + at;
            float *lse = (float *)o->at[2] + (sample * o->heads + head) * o->length + at;
            for (size_t j = 0; j * LANES < count; j++) {
                const size_t left = count - j * LANES;
                vf log = total[j];
                for (int lane = 0; lane < LANES; lane++) log[lane] = logf(log[lane]);
                STORE(lse + j * LANES, top[j] + log, left);
                for (size_t i = 0; i < o->d; i++)
                    STORE(out + i * o->stride[1] + j * LANES, K(load)(sums + i * BLOCK + j * LANES) / total[j], left);
            }
        }
}

// P = exp(S - lse), dV = d_out P^T, dS = P (V^T d_out - sum(d_out out)), dQ = K dS, dK = Q dS^T.
static void K(attention_backward)(const void *arguments, size_t task) {
    const operation *o = arguments;
    const size_t sample = task / o->kv_heads, kv = task % o->kv_heads, group = o->heads / o->kv_heads, wide = o->wide;
    const size_t blocks = (o->length + BLOCK - 1) / BLOCK, column = sample * o->length, of_block = wide * BLOCK;
    const int32_t *first = o->columns[3] ? (int32_t *)o->at[3] + sample * o->length : NULL;
    float *keys = scratch(o, 4 * blocks * of_block + 5 * of_block + 2 * BLOCK * BLOCK);
    if (!keys)
        return;
    float *values = keys + blocks * of_block;
    float *d_keys = values + blocks * of_block, *d_values = d_keys + blocks * of_block;  // (keys, d)
    float *q = d_values + blocks * of_block, *d_out = q + of_block, *q_t = d_out + of_block, *d_out_t = q_t + of_block;
    float *dq = d_out_t + of_block, *p = dq + of_block, *ds = p + BLOCK * BLOCK;
    K(pack_all)(keys, (float *)o->at[0] + (o->heads + kv) * o->d * o->stride[0] + column, o);
    K(pack_all)(values, (float *)o->at[0] + (o->heads + o->kv_heads + kv) * o->d * o->stride[0] + column, o);
    memset(d_keys, 0, 2 * blocks * of_block * sizeof *d_keys);
    for (size_t head = kv * group; head < (kv + 1) * group; head++)
        for (size_t at = 0; at < o->length; at += BLOCK) {
            const size_t count = MIN(BLOCK, o->length - at), row = head * o->d;
            const float *from = (float *)o->at[0] + row * o->stride[0] + column + at;
            K(pack)(q, from, o->stride[0], o->d, wide, count, o->number[2]);
            K(pack)(d_out, (float *)o->at[4] + row * o->stride[4] + column + at, o->stride[4], o->d, wide, count, 1);
            K(transpose)(q_t, wide, q, BLOCK, wide, BLOCK);
            K(transpose)(d_out_t, wide, d_out, BLOCK, wide, BLOCK);
            memset(dq, 0, of_block * sizeof *dq);
            const float *out = (float *)o->at[1] + row * o->stride[1] + column + at;
            vf lse[BLOCK / LANES], dot[BLOCK / LANES];
            for (size_t j = 0; j < BLOCK / LANES; j++) {
                const size_t t = j * LANES, left = t < count ? count - t : 0;
                lse[j] = LOAD((float *)o->at[2] + (sample * o->heads + head) * o->length + at + t, left);
                dot[j] = (vf){0};
                for (size_t i = 0; i < o->d; i++)
                    dot[j] += K(load)(d_out + i * BLOCK + t) * LOAD(out + i * o->stride[1] + t, left);
            }
            for (size_t key = BEGIN(at); key <= at; key += BLOCK) {
                K(product)(p, BLOCK, keys + key * wide, 1, BLOCK, q, BLOCK, BLOCK, BLOCK, o->d, 0);
                K(product)(ds, BLOCK, values + key * wide, 1, BLOCK, d_out, BLOCK, BLOCK, BLOCK, o->d, 0);
                K(hide)(p, o, first, key, at);
                for (size_t j = 0; j < BLOCK / LANES; j++)
                    for (size_t k = 0; k < BLOCK; k++) {
                        float *to = p + k * BLOCK + j * LANES, *d_to = ds + k * BLOCK + j * LANES;
                        const vf e = K(exp)(K(load)(to) - lse[j]);
                        K(store)(to, e);
                        K(store)(d_to, e * (K(load)(d_to) - dot[j]));
                    }
                K(product)(d_values + key * wide, wide, p, BLOCK, 1, d_out_t, wide, BLOCK, wide, count, 1);
                K(product)(d_keys + key * wide, wide, ds, BLOCK, 1, q_t, wide, BLOCK, wide, count, 1);
                K(product)(dq, BLOCK, keys + key * wide, BLOCK, 1, ds, BLOCK, wide, BLOCK, BLOCK, 1);
            }
            float *to = (float *)o->at[5] + row * o->stride[5] + column + at;
            for (size_t i = 0; i < o->d; i++)
                for (size_t t = 0; t < count; t += LANES)
                    STORE(to + i * o->stride[5] + t, K(load)(dq + i * BLOCK + t) * o->number[2], count - t);
        }
    for (int of = 0; of < 2; of++)
        for (size_t at = 0; at < o->length; at += BLOCK) {
            const size_t row = (o->heads + of * o->kv_heads + kv) * o->d;
            K(transpose)(q, BLOCK, (of ? d_values : d_keys) + at * wide, wide, BLOCK, wide);
            for (size_t i = 0; i < o->d; i++)
                memcpy((float *)o->at[5] + (row + i) * o->stride[5] + column + at, q + i * BLOCK,
                       MIN(BLOCK, o->length - at) * sizeof *q);
        }
}

static const kernels K(kernels) = {
    K(rms_norm), K(rms_norm_backward), K(cross_entropy), K(swiglu), K(swiglu_backward), K(adamw), K(rope), K(attention),
    K(attention_backward),
};
#undef K
#undef LANES
