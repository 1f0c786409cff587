#include "kernels/decode-attention/decode-attention.h"

#include "shared/attention/decode/key-splits.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// Length of a run in keys. If there are more rows than kRowGroup, the run is read again, from L1.
constexpr int kRunKeys = 64;
// Memory is asked for this far ahead of its use: what a core reads while one line of it is on its way.
constexpr int64_t kAheadBytes = 16 << 10;
// The same for a core whose own prefetchers read ahead, but not beyond a page of 4 KiB: most is asked for within a page.
constexpr int64_t kSecondCacheBytes = 3 << 10;
constexpr int64_t kFirstCacheBytes = 1 << 10;

// The keys, or values, of a head from `first` on to `end`.
struct Stretch {
  const void* pool;
  const int32_t* blocks;
  int32_t first;
  int32_t end;
};

template <class T>
const T* row_of(const PagedAttentionArguments& a, const Stretch& stretch, int32_t key) {
  const int64_t block = stretch.blocks[key / a.block_tokens];
  return static_cast<const T*>(stretch.pool) + block * a.block_stride + key % a.block_tokens * a.token_stride;
}

// How many whole runs hold kAheadBytes, in keys; at most a split.
template <class T>
int32_t keys_ahead(const PagedAttentionArguments& a) {
  const int64_t run_bytes = kRunKeys * a.head_dim * static_cast<int64_t>(sizeof(T));
  const int64_t keys = divide_up(kAheadBytes, run_bytes) * kRunKeys;
  return keys < kSplitKeys ? static_cast<int32_t>(keys) : kSplitKeys;
}

// Calls body(run, its first key) for each contiguous part of `now`. If a row's length is no multiple of kLanes, the run
// is an f32 copy in `padded`, with rows `dim` floats apart. `then` is what will be read after `now`.
template <class T, int kCache, class Body>
void for_each_run(const PagedAttentionArguments& a, const Stretch& now, const Stretch& then, int dim, float* padded,
                  bool again, Body&& body) {
  const bool nearby = Run<T, kCache>::asks_nearby(again);
  const int32_t ahead = nearby ? kRunKeys : keys_ahead<T>(a);
  for (int32_t key = now.first; key < now.end;) {
    int32_t count = a.block_tokens - key % a.block_tokens;
    count = count < now.end - key ? count : now.end - key;
    count = count < kRunKeys ? count : kRunKeys;
    const T* rows = row_of<T>(a, now, key);
    if (dim == a.head_dim) {
      const int32_t after = then.first + key + ahead - now.end;
      const T* next = key + ahead < now.end ? row_of<T>(a, now, key + ahead)
                                            : row_of<T>(a, then, after < then.end ? after : then.end - 1);
      Run<T, kCache> run{rows, next, a.token_stride, count, again, dim};
      if (nearby) {
        run.for_second_cache = {rows, next, a.token_stride, count, kSecondCacheBytes};
        run.for_first_cache = {rows, next, a.token_stride, count, kFirstCacheBytes};
      }
      body(run, key);
    } else {
      for (int32_t i = 0; i < count; ++i)
        load_row(rows + i * a.token_stride, padded + i * dim, a.head_dim, dim);
      body(Run<float>{padded, padded, dim, count}, key);
    }
    key += count;
  }
}

// kCache: the cache of a core in which memory is asked for.
template <class T, int kCache>
struct DenseCache : PlainRows {
  const PagedAttentionArguments& a;
  bool again = false;

  int64_t work_floats(int64_t rows, int dim) const { return (kRunKeys + 2 * rows) * dim; }

  void score(const RowRange& range, const SplitKeys& keys, const float* queries, int dim, float* scores,
             float* work) const {
    const Stretch now{a.keys, range.blocks, keys.first, keys.end};
    const Stretch then{a.values, range.blocks, keys.first, keys.end};
    const auto prepare = dim == a.head_dim ? scoring_queries<T> : scoring_queries<float>;
    const ScoringQueries prepared = prepare(queries, range.rows(), dim, range.group, work + kRunKeys * dim);
    for_each_run<T, kCache>(a, now, then, dim, work, again, [&](const auto& run, int32_t key) {
      for_each_row_group(range.rows(), [&](int64_t row, auto group) {
        score_prepared<decltype(group)::count>(prepared, row, run, scores + row * kScoreStride + (key - keys.first), kScoreStride);
      });
    });
  }

  void add_values(const RowRange& range, const SplitKeys& keys, const float* weights, int dim, float* output,
                  float* work) const {
    const Stretch now{a.values, range.blocks, keys.first, keys.end};
    const Stretch then{a.keys, keys.next_range.blocks, keys.next, keys.next_range.key_count};
    for_each_run<T, kCache>(a, now, then, dim, work, again, [&](const auto& run, int32_t key) {
      for_each_row_group(range.rows(), [&](int64_t row, auto group) {
        KV_ISA::add_values<decltype(group)::count>(weights + row * kScoreStride + (key - keys.first), kScoreStride, run, dim,
                                                   output + row * dim);
      });
    });
  }
};

}  // namespace

void decode_attention(const PagedAttentionArguments& a, Workers& workers) {
  with_float_type(a.cache_dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (kLanes >= 8) {
      const MemoryReading reading = workers.memory_reading();
      if (reading.cache == 2) return decode_splits(a, DenseCache<T, 2>{{}, a, reading.requests > 1}, workers);
    }
    decode_splits(a, DenseCache<T, 1>{{}, a}, workers);
  });
}

}  // namespace KV_ISA
}  // namespace kv
