/* Partial results of softmax attention over keys and values in few bits, which nothing decodes to memory.

   Letters: H key/value heads of all rows of a batch, L rows of queries of each, n tokens, D head width, Dv value width, P
   numbers of a code, R of a block, N blocks. Codes and frames are those of linattn's plain torch (kv_cache/codes.py,
   frames.py). With k = μ + σ·(h·s·l) for a block's Hadamard matrix h, scale s and levels l, and values alike:

       logit = s·Σ l·q̃ + scale·q·μ,   q̃ = scale·h·(σ·q) in the order of the code
       out = μ + σ·h·(Σ a s l / Σ a),   log = log Σ a
*/
#define _GNU_SOURCE
#include "_lanes.h"

#include <dlfcn.h>
#include <pthread.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_KINDS
#endif

/* Tokens and numbers of each that are decoded at once, into the cache nearest to the processor; and rows whose sums are
   held at once.
*/
#define TOKENS 32
#define PIECE 64
#define ROWS 128
/* Bytes that are read beyond a code, at most. */
#define BEYOND 128
#define MOST_LEVELS 256
#define MOST_THREADS 64

INSIDE int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
INSIDE int64_t greatest(int64_t x, int64_t y) { return x > y ? x : y; }
INSIDE int64_t whole(int64_t n, int64_t unit) { return unit ? (n + unit - 1) / unit * unit : 0; }

/* Numbers of equal bits beside each other, the first number's byte in a code, and where they are put. */
typedef struct {
    int64_t bits, first, count, byte, column;
} Run;

/* Codes of one head (n, bytes), float16 scales (n), and what they are relative to. */
typedef struct {
    const uint8_t *code, *end; /* the latter of all heads' */
    const uint16_t *scale;
    const float *mean, *deviation; /* (W) */
    const int16_t *order;          /* (P) */
    int64_t bytes, width, size, block, num_runs;
    Run *runs; /* (N) */
} Coded;

/* What differs from processor to processor. */
typedef struct {
    int64_t wide, tile;
    void (*add_logits)(const Coded *, const uint8_t *, const float *, const float *, int64_t, int64_t, float *, float *);
    void (*add_values)(const Coded *, const uint8_t *, const float *, const float *, int64_t, int64_t, float *, float *);
    void (*weigh)(float *, const float *, const float *, const float *, float *, float *, float *, int64_t);
} Kind;

#define NAME(x) x##_plain
#define TARGET
#define WIDE 1
#include "_coded_rows.h"
#ifdef HAS_KINDS
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define WIDE 8
#include "_coded_rows.h"
#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#define WIDE 16
#include "_coded_rows.h"
#endif

/* The best that runs here, of those no wider. */
static const Kind *kind_of(int64_t widest) {
#ifdef HAS_KINDS
    __builtin_cpu_init();
    const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && widest >= 16) return &kind_avx512;
    if (has_avx2 && widest >= 8) return &kind_avx2;
#endif
    (void)widest;
    return &kind_plain;
}

typedef struct {
    const float *query; /* (H, L, D) */
    /* Each (H, ·), as of one head. */
    const uint8_t *key_code, *value_code;
    const uint16_t *key_scale, *value_scale;
    const float *key_mean, *value_mean, *key_deviation, *value_deviation;
    const int16_t *key_order, *value_order;
    const uint8_t *key_bits, *value_bits;
    const float *bias;   /* (H, n), or none */
    const float *levels; /* of 0, 1, … 8 bits one after the other */
    float *out, *log;    /* (H, L, Dv), (H, L) */
    int64_t heads, rows, head_dim, value_dim, num_tokens, key_bytes, value_bytes;
    int64_t key_size, key_block, value_size, value_block; /* P and R */
    int64_t joins; /* whether out and log hold rows over other keys, which these join */
    int64_t threads, widest;
    float scale;
} Reading;

/* Memory of one thread, and where it is with its task. */
typedef struct {
    float *packs;              /* (rows/tile, P, tile), rotated queries */
    float *numbers;            /* (PIECE, TOKENS) of keys, or (TOKENS, PIECE) of values */
    float *logits;             /* (ROWS, TOKENS) */
    float *sums;               /* (ROWS, width) */
    float *peak, *total, *row; /* (ROWS), (ROWS), (P) */
    uint8_t *key_code, *value_code;
    Run *key_runs, *value_runs;
} Space;

