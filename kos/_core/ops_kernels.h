// The kernels of ops.c, in vectors of 16 floats.  ops.c includes this file once for each instruction set, which K(name)
// names.  Compilers split a vector where registers are smaller, so sums have one order on all of them.

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
    vf sums[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < vectors; j++) sums[i][j] = add ? K(load)(c + i * cs + j * LANES) : (vf){0};
    for (size_t k = 0; k < depth; k++) {
        vf row[VECTORS];
        for (int j = 0; j < vectors; j++) row[j] = K(load)(b + k * bs + j * LANES);
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < vectors; j++) sums[i][j] += a[i * ai + k * ar] * row[j];
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < vectors; j++) K(store)(c + i * cs + j * LANES, sums[i][j]);
}

static void K(product)(float *c, size_t cs, const float *a, size_t ai, size_t ar, const float *b, size_t bs, size_t m,
                       size_t n, size_t depth, int add) {
    size_t j = 0;
    for (; j + VECTORS * LANES <= n; j += VECTORS * LANES)
        for (size_t i = 0; i < m; i += ROWS) K(tile)(c + i * cs + j, cs, a + i * ai, ai, ar, b + j, bs, depth, add, VECTORS);
    for (; j < n; j += LANES)
        for (size_t i = 0; i < m; i += ROWS) K(tile)(c + i * cs + j, cs, a + i * ai, ai, ar, b + j, bs, depth, add, 1);
}

static void K(transpose)(float *to, size_t ts, const float *from, size_t fs, size_t rows, size_t columns) {
    typedef float v4 __attribute__((vector_size(16)));
    typedef int32_t i4 __attribute__((vector_size(16)));
    for (size_t i = 0; i < rows; i += 4)
        for (size_t j = 0; j < columns; j += 4) {
            v4 x[4];
            for (int k = 0; k < 4; k++) memcpy(x + k, from + (i + k) * fs + j, sizeof *x);
            const v4 a = __builtin_shuffle(x[0], x[1], (i4){0, 4, 1, 5}), b = __builtin_shuffle(x[0], x[1], (i4){2, 6, 3, 7});
            const v4 c = __builtin_shuffle(x[2], x[3], (i4){0, 4, 1, 5}), d = __builtin_shuffle(x[2], x[3], (i4){2, 6, 3, 7});
            const v4 y[4] = {
                __builtin_shuffle(a, c, (i4){0, 1, 4, 5}), __builtin_shuffle(a, c, (i4){2, 3, 6, 7}),
                __builtin_shuffle(b, d, (i4){0, 1, 4, 5}), __builtin_shuffle(b, d, (i4){2, 3, 6, 7}),
            };
            for (int k = 0; k < 4; k++) memcpy(to + (j + k) * ts + i, y + k, sizeof *y);
        }
}

// --- Rows ------------------------------------------------------------------------------------------------------------

static void K(rms_norm)(const void *arguments, size_t task) {
    const norm *a = arguments;
    const size_t end = (task + 1) * a->rows < a->count ? (task + 1) * a->rows : a->count;
    for (size_t n = task * a->rows; n < end; n++) {
        const float *x = a->x + n * a->x_stride;
        vf squares = {0};
        for (size_t i = 0; i < a->width; i += LANES) {
            const vf v = LOAD(x + i, a->width - i);
            squares += v * v;
        }
        const float rstd = 1.0f / sqrtf(K(total)(squares) / (float)a->width + a->eps);
        a->rstd[n] = rstd;
        float *out = a->out + n * a->out_stride;
        for (size_t i = 0; i < a->width; i += LANES)
            STORE(out + i, LOAD(x + i, a->width - i) * rstd * LOAD(a->scale + i, a->width - i), a->width - i);
    }
}

// dx += rstd (d_out scale - x rstd^2 mean(d_out scale x)); the sum of d_out x rstd goes to `sums` of the task.
static void K(rms_norm_backward)(const void *arguments, size_t task) {
    const norm *a = arguments;
    const size_t end = (task + 1) * a->rows < a->count ? (task + 1) * a->rows : a->count;
    float *sums = a->sums + task * a->width;
    memset(sums, 0, a->width * sizeof *sums);
    for (size_t n = task * a->rows; n < end; n++) {
        const float *x = a->x + n * a->x_stride, *d_out = a->d_out + n * a->d_out_stride, rstd = a->rstd[n];
        vf dot = {0};
        for (size_t i = 0; i < a->width; i += LANES) {
            const size_t left = a->width - i;
            const vf p = LOAD(x + i, left) * LOAD(d_out + i, left);
            dot += p * LOAD(a->scale + i, left);
            STORE(sums + i, LOAD(sums + i, left) + p * rstd, left);
        }
        const float slope = -K(total)(dot) * rstd * rstd / (float)a->width;
        float *dx = a->out + n * a->out_stride;
        for (size_t i = 0; i < a->width; i += LANES) {
            const size_t left = a->width - i;
            const vf g = LOAD(d_out + i, left) * LOAD(a->scale + i, left) + LOAD(x + i, left) * slope;
            STORE(dx + i, LOAD(dx + i, left) + g * rstd, left);
        }
    }
}

