// The same with AMX: tiles of 16 rows by 32 inputs times tiles of 32 inputs by 16 outputs. Inputs are summed tile after tile from
// first to last, as oneDNN does for few rows.
//
// Two adjacent tiles of weights are a block of `pack`. Activations [n, K] are stored in groups of R rows, each in tiles:
// [n / R][K / 32][R][32].

#pragma once
#include "vectors.h"

constexpr int64_t TILE = 512;       // elements of a tile in bf16
constexpr int64_t AGAIN = 1 << 18;  // elements of weights that are read again from the L2 cache for more rows

// The tiles of a thread: 0 to 3 are sums, 4 and 5 the left factor, 6 and 7 the right. Sums and the left have R rows.
struct Tiling {
    struct alignas(64) Shapes {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};  // bytes of a row
        uint8_t rows[16] = {};
    };
    explicit Tiling(int64_t rows) {
        Shapes shapes;
        for (int i = 0; i < 8; i++) {
            shapes.bytes[i] = 64;
            shapes.rows[i] = i < 6 ? rows : 16;
        }
        asm volatile("" : : "r"(&shapes) : "memory");  // gcc assumes that the next line reads 8 bytes, and might remove the other stores
        _tile_loadconfig(&shapes);
    }
    ~Tiling() { _tile_release(); }
};

struct Tiles {
    using Words = Tiles;
    static constexpr int64_t ROWS = 16, INPUTS = 32, QUERIES = MOST;  // maxima of a tile

    int64_t rows, count, width;
    Zeros<bf16> data;

    using Setting = Tiling;  // `score` and `weigh` need one with ROWS

    Tiles(int64_t n, int64_t width)
        : rows(evenly(n, ROWS)), count((n + rows - 1) / rows), width(width), data(zeros<bf16>(count * rows * width)) {}
    bf16 *at(int64_t group, int64_t k) const { return data.get() + (group * width + k) * rows; }
    void put(int64_t row, int64_t k, __m512 x) const {
        store(at(row / rows, k / INPUTS * INPUTS) + row % rows * INPUTS + k % INPUTS, x);
    }
};

// Prefetches a quarter of the two tiles of weights that are needed six pairs later; all at once would delay the current reads.
[[gnu::always_inline]] static inline void fetch_quarter(const bf16 *weights, int quarter) {
    constexpr int PAIR = 2048, LINES = PAIR / 64 / 4;
    for (int i = 0; i < LINES; i++)
        _mm_prefetch((const char *)weights + 6 * PAIR + (quarter * LINES + i) * 64, _MM_HINT_T1);
}

// sums [2R, 32] = the first inputs of one or two groups of R rows times a block. Weights must not evict the rows from the L1 cache.
static void product(const Tiles &x, int64_t group, bool two, const bf16 *block, int64_t inputs, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < inputs; k += Tiles::INPUTS) {
        const bf16 *weights = block + k * BLOCK;
        fetch_quarter(weights, 0);
        _tile_stream_loadd(6, weights, 2 * BLOCK * sizeof(bf16));
        _tile_stream_loadd(7, weights + BLOCK, 2 * BLOCK * sizeof(bf16));
        _tile_loadd(4, x.at(group, k), Tiles::INPUTS * sizeof(bf16));
        fetch_quarter(weights, 1);
        _tile_dpbf16ps(0, 4, 6);
        fetch_quarter(weights, 2);
        _tile_dpbf16ps(1, 4, 7);
        fetch_quarter(weights, 3);
        if (two) {
            _tile_loadd(5, x.at(group + 1, k), Tiles::INPUTS * sizeof(bf16));
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    constexpr int64_t stride = BLOCK * sizeof(float);
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + BLOCK / 2, stride);
    if (!two) return;
    _tile_stored(2, sums + x.rows * BLOCK, stride);
    _tile_stored(3, sums + x.rows * BLOCK + BLOCK / 2, stride);
}

