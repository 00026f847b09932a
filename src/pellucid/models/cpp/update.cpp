// The elementwise operators of an update, with one pass over memory each. models/native.py calls them, and compares them with
// PyTorch's operators.
//
// n rows; matrices are contiguous unless a stride is given. Operators of a layer have the bits of PyTorch. The sums of the head
// are in double.

#include <omp.h>

#include "attention.h"

#define ROWS_OF(n) _Pragma("omp parallel for schedule(static) num_threads(threads)") for (int64_t row = 0; row < n; row++)

// ---------------------------------------------------------------- layers

// y is the norm of x [n, width]; with `more`, that of x + more, which is written to `sum`.
extern "C" void norm_forward(const float *x, const bf16 *more, const float *weight, int64_t n, int64_t width, float eps, float *sum,
                             bf16 *y, int64_t threads) {
    ROWS_OF(n) {
        const int64_t at = row * width;
        for (int64_t i = at; more && i < at + width; i += 16)
            _mm512_storeu_ps(sum + i, _mm512_add_ps(_mm512_loadu_ps(x + i), wide(more + i)));
        const float *from = (more ? sum : x) + at;
        const __m512 inverse = _mm512_set1_ps(inverse_rms(from, width, eps));
        for (int64_t i = 0; i < width; i += 16) store(y + at + i, normed(from + i, weight + i, inverse));
    }
}

// With u = x / rms(x) and g = grad weight: of_x = (g - u mean(g u)) / rms(x), plus `beyond` if given; of_more is the same, rounded.
// of_weight [width] is the sum over rows of grad u; `runs` [n / 16, width] holds partial sums.
extern "C" void norm_backward(const float *x, const float *weight, const bf16 *grad, const float *beyond, int64_t n, int64_t width,
                              float eps, float *of_x, bf16 *of_more, float *of_weight, float *runs, int64_t threads) {
    const RowSums rows(n);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t run = 0; run < rows.runs; run++) {
        float *const terms = runs + run * width;
        std::fill_n(terms, width, 0.0f);
        for (int64_t row = run * rows.step; row < std::min(n, (run + 1) * rows.step); row++) {
            const int64_t at = row * width;
            const float rms = inverse_rms(x + at, width, eps);
            const __m512 inverse = _mm512_set1_ps(rms);
            for (int64_t i = 0; i < width; i += 16) {
                const __m512 g = wide(grad + at + i), unit = _mm512_mul_ps(_mm512_loadu_ps(x + at + i), inverse);
                _mm512_storeu_ps(terms + i, _mm512_add_ps(_mm512_loadu_ps(terms + i), _mm512_mul_ps(g, unit)));
                _mm512_storeu_ps(of_x + at + i, _mm512_mul_ps(g, _mm512_loadu_ps(weight + i)));
            }
            const float slant = sum_by_eights(width, [&](int64_t i) {
                const __m256 unit = _mm256_mul_ps(_mm256_loadu_ps(x + at + i), _mm256_set1_ps(rms));
                return _mm256_mul_ps(_mm256_loadu_ps(of_x + at + i), unit);
            }) / width;
            for (int64_t i = at; i < at + width; i += 16) {
                const __m512 unit = _mm512_mul_ps(_mm512_loadu_ps(x + i), inverse);
                const __m512 turned = _mm512_sub_ps(_mm512_loadu_ps(of_x + i), _mm512_mul_ps(unit, _mm512_set1_ps(slant)));
                const __m512 own = _mm512_mul_ps(turned, inverse);
                const __m512 all = beyond ? _mm512_add_ps(own, _mm512_loadu_ps(beyond + i)) : own;
                _mm512_storeu_ps(of_x + i, all);
                if (of_more) store(of_more + i, all);
            }
        }
    }
    rows.add_up(runs, width, of_weight);
}

// y [n, inner] = silu(gate) up of gate_up [n, 2 inner].
extern "C" void gate_forward(const bf16 *gate_up, int64_t n, int64_t inner, bf16 *y, int64_t threads) {
    ROWS_OF(n) {
        const bf16 *gate = gate_up + row * 2 * inner, *up = gate + inner;
        for (int64_t i = 0; i < inner; i += 16)
            store(y + row * inner + i, _mm512_mul_ps(rounded(silu(wide(gate + i))), wide(up + i)));
    }
}

// The gradient of gate_up from grad [n, inner].
extern "C" void gate_backward(const bf16 *gate_up, const bf16 *grad, int64_t n, int64_t inner, bf16 *of_gate_up, int64_t threads) {
    const __m512 one = _mm512_set1_ps(1);
    ROWS_OF(n) {
        const bf16 *gate = gate_up + row * 2 * inner, *up = gate + inner;
        bf16 *of_gate = of_gate_up + row * 2 * inner, *of_up = of_gate + inner;
        for (int64_t i = 0; i < inner; i += 16) {
            const __m512 x = wide(gate + i), g = wide(grad + row * inner + i);
            const __m512 mass = Sleef_expf16_u10(_mm512_sub_ps(_mm512_setzero_ps(), x)), below = _mm512_add_ps(one, mass);
            const __m512 sigmoid = _mm512_div_ps(one, below);
            const __m512 slope = _mm512_add_ps(one, _mm512_mul_ps(x, _mm512_sub_ps(one, sigmoid)));
            store(of_gate + i, _mm512_mul_ps(_mm512_mul_ps(rounded(_mm512_mul_ps(g, wide(up + i))), sigmoid), slope));
            store(of_up + i, _mm512_mul_ps(rounded(_mm512_div_ps(x, below)), g));
        }
    }
}

