// Products of rows and weights in int8. Each row and each output has a scale that makes its largest magnitude 127. Sums are exact
// integers, so they are equal in every order, with AMX or AVX-512, and whatever other rows there are.
//
// Some inputs of a layer are a hundred times as large as the others, to which the scale of the largest leaves few values. So rows
// and weights are first `spread`: each 64 inputs are multiplied by a Hadamard matrix, whose product with itself is 64 times the
// identity. Products are then 64 times as large, and no input is much larger than others.
//
// Weights [N, K] are stored in blocks of 32 outputs (`ByteBlock`), with four inputs together: [K / 4][32][4]. Activations [n, K]
// are stored in groups of R rows: [n / R][K / I][R][I], where I is 64 with AMX and 4 without. K is padded with zeros to a multiple
// of 64. Sums fit into 32 bits up to a K of 133,000.

#pragma once
#include "pairs.h"
#include "tiles.h"

static int64_t depth_of(int64_t width) { return (width + 63) / 64 * 64; }

// The parts of a block: the scales of its outputs, the initial values of their sums for unsigned activations, and its weights.
struct ByteBlock {
    float *scales;
    int32_t *starts;
    int8_t *weights;

    ByteBlock(const void *matrix, int64_t block, int64_t depth)
        : scales((float *)((int8_t *)matrix + block * BLOCK * (depth + 8))), starts((int32_t *)(scales + BLOCK)),
          weights((int8_t *)(starts + BLOCK)) {}
};

// x + y, and y - x in the lanes of a mask.
static inline __m512 crossed(__m512 x, __m512 y, __mmask16 second) { return _mm512_mask_sub_ps(_mm512_add_ps(x, y), second, y, x); }

// Multiplies x [64] by a Hadamard matrix, in place.
static void spread(float *x) {
    __m512 y[4];
    for (int i = 0; i < 4; i++) {
        y[i] = _mm512_loadu_ps(x + i * 16);
        y[i] = crossed(y[i], _mm512_permute_ps(y[i], 0xb1), 0xaaaa);
        y[i] = crossed(y[i], _mm512_permute_ps(y[i], 0x4e), 0xcccc);
        y[i] = crossed(y[i], _mm512_shuffle_f32x4(y[i], y[i], 0xb1), 0xf0f0);
        y[i] = crossed(y[i], _mm512_shuffle_f32x4(y[i], y[i], 0x4e), 0xff00);
    }
    const __m512 sums[] = {_mm512_add_ps(y[0], y[1]), _mm512_add_ps(y[2], y[3])};
    const __m512 differences[] = {_mm512_sub_ps(y[0], y[1]), _mm512_sub_ps(y[2], y[3])};
    _mm512_storeu_ps(x, _mm512_add_ps(sums[0], sums[1]));
    _mm512_storeu_ps(x + 16, _mm512_add_ps(differences[0], differences[1]));
    _mm512_storeu_ps(x + 32, _mm512_sub_ps(sums[0], sums[1]));
    _mm512_storeu_ps(x + 48, _mm512_sub_ps(differences[0], differences[1]));
}

// Spreads x [depth] and returns its scale: 1 if all are 0, NaN if one is NaN.
static float spread_and_scale(float *x, int64_t depth) {
    __m512i most = _mm512_setzero_si512();  // magnitudes are ordered as their bits
    for (int64_t k = 0; k < depth; k += 64) {
        spread(x + k);
        for (int64_t i = k; i < k + 64; i += 16)
            most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7fffffff)));
    }
    const uint32_t bits = _mm512_reduce_max_epu32(most);
    float largest;
    std::memcpy(&largest, &bits, sizeof bits);
    return bits ? largest / 127 : 1;
}

static inline __m128i bytes_of(const float *x, float scale) {
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_div_ps(_mm512_loadu_ps(x), _mm512_set1_ps(scale))));
}