template <class Then>
static void multiply(const Tiles &x, const bf16 *weight, int64_t inputs, int64_t n, Share blocks, Share groups, Then then) {
    alignas(64) float sums[2 * Tiles::ROWS * BLOCK];
    const Tiling tiling(x.rows);
    const int64_t panel = groups.to - groups.from > 2 ? std::max<int64_t>(1, AGAIN / (inputs * BLOCK)) : 1;
    for (int64_t first = blocks.from; first < blocks.to; first += panel)
        for (int64_t group = groups.from; group < groups.to; group += 2)
            for (int64_t block = first; block < std::min(first + panel, blocks.to); block++) {
                const bool two = group + 1 < groups.to;
                product(x, group, two, weight + block * inputs * BLOCK, inputs, sums);
                for (int64_t r = 0; r < std::min((1 + two) * x.rows, n - group * x.rows); r++)
                    then(group * x.rows + r, block * BLOCK, sums + r * BLOCK);
            }
}

// Converts queries [16, d] to pairs [d / 2][16], a right factor; columns without a query are ignored.
static void lay(By<Tiles>, const bf16 *queries, int64_t size, bf16 *to) {
    for (int64_t i = 0; i < size; i += 32) transpose(queries + i, size, (__m512i *)(to + i * 16));
}

// Scores [Q, stride] of queries; -inf for other keys than theirs, in runs of 16. Keys are the left factor, as they are in the cache:
// factors may be exchanged, the order of sums may not.
static void score(By<Tiles>, const Queries &of, const bf16 *keys, float *scores, int64_t stride) {
    alignas(64) float sums[2][16 * 16];
    __m512i by_query[16];
    const int64_t size = of.size;
    for (int64_t t = of.first / 16 * 16; t < of.end; t += 32) {
        const bool two = t + 16 < of.end;
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t i = 0; i < size; i += Tiles::INPUTS) {
            _tile_loadd(6, of.laid + i * 16, 64);
            _tile_loadd(4, keys + t * size + i, size * sizeof(bf16));
            _tile_dpbf16ps(0, 4, 6);
            if (two) {
                _tile_loadd(5, keys + (t + 16) * size + i, size * sizeof(bf16));
                _tile_dpbf16ps(1, 5, 6);
            }
        }
        _tile_stored(0, sums[0], 64);
        if (two) _tile_stored(1, sums[1], 64);
        for (int half = 0; half <= two; half++) {
            transpose((const bf16 *)sums[half], 32, by_query);
            for (int64_t q = 0; q < of.count; q++)
                put_scores(scores + q * stride, _mm512_castsi512_ps(by_query[of.at + q]), t + half * 16, of.from[q], of.to[q]);
        }
    }
}

// A tile of 32 values: 16 elements of each of so many tokens from here on, two tokens together.
static void pair_up(const bf16 *values, int64_t count, int64_t size, bf16 (*to)[32]) {
    int64_t k = 0;
    for (; k + 1 < count; k += 2) _mm512_store_si512(to[k / 2], paired(values + k * size, values + (k + 1) * size));
    if (k < count) _mm512_store_si512(to[k / 2], paired(values + k * size, nullptr));
    for (k += k < count ? 2 : 0; k < Tiles::INPUTS; k += 2) _mm512_store_si512(to[k / 2], _mm512_setzero_si512());
}