// Rotates x, n rows of `heads` heads [size] with a row stride of `stride`, to y [n, heads, size]; back: in the other direction.
extern "C" void rotate_heads(const bf16 *x, int64_t stride, const bf16 *cos, const bf16 *sin, int64_t n, int64_t heads, int64_t size,
                             int64_t back, bf16 *y, int64_t threads) {
    ROWS_OF(n) {
        alignas(64) bf16 angles[LARGEST];
        for (int64_t i = 0; i < size; i++) angles[i] = sin[row * size + i] ^ (back ? 0x8000 : 0);
        for (int64_t h = 0; h < heads; h++) {
            bf16 *to = y + (row * heads + h) * size;
            std::memcpy(to, x + row * stride + h * size, size * sizeof(bf16));
            rotate(to, cos + row * size, angles, size);
        }
    }
}

// The softmax, in place, of scores [rows, copies, queries, keys] of `copies` heads plus bias [rows, queries, keys].
extern "C" void softmax_rows(bf16 *scores, const bf16 *bias, int64_t rows, int64_t copies, int64_t queries, int64_t keys, int64_t threads) {
    const int64_t n = rows * copies * queries;
#pragma omp parallel num_threads(threads)
    {
        const std::unique_ptr<float[]> z(new float[keys]);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < n; row++) {
            bf16 *x = scores + row * keys;
            const bf16 *seen = bias + (row / (copies * queries) * queries + row % queries) * keys;
            for (int64_t i = 0; i < keys; i += 16) _mm512_storeu_ps(&z[i], _mm512_add_ps(wide(x + i), wide(seen + i)));
            softmax(&z[0], keys);
            for (int64_t i = 0; i < keys; i += 16) store(x + i, _mm512_loadu_ps(&z[i]));
        }
    }
}

// Probabilities and the gradient of scores / scale, rounded, from scores in fp32 and the gradient of the probabilities, all
// [rows, copies, queries, keys].
extern "C" void softmax_backward(const float *scores, const bf16 *bias, const bf16 *of_probs, int64_t rows, int64_t copies,
                                 int64_t queries, int64_t keys, float scale, bf16 *probs, bf16 *of_scores, int64_t threads) {
    const int64_t n = rows * copies * queries;
#pragma omp parallel num_threads(threads)
    {
        const std::unique_ptr<float[]> z(new float[2 * keys]);
        float *p = &z[0], *g = &z[keys];
#pragma omp for schedule(static)
        for (int64_t row = 0; row < n; row++) {
            const bf16 *seen = bias + (row / (copies * queries) * queries + row % queries) * keys;
            for (int64_t i = 0; i < keys; i += 16) {
                _mm512_storeu_ps(p + i, _mm512_add_ps(_mm512_loadu_ps(scores + row * keys + i), wide(seen + i)));
                _mm512_storeu_ps(g + i, wide(of_probs + row * keys + i));
            }
            unrounded_softmax(p, keys);
            const __m512 mean = _mm512_set1_ps(sum_by_eights(
                keys, [&](int64_t i) { return _mm256_mul_ps(_mm256_loadu_ps(p + i), _mm256_loadu_ps(g + i)); }));
            for (int64_t i = 0; i < keys; i += 16) {
                const __m512 prob = _mm512_loadu_ps(p + i), above = _mm512_sub_ps(_mm512_loadu_ps(g + i), mean);
                store(probs + row * keys + i, prob);
                store(of_scores + row * keys + i, _mm512_mul_ps(_mm512_mul_ps(prob, above), _mm512_set1_ps(scale)));
            }
        }
    }
}

// ---------------------------------------------------------------- the head

struct Logits {  // [n, vocabulary]: product times factor
    bf16 *product;
    int64_t vocabulary;
    float factor;

    __m512 at(int64_t row, int64_t i) const {
        const __m256i x = _mm256_maskz_loadu_epi16(there(i), product + row * vocabulary + i);
        const __m512 z = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
        return _mm512_mul_ps(z, _mm512_set1_ps(factor));
    }
    __mmask16 there(int64_t i) const { return vocabulary - i < 16 ? (1 << (vocabulary - i)) - 1 : 0xffff; }

    float highest(int64_t row) const {
        __m512 most = _mm512_set1_ps(-INFINITY);
        for (int64_t i = 0; i < vocabulary; i += 16) most = _mm512_mask_max_ps(most, there(i), most, at(row, i));
        return _mm512_reduce_max_ps(most);
    }
};

