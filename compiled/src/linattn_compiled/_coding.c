/* Rows of numbers as codes in few bits, the same bits as linattn's plain torch (kv_cache/codes.py) finds, and back.

   Letters: H key/value heads of all rows of a batch, n rows of each, P numbers of a row, R of a block, N blocks. Numbers
   are divided, multiplied and rounded one by one as there, and sums are of double precision in both: another order of
   their terms moves no choice between levels or factors.
*/
#include "_lanes.h"

/* Numbers of a block are a multiple of these. */
#define UNIT 8

/* The levels of 0, 1, … 8 bits. */
typedef struct {
    const float *levels;   /* one after the other: those of b bits begin at 2^b - 1 */
    const float *nearest;  /* (9, 2·reach + 1), the level next to each multiple of 1/steps */
    const int32_t *number; /* (9, 2·reach + 1), its number among those of so many bits */
    const float *edges;    /* (9, width), middles below and above each level */
    int64_t reach, steps, width;
} Levels;

typedef struct {
    const float *x;      /* (H, n, P) */
    const uint8_t *bits; /* (H, N) */
    uint8_t *code;       /* (H, n, bytes) */
    uint16_t *scale;     /* (H, n), float16 */
    Levels levels;
    const float *factors; /* of a row's root mean square, that its scale is sought among */
    int64_t heads, rows, size, block, bytes, num_factors;
    float largest, tie, alike;
} Coding;

/* Places in a list of the multiples nearest to numbers x/factor + more; those of 0 for what is no number. */
INSIDE void find_places(int32_t *restrict places, const float *restrict x, int64_t count, float factor, float more,
                        const Levels *levels) {
    const float steps = (float)levels->steps, reach = (float)levels->reach;
    for (int64_t i = 0; i < count; i++) {
        float place = (x[i] / factor + more) * steps;
        place = place > reach ? reach : place;
        place = place < -reach ? -reach : place;
        place = place == place ? place : 0.0f;
        /* Adding 3·2^22 leaves the nearest integer, of two as near the even one. */
        places[i] = (int32_t)((place + 12582912.0f) - 12582912.0f + reach);
    }
}

/* Σ x·y, the products of single precision. */
INSIDE double sum_of_products(const float *x, const float *y, int64_t count) {
    double sums[UNIT] = {0}, total = 0.0;
    for (int64_t i = 0; i < count; i += UNIT)
        for (int64_t j = 0; j < UNIT; j++) sums[j] += (double)(x[i + j] * y[i + j]);
    for (int64_t j = 0; j < UNIT; j++) total += sums[j];
    return total;
}

/* As float16, of two as near the even one. */
INSIDE uint16_t half_of(float number) {
    union { float number; uint32_t bits; } x = {.number = number};
    const uint16_t sign = (uint16_t)(x.bits >> 16 & 0x8000);
    x.bits &= 0x7FFFFFFF;
    if (x.bits > 0x7F800000) return sign | 0x7E00;
    if (x.bits >= 0x477FF000) return sign | 0x7C00;
    if (x.bits < 0x38800000) {
        /* Below 2^-14 a unit is 2^-24, which is what the last bit of numbers beside 1/2 stands for. */
        x.number += 0.5f;
        return sign | (uint16_t)(x.bits - 0x3F000000);
    }
    x.bits += 0xFFF + (x.bits >> 13 & 1);
    return sign | (uint16_t)((x.bits - 0x38000000) >> 13);
}

/* How much an error in a block of so many bits counts. */
INSIDE double worth_of(uint8_t bits) { return bits ? (double)(1 << 2 * bits) : 0.0; }

/* Memory of a call. */
typedef struct {
    float *x;        /* (P), a row relative to its root mean square */
    float *levels;   /* (P) */
    int32_t *places; /* (P) */
} Space;