// out [Q, d] = probs [Q, stride] times values [., d].
static void weigh(By<Tiles>, const Queries &of, const bf16 *values, const float *probs, int64_t stride, int64_t, float *out) {
    alignas(64) bf16 weights[Tiles::ROWS][Tiles::INPUTS];  // Q rows; others are ignored
    alignas(64) bf16 pairs[4][Tiles::INPUTS / 2][32];
    alignas(64) float sums[4][16][16];
    const int64_t size = of.size;
    for (int64_t i = 0; i < size; i += 64) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t start = of.first / Tiles::INPUTS * Tiles::INPUTS; start < of.end; start += Tiles::INPUTS) {
            const int64_t count = std::min(Tiles::INPUTS, of.end - start);
            for (int64_t q = 0; q < of.count; q++)
                for (int j = 0; j < Tiles::INPUTS; j += 16)
                    store(weights[q] + j, _mm512_maskz_loadu_ps(first_of_sixteen(count - j), probs + q * stride + start + j));
            for (int j = 0; j < 4; j++) pair_up(values + start * size + i + j * 16, count, size, pairs[j]);
            _tile_loadd(4, weights, 64);
            _tile_loadd(6, pairs[0], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, pairs[1], 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, pairs[2], 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, pairs[3], 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        for (int64_t q = 0; q < of.count; q++)
            for (int j = 0; j < 4; j++) _mm512_store_ps(out + q * size + i + j * 16, rounded(_mm512_load_ps(sums[j][q])));
    }
}

// ---------------------------------------------------------------- the backward pass of attention

// Four adjacent tiles of sums, in rows of `width`.
static void store_four(float *sums, int64_t width) {
    _tile_stored(0, sums, width * sizeof(float));
    _tile_stored(1, sums + 16, width * sizeof(float));
    _tile_stored(2, sums + 32, width * sizeof(float));
    _tile_stored(3, sums + 48, width * sizeof(float));
}

// Adds the products of tile 4 and four adjacent tiles, with this row stride in bytes, to the four sums.
static void four_products(const bf16 *right, int64_t apart) {
    _tile_loadd(6, right, apart);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + 32, apart);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, right + 64, apart);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, right + 96, apart);
    _tile_dpbf16ps(3, 4, 7);
}

// [from .. to, 16] = keys [., d], or values, times sixteen queries in the layout `turned`.
static void by_keys(By<Tiles>, const bf16 *keys, const bf16 *turned, int64_t from, int64_t to, int64_t d, float *out) {
    for (int64_t t = from; t < to; t += 32) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t i = 0; i < d; i += Tiles::INPUTS) {
            _tile_loadd(6, turned + i * 16, 64);
            _tile_loadd(4, keys + t * d + i, d * sizeof(bf16));
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, keys + (t + 16) * d + i, d * sizeof(bf16));
            _tile_dpbf16ps(1, 5, 6);
        }
        _tile_stored(0, out + t * 16, 64);
        _tile_stored(1, out + (t + 16) * 16, 64);
    }
}

// out [16, d] = weights [16, stride] times `count` keys, in pairs.
static void sum_of_keys(By<Tiles>, const bf16 *weights, int64_t stride, const bf16 *pairs, int64_t count, int64_t d, float *out) {
    for (int64_t i = 0; i < d; i += 64) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t t = 0; t < count; t += Tiles::INPUTS) {
            _tile_loadd(4, weights + t, stride * sizeof(bf16));
            four_products(pairs + t * d + 2 * i, 2 * d * sizeof(bf16));
        }
        store_four(out + i, d);
    }
}

// sums [from .. to, d] += weights [., MANY] times MANY queries, in pairs.
static void add_to_keys(By<Tiles>, const bf16 *weights, const bf16 *pairs, int64_t from, int64_t to, int64_t d, float *sums) {
    for (int64_t t = from; t < to; t += 16)
        for (int64_t i = 0; i < d; i += 64) {
            float *const at = sums + t * d + i;
            _tile_loadd(0, at, d * sizeof(float));
            _tile_loadd(1, at + 16, d * sizeof(float));
            _tile_loadd(2, at + 32, d * sizeof(float));
            _tile_loadd(3, at + 48, d * sizeof(float));
            _tile_loadd(4, weights + t * MANY, MANY * sizeof(bf16));
            four_products(pairs + 2 * i, 2 * d * sizeof(bf16));
            store_four(at, d);
        }
}
