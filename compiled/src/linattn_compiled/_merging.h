/* Weighted keys of one head: what a sample of its queries attends to, which of them are merged, and what rows read.

   Letters: n keys, D head width, Dv value width, P = D + Dv, C clusters, S sampled queries. Formulas are those of linattn's
   plain torch (kv_cache/merging.py, partitioning.py, query_sample.py), in float32.
*/
#ifndef LINATTN_MERGING_H
#define LINATTN_MERGING_H

#include "_lanes.h"

/* Rows of a product that are formed together: as many vectors as registers hold beside their factors. */
#define TILE 6
/* Queries whose weights are held at once, in a cache. */
#define ROWS 64
/* As in plain torch: masses below exp(-60) of the largest count as that, and coordinates are finite and no larger. */
#define FAINTEST -60.0f
#define FARTHEST 1e15f
/* Variance in the square of a mean that rounding makes of rows all alike. */
#define ALIKE 0x1p-36f

typedef int32_t Places __attribute__((vector_size(4 * PLACES), aligned(4), may_alias));

/* Keys (n, D), values (n, Dv) and biases (n), a row so many numbers from the next; no biases: none is masked. */
typedef struct {
    const float *key, *value, *bias;
    int64_t count, key_apart, value_apart;
} Tokens;

/* Memory of one head. Panels hold PLACES vectors each, coordinate by coordinate. */
typedef struct {
    int64_t head_dim, value_dim, width; /* the latter: Dv up to whole vectors */
    float scale;
    /* What rows read, `room` keys at most. */
    int64_t room;
    float *panels;  /* (room/PLACES, D, PLACES) */
    float *values;  /* (room, width) */
    float *bias;    /* (room), in powers of two, -inf for none */
    float *weights; /* (ROWS, room) */
    float *rows;    /* (ROWS, D) */
    float *read;    /* (ROWS, width) */
    /* The sample, and what it attends to: `most` keys at most. */
    int64_t most, sampled;
    float *sample;           /* (S, D), times the scale */
    uint8_t *there;          /* (S) */
    int32_t *attends;        /* (S up to whole vectors), -1 for yes: all of them, where none is there */
    float *normalizer;       /* (S up to whole vectors) */
    float *sample_panels;    /* (S/PLACES, D, PLACES) */
    float *logits;           /* (most, S up to whole vectors) */
    float *mass, *own;       /* (most): logarithms of masses; and what is added up for them */
    int32_t *number;         /* (most), of each key's cluster, -1 for none */
    /* Points that are put into clusters, `points` at most: (points, P), and in panels, and (points) each. */
    int64_t points;
    float *point, *sorted_point, *point_panels, *weight, *sorted, *square, *cost;
    int32_t *order, *nearest, *root, *place, *swap;
    float *coordinate; /* (4, P): means, variances, factors, and of the sample */
    /* Clusters, `clusters` at most: means (C, P) by weights, and (C) each. */
    int64_t clusters;
    float *mean, *total, *peak, *size, *sum, *found; /* the last: biases */
} Head;

/* In each place x where it is chosen, else the other. */
INSIDE Lanes pick(Places chosen, Lanes x, Lanes other) {
    return (Lanes)((chosen & (Places)x) | (~chosen & (Places)other));
}

INSIDE int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
INSIDE int64_t greatest(int64_t x, int64_t y) { return x > y ? x : y; }
INSIDE int64_t whole(int64_t n) { return (n + PLACES - 1) / PLACES * PLACES; }