// Rows of a step whose other products use Words. They are rounded to bf16 as those are, and quantized once they are complete.
template <class Words_> struct Bytes {
    using Words = Words_;
    using Setting = typename Words::Setting;
    static constexpr bool QUANTISED = true;
    static constexpr int64_t ROWS = Words::ROWS, INPUTS = 2 * Words::INPUTS;

    int64_t rows, count, width, depth;
    Zeros<float> whole;  // [n, depth]
    Zeros<float> scales;
    Zeros<int8_t> data;

    Bytes(int64_t n, int64_t width)
        : rows(evenly(n, ROWS)), count((n + rows - 1) / rows), width(width), depth(depth_of(width)), whole(zeros<float>(n * depth)),
          scales(zeros<float>(n)), data(zeros<int8_t>(count * rows * depth)) {}
    int8_t *at(int64_t group, int64_t k) const { return data.get() + (group * depth + k) * rows; }
    void put(int64_t row, int64_t k, __m512 x) const { _mm512_storeu_ps(whole.get() + row * depth + k, rounded(x)); }
    void quantise(int64_t row) const {
        float *x = whole.get() + row * depth;
        const float scale = scales[row] = spread_and_scale(x, depth);
        for (int64_t k = 0; k < depth; k += 16)
            lay(*this, at(row / rows, k / INPUTS * INPUTS) + row % rows * INPUTS + k % INPUTS, bytes_of(x + k, scale));
        std::fill(x + width, x + depth, 0.0f);  // for the next row that is written here
    }
};

// Adds 128, since vpdpbusd takes unsigned activations.
static void lay(const Bytes<Groups> &of, int8_t *to, __m128i bytes) {
    alignas(16) int32_t fours[4];
    _mm_store_si128((__m128i *)fours, _mm_xor_si128(bytes, _mm_set1_epi8(-128)));
    for (int i = 0; i < 4; i++) ((int32_t *)to)[i * of.rows] = fours[i];
}

static void lay(const Bytes<Tiles> &, int8_t *to, __m128i bytes) { _mm_storeu_si128((__m128i *)to, bytes); }

// sums [R, 32] = R rows times a block.
template <int R> static void byte_product(const int8_t *x, const ByteBlock &block, int64_t fours, int32_t *sums) {
    __m512i y[R][2];
    for (auto &row : y)
        for (int i = 0; i < 2; i++) row[i] = _mm512_loadu_si512(block.starts + i * 16);
    for (int64_t k = 0; k < fours; k++) {
        const int8_t *weights = block.weights + k * 4 * BLOCK;
        const __m512i one = _mm512_loadu_si512(weights), two = _mm512_loadu_si512(weights + 64);
        _mm_prefetch((const char *)(weights + fours * 4 * BLOCK), _MM_HINT_T1);  // the next block
        _mm_prefetch((const char *)(weights + fours * 4 * BLOCK + 64), _MM_HINT_T1);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const __m512i four = _mm512_set1_epi32(((const int32_t *)x)[k * R + r]);
            y[r][0] = _mm512_dpbusd_epi32(y[r][0], four, one);
            y[r][1] = _mm512_dpbusd_epi32(y[r][1], four, two);
        }
    }
    for (int i = 0; i < 2 * R; i++) _mm512_store_si512(sums + i * 16, y[i / 2][i % 2]);
}

constexpr decltype(&byte_product<1>) BYTE_PRODUCTS[] = {
    nullptr,         byte_product<1>, byte_product<2>, byte_product<3>,  byte_product<4>,  byte_product<5>, byte_product<6>,
    byte_product<7>, byte_product<8>, byte_product<9>, byte_product<10>, byte_product<11>, byte_product<12>};

static void product(const Bytes<Groups> &x, int64_t group, bool two, const ByteBlock &block, int32_t *sums) {
    for (int64_t i = 0; i <= two; i++)
        BYTE_PRODUCTS[x.rows](x.at(group + i, 0), block, x.depth / 4, sums + i * x.rows * BLOCK);
}

