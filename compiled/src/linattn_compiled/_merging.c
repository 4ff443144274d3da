/* A stream with merged keys: what its queries read, and how keys are merged, a head after the other.

   Letters: H key/value heads of all rows of a batch, G query heads of each, T tokens, L queries (the last tokens'), others
   as in _merging.h. The rule is that of linattn's plain torch (kv_cache/stream.py). Memory is row by row.
   A head's result depends on no other head, and what is kept on where blocks begin alone, not on where calls do.
*/
#include "_merging.h"

typedef struct {
    const float *query;                                   /* (H, G, L, D) */
    const float *key, *value, *bias;                      /* (H, T, ·) */
    const float *merged_key, *merged_value, *merged_bias; /* (H, num_before, ·) */
    const float *sample;                                  /* (H, num_sampled, D), times the scale */
    const uint8_t *there;                                 /* (H, num_sampled) */
    const int64_t *places;                                /* (num_places, 2): tokens of a block, and heads, sampled */
    float *out, *log;                                     /* (H, G, L, Dv), (H, G, L) or none */
    float *key_after, *value_after, *bias_after;          /* (H, num_after, ·) */
    float *sample_after;                                  /* (H, sampled_after, D) */
    uint8_t *there_after;
    int64_t first_head, last_head; /* which of them this call is for */
    int64_t groups, head_dim, value_dim, length, num_queries;
    int64_t num_kept; /* of the tokens, those that earlier calls had */
    int64_t num_before, num_sampled, num_places, sample_size, window, block, num_merged, num_left;
    int64_t num_after, sampled_after;
    float scale;
} Stream;

/* The merged keys of a head, then those that join: keys and values beside each other (·, P), and biases. */
typedef struct {
    float *key, *bias;
    int64_t count;
} Memory;

/* A block of tokens joins the merged keys, which are merged where they are too many. */
INSIDE void join(Head *h, const Stream *a, Memory *memory, const Tokens *block) {
    const int64_t D = h->head_dim, Dv = h->value_dim, P = D + Dv;
    for (int64_t j = 0; j < block->count; j++) {
        float *to = memory->key + (memory->count + j) * P;
        copy(to, block->key + j * D, (size_t)D * sizeof(float));
        copy(to + D, block->value + j * Dv, (size_t)Dv * sizeof(float));
        memory->bias[memory->count + j] = block->bias ? block->bias[j] : 0.0f;
    }
    memory->count += block->count;
    if (memory->count <= a->num_merged) return;
    const int64_t n = memory->count, sampled = h->sampled, left = a->num_left;
    const Tokens all = {memory->key, memory->key + D, memory->bias, n, P, P};
    attend(h, &all);
    const int64_t present = weigh(h->mass, n, h->weight);
    const float share = 1.0f / (float)greatest(present, 1);
    for (int64_t j = 0; j < n; j++) h->own[j] = h->mass[j] == -INFINITY ? 0.0f : share;
    measure(h, memory->key, h->own, n);
    copy(h->point, memory->key, (size_t)(n * P) * sizeof(float));
    place_points(h, h->point, n);
    partition(h, n, present, left, 1, h->number);
    average(h, &all, h->number, h->mass, left);
    conserve(h, left);
    copy(memory->key, h->mean, (size_t)(left * P) * sizeof(float));
    copy(memory->bias, h->found, (size_t)left * sizeof(float));
    memory->count = left;
    h->sampled = sampled;
}

/* The sample with queries (G, count) of a block, from its token number `first` on; the oldest go. */
INSIDE void sample(Head *h, const Stream *a, const float *query, const float *bias, int64_t count, int64_t first) {
    const int64_t D = h->head_dim;
    for (int64_t i = 0; i < a->num_places; i++) {
        const int64_t token = a->places[2 * i] - first, head = a->places[2 * i + 1];
        if (token < 0 || token >= count) continue;
        const float *from = query + (head * a->num_queries + token) * D;
        float *to = h->sample + h->sampled * D;
        int there = !bias || bias[token] != -INFINITY;
        for (int64_t d = 0; d < D; d++) there &= fabsf(from[d] * h->scale) <= FARTHEST;
        for (int64_t d = 0; d < D; d++) to[d] = there ? from[d] * h->scale : 0.0f;
        h->there[h->sampled++] = (uint8_t)there;
    }
    const int64_t gone = h->sampled - a->sample_size;
    if (gone <= 0) return;
    h->sampled = a->sample_size;
    move(h->sample, h->sample + gone * D, (size_t)(h->sampled * D) * sizeof(float));
    move(h->there, h->there + gone, (size_t)h->sampled);
}

