// Packed sequences: first the prompts, then the rows, each of which also attends to its prompt.

#pragma once
#include "attention.h"

struct Line {
    int64_t prompts, rows, heads, key_heads, size, window;  // window 0: no sliding window
    const int64_t *ends;       // [prompts + rows] the index behind the last token of each sequence
    const int64_t *prompt_of;  // [rows]
    int64_t start(int64_t sequence) const { return sequence ? ends[sequence - 1] : 0; }
    int64_t length(int64_t sequence) const { return ends[sequence] - start(sequence); }
    int64_t longest(int64_t from, int64_t to) const {
        int64_t most = 0;
        for (int64_t i = from; i < to; i++) most = std::max(most, length(i));
        return most;
    }
};

struct Projected {  // queries [n, H, d], keys and values [n, K, d], and the strides of their tokens
    bf16 *query, *key, *value;
    int64_t query_apart, key_apart, value_apart;
};