static void product(const Bytes<Tiles> &x, int64_t group, bool two, const ByteBlock &block, int32_t *sums) {
    constexpr int64_t INPUTS = Bytes<Tiles>::INPUTS, stride = BLOCK * sizeof(int32_t);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < x.depth; k += INPUTS) {
        const int8_t *weights = block.weights + k * BLOCK;
        fetch_quarter(weights, 0);
        _tile_loadd(6, weights, 4 * BLOCK);
        _tile_loadd(7, weights + 64, 4 * BLOCK);
        _tile_loadd(4, x.at(group, k), INPUTS);
        fetch_quarter(weights, 1);
        _tile_dpbssd(0, 4, 6);
        fetch_quarter(weights, 2);
        _tile_dpbssd(1, 4, 7);
        fetch_quarter(weights, 3);
        if (two) {
            _tile_loadd(5, x.at(group + 1, k), INPUTS);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + BLOCK / 2, stride);
    if (!two) return;
    _tile_stored(2, sums + x.rows * BLOCK, stride);
    _tile_stored(3, sums + x.rows * BLOCK + BLOCK / 2, stride);
}

template <class Words, class Then>
static void multiply(const Bytes<Words> &x, const bf16 *weight, int64_t outputs, int64_t n, int thread, int team, Then then) {
    alignas(64) int32_t sums[2 * Bytes<Words>::ROWS * BLOCK];
    alignas(64) float scaled[BLOCK];
    [[maybe_unused]] const typename Words::Setting setting(x.rows);
    const Share mine((outputs + BLOCK - 1) / BLOCK, thread, team);
    for (int64_t at = mine.from; at < mine.to; at++) {
        const ByteBlock block(weight, at, x.depth);
        for (int64_t group = 0; group < x.count; group += 2) {
            product(x, group, group + 1 < x.count, block, sums);
            for (int64_t r = 0; r < std::min(2 * x.rows, n - group * x.rows); r++) {
                const int64_t row = group * x.rows + r;
                for (int i = 0; i < BLOCK; i += 16) {
                    const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums + r * BLOCK + i));
                    const __m512 by_row = _mm512_mul_ps(sum, _mm512_set1_ps(x.scales[row]));
                    _mm512_store_ps(scaled + i, _mm512_mul_ps(by_row, _mm512_loadu_ps(block.scales + i)));
                }
                then(row, at * BLOCK, scaled);
            }
        }
    }
}

// Packs half a block, 16 outputs x [16, width]; zeros if x is null.
static void pack_half(const bf16 *x, int64_t width, const ByteBlock &block, int64_t half) {
    const int64_t depth = depth_of(width);
    const Zeros<int8_t> bytes = zeros<int8_t>(16 * depth);
    const Zeros<float> row = zeros<float>(depth);
    for (int64_t r = 0; r < 16; r++) {
        std::fill_n(row.get(), depth, 0.0f);
        for (int64_t k = 0; x && k < width; k += 16) _mm512_store_ps(row.get() + k, wide(x + r * width + k));
        const float scale = spread_and_scale(row.get(), depth);
        for (int64_t k = 0; k < depth; k += 16)
            _mm_store_si128((__m128i *)(bytes.get() + r * depth + k), bytes_of(row.get() + k, scale));
        int32_t sum = 0;
        for (int64_t k = 0; k < depth; k++) sum += bytes[r * depth + k];
        block.scales[half * 16 + r] = scale / 64;
        block.starts[half * 16 + r] = -128 * sum;
    }
    __m512i fours[16];
    for (int64_t k = 0; k < depth; k += 64) {
        transpose((const bf16 *)(bytes.get() + k), depth / 2, fours);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(block.weights + (k / 4 + i) * 4 * BLOCK + half * 64, fours[i]);
    }
}
