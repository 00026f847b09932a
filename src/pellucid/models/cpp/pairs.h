// Products of rows and weights.
//
// Matrices [N, K] are stored in blocks of 32 outputs with two inputs together, [N / 32][K / 2][32][2], as vdpbf16ps multiplies them
// (`pack`). Activations [n, K] are stored in groups of R rows: [n / R][K / 2][R][2].

#pragma once
#include "vectors.h"

// How many of `all` products oneDNN sums in one block.
static int64_t chunk_of(int64_t all) { return all > 1024 ? 1024 : 512; }

struct Groups {
    using Words = Groups;
    static constexpr int64_t ROWS = 12, INPUTS = 2;  // at most as many rows: their sums and a vector of a block fill the registers
    static constexpr int64_t QUERIES = 4;            // their sums are independent

    int64_t rows, count, width;
    Zeros<bf16> data;

    struct Setting {  // AVX-512 needs no setup
        explicit Setting(int64_t) {}
    };

    Groups(int64_t n, int64_t width)
        : rows(evenly(n, ROWS)), count((n + rows - 1) / rows), width(width), data(zeros<bf16>(count * rows * width)) {}
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
        _mm_prefetch((const char *)(block + (k + pairs) * 64), _MM_HINT_T1);  // the next block
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

// Multiplies the first `inputs` of some groups of n rows by some blocks of a weight. Calls then(row, first output, sums [32]) for each
// block and row.
template <class Then>
static void multiply(const Groups &x, const bf16 *weight, int64_t inputs, int64_t n, Share blocks, Share groups, Then then) {
    alignas(64) float sums[Groups::ROWS * BLOCK];
    const int64_t chunk = chunk_of(inputs);
    for (int64_t block = blocks.from; block < blocks.to; block++)
        for (int64_t group = groups.from; group < groups.to; group++) {
            std::fill_n(sums, x.rows * BLOCK, 0.0f);
            for (int64_t k = 0; k < inputs; k += chunk)
                PRODUCTS[x.rows](x.at(group, k), weight + (block * inputs + k) * BLOCK, std::min(chunk, inputs - k) / 2, sums);
            for (int64_t r = 0; r < std::min(x.rows, n - group * x.rows); r++)
                then(group * x.rows + r, block * BLOCK, sums + r * BLOCK);
        }
}

// Queries in their own layout.
static void lay(By<Groups>, const bf16 *queries, int64_t size, bf16 *to) { std::copy_n(queries, Groups::QUERIES * size, to); }

// Scores [Q, stride] of queries; -inf for other keys than theirs, in runs of 16.
template <int Q> static void score_by(const Queries &of, const bf16 *keys, float *scores, int64_t stride) {
    __m512i turned[LARGEST / 2];
    const int64_t size = of.size;
    const bf16 *queries = of.laid + of.at * size;
    for (int64_t t = of.first / 16 * 16; t < of.end; t += 16) {
        for (int64_t i = 0; i < size; i += 32) transpose(keys + t * size + i, size, turned + i / 2);
        __m512 sums[Q];
        for (auto &sum : sums) sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < size / 2; i++)
            for (int q = 0; q < Q; q++) {
                const auto pair = (__m512bh)_mm512_set1_epi32(((const int32_t *)(queries + q * size))[i]);
                sums[q] = _mm512_dpbf16_ps(sums[q], pair, (__m512bh)turned[i]);
            }
        for (int q = 0; q < Q; q++) put_scores(scores + q * stride, sums[q], t, of.from[q], of.to[q]);
    }
}

static void score(By<Groups>, const Queries &of, const bf16 *keys, float *scores, int64_t stride) {
    constexpr decltype(&score_by<1>) BY[] = {nullptr, score_by<1>, score_by<2>, score_by<3>, score_by<4>};
    BY[of.count](of, keys, scores, stride);
}

