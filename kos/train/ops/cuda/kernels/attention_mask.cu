// Which keys queries see, from documents and a window: for each query the first key, for each key the last query, both as
// numbers of tokens in their sample (column-wise bounds as in FlashMask, Wang et al. 2024, arXiv:2410.01359).
//
// starts (samples, queries): the position where the document of each query begins.  positions (queries) and key_positions
// (keys) increase; 0: they are the tokens' numbers, and one document.  A thread a query and a key, by binary search.

// The number of the first of `count` items for which `after` holds, which then holds for all that follow.
template <class Test>
__device__ inline int first_of(int count, Test after) {
    int low = 0;
    for (int high = count; low < high;) {
        const int middle = (low + high) / 2;
        if (after(middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(256)
    attention_mask(const int* starts, const int* positions, const int* key_positions, int* first_keys, int* last_queries,
                   int queries, int keys, int window) {
    const int token = blockIdx.x * 256 + threadIdx.x, sample = blockIdx.y;
    const auto position = [&](int key) { return key_positions ? key_positions[key] : key; };
    const auto seen_from = [&](int query) {
        const int start = starts ? starts[(long)sample * queries + query] : 0;
        return window ? max(start, (positions ? positions[query] : query) - window + 1) : start;
    };
    if (token < queries) {
        const int from = seen_from(token);
        first_keys[(long)sample * queries + token] = first_of(keys, [&](int key) { return position(key) >= from; });
    }
    if (token < keys) {
        const int at = position(token);
        last_queries[(long)sample * keys + token] = first_of(queries, [&](int query) { return seen_from(query) > at; }) - 1;
    }
}
