/* Merged keys with every key in view: what queries read, a head after the other.

   Letters: H key/value heads of all rows of a batch, G query heads of each, L queries, T tokens, w tokens of a window's
   block, others as in _merging.h. The rule is that of linattn's plain torch (kv_cache/bidirectional.py,
   window.py). Memory is row by row. A head's result depends on no other head.
*/
#include "_merging.h"

typedef struct {
    const float *query;              /* (H, G, L, D) */
    const float *key, *value, *bias; /* (H, T, ·) */
    const float *sample;             /* (H, S, D), times the scale */
    const uint8_t *there;            /* (H, S) */
    const float *mean, *factor;      /* (H, P), of the measure */
    const float *turn, *shift;       /* (H, P, axes), (H, axes): its axes, of keys and values as they are */
    float *out, *log;                /* (H, G, L, Dv), (H, G, L) or none */
    int64_t first_head, last_head;   /* which of them this call is for */
    int64_t groups, head_dim, value_dim, num_queries, length, num_sampled, num_merged;
    int64_t window; /* 0 for none */
    int64_t num_seeds, num_rounds, num_axes;
    float scale;
} Everywhere;

/* Beside a head's memory: the seeds, and what blocks of a window take back. */
typedef struct {
    float *seed;        /* (seeds, P) */
    float *standing;    /* (seeds), logarithms of the masses that they stand for */
    float *turn;        /* (axes/PLACES, P, PLACES) */
    float *shift;       /* (axes) */
    float *along;       /* (PLACES, axes) */
    float *panel;       /* (axes, PLACES) */
    float *centre;      /* (C, axes) */
    float *near;        /* (C) */
    float *share;       /* (T) */
    float *gone;        /* (C) */
    int32_t *heap, *around; /* (seeds), (C) */
} More;

/* Puts number j of key `at` where it belongs among those below it: the least first. */
INSIDE void sink(int32_t *heap, const float *mass, int64_t n, int64_t at) {
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= n) return;
        if (child + 1 < n && mass[heap[child + 1]] < mass[heap[child]]) child++;
        if (!(mass[heap[child]] < mass[heap[at]])) return;
        const int32_t other = heap[at];
        heap[at] = heap[child];
        heap[child] = other;
        at = child;
    }
}

/* The heaviest of n keys, in more->heap. */
INSIDE void find_heaviest(More *more, const float *mass, int64_t n, int64_t count) {
    for (int64_t j = 0; j < count; j++) more->heap[j] = (int32_t)j;
    for (int64_t at = count / 2 - 1; at >= 0; at--) sink(more->heap, mass, count, at);
    for (int64_t j = count; j < n; j++)
        if (mass[j] > mass[more->heap[0]]) {
            more->heap[0] = (int32_t)j;
            sink(more->heap, mass, count, 0);
        }
}

