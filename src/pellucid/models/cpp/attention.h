// What a row reads of its prompt's keys and values and of its own.

#pragma once
#include "bytes.h"
#include "norm.h"

constexpr int QUERIES = 4;    // query heads that are read for at once: sums need not wait for one another

struct Model {
    int64_t layers, width, heads, key_heads, size, inner, vocabulary;
    float eps;
};

struct Layer {  // a row of fused.py's table; what a model does not have is null, and matrices may be `ByteBlock`s
    const float *attention_norm;
    const bf16 *qkv, *qkv_bias, *attention_out, *attention_out_bias;
    const float *mlp_norm;
    const bf16 *gate_up, *gate_up_bias, *down, *down_bias;
    const float *query_norm, *key_norm;
    int64_t window;                           // 0: all tokens are read
    const bf16 *prompt_keys, *prompt_values;  // [K, P, S, d]
    bf16 *keys, *values;                      // [K, n, room, d]
};

struct Rows {
    int64_t n, prompts, prompt_room, room;
    const int64_t *prompt_of, *prompt_lengths, *generated;  // [n], [P], [n]
    const bf16 *cos, *sin;                                  // [n, d]
};

static void norm_head(bf16 *x, const float *weight, int64_t size, float eps) {
    alignas(64) float y[LARGEST];
    for (int64_t i = 0; i < size; i += 16) _mm512_store_ps(y + i, wide(x + i));
    const __m512 inverse = _mm512_set1_ps(inverse_rms(y, size, eps));
    for (int64_t i = 0; i < size; i += 16)
        store(x + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(y + i), inverse), _mm512_loadu_ps(weight + i)));
}

// The halves of a head are the two coordinates; the first half of the sines is negative.
static void rotate(bf16 *x, const bf16 *cos, const bf16 *sin, int64_t size) {
    const auto turned = [&](__m512 x, __m512 other, int64_t i) {
        return _mm512_fmadd_ps(other, wide(sin + i), rounded(_mm512_mul_ps(x, wide(cos + i))));
    };
    for (int64_t i = 0, j = size / 2; i < size / 2; i += 16, j += 16) {
        const __m512 one = wide(x + i), two = wide(x + j);
        store(x + i, turned(one, two, i));
        store(x + j, turned(two, one, j));
    }
}

static float sum_of(__m512 x) {  // half by half, as torch adds them up
    const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    const __m128 two = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Of scores [count], count a multiple of 16, in place.
static void unrounded_softmax(float *scores, int64_t count) {
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i));
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t i = 0; i < count; i += 16) {
        const __m512 mass = Sleef_expf16_u10(_mm512_sub_ps(_mm512_loadu_ps(scores + i), most));
        _mm512_storeu_ps(scores + i, mass);
        sum = _mm512_add_ps(sum, mass);
    }
    const __m512 inverse = _mm512_set1_ps(1 / sum_of(sum));
    for (int64_t i = 0; i < count; i += 16) _mm512_storeu_ps(scores + i, _mm512_mul_ps(_mm512_loadu_ps(scores + i), inverse));
}

static void softmax(float *scores, int64_t count) {
    unrounded_softmax(scores, count);
    for (int64_t i = 0; i < count; i += 16) _mm512_storeu_ps(scores + i, rounded(_mm512_loadu_ps(scores + i)));
}

// A row's tokens that are read, from .. to, of its prompt and of its own, and the room that each has.
struct Read {
    int64_t prompt_from, prompt_to, prompt_room, from, to, room;
};

// What Q query heads [Q, d] read by one key head, put behind `at` elements of the row.
template <int Q, class Activations>
static void read(const bf16 *queries, const bf16 *prompt_keys, const bf16 *prompt_values, const bf16 *keys, const bf16 *values,
                 const Read &of, int64_t size, float *scores, int64_t stride, const Activations &to, int64_t row, int64_t at) {
    const By<typename Activations::Words> by;
    const int64_t own = (of.prompt_to + 15) / 16 * 16, count = own + (of.to + 15) / 16 * 16;
    std::fill_n(scores, Q * stride, -INFINITY);
    score<Q>(by, queries, prompt_keys, of.prompt_from, of.prompt_to, size, scores, stride);
    score<Q>(by, queries, keys, of.from, of.to, size, scores + own, stride);
    for (int q = 0; q < Q; q++) softmax(scores + q * stride, count);
    alignas(64) float one[Q * LARGEST], two[Q * LARGEST];
    weigh<Q>(by, scores, stride, prompt_values, of.prompt_from, of.prompt_to, of.prompt_room, size, one);
    weigh<Q>(by, scores + own, stride, values, of.from, of.to, of.room, size, two);
    for (int64_t i = 0; i < Q * size; i += 16)
        to.put(row, at + i, _mm512_add_ps(_mm512_load_ps(one + i), _mm512_load_ps(two + i)));
}

// Caches key and value of a row's token, whose projections are heads [H + 2K, d], and puts what it reads.
template <class Activations>
static void attend(const Model &m, const Layer &layer, const Rows &rows, int64_t row, bf16 *heads, float *scores, int64_t stride,
                   const Activations &to) {
    const int64_t d = m.size, shared = m.heads / m.key_heads, own = rows.generated[row];
    const int64_t prompt = rows.prompt_of[row], length = rows.prompt_lengths[prompt];
    for (int64_t h = 0; h < m.heads + m.key_heads; h++) {
        if (layer.query_norm) norm_head(heads + h * d, h < m.heads ? layer.query_norm : layer.key_norm, d, m.eps);
        rotate(heads + h * d, rows.cos + row * d, rows.sin + row * d, d);
    }
    const __m512 scale = _mm512_set1_ps(float(1 / std::sqrt(double(d))));
    for (int64_t i = 0; i < m.heads * d; i += 16) store(heads + i, _mm512_mul_ps(wide(heads + i), scale));
    const int64_t first = layer.window ? std::max<int64_t>(0, length + own + 1 - layer.window) : 0;
    const Read of{std::min(first, length), length, rows.prompt_room, std::max<int64_t>(0, first - length), own + 1, rows.room};
    constexpr decltype(&read<1, Activations>) reads[] = {nullptr, read<1, Activations>, read<2, Activations>,
                                                         read<3, Activations>, read<4, Activations>};
    for (int64_t k = 0; k < m.key_heads; k++) {
        const int64_t there = (k * rows.prompts + prompt) * rows.prompt_room * d, here = (k * rows.n + row) * rows.room * d;
        std::memcpy(layer.keys + here + own * d, heads + (m.heads + k) * d, d * sizeof(bf16));
        std::memcpy(layer.values + here + own * d, heads + (m.heads + m.key_heads + k) * d, d * sizeof(bf16));
        for (int64_t h = k * shared; h < (k + 1) * shared; h += QUERIES)
            reads[std::min<int64_t>(QUERIES, (k + 1) * shared - h)](
                heads + h * d, layer.prompt_keys + there, layer.prompt_values + there, layer.keys + here, layer.values + here, of,
                d, scores, stride, to, row, h * d);
    }
    to.quantise(row);
}
