// Sixteen numbers at a time, in bf16 and fp32.

#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

extern "C" __m512 Sleef_expf16_u10(__m512);  // torch's exp, from libtorch_cpu

using bf16 = uint16_t;

constexpr int BLOCK = 32;     // outputs of a matrix that are stored together
constexpr int LARGEST = 256;  // the largest head size
constexpr int MOST = 16;      // queries of attention at once
constexpr int64_t MANY = 32;  // queries of the backward pass at once

static inline __m512 wide(const bf16 *x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}

static inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

static inline void store(bf16 *to, __m512 x) { _mm256_storeu_si256((__m256i *)to, narrow(x)); }

static inline __m512 rounded(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(x)), 16));
}

static inline __m512 silu(__m512 x) {
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1), Sleef_expf16_u10(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// Transposes [16][16] pairs with a row stride of `stride`.
static void transpose(const bf16 *from, int64_t stride, __m512i *to) {
    __m512i x[16], y[16];
    for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(from + i * stride);
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = i; j < i + 4; j++) {
            y[j] = _mm512_shuffle_i32x4(x[j], x[j + 4], 0x88);
            y[j + 4] = _mm512_shuffle_i32x4(x[j], x[j + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        to[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        to[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

// Interleaves x [16] and y [16] in bf16; a null y counts as 0.
static inline __m512i paired(const bf16 *x, const bf16 *y) {
    const __m512i one = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return y ? _mm512_or_si512(one, _mm512_castps_si512(wide(y))) : one;
}

// An array of zeros, aligned to cache lines.
struct Free {
    void operator()(void *x) const { std::free(x); }
};
template <class T> using Zeros = std::unique_ptr<T[], Free>;
template <class T> static T *new_lines(int64_t count) {
    void *const data = std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64);
    if (!data) throw std::bad_alloc();
    return (T *)data;
}
template <class T> static Zeros<T> zeros(int64_t count) {
    return Zeros<T>((T *)std::memset(new_lines<T>(count), 0, count * sizeof(T)));
}

// The size of groups that divide a number of items evenly into the fewest groups of at most `most`.
static int64_t evenly(int64_t all, int64_t most) {
    const int64_t groups = (all + most - 1) / most;
    return (all + groups - 1) / groups;
}

// The first output of a half of a block. joined: a matrix of gate and up is stored with 16 outputs of each in a block.
static int64_t first_of_half(int64_t block, int64_t half, int64_t outputs, bool joined) {
    return joined ? half * (outputs / 2) + block * 16 : block * BLOCK + half * 16;
}

// A range of items: all of them, or the share of a thread.
struct Share {
    int64_t from, to;
    explicit Share(int64_t all) : from(0), to(all) {}
    Share(int64_t all, int thread, int team) : from(all * thread / team), to(all * (thread + 1) / team) {}
};

// `count` of the queries that `lay` has packed, starting at `at`, and the keys from .. to that each attends to; all of them are
// between `first` and `end`.
struct Queries {
    int64_t size, at, count, first, end;
    const bf16 *laid;
    int64_t from[MOST], to[MOST];

    void begin(const bf16 *queries, int64_t d, int64_t start) {
        laid = queries;
        size = d;
        at = start;
        count = 0;
    }
    void add(int64_t first_key, int64_t end_key) {
        first = count ? std::min(first, first_key) : first_key;
        end = count ? std::max(end, end_key) : end_key;
        from[count] = first_key;
        to[count++] = end_key;
    }
};

// The functions that multiply R rows of activations at once.
template <class Words> struct By {};

static inline __m512 with_bias(const float *sums, const bf16 *bias, int64_t at) {
    return bias ? _mm512_add_ps(_mm512_load_ps(sums), wide(bias + at)) : _mm512_load_ps(sums);
}

// The mask of the first `count` of sixteen lanes.
static inline __mmask16 first_of_sixteen(int64_t count) { return count < 16 ? (1 << std::max<int64_t>(0, count)) - 1 : 0xffff; }

// Writes scores of the keys t .. t + 15; -inf for keys outside from .. to.
static inline void put_scores(float *scores, __m512 x, int64_t t, int64_t from, int64_t to) {
    const __mmask16 seen = first_of_sixteen(to - t) & ~first_of_sixteen(from - t);
    _mm512_storeu_ps(scores + t, _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), rounded(x)));
}
