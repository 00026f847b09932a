// The gradient of a weight with AMX: sums over tokens, without rounding. linear.py calls this.
//
// The tokens are the inputs of these products, CHUNK of them at a time. They are packed so that the left is read from the L2 cache
// of a thread, and the right from L1. Sums stay in the cache, block by block, until all tokens are added, and are then written to
// memory past the caches.

#include <omp.h>

#include "tiles.h"

constexpr int64_t CHUNK = 512, PANEL = 24;          // tokens; blocks of 32 outputs, and of 32 columns, at once
constexpr int64_t STEP = 2 * TILE, SUMS = 32 * 32;  // elements of a block: of 32 tokens, and of sums

// Tokens from t on with 32 elements each, in pairs of tokens, padded with 0 after the last of `n`: twice [16][16][2].
static void pair_tokens(const bf16 *x, int64_t width, int64_t t, int64_t n, __m512i *to) {
    const __m512i nothing = _mm512_setzero_si512();
    for (int64_t i = 0; i < 16; i++, t += 2) {
        const bool two = t + 1 < n;
        const bf16 *const from = x + t * width;
        to[i] = t < n ? paired(from, two ? from + width : nullptr) : nothing;
        to[16 + i] = t < n ? paired(from + 16, two ? from + width + 16 : nullptr) : nothing;
    }
}

// Some of the blocks of a matrix [n, width], over so many steps of 32 tokens, from token t on: [blocks][steps][2] tiles.
struct Some {
    const bf16 *x;
    int64_t width, blocks, t, steps, n;

    // As the left factor.
    void lay_left(bf16 *to) const {
        __m512i pairs[32];
        each([&](const bf16 *from, int64_t t, int64_t at) {
            pair_tokens(from, width, t, n, pairs);
            transpose((const bf16 *)pairs, 32, (__m512i *)(to + at));
            transpose((const bf16 *)(pairs + 16), 32, (__m512i *)(to + at + TILE));
        });
    }

    // As the right factor.
    void lay_right(bf16 *to) const {
        each([&](const bf16 *from, int64_t t, int64_t at) { pair_tokens(from, width, t, n, (__m512i *)(to + at)); });
    }

    template <class Lay> void each(Lay lay) const {  // in the order of memory, token by token
        for (int64_t step = 0; step < steps; step++)
            for (int64_t i = 0; i < blocks; i++) lay(x + i * 32, t + step * 32, (i * steps + step) * STEP);
    }
};

// sums [32, 32] of products of two rows of tiles over so many steps, plus those in `before`, with a row stride of `apart`, if given.
// The left must not evict the right from the L1 cache.
static void add_block(const bf16 *left, const bf16 *right, int64_t steps, const float *before, int64_t apart, float *sums) {
    if (before) {
        const int64_t stride = apart * sizeof(float);
        _tile_loadd(0, before, stride);
        _tile_loadd(1, before + 16, stride);
        _tile_loadd(2, before + 16 * apart, stride);
        _tile_loadd(3, before + 16 * apart + 16, stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < steps; i++, left += STEP, right += STEP) {
        _tile_stream_loadd(4, left, 64);
        _tile_loadd(6, right, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stream_loadd(5, left + TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
}

// Writes sums [32, 32] to rows of `width`, past the caches if they are full cache lines.
static void put(const float *sums, float *to, int64_t width) {
    const bool lines = (uintptr_t)to % 64 == 0;
    for (int64_t row = 0; row < 32; row++, to += width)
        for (int64_t i = 0; i < 32; i += 16) {
            const __m512 some = _mm512_load_ps(sums + row * 32 + i);
            if (lines)
                _mm512_stream_ps(to + i, some);
            else
                _mm512_storeu_ps(to + i, some);
        }
}

static void sum(const bf16 *grad, const bf16 *x, int64_t n, int64_t outputs, int64_t width, float *sums, bool more, int64_t threads) {
    const int64_t steps = std::max<int64_t>(1, (n + 31) / 32);  // without tokens, sums of 0 are written
    const int64_t columns = width / 32, group = evenly(columns, PANEL), most = std::min(steps, CHUNK / 32);
    const int64_t of_left = PANEL * most * STEP, room = of_left + group * most * STEP, of_sums = PANEL * group * SUMS;
    const Zeros<bf16> laid(new_lines<bf16>(threads * room));
    const Zeros<float> kept(new_lines<float>(threads * of_sums));
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        const Share mine(outputs / 32, thread, team);
        const int64_t panel = evenly(std::max<int64_t>(1, mine.to - mine.from), PANEL);  // there may be fewer blocks than threads
        bf16 *const left = &laid[thread * room], *const right = left + of_left;
        float *const own = &kept[thread * of_sums];
        const Tiling tiling(16);
        for (int64_t block = mine.from; block < mine.to; block += panel)
            for (int64_t begin = 0; begin < columns; begin += group)
                for (int64_t first = 0; first < steps; first += most) {
                    const int64_t blocks = std::min(panel, mine.to - block), wide = std::min(group, columns - begin);
                    const int64_t count = std::min(most, steps - first);
                    Some{grad + block * 32, outputs, blocks, first * 32, count, n}.lay_left(left);
                    Some{x + begin * 32, width, wide, first * 32, count, n}.lay_right(right);
                    for (int64_t column = 0; column < wide; column++)
                        for (int64_t b = 0; b < blocks; b++) {
                            float *const near = own + (column * blocks + b) * SUMS;
                            float *const to = sums + (block + b) * 32 * width + (begin + column) * 32;
                            const float *const before = first ? near : more ? to : nullptr;
                            add_block(left + b * count * STEP, right + column * count * STEP, count, before, first ? 32 : width, near);
                            if (first + count == steps) put(near, to, width);
                        }
                }
        _mm_sfence();  // makes streaming stores visible to all threads
    }
}

// sums [N, K] = grad [n, N]' x [n, K], or added to sums. Returns 1 if there is not enough memory, else 0.
extern "C" int sum_over_tokens(const bf16 *grad, const bf16 *x, int64_t n, int64_t outputs, int64_t width, float *sums, int64_t more,
                               int64_t threads) {
    try {
        sum(grad, x, n, outputs, width, sums, more, threads);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}
