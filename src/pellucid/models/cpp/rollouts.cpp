// Attention of whole rollouts and its gradient, by AMX, one pass over memory each: what models/packed.py computes row by row
// with operators of torch. models/tiled.py calls these.
//
// Tokens stand in line, those of each sequence together: first the prompts, then rows, each of which reads its prompt, too.
// Forward is what sampling computes, to the bit. Backward a task is a prompt with all of its rows, by one key head: then
// no two threads add to the same key, and gradients depend on no number of threads.

#include <omp.h>

#include "attention.h"

struct Line {
    int64_t prompts, rows, heads, key_heads, size, window;  // window 0: all tokens are read
    const int64_t *ends;       // [prompts + rows] the token behind each sequence
    const int64_t *prompt_of;  // [rows]
    int64_t start(int64_t sequence) const { return sequence ? ends[sequence - 1] : 0; }
    int64_t length(int64_t sequence) const { return ends[sequence] - start(sequence); }
    int64_t longest(int64_t from, int64_t to) const {
        int64_t most = 0;
        for (int64_t i = from; i < to; i++) most = std::max(most, length(i));
        return most;
    }
};

struct Projected {  // queries [n, H, d], keys and values [n, K, d], and how far their tokens are apart
    bf16 *query, *key, *value;
    int64_t query_apart, key_apart, value_apart;
};

struct Written {  // rows [n, width] in place of tiles
    using Words = Tiles;
    bf16 *to;
    int64_t width;
    void put(int64_t row, int64_t k, __m512 x) const { store(to + row * width + k, x); }
    void quantise(int64_t) const {}
};

// ---------------------------------------------------------------- forward

// Keys or values of the sequences from .. to, [K, sequences, room, d], 0 behind them.
static Zeros<bf16> cached(const Line &line, const bf16 *x, int64_t apart, int64_t from, int64_t to, int64_t room) {
    Zeros<bf16> cache = zeros<bf16>(line.key_heads * (to - from) * room * line.size);
    for (int64_t k = 0; k < line.key_heads; k++)
        for (int64_t i = from; i < to; i++)
            for (int64_t token = line.start(i); token < line.ends[i]; token++)
                std::memcpy(&cache[((k * (to - from) + i - from) * room + token - line.start(i)) * line.size],
                            x + token * apart + k * line.size, line.size * sizeof(bf16));
    return cache;
}

// The sequences from .. to as rows of a batch that is sampled: where their tokens stand, and on which prompts.
struct Seats {
    std::vector<int64_t> row_of, places;
    Tokens tokens = {};

    Seats(const Line &line, int64_t from, int64_t to, int64_t room) {
        for (int64_t i = from; i < to; i++)
            for (int64_t place = 0; place < line.length(i); place++) {
                row_of.push_back(i - from);
                places.push_back(place);
            }
        tokens.n = row_of.size();
        tokens.rows = to - from;
        tokens.room = room;
        tokens.row_of = row_of.data();
        tokens.places = places.data();
    }
};

static void read_all(const Model &m, const Layer &layer, const Tokens &tokens, const bf16 *queries, bf16 *out, int64_t threads) {
    const int64_t width = m.heads * m.size, stride = tokens.prompt_room + tokens.room;
    const std::vector<Run> runs = runs_of(tokens, std::max<int64_t>(1, Tiles::QUERIES / (m.heads / m.key_heads)));
    const std::unique_ptr<float[]> scores(new float[threads * Tiles::QUERIES * stride]);
    const int64_t count = runs.size();
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        const Tiling tiling(Tiles::ROWS);
        for (int64_t i = thread; i < count; i += team)
            attend(m, layer, tokens, runs[i], i + team < count ? &runs[i + team] : nullptr, queries, width,
                   &scores[thread * Tiles::QUERIES * stride], stride, Written{out, width});
    }
}

