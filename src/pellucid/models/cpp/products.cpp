// Products of many rows and a matrix with AMX, rounded to bf16 once. linear.py calls this.
//
// Inputs are summed in the order of sampling, tile after tile from first to last. A panel of the matrix is packed and stays in
// the L2 cache of a thread while it multiplies rows, 32 at a time, which stay in L1. Tiles multiply faster than memory can be
// read, so each product prefetches what is needed next.

#include <omp.h>

#include <limits>

#include "tiles.h"

constexpr int64_t ROWS = 32, PANEL = 1 << 19;  // rows at once; elements of a panel

// The right matrix [width, outputs]: weights [outputs, width] or, for the gradient of inputs, their transpose.
struct Right {
    const bf16 *weight;
    int64_t width, outputs;
    bool turned;

    // Blocks of 32 outputs -> [blocks][width / 32][2] tiles.
    void lay(int64_t first, int64_t end, bf16 *to) const {
        if (!turned) {
            for (int64_t i = first * 32; i < end * 32; i += 32)
                for (int64_t k = 0; k < width; k += 32, to += 2 * TILE) {
                    transpose(weight + i * width + k, width, (__m512i *)to);
                    transpose(weight + (i + 16) * width + k, width, (__m512i *)(to + TILE));
                }
            return;
        }
        for (int64_t k = 0; k < width; k += 2)  // in the order of memory
            for (int64_t b = first; b < end; b++) {
                const bf16 *const from = weight + k * outputs + b * 32;
                bf16 *const pairs = to + ((b - first) * width + k / 32 * 32) * 32 + k % 32 * 16;
                _mm512_store_si512(pairs, paired(from, from + outputs));
                _mm512_store_si512(pairs + TILE, paired(from + 16, from + outputs + 16));
            }
    }
};

// Rows [n, width], with a stride of `apart` elements, and the matrix that they are multiplied by.
struct Pair {
    const bf16 *x;
    int64_t apart;
    Right right;
};

// What is prefetched with each 32 inputs: parts of the next rows, and the cache lines to which sums will be written.
struct Ahead {
    const bf16 *x;
    int64_t rows, apart;
    bf16 *y;
    int64_t lines, outputs;

    void fetch(int64_t k) {
        for (int64_t i = 0; i < lines; i++, y += outputs) __builtin_prefetch(y, 1);
        for (int64_t i = 0; i < rows; i++) _mm_prefetch((const char *)(x + i * apart + k), _MM_HINT_T1);
    }
};

