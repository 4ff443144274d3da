/* Rows over keys and values in few bits, in the vectors of one kind of processor; included once for each kind, with

       NAME(x)   a function's name for that kind
       TARGET    the attribute that lets it use the kind's instructions
       WIDE      numbers of a vector: 16, 8, or 1 for plain C

   Codes become numbers in a cache, TOKENS at a time, and products with them are the same for one row and for many.
*/

/* Vectors of a product's tile. */
#define COLUMNS 2
#define HERE static inline __attribute__((always_inline)) TARGET

#if WIDE == 16
#define TILE 12
#define SPAN 16
typedef __m512i NAME(Ints);
typedef __m512 NAME(Vector);

/* 16 bytes from each of four places. */
HERE NAME(Ints) NAME(four)(const uint8_t *p, int64_t apart) {
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + apart)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + 2 * apart)), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + 3 * apart)), 3);
}
/* Codes of 4 numbers in the lowest bits of each word, or half a byte above them. */
HERE NAME(Ints) NAME(words)(const uint8_t *p, NAME(Ints) pattern, int bits) {
    if (bits == 8) return _mm512_loadu_si512(p);
    if (bits == 4) return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_shuffle_epi8(NAME(four)(p, 2 * bits), pattern);
}
HERE NAME(Ints) NAME(repeated)(const uint8_t *p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
}
/* The levels whose numbers are in the lowest bits. */
HERE NAME(Vector) NAME(level)(const float *table, NAME(Ints) code, int bits) {
    if (bits <= 4) return _mm512_permutexvar_ps(code, _mm512_loadu_ps(table));
    if (bits == 5) return _mm512_permutex2var_ps(_mm512_loadu_ps(table), code, _mm512_loadu_ps(table + 16));
    return _mm512_i32gather_ps(_mm512_and_si512(code, _mm512_set1_epi32((1 << bits) - 1)), table, 4);
}
#define SHUFFLE _mm512_shuffle_epi8
#define SHIFT _mm512_srli_epi32
#define SHIFT_EACH _mm512_srlv_epi32
#define LOW_32 _mm512_unpacklo_epi32
#define HIGH_32 _mm512_unpackhi_epi32
#define LOW_64 _mm512_unpacklo_epi64
#define HIGH_64 _mm512_unpackhi_epi64
#define STORE _mm512_storeu_ps
#elif WIDE == 8
#define TILE 6
#define SPAN 8
typedef __m256i NAME(Ints);
typedef __m256 NAME(Vector);

HERE NAME(Ints) NAME(four)(const uint8_t *p, int64_t apart) {
    const __m256i x = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm256_inserti128_si256(x, _mm_loadu_si128((const __m128i *)(p + apart)), 1);
}
HERE NAME(Ints) NAME(words)(const uint8_t *p, NAME(Ints) pattern, int bits) {
    if (bits == 8) return _mm256_loadu_si256((const __m256i *)p);
    if (bits == 4) return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_shuffle_epi8(NAME(four)(p, 2 * bits), pattern);
}
HERE NAME(Ints) NAME(repeated)(const uint8_t *p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}
HERE NAME(Vector) NAME(level)(const float *table, NAME(Ints) code, int bits) {
    if (bits > 4)
        return _mm256_i32gather_ps(table, _mm256_and_si256(code, _mm256_set1_epi32((1 << bits) - 1)), 4);
    const __m256 lower = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), code);
    if (bits <= 3) return lower;
    const __m256 upper = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), code);
    return _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
}
#define SHUFFLE _mm256_shuffle_epi8
#define SHIFT _mm256_srli_epi32
#define SHIFT_EACH _mm256_srlv_epi32
#define LOW_32 _mm256_unpacklo_epi32
#define HIGH_32 _mm256_unpackhi_epi32
#define LOW_64 _mm256_unpacklo_epi64
#define HIGH_64 _mm256_unpackhi_epi64
#define STORE _mm256_storeu_ps
#else
#define TILE 4
#define SPAN 4
#endif

