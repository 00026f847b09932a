// A decode step: tokens of all rows through all layers, in bf16 on a CPU with AVX-512, in one parallel region. The results have
// the bits of DecodeBatch with PyTorch's operators; fused_check.py compares them.
//
// The bits are equal because values are rounded where models/decode.py rounds them, and sums are in the order of oneDNN and
// PyTorch: pairs.h has that of AVX-512, tiles.h that of AMX for few rows. The order does not depend on the number of threads. It
// depends on other rows only without AMX, if a row has a capacity of more than 1,024 tokens.

#include <omp.h>

#include "attention.h"

static int64_t blocks_of(int64_t outputs) { return (outputs + BLOCK - 1) / BLOCK; }

// Converts a weight [outputs, width] to blocks.
extern "C" void pack(const bf16 *weight, int64_t outputs, int64_t width, int64_t joined, bf16 *to, int64_t threads) {
    const int64_t blocks = blocks_of(outputs);
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < 2 * blocks; i++) {
        const int64_t block = i / 2, half = i % 2, first = first_of_half(block, half, outputs, joined);
        __m512i pairs[16];
        for (int64_t k = 0; k < width; k += 32) {
            if (first >= outputs)
                std::memset(pairs, 0, sizeof pairs);
            else
                transpose(weight + first * width + k, width, pairs);
            for (int p = 0; p < 16; p++)
                _mm512_stream_si512((__m512i *)(to + (block * width + k) * BLOCK + p * 2 * BLOCK + half * BLOCK), pairs[p]);
        }
        _mm_sfence();  // makes streaming stores visible to all threads
    }
}

template <class Words>
static void step_by(const Model &m, const Layer *layers, const Tokens &tokens, const float *last_norm, const bf16 *head, float *hidden,
                    bf16 *logits, int64_t threads) {
    const int64_t n = tokens.n, projected = (m.heads + 2 * m.key_heads) * m.size, stride = tokens.prompt_capacity + tokens.capacity;
    const Words x(n, m.width + m.rank), attended(n, m.heads * m.size + m.rank), gated(n, m.inner + m.rank);
    const Words last(tokens.logit_count, m.width);
    const std::unique_ptr<bf16[]> heads(new bf16[n * projected]);
    const std::unique_ptr<float[]> scores(new float[threads * Words::QUERIES * stride]);
    const std::vector<Run> runs = runs_of(tokens, std::max<int64_t>(1, Words::QUERIES / (m.heads / m.key_heads)));
    const int64_t count = runs.size();
    const auto onto_hidden = [&](const bf16 *bias) {
        return [=, &m](int64_t row, int64_t at, const float *sums) {
            for (int64_t i = 0; i < BLOCK; i += 16) {
                float *to = hidden + row * m.width + at + i;
                _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), rounded(with_bias(sums + i, bias, at + i))));
            }
        };
    };
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();  // it may be smaller than requested
        const Share mine(n, thread, team), asked(tokens.logit_count, thread, team);
        // Multiplies rows of `width` inputs by a matrix. An adapter's rows times A' are appended to them first.
        const auto project = [&](const Words &rows, int64_t width, const bf16 *a, int64_t rank, const bf16 *weight, int64_t outputs,
                                 auto then) {
            if (rank) {
                const Share groups(rows.count, thread, team);  // there are fewer blocks than threads
                multiply(rows, a, width, n, Share(rank / BLOCK), groups, [&](int64_t row, int64_t at, const float *sums) {
                    for (int64_t i = 0; i < BLOCK; i += 16) rows.put(row, width + at + i, _mm512_load_ps(sums + i));
                });
#pragma omp barrier
            }
            multiply(rows, weight, width + rank, n, Share(blocks_of(outputs), thread, team), Share(rows.count), then);
        };
        for (int64_t l = 0; l < m.layers; l++) {
            const Layer &layer = layers[l];
            for (int64_t row = mine.from; row < mine.to; row++)
                norm(hidden + row * m.width, layer.attention_norm, m.width, row, m.eps, x);
#pragma omp barrier
            const auto to_heads = [&](int64_t row, int64_t at, const float *sums) {
                for (int64_t i = 0; i < BLOCK; i += 16)
                    store(&heads[row * projected + at + i], with_bias(sums + i, layer.qkv_bias, at + i));
            };
            project(x, m.width, layer.qkv_a, layer.qkv_rank, layer.qkv, projected, to_heads);
#pragma omp barrier
            if (thread < count) fetch(m, layer, tokens, runs[thread], 0);
            for (int64_t i = mine.from; i < mine.to; i++) cache(m, layer, tokens, i, &heads[i * projected]);
#pragma omp barrier
            {
                [[maybe_unused]] const typename Words::Setting setting(Words::ROWS);
                for (int64_t i = thread; i < count; i += team)  // interleaved: later tokens of a row attend to more keys
                    attend(m, layer, tokens, runs[i], i + team < count ? &runs[i + team] : nullptr, heads.get(), projected,
                           &scores[thread * Words::QUERIES * stride], stride, attended);
            }
#pragma omp barrier
            project(attended, m.heads * m.size, layer.attention_out_a, layer.attention_out_rank, layer.attention_out, m.width,
                    onto_hidden(layer.attention_out_bias));
#pragma omp barrier
            for (int64_t row = mine.from; row < mine.to; row++)
                norm(hidden + row * m.width, layer.mlp_norm, m.width, row, m.eps, x);
#pragma omp barrier
            const auto to_gated = [&](int64_t row, int64_t at, const float *sums) {
                const __m512 gate = rounded(with_bias(sums, layer.gate_up_bias, at));
                const __m512 up = rounded(with_bias(sums + 16, layer.gate_up_bias, at + 16));
                gated.put(row, at / 2, _mm512_mul_ps(rounded(silu(gate)), up));
            };
            project(x, m.width, layer.gate_up_a, layer.gate_up_rank, layer.gate_up, 2 * m.inner, to_gated);
#pragma omp barrier
            project(gated, m.inner, layer.down_a, layer.down_rank, layer.down, m.width, onto_hidden(layer.down_bias));
#pragma omp barrier
        }
        for (int64_t i = asked.from; i < asked.to; i++)
            norm(hidden + tokens.logit_tokens[i] * m.width, last_norm, m.width, i, m.eps, last);
#pragma omp barrier
        const Share blocks(blocks_of(m.vocabulary), thread, team);
        multiply(last, head, m.width, tokens.logit_count, blocks, Share(last.count), [&](int64_t row, int64_t at, const float *sums) {
            for (int64_t i = 0; i < BLOCK && at + i < m.vocabulary; i += 16) {
                const __mmask16 there = m.vocabulary - at - i < 16 ? (1 << (m.vocabulary - at - i)) - 1 : 0xffff;
                _mm256_mask_storeu_epi16(logits + row * m.vocabulary + at + i, there, narrow(_mm512_load_ps(sums + i)));
            }
        });
    }
}

// Computes logits [logit_count, V] of the next tokens from hidden [n, D], which is overwritten. Returns 1 if
// there is not enough memory, else 0.
extern "C" int step(const Model *model, const Layer *layers, const Tokens *tokens, const float *last_norm, const bf16 *head,
                    float *hidden, bf16 *logits, int64_t tiles, int64_t threads) {
    try {
        (tiles ? step_by<Tiles> : step_by<Groups>)(*model, layers, *tokens, last_norm, head, hidden, logits, threads);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}
