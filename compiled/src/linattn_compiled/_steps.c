/* One token of linear attention with exponential features, fold and reading in one pass over the sums.

   Letters: B batch, H key/value heads, G query heads per key/value head, D head width, Dv value width, R features, m
   rows of W (m = R, or R/2 where each is used with both signs). With p(x) = x·W + o and t(x) = constant - scale·|x|²/2,
   exponents in powers of two (W, o and t times log2 e):

       log φ(x) = p(x) + t(x)
       S' = 2^((m - m') log2 e)·S + φ(k)·2^(b - m' log2 e)·vᵀ,   z' = the same with 1 in place of v
       out = φ(q)ᵀS' / φ(q)ᵀz',   0 where φ(q)ᵀz' = 0

   m' is m, but for features that exceed it by `rise`, which take their own exponent. All sums are float32; each is
   added up in one order, whatever the processor's vectors hold. Memory is row by row.
*/
#include "_lanes.h"

typedef struct {
    const float *query, *key, *value, *bias, *weights, *constants, *S, *z, *m;
    float *out, *den, *reference, *S_after, *z_after, *m_after;
    int64_t batch, heads, groups, head_dim, value_dim, features, rows;
    int64_t bias_heads, weights_stride, constants_stride; /* H or 1; from head to head, 0 where all share one */
    float scale, constant, rise;
} Step;

/* Rows of S that are written, then read, while they lie in the cache nearest to the processor. */
#define ROWS 32

/* to += x·M of one row, (n) by (n, m) whose rows lie `apart` numbers from each other. */
INSIDE void add_product(const float *x, const float *M, int64_t n, int64_t m, int64_t apart, float *restrict to) {
    int64_t j = 0;
    for (; j + 4 * PLACES <= m; j += 4 * PLACES) {
        Lanes *place = (Lanes *)(to + j);
        /* Named, so that compilers keep them in registers. */
        Lanes first = place[0], second = place[1], third = place[2], fourth = place[3];
        for (int64_t i = 0; i < n; i++) {
            const Lanes *row = (const Lanes *)(M + i * apart + j);
            first += x[i] * row[0];
            second += x[i] * row[1];
            third += x[i] * row[2];
            fourth += x[i] * row[3];
        }
        place[0] = first;
        place[1] = second;
        place[2] = third;
        place[3] = fourth;
    }
    for (int64_t i = 0; j < m && i < n; i++)
        for (int64_t k = j; k < m; k++) to[k] += x[i] * M[i * apart + k];
}

/* p(x) of one row: (D) by (D, m). */
INSIDE void project(const Step *a, const float *x, const float *weights, const float *constants, float *restrict p) {
    const int64_t rows = a->rows, features = a->features;
    clear(p, (size_t)rows * sizeof(float));
    add_product(x, weights, a->head_dim, rows, rows, p);
    for (int64_t r = rows; r < features; r++) p[r] = -p[r - rows];
    if (constants)
        for (int64_t r = 0; r < features; r++) p[r] += constants[r];
}

/* t(x) in powers of two. */
INSIDE float term(const Step *a, const float *x) {
    return LOG2_E * (a->constant - 0.5f * a->scale * dot(x, x, a->head_dim));
}