/* A call's tasks: parts of the tokens, for some rows of a head. */
typedef struct {
    const Reading *a;
    const Kind *kind;
    const float *tables; /* (9, MOST_LEVELS), repeated to fill vectors */
    Space *spaces;
    int64_t chunks, chunk, parts, width;
    int64_t next, taken; /* tasks and spaces */
} Call;

/* Runs of blocks of equal bits; columns of values fill up units. */
static void find_runs(Coded *x, const uint8_t *bits, int64_t unit) {
    int64_t byte = 0, column = 0;
    x->num_runs = 0;
    for (int64_t i = 0; i < x->size / x->block; i++) {
        Run *last = x->runs + x->num_runs - 1;
        if (x->num_runs && last->bits == bits[i])
            last->count += x->block;
        else {
            if (x->num_runs && last->bits) column += whole(last->count, unit);
            x->runs[x->num_runs++] = (Run){bits[i], i * x->block, x->block, byte, column};
        }
        byte += x->block * bits[i] / 8;
    }
}

/* x (size) becomes its product with a Hadamard matrix in each block. */
static void mix(float *x, int64_t size, int64_t block) {
    const float norm = 1.0f / sqrtf((float)block);
    for (int64_t half = 1; half < block; half *= 2)
        for (int64_t i = 0; i < size; i += 2 * half)
            for (int64_t j = i; j < i + half; j++) {
                const float first = x[j], second = x[j + half];
                x[j] = first + second;
                x[j + half] = first - second;
            }
    for (int64_t i = 0; i < size; i++) x[i] *= norm;
}

/* Of float16. */
INSIDE float number_of(uint16_t half) {
    union { uint32_t bits; float number; } x = {.bits = (uint32_t)(half & 0x7FFF) << 13};
    x.number *= 0x1p112f;
    x.bits |= (half & 0x7C00) == 0x7C00 ? 0x7F800000u : 0u;
    x.bits |= (uint32_t)(half & 0x8000) << 16;
    return x.number;
}

static Coded keys_of(const Reading *a, int64_t head, Run *runs) {
    const int64_t n = a->num_tokens;
    Coded x = {a->key_code + head * n * a->key_bytes, a->key_code + a->heads * n * a->key_bytes,
               a->key_scale + head * n, a->key_mean + head * a->head_dim, a->key_deviation + head * a->head_dim,
               a->key_order + head * a->key_size, a->key_bytes, a->head_dim, a->key_size, a->key_block, 0, runs};
    find_runs(&x, a->key_bits + head * (x.size / x.block), 1);
    return x;
}
static Coded values_of(const Reading *a, int64_t head, int64_t unit, Run *runs) {
    const int64_t n = a->num_tokens;
    Coded x = {a->value_code + head * n * a->value_bytes, a->value_code + a->heads * n * a->value_bytes,
               a->value_scale + head * n, a->value_mean + head * a->value_dim,
               a->value_deviation + head * a->value_dim, a->value_order + head * a->value_size, a->value_bytes,
               a->value_dim, a->value_size, a->value_block, 0, runs};
    find_runs(&x, a->value_bits + head * (x.size / x.block), unit);
    return x;
}

/* Codes of TOKENS tokens, in memory that may be read beyond them. */
static const uint8_t *readable(const Coded *x, int64_t token, uint8_t *space) {
    const uint8_t *code = x->code + token * x->bytes;
    if (x->end - code >= TOKENS * x->bytes + BEYOND) return code;
    const int64_t there = least(TOKENS * x->bytes, x->end - code);
    copy(space, code, (size_t)there);
    clear(space + there, (size_t)(TOKENS * x->bytes + BEYOND - there));
    return space;
}

/* Rotated queries of some rows, in packs. */
static void pack(const Reading *a, const Coded *x, int64_t tile, const float *query, int64_t rows, Space *s) {
    for (int64_t r = 0; r < rows; r++) {
        const float *q = query + r * x->width;
        for (int64_t p = 0; p < x->size; p++) {
            const int64_t c = x->order[p];
            s->row[p] = c < x->width ? q[c] * x->deviation[c] * a->scale : 0.0f;
        }
        mix(s->row, x->size, x->block);
        float *to = s->packs + r / tile * x->size * tile + r % tile;
        for (int64_t p = 0; p < x->size; p++) to[p * tile] = s->row[p] * LOG2_E;
    }
}