/* to (rows, PLACES) += a (rows, n) by b (n, PLACES), whose rows lie so far from each other; at most TILE rows. */
INSIDE void add_tile(const float *a, int64_t a_apart, int64_t rows, const float *b, int64_t b_apart, int64_t n,
                     Lanes *to) {
    if (rows == 1) {
        /* As several sums: one would wait for itself. */
        Lanes first = to[0], second = {0}, third = {0}, fourth = {0};
        int64_t i = 0;
        for (; i + 4 <= n; i += 4) {
            first += a[i] * *(const Lanes *)(b + i * b_apart);
            second += a[i + 1] * *(const Lanes *)(b + (i + 1) * b_apart);
            third += a[i + 2] * *(const Lanes *)(b + (i + 2) * b_apart);
            fourth += a[i + 3] * *(const Lanes *)(b + (i + 3) * b_apart);
        }
        for (; i < n; i++) first += a[i] * *(const Lanes *)(b + i * b_apart);
        to[0] = (first + second) + (third + fourth);
        return;
    }
    const float *x[TILE];
    /* Rows that are not there are the first again. */
    for (int64_t r = 0; r < TILE; r++) x[r] = a + (r < rows ? r : 0) * a_apart;
    const float *x0 = x[0], *x1 = x[1], *x2 = x[2], *x3 = x[3], *x4 = x[4], *x5 = x[5];
    /* Named, so that compilers keep them in registers. */
    Lanes s0 = to[0], s1 = to[1], s2 = to[2], s3 = to[3], s4 = to[4], s5 = to[5];
    for (int64_t i = 0; i < n; i++) {
        const Lanes row = *(const Lanes *)(b + i * b_apart);
        s0 += x0[i] * row;
        s1 += x1[i] * row;
        s2 += x2[i] * row;
        s3 += x3[i] * row;
        s4 += x4[i] * row;
        s5 += x5[i] * row;
    }
    to[0] = s0;
    to[1] = s1;
    to[2] = s2;
    to[3] = s3;
    to[4] = s4;
    to[5] = s5;
}

/* Products of rows (rows, n) with vectors in panels, into `to` whose rows lie `apart` numbers from each other. */
INSIDE void products(const float *a, int64_t a_apart, int64_t rows, const float *panels, int64_t num_panels, int64_t n,
                     float *to, int64_t apart) {
    for (int64_t panel = 0; panel < num_panels; panel++)
        for (int64_t r = 0; r < rows; r += TILE) {
            const int64_t some = least(TILE, rows - r);
            Lanes sums[TILE] = {0};
            add_tile(a + r * a_apart, a_apart, some, panels + panel * n * PLACES, PLACES, n, sums);
            for (int64_t k = 0; k < some; k++) *(Lanes *)(to + (r + k) * apart + panel * PLACES) = sums[k];
        }
}

/* Vectors (count, n) that lie `apart` numbers from each other, into panels from number `first` on. */
INSIDE void fill_panels(const float *x, int64_t apart, int64_t count, int64_t n, int64_t first, float *panels) {
    for (int64_t j = 0; j < count; j++) {
        float *to = panels + (first + j) / PLACES * n * PLACES + (first + j) % PLACES;
        for (int64_t i = 0; i < n; i++) to[i * PLACES] = x[j * apart + i];
    }
}

/* What rows read, from number `first` on, filled up to whole vectors with absent keys. */
INSIDE void show(Head *h, const Tokens *x, int64_t first) {
    const int64_t D = h->head_dim, Dv = h->value_dim, end = whole(first + x->count);
    fill_panels(x->key, x->key_apart, x->count, D, first, h->panels);
    for (int64_t j = 0; j < x->count; j++) {
        float *to = h->values + (first + j) * h->width;
        copy(to, x->value + j * x->value_apart, (size_t)Dv * sizeof(float));
        clear(to + Dv, (size_t)(h->width - Dv) * sizeof(float));
        h->bias[first + j] = x->bias ? x->bias[j] * LOG2_E : 0.0f;
    }
    for (int64_t j = first + x->count; j < end; j++) {
        float *to = h->panels + j / PLACES * D * PLACES + j % PLACES;
        for (int64_t i = 0; i < D; i++) to[i * PLACES] = 0.0f;
        clear(h->values + j * h->width, (size_t)h->width * sizeof(float));
        h->bias[j] = -INFINITY;
    }
}

/* What rows take back of clusters, for keys that they see as they are from number `first` on: shares of weights. */
typedef struct {
    int64_t first, count;
    const int32_t *number;
    const float *share;
} Back;

