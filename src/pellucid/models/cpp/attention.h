// Attention of tokens to the keys and values of their prompt and of their row.

#pragma once
#include <vector>

#include "norm.h"
#include "pairs.h"
#include "tiles.h"

constexpr int64_t FETCHED = 256;  // tokens of a row that are prefetched at most

struct Model {
    int64_t layers, width, heads, key_heads, size, inner, vocabulary;
    float eps;
    int64_t rank;  // the largest of an adapter
};

struct Layer {  // a row of layer_table in fused_decode.py; weights that a model lacks are null
    const float *attention_norm;
    const bf16 *qkv, *qkv_bias, *attention_out, *attention_out_bias;
    const float *mlp_norm;
    const bf16 *gate_up, *gate_up_bias, *down, *down_bias;
    const float *query_norm, *key_norm;
    const bf16 *qkv_a, *attention_out_a, *gate_up_a, *down_a;  // of adapters, whose B are the last inputs of the matrices
    int64_t window;                                            // 0: no sliding window
    int64_t qkv_rank, attention_out_rank, gate_up_rank, down_rank;
    const bf16 *prompt_keys, *prompt_values;  // [K, P, S, d]
    bf16 *keys, *values;                      // [K, rows, capacity, d]
};

struct Tokens {
    int64_t n, rows, prompts, prompt_capacity, capacity, logit_count;
    const int64_t *row_of, *positions;          // [n] the row of the caches, and the position in it
    const int64_t *prompt_of, *prompt_lengths;  // [rows], [P]
    const int64_t *logit_tokens;                // [logit_count] the tokens whose logits are computed
    const bf16 *cos, *sin;                      // of all positions, [d] each
};

static void norm_head(bf16 *x, const float *weight, int64_t size, float eps) {
    alignas(64) float y[LARGEST];
    for (int64_t i = 0; i < size; i += 16) _mm512_store_ps(y + i, wide(x + i));
    const __m512 inverse = _mm512_set1_ps(inverse_rms(y, size, eps));
    for (int64_t i = 0; i < size; i += 16)
        store(x + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(y + i), inverse), _mm512_loadu_ps(weight + i)));
}

// The halves of a head are the two coordinates; the first half of sin is negated.
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

