// Products of many rows and a matrix, by AMX, rounded to bf16 once. products.py calls this.
//
// Inputs are added up as sampling adds them up: one tile after the other from first to last. A panel of the matrix is laid out
// anew and stays in a thread's second cache while rows pass by, 32 at a time, whose own numbers stay in the first. Tiles multiply
// faster than memory can be read: what is needed next is fetched during each product.

#include <omp.h>

#include <limits>

#include "tiles.h"

constexpr int64_t ROWS = 32, SUMS = ROWS * 32, PANEL = 1 << 19;  // rows at once; their sums of a block; numbers of a panel
constexpr int64_t DEEPEST = 2048, DEPTH = 1536, GROUPS = 80;     // inputs at once at most, and where there are more; groups of rows

// The matrix on the right, [width, outputs]: as weights [outputs, width], or turned, as they are in the gradient of inputs.
struct Right {
    const bf16 *weight;
    int64_t width, outputs;
    bool turned;

    // Of some blocks of 32 outputs so many inputs from k on -> [blocks][inputs / 32][2] tiles.
    void lay(int64_t first, int64_t end, int64_t k, int64_t inputs, bf16 *to) const {
        if (!turned) {
            for (int64_t i = first * 32; i < end * 32; i += 32)
                for (int64_t at = k; at < k + inputs; at += 32, to += 2 * TILE) {
                    transpose(weight + i * width + at, width, (__m512i *)to);
                    transpose(weight + (i + 16) * width + at, width, (__m512i *)(to + TILE));
                }
            return;
        }
        for (int64_t at = 0; at < inputs; at += 2)  // as they stand in memory
            for (int64_t b = first; b < end; b++) {
                const bf16 *const from = weight + (k + at) * outputs + b * 32;
                bf16 *const pairs = to + ((b - first) * inputs + at / 32 * 32) * 32 + at % 32 * 16;
                _mm512_store_si512(pairs, paired(from, from + outputs));
                _mm512_store_si512(pairs + TILE, paired(from + 16, from + outputs + 16));
            }
    }
};

// What is fetched with each 32 inputs: some of the rows that are read next, and lines that sums are put in afterwards.
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

// sums [32, 32] of 32 rows, `apart` numbers apart, and 32 outputs, over so many inputs; or so much more. What is on the left is
// read again soon. What is on the right is not, and must not take its place in the cache.
static void product(const bf16 *x, int64_t apart, const bf16 *right, int64_t inputs, float *sums, bool more, Ahead ahead) {
    const int64_t stride = apart * sizeof(bf16);
    begin_sums(sums, 32, more);
    for (int64_t k = 0; k < inputs; k += 32, right += 2 * TILE) {
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
    end_sums(sums, 32);
}

// Puts `count` rows of 32 sums where they belong.
static void put(const float *sums, int64_t count, const bf16 *bias, bf16 *y, int64_t outputs) {
    for (int64_t i = 0; i < count; i++, sums += 32, y += outputs)
        _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(with_bias(sums + 16, bias, 16), with_bias(sums, bias, 0)));
}

// What a thread has room for: blocks of outputs and inputs of a panel, and groups of rows. Where there are more inputs than that,
// the sums of these groups are kept while the next inputs are laid out.
struct Room {
    bool deep;
    int64_t inputs, blocks, groups, panel, sums;

    Room(int64_t width, int64_t all)
        : deep(width > DEEPEST), inputs(deep ? DEPTH : width), blocks(std::max<int64_t>(1, PANEL / (inputs * 32))),
          groups(deep ? std::min(all, GROUPS) : all), panel(blocks * inputs * 32), sums((deep ? blocks * groups : 1) * SUMS) {}
};

// In how many parts a team shares out blocks of outputs, so that it reads least. What is left of the team shares out rows: a thread
// reads all weights of its blocks, and its rows once for each panel of them.
static int parts_of(int64_t blocks, int64_t n, const Room &room, int team) {
    int best = 1;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int parts = 1; parts <= std::min<int64_t>(team, blocks); parts++) {
        if (team % parts) continue;
        const int64_t mine = (blocks + parts - 1) / parts, panels = (mine + room.blocks - 1) / room.blocks;
        const int64_t read = team / parts * blocks * 32 + parts * panels * n;
        if (read >= least) continue;
        least = read;
        best = parts;
    }
    return best;
}

static void multiply(const bf16 *x, int64_t apart, int64_t n, const Right &right, const bf16 *bias, bf16 *y, int64_t threads) {
    const int64_t width = right.width, outputs = right.outputs, groups = (n + ROWS - 1) / ROWS;
    const Room room(width, groups);
    const Zeros<bf16> panels(new_lines<bf16>(threads * room.panel)), tails(new_lines<bf16>(threads * ROWS * room.inputs));
    const Zeros<float> all_sums(new_lines<float>(threads * room.sums));
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();  // it may be smaller than was asked for
        const int parts = parts_of(outputs / 32, n, room, team);
        const Share mine(outputs / 32, thread % parts, parts), rows(groups, thread / parts, team / parts);
        const Tiling tiling(16);
        bf16 *const panel = &panels[thread * room.panel], *const tail = &tails[thread * ROWS * room.inputs];
        // Adds so many inputs from k on to the sums of a group of rows and of blocks first .. end, which the panel holds.
        const auto add = [&](int64_t group, int64_t first, int64_t end, int64_t k, int64_t inputs, float *sums) {
            const int64_t row = group * ROWS, count = std::min(ROWS, n - row);
            const int64_t next = std::max<int64_t>(0, std::min(ROWS, n - row - ROWS));
            const bool whole = count == ROWS, last = k + inputs == width;
            const bf16 *const from = x + row * apart + k;
            for (int64_t i = 0; i < count && !whole; i++) std::copy_n(from + i * apart, inputs, tail + i * inputs);
            for (int64_t b = first; b < end; b++, sums += room.deep ? SUMS : 0) {
                bf16 *const to = y + row * outputs + b * 32;
                const Share fetched(next, b - first, end - first);
                const Ahead ahead{from + (ROWS + fetched.from) * apart, fetched.to - fetched.from, apart, to,
                                  whole && last ? (ROWS * 32 + inputs - 1) / inputs : 0, outputs};
                product(whole ? from : tail, whole ? apart : inputs, panel + (b - first) * inputs * 32, inputs, sums, k, ahead);
                if (last) put(sums, count, bias ? bias + b * 32 : nullptr, to, outputs);
            }
        };
        const int64_t some = evenly(mine.to - mine.from, room.blocks);
        for (int64_t first = mine.from; first < mine.to; first += some)
            for (int64_t start = rows.from; start < rows.to; start += room.groups)
                for (int64_t k = 0; k < width; k += room.inputs) {
                    const int64_t end = std::min(first + some, mine.to), inputs = std::min(room.inputs, width - k);
                    right.lay(first, end, k, inputs, panel);
                    for (int64_t i = 0; i < std::min(room.groups, rows.to - start); i++)
                        add(start + i, first, end, k, inputs, &all_sums[thread * room.sums + (room.deep ? i * room.blocks * SUMS : 0)]);
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