#if WIDE > 1
/* Numbers of equal bits of TOKENS keys, into a panel: a vector has one number of several keys. */
HERE void NAME(key_run)(const int bits, const uint8_t *code, int64_t bytes, int64_t count, const float *table,
                        float *panel) {
    /* 8 numbers begin with a byte; their codes are in one word, or in two that overlap. */
    const int64_t some = bits <= 4 ? 32 : 16;
    uint8_t order[16];
    for (int i = 0; i < 16; i++)
        order[i] = (uint8_t)((bits <= 4 ? i / 4 * bits : i / 8 * bits + i / 4 % 2 * (bits - 4)) + i % 4);
    const NAME(Ints) pattern = NAME(repeated)(order);
    for (int64_t token = 0; token < TOKENS; token += WIDE)
        for (int64_t done = 0; done < count; done += some) {
            const uint8_t *at = code + token * bytes + done / 8 * bits;
            NAME(Ints) x[4], word[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                x[i] = NAME(four)(at + i * bytes, 4 * bytes);
                if (bits % 4) x[i] = SHUFFLE(x[i], pattern);
            }
            const NAME(Ints) a = LOW_32(x[0], x[1]), b = LOW_32(x[2], x[3]);
            const NAME(Ints) c = HIGH_32(x[0], x[1]), d = HIGH_32(x[2], x[3]);
            word[0] = LOW_64(a, b), word[1] = HIGH_64(a, b), word[2] = LOW_64(c, d), word[3] = HIGH_64(c, d);
            float *to = panel + done * TOKENS + token;
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const int eight = bits <= 4 ? i : i / 2;
                if (done + 8 * eight >= count) break;
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) {
                    const int is_second = k * bits + bits > 32;
                    if (bits > 4 && is_second != i % 2) continue;
                    const int shift = k * bits - is_second * 8 * (bits - 4);
                    STORE(to + (8 * eight + k) * TOKENS, NAME(level)(table, SHIFT(word[i], shift), bits));
                }
            }
        }
}

/* Numbers of equal bits of TOKENS values, row by row; of 4·WIDE numbers those 4 apart stand beside each other. */
HERE void NAME(value_run)(const int bits, const uint8_t *code, int64_t bytes, int64_t count, const float *table,
                          float *rows) {
    /* Codes of 4 numbers are in one word, from a byte or from its middle on. */
    uint8_t order[16];
    int32_t shifts[4][4];
    for (int i = 0; i < 16; i++) order[i] = (uint8_t)(i / 4 * bits / 2 + i % 4);
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 4; i++) shifts[k][i] = k * bits + bits * i % 2 * 4;
    const NAME(Ints) pattern = NAME(repeated)(order);
    for (int64_t token = 0; token < TOKENS; token++)
        for (int64_t done = 0; done < count; done += 4 * WIDE) {
            const uint8_t *at = code + token * bytes + done / 8 * bits;
            const NAME(Ints) x = NAME(words)(at, pattern, bits);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                const NAME(Ints) each = NAME(repeated)((const uint8_t *)shifts[k]);
                STORE(rows + token * PIECE + done + k * WIDE, NAME(level)(table, SHIFT_EACH(x, each), bits));
            }
        }
}
#else
HERE float NAME(number)(const uint8_t *code, int64_t place, const float *table, int bits) {
    const int64_t first = place * bits;
    const int is_cut = first % 8 + bits > 8;
    const uint32_t word = code[first / 8] | (is_cut ? (uint32_t)code[first / 8 + 1] << 8 : 0u);
    return table[word >> first % 8 & ((1u << bits) - 1u)];
}
HERE void NAME(key_run)(const int bits, const uint8_t *code, int64_t bytes, int64_t count, const float *table,
                        float *panel) {
    for (int64_t token = 0; token < TOKENS; token++)
        for (int64_t i = 0; i < count; i++)
            panel[i * TOKENS + token] = NAME(number)(code + token * bytes, i, table, bits);
}
HERE void NAME(value_run)(const int bits, const uint8_t *code, int64_t bytes, int64_t count, const float *table,
                          float *rows) {
    for (int64_t token = 0; token < TOKENS; token++)
        for (int64_t i = 0; i < count; i++)
            rows[token * PIECE + i] = NAME(number)(code + token * bytes, i, table, bits);
}
#endif