// The loss of a row of logits, which become the gradient of the loss times `share`.
static void K(cross_entropy)(const void *arguments, size_t task) {
    const entropy *a = arguments;
    const size_t end = (task + 1) * a->rows < a->count ? (task + 1) * a->rows : a->count;
    for (size_t n = task * a->rows; n < end; n++) {
        float *z = a->logits + n * a->stride;
        const int32_t target = a->targets[n];
        const float share = target >= 0 ? a->share : 0, at_target = target >= 0 ? z[target] : 0;
        vf tops = K(all)(z[0]), sums = {0};
        size_t i = 0;
        for (; i + LANES <= a->width; i += LANES) tops = K(most)(K(load)(z + i), tops);
        float top = tops[0];
        for (int j = 1; j < LANES; j++) top = tops[j] > top || tops[j] != tops[j] ? tops[j] : top;
        for (; i < a->width; i++) top = z[i] > top || z[i] != z[i] ? z[i] : top;
        for (i = 0; i < a->width; i += LANES) {
            const size_t left = a->width - i;
            vf e = K(exp)(LOAD(z + i, left) - top);
            STORE(z + i, e, left);
            if (left < LANES)
                e = K(load_some)(z + i, left);
            sums += e;
        }
        const float total = K(total)(sums), factor = share / total;
        a->losses[n] = target >= 0 ? logf(total) + (top - at_target) : 0;
        for (i = 0; a->backward && i < a->width; i += LANES) STORE(z + i, LOAD(z + i, a->width - i) * factor, a->width - i);
        if (a->backward && target >= 0)
            z[target] -= share;
    }
}

// --- Elements --------------------------------------------------------------------------------------------------------

static void K(swiglu)(const void *arguments, size_t task) {
    const elements *a = arguments;
    const size_t end = (task + 1) * a->most < a->count ? (task + 1) * a->most : a->count;
    for (size_t i = task * a->most; i < end; i += LANES) {
        const size_t left = end - i;
        const vf gate = LOAD(a->in[0] + i, left);
        STORE(a->out[0] + i, gate * K(sigmoid)(gate) * LOAD(a->in[1] + i, left), left);
    }
}

static void K(swiglu_backward)(const void *arguments, size_t task) {
    const elements *a = arguments;
    const size_t end = (task + 1) * a->most < a->count ? (task + 1) * a->most : a->count;
    for (size_t i = task * a->most; i < end; i += LANES) {
        const size_t left = end - i;
        const vf gate = LOAD(a->in[0] + i, left), d = LOAD(a->in[2] + i, left), s = K(sigmoid)(gate);
        STORE(a->out[0] + i, d * LOAD(a->in[1] + i, left) * (s + gate * s * (1.0f - s)), left);
        STORE(a->out[1] + i, d * (gate * s), left);
    }
}

// AdamW of weights, gradients and two moments: factors are beta1, beta2, the step size, 1 / sqrt(1 - beta2^t), eps, and
// what the weights shrink by.
static void K(adamw)(const void *arguments, size_t task) {
    const elements *a = arguments;
    const size_t end = (task + 1) * a->most < a->count ? (task + 1) * a->most : a->count;
    const float *f = a->factors;
    for (size_t i = task * a->most; i < end; i += LANES) {
        const size_t left = end - i;
        const vf g = LOAD(a->in[0] + i, left);
        const vf m = LOAD(a->out[1] + i, left) * f[0] + g * (1.0f - f[0]);
        const vf v = LOAD(a->out[2] + i, left) * f[1] + g * g * (1.0f - f[1]);
        vf root;
        for (int j = 0; j < LANES; j++) root[j] = sqrtf(v[j]);
        STORE(a->out[1] + i, m, left);
        STORE(a->out[2] + i, v, left);
        STORE(a->out[0] + i, LOAD(a->out[0] + i, left) * f[5] - m / (root * f[3] + f[4]) * f[2], left);
    }
}