/* Rows of consecutive queries: the first sees so many places, each later one so many more. */
INSIDE void read_rows(Head *h, const float *query, int64_t count, int64_t visible, int64_t more, const Back *back,
                      float *out, float *log) {
    const int64_t D = h->head_dim, Dv = h->value_dim, seen = visible + more * (count - 1), room = whole(seen);
    const float scale = h->scale * LOG2_E;
    float totals[ROWS], peaks[ROWS];
    for (int64_t i = 0; i < count * D; i++) h->rows[i] = query[i] * scale;
    products(h->rows, D, count, h->panels, room / PLACES, D, h->weights, h->room);
    for (int64_t r = 0; r < count; r++) {
        float *row = h->weights + r * h->room;
        const int64_t n = visible + more * r;
        for (int64_t j = 0; j < n; j++) row[j] += h->bias[j];
        float peak = largest(row, n);
        peak = peak == -INFINITY ? 0.0f : peak;
        for (int64_t j = 0; j < n; j++) row[j] = power(row[j] - peak);
        for (int64_t j = n; j < room; j++) row[j] = 0.0f;
        if (back)
            for (int64_t j = 0; j < back->count; j++)
                if (back->number[j] >= 0) row[back->first + j] -= back->share[j] * row[back->number[j]];
        Lanes sum = {0};
        for (int64_t j = 0; j < room; j += PLACES) sum += *(const Lanes *)(row + j);
        float total = 0.0f;
        for (int64_t j = 0; j < PLACES; j++) total += sum[j];
        totals[r] = total;
        peaks[r] = peak;
    }
    for (int64_t j = 0; j < h->width; j += PLACES)
        for (int64_t r = 0; r < count; r += TILE) {
            const int64_t some = least(TILE, count - r);
            Lanes sums[TILE] = {0};
            add_tile(h->weights + r * h->room, h->room, some, h->values + j, h->width, seen, sums);
            for (int64_t k = 0; k < some; k++) *(Lanes *)(h->read + (r + k) * h->width + j) = sums[k];
        }
    for (int64_t r = 0; r < count; r++) {
        const float inverse = totals[r] == 0.0f ? 0.0f : 1.0f / totals[r];
        for (int64_t d = 0; d < Dv; d++) out[r * Dv + d] = h->read[r * h->width + d] * inverse;
        if (log) log[r] = totals[r] == 0.0f ? -INFINITY : logf(totals[r]) + peaks[r] / LOG2_E;
    }
}

/* Numbers in `order`, so that their keys rise, or fall; what is alike stays in its order. */
INSIDE void sort(int32_t *order, int32_t *swap, const float *key, int64_t n, int falling) {
    int32_t *from = order, *to = swap;
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t start = 0; start < n; start += 2 * width) {
            const int64_t middle = least(start + width, n), end = least(start + 2 * width, n);
            int64_t i = start, j = middle;
            for (int64_t k = start; k < end; k++) {
                const int second = i == middle || (j < end && (falling ? key[from[j]] > key[from[i]]
                                                                       : key[from[j]] < key[from[i]]));
                to[k] = second ? from[j++] : from[i++];
            }
        }
        int32_t *other = from;
        from = to;
        to = other;
    }
    if (from != order) copy(order, from, (size_t)n * sizeof(int32_t));
}

/* Of PLACES numbers side by side, halved until one is left. */
INSIDE float greatest_of(Lanes x) {
    float at[PLACES];
    *(Lanes *)at = x;
    for (int64_t n = PLACES / 2; n > 0; n /= 2)
        for (int64_t j = 0; j < n; j++) at[j] = at[j + n] <= at[j] ? at[j] : at[j + n];
    return at[0];
}
INSIDE float sum_of(Lanes x) {
    float at[PLACES];
    *(Lanes *)at = x;
    for (int64_t n = PLACES / 2; n > 0; n /= 2)
        for (int64_t j = 0; j < n; j++) at[j] += at[j + n];
    return at[0];
}

/* 2^(x·log2(e)) in each place. */
INSIDE Lanes exponentials(Lanes x) {
    float at[PLACES];
    *(Lanes *)at = x;
    for (int64_t j = 0; j < PLACES; j++) at[j] = power(at[j] * LOG2_E);
    return *(const Lanes *)at;
}

/* h->logits of keys (n, D) and the sample, side by side for each key, with the keys' biases if any. */
INSIDE void see(Head *h, const float *key, int64_t key_apart, const float *bias, int64_t n) {
    const int64_t D = h->head_dim, S = whole(h->sampled);
    for (int64_t j = 0; j < n; j += TILE)
        for (int64_t first = 0; first < S; first += PLACES) {
            const int64_t rows = least(TILE, n - j);
            Lanes sums[TILE] = {0};
            add_tile(key + j * key_apart, key_apart, rows, h->sample_panels + first * D, PLACES, D, sums);
            for (int64_t r = 0; r < rows; r++)
                *(Lanes *)(h->logits + (j + r) * S + first) = sums[r] + (bias ? bias[j + r] : 0.0f);
        }
}