// -> out [n, H d]. Returns 1 where there is no memory, else 0.
extern "C" int attention_forward(const Line *of, const Projected *heads, bf16 *out, int64_t threads) try {
    const Line &line = *of;
    const int64_t all = line.prompts + line.rows, n = line.ends[all - 1], width = line.heads * line.size;
    const int64_t read = line.ends[line.prompts - 1], size = to_sixteen(line.longest(0, line.prompts));
    const int64_t room = to_sixteen(line.longest(line.prompts, all)), none = 0;
    const Model m = {1, width, line.heads, line.key_heads, line.size, 0, 0, 0};
    const std::unique_ptr<bf16[]> queries(new bf16[n * width]);
    const __m512 scale = _mm512_set1_ps(float(1 / std::sqrt(double(line.size))));
#pragma omp parallel for num_threads(threads)
    for (int64_t token = 0; token < n; token++)
        for (int64_t i = 0; i < width; i += 16)
            store(&queries[token * width + i], _mm512_mul_ps(wide(heads->query + token * heads->query_apart + i), scale));
    const Zeros<bf16> keys = cached(line, heads->key, heads->key_apart, 0, line.prompts, size);
    const Zeros<bf16> values = cached(line, heads->value, heads->value_apart, 0, line.prompts, size);
    const Zeros<bf16> own_keys = cached(line, heads->key, heads->key_apart, line.prompts, all, room);
    const Zeros<bf16> own_values = cached(line, heads->value, heads->value_apart, line.prompts, all, room);
    Layer layer = {};
    layer.window = line.window;

    const std::vector<int64_t> on_none(line.prompts, 0);  // prompts stand on one prompt, without a token
    Seats of_prompts(line, 0, line.prompts, size);
    of_prompts.tokens.prompt_of = on_none.data();
    of_prompts.tokens.prompt_lengths = &none;
    layer.keys = keys.get();
    layer.values = values.get();
    read_all(m, layer, of_prompts.tokens, queries.get(), out, threads);

    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < line.prompts; i++) lengths.push_back(line.length(i));
    Seats of_rows(line, line.prompts, all, room);
    of_rows.tokens.prompts = line.prompts;
    of_rows.tokens.prompt_room = size;
    of_rows.tokens.prompt_of = line.prompt_of;
    of_rows.tokens.prompt_lengths = lengths.data();
    layer.prompt_keys = keys.get();
    layer.prompt_values = values.get();
    layer.keys = own_keys.get();
    layer.values = own_values.get();
    read_all(m, layer, of_rows.tokens, &queries[read * width], out + read * width, threads);
    return 0;
} catch (const std::bad_alloc &) {
    return 1;
}

// ---------------------------------------------------------------- backward

constexpr int64_t MANY = 32;  // queries at a time: two tiles

// What a key head holds of a prompt and of one of its rows behind it, each padded to tiles: keys, values, and their gradients.
struct Held {
    int64_t d, room;
    Zeros<bf16> keys, values;  // [room, d]
    Zeros<bf16> pairs;         // [room / 2][d][2] of keys
    Zeros<float> of_keys, of_values;

    Held(int64_t room, int64_t d)
        : d(d), room(room), keys(zeros<bf16>(room * d)), values(zeros<bf16>(room * d)), pairs(zeros<bf16>(room * d)),
          of_keys(zeros<float>(room * d)), of_values(zeros<float>(room * d)) {}

    // Takes `count` tokens in at a place, of which there are no gradients yet; what stands behind them is 0.
    void take(const Projected &from, int64_t token, int64_t k, int64_t count, int64_t at) {
        const int64_t left = room - at;
        std::memset(&keys[at * d], 0, left * d * sizeof(bf16));
        std::memset(&values[at * d], 0, left * d * sizeof(bf16));
        std::memset(&of_keys[at * d], 0, left * d * sizeof(float));
        std::memset(&of_values[at * d], 0, left * d * sizeof(float));
        for (int64_t i = 0; i < count; i++) {
            std::memcpy(&keys[(at + i) * d], from.key + (token + i) * from.key_apart + k * d, d * sizeof(bf16));
            std::memcpy(&values[(at + i) * d], from.value + (token + i) * from.value_apart + k * d, d * sizeof(bf16));
        }
        pair_rows(&keys[at * d], left, d, &pairs[at * d]);
    }

    void give(const Projected &to, int64_t token, int64_t k, int64_t count, int64_t at) const {
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < d; j += 16) {
                store(to.key + (token + i) * to.key_apart + k * d + j, _mm512_load_ps(&of_keys[(at + i) * d + j]));
                store(to.value + (token + i) * to.value_apart + k * d + j, _mm512_load_ps(&of_values[(at + i) * d + j]));
            }
    }

    // [rows, d] -> [rows / 2][d][2]
    static void pair_rows(const bf16 *x, int64_t rows, int64_t d, bf16 *to) {
        for (int64_t i = 0; i < rows; i += 2)
            for (int64_t j = 0; j < d; j += 16)
                _mm512_store_si512(to + i * d + 2 * j, paired(x + i * d + j, x + (i + 1) * d + j));
    }
};