/* Sums of some rows of a head over some of its tokens. */
static void run_task(const Call *call, const Space *space, int64_t head, int64_t first, int64_t start, int64_t stop) {
    const Reading *a = call->a;
    const Kind *kind = call->kind;
    Space s = *space;
    const int64_t rows = least(call->chunk, a->rows - first), n = a->num_tokens, width = call->width;
    const int64_t tile = least(rows, kind->tile);
    const Coded key = keys_of(a, head, s.key_runs), value = values_of(a, head, 4 * kind->wide, s.value_runs);
    pack(a, &key, tile, a->query + (head * a->rows + first) * a->head_dim, rows, &s);
    clear(s.sums, (size_t)(rows * width) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) s.peak[r] = -INFINITY, s.total[r] = 0.0f;
    for (int64_t token = start; token < stop; token += TOKENS) {
        float key_scale[TOKENS] = {0}, value_scale[TOKENS] = {0}, bias[TOKENS];
        const int64_t some = least(TOKENS, n - token);
        for (int64_t j = 0; j < some; j++) {
            key_scale[j] = number_of(key.scale[token + j]);
            value_scale[j] = number_of(value.scale[token + j]);
            bias[j] = a->bias ? a->bias[head * n + token + j] * LOG2_E : 0.0f;
        }
        for (int64_t j = some; j < TOKENS; j++) bias[j] = -INFINITY;
        clear(s.logits, (size_t)(rows * TOKENS) * sizeof(float));
        kind->add_logits(&key, readable(&key, token, s.key_code), call->tables, s.packs, rows, tile, s.numbers,
                         s.logits);
        for (int64_t r = 0; r < rows; r++)
            kind->weigh(s.logits + r * TOKENS, key_scale, value_scale, bias, s.peak + r, s.total + r,
                        s.sums + r * width, width);
        kind->add_values(&value, readable(&value, token, s.value_code), call->tables, s.logits, rows, width, s.numbers,
                         s.sums);
    }
}

/* Rows of a head from the sums of its parts, and logarithms of their normalisers. */
static void finish(const Call *call, Space *parts, int64_t head, int64_t first) {
    const Reading *a = call->a;
    const int64_t rows = least(call->chunk, a->rows - first), unit = 4 * call->kind->wide, wide = call->kind->wide;
    const Coded key = keys_of(a, head, parts->key_runs), value = values_of(a, head, unit, parts->value_runs);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t place = head * a->rows + first + r;
        const float *query = a->query + place * a->head_dim;
        float *out = a->out + place * a->value_dim, *row = parts->row, peak = -INFINITY, total = 0.0f;
        for (int64_t i = 0; i < call->parts; i++) peak = parts[i].peak[r] > peak ? parts[i].peak[r] : peak;
        const float reference = peak == -INFINITY ? 0.0f : peak;
        clear(row, (size_t)value.size * sizeof(float));
        for (int64_t i = 0; i < call->parts; i++) {
            const float share = power(parts[i].peak[r] - reference), *sums = parts[i].sums + r * call->width;
            total += share * parts[i].total[r];
            for (int64_t k = 0; k < value.num_runs; k++) {
                const Run *x = value.runs + k;
                for (int64_t j = 0; x->bits && j < x->count; j++) {
                    const int64_t in = j % unit;
                    row[x->first + j] += share * sums[x->column + j - in + in % 4 * wide + in / 4];
                }
            }
        }
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
        for (int64_t p = 0; p < value.size; p++) row[p] *= inverse;
        mix(row, value.size, value.block);
        const float shift = a->scale * dot(query, key.mean, a->head_dim);
        const float log = total == 0.0f ? -INFINITY : logf(total) + peak / LOG2_E + shift;
        const float other = a->joins ? a->log[place] : -INFINITY, top = other > log ? other : log;
        const float reference_log = top == -INFINITY ? 0.0f : top;
        const float own = power((log - reference_log) * LOG2_E), rest = power((other - reference_log) * LOG2_E);
        const float sum = own + rest, of_sum = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (int64_t p = 0; p < value.size; p++) {
            const int64_t c = value.order[p];
            if (c >= value.width) continue;
            const float number = total == 0.0f ? 0.0f : value.mean[c] + value.deviation[c] * row[p];
            out[c] = number * (own * of_sum) + (a->joins ? out[c] * (rest * of_sum) : 0.0f);
        }
        a->log[place] = sum == 0.0f ? -INFINITY : logf(sum) + reference_log;
    }
}

