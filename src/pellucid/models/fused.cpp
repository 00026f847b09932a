// A token of all rows through all layers, in bf16 on a CPU with AVX-512: what DecodeBatch computes by operators of torch,
// to the bit, in one parallel region. fused.py compiles it, and tries whether the bits are the same.
//
// They are the same because all rounds where models/decoding.py rounds, and adds up in the order in which oneDNN and
// torch do: whichever rows stand beside a row and however many threads there are, nothing depends on it.
//
// Matrices [N, K] lie in blocks of 32 outputs, two inputs together: [N / 32][K / 2][32][2], as vdpbf16ps multiplies them
// (`pack`). Activations [n, K] lie in groups of R rows: [n / R][K / 2][R][2].

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

extern "C" __m512 Sleef_expf16_u10(__m512);  // torch's exp, which libtorch_cpu has

using bf16 = uint16_t;
constexpr int BLOCK = 32;    // outputs of a block
constexpr int ROWS = 12;     // rows of a group at most: their sums and a vector of a block fill the registers
constexpr int QUERIES = 4;   // query heads that are read for at once: sums need not wait for one another
constexpr int LARGEST = 256; // size of a head at most

struct Model {
    int64_t layers, width, heads, key_heads, size, inner, vocabulary;
    float eps;
};

struct Layer {  // a row of fused.py's table; what a model does not have is null
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

// [16][16] pairs, rows `stride` apart -> their transpose.
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

// A thread's share of so many.
struct Share {
    int64_t from, to;
    Share(int64_t all, int thread, int threads) : from(all * thread / threads), to(all * (thread + 1) / threads) {}
};

// ---------------------------------------------------------------- products

// oneDNN adds up so many products of `all` by themselves.
static int64_t chunk_of(int64_t all) { return all > 1024 ? 1024 : 512; }

struct Groups {
    int64_t rows, count, width;
    std::unique_ptr<bf16[]> data;

    Groups(int64_t n, int64_t width) : count((n + ROWS - 1) / ROWS), width(width) {
        rows = (n + count - 1) / count;
        data.reset(new bf16[count * rows * width]());
    }
    const bf16 *at(int64_t group, int64_t k) const { return data.get() + (group * width + k) * rows; }
    void put(int64_t row, int64_t k, __m512 x) const {
        alignas(32) uint32_t pairs[8];
        _mm256_store_si256((__m256i *)pairs, narrow(x));
        auto *to = (uint32_t *)at(row / rows, k) + row % rows;
        for (int i = 0; i < 8; i++) to[i * rows] = pairs[i];
    }
};

// sums [R, 32] += R rows times a block.
template <int R> static void product(const bf16 *x, const bf16 *block, int64_t pairs, float *sums) {
    __m512 y[R][2];
    for (auto &row : y) row[0] = row[1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
        const auto one = (__m512bh)_mm512_loadu_si512(block + k * 64);
        const auto two = (__m512bh)_mm512_loadu_si512(block + k * 64 + 32);
        _mm_prefetch((const char *)(block + (k + pairs) * 64), _MM_HINT_T1);  // of the next block
        _mm_prefetch((const char *)(block + (k + pairs) * 64 + 32), _MM_HINT_T1);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const auto pair = (__m512bh)_mm512_set1_epi32(((const int32_t *)x)[k * R + r]);
            y[r][0] = _mm512_dpbf16_ps(y[r][0], pair, one);
            y[r][1] = _mm512_dpbf16_ps(y[r][1], pair, two);
        }
    }
    for (int i = 0; i < 2 * R; i++)
        _mm512_store_ps(sums + i * 16, _mm512_add_ps(_mm512_load_ps(sums + i * 16), y[i / 2][i % 2]));
}

constexpr decltype(&product<1>) PRODUCTS[] = {nullptr,    product<1>, product<2>, product<3>,  product<4>,  product<5>, product<6>,
                                              product<7>, product<8>, product<9>, product<10>, product<11>, product<12>};

