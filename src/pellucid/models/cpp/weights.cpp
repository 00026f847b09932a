// The gradient of a matrix of weights, by AMX: unrounded sums over tokens. sums.py calls this.
//
// Tokens are the inputs of these products. Sums stay near a thread for CHUNK tokens at a time: for a panel of outputs what is on
// the left is laid out anew and read from its second cache, a column of what is on the right from its first.

#include <omp.h>

#include "tiles.h"

constexpr int64_t CHUNK = 256, PANEL = 16;  // tokens; blocks of 32 outputs

// Tokens from t on of 16 numbers each, two tokens together, 0 behind the last of `n`: [16][16][2].
static void pair_tokens(const bf16 *x, int64_t width, int64_t t, int64_t n, __m512i *to) {
    const __m512i nothing = _mm512_setzero_si512();
    for (int64_t i = 0; i < 16; i++, t += 2)
        to[i] = t < n ? paired(x + t * width, t + 1 < n ? x + (t + 1) * width : nullptr) : nothing;
}

// Fetches the sums that are written next. Behind the last there may be none: then nothing is fetched.
[[gnu::always_inline]] static inline void fetch_sums(const float *sums, int64_t width) {
    for (int64_t row = 0; row < 32; row++)
        for (int64_t i = 0; i < 32; i += 16) __builtin_prefetch(sums + row * width + i, 1);
}

// Outputs of `blocks` blocks over so many steps of 32 tokens, from token t on: [blocks][steps][2] tiles, as the left of products.
static void lay_left(const bf16 *grad, int64_t outputs, int64_t blocks, int64_t t, int64_t steps, int64_t n, bf16 *left) {
    __m512i pairs[16];
    for (int64_t step = 0; step < steps; step++)  // a token's outputs stand together: all of them, then the next tokens
        for (int64_t i = 0; i < 2 * blocks; i++) {
            pair_tokens(grad + i * 16, outputs, t + step * 32, n, pairs);
            transpose((const bf16 *)pairs, 32, (__m512i *)(left + ((i / 2 * steps + step) * 2 + i % 2) * TILE));
        }
}

// sums [32, 32] in rows of `width`: products of two rows of tiles over so many steps, or so much more.
static void add_block(const bf16 *left, const bf16 *right, int64_t steps, float *sums, int64_t width, bool more) {
    const int64_t stride = width * sizeof(float);
    if (more) {
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + 16, stride);
        _tile_loadd(2, sums + 16 * width, stride);
        _tile_loadd(3, sums + 16 * width + 16, stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < steps; i++, left += 2 * TILE, right += 2 * TILE) {
        fetch_near(left, 0);
        _tile_loadd(4, left, 64);
        _tile_loadd(6, right, 64);
        _tile_dpbf16ps(0, 4, 6);
        fetch_near(left, 1);
        _tile_loadd(7, right + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        fetch_near(left, 2);
        _tile_loadd(5, left + TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        fetch_near(left, 3);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + 16, stride);
    _tile_stored(2, sums + 16 * width, stride);
    _tile_stored(3, sums + 16 * width + 16, stride);
}

static void sum(const bf16 *grad, const bf16 *x, int64_t n, int64_t outputs, int64_t width, float *sums, bool more, int64_t threads) {
    const int64_t steps = std::max<int64_t>(1, (n + 31) / 32);  // sums over no token are 0, and must be written
    const int64_t columns = width / 32, some = CHUNK / 32, room = PANEL * some * 2 * TILE;
    const Zeros<bf16> right(new_lines<bf16>(columns * steps * 2 * TILE)), all_left(new_lines<bf16>(threads * room));
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        const Share mine(outputs / 32, thread, team);
        const int64_t panel = evenly(std::max<int64_t>(1, mine.to - mine.from), PANEL);  // there may be fewer blocks than threads
        bf16 *const left = &all_left[thread * room];
#pragma omp for schedule(static)
        for (int64_t step = 0; step < steps; step++)
            for (int64_t k = 0; k < width; k += 16)
                pair_tokens(x + k, width, step * 32, n, (__m512i *)&right[((k / 32 * steps + step) * 2 + k / 16 % 2) * TILE]);
        const Tiling tiling(16);
        for (int64_t block = mine.from; block < mine.to; block += panel)
            for (int64_t first = 0; first < steps; first += some) {
                const int64_t blocks = std::min(panel, mine.to - block), count = std::min(some, steps - first);
                lay_left(grad + block * 32, outputs, blocks, first * 32, count, n, left);
                for (int64_t column = 0; column < columns; column++)
                    for (int64_t b = 0; b < blocks; b++) {
                        const auto at = [&](int64_t b, int64_t column) { return sums + (block + b) * 32 * width + column * 32; };
                        fetch_sums(b + 1 < blocks ? at(b + 1, column) : at(0, column + 1), width);
                        add_block(left + b * count * 2 * TILE, &right[(column * steps + first) * 2 * TILE], count, at(b, column), width,
                                  first || more);
                    }
            }
    }
}

// sums [N, K] of grad [n, N] times x [n, K] over tokens, or so much more. Returns 1 where there is no memory, else 0.
extern "C" int sum_over_tokens(const bf16 *grad, const bf16 *x, int64_t n, int64_t outputs, int64_t width, float *sums, int64_t more,
                               int64_t threads) {
    try {
        sum(grad, x, n, outputs, width, sums, more, threads);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}
