// Sampling of tokens from logits with the bits of ops.py, row by row: the masses of a row stay in the cache.

#include "norm.h"

extern "C" __m512 Sleef_exp2f16_u10(__m512);  // torch's exp2, from libtorch_cpu

constexpr int64_t STRETCH = 256;  // tokens whose masses are summed first, as CDF_BLOCK_TOKENS in ops.py

static float most_of(const bf16 *logits, int64_t vocabulary) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < vocabulary; i += 16) most = _mm512_max_ps(most, wide(logits + i));
    return _mm512_reduce_max_ps(most);
}

static int64_t first_of(const bf16 *logits, int64_t vocabulary, float value) {
    for (int64_t i = 0; i < vocabulary; i += 16)
        if (const __mmask16 there = _mm512_cmpeq_ps_mask(wide(logits + i), _mm512_set1_ps(value))) return i + __builtin_ctz(there);
    return 0;  // the row is all NaN
}

static float sum_of_numbers(const float *x, int64_t count) {
    return sum_by_eights(count, [x](int64_t i) { return _mm256_loadu_ps(x + i); });
}

// Index of the first sum above the target, at most that of the last with mass: rounding may move the target past it.
static int64_t first_beyond(const double *sums, int64_t count, double target) {
    int64_t i = 0;
    while (i < count - 1 && sums[i] <= target && sums[i] < sums[count - 1]) i++;
    return i;
}

// ends: memory for the cumulative sums of stretches, and of the tokens of one stretch.
static int64_t inverted(const float *masses, int64_t stretches, double uniform, double *ends) {
    double sum = 0;
    for (int64_t i = 0; i < stretches; i++) ends[i] = sum += sum_of_numbers(masses + i * STRETCH, STRETCH);
    double target = uniform * sum;
    const int64_t stretch = first_beyond(ends, stretches, target);
    if (stretch) target -= ends[stretch - 1];
    sum = 0;
    for (int64_t i = 0; i < STRETCH; i++) ends[i] = sum += masses[stretch * STRETCH + i];
    return stretch * STRETCH + first_beyond(ends, STRETCH, target);
}

// From logits [n, V]: tokens [n], their masses, and the sums of all masses. Without uniforms, the most probable tokens.
extern "C" void draw(const bf16 *logits, int64_t n, int64_t vocabulary, float factor, const double *uniforms, int64_t *tokens,
                     float *masses, float *totals, int64_t threads) {
    const int64_t stretches = (vocabulary + STRETCH - 1) / STRETCH;
#pragma omp parallel num_threads(threads)
    {
        const auto of_row = zeros<float>(stretches * STRETCH);
        const std::unique_ptr<double[]> ends(new double[std::max(stretches, STRETCH)]);
#pragma omp for
        for (int64_t row = 0; row < n; row++) {
            const bf16 *of = logits + row * vocabulary;
            const float most = most_of(of, vocabulary);
            for (int64_t i = 0; i < vocabulary; i += 16) {
                const __m512 below = _mm512_sub_ps(wide(of + i), _mm512_set1_ps(most));
                _mm512_store_ps(&of_row[i], Sleef_exp2f16_u10(_mm512_mul_ps(below, _mm512_set1_ps(factor))));
            }
            tokens[row] = uniforms ? inverted(of_row.get(), stretches, uniforms[row], ends.get()) : first_of(of, vocabulary, most);
            masses[row] = of_row[tokens[row]];
            totals[row] = sum_of_numbers(of_row.get(), vocabulary);
        }
    }
}