// A sequence whose gradient is taken: so many keys of its prompt stand before its own, which begin at a multiple of 16.
struct Sequence {
    int64_t token, length, before, own;
};

// Queries [MANY, d] and the gradients of what they read, laid out for products; rows beyond `count` are 0.
struct Asking {
    alignas(64) bf16 queries[MANY * LARGEST], grads[MANY * LARGEST];
    alignas(64) bf16 query_pairs[MANY * LARGEST], grad_pairs[MANY * LARGEST];  // [MANY / 2][d][2]
    alignas(64) bf16 turned_queries[MANY * LARGEST], turned_grads[MANY * LARGEST];  // two of [d / 2][16][2]
    __m512i positions[2];                                                     // of each query
    int64_t count;

    void lay_out(int64_t d) {
        Held::pair_rows(queries, MANY, d, query_pairs);
        Held::pair_rows(grads, MANY, d, grad_pairs);
        for (int64_t half = 0; half < 2; half++) {
            lay(By<Tiles>(), queries + half * 16 * d, d, turned_queries + half * 16 * d);
            lay(By<Tiles>(), grads + half * 16 * d, d, turned_grads + half * 16 * d);
        }
    }
};

struct Scratch {  // [room]: scores and the gradient of probabilities of 16 queries; probabilities and gradients of scores of 32
    Zeros<float> scores, slopes;
    Zeros<bf16> probs, of_scores;
    explicit Scratch(int64_t room)
        : scores(zeros<float>(room * 16)), slopes(zeros<float>(room * 16)), probs(zeros<bf16>(room * MANY)),
          of_scores(zeros<bf16>(room * MANY)) {}
};

// Scores and the gradient of probabilities, [keys from .. to, 16 queries].
static void multiply_keys(const Held &held, const bf16 *queries, const bf16 *grads, int64_t from, int64_t to, const Scratch &scratch) {
    const int64_t d = held.d;
    for (int64_t t = from; t < to; t += 32) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < d; i += 32) {
            _tile_loadd(6, queries + i * 16, 64);
            _tile_loadd(4, &held.keys[t * d + i], d * sizeof(bf16));
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, &held.keys[(t + 16) * d + i], d * sizeof(bf16));
            _tile_dpbf16ps(1, 5, 6);
            _tile_loadd(7, grads + i * 16, 64);
            _tile_loadd(4, &held.values[t * d + i], d * sizeof(bf16));
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, &held.values[(t + 16) * d + i], d * sizeof(bf16));
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, &scratch.scores[t * 16], 64);
        _tile_stored(1, &scratch.scores[(t + 16) * 16], 64);
        _tile_stored(2, &scratch.slopes[t * 16], 64);
        _tile_stored(3, &scratch.slopes[(t + 16) * 16], 64);
    }
}

// e^x of x <= 0, to seven digits, and 0 from e^-100 on.
static inline __m512 exp_below(__m512 x) {
    const __m512 twos = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_fnmadd_ps(twos, _mm512_set1_ps(-2.12194440e-4f), _mm512_fnmadd_ps(twos, _mm512_set1_ps(0.693359375f), x));
    __m512 sum = _mm512_set1_ps(1 / 720.0f);
    for (const float term : {1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 1 / 2.0f, 1.0f, 1.0f}) sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(term));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-100), _CMP_GT_OQ), sum, twos);
}