// For each block of this thread's and each row: then(row, first output, sums [32]).
template <class Then>
static void multiply(const Groups &x, const bf16 *weight, int64_t outputs, int64_t n, int thread, int threads, Then then) {
    alignas(64) float sums[ROWS * BLOCK];
    const int64_t chunk = chunk_of(x.width);
    const Share mine((outputs + BLOCK - 1) / BLOCK, thread, threads);
    for (int64_t block = mine.from; block < mine.to; block++)
        for (int64_t group = 0; group < x.count; group++) {
            std::fill_n(sums, x.rows * BLOCK, 0.0f);
            for (int64_t k = 0; k < x.width; k += chunk)
                PRODUCTS[x.rows](x.at(group, k), weight + (block * x.width + k) * BLOCK, std::min(chunk, x.width - k) / 2, sums);
            for (int64_t r = 0; r < std::min(x.rows, n - group * x.rows); r++)
                then(group * x.rows + r, block * BLOCK, sums + r * BLOCK);
        }
}

static inline __m512 with_bias(const float *sums, const bf16 *bias, int64_t at) {
    return bias ? _mm512_add_ps(_mm512_load_ps(sums), wide(bias + at)) : _mm512_load_ps(sums);
}

// ---------------------------------------------------------------- norms and rotations

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

// ---------------------------------------------------------------- attention

// Scores [Q, stride] of Q queries [Q, d] for the keys from .. to; -inf beside these in a run of 16.
template <int Q>
static void score(const bf16 *queries, const bf16 *keys, int64_t from, int64_t to, int64_t size, float *scores, int64_t stride) {
    __m512i turned[LARGEST / 2];
    for (int64_t t = from / 16 * 16; t < to; t += 16) {
        for (int64_t i = 0; i < size; i += 32) transpose(keys + t * size + i, size, turned + i / 2);
        __m512 sums[Q];
        for (auto &sum : sums) sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < size / 2; i++)
            for (int q = 0; q < Q; q++) {
                const auto pair = (__m512bh)_mm512_set1_epi32(((const int32_t *)(queries + q * size))[i]);
                sums[q] = _mm512_dpbf16_ps(sums[q], pair, (__m512bh)turned[i]);
            }
        const int64_t before = std::max<int64_t>(from - t, 0), behind = std::min<int64_t>(to - t, 16);
        const __mmask16 seen = (0xffff >> (16 - behind)) & (0xffff << before);
        for (int q = 0; q < Q; q++)
            _mm512_storeu_ps(scores + q * stride + t, _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), rounded(sums[q])));
    }
}

static float sum_of(__m512 x) {  // half by half, as torch adds them up
    const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    const __m128 two = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Of scores [count], count a multiple of 16, in place; rounded.
static void softmax(float *scores, int64_t count) {
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i));
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t i = 0; i < count; i += 16) {
        const __m512 mass = Sleef_expf16_u10(_mm512_sub_ps(_mm512_loadu_ps(scores + i), most));
        _mm512_storeu_ps(scores + i, mass);
        sum = _mm512_add_ps(sum, mass);
    }
    const __m512 inverse = _mm512_set1_ps(1 / sum_of(sum));
    for (int64_t i = 0; i < count; i += 16)
        _mm512_storeu_ps(scores + i, rounded(_mm512_mul_ps(_mm512_loadu_ps(scores + i), inverse)));
}