template <int Q>
static void weigh_by(const Queries &of, const bf16 *values, const float *probs, int64_t stride, int64_t room, float *out) {
    const int64_t size = of.size, chunk = chunk_of(room);
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
        for (int64_t start = of.first & ~1; start < of.end; start += chunk - start % chunk) {
            for (auto &sum : sums) sum = _mm512_setzero_ps();
            const int64_t end = std::min(of.end, start - start % chunk + chunk);
            int64_t t = start;
            for (; t + 1 < end; t += 2) {  // the second of two first, as vdpbf16ps does
                add(t + 1);
                add(t);
            }
            if (t < end) add(t);
            for (int j = 0; j < 4 * Q; j++) all[j] = _mm512_add_ps(all[j], sums[j]);
        }
        for (int j = 0; j < 4 * Q; j++) _mm512_store_ps(out + j / 4 * size + i + j % 4 * 16, rounded(all[j]));
    }
}

// out [Q, d] = probs [Q, stride] times values [., d], summed in the order of products of `room` tokens.
static void weigh(By<Groups>, const Queries &of, const bf16 *values, const float *probs, int64_t stride, int64_t room, float *out) {
    constexpr decltype(&weigh_by<1>) BY[] = {nullptr, weigh_by<1>, weigh_by<2>, weigh_by<3>, weigh_by<4>};
    BY[of.count](of, values, probs, stride, room, out);
}

// ---------------------------------------------------------------- the backward pass of attention

// As in tiles.h: sums [M, J vectors] += M rows of weights, with a stride of `stride`, times rows of pairs.
template <int M, int J>
static void add_pairs(const bf16 *weights, int64_t stride, const bf16 *pairs, int64_t apart, int64_t count, __m512 (&sums)[M][J]) {
    for (int64_t p = 0; p < count; p++) {
        __m512bh vectors[J];
        for (int j = 0; j < J; j++) vectors[j] = (__m512bh)_mm512_loadu_si512(pairs + p * apart + j * 32);
        for (int m = 0; m < M; m++) {
            const auto pair = (__m512bh)_mm512_set1_epi32(((const int32_t *)(weights + m * stride))[p]);
            for (int j = 0; j < J; j++) sums[m][j] = _mm512_dpbf16_ps(sums[m][j], pair, vectors[j]);
        }
    }
}

static void by_keys(By<Groups>, const bf16 *keys, const bf16 *turned, int64_t from, int64_t to, int64_t d, float *out) {
    constexpr int M = 16;
    for (int64_t t = from; t < to; t += M) {
        __m512 sums[M][1];
        for (auto &sum : sums) sum[0] = _mm512_setzero_ps();
        add_pairs<M, 1>(keys + t * d, d, turned, 32, d / 2, sums);
        for (int m = 0; m < M; m++) _mm512_store_ps(out + (t + m) * 16, sums[m][0]);
    }
}

static void sum_of_keys(By<Groups>, const bf16 *weights, int64_t stride, const bf16 *pairs, int64_t count, int64_t d, float *out) {
    constexpr int M = 4, J = 4;
    for (int64_t i = 0; i < d; i += J * 16)
        for (int64_t q = 0; q < 16; q += M) {
            __m512 sums[M][J];
            for (auto &row : sums)
                for (auto &sum : row) sum = _mm512_setzero_ps();
            add_pairs<M, J>(weights + q * stride, stride, pairs + 2 * i, 2 * d, count / 2, sums);
            for (int m = 0; m < M; m++)
                for (int j = 0; j < J; j++) _mm512_store_ps(out + (q + m) * d + i + j * 16, sums[m][j]);
        }
}

static void add_to_keys(By<Groups>, const bf16 *weights, const bf16 *pairs, int64_t from, int64_t to, int64_t d, float *sums) {
    constexpr int M = 4, J = 4;
    for (int64_t t = from; t < to; t += M)
        for (int64_t i = 0; i < d; i += J * 16) {
            __m512 rows[M][J];
            for (int m = 0; m < M; m++)
                for (int j = 0; j < J; j++) rows[m][j] = _mm512_load_ps(sums + (t + m) * d + i + j * 16);
            add_pairs<M, J>(weights + t * MANY, MANY, pairs + 2 * i, 2 * d, MANY / 2, rows);
            for (int m = 0; m < M; m++)
                for (int j = 0; j < J; j++) _mm512_store_ps(sums + (t + m) * d + i + j * 16, rows[m][j]);
        }
}