/* Keys from which clusters are made at first, and what they stand for: all where they are few, else the heaviest and,
   evenly by the roots of their masses, others. Their number.
*/
INSIDE int64_t find_seeds(Head *h, const Everywhere *a, More *more, const Tokens *x) {
    const int64_t D = h->head_dim, Dv = h->value_dim, P = D + Dv, n = x->count, C = a->num_merged;
    const int64_t present = weigh(h->mass, n, h->own);
    int64_t count = 0;
    if (present <= a->num_seeds) {
        for (int64_t j = 0; j < n; j++)
            if (h->own[j] > 0.0f) {
                more->heap[count] = (int32_t)j;
                more->standing[count++] = h->mass[j];
            }
    } else {
        find_heaviest(more, h->own, n, C);
        for (int64_t i = 0; i < C; i++) more->standing[i] = logf(h->own[more->heap[i]]);
        for (int64_t i = 0; i < C; i++) h->own[more->heap[i]] = 0.0f;
        /* In float64, as torch adds up. */
        double reach = 0.0, all = 0.0;
        for (int64_t j = 0; j < n; j++) all += sqrtf(h->own[j]);
        const int64_t number = a->num_seeds - C;
        const float last = (float)all;
        int64_t j = -1;
        for (count = C; count < a->num_seeds; count++) {
            const float wanted = last * (((float)(count - C) + 0.5f) / (float)number);
            while (j < 0 || ((float)reach < wanted && j + 1 < n)) reach += sqrtf(h->own[++j]);
            more->heap[count] = (int32_t)j;
            more->standing[count] = logf(sqrtf(h->own[j]) * last / (float)number);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t j = more->heap[i];
        copy(more->seed + i * P, x->key + j * D, (size_t)D * sizeof(float));
        copy(more->seed + i * P + D, x->value + j * Dv, (size_t)Dv * sizeof(float));
    }
    return count;
}

/* Coordinates along the axes of up to TILE keys and values, whole(axes) numbers each. */
INSIDE void turn(const Everywhere *a, const More *more, const float *key, int64_t key_apart, const float *value,
                 int64_t value_apart, int64_t rows, float *to) {
    const int64_t D = a->head_dim, P = D + a->value_dim, R = whole(a->num_axes);
    for (int64_t first = 0; first < R; first += PLACES) {
        Lanes sums[TILE];
        for (int64_t r = 0; r < TILE; r++) sums[r] = -*(const Lanes *)(more->shift + first);
        const float *panel = more->turn + first * P;
        add_tile(key, key_apart, rows, panel, PLACES, D, sums);
        add_tile(value, value_apart, rows, panel + D * PLACES, PLACES, a->value_dim, sums);
        for (int64_t r = 0; r < rows; r++) *(Lanes *)(to + r * R + first) = sums[r];
    }
    for (int64_t i = 0; i < rows * R; i++) to[i] = bounded(to[i]);
}

/* h->number: a cluster for each key, -1 for absent ones. Whether there are as many. */
INSIDE int stay_alone(Head *h, int64_t n, int64_t most) {
    int32_t count = 0;
    for (int64_t j = 0; j < n; j++) h->number[j] = h->mass[j] == -INFINITY ? -1 : count++;
    return count <= most;
}

/* h->number: of each key the cluster whose centre is the nearest along the axes, -1 for absent ones. */
INSIDE void assign(Head *h, const Everywhere *a, More *more, const Tokens *x, int64_t head) {
    const int64_t D = h->head_dim, Dv = h->value_dim, P = D + Dv, C = a->num_merged, A = a->num_axes, R = whole(A);
    clear(more->turn, (size_t)(R * P) * sizeof(float));
    clear(more->shift, (size_t)R * sizeof(float));
    copy(more->shift, a->shift + head * A, (size_t)A * sizeof(float));
    for (int64_t p = 0; p < P; p++)
        for (int64_t i = 0; i < A; i++)
            more->turn[i / PLACES * P * PLACES + p * PLACES + i % PLACES] = a->turn[(head * P + p) * A + i];
    /* The nearest has the largest x·c - |c|²/2. */
    for (int64_t start = 0; start < C; start += TILE) {
        const int64_t rows = least(TILE, C - start);
        const float *mean = h->mean + start * P;
        turn(a, more, mean, P, mean + D, P, rows, more->centre + start * R);
    }
    for (int64_t c = 0; c < C; c++) {
        const float *centre = more->centre + c * R;
        more->near[c] = h->size[c] == 0.0f ? -INFINITY : dot(centre, centre, R) / -2.0f;
    }
    /* Keys side by side: which centre is the nearest is found for all of them at once. */
    for (int64_t start = 0; start < x->count; start += PLACES) {
        const int64_t count = least(PLACES, x->count - start);
        for (int64_t j = 0; j < count; j += TILE) {
            const float *key = x->key + (start + j) * D, *value = x->value + (start + j) * Dv;
            turn(a, more, key, D, value, Dv, least(TILE, count - j), more->along + j * R);
        }
        fill_panels(more->along, R, count, R, 0, more->panel);
        Lanes most;
        Places place = {0};
        for (int64_t j = 0; j < PLACES; j++) most[j] = -INFINITY;
        for (int64_t first = 0; first < C; first += TILE) {
            const int64_t rows = least(TILE, C - first);
            Lanes sums[TILE];
            for (int64_t r = 0; r < TILE; r++) sums[r] = (Lanes){0} + more->near[first + (r < rows ? r : 0)];
            add_tile(more->centre + first * R, R, rows, more->panel, PLACES, A, sums);
            for (int64_t r = 0; r < rows; r++) {
                const Places nearer = sums[r] > most;
                most = pick(nearer, sums[r], most);
                place = (nearer & (int32_t)(first + r)) | (~nearer & place);
            }
        }
        for (int64_t j = 0; j < count; j++)
            h->number[start + j] = h->mass[start + j] == -INFINITY ? -1 : place[j];
    }
}

/* Biases of clusters for the keys around a block: -inf where these leave nothing, or few digits, of one. */
INSIDE void leave(Head *h, const Everywhere *a, More *more, const Back *back, const float *bias) {
    const float faint = sqrtf(1.1920929e-7f);
    for (int64_t c = 0; c < a->num_merged; c++) more->gone[c] = 0.0f, more->around[c] = 0;
    for (int64_t j = 0; j < back->count; j++)
        if (back->number[j] >= 0) {
            more->gone[back->number[j]] += back->share[j];
            more->around[back->number[j]]++;
        }
    for (int64_t c = 0; c < a->num_merged; c++) {
        const int is_faint = 1.0f - more->gone[c] < faint || (float)more->around[c] == h->size[c];
        h->bias[c] = is_faint ? -INFINITY : bias[c] * LOG2_E;
    }
}

/* Rows of consecutive queries of all G heads, from number `start` on. */
INSIDE void read_all(Head *h, const Everywhere *a, int64_t head, int64_t start, int64_t end, int64_t visible,
                     const Back *back) {
    const int64_t D = h->head_dim, Dv = h->value_dim;
    for (int64_t g = 0; g < a->groups; g++)
        for (int64_t from = start; from < end; from += ROWS) {
            const int64_t row = (head * a->groups + g) * a->num_queries + from, count = least(ROWS, end - from);
            read_rows(h, a->query + row * D, count, visible, 0, back, a->out + row * Dv, a->log ? a->log + row : NULL);
        }
}

/* One head's rows. */
BY_PROCESSOR static void head_rows(const Everywhere *a, Head *h, More *more, int64_t head) {
    const int64_t D = a->head_dim, Dv = a->value_dim, P = D + Dv, T = a->length, C = a->num_merged, w = a->window;
    const Tokens x = {a->key + head * T * D, a->value + head * T * Dv, a->bias + head * T, T, D, Dv};
    const uint8_t *there = a->there + head * a->num_sampled;
    h->sampled = a->num_sampled;
    /* The last ones may not be there, in heads of fewer tokens. */
    while (h->sampled > 1 && !there[h->sampled - 1]) h->sampled--;
    copy(h->sample, a->sample + head * a->num_sampled * D, (size_t)(h->sampled * D) * sizeof(float));
    copy(h->there, there, (size_t)h->sampled);
    attend(h, &x);
    /* Few enough stay alone, also where axes tell them not apart. */
    if (!stay_alone(h, T, C)) {
        const int64_t count = find_seeds(h, a, more, &x);
        const Tokens pool = {more->seed, more->seed + D, NULL, count, P, P};
        const int64_t present = weigh(more->standing, count, h->weight);
        copy(h->coordinate, a->mean + head * P, (size_t)P * sizeof(float));
        copy(h->coordinate + 2 * P, a->factor + head * P, (size_t)P * sizeof(float));
        copy(h->point, more->seed, (size_t)(count * P) * sizeof(float));
        place_points(h, h->point, count);
        partition(h, count, present, C, a->num_rounds, h->number);
        average(h, &pool, h->number, more->standing, C);
        assign(h, a, more, &x, head);
    }
    average(h, &x, h->number, h->mass, C);
    conserve(h, C);
    const Tokens clusters = {h->mean, h->mean + D, h->found, C, P, P};
    show(h, &clusters, 0);
    if (!w) {
        read_all(h, a, head, 0, a->num_queries, C, NULL);
        return;
    }
    for (int64_t j = 0; j < T; j++) {
        const int32_t c = h->number[j];
        more->share[j] = c < 0 ? 0.0f : power((h->mass[j] - h->peak[c]) * LOG2_E) / h->total[c];
    }
    const int64_t before = whole(C);
    for (int64_t start = 0; start < T; start += w) {
        const int64_t low = greatest(start - w, 0), high = least(start + 2 * w, T);
        const Tokens around = {x.key + low * D, x.value + low * Dv, x.bias + low, high - low, D, Dv};
        const Back back = {before, high - low, h->number + low, more->share + low};
        leave(h, a, more, &back, h->found);
        show(h, &around, before);
        read_all(h, a, head, start, least(start + w, T), before + high - low, &back);
    }
}

/* All heads of a call, in memory that is laid out from `left` on; or, without heads, where that ends. */
static uintptr_t run(const Everywhere *a, uintptr_t left, int64_t last_head) {
    const int64_t P = a->head_dim + a->value_dim, C = whole(a->num_merged), seeds = whole(a->num_seeds);
    Head h = {.head_dim = a->head_dim, .value_dim = a->value_dim, .scale = a->scale, .most = whole(a->length),
              .points = seeds, .clusters = C, .room = C + whole(least(3 * a->window, a->length))};
    More more;
    left = lay_out(&h, a->num_sampled + 1, left);
    more.seed = take(&left, seeds * P);
    more.standing = take(&left, seeds);
    more.turn = take(&left, whole(a->num_axes) * P);
    more.shift = take(&left, whole(a->num_axes));
    more.along = take(&left, PLACES * whole(a->num_axes));
    more.panel = take(&left, PLACES * whole(a->num_axes));
    more.centre = take(&left, C * whole(a->num_axes));
    more.near = take(&left, C);
    more.share = take(&left, a->length);
    more.gone = take(&left, C);
    more.heap = take(&left, seeds);
    more.around = take(&left, C);
    for (int64_t head = a->first_head; head < last_head; head++) head_rows(a, &h, &more, head);
    return left;
}

#define NUM_ADDRESSES 12
#define NUM_SIZES 13

/* Addresses (0 for none), sizes and the scale, in the order of Everywhere. */
static PyObject *merge_everywhere(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    uintptr_t p[NUM_ADDRESSES];
    int64_t n[NUM_SIZES];
    float scale;
    if (!read_arguments(arguments, count, p, NUM_ADDRESSES, n, NUM_SIZES, &scale, 1)) return NULL;
    const Everywhere a = {
        (const float *)p[0], (const float *)p[1], (const float *)p[2], (const float *)p[3], (const float *)p[4],
        (const uint8_t *)p[5], (const float *)p[6], (const float *)p[7], (const float *)p[8], (const float *)p[9],
        (float *)p[10], (float *)p[11], n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11],
        n[12], scale,
    };
    void *space = malloc((size_t)run(&a, 0, a.first_head) + 64);
    if (!space) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS;
    run(&a, ((uintptr_t)space + 63) / 64 * 64, a.last_head);
    Py_END_ALLOW_THREADS;
    free(space);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"merge_everywhere", (PyCFunction)(void (*)(void))merge_everywhere, METH_FASTCALL, "Rows over merged keys."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_everywhere", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__everywhere(void) { return PyModule_Create(&module); }