// out [Q, d]: the sums of probs [Q, stride] times values [., d] from .. to, added up as products of `room` tokens are.
template <int Q>
static void weigh(const float *probs, int64_t stride, const bf16 *values, int64_t from, int64_t to, int64_t room, int64_t size,
                  float *out) {
    const int64_t chunk = chunk_of(room);
    for (int64_t i = 0; i < size; i += 64) {
        __m512 all[4 * Q], sums[4 * Q];
        for (auto &sum : all) sum = _mm512_setzero_ps();
        const auto add = [&](int64_t t) {
            for (int j = 0; j < 4; j++) {
                const __m512 value = wide(values + t * size + i + j * 16);
                for (int q = 0; q < Q; q++)
                    sums[4 * q + j] = _mm512_fmadd_ps(_mm512_set1_ps(probs[q * stride + t]), value, sums[4 * q + j]);
            }
        };
        for (int64_t start = from & ~1; start < to; start += chunk - start % chunk) {
            for (auto &sum : sums) sum = _mm512_setzero_ps();
            const int64_t end = std::min(to, start - start % chunk + chunk);
            int64_t t = start;
            for (; t + 1 < end; t += 2) {  // of two the second first, as vdpbf16ps does
                add(t + 1);
                add(t);
            }
            if (t < end) add(t);
            for (int j = 0; j < 4 * Q; j++) all[j] = _mm512_add_ps(all[j], sums[j]);
        }
        for (int j = 0; j < 4 * Q; j++) _mm512_store_ps(out + j / 4 * size + i + j % 4 * 16, rounded(all[j]));
    }
}

// A row's tokens that are read, from .. to, of its prompt and of its own, and the room that each has.
struct Read {
    int64_t prompt_from, prompt_to, prompt_room, from, to, room;
};

// What Q query heads [Q, d] read by one key head, put behind `at` elements of the row.
template <int Q>
static void read(const bf16 *queries, const bf16 *prompt_keys, const bf16 *prompt_values, const bf16 *keys, const bf16 *values,
                 const Read &of, int64_t size, float *scores, int64_t stride, const Groups &to, int64_t row, int64_t at) {
    const int64_t own = (of.prompt_to + 15) / 16 * 16, count = own + (of.to + 15) / 16 * 16;
    std::fill_n(scores, Q * stride, -INFINITY);
    score<Q>(queries, prompt_keys, of.prompt_from, of.prompt_to, size, scores, stride);
    score<Q>(queries, keys, of.from, of.to, size, scores + own, stride);
    for (int q = 0; q < Q; q++) softmax(scores + q * stride, count);
    alignas(64) float one[Q * LARGEST], two[Q * LARGEST];
    weigh<Q>(scores, stride, prompt_values, of.prompt_from, of.prompt_to, of.prompt_room, size, one);
    weigh<Q>(scores + own, stride, values, of.from, of.to, of.room, size, two);
    for (int64_t i = 0; i < Q * size; i += 16)
        to.put(row, at + i, _mm512_add_ps(_mm512_load_ps(one + i), _mm512_load_ps(two + i)));
}

// Caches key and value of a row's token, whose projections are heads [H + 2K, d], and puts what it reads.
static void attend(const Model &m, const Layer &layer, const Rows &rows, int64_t row, bf16 *heads, float *scores, int64_t stride,
                   const Groups &to) {
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
    constexpr decltype(&read<1>) reads[] = {nullptr, read<1>, read<2>, read<3>, read<4>};
    for (int64_t k = 0; k < m.key_heads; k++) {
        const int64_t there = (k * rows.prompts + prompt) * rows.prompt_room * d, here = (k * rows.n + row) * rows.room * d;
        std::memcpy(layer.keys + here + own * d, heads + (m.heads + k) * d, d * sizeof(bf16));
        std::memcpy(layer.values + here + own * d, heads + (m.heads + m.key_heads + k) * d, d * sizeof(bf16));
        for (int64_t h = k * shared; h < (k + 1) * shared; h += QUERIES)
            reads[std::min<int64_t>(QUERIES, (k + 1) * shared - h)](
                heads + h * d, layer.prompt_keys + there, layer.prompt_values + there, layer.keys + here, layer.values + here, of,
                d, scores, stride, to, row, h * d);
    }
}

// ---------------------------------------------------------------- what fused.py calls