static float sum_of(__m512 x) {  // half by half, in torch's order
    const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    const __m128 two = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// The softmax of scores [count], count a multiple of 16, in place.
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

// Tokens from .. to, of one row or of several rows of one prompt, that attend together.
struct Run {
    int64_t from, to;
};

// Runs of up to `most` tokens; those of a prompt are of almost equal lengths.
static std::vector<Run> runs_of(const Tokens &tokens, int64_t most) {
    const auto prompt = [&](int64_t token) { return tokens.prompt_of[tokens.row_of[token]]; };
    std::vector<Run> runs;
    for (int64_t from = 0, to; from < tokens.n; from = to) {
        for (to = from + 1; to < tokens.n && prompt(to) == prompt(from);) to++;
        const int64_t each = evenly(to - from, most);
        for (int64_t i = from; i < to; i += each) runs.push_back({i, std::min(i + each, to)});
    }
    return runs;
}

// Writes key and value of a token, whose projections are heads [H + 2K, d], to the cache, and rotates and scales its queries.
static void cache(const Model &m, const Layer &layer, const Tokens &tokens, int64_t token, bf16 *heads) {
    const int64_t d = m.size, row = tokens.row_of[token], place = tokens.positions[token];
    const int64_t turn = (tokens.prompt_lengths[tokens.prompt_of[row]] + place) * d;
    for (int64_t h = 0; h < m.heads + m.key_heads; h++) {
        if (layer.query_norm) norm_head(heads + h * d, h < m.heads ? layer.query_norm : layer.key_norm, d, m.eps);
        rotate(heads + h * d, tokens.cos + turn, tokens.sin + turn, d);
    }
    const __m512 scale = _mm512_set1_ps(float(1 / std::sqrt(double(d))));
    for (int64_t i = 0; i < m.heads * d; i += 16) store(heads + i, _mm512_mul_ps(wide(heads + i), scale));
    for (int64_t k = 0; k < m.key_heads; k++) {
        const int64_t here = ((k * tokens.rows + row) * tokens.capacity + place) * d;
        std::memcpy(layer.keys + here, heads + (m.heads + k) * d, d * sizeof(bf16));
        std::memcpy(layer.values + here, heads + (m.heads + m.key_heads + k) * d, d * sizeof(bf16));
    }
}

static int64_t to_sixteen(int64_t count) { return (count + 15) / 16 * 16; }

// The attention of `each` queries of every token of a run: all together to their prompt, some at a time to their row.
struct Asked {
    Queries of_prompt, of_row[MOST];
    int64_t rows[MOST], count = 0;

    Asked(const Tokens &tokens, const Run &run, int64_t length, int64_t window, int64_t each, const bf16 *laid, int64_t size) {
        of_prompt.begin(laid, size, 0);
        for (int64_t token = run.from; token < run.to; token++) {
            const int64_t row = tokens.row_of[token], end = tokens.positions[token] + 1;
            const int64_t first = window ? std::max<int64_t>(0, length + end - window) : 0;
            if (!count || rows[count - 1] != row) {
                of_row[count].begin(laid, size, of_prompt.count);
                rows[count++] = row;
            }
            for (int64_t i = 0; i < each; i++) {
                of_prompt.add(std::min(first, length), length);
                of_row[count - 1].add(std::max<int64_t>(0, first - length), end);
            }
        }
    }
};

// The softmax of scores [stride], those of the prompt first; 0 after the last token.
static void to_probabilities(float *scores, const Queries &of_prompt, const Queries &of_row, int64_t q, int64_t own) {
    float *const end = scores + own + to_sixteen(of_row.to[q]);
    std::fill_n(scores, of_prompt.first / 16 * 16, -INFINITY);
    std::fill_n(scores + own, of_row.first / 16 * 16, -INFINITY);
    softmax(scores, end - scores);
    std::fill(end, scores + own + to_sixteen(of_row.end), 0.0f);
}

// Prefetches the keys and values of the rows of a run for a key head; of a long row only the first FETCHED, since the processor
// prefetches the rest by itself. Always inlined: gcc removes calls of a function without other effects.
[[gnu::always_inline]] static inline void fetch(const Model &m, const Layer &layer, const Tokens &tokens, const Run &run, int64_t k) {
    for (int64_t i = run.from; i < run.to; i++) {
        const int64_t row = tokens.row_of[i], here = (k * tokens.rows + row) * tokens.capacity * m.size, end = tokens.positions[i];
        if (i > run.from && row == tokens.row_of[i - 1]) continue;
        const int64_t first = layer.window ? std::max<int64_t>(0, end + 1 - layer.window) : 0;
        for (const bf16 *from : {layer.keys + here, layer.values + here})
            for (int64_t j = first * m.size; j < std::min(first + FETCHED, end) * m.size; j += 32)
                _mm_prefetch((const char *)(from + j), _MM_HINT_T1);
    }
}

// Writes the attention of a run, whose keys and values are in the cache. next: the run after this one.
template <class Activations>
static void attend(const Model &m, const Layer &layer, const Tokens &tokens, const Run &run, const Run *next,
                   const bf16 *heads, int64_t apart, float *scores, int64_t stride, const Activations &to) {
    using Words = typename Activations::Words;
    constexpr By<Words> by;
    const int64_t d = m.size, shared = m.heads / m.key_heads;
    const int64_t prompt = tokens.prompt_of[tokens.row_of[run.from]], length = tokens.prompt_lengths[prompt];
    const int64_t own = to_sixteen(length);
    alignas(64) bf16 queries[MOST * LARGEST], laid[MOST * LARGEST];
    alignas(64) float out[MOST * LARGEST], of_own[MOST * LARGEST];
    for (int64_t of_head = 0; of_head < shared; of_head += Words::QUERIES) {
        const int64_t each = std::min<int64_t>(Words::QUERIES, shared - of_head), part = each * d;
        const Asked asked(tokens, run, length, layer.window, each, laid, d);
        for (int64_t k = 0; k < m.key_heads; k++) {
            if (k + 1 < m.key_heads)
                fetch(m, layer, tokens, run, k + 1);
            else if (next)
                fetch(m, layer, tokens, *next, 0);
            const int64_t h = k * shared + of_head, there = (k * tokens.prompts + prompt) * tokens.prompt_capacity * d;
            const auto here = [&](int64_t i) { return (k * tokens.rows + asked.rows[i]) * tokens.capacity * d; };
            for (int64_t i = run.from; i < run.to; i++)
                std::memcpy(queries + (i - run.from) * part, heads + i * apart + h * d, part * sizeof(bf16));
            lay(by, queries, d, laid);
            score(by, asked.of_prompt, layer.prompt_keys + there, scores, stride);
            for (int64_t i = 0; i < asked.count; i++) {
                const Queries &of_row = asked.of_row[i];
                score(by, of_row, layer.keys + here(i), scores + of_row.at * stride + own, stride);
                for (int64_t q = 0; q < of_row.count; q++)
                    to_probabilities(scores + (of_row.at + q) * stride, asked.of_prompt, of_row, q, own);
            }
            weigh(by, asked.of_prompt, layer.prompt_values + there, scores, stride, tokens.prompt_capacity, out);
            for (int64_t i = 0; i < asked.count; i++) {
                const Queries &of_row = asked.of_row[i];
                weigh(by, of_row, layer.values + here(i), scores + of_row.at * stride + own, stride, tokens.capacity,
                      of_own + of_row.at * d);
            }
            for (int64_t i = 0; i < asked.of_prompt.count * d; i += 16)
                to.put(run.from + i / part, h * d + i % part, _mm512_add_ps(_mm512_load_ps(out + i), _mm512_load_ps(of_own + i)));
        }
    }
}
