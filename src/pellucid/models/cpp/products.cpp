// Products of many rows and a matrix, by AMX, rounded to bf16 once. products.py calls this.
//
// Inputs are added up as sampling adds them up: one tile after the other from first to last. A panel of the matrix is laid out
// anew and stays in a thread's second cache while rows pass by, 32 at a time, whose own numbers stay in the first.

#include <omp.h>

#include "tiles.h"

constexpr int64_t ROWS = 32, PANEL = 1 << 19, FEW = 6;  // rows at once; numbers of a panel; blocks

// The matrix on the right, [width, outputs]: as weights [outputs, width], or turned, as they are in the gradient of inputs.
struct Right {
    const bf16 *weight;
    int64_t width, outputs;
    bool turned;

    // 32 outputs from `first` on -> [width / 32][2] tiles.
    void lay(int64_t first, bf16 *to) const {
        for (int64_t k = 0; k < width; k += 32)
            for (int64_t half = 0; half < 32; half += 16, to += TILE) {
                auto *const pairs = (__m512i *)to;
                if (!turned) {
                    transpose(weight + (first + half) * width + k, width, pairs);
                    continue;
                }
                const bf16 *const from = weight + k * outputs + first + half;
                for (int64_t i = 0; i < 16; i++) pairs[i] = paired(from + 2 * i * outputs, from + (2 * i + 1) * outputs);
            }
    }
};

// sums [32, 32] of 32 rows, `apart` numbers apart, and 32 outputs.
static void product(const bf16 *x, int64_t apart, int64_t width, const bf16 *right, float *sums) {
    const int64_t stride = apart * sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < width; k += 32, right += 2 * TILE) {
        fetch_near(right, 0);
        _tile_loadd(4, x + k, stride);
        _tile_loadd(6, right, 64);
        _tile_dpbf16ps(0, 4, 6);
        fetch_near(right, 1);
        _tile_loadd(7, right + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        fetch_near(right, 2);
        _tile_loadd(5, x + 16 * apart + k, stride);
        _tile_dpbf16ps(2, 5, 6);
        fetch_near(right, 3);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
}

// In how many parts a team shares out so many blocks: as many as divide it and leave FEW blocks to each, or one. What is left of
// the team shares out rows.
static int parts_of(int64_t blocks, int team) {
    int parts = team;
    while (parts > 1 && (team % parts || blocks < FEW * parts)) parts--;
    return parts;
}

static void multiply(const bf16 *x, int64_t apart, int64_t n, const Right &right, const bf16 *bias, bf16 *y, int64_t threads) {
    const int64_t width = right.width, blocks = right.outputs / 32, groups = (n + ROWS - 1) / ROWS, size = width * 32;
    const int64_t most = std::max<int64_t>(1, PANEL / size), beyond = 4 * TILE;  // which is fetched
    const bool together = parts_of(blocks, threads) < threads;  // several read the same blocks
    const Zeros<bf16> laid(new_lines<bf16>(together ? blocks * size + beyond : threads * (most * size + beyond)));
    const Zeros<bf16> tail(zeros<bf16>(ROWS * width));
    for (int64_t row = groups * ROWS - ROWS; row < n; row++) std::copy_n(x + row * apart, width, &tail[row % ROWS * width]);
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float sums[ROWS * 32];
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();  // it may be smaller than was asked for
        const int parts = together ? parts_of(blocks, team) : team;
        const Share mine(blocks, thread % parts, parts), rows(groups, thread / parts, team / parts);
        const Tiling tiling(16);
        if (together) {
#pragma omp for
            for (int64_t b = 0; b < blocks; b++) right.lay(b * 32, &laid[b * size]);
        }
        for (int64_t first = mine.from, end; first < mine.to; first = end) {
            end = std::min(first + evenly(mine.to - mine.from, most), mine.to);
            bf16 *const panel = &laid[together ? first * size : thread * (most * size + beyond)];
            for (int64_t b = first; b < end && !together; b++) right.lay(b * 32, panel + (b - first) * size);
            for (int64_t group = rows.from; group < rows.to; group++)
                for (int64_t b = first; b < end; b++) {
                    const int64_t row = group * ROWS, count = std::min(ROWS, n - row);
                    const bool whole = count == ROWS;
                    product(whole ? x + row * apart : tail.get(), whole ? apart : width, width, panel + (b - first) * size, sums);
                    for (int64_t i = 0; i < count; i++)
                        for (int64_t at = b * 32; at < b * 32 + 32; at += 16)
                            store(y + (row + i) * right.outputs + at, with_bias(sums + i * 32 + at % 32, bias, at));
                }
        }
    }
}

// y [n, outputs] = x [n, width], rows `apart` numbers apart, times weight [outputs, width]; or turned, [width, outputs]. Both are
// multiples of 32. Returns 1 where there is no memory, else 0.
extern "C" int multiply_rows(const bf16 *x, int64_t apart, int64_t n, int64_t width, const bf16 *weight, int64_t outputs,
                             const bf16 *bias, int64_t turned, bf16 *y, int64_t threads) {
    try {
        multiply(x, apart, n, {weight, width, outputs, turned != 0}, bias, y, threads);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}
