// A step of AdamW in one pass over memory, which also clips gradients and casts weights. The results have the bits of PyTorch;
// distributed/optimizer.py compares them.

#include <omp.h>

#include "vectors.h"

constexpr int64_t AHEAD = 512;  // how many elements ahead memory is prefetched

struct Parameter {  // `size` elements, a multiple of 16
    float *weight;
    const float *grad;
    float *mean, *square;
    bf16 *cast;  // may be null
    int64_t size;
    float step_size, bias_correction2_sqrt;  // at step t: -lr / (1 - beta1^t), sqrt(1 - beta2^t)
};

struct Rates {  // clip is a factor; decayed is 1 - lr weight_decay
    float clip, decayed, one_minus_beta1, beta2, one_minus_beta2, eps;
};

// The norm of each gradient, in torch's order of sums: eight parallel sums of squares.
extern "C" void gradient_norms(const Parameter *of, int64_t count, float *norms, int64_t threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t p = 0; p < count; p++) {
        __m256 sums = _mm256_setzero_ps();
        for (int64_t i = 0; i < of[p].size; i += 8) {
            const __m256 grad = _mm256_loadu_ps(of[p].grad + i);
            sums = _mm256_add_ps(sums, _mm256_mul_ps(grad, grad));
        }
        alignas(32) float lanes[8];
        _mm256_store_ps(lanes, sums);
        for (int i = 1; i < 8; i++) lanes[0] += lanes[i];
        norms[p] = std::sqrt(lanes[0]);
    }
}

template <class T> static void fetch_line(const T *x) { _mm_prefetch((const char *)x, _MM_HINT_T0); }

// Sixteen elements of a parameter. Cast weights bypass the cache, which they would leave before they are read.
static inline void step_sixteen(const Parameter &of, int64_t i, const Rates &by) {
    const __m512 grad = _mm512_mul_ps(_mm512_loadu_ps(of.grad + i), _mm512_set1_ps(by.clip));
    __m512 mean = _mm512_loadu_ps(of.mean + i), square = _mm512_loadu_ps(of.square + i);
    const bool slow = by.one_minus_beta1 < 0.5f;  // torch's lerp starts from the nearer end
    const __m512 share = _mm512_set1_ps(slow ? by.one_minus_beta1 : by.one_minus_beta1 - 1);
    mean = _mm512_fmadd_ps(share, _mm512_sub_ps(grad, mean), slow ? mean : grad);
    square = _mm512_mul_ps(square, _mm512_set1_ps(by.beta2));
    square = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_set1_ps(by.one_minus_beta2), grad), grad, square);
    const __m512 deviation = _mm512_div_ps(_mm512_sqrt_ps(square), _mm512_set1_ps(of.bias_correction2_sqrt));
    const __m512 divisor = _mm512_add_ps(deviation, _mm512_set1_ps(by.eps));
    const __m512 change = _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(of.step_size), mean), divisor);
    const __m512 weight = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(of.weight + i), _mm512_set1_ps(by.decayed)), change);
    _mm512_storeu_ps(of.mean + i, mean);
    _mm512_storeu_ps(of.square + i, square);
    _mm512_storeu_ps(of.weight + i, weight);
    if (of.cast) _mm256_stream_si256((__m256i *)(of.cast + i), narrow(weight));
}

// A step of each parameter. Cast copies are aligned to 32 bytes.
extern "C" void step_adamw(const Parameter *parameters, int64_t count, const Rates *by, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        for (int64_t p = 0; p < count; p++) {
            const Parameter &of = parameters[p];
            const Share mine(of.size / 16, omp_get_thread_num(), omp_get_num_threads());
            for (int64_t i = mine.from * 16; i < mine.to * 16; i += 16) {
                fetch_line(of.weight + i + AHEAD);
                fetch_line(of.grad + i + AHEAD);
                fetch_line(of.mean + i + AHEAD);
                fetch_line(of.square + i + AHEAD);
                step_sixteen(of, i, *by);
            }
        }
        _mm_sfence();  // makes streaming stores visible to all threads
    }
}