/* log Σ_s exp(logit - normaliser) of so many keys, over those of the sample that attend; -inf for none. */
INSIDE void log_sums(const Head *h, int64_t n, float *to) {
    const int64_t S = whole(h->sampled);
    for (int64_t j = 0; j < n; j++) {
        float *row = h->logits + j * S;
        Lanes peaks, sums = {0};
        for (int64_t i = 0; i < PLACES; i++) peaks[i] = -INFINITY;
        for (int64_t first = 0; first < S; first += PLACES) {
            const Places seen = *(const Places *)(h->attends + first);
            Lanes x = *(const Lanes *)(row + first) - *(const Lanes *)(h->normalizer + first);
            x = pick(seen, x, (Lanes){0} - INFINITY);
            peaks = pick(x <= peaks, peaks, x);
            *(Lanes *)(row + first) = x;
        }
        const float peak = greatest_of(peaks);
        for (int64_t first = 0; first < S; first += PLACES)
            sums += exponentials(*(const Lanes *)(row + first) - peak);
        to[j] = peak + logf(sum_of(sums));
    }
}

/* What the sample attends to each key in logarithms, -inf for absent ones, and its normalisers. */
INSIDE void attend(Head *h, const Tokens *x) {
    const int64_t n = x->count, D = h->head_dim;
    int any = 0;
    for (int64_t s = 0; s < h->sampled; s++) any |= h->there[s];
    if (h->sampled == 0) {
        /* In place of none, one that attends to all alike; those that are not there do. */
        clear(h->sample, (size_t)D * sizeof(float));
        h->there[0] = 0;
        h->sampled = 1;
    }
    const int64_t S = whole(h->sampled);
    for (int64_t s = 0; s < S; s++) h->attends[s] = s < h->sampled && (h->there[s] || !any) ? -1 : 0;
    clear(h->sample_panels, (size_t)(S * D) * sizeof(float));
    fill_panels(h->sample, D, h->sampled, D, 0, h->sample_panels);
    see(h, x->key, x->key_apart, x->bias, n);
    for (int64_t first = 0; first < S; first += PLACES) {
        Lanes peaks, totals = {0};
        for (int64_t i = 0; i < PLACES; i++) peaks[i] = -INFINITY;
        for (int64_t j = 0; j < n; j++) {
            const Lanes row = *(const Lanes *)(h->logits + j * S + first);
            peaks = pick(row > peaks, row, peaks);
        }
        for (int64_t i = 0; i < PLACES; i++) peaks[i] = peaks[i] == -INFINITY ? 0.0f : peaks[i];
        for (int64_t j = 0; j < n; j++) totals += exponentials(*(const Lanes *)(h->logits + j * S + first) - peaks);
        for (int64_t i = 0; i < PLACES; i++) h->normalizer[first + i] = logf(totals[i]) + peaks[i];
    }
    log_sums(h, n, h->mass);
    for (int64_t j = 0; j < n; j++)
        if (x->bias && x->bias[j] == -INFINITY) h->mass[j] = -INFINITY;
}

/* exp of logarithms, relative to the largest; 0 for absent keys. How many are present. */
INSIDE int64_t weigh(const float *log_mass, int64_t n, float *weight) {
    float peak = -INFINITY;
    int64_t present = 0;
    for (int64_t j = 0; j < n; j++) {
        const float log = log_mass[j] == log_mass[j] ? log_mass[j] : 0.0f;
        peak = log > peak ? log : peak;
    }
    for (int64_t j = 0; j < n; j++) {
        const int is_there = log_mass[j] != -INFINITY;
        const float log = (log_mass[j] == log_mass[j] ? log_mass[j] : 0.0f) - peak;
        weight[j] = is_there ? power((log > FAINTEST ? log : FAINTEST) * LOG2_E) : 0.0f;
        present += is_there;
    }
    return present;
}