/* The square of Σ z·l over Σ l², each times its worth, for the levels l next to z/factor. */
INSIDE double explained(const Coding *a, const uint8_t *bits, float factor, const Space *s) {
    const int64_t listed = 2 * a->levels.reach + 1;
    double with = 0.0, square = 0.0;
    find_places(s->places, s->x, a->size, factor, 0.0f, &a->levels);
    for (int64_t i = 0; i < a->size / a->block; i++) {
        const float *restrict nearest = a->levels.nearest + bits[i] * listed;
        const int32_t *restrict places = s->places + i * a->block;
        float *restrict levels = s->levels + i * a->block;
        if (!bits[i]) continue;
        for (int64_t j = 0; j < a->block; j++) levels[j] = nearest[places[j]];
        with += worth_of(bits[i]) * sum_of_products(s->x + i * a->block, levels, a->block);
        square += worth_of(bits[i]) * sum_of_products(levels, levels, a->block);
    }
    return with * with / (square < (double)a->tie ? (double)a->tie : square);
}

/* A row of a head whose blocks have so many bits. */
INSIDE void write_row(const Coding *a, const float *given, const uint8_t *bits, const Space *s, uint8_t *code,
                      uint16_t *scale) {
    const int64_t number = a->size / a->block, listed = 2 * a->levels.reach + 1;
    double with = 0.0, square = 0.0, worths = 0.0;
    for (int64_t i = 0; i < a->size; i++) {
        const float z = given[i] > a->largest ? a->largest : given[i];
        s->x[i] = z < -a->largest ? -a->largest : z;
    }
    for (int64_t i = 0; i < number; i++) {
        square += worth_of(bits[i]) * sum_of_products(s->x + i * a->block, s->x + i * a->block, a->block);
        worths += worth_of(bits[i]) * (double)a->block;
    }
    float size = (float)sqrt(square / (worths < 1.0 ? 1.0 : worths)), factor = a->factors[0];
    size = size == 0.0f ? 1.0f : size;
    for (int64_t i = 0; i < a->size; i++) s->x[i] /= size;
    /* Where all explain the same, but for rounding, the first. */
    double most = explained(a, bits, factor, s) * (1.0 + (double)a->alike);
    for (int64_t k = 1; k < a->num_factors; k++) {
        const double each = explained(a, bits, a->factors[k], s);
        if (each > most) most = each, factor = a->factors[k];
    }
    find_places(s->places, s->x, a->size, factor, a->tie, &a->levels);
    with = square = 0.0;
    for (int64_t i = 0; i < number; i++) {
        const float *x = s->x + i * a->block, *of_bits = a->levels.levels + (1 << bits[i]) - 1;
        const float *edges = a->levels.edges + bits[i] * a->levels.width;
        const int32_t *numbers = a->levels.number + bits[i] * listed, *places = s->places + i * a->block;
        float *levels = s->levels + i * a->block;
        for (int64_t j = 0; j < a->block; j += UNIT) {
            uint64_t word = 0;
            for (int64_t k = 0; k < UNIT; k++) {
                const float z = x[j + k] / factor + a->tie;
                int32_t level = numbers[places[j + k]];
                level += (z > edges[level + 1]) - (z <= edges[level]);
                levels[j + k] = of_bits[level];
                word |= (uint64_t)level << k * bits[i];
            }
            for (int64_t byte = 0; byte < bits[i]; byte++) *code++ = (uint8_t)(word >> 8 * byte);
        }
        with += worth_of(bits[i]) * sum_of_products(x, levels, a->block);
        square += worth_of(bits[i]) * sum_of_products(levels, levels, a->block);
    }
    *scale = half_of((float)(with / (square == 0.0 ? 1.0 : square) * (double)size));
}

BY_PROCESSOR
static void write_rows(const Coding *a, const Space *s) {
    for (int64_t i = 0; i < a->heads * a->rows; i++)
        write_row(a, a->x + i * a->size, a->bits + i / a->rows * (a->size / a->block), s, a->code + i * a->bytes,
                  a->scale + i);
}

/* Rows (H, n, P) of numbers from codes. */
typedef struct {
    const uint8_t *code;  /* (H, n, bytes) */
    const float *scale;   /* (H, n) */
    const uint8_t *bits;  /* (H, N) */
    const float *levels;  /* as in Levels */
    float *x;             /* (H, n, P) */
    int64_t heads, rows, size, block, bytes;
} Decoding;

