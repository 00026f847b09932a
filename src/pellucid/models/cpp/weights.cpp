// The gradient of a matrix of weights, by AMX: unrounded sums over tokens. models/tiled.py calls this.
//
// Tokens are the inputs of these products. Sums stay near a thread for CHUNK tokens at a time: for a panel of outputs what is on
// the left is laid out anew and read from its second cache, a column of what is on the right from its first.

#include <omp.h>

#include "tiles.h"

constexpr int64_t CHUNK = 256, PANEL = 16, TILE = 512;  // tokens; blocks of 32 outputs; numbers of a tile

// Tokens from t on of 16 numbers each, two tokens together, 0 behind the last of `n`: [16][16][2].
static void pair_tokens(const bf16 *x, int64_t width, int64_t t, int64_t n, __m512i *to) {
    const __m512i nothing = _mm512_setzero_si512();
    for (int64_t i = 0; i < 16; i++, t += 2)
        to[i] = t < n ? paired(x + t * width, t + 1 < n ? x + (t + 1) * width : nullptr) : nothing;
}

// Fetches a quarter of the two tiles that are read two pairs of tiles later.
[[gnu::always_inline]] static inline void fetch_near(const bf16 *tiles, int quarter) {
    for (int i = 8 * quarter; i < 8 * quarter + 8; i++) _mm_prefetch((const char *)(tiles + 4 * TILE) + i * 64, _MM_HINT_T0);
}

// Fetches the sums that are written next. Behind the last there may be none: then nothing is fetched.
[[gnu::always_inline]] static inline void fetch_sums(const float *sums, int64_t width) {
    for (int64_t row = 0; row < 32; row++)
        for (int64_t i = 0; i < 32; i += 16) __builtin_prefetch(sums + row * width + i, 1);
}

// sums [N, K] of grad [n, N] times x [n, K] over tokens, or so much more. Returns 1 where there is no memory, else 0.
extern "C" int sum_over_tokens(const bf16 *grad, const bf16 *x, int64_t n, int64_t outputs, int64_t width, float *sums, int64_t more,
                               int64_t threads) {
    const int64_t steps = (n + 31) / 32, columns = width / 32, blocks = outputs / 32;
    int fault = 0;
    try {
        const Zeros<bf16> right(new_lines<bf16>(columns * steps * 2 * TILE));
#pragma omp parallel num_threads(threads) reduction(| : fault)
        {
            const int thread = omp_get_thread_num(), team = omp_get_num_threads();
            const Share mine(blocks, thread, team);
            Zeros<bf16> left;
            try {
                left = Zeros<bf16>(new_lines<bf16>(PANEL * CHUNK / 32 * 2 * TILE));
            } catch (const std::bad_alloc &) {
                fault = 1;
            }
#pragma omp for schedule(static)
            for (int64_t step = 0; step < steps; step++)
                for (int64_t k = 0; k < width; k += 16)
                    pair_tokens(x + k, width, step * 32, n, (__m512i *)&right[((k / 32 * steps + step) * 2 + k / 16 % 2) * TILE]);
            const Tiling tiling(16);
            const int64_t panel = evenly(mine.to - mine.from, PANEL);
            for (int64_t block = mine.from; block < mine.to && !fault; block += panel)
                for (int64_t first = 0; first < steps; first += CHUNK / 32) {
                    const int64_t end = std::min(mine.to, block + panel), count = std::min(CHUNK / 32, steps - first);
                    for (int64_t step = 0; step < count; step++)
                        for (int64_t i = 0; i < 2 * (end - block); i++) {
                            __m512i pairs[16];
                            pair_tokens(grad + block * 32 + i * 16, outputs, (first + step) * 32, n, pairs);
                            transpose((const bf16 *)pairs, 32, (__m512i *)&left[(i / 2 * CHUNK / 16 + 2 * step + i % 2) * TILE]);
                        }
                    for (int64_t column = 0; column < columns; column++)
                        for (int64_t b = block; b < end; b++) {
                            float *const to = sums + b * 32 * width + column * 32;
                            const bf16 *of_left = &left[(b - block) * CHUNK / 16 * TILE];
                            const bf16 *of_right = &right[(column * steps + first) * 2 * TILE];
                            const int64_t stride = width * sizeof(float);
                            fetch_sums(b + 1 < end ? to + 32 * width : sums + block * 32 * width + (column + 1) * 32, width);
                            if (first || more) {
                                _tile_loadd(0, to, stride);
                                _tile_loadd(1, to + 16, stride);
                                _tile_loadd(2, to + 16 * width, stride);
                                _tile_loadd(3, to + 16 * width + 16, stride);
                            } else {
                                _tile_zero(0);
                                _tile_zero(1);
                                _tile_zero(2);
                                _tile_zero(3);
                            }
                            for (int64_t i = 0; i < count; i++, of_left += 2 * TILE, of_right += 2 * TILE) {
                                fetch_near(of_left, 0);
                                _tile_loadd(4, of_left, 64);
                                _tile_loadd(6, of_right, 64);
                                _tile_dpbf16ps(0, 4, 6);
                                fetch_near(of_left, 1);
                                _tile_loadd(7, of_right + TILE, 64);
                                _tile_dpbf16ps(1, 4, 7);
                                fetch_near(of_left, 2);
                                _tile_loadd(5, of_left + TILE, 64);
                                _tile_dpbf16ps(2, 5, 6);
                                fetch_near(of_left, 3);
                                _tile_dpbf16ps(3, 5, 7);
                            }
                            _tile_stored(0, to, stride);
                            _tile_stored(1, to + 16, stride);
                            _tile_stored(2, to + 16 * width, stride);
                            _tile_stored(3, to + 16 * width + 16, stride);
                        }
                }
        }
    } catch (const std::bad_alloc &) {
        return 1;
    }
    return fault;
}