// weight [outputs, width] -> blocks. joined: its halves are gates and what they let through, 16 and 16 to a block.
extern "C" void pack(const bf16 *weight, int64_t outputs, int64_t width, int joined, bf16 *to, int threads) {
    const int64_t blocks = (outputs + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < 2 * blocks; i++) {
        const int64_t block = i / 2, half = i % 2, first = joined ? half * (outputs / 2) + block * 16 : block * BLOCK + half * 16;
        __m512i pairs[16];
        for (int64_t k = 0; k < width; k += 32) {
            if (first >= outputs)
                std::memset(pairs, 0, sizeof pairs);
            else
                transpose(weight + first * width + k, width, pairs);
            for (int p = 0; p < 16; p++)
                _mm512_storeu_si512(to + (block * width + k) * BLOCK + p * 2 * BLOCK + half * BLOCK, pairs[p]);
        }
    }
}

// hidden [n, D] of the tokens is written over; logits [n, V] of the next ones.
extern "C" void step(const Model *model, const Layer *layers, const Rows *of, const float *last_norm, const bf16 *head,
                     float *hidden, bf16 *logits, int threads) {
    const Model &m = *model;
    const Rows &rows = *of;
    const int64_t n = rows.n, projected = (m.heads + 2 * m.key_heads) * m.size, stride = rows.prompt_room + rows.room;
    const Groups x(n, m.width), attended(n, m.heads * m.size), gated(n, m.inner);
    const std::unique_ptr<bf16[]> heads(new bf16[n * projected]);
    const std::unique_ptr<float[]> scores(new float[threads * QUERIES * stride]);
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
        const int thread = omp_get_thread_num();
        const Share mine(n, thread, threads);
        for (int64_t l = 0; l < m.layers; l++) {
            const Layer &layer = layers[l];
            for (int64_t row = mine.from; row < mine.to; row++)
                norm(hidden + row * m.width, layer.attention_norm, row, m.eps, x);
#pragma omp barrier
            multiply(x, layer.qkv, projected, n, thread, threads, [&](int64_t row, int64_t at, const float *sums) {
                for (int64_t i = 0; i < BLOCK; i += 16)
                    store(&heads[row * projected + at + i], with_bias(sums + i, layer.qkv_bias, at + i));
            });
#pragma omp barrier
            for (int64_t row = mine.from; row < mine.to; row++)
                attend(m, layer, rows, row, &heads[row * projected], &scores[thread * QUERIES * stride], stride, attended);
#pragma omp barrier
            multiply(attended, layer.attention_out, m.width, n, thread, threads, onto_hidden(layer.attention_out_bias));
#pragma omp barrier
            for (int64_t row = mine.from; row < mine.to; row++) norm(hidden + row * m.width, layer.mlp_norm, row, m.eps, x);
#pragma omp barrier
            multiply(x, layer.gate_up, 2 * m.inner, n, thread, threads, [&](int64_t row, int64_t at, const float *sums) {
                const __m512 gate = rounded(with_bias(sums, layer.gate_up_bias, at));
                const __m512 up = rounded(with_bias(sums + 16, layer.gate_up_bias, at + 16));
                gated.put(row, at / 2, _mm512_mul_ps(rounded(silu(gate)), up));
            });
#pragma omp barrier
            multiply(gated, layer.down, m.width, n, thread, threads, onto_hidden(layer.down_bias));
#pragma omp barrier
        }
        for (int64_t row = mine.from; row < mine.to; row++) norm(hidden + row * m.width, last_norm, row, m.eps, x);
#pragma omp barrier
        multiply(x, head, m.vocabulary, n, thread, threads, [&](int64_t row, int64_t at, const float *sums) {
            for (int64_t i = 0; i < BLOCK && at + i < m.vocabulary; i += 16) {
                const __mmask16 there = m.vocabulary - at - i < 16 ? (1 << (m.vocabulary - at - i)) - 1 : 0xffff;
                _mm256_mask_storeu_epi16(logits + row * m.vocabulary + at + i, there, narrow(_mm512_load_ps(sums + i)));
            }
        });
    }
}