/* Numbers of a block in so many bits; where the codes after it begin. */
INSIDE const uint8_t *read_block(const uint8_t *code, const int bits, const float *levels, float scale, int64_t block,
                                 float *x) {
    for (int64_t j = 0; j < block; j += UNIT) {
        uint64_t word = 0;
        for (int byte = 0; byte < bits; byte++) word |= (uint64_t)*code++ << 8 * byte;
        for (int k = 0; k < UNIT; k++) x[j + k] = levels[word >> k * bits & ((1u << bits) - 1u)] * scale;
    }
    return code;
}

#define READ(bits)                                                                                                    \
    case bits: code = read_block(code, bits, a->levels + (1 << bits) - 1, scale, a->block, x); break;

static void read_rows(const Decoding *a) {
    const int64_t number = a->size / a->block;
    float *x = a->x;
    for (int64_t row = 0; row < a->heads * a->rows; row++) {
        const uint8_t *code = a->code + row * a->bytes, *bits = a->bits + row / a->rows * number;
        const float scale = a->scale[row];
        for (int64_t i = 0; i < number; i++, x += a->block) switch (bits[i]) {
            READ(0) READ(1) READ(2) READ(3) READ(4) READ(5) READ(6) READ(7) READ(8)
        }
    }
}

/* Whether bits fit codes; the error that they do not. */
static int check_bits(const uint8_t *bits, int64_t heads, int64_t number, int64_t block, int64_t bytes) {
    if (are_sound(bits, heads, number, block, bytes)) return 1;
    PyErr_SetString(PyExc_ValueError, "bits of the state's frames do not fit its codes; pass a state as merged_attention_with_state "
                    "gave it, or rebuild it from the tokens");
    return 0;
}

/* 5 addresses and 5 sizes, in the order of Decoding. */
static PyObject *decode_codes(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    uintptr_t p[5];
    int64_t n[5];
    if (!read_arguments(arguments, count, p, 5, n, 5, NULL, 0)) return NULL;
    const Decoding a = {
        (const uint8_t *)p[0], (const float *)p[1], (const uint8_t *)p[2], (const float *)p[3], (float *)p[4],
        n[0], n[1], n[2], n[3], n[4],
    };
    if (!check_bits(a.bits, a.heads, a.size / a.block, a.block, a.bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    read_rows(&a);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

#define NUM_ADDRESSES 9
#define NUM_SIZES 9
#define NUM_NUMBERS 3

/* Addresses, sizes and numbers in the order of Coding, those of Levels where it has them. */
static PyObject *write_codes(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    uintptr_t p[NUM_ADDRESSES];
    int64_t n[NUM_SIZES];
    float x[NUM_NUMBERS];
    if (!read_arguments(arguments, count, p, NUM_ADDRESSES, n, NUM_SIZES, x, NUM_NUMBERS)) return NULL;
    const Coding a = {
        (const float *)p[0], (const uint8_t *)p[1], (uint8_t *)p[2], (uint16_t *)p[3],
        {(const float *)p[4], (const float *)p[5], (const int32_t *)p[6], (const float *)p[7], n[0], n[1], n[2]},
        (const float *)p[8], n[3], n[4], n[5], n[6], n[7], n[8], x[0], x[1], x[2],
    };
    if (!check_bits(a.bits, a.heads, a.size / a.block, a.block, a.bytes)) return NULL;
    float *memory = malloc((size_t)(3 * a.size + 1) * sizeof(float));
    if (!memory) return PyErr_NoMemory();
    const Space space = {memory, memory + a.size, (int32_t *)(memory + 2 * a.size)};
    Py_BEGIN_ALLOW_THREADS;
    write_rows(&a, &space);
    Py_END_ALLOW_THREADS;
    free(memory);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"decode_codes", (PyCFunction)(void (*)(void))decode_codes, METH_FASTCALL, "Rows of numbers from codes."},
    {"write_codes", (PyCFunction)(void (*)(void))write_codes, METH_FASTCALL, "Rows of numbers as codes in few bits."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_coding", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__coding(void) { return PyModule_Create(&module); }