/* Tasks one after the other, until none is left. */
static void *work(void *memory) {
    Call *call = memory;
    const int64_t tasks = call->a->heads * call->chunks * call->parts, n = call->a->num_tokens;
    const int64_t own = __atomic_fetch_add(&call->taken, 1, __ATOMIC_RELAXED);
    for (;;) {
        const int64_t task = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
        if (task >= tasks) return NULL;
        const int64_t item = task / call->parts, part = task % call->parts, blocks = (n + TOKENS - 1) / TOKENS;
        const int64_t head = item / call->chunks, first = item % call->chunks * call->chunk;
        /* Parts of one row's tokens are kept until all are there, each in its task's space. */
        Space *space = call->spaces + (call->parts > 1 ? task : own);
        run_task(call, space, head, first, blocks * part / call->parts * TOKENS,
                 least(blocks * (part + 1) / call->parts * TOKENS, n));
        if (call->parts == 1) finish(call, space, head, first);
    }
}

/* Takes memory of so many bytes, from the beginning of a line of the cache on. */
INSIDE void *take(uintptr_t *left, int64_t bytes) {
    const uintptr_t place = *left;
    *left += (uintptr_t)whole(bytes, 64);
    return (void *)place;
}

/* A thread's memory, laid out from `left` on. */
static uintptr_t lay_out(Space *s, const Call *call, uintptr_t left) {
    const Reading *a = call->a;
    const int64_t rows = whole(call->chunk, call->kind->tile), number = sizeof(float);
    s->packs = take(&left, rows * a->key_size * number);
    s->numbers = take(&left, TOKENS * PIECE * number);
    s->logits = take(&left, rows * TOKENS * number);
    s->sums = take(&left, rows * call->width * number);
    s->peak = take(&left, rows * number);
    s->total = take(&left, rows * number);
    s->row = take(&left, (a->key_size + a->value_size) * number);
    s->key_code = take(&left, TOKENS * a->key_bytes + BEYOND);
    s->value_code = take(&left, TOKENS * a->value_bytes + BEYOND);
    s->key_runs = take(&left, a->key_size / a->key_block * (int64_t)sizeof(Run));
    s->value_runs = take(&left, a->value_size / a->value_block * (int64_t)sizeof(Run));
    return left;
}

/* Columns of values, whatever the heads' runs. */
static int64_t columns(const Reading *a, int64_t unit) {
    int64_t most = 0;
    const int64_t blocks = a->value_size / a->value_block;
    for (int64_t head = 0; head < a->heads; head++) {
        const uint8_t *bits = a->value_bits + head * blocks;
        int64_t width = 0, count = 0;
        for (int64_t i = 0; i < blocks; i++) {
            count += a->value_block;
            if (i + 1 < blocks && bits[i + 1] == bits[i]) continue;
            width += bits[i] ? whole(count, unit) : 0;
            count = 0;
        }
        most = width > most ? width : most;
    }
    return most;
}

/* Whether orders and bits are those of codes so long. */
static int is_sound(const int16_t *order, const uint8_t *bits, int64_t heads, int64_t size, int64_t block,
                    int64_t bytes) {
    for (int64_t i = 0; i < heads * size; i++)
        if (order[i] < 0 || order[i] >= size) return 0;
    return are_sound(bits, heads, size / block, block, bytes);
}

static void work_on(void *call) { work(call); }

