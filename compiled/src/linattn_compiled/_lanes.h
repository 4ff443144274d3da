/* What compiled code has in common: vectors of any width, products with them, powers of two. */
#ifndef LINATTN_LANES_H
#define LINATTN_LANES_H

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define BY_PROCESSOR __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define BY_PROCESSOR
#endif
#define INSIDE static inline __attribute__((always_inline))

#define LOG2_E 1.44269504088896340736f

/* As the library's functions, which may not be given the null pointer that memory of size 0 has. */
INSIDE void copy(void *restrict to, const void *restrict from, size_t size) {
    if (size) memcpy(to, from, size);
}
INSIDE void move(void *to, const void *from, size_t size) {
    if (size) memmove(to, from, size);
}
INSIDE void clear(void *to, size_t size) {
    if (size) memset(to, 0, size);
}

/* Sums and maxima are taken in so many places at once, which vectors of any width hold. */
#define PLACES 16
typedef float Lanes __attribute__((vector_size(4 * PLACES), aligned(4), may_alias));

INSIDE float dot(const float *x, const float *y, int64_t n) {
    float sums[PLACES] = {0}, total = 0.0f;
    int64_t i = 0;
    for (; i + PLACES <= n; i += PLACES)
        for (int64_t j = 0; j < PLACES; j++) sums[j] += x[i + j] * y[i + j];
    for (; i < n; i++) total += x[i] * y[i];
    for (int64_t j = 0; j < PLACES; j++) total += sums[j];
    return total;
}

INSIDE float largest(const float *x, int64_t n) {
    float peaks[PLACES], peak = -INFINITY;
    int64_t i = 0;
    for (int64_t j = 0; j < PLACES; j++) peaks[j] = -INFINITY;
    for (; i + PLACES <= n; i += PLACES)
        for (int64_t j = 0; j < PLACES; j++) peaks[j] = x[i + j] > peaks[j] ? x[i + j] : peaks[j];
    for (; i < n; i++) peak = x[i] > peak ? x[i] : peak;
    for (int64_t j = 0; j < PLACES; j++) peak = peaks[j] > peak ? peaks[j] : peak;
    return peak;
}

/* 2^x for x < 127 within 2 units in the last place; 0 below 2^-126, NaN where x is. */
INSIDE float power(float x) {
    const float inside = x < -126.0f ? -126.0f : x;
    /* Adding 3·2^22 leaves the nearest integer in the last bits. */
    const float shifted = inside + 12582912.0f;
    const float rest = inside - (shifted - 12582912.0f);
    /* Taylor's terms of 2^rest, |rest| <= 1/2: the next is below 2^-26. */
    float p = 1.5403530393381609954e-4f;
    p = p * rest + 1.3333558146428443423e-3f;
    p = p * rest + 9.6181291076284771620e-3f;
    p = p * rest + 5.5504108664821579953e-2f;
    p = p * rest + 2.4022650695910071233e-1f;
    p = p * rest + 6.9314718055994530942e-1f;
    p = p * rest + 1.0f;
    union { float number; uint32_t bits; } whole = {.number = shifted};
    whole.bits = (whole.bits - 0x4B400000u + 127u) << 23;
    return x < -126.0f ? 0.0f : p * whole.number;
}

#define MOST_BITS 8

/* Whether the bits (H, blocks) of heads' blocks are those of codes so long: what a file says is not trusted. */
static inline int are_sound(const uint8_t *bits, int64_t heads, int64_t blocks, int64_t block, int64_t bytes) {
    for (int64_t head = 0; head < heads; head++) {
        int64_t sum = 0;
        for (int64_t i = 0; i < blocks; i++, bits++) {
            if (*bits > MOST_BITS) return 0;
            sum += *bits;
        }
        if (sum * block != 8 * bytes) return 0;
    }
    return 1;
}

/* Arguments of a call: addresses (0 for none), then sizes, then numbers; whether they are as many, and were read. */
static inline int read_arguments(PyObject *const *arguments, Py_ssize_t count, uintptr_t *addresses, int num_addresses,
                                 int64_t *sizes, int num_sizes, float *numbers, int num_numbers) {
    const int wanted = num_addresses + num_sizes + num_numbers;
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", wanted, count);
        return 0;
    }
    for (int i = 0; i < num_addresses; i++) addresses[i] = (uintptr_t)PyLong_AsUnsignedLongLong(*arguments++);
    for (int i = 0; i < num_sizes; i++) sizes[i] = PyLong_AsLongLong(*arguments++);
    for (int i = 0; i < num_numbers; i++) numbers[i] = (float)PyFloat_AsDouble(*arguments++);
    return !PyErr_Occurred();
}

#endif