// With p the softmax of scores, by which queries read the keys that they see, and g the gradient of p: that of the scores,
// p (g - sum p g), by the scale. Both stand in one half of `scratch`'s, and the latter unrounded in place of g, too.
static void soften(const Sequence &of, __m512i positions, int64_t window, float scale, int64_t from, int64_t to, int64_t half,
                   const Scratch &scratch) {
    const __m512i behind = window ? _mm512_sub_epi32(positions, _mm512_set1_epi32(window)) : _mm512_set1_epi32(-1);
    const __m512 by = _mm512_set1_ps(scale);
    __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps(), mean = _mm512_setzero_ps();
    for (int64_t t = from; t < to; t++) {
        float *const score = &scratch.scores[t * 16];
        const bool is_own = t >= of.own;
        const __m512i position = _mm512_set1_epi32(is_own ? of.before + t - of.own : t);
        const __mmask16 seen = is_own || t < of.before ? _mm512_cmple_epi32_mask(position, positions) & _mm512_cmpgt_epi32_mask(position, behind) : 0;
        const __m512 z = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), _mm512_mul_ps(_mm512_load_ps(score), by));
        most = _mm512_max_ps(most, z);
        _mm512_store_ps(score, z);
    }
    for (int64_t t = from; t < to; t++) {
        float *const score = &scratch.scores[t * 16];
        const __m512 mass = exp_below(_mm512_sub_ps(_mm512_load_ps(score), most));
        total = _mm512_add_ps(total, mass);
        mean = _mm512_fmadd_ps(mass, _mm512_load_ps(&scratch.slopes[t * 16]), mean);
        _mm512_store_ps(score, mass);
    }
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1), total);
    mean = _mm512_mul_ps(mean, inverse);
    for (int64_t t = from; t < to; t++) {
        float *const slope = &scratch.slopes[t * 16];
        const __m512 prob = _mm512_mul_ps(_mm512_load_ps(&scratch.scores[t * 16]), inverse);
        const __m512 of_score = _mm512_mul_ps(_mm512_mul_ps(prob, _mm512_sub_ps(_mm512_load_ps(slope), mean)), by);
        _mm512_store_ps(slope, of_score);
        store(&scratch.probs[t * MANY + half * 16], prob);
        store(&scratch.of_scores[t * MANY + half * 16], of_score);
    }
}

// The gradients [16, d] of queries: those of scores, keys from .. to, times keys.
static void of_queries(const Held &held, int64_t from, int64_t to, const Scratch &scratch, float *out) {
    alignas(64) bf16 left[16][32];
    __m512i by_query[16];
    const int64_t d = held.d;
    for (int64_t i = 0; i < d; i += 64) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t t = from; t < to; t += 32) {
            for (int half = 0; half < 2; half++) {
                transpose((const bf16 *)&scratch.slopes[(t + half * 16) * 16], 32, by_query);
                for (int q = 0; q < 16; q++) store(left[q] + half * 16, _mm512_castsi512_ps(by_query[q]));
            }
            const bf16 *const right = &held.pairs[t * d + 2 * i];
            const int64_t stride = 2 * d * sizeof(bf16);
            _tile_loadd(4, left, 64);
            _tile_loadd(6, right, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, right + 32, stride);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, right + 64, stride);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, right + 96, stride);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, out + i, d * sizeof(float));
        _tile_stored(1, out + i + 16, d * sizeof(float));
        _tile_stored(2, out + i + 32, d * sizeof(float));
        _tile_stored(3, out + i + 48, d * sizeof(float));
    }
}

// sums [keys from .. to, d] += left [keys, MANY] times right, pairs of [MANY, d].
static void add_products(const bf16 *left, const bf16 *right, int64_t from, int64_t to, int64_t d, float *sums) {
    const int64_t stride = d * sizeof(float), apart = 2 * d * sizeof(bf16);
    for (int64_t t = from; t < to; t += 16)
        for (int64_t i = 0; i < d; i += 64) {
            float *const at = sums + t * d + i;
            _tile_loadd(4, left + t * MANY, MANY * sizeof(bf16));
            _tile_loadd(0, at, stride);
            _tile_loadd(6, right + 2 * i, apart);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(1, at + 16, stride);
            _tile_loadd(7, right + 2 * i + 32, apart);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(2, at + 32, stride);
            _tile_loadd(6, right + 2 * i + 64, apart);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(3, at + 48, stride);
            _tile_loadd(7, right + 2 * i + 96, apart);
            _tile_dpbf16ps(3, 4, 7);
            _tile_stored(0, at, stride);
            _tile_stored(1, at + 16, stride);
            _tile_stored(2, at + 32, stride);
            _tile_stored(3, at + 48, stride);
        }
}

static int64_t to_32(int64_t count) { return (count + 31) / 32 * 32; }