typedef float NAME(Span) __attribute__((vector_size(4 * SPAN), aligned(4), may_alias));

/* to (rows, COLUMNS vectors) += a (rows, n) times b (n, the same), rows of a and its columns so far apart. */
HERE void NAME(tile)(const int rows, const float *a, const int64_t row_apart, const int64_t column_apart, int64_t n,
                     const float *b, int64_t b_apart, float *to, int64_t apart) {
    NAME(Span) sum[TILE][COLUMNS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++)
            sum[r][c] = *(const NAME(Span) *)(to + r * apart + c * SPAN);
    for (int64_t i = 0; i < n; i++) {
        NAME(Span) row[COLUMNS];
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++) row[c] = *(const NAME(Span) *)(b + i * b_apart + c * SPAN);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int c = 0; c < COLUMNS; c++) sum[r][c] += a[r * row_apart + i * column_apart] * row[c];
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++) *(NAME(Span) *)(to + r * apart + c * SPAN) = sum[r][c];
}

#define TILES(rows, ...)                                                                                              \
    switch (rows) {                                                                                                   \
    case 1: NAME(tile)(1, __VA_ARGS__); break;                                                                        \
    case 2: NAME(tile)(2, __VA_ARGS__); break;                                                                        \
    case 3: NAME(tile)(3, __VA_ARGS__); break;                                                                        \
    case 4: NAME(tile)(4, __VA_ARGS__); break;                                                                        \
    MORE_TILES(__VA_ARGS__)                                                                                           \
    }
#if TILE > 4
#define MORE_TILES(...)                                                                                               \
    case 5: NAME(tile)(5, __VA_ARGS__); break;                                                                        \
    case 6: NAME(tile)(6, __VA_ARGS__); break;                                                                        \
    MOST_TILES(__VA_ARGS__)
#else
#define MORE_TILES(...)
#endif
#if TILE > 6
#define MOST_TILES(...)                                                                                               \
    case 7: NAME(tile)(7, __VA_ARGS__); break;                                                                        \
    case 8: NAME(tile)(8, __VA_ARGS__); break;                                                                        \
    case 9: NAME(tile)(9, __VA_ARGS__); break;                                                                        \
    case 10: NAME(tile)(10, __VA_ARGS__); break;                                                                      \
    case 11: NAME(tile)(11, __VA_ARGS__); break;                                                                      \
    case 12: NAME(tile)(12, __VA_ARGS__); break;
#else
#define MOST_TILES(...)
#endif

/* Decodes numbers of a run, in its bits. */
#define RUN(run, bits, ...)                                                                                           \
    switch (bits) {                                                                                                   \
    case 1: NAME(run)(1, __VA_ARGS__); break;                                                                         \
    case 2: NAME(run)(2, __VA_ARGS__); break;                                                                         \
    case 3: NAME(run)(3, __VA_ARGS__); break;                                                                         \
    case 4: NAME(run)(4, __VA_ARGS__); break;                                                                         \
    case 5: NAME(run)(5, __VA_ARGS__); break;                                                                         \
    case 6: NAME(run)(6, __VA_ARGS__); break;                                                                         \
    case 7: NAME(run)(7, __VA_ARGS__); break;                                                                         \
    case 8: NAME(run)(8, __VA_ARGS__); break;                                                                         \
    }