// A pair of rows (tokens) of a head: (x, y) -> (x cos - y sin, y cos + x sin).
static void K(rope)(const void *arguments, size_t task) {
    const rotation *a = arguments;
    const size_t head = task / a->half, i = task % a->half;
    float *x = a->x + (2 * head * a->half + i) * a->stride, *y = x + a->half * a->stride;
    const float *cos = a->cos + i * a->cos_stride, *sin = a->sin + i * a->sin_stride;
    for (size_t start = 0; start < a->tokens; start += a->length)
        for (size_t t = 0; t < a->length; t += LANES) {
            const size_t left = a->length - t, at = start + t;
            const vf c = LOAD(cos + t, left), s = LOAD(sin + t, left) * a->sign;
            const vf p = LOAD(x + at, left), q = LOAD(y + at, left);
            STORE(x + at, p * c - q * s, left);
            STORE(y + at, q * c + p * s, left);
        }
}

// --- Attention -------------------------------------------------------------------------------------------------------
// A task is a sample and a kv head.  Keys and values are packed by blocks of BLOCK tokens, (d, BLOCK) each, and d is
// rounded up to LANES by zeros.  Scores are (keys, queries).  The softmax is computed online, as in FlashAttention-2 (Dao
// 2023, arXiv:2307.08691).

// rows d of x times scale, `count` tokens of them; zeros elsewhere
static INLINE void K(pack)(float *to, const float *x, size_t stride, size_t d, size_t wide, size_t count, float scale) {
    for (size_t i = 0; i < wide; i++, x += stride, to += BLOCK) {
        for (size_t t = 0; t < BLOCK; t += LANES) {
            const size_t left = i < d && t < count ? count - t : 0;
            K(store)(to + t, LOAD(x + t, left) * scale);
        }
    }
}

static void K(pack_all)(float *to, const float *x, const attend *a) {
    for (size_t at = 0; at < a->length; at += BLOCK, to += a->wide * BLOCK)
        K(pack)(to, x + at, a->stride, a->d, a->wide, a->length - at < BLOCK ? a->length - at : BLOCK, 1);
}

