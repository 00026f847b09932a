// RMSNorm, in torch's order of sums.

#pragma once
#include "products.h"

// As torch adds up squares: four times 8 sums, put together every 16 times.
static float inverse_rms(const float *x, int64_t width, float eps) {
    __m256 few[4], all[4];
    for (int j = 0; j < 4; j++) few[j] = all[j] = _mm256_setzero_ps();
    const auto add = [&](__m256 &sum, int64_t i) {
        sum = _mm256_add_ps(sum, _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(x + i)));
    };
    for (int64_t i = 0; i < width / 32; i++)
        for (int j = 0; j < 4; j++) {
            add(few[j], i * 32 + j * 8);
            if (i % 16 == 15) {
                all[j] = _mm256_add_ps(all[j], few[j]);
                few[j] = _mm256_setzero_ps();
            }
        }
    for (int j = 0; j < 4; j++) all[j] = _mm256_add_ps(few[j], all[j]);
    for (int j = 1; j < 4; j++) all[0] = _mm256_add_ps(all[0], all[j]);
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, all[0]);
    float sum = 0;
    for (float lane : lanes) sum += lane;
    return 1 / std::sqrt(sum / width + eps);
}

static void norm(const float *x, const float *weight, int64_t row, float eps, const Groups &to) {
    const __m512 inverse = _mm512_set1_ps(inverse_rms(x, to.width, eps));
    for (int64_t i = 0; i < to.width; i += 16)
        to.put(row, i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse), _mm512_loadu_ps(weight + i)));
}