/* logits (rows, TOKENS) += rotated queries, in packs of at most TILE rows (P, tile), times TOKENS keys. */
TARGET static void NAME(add_logits)(const Coded *x, const uint8_t *code, const float *tables, const float *packs,
                                    int64_t rows, int64_t tile, float *numbers, float *logits) {
    for (const Run *run = x->runs; run < x->runs + x->num_runs; run++)
        for (int64_t done = 0; run->bits && done < run->count; done += PIECE) {
            const int64_t n = least(PIECE, run->count - done), first = run->first + done;
            RUN(key_run, run->bits, code + run->byte + done / 8 * run->bits, x->bytes, n,
                tables + run->bits * MOST_LEVELS, numbers)
            for (int64_t r = 0; r < rows; r += TILE)
                for (int64_t t = 0; t < TOKENS; t += COLUMNS * SPAN)
                    TILES(least(TILE, rows - r), packs + r * x->size + first * tile, 1, tile, n, numbers + t, TOKENS,
                          logits + r * TOKENS + t, TOKENS)
        }
}

/* sums (rows, width) += weights (rows, TOKENS) times TOKENS values. */
TARGET static void NAME(add_values)(const Coded *x, const uint8_t *code, const float *tables, const float *weights,
                                    int64_t rows, int64_t width, float *numbers, float *sums) {
    for (const Run *run = x->runs; run < x->runs + x->num_runs; run++)
        for (int64_t done = 0; run->bits && done < run->count; done += PIECE) {
            const int64_t n = whole(least(PIECE, run->count - done), 4 * WIDE);
            RUN(value_run, run->bits, code + run->byte + done / 8 * run->bits, x->bytes, n,
                tables + run->bits * MOST_LEVELS, numbers)
            for (int64_t c = 0; c < n; c += COLUMNS * SPAN)
                for (int64_t r = 0; r < rows; r += TILE)
                    TILES(least(TILE, rows - r), weights + r * TOKENS, TOKENS, 1, TOKENS, numbers + c, PIECE,
                          sums + r * width + run->column + done + c, width)
        }
}

/* Logits of a row become weights of values; its sums are taken to a new peak where there is one. */
TARGET static void NAME(weigh)(float *row, const float *key_scale, const float *value_scale, const float *bias,
                               float *peak, float *total, float *sums, int64_t width) {
    for (int j = 0; j < TOKENS; j++) row[j] = bias[j] == -INFINITY ? -INFINITY : row[j] * key_scale[j] + bias[j];
    float at[TOKENS];
    for (int j = 0; j < TOKENS; j++) at[j] = row[j];
    for (int n = TOKENS / 2; n > 0; n /= 2)
        for (int j = 0; j < n; j++) at[j] = at[j + n] > at[j] ? at[j + n] : at[j];
    if (at[0] > *peak) {
        const float less = power(*peak - at[0]);
        *total *= less;
        for (int64_t c = 0; c < width; c++) sums[c] *= less;
        *peak = at[0];
    }
    const float reference = *peak == -INFINITY ? 0.0f : *peak;
    for (int j = 0; j < TOKENS; j++) row[j] = power(row[j] - reference);
    for (int j = 0; j < TOKENS; j++) at[j] = row[j];
    for (int n = TOKENS / 2; n > 0; n /= 2)
        for (int j = 0; j < n; j++) at[j] += at[j + n];
    *total += at[0];
    for (int j = 0; j < TOKENS; j++) row[j] = row[j] == 0.0f ? 0.0f : row[j] * value_scale[j];
}

static const Kind NAME(kind) = {
    WIDE, TILE, NAME(add_logits), NAME(add_values), NAME(weigh),
};

#undef HERE
#undef COLUMNS
#undef TILE
#undef SPAN
#undef RUN
#undef TILES
#undef MORE_TILES
#undef MOST_TILES
#if WIDE > 1
#undef SHUFFLE
#undef SHIFT
#undef SHIFT_EACH
#undef LOW_32
#undef HIGH_32
#undef LOW_64
#undef HIGH_64
#undef STORE
#endif
#undef NAME
#undef TARGET
#undef WIDE