// Adds products of 32 rows with a stride of `apart` elements, and 32 outputs, to the four sums. The left is read again soon. The
// right is not, and must not evict it from the cache.
static void add_products(const bf16 *x, int64_t apart, const bf16 *right, int64_t width, Ahead ahead) {
    const int64_t stride = apart * sizeof(bf16);
    for (int64_t k = 0; k < width; k += 32, right += 2 * TILE) {
        ahead.fetch(k);
        _tile_loadd(4, x + k, stride);
        _tile_stream_loadd(6, right, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, right + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + 16 * apart + k, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

static void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

static void store_sums(float *sums) {  // [32, 32]
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
}

// Writes 32 sums of each of `count` rows, rounded.
static void put(const float *sums, int64_t count, const bf16 *bias, bf16 *y, int64_t outputs) {
    for (int64_t i = 0; i < count; i++, sums += 32, y += outputs)
        _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(with_bias(sums + 16, bias, 16), with_bias(sums, bias, 0)));
}

// Into how many parts a team divides the blocks of outputs, so that it reads the least memory; threads of a part divide the rows.
// A thread reads all weights of its blocks, and its rows once for each panel.
static int parts_of(int64_t blocks, int64_t n, int64_t most, int team) {
    int best = 1;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int parts = 1; parts <= std::min<int64_t>(team, blocks); parts++) {
        if (team % parts) continue;
        const int64_t mine = (blocks + parts - 1) / parts, panels = (mine + most - 1) / most;
        const int64_t read = team / parts * blocks * 32 + parts * panels * n;
        if (read >= least) continue;
        least = read;
        best = parts;
    }
    return best;
}

// The last rows, fewer than ROWS, padded with 0.
static Zeros<bf16> tail_of(const Pair &pair, int64_t n) {
    const int64_t width = pair.right.width;
    Zeros<bf16> tail(zeros<bf16>(ROWS * width));
    for (int64_t row = (n - 1) / ROWS * ROWS; row < n; row++) std::copy_n(pair.x + row * pair.apart, width, &tail[row % ROWS * width]);
    return tail;
}

// y = the product of the first pair plus that of the second, whose width may be 0.
static void multiply(const Pair &first_pair, const Pair &second_pair, int64_t n, const bf16 *bias, bf16 *y, int64_t threads) {
    const bf16 *const x = first_pair.x, *const more = second_pair.x;
    const int64_t apart = first_pair.apart, width = first_pair.right.width, more_width = second_pair.right.width;
    const int64_t outputs = first_pair.right.outputs, groups = (n + ROWS - 1) / ROWS, block_size = (width + more_width) * 32;
    const int64_t most = std::max<int64_t>(1, PANEL / block_size), lines = (ROWS * 32 + width - 1) / width;
    const Zeros<bf16> panels(new_lines<bf16>(threads * most * block_size));
    const Zeros<bf16> tail(tail_of(first_pair, n)), more_tail(tail_of(second_pair, n));
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float sums[ROWS * 32];
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();  // it may be smaller than requested
        const int parts = parts_of(outputs / 32, n, most, team);
        const Share mine(outputs / 32, thread % parts, parts), rows(groups, thread / parts, team / parts);
        const Tiling tiling(16);
        bf16 *const panel = &panels[thread * most * block_size], *const more_panel = panel + most * width * 32;
        for (int64_t first = mine.from, end; first < mine.to; first = end) {
            end = std::min(first + evenly(mine.to - mine.from, most), mine.to);
            first_pair.right.lay(first, end, panel);
            second_pair.right.lay(first, end, more_panel);
            for (int64_t group = rows.from; group < rows.to; group++) {
                const int64_t row = group * ROWS, count = std::min(ROWS, n - row);
                const bool whole = count == ROWS;
                const bf16 *const from = whole ? x + row * apart : tail.get();
                const bf16 *const more_from = whole ? more + row * more_width : more_tail.get();
                const int64_t next = std::clamp<int64_t>(n - row - ROWS, 0, ROWS), stride = whole ? apart : width;
                for (int64_t b = first; b < end; b++) {
                    bf16 *const to = y + row * outputs + b * 32;
                    const Share some(next, b - first, end - first);
                    const bf16 *const further = x + (row + ROWS + some.from) * apart;
                    const Ahead ahead{further, some.to - some.from, apart, to, whole ? lines : 0, outputs};
                    zero_sums();
                    add_products(from, stride, panel + (b - first) * width * 32, width, ahead);
                    add_products(more_from, more_width, more_panel + (b - first) * more_width * 32, more_width, {});
                    store_sums(sums);
                    put(sums, count, bias ? bias + b * 32 : nullptr, to, outputs);
                }
            }
        }
    }
}

// y [n, outputs] = x [n, width], with a row stride of `apart` elements, times weight [outputs, width] or, turned, [width, outputs],
// plus more [n, more_width] times more_weight of the same layout. All sizes are multiples of 32. Returns 1 if there is not enough
// memory, else 0.
extern "C" int multiply_rows(const bf16 *x, int64_t apart, int64_t n, int64_t width, const bf16 *weight, const bf16 *more,
                             int64_t more_width, const bf16 *more_weight, int64_t outputs, const bf16 *bias, int64_t turned, bf16 *y,
                             int64_t threads) {
    try {
        const Pair first{x, apart, {weight, width, outputs, turned != 0}};
        const Pair second{more, more_width, {more_weight, more_width, outputs, turned != 0}};
        multiply(first, second, n, bias, y, threads);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}