/* Means of coordinates by shares, and the factors by which distances are what the sample sees of keys, and of values
   that count as much. Queries all alike, or none, tell no coordinates apart: each counts 1; values all alike count 0.
*/
INSIDE void measure(Head *h, const float *points, const float *share, int64_t n) {
    const int64_t D = h->head_dim, P = D + h->value_dim;
    float *mean = h->coordinate, *variance = mean + P, *factor = variance + P, *center = factor + P;
    float sampled = 0.0f, wide = 0.0f, narrow = 0.0f, varied = 0.0f, size = 0.0f, length = 0.0f;
    clear(mean, (size_t)(4 * P) * sizeof(float));
    for (int64_t j = 0; j < n; j++)
        if (share[j] > 0.0f)
            for (int64_t p = 0; p < P; p++) mean[p] += share[j] * points[j * P + p];
    for (int64_t j = 0; j < n; j++)
        if (share[j] > 0.0f)
            for (int64_t p = 0; p < P; p++) {
                const float far = points[j * P + p] - mean[p];
                variance[p] += share[j] * far * far;
            }
    for (int64_t s = 0; s < h->sampled; s++) sampled += h->there[s];
    const float part = 1.0f / (sampled < 1.0f ? 1.0f : sampled);
    for (int64_t s = 0; s < h->sampled; s++)
        if (h->there[s])
            for (int64_t d = 0; d < D; d++) center[d] += part * h->sample[s * D + d];
    for (int64_t s = 0; s < h->sampled; s++)
        if (h->there[s])
            for (int64_t d = 0; d < D; d++) {
                const float far = h->sample[s * D + d] - center[d];
                factor[d] += part * far * far;
            }
    for (int64_t d = 0; d < D; d++) varied += factor[d], size += center[d] * center[d];
    for (int64_t d = 0; d < D && varied <= ALIKE * size; d++) factor[d] = 1.0f;
    for (int64_t d = 0; d < D; d++) wide += variance[d] * factor[d];
    for (int64_t p = D; p < P; p++) narrow += variance[p], length += mean[p] * mean[p];
    const float worth = narrow <= ALIKE * length ? 0.0f : sqrtf(wide / narrow);
    for (int64_t d = 0; d < D; d++) factor[d] = sqrtf(factor[d]);
    for (int64_t p = D; p < P; p++) factor[p] = worth;
}

/* A coordinate that is finite and whose square is. */
INSIDE float bounded(float x) {
    x = x > FARTHEST ? FARTHEST : x;
    x = x < -FARTHEST ? -FARTHEST : x;
    return x == x ? x : FARTHEST;
}

/* Keys and values as points in the measure, in place. */
INSIDE void place_points(Head *h, float *points, int64_t n) {
    const int64_t P = h->head_dim + h->value_dim;
    const float *mean = h->coordinate, *factor = mean + 2 * P;
    for (int64_t j = 0; j < n; j++)
        for (int64_t p = 0; p < P; p++) points[j * P + p] = bounded((points[j * P + p] - mean[p]) * factor[p]);
}

/* The least of numbers so far, in each place, and which it is of: all of them greater than any at first. */
typedef struct {
    Lanes least;
    Places number;
} Least;

INSIDE Least none_yet(void) {
    Least found;
    for (int64_t j = 0; j < PLACES; j++) found.least[j] = INFINITY, found.number[j] = 0;
    return found;
}

/* With those of consecutive numbers from `first` on, below `stop`. */
INSIDE void keep_least(Least *found, Lanes x, int64_t first, int64_t stop) {
    Places number;
    for (int64_t j = 0; j < PLACES; j++) number[j] = (int32_t)(first + j);
    const Places less = (x < found->least) & (number < (int32_t)stop);
    found->least = pick(less, x, found->least);
    found->number = (less & number) | (~less & found->number);
}

/* The least of all places, and its number in `number`: the first of equal ones. */
INSIDE float least_of(const Least *found, int32_t *number) {
    float least = INFINITY;
    *number = 0;
    for (int64_t j = 0; j < PLACES; j++)
        if (found->least[j] < least || (found->least[j] == least && found->number[j] < *number)) {
            least = found->least[j];
            *number = found->number[j];
        }
    return least;
}