/* A key/value head's token: `space` has room for (2 + G)·R numbers. */
BY_PROCESSOR static void head_step(const Step *a, int64_t place, float *space) {
    const int64_t R = a->features, D = a->head_dim, Dv = a->value_dim, G = a->groups;
    const int64_t batch = place / a->heads, head = place % a->heads;
    const float *weights = a->weights + head * a->weights_stride;
    const float *constants = a->constants ? a->constants + head * a->constants_stride : NULL;
    const float *m = a->m + place * R, *z = a->z + place * R, *S = a->S + place * R * Dv;
    float *restrict m_after = a->m_after + place * R, *restrict z_after = a->z_after + place * R;
    float *restrict S_after = a->S_after + place * R * Dv;
    const float *key = a->key + place * D, *value = a->value + place * Dv;
    const float bias = a->bias ? a->bias[batch * a->bias_heads + (a->bias_heads > 1 ? head : 0)] : 0.0f;
    const int is_masked = bias == -INFINITY;
    float *restrict phi = space, *restrict decay = space + R, *features = space + 2 * R;

    copy(m_after, m, (size_t)R * sizeof(float));
    copy(z_after, z, (size_t)R * sizeof(float));
    for (int64_t r = 0; r < R; r++) decay[r] = 1.0f;
    if (is_masked) {
        clear(phi, (size_t)R * sizeof(float));
    } else {
        project(a, key, weights, constants, phi);
        const float shift = term(a, key) + LOG2_E * bias;
        for (int64_t r = 0; r < R; r++) phi[r] += shift;
        float *restrict above = features;
        for (int64_t r = 0; r < R; r++) above[r] = phi[r] - LOG2_E * m[r];
        /* Rare late in a sequence, so the loops beside it stay short. */
        if (largest(above, R) > a->rise)
            for (int64_t r = 0; r < R; r++)
                if (above[r] > a->rise) {
                    m_after[r] = phi[r] / LOG2_E;
                    decay[r] = power(LOG2_E * (m[r] - m_after[r]));
                    z_after[r] = z[r] * decay[r];
                    above[r] = 0.0f;
                }
        for (int64_t r = 0; r < R; r++) phi[r] = power(above[r]);
        for (int64_t r = 0; r < R; r++) z_after[r] += phi[r];
    }
    float *restrict out = a->out + place * G * Dv;
    for (int64_t g = 0; g < G; g++) {
        const float *query = a->query + (place * G + g) * D;
        float *row = features + g * R;
        project(a, query, weights, constants, row);
        for (int64_t r = 0; r < R; r++) row[r] += LOG2_E * m_after[r];
        const float peak = largest(row, R);
        for (int64_t r = 0; r < R; r++) row[r] = power(row[r] - peak);
        a->den[place * G + g] = dot(row, z_after, R);
        a->reference[place * G + g] = (peak + term(a, query)) / LOG2_E;
        clear(out + g * Dv, (size_t)Dv * sizeof(float));
    }
    for (int64_t first = 0; first < R; first += ROWS) {
        const int64_t stop = first + ROWS < R ? first + ROWS : R;
        if (is_masked)
            copy(S_after + first * Dv, S + first * Dv, (size_t)((stop - first) * Dv) * sizeof(float));
        else
            for (int64_t r = first; r < stop; r++)
                for (int64_t d = 0; d < Dv; d++) S_after[r * Dv + d] = S[r * Dv + d] * decay[r] + phi[r] * value[d];
        for (int64_t g = 0; g < G; g++)
            add_product(features + g * R + first, S_after + first * Dv, stop - first, Dv, Dv, out + g * Dv);
    }
    for (int64_t g = 0; g < G; g++) {
        const float total = a->den[place * G + g];
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
        for (int64_t d = 0; d < Dv; d++) out[g * Dv + d] *= inverse;
    }
}

/* Addresses (0 for none), then sizes, then numbers, in the order of Step; R and rows of W are the sixth and seventh. */
static PyObject *step(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    uintptr_t places[15];
    int64_t sizes[10];
    float numbers[3];
    if (!read_arguments(arguments, count, places, 15, sizes, 10, numbers, 3)) return NULL;
    const Step a = {
        (const float *)places[0], (const float *)places[1], (const float *)places[2], (const float *)places[3],
        (const float *)places[4], (const float *)places[5], (const float *)places[6], (const float *)places[7],
        (const float *)places[8], (float *)places[9], (float *)places[10], (float *)places[11], (float *)places[12],
        (float *)places[13], (float *)places[14], sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
        sizes[7], sizes[8], sizes[9], numbers[0], numbers[1], numbers[2],
    };
    float *space = malloc((size_t)((2 + a.groups) * a.features + 1) * sizeof(float));
    if (!space) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS;
    for (int64_t place = 0; place < a.batch * a.heads; place++) head_step(&a, place, space);
    Py_END_ALLOW_THREADS;
    free(space);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"step", (PyCFunction)(void (*)(void))step, METH_FASTCALL, "One token folded into sums, and its row."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_steps", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__steps(void) { return PyModule_Create(&module); }