// Makes the scores of keys that a query does not see -inf.
static INLINE void K(hide)(float *s, const attend *a, const int32_t *first, size_t key, size_t query) {
    const int diagonal = key + BLOCK > query, masked = first && first[MIN(query + BLOCK, a->length) - 1] > (int32_t)key;
    if (!diagonal && !masked)
        return;
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (size_t j = 0; j < BLOCK; j += LANES) {
        vi least = {0};
        const size_t at = query + j, left = at < a->length ? a->length - at : 0;
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
static INLINE size_t K(begin)(const int32_t *first, size_t query) { return first ? (size_t)first[query] / BLOCK * BLOCK : 0; }

static void K(attention)(const void *arguments, size_t task) {
    const attend *a = arguments;
    const size_t sample = task / a->kv_heads, kv = task % a->kv_heads, group = a->heads / a->kv_heads, wide = a->wide;
    const size_t blocks = (a->length + BLOCK - 1) / BLOCK, column = sample * a->length, of_block = wide * BLOCK;
    const int32_t *first = a->first ? a->first + sample * a->length : NULL;
    float *keys = scratch(2 * blocks * of_block + 2 * of_block + BLOCK * BLOCK), *values = keys + blocks * of_block;
    float *q = values + blocks * of_block, *o = q + of_block, *s = o + of_block;
    K(pack_all)(keys, a->qkv + (a->heads + kv) * a->d * a->stride + column, a);
    K(pack_all)(values, a->qkv + (a->heads + a->kv_heads + kv) * a->d * a->stride + column, a);
    for (size_t head = kv * group; head < (kv + 1) * group; head++)
        for (size_t at = 0; at < a->length; at += BLOCK) {
            const size_t count = MIN(BLOCK, a->length - at), start = K(begin)(first, at);
            vf top[BLOCK / LANES], total[BLOCK / LANES];
            K(pack)(q, a->qkv + head * a->d * a->stride + column + at, a->stride, a->d, wide, count, a->scale);
            memset(o, 0, of_block * sizeof *o);
            for (int j = 0; j < BLOCK / LANES; j++) {
                top[j] = K(all)(-FLT_MAX);  // not -inf: a query may see none of the keys of a block
                total[j] = (vf){0};
            }
            for (size_t key = start; key <= at; key += BLOCK) {
                K(product)(s, BLOCK, keys + key * wide, 1, BLOCK, q, BLOCK, BLOCK, BLOCK, a->d, 0);
                K(hide)(s, a, first, key, at);
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
                    for (size_t i = 0; key > start && i < a->d; i++)
                        K(store)(o + i * BLOCK + j * LANES, K(load)(o + i * BLOCK + j * LANES) * shrink);
                }
                K(product)(o, BLOCK, values + key * wide, BLOCK, 1, s, BLOCK, wide, BLOCK, BLOCK, 1);
            }
            float *out = a->out + head * a->d * a->out_stride + column + at;
            float *lse = a->lse + (sample * a->heads + head) * a->length + at;
            for (size_t j = 0; j * LANES < count; j++) {
                const size_t left = count - j * LANES;
                vf log = total[j];
                for (int lane = 0; lane < LANES; lane++) log[lane] = logf(log[lane]);
                STORE(lse + j * LANES, top[j] + log, left);
                for (size_t i = 0; i < a->d; i++)
                    STORE(out + i * a->out_stride + j * LANES, K(load)(o + i * BLOCK + j * LANES) / total[j], left);
            }
        }
}

// P = exp(S - lse), dV = d_out P^T, dS = P (V^T d_out - sum(d_out out)), dQ = K dS, dK = Q dS^T.
static void K(attention_backward)(const void *arguments, size_t task) {
    const attend *a = arguments;
    const size_t sample = task / a->kv_heads, kv = task % a->kv_heads, group = a->heads / a->kv_heads, wide = a->wide;
    const size_t blocks = (a->length + BLOCK - 1) / BLOCK, column = sample * a->length, of_block = wide * BLOCK;
    const int32_t *first = a->first ? a->first + sample * a->length : NULL;
    float *keys = scratch(4 * blocks * of_block + 5 * of_block + 2 * BLOCK * BLOCK), *values = keys + blocks * of_block;
    float *d_keys = values + blocks * of_block, *d_values = d_keys + blocks * of_block;  // (keys, d)
    float *q = d_values + blocks * of_block, *d_out = q + of_block, *q_t = d_out + of_block, *d_out_t = q_t + of_block;
    float *dq = d_out_t + of_block, *p = dq + of_block, *ds = p + BLOCK * BLOCK;
    K(pack_all)(keys, a->qkv + (a->heads + kv) * a->d * a->stride + column, a);
    K(pack_all)(values, a->qkv + (a->heads + a->kv_heads + kv) * a->d * a->stride + column, a);
    memset(d_keys, 0, 2 * blocks * of_block * sizeof *d_keys);
    for (size_t head = kv * group; head < (kv + 1) * group; head++)
        for (size_t at = 0; at < a->length; at += BLOCK) {
            const size_t count = MIN(BLOCK, a->length - at), row = head * a->d;
            K(pack)(q, a->qkv + row * a->stride + column + at, a->stride, a->d, wide, count, a->scale);
            K(pack)(d_out, a->d_out + row * a->d_out_stride + column + at, a->d_out_stride, a->d, wide, count, 1);
            K(transpose)(q_t, wide, q, BLOCK, wide, BLOCK);
            K(transpose)(d_out_t, wide, d_out, BLOCK, wide, BLOCK);
            memset(dq, 0, of_block * sizeof *dq);
            vf lse[BLOCK / LANES], dot[BLOCK / LANES];
            for (size_t j = 0; j < BLOCK / LANES; j++) {
                const size_t t = j * LANES, left = t < count ? count - t : 0;
                lse[j] = LOAD(a->lse + (sample * a->heads + head) * a->length + at + t, left);
                dot[j] = (vf){0};
                for (size_t i = 0; i < a->d; i++)
                    dot[j] += K(load)(d_out + i * BLOCK + t) * LOAD(a->out + (row + i) * a->out_stride + column + at + t, left);
            }
            for (size_t key = K(begin)(first, at); key <= at; key += BLOCK) {
                K(product)(p, BLOCK, keys + key * wide, 1, BLOCK, q, BLOCK, BLOCK, BLOCK, a->d, 0);
                K(product)(ds, BLOCK, values + key * wide, 1, BLOCK, d_out, BLOCK, BLOCK, BLOCK, a->d, 0);
                K(hide)(p, a, first, key, at);
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
            float *to = a->d_qkv + row * a->d_stride + column + at;
            for (size_t i = 0; i < a->d; i++)
                for (size_t t = 0; t < count; t += LANES)
                    STORE(to + i * a->d_stride + t, K(load)(dq + i * BLOCK + t) * a->scale, count - t);
        }
    for (int of = 0; of < 2; of++)
        for (size_t at = 0; at < a->length; at += BLOCK) {
            const size_t row = (a->heads + of * a->kv_heads + kv) * a->d;
            K(transpose)(q, BLOCK, (of ? d_values : d_keys) + at * wide, wide, BLOCK, wide);
            for (size_t i = 0; i < a->d; i++)
                memcpy(a->d_qkv + (row + i) * a->d_stride + column + at, q + i * BLOCK,
                       MIN(BLOCK, a->length - at) * sizeof *q);
        }
}

static const kernels K(kernels) = {
    K(rms_norm), K(rms_norm_backward), K(cross_entropy), K(swiglu), K(swiglu_backward), K(adamw), K(rope), K(attention),
    K(attention_backward),
};