/* The least square of a distance to a point before it, and that point's place; points by their masses. */
INSIDE void find_nearest(Head *h, int64_t n, int64_t P) {
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t rows = least(TILE, n - start), last = start + rows - 1;
        Least found[TILE];
        for (int64_t r = 0; r < TILE; r++) found[r] = none_yet();
        for (int64_t first = 0; first < last; first += PLACES) {
            Lanes sums[TILE] = {0};
            add_tile(h->sorted_point + start * P, P, rows, h->point_panels + first * P, PLACES, P, sums);
            const Lanes square = *(const Lanes *)(h->square + first);
            for (int64_t r = 0; r < rows; r++) keep_least(found + r, square - 2.0f * sums[r], first, start + r);
        }
        for (int64_t r = 0; r < rows; r++) {
            const float distance = least_of(found + r, h->nearest + start + r) + h->square[start + r];
            h->cost[start + r] = distance < 0.0f ? 0.0f : distance;
        }
    }
}

/* Joins so many of h->point (n, P), by h->weight, to the nearest heavier ones, the cheapest first: h->place is the new
   number of each, in their order, -1 for absent ones. How many are left.
*/
INSIDE int32_t merge_round(Head *h, int64_t n, int64_t joining) {
    const int64_t P = h->head_dim + h->value_dim;
    for (int64_t j = 0; j < n; j++) h->order[j] = (int32_t)j;
    sort(h->order, h->swap, h->weight, n, 1);
    for (int64_t i = 0; i < n; i++) {
        float *point = h->sorted_point + i * P;
        copy(point, h->point + h->order[i] * P, (size_t)P * sizeof(float));
        h->square[i] = dot(point, point, P);
        h->sorted[i] = h->weight[h->order[i]];
    }
    fill_panels(h->sorted_point, P, n, P, 0, h->point_panels);
    find_nearest(h, n, P);
    for (int64_t i = 0; i < n; i++) {
        const float m = h->sorted[i], other = h->sorted[h->nearest[i]];
        h->cost[i] = i > 0 && m > 0.0f ? h->cost[i] * m * (other / (m + other)) : INFINITY;
        h->root[i] = (int32_t)i;
    }
    sort(h->root, h->swap, h->cost, n, 0);
    /* Those that join, by their places; and what each belongs to, which is before it. */
    int32_t *joins = h->swap;
    clear(joins, (size_t)n * sizeof(int32_t));
    for (int64_t i = 0; i < joining; i++) joins[h->root[i]] = 1;
    for (int64_t i = 0; i < n; i++) h->root[i] = joins[i] ? h->root[h->nearest[i]] : (int32_t)i;
    for (int64_t i = 0; i < n; i++) h->place[h->order[i]] = h->sorted[i] > 0.0f && !joins[i];
    int32_t left = 0;
    for (int64_t j = 0; j < n; j++) h->place[j] = h->place[j] ? left++ : -1;
    for (int64_t i = 0; i < n; i++)
        if (joins[i]) h->place[h->order[i]] = h->place[h->order[h->root[i]]];
    return left;
}

/* Puts h->point (n, P), by h->weight and `present` of them there, into at most `left` clusters: `number` of each. */
INSIDE void partition(Head *h, int64_t n, int64_t present, int64_t left, int64_t rounds, int32_t *number) {
    const int64_t P = h->head_dim + h->value_dim, all = n;
    for (int64_t j = 0; j < all; j++) number[j] = (int32_t)j;
    for (int64_t round = rounds - 1; round >= 0; round--) {
        const int64_t excess = greatest(present - left, 0);
        if (round && !excess) continue;
        const int64_t now = merge_round(h, n, round ? excess - excess / 2 : excess);
        for (int64_t j = 0; j < all; j++) number[j] = number[j] < 0 ? -1 : h->place[number[j]];
        if (!round) break;
        /* At the means of their members. */
        clear(h->sorted_point, (size_t)(now * P) * sizeof(float));
        clear(h->sorted, (size_t)now * sizeof(float));
        for (int64_t j = 0; j < n; j++) {
            const int32_t c = h->place[j];
            if (c < 0) continue;
            h->sorted[c] += h->weight[j];
            for (int64_t p = 0; p < P; p++) h->sorted_point[c * P + p] += h->weight[j] * h->point[j * P + p];
        }
        for (int64_t c = 0; c < now; c++) {
            const float inverse = 1.0f / h->sorted[c];
            for (int64_t p = 0; p < P; p++) h->point[c * P + p] = h->sorted_point[c * P + p] * inverse;
            h->weight[c] = h->sorted[c];
        }
        n = present = now;
    }
}