/* Works in so many threads: those of the process's OpenMP, where it has one, as they may be awake; or new ones. */
static void work_in(Call *call, int64_t count) {
    typedef void Parallel(void (*)(void *), void *, unsigned, unsigned);
    Parallel *parallel = NULL;
    if (count > 1) *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    if (parallel) {
        parallel(work_on, call, (unsigned)count, 0);
        return;
    }
    pthread_t threads[MOST_THREADS];
    int64_t started = 0;
    /* This thread works too, and does the work of those that do not start. */
    while (started + 1 < count && !pthread_create(threads + started, NULL, work, call)) started++;
    work(call);
    for (int64_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

/* All tasks of a call, in memory from `left` on; or, before there is any, where that ends. */
static uintptr_t run(Call *call, int64_t threads, uintptr_t left, int is_planned) {
    for (int64_t i = 0; i < threads; i++) left = lay_out(call->spaces + i, call, left);
    if (is_planned) return left;
    work_in(call, threads);
    for (int64_t item = 0; call->parts > 1 && item < call->a->heads * call->chunks; item++)
        finish(call, call->spaces + item * call->parts, item / call->chunks, item % call->chunks * call->chunk);
    return left;
}

#define NUM_ADDRESSES 17
#define NUM_SIZES 14

/* Addresses (0 for no bias), sizes, and the scale, in the order of Reading. */
static PyObject *read_codes(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    uintptr_t p[NUM_ADDRESSES];
    int64_t n[NUM_SIZES];
    float scale;
    if (!read_arguments(arguments, count, p, NUM_ADDRESSES, n, NUM_SIZES, &scale, 1)) return NULL;
    const Reading a = {
        (const float *)p[0], (const uint8_t *)p[1], (const uint8_t *)p[2], (const uint16_t *)p[3],
        (const uint16_t *)p[4], (const float *)p[5], (const float *)p[6], (const float *)p[7], (const float *)p[8],
        (const int16_t *)p[9], (const int16_t *)p[10], (const uint8_t *)p[11], (const uint8_t *)p[12],
        (const float *)p[13], (const float *)p[14], (float *)p[15], (float *)p[16], n[0], n[1], n[2], n[3], n[4], n[5],
        n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], scale,
    };
    if (!is_sound(a.key_order, a.key_bits, a.heads, a.key_size, a.key_block, a.key_bytes) ||
        !is_sound(a.value_order, a.value_bits, a.heads, a.value_size, a.value_block, a.value_bytes)) {
        PyErr_SetString(PyExc_ValueError, "orders or bits of the state's frames do not fit its codes; pass a state as merged_attention_with_state "
                        "gave it, or rebuild it from the tokens");
        return NULL;
    }
    const Kind *kind = kind_of(a.widest);
    const int64_t most = least(a.threads < 1 ? 1 : a.threads, MOST_THREADS);
    int64_t chunks = (a.rows + ROWS - 1) / ROWS, parts = 1;
    const int64_t chunk = whole((a.rows + chunks - 1) / (chunks ? chunks : 1), least(a.rows, kind->tile));
    chunks = chunk ? (a.rows + chunk - 1) / chunk : 0;
    const int64_t items = a.heads * chunks;
    if (items) parts = greatest(least(most / items, (a.num_tokens + TOKENS - 1) / TOKENS), 1);
    const int64_t threads = least(most, items * parts);
    Space spaces[MOST_THREADS];
    Call call = {&a, kind, NULL, spaces, chunks, chunk, parts, 0, 0, 0};
    /* Rows that begin in different lines of a cache's sets. */
    call.width = columns(&a, 4 * kind->wide) + PLACES;
    const size_t tables = (MOST_BITS + 1) * MOST_LEVELS * sizeof(float);
    void *memory = malloc((size_t)run(&call, threads, 0, 1) + tables + 64);
    if (!memory) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS;
    float *table = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    for (int64_t bits = 0; bits <= MOST_BITS; bits++)
        for (int64_t i = 0; i < MOST_LEVELS; i++)
            table[bits * MOST_LEVELS + i] = a.levels[(1 << bits) - 1 + (i & ((1 << bits) - 1))];
    call.tables = table;
    run(&call, threads, (uintptr_t)table + tables, 0);
    Py_END_ALLOW_THREADS;
    free(memory);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"read_codes", (PyCFunction)(void (*)(void))read_codes, METH_FASTCALL, "Rows over keys and values in few bits."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_codes", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__codes(void) { return PyModule_Create(&module); }
