// Attention of packed sequences with the bits of sampling. attention.py calls and checks it.

#include <omp.h>

#include "rollouts.h"

template <class Activations> struct Written {  // rows [n, width] in place of the activations of sampling
    using Words = Activations;
    bf16 *to;
    int64_t width;
    void put(int64_t row, int64_t k, __m512 x) const { store(to + row * width + k, x); }
};

// Keys or values of the sequences from .. to, [K, sequences, room, d], padded with 0.
static Zeros<bf16> cached(const Line &line, const bf16 *x, int64_t apart, int64_t from, int64_t to, int64_t room, int64_t threads) {
    const int64_t d = line.size, count = to - from;
    Zeros<bf16> cache(new_lines<bf16>(line.key_heads * count * room * d));
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < line.key_heads; k++) {
            const int64_t length = line.length(from + i);
            bf16 *const row = &cache[(k * count + i) * room * d];
            for (int64_t place = 0; place < length; place++)
                std::memcpy(row + place * d, x + (line.start(from + i) + place) * apart + k * d, d * sizeof(bf16));
            std::memset(row + length * d, 0, (room - length) * d * sizeof(bf16));
        }
    return cache;
}

// The sequences from .. to as rows of a decode batch: the positions of their tokens, and their prompts.
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
        tokens.capacity = room;
        tokens.row_of = row_of.data();
        tokens.positions = places.data();
    }
};

template <class Words>
static void read_all(const Model &m, const Layer &layer, const Tokens &tokens, const bf16 *queries, bf16 *out, int64_t threads) {
    const int64_t width = m.heads * m.size, stride = tokens.prompt_capacity + tokens.capacity;
    const std::vector<Run> runs = runs_of(tokens, std::max<int64_t>(1, Words::QUERIES / (m.heads / m.key_heads)));
    const std::unique_ptr<float[]> scores(new float[threads * Words::QUERIES * stride]);
    const int64_t count = runs.size();
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        [[maybe_unused]] const typename Words::Setting setting(Words::ROWS);
        for (int64_t i = thread; i < count; i += team)
            attend(m, layer, tokens, runs[i], i + team < count ? &runs[i + team] : nullptr, queries, width,
                   &scores[thread * Words::QUERIES * stride], stride, Written<Words>{out, width});
    }
}

template <class Words> static void forward_by(const Line &line, const Projected *heads, bf16 *out, int64_t threads) {
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
    const Zeros<bf16> keys = cached(line, heads->key, heads->key_apart, 0, line.prompts, size, threads);
    const Zeros<bf16> values = cached(line, heads->value, heads->value_apart, 0, line.prompts, size, threads);
    const Zeros<bf16> own_keys = cached(line, heads->key, heads->key_apart, line.prompts, all, room, threads);
    const Zeros<bf16> own_values = cached(line, heads->value, heads->value_apart, line.prompts, all, room, threads);
    Layer layer = {};
    layer.window = line.window;

    const std::vector<int64_t> on_none(line.prompts, 0);  // prompts are rows of one prompt without tokens
    Seats of_prompts(line, 0, line.prompts, size);
    of_prompts.tokens.prompt_of = on_none.data();
    of_prompts.tokens.prompt_lengths = &none;
    layer.keys = keys.get();
    layer.values = values.get();
    read_all<Words>(m, layer, of_prompts.tokens, queries.get(), out, threads);

    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < line.prompts; i++) lengths.push_back(line.length(i));
    Seats of_rows(line, line.prompts, all, room);
    of_rows.tokens.prompts = line.prompts;
    of_rows.tokens.prompt_capacity = size;
    of_rows.tokens.prompt_of = line.prompt_of;
    of_rows.tokens.prompt_lengths = lengths.data();
    layer.prompt_keys = keys.get();
    layer.prompt_values = values.get();
    layer.keys = own_keys.get();
    layer.values = own_values.get();
    read_all<Words>(m, layer, of_rows.tokens, &queries[read * width], out + read * width, threads);
}

// Writes out [n, H d]. Returns 1 if there is not enough memory, else 0.
extern "C" int attention_forward(const Line *line, const Projected *heads, bf16 *out, int64_t tiles, int64_t threads) {
    try {
        (tiles ? forward_by<Tiles> : forward_by<Groups>)(*line, heads, out, threads);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}
