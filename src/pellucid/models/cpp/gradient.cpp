// The backward pass of attention of packed sequences. attention.py calls it.
//
// A task is a prompt with all of its rows, for one key head: so no two threads add to the same key, and gradients do not depend
// on the number of threads.

#include <omp.h>

#include "rollouts.h"

static int64_t to_32(int64_t count) { return (count + 31) / 32 * 32; }

// Keys, values and their gradients of a key head: those of a prompt, then those of one of its rows, each padded to tiles.
struct Held {
    int64_t d;
    Zeros<bf16> keys, values;  // [room, d]
    Zeros<bf16> pairs;         // [room / 2][d][2] of keys
    Zeros<float> of_keys, of_values;

    Held(int64_t room, int64_t d)
        : d(d), keys(zeros<bf16>(room * d)), values(zeros<bf16>(room * d)), pairs(zeros<bf16>(room * d)),
          of_keys(zeros<float>(room * d)), of_values(zeros<float>(room * d)) {}

    // Copies `count` tokens to a position, padded with 0 to a multiple of 32; their gradients are 0.
    void take(const Projected &from, int64_t token, int64_t k, int64_t count, int64_t at) {
        const int64_t left = to_32(at + count) - at;
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

// A sequence of the backward pass: the keys of its prompt, then its own, which begin at a multiple of 16.
struct Sequence {
    int64_t token, length, before, own;
};

// Queries [MANY, d] and the gradients of their outputs, in the layouts of products.
struct Asking {
    alignas(64) bf16 queries[MANY * LARGEST], grads[MANY * LARGEST];
    alignas(64) bf16 query_pairs[MANY * LARGEST], grad_pairs[MANY * LARGEST];  // [MANY / 2][d][2]
    alignas(64) bf16 turned_queries[MANY * LARGEST], turned_grads[MANY * LARGEST];  // two of [d / 2][16][2]

    void lay_out(int64_t d) {
        Held::pair_rows(queries, MANY, d, query_pairs);
        Held::pair_rows(grads, MANY, d, grad_pairs);
        for (int64_t half = 0; half < 2; half++) {
            lay(By<Tiles>(), queries + half * 16 * d, d, turned_queries + half * 16 * d);
            lay(By<Tiles>(), grads + half * 16 * d, d, turned_grads + half * 16 * d);
        }
    }
};

struct Scratch {
    int64_t room;
    Zeros<float> scores, slopes;   // [room, 16]: scores of 16 queries; gradients of probabilities, then of scores
    Zeros<bf16> turned;            // [16, room]: the gradients of scores, transposed
    Zeros<bf16> probs, of_scores;  // [room, MANY]
    explicit Scratch(int64_t room)
        : room(room), scores(zeros<float>(room * 16)), slopes(zeros<float>(room * 16)), turned(zeros<bf16>(room * 16)),
          probs(zeros<bf16>(room * MANY)), of_scores(zeros<bf16>(room * MANY)) {}

    void turn(int64_t from, int64_t to) const {
        __m512i by_query[16];
        for (int64_t t = from; t < to; t += 16) {
            transpose((const bf16 *)&slopes[t * 16], 32, by_query);
            for (int64_t q = 0; q < 16; q++) store(&turned[q * room + t], _mm512_castsi512_ps(by_query[q]));
        }
    }
};

// With p the softmax of the scores and g the gradient of p, computes p and the gradient of the scores, p (g - sum p g) times the
// scale. Both are written to one half of the arrays of `scratch`; the latter also replaces g, without rounding.
static void soften(const Sequence &of, __m512i positions, int64_t window, float scale, int64_t from, int64_t to, int64_t half,
                   const Scratch &scratch) {
    const __m512i behind = window ? _mm512_sub_epi32(positions, _mm512_set1_epi32(window)) : _mm512_set1_epi32(-1);
    const __m512 by = _mm512_set1_ps(scale);
    __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps(), mean = _mm512_setzero_ps();
    for (int64_t t = from; t < to; t++) {
        float *const score = &scratch.scores[t * 16];
        const bool is_own = t >= of.own;
        const __m512i position = _mm512_set1_epi32(is_own ? of.before + t - of.own : t);
        const __mmask16 within = _mm512_cmple_epi32_mask(position, positions) & _mm512_cmpgt_epi32_mask(position, behind);
        const __mmask16 seen = is_own || t < of.before ? within : 0;
        const __m512 z = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), _mm512_mul_ps(_mm512_load_ps(score), by));
        most = _mm512_max_ps(most, z);
        _mm512_store_ps(score, z);
    }
    for (int64_t t = from; t < to; t++) {
        float *const score = &scratch.scores[t * 16];
        const __m512 mass = Sleef_expf16_u10(_mm512_sub_ps(_mm512_load_ps(score), most));
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

// The backward pass of a sequence for one key head.
template <class Words>
static void go_back(const Line &line, const Sequence &of, int64_t k, const Projected &heads, const bf16 *grad,
                    const Projected &gradient, const Held &held, const Scratch &scratch, Asking &asking) {
    constexpr By<Words> by;
    const int64_t d = line.size, shared = line.heads / line.key_heads, all = of.length * shared;
    const float scale = 1 / std::sqrt(double(d));
    alignas(64) float out[16 * LARGEST];
    for (int64_t first = 0; first < all; first += MANY) {
        alignas(64) int32_t positions[MANY];
        const int64_t count = std::min(MANY, all - first), last = (first + count - 1) / shared;
        std::memset(asking.queries + count * d, 0, (MANY - count) * d * sizeof(bf16));
        std::memset(asking.grads + count * d, 0, (MANY - count) * d * sizeof(bf16));
        for (int64_t q = 0; q < MANY; q++) {
            const int64_t place = std::min(last, (first + q) / shared), h = k * shared + (first + q) % shared;
            const int64_t token = of.token + place;
            positions[q] = of.before + place;
            if (q >= count) continue;
            std::memcpy(asking.queries + q * d, heads.query + token * heads.query_apart + h * d, d * sizeof(bf16));
            std::memcpy(asking.grads + q * d, grad + (token * line.heads + h) * d, d * sizeof(bf16));
        }
        asking.lay_out(d);
        const int64_t seen = line.window ? std::max<int64_t>(0, positions[0] + 1 - line.window) : 0;
        const int64_t from = (seen < of.before ? seen : of.own + seen - of.before) / 32 * 32, to = to_32(of.own + last + 1);
        for (int64_t half = 0; half < 2; half++) {
            const int64_t at = half * 16 * d;
            by_keys(by, held.keys.get(), asking.turned_queries + at, from, to, d, scratch.scores.get());
            by_keys(by, held.values.get(), asking.turned_grads + at, from, to, d, scratch.slopes.get());
            soften(of, _mm512_load_si512(positions + half * 16), line.window, scale, from, to, half, scratch);
            scratch.turn(from, to);
            sum_of_keys(by, &scratch.turned[from], scratch.room, &held.pairs[from * d], to - from, d, out);
            for (int64_t q = 0; q < std::min<int64_t>(16, count - half * 16); q++) {
                const int64_t index = first + half * 16 + q, h = k * shared + index % shared;
                bf16 *const at = gradient.query + (of.token + index / shared) * gradient.query_apart + h * d;
                for (int64_t i = 0; i < d; i += 16) store(at + i, _mm512_load_ps(out + q * d + i));
            }
        }
        add_to_keys(by, scratch.of_scores.get(), asking.query_pairs, from, to, d, held.of_keys.get());
        add_to_keys(by, scratch.probs.get(), asking.grad_pairs, from, to, d, held.of_values.get());
    }
}

template <class Words>
static int backward_by(const Line &line, const Projected &heads, const bf16 *grad, const Projected &gradient, int64_t threads) {
    const int64_t all = line.prompts + line.rows;
    const int64_t room = to_32(to_sixteen(line.longest(0, line.prompts)) + to_sixteen(line.longest(line.prompts, all)));
    int fault = 0;
#pragma omp parallel num_threads(threads) reduction(| : fault)
    try {
        Held held(room, line.size);
        const Scratch scratch(room);
        const std::unique_ptr<Asking> asking(new Asking);
        [[maybe_unused]] const typename Words::Setting setting(Words::ROWS);
#pragma omp for schedule(dynamic) nowait
        for (int64_t task = 0; task < line.prompts * line.key_heads; task++) {
            const int64_t prompt = task / line.key_heads, k = task % line.key_heads;
            const Sequence first = {line.start(prompt), line.length(prompt), 0, 0};
            held.take(heads, first.token, k, first.length, 0);
            go_back<Words>(line, first, k, heads, grad, gradient, held, scratch, *asking);
            for (int64_t row = 0; row < line.rows; row++) {
                if (line.prompt_of[row] != prompt) continue;
                const int64_t sequence = line.prompts + row;
                const Sequence behind = {line.start(sequence), line.length(sequence), first.length, to_sixteen(first.length)};
                held.take(heads, behind.token, k, behind.length, behind.own);
                go_back<Words>(line, behind, k, heads, grad, gradient, held, scratch, *asking);
                held.give(gradient, behind.token, k, behind.length, behind.own);
            }
            held.give(gradient, first.token, k, first.length, 0);
        }
    } catch (const std::bad_alloc &) {
        fault = 1;
    }
    return fault;
}

// The gradients of queries, keys and values from that of the output [n, H d]. Returns 1 if there is not enough memory, else 0.
extern "C" int attention_backward(const Line *line, const Projected *heads, const bf16 *grad, const Projected *gradient,
                                  int64_t tiles, int64_t threads) {
    return (tiles ? backward_by<Tiles> : backward_by<Groups>)(*line, *heads, grad, *gradient, threads);
}