// The sums of the K vectors f(i) over i = 0, 16, ...: in fp32 within a run of tokens, in double over runs.
template <int K, class F> static void add_up(int64_t count, double *sums, F f) {
    std::fill_n(sums, K, 0.0);
    for (int64_t start = 0; start < count; start += 512) {
        __m512 few[K];
        for (auto &sum : few) sum = _mm512_setzero_ps();
        for (int64_t i = start; i < std::min(count, start + 512); i += 16) f(i, few);
        for (int k = 0; k < K; k++) sums[k] += _mm512_reduce_add_ps(few[k]);
    }
}

static double log_normalizer(const Logits &z, int64_t row, float highest) {
    double total;
    add_up<1>(z.vocabulary, &total, [&](int64_t i, __m512 *sums) {
        const __m512 mass = Sleef_expf16_u10(_mm512_sub_ps(z.at(row, i), _mm512_set1_ps(highest)));
        sums[0] = _mm512_mask_add_ps(sums[0], z.there(i), sums[0], mass);
    });
    return highest + std::log(total);
}

// Log-probs of tokens, entropy, KL from another policy's logits (which may be null) and log-normalizers, [n] each.
extern "C" void read_rows(const Logits *of, const Logits *other, const int64_t *tokens, int64_t n, float *logprobs, float *entropy,
                        float *kl, float *normalizers, int64_t threads) {
    ROWS_OF(n) {
        const float most = of->highest(row);
        const double shift = other ? log_normalizer(*other, row, other->highest(row)) : 0;
        double sums[3];  // of masses, of masses times (logit - highest logit), and times the other policy's log-probs
        add_up<3>(of->vocabulary, sums, [&](int64_t i, __m512 *few) {
            const __m512 below = _mm512_sub_ps(of->at(row, i), _mm512_set1_ps(most));
            const __m512 mass = _mm512_maskz_mov_ps(of->there(i), Sleef_expf16_u10(below));
            few[0] = _mm512_add_ps(few[0], mass);
            few[1] = _mm512_fmadd_ps(mass, below, few[1]);
            if (other) few[2] = _mm512_fmadd_ps(mass, _mm512_sub_ps(other->at(row, i), _mm512_set1_ps(shift)), few[2]);
        });
        const double log_total = std::log(sums[0]), h = log_total - sums[1] / sums[0];
        const int64_t token = tokens[row], first = token / 16 * 16;
        alignas(64) float z[16];
        _mm512_store_ps(z, of->at(row, first));
        logprobs[row] = z[token - first] - most - log_total;
        entropy[row] = h;
        kl[row] = other ? -h - sums[2] / sums[0] : 0;
        normalizers[row] = most + log_total;
    }
}

// Replaces the product by its gradient, from the gradients of its statistics (of_entropy and of_kl may be null) and the results of
// `read_rows`:
//   exp(l) (-of_logprob - of_entropy (l + H) + of_kl (l - l_other - KL)) + of_logprob onehot(token), times the factor.
extern "C" void of_product(const Logits *of, const Logits *other, const int64_t *tokens, int64_t n, const float *of_logprobs,
                           const float *of_entropy, const float *of_kl, const float *entropy, const float *kl,
                           const float *normalizers, int64_t threads) {
    const __m512 factor = _mm512_set1_ps(of->factor);
    ROWS_OF(n) {
        const __m512 normalizer = _mm512_set1_ps(normalizers[row]), of_logprob = _mm512_set1_ps(of_logprobs[row]);
        const double shift = other ? log_normalizer(*other, row, other->highest(row)) : 0;
        for (int64_t i = 0; i < of->vocabulary; i += 16) {
            const __m512 l = _mm512_sub_ps(of->at(row, i), normalizer);
            __m512 weight = _mm512_sub_ps(_mm512_setzero_ps(), of_logprob);
            if (of_entropy) {
                const __m512 surprise = _mm512_add_ps(l, _mm512_set1_ps(entropy[row]));
                weight = _mm512_sub_ps(weight, _mm512_mul_ps(_mm512_set1_ps(of_entropy[row]), surprise));
            }
            if (other) {
                const __m512 apart = _mm512_sub_ps(l, _mm512_sub_ps(other->at(row, i), _mm512_set1_ps(shift)));
                weight = _mm512_fmadd_ps(_mm512_set1_ps(of_kl[row]), _mm512_sub_ps(apart, _mm512_set1_ps(kl[row])), weight);
            }
            __m512 grad = _mm512_mul_ps(Sleef_expf16_u10(l), weight);
            if (tokens[row] / 16 * 16 == i) grad = _mm512_mask_add_ps(grad, 1 << tokens[row] % 16, grad, of_logprob);
            _mm256_mask_storeu_epi16(of->product + row * of->vocabulary + i, of->there(i), narrow(_mm512_mul_ps(grad, factor)));
        }
    }
}