// The gradient of a sequence through one key head, whose keys and values are held.
static void go_back(const Line &line, const Sequence &of, int64_t k, const Projected &heads, const bf16 *grad, const Projected &gradient,
                    const Held &held, const Scratch &scratch, Asking &asking) {
    const int64_t d = line.size, shared = line.heads / line.key_heads, all = of.length * shared;
    const float scale = 1 / std::sqrt(double(d));
    alignas(64) float out[16 * LARGEST];
    for (int64_t first = 0; first < all; first += MANY) {
        alignas(64) int32_t positions[MANY];
        const int64_t count = std::min(MANY, all - first), last = (first + count - 1) / shared;
        std::memset(asking.queries + count * d, 0, (MANY - count) * d * sizeof(bf16));
        std::memset(asking.grads + count * d, 0, (MANY - count) * d * sizeof(bf16));
        for (int64_t q = 0; q < MANY; q++) {
            const int64_t place = std::min(last, (first + q) / shared), h = k * shared + (first + q) % shared, token = of.token + place;
            positions[q] = of.before + place;
            if (q >= count) continue;
            std::memcpy(asking.queries + q * d, heads.query + token * heads.query_apart + h * d, d * sizeof(bf16));
            std::memcpy(asking.grads + q * d, grad + (token * line.heads + h) * d, d * sizeof(bf16));
        }
        asking.lay_out(d);
        const int64_t seen = line.window ? std::max<int64_t>(0, positions[0] + 1 - line.window) : 0;
        const int64_t from = (seen < of.before ? seen : of.own + seen - of.before) / 32 * 32, to = to_32(of.own + last + 1);
        for (int64_t half = 0; half < 2; half++) {
            multiply_keys(held, asking.turned_queries + half * 16 * d, asking.turned_grads + half * 16 * d, from, to, scratch);
            soften(of, _mm512_load_si512(positions + half * 16), line.window, scale, from, to, half, scratch);
            of_queries(held, from, to, scratch, out);
            for (int64_t q = 0; q < std::min<int64_t>(16, count - half * 16); q++) {
                const int64_t index = first + half * 16 + q, h = k * shared + index % shared;
                bf16 *const at = gradient.query + (of.token + index / shared) * gradient.query_apart + h * d;
                for (int64_t i = 0; i < d; i += 16) store(at + i, _mm512_load_ps(out + q * d + i));
            }
        }
        add_products(scratch.of_scores.get(), asking.query_pairs, from, to, d, held.of_keys.get());
        add_products(scratch.probs.get(), asking.grad_pairs, from, to, d, held.of_values.get());
    }
}

// grad [n, H d] of what was read -> the gradient of queries, keys and values. Returns 1 where there is no memory, else 0.
extern "C" int attention_backward(const Line *of, const Projected *heads, const bf16 *grad, const Projected *gradient,
                                  int64_t threads) {
    const Line &line = *of;
    const int64_t all = line.prompts + line.rows;
    const int64_t room = to_32(to_sixteen(line.longest(0, line.prompts)) + to_sixteen(line.longest(line.prompts, all)));
    int fault = 0;
#pragma omp parallel num_threads(threads) reduction(| : fault)
    try {
        Held held(room, line.size);
        const Scratch scratch(room);
        const std::unique_ptr<Asking> asking(new Asking);
        const Tiling tiling(Tiles::ROWS);
#pragma omp for schedule(dynamic) nowait
        for (int64_t task = 0; task < line.prompts * line.key_heads; task++) {
            const int64_t prompt = task / line.key_heads, k = task % line.key_heads;
            const Sequence first = {line.start(prompt), line.length(prompt), 0, 0};
            held.take(*heads, first.token, k, first.length, 0);
            go_back(line, first, k, *heads, grad, *gradient, held, scratch, *asking);
            for (int64_t row = 0; row < line.rows; row++) {
                if (line.prompt_of[row] != prompt) continue;
                const int64_t sequence = line.prompts + row;
                const Sequence behind = {line.start(sequence), line.length(sequence), first.length, to_sixteen(first.length)};
                held.take(*heads, behind.token, k, behind.length, behind.own);
                go_back(line, behind, k, *heads, grad, *gradient, held, scratch, *asking);
                held.give(*gradient, behind.token, k, behind.length, behind.own);
            }
            held.give(*gradient, first.token, k, first.length, 0);
        }
    } catch (const std::bad_alloc &) {
        fault = 1;
    }
    return fault;
}