/* Clusters of keys, by number: means by exp of logarithms of weights, numbers of members, and sums of their biases. */
INSIDE void average(Head *h, const Tokens *x, const int32_t *number, const float *log_weight, int64_t left) {
    const int64_t D = h->head_dim, Dv = h->value_dim, P = D + Dv;
    clear(h->mean, (size_t)(left * P) * sizeof(float));
    for (int64_t c = 0; c < left; c++) h->peak[c] = -INFINITY, h->total[c] = h->size[c] = h->sum[c] = 0.0f;
    for (int64_t j = 0; j < x->count; j++)
        if (number[j] >= 0 && !(log_weight[j] <= h->peak[number[j]])) h->peak[number[j]] = log_weight[j];
    for (int64_t j = 0; j < x->count; j++) {
        const int32_t c = number[j];
        if (c < 0) continue;
        const float weight = power((log_weight[j] - h->peak[c]) * LOG2_E);
        const float *key = x->key + j * x->key_apart, *value = x->value + j * x->value_apart;
        float *mean = h->mean + c * P;
        h->total[c] += weight;
        h->size[c] += 1.0f;
        h->sum[c] += x->bias ? x->bias[j] : 0.0f;
        for (int64_t d = 0; d < D; d++) mean[d] += weight * key[d];
        for (int64_t d = 0; d < Dv; d++) mean[D + d] += weight * value[d];
    }
    for (int64_t c = 0; c < left; c++) {
        const float inverse = h->total[c] == 0.0f ? 1.0f : 1.0f / h->total[c];
        for (int64_t p = 0; p < P; p++) h->mean[c * P + p] *= inverse;
    }
}

/* h->found: biases by which the sample attends to clusters as much as to their members; -inf for free places. A key
   that stays alone keeps its own to the bit.
*/
INSIDE void conserve(Head *h, int64_t left) {
    const int64_t D = h->head_dim, P = D + h->value_dim;
    see(h, h->mean, P, NULL, left);
    log_sums(h, left, h->found);
    for (int64_t c = 0; c < left; c++) {
        const float bias = logf(h->total[c]) + h->peak[c] - h->found[c];
        h->found[c] = h->size[c] == 0.0f ? -INFINITY : h->size[c] == 1.0f ? h->sum[c] : bias;
    }
}

/* Takes so many numbers of 4 bytes from what is left, from the beginning of a line of the cache on. */
INSIDE void *take(uintptr_t *left, int64_t count) {
    const uintptr_t found = *left;
    *left += (uintptr_t)(count * 4 + 63) / 64 * 64;
    return (void *)found;
}

/* A head's memory, laid out from `left` on, for its widths and the most of each that are set; where it ends. */
static uintptr_t lay_out(Head *h, int64_t samples, uintptr_t left) {
    const int64_t D = h->head_dim, P = D + h->value_dim, most = h->most, points = h->points, clusters = h->clusters;
    float **of_keys[] = {&h->mass, &h->own}, **of_points[] = {&h->weight, &h->sorted, &h->square, &h->cost};
    float **of_clusters[] = {&h->total, &h->peak, &h->size, &h->sum, &h->found};
    int32_t **numbers[] = {&h->order, &h->nearest, &h->root, &h->place, &h->swap};
    h->width = whole(h->value_dim);
    h->panels = take(&left, h->room * D);
    h->values = take(&left, h->room * h->width);
    h->bias = take(&left, h->room);
    h->weights = take(&left, ROWS * h->room);
    h->rows = take(&left, ROWS * D);
    h->read = take(&left, ROWS * h->width);
    h->sample = take(&left, samples * D);
    h->there = take(&left, samples);
    h->attends = take(&left, whole(samples));
    h->normalizer = take(&left, whole(samples));
    h->sample_panels = take(&left, whole(samples) * D);
    h->logits = take(&left, whole(samples) * most);
    h->number = take(&left, most);
    h->point = take(&left, points * P);
    h->sorted_point = take(&left, points * P);
    h->point_panels = take(&left, points * P);
    h->coordinate = take(&left, 4 * P);
    h->mean = take(&left, clusters * P);
    for (int i = 0; i < 2; i++) *of_keys[i] = take(&left, most);
    for (int i = 0; i < 4; i++) *of_points[i] = take(&left, points);
    for (int i = 0; i < 5; i++) *of_clusters[i] = take(&left, clusters);
    for (int i = 0; i < 5; i++) *numbers[i] = take(&left, points);
    return left;
}

#endif
