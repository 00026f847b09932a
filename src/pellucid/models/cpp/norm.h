// RMSNorm, in torch's order of sums.

#pragma once
#include "vectors.h"

// The sum of vectors at(0), at(8), ... in torch's order for `count` numbers, a multiple of 8: four parallel sums of 8 lanes, added
// to a next level after 16 vectors, that again after 16, and so on; the rest is added to the first.
template <class At> static float sum_by_eights(int64_t count, At at) {
    constexpr int LEVELS = 4, POWER = 4;
    __m256 sums[LEVELS][4];
    for (auto &level : sums)
        for (auto &sum : level) sum = _mm256_setzero_ps();
    const int64_t fours = count / 32;
    for (int64_t i = 0; i < fours;) {
        for (int j = 0; j < 4; j++) sums[0][j] = _mm256_add_ps(sums[0][j], at(i * 32 + j * 8));
        i++;
        for (int level = 1; level < LEVELS && i % (int64_t(1) << level * POWER) == 0; level++)
            for (int j = 0; j < 4; j++) {
                sums[level][j] = _mm256_add_ps(sums[level][j], sums[level - 1][j]);
                sums[level - 1][j] = _mm256_setzero_ps();
            }
    }
    for (int level = 1; level < LEVELS; level++)
        for (int j = 0; j < 4; j++) sums[0][j] = _mm256_add_ps(sums[0][j], sums[level][j]);
    for (int64_t i = fours * 32; i < count; i += 8) sums[0][0] = _mm256_add_ps(sums[0][0], at(i));
    for (int j = 1; j < 4; j++) sums[0][0] = _mm256_add_ps(sums[0][0], sums[0][j]);
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, sums[0][0]);
    float sum = 0;
    for (float lane : lanes) sum += lane;
    return sum;
}

// The sum over n rows in torch's order: of `step` rows, then of `step` such sums, and so on.
struct RowSums {
    static constexpr int LEVELS = 4;
    int64_t n, power, step, runs;

    explicit RowSums(int64_t n) : n(n), power(4) {
        while (n > int64_t(1) << (LEVELS * (power + 1) - 1)) power++;
        step = int64_t(1) << power;
        runs = (n + step - 1) / step;
    }

    // sums [runs, width] of rows, width a multiple of 16 -> y [width].
    void add_up(const float *sums, int64_t width, float *y) const {
        for (int64_t i = 0; i < width; i += 16) {
            __m512 levels[LEVELS];
            for (auto &level : levels) level = _mm512_setzero_ps();
            for (int64_t run = 0; run < n / step;) {
                levels[0] = _mm512_loadu_ps(sums + run++ * width + i);
                for (int level = 1; level < LEVELS; level++) {
                    levels[level] = _mm512_add_ps(levels[level], levels[level - 1]);
                    levels[level - 1] = _mm512_setzero_ps();
                    if (run % (int64_t(1) << level * power)) break;
                }
            }
            if (n % step) levels[0] = _mm512_loadu_ps(sums + n / step * width + i);  // rows that do not fill a run are last
            for (int level = 1; level < LEVELS; level++) levels[0] = _mm512_add_ps(levels[0], levels[level]);
            _mm512_storeu_ps(y + i, levels[0]);
        }
    }
};

static float inverse_rms(const float *x, int64_t width, float eps) {
    const float squares = sum_by_eights(width, [&](int64_t i) { return _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(x + i)); });
    return 1 / std::sqrt(squares / width + eps);
}

static inline __m512 normed(const float *x, const float *weight, __m512 inverse) {
    return _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x), inverse), _mm512_loadu_ps(weight));
}

template <class Activations>
static void norm(const float *x, const float *weight, int64_t width, int64_t row, float eps, const Activations &to) {
    const __m512 inverse = _mm512_set1_ps(inverse_rms(x, width, eps));
    for (int64_t i = 0; i < width; i += 16) to.put(row, i, normed(x + i, weight + i, inverse));
}