/* One head's stream; whether it ends with as many keys as were expected. */
BY_PROCESSOR static int head_stream(const Stream *a, Head *h, Memory *memory, int64_t head) {
    const int64_t D = a->head_dim, Dv = a->value_dim, P = D + Dv, T = a->length, L = a->num_queries, b = a->block;
    const int64_t first = T - L;
    const float *query = a->query + head * a->groups * L * D, *key = a->key + head * T * D;
    const float *value = a->value + head * T * Dv, *bias = a->bias + head * T;
    float *out = a->out + head * a->groups * L * Dv, *log = a->log ? a->log + head * a->groups * L : NULL;
    memory->count = a->num_before;
    for (int64_t j = 0; j < memory->count; j++) {
        float *to = memory->key + j * P;
        copy(to, a->merged_key + (head * memory->count + j) * D, (size_t)D * sizeof(float));
        copy(to + D, a->merged_value + (head * memory->count + j) * Dv, (size_t)Dv * sizeof(float));
        memory->bias[j] = a->merged_bias[head * memory->count + j];
    }
    h->sampled = a->num_sampled;
    copy(h->sample, a->sample + head * h->sampled * D, (size_t)(h->sampled * D) * sizeof(float));
    copy(h->there, a->there + head * h->sampled, (size_t)h->sampled);
    int shown = 0;
    for (int64_t begin = a->num_kept / b * b; begin < T; begin += b) {
        const int64_t end = least(begin + b, T), near = greatest(begin - a->window, 0);
        const int64_t oldest = greatest(near - b, 0), start = greatest(begin, first);
        if (near > oldest) {
            const Tokens gone = {key + oldest * D, value + oldest * Dv, bias + oldest, near - oldest, D, Dv};
            join(h, a, memory, &gone);
            shown = 0;
        }
        if (start >= end) continue;
        const Tokens merged = {memory->key, memory->key + D, memory->bias, memory->count, P, P};
        if (!shown) show(h, &merged, 0);
        shown = 1;
        const int64_t before = whole(memory->count);
        const Tokens around = {key + near * D, value + near * Dv, bias + near, end - near, D, Dv};
        show(h, &around, before);
        for (int64_t g = 0; g < a->groups; g++)
            for (int64_t from = start; from < end; from += ROWS) {
                const int64_t row = g * L + from - first, count = least(ROWS, end - from);
                read_rows(h, query + row * D, count, before + from - near + 1, 1, NULL, out + row * Dv,
                          log ? log + row : NULL);
            }
        sample(h, a, query + (start - first) * D, bias + start, end - start, start - begin);
    }
    if (memory->count != a->num_after || h->sampled != a->sampled_after) return 0;
    for (int64_t j = 0; j < memory->count; j++) {
        const float *from = memory->key + j * P;
        copy(a->key_after + (head * memory->count + j) * D, from, (size_t)D * sizeof(float));
        copy(a->value_after + (head * memory->count + j) * Dv, from + D, (size_t)Dv * sizeof(float));
        a->bias_after[head * memory->count + j] = memory->bias[j];
    }
    copy(a->sample_after + head * h->sampled * D, h->sample, (size_t)(h->sampled * D) * sizeof(float));
    copy(a->there_after + head * h->sampled, h->there, (size_t)h->sampled);
    return 1;
}

/* All heads of a call, in memory that is laid out from `left` on; or, without heads, where that ends. */
static uintptr_t run(const Stream *a, uintptr_t left, int64_t last_head, int *as_expected) {
    const int64_t P = a->head_dim + a->value_dim;
    /* No more than there are: a config may have room for texts of any length. */
    const int64_t most = whole(least(a->num_merged + a->block, a->num_before + a->length));
    const int64_t near = whole(least(a->window + a->block, a->length));
    Head h = {.head_dim = a->head_dim, .value_dim = a->value_dim, .scale = a->scale, .most = most, .points = most,
              .clusters = most, .room = most + near};
    Memory memory;
    left = lay_out(&h, a->sample_size + a->num_places + 1, left);
    memory.key = take(&left, most * P);
    memory.bias = take(&left, most);
    for (int64_t head = a->first_head; head < last_head && *as_expected; head++)
        *as_expected = head_stream(a, &h, &memory, head);
    return left;
}

#define NUM_ADDRESSES 17
#define NUM_SIZES 18

/* Addresses (0 for none), sizes, and the scale, in the order of Stream. */
static PyObject *merge_stream(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    uintptr_t p[NUM_ADDRESSES];
    int64_t n[NUM_SIZES];
    float scale;
    if (!read_arguments(arguments, count, p, NUM_ADDRESSES, n, NUM_SIZES, &scale, 1)) return NULL;
    const Stream a = {
        (const float *)p[0], (const float *)p[1], (const float *)p[2], (const float *)p[3], (const float *)p[4],
        (const float *)p[5], (const float *)p[6], (const float *)p[7], (const uint8_t *)p[8], (const int64_t *)p[9],
        (float *)p[10], (float *)p[11], (float *)p[12], (float *)p[13], (float *)p[14], (float *)p[15],
        (uint8_t *)p[16], n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13],
        n[14], n[15], n[16], n[17], scale,
    };
    int as_expected = 1;
    void *space = malloc((size_t)run(&a, 0, a.first_head, &as_expected) + 64);
    if (!space) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS;
    run(&a, ((uintptr_t)space + 63) / 64 * 64, a.last_head, &as_expected);
    Py_END_ALLOW_THREADS;
    free(space);
    if (!as_expected) {
        PyErr_SetString(PyExc_RuntimeError, "merge_stream ended with other numbers of keys than its caller expected");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"merge_stream", (PyCFunction)(void (*)(void))merge_stream, METH_FASTCALL, "Rows over a stream with merged keys."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_merging", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__merging(void) { return PyModule_Create(&module); }
