#include "kernels/decode-attention/decode-attention.h"

#include "shared/attention/decode/key-splits.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// Length of a run in keys. If there are more rows than kRowGroup, the run is read again, from L1.
constexpr int kRunKeys = 64;

template <class T>
const T* row_of(const PagedAttentionArguments& a, const RowRange& range, const void* pool, int32_t key) {
  const int64_t block = range.blocks[key / a.block_tokens];
  return static_cast<const T*>(pool) + block * a.block_stride + key % a.block_tokens * a.token_stride;
}

// Calls body(run, its first key) for each contiguous part of the keys [first_key, last_key). If a row's length is no
// multiple of kLanes, the run is an f32 copy in `padded`, with rows `dim` floats apart. `after` is what will be read
// after the last run.
template <class T, class Body>
void for_each_run(const PagedAttentionArguments& a, const RowRange& range, const void* pool,
                  int32_t first_key, int32_t last_key, const T* after, int dim, float* padded, Body&& body) {
  for (int32_t key = first_key; key < last_key;) {
    int32_t count = a.block_tokens - key % a.block_tokens;
    count = count < last_key - key ? count : last_key - key;
    count = count < kRunKeys ? count : kRunKeys;
    const T* rows = row_of<T>(a, range, pool, key);
    const int32_t next_key = key + count;
    if (dim == a.head_dim) {
      const T* next = next_key < last_key ? row_of<T>(a, range, pool, next_key) : after;
      body(Run<T>{rows, next, a.token_stride, count}, key);
    } else {
      for (int32_t i = 0; i < count; ++i)
        load_row(rows + i * a.token_stride, padded + i * dim, a.head_dim, dim);
      body(Run<float>{padded, padded, dim, count}, key);
    }
    key = next_key;
  }
}

template <class T>
struct DenseCache : PlainRows {
  const PagedAttentionArguments& a;

  int64_t work_floats(int64_t, int dim) const { return int64_t{kRunKeys} * dim; }

  void score(const RowRange& range, const SplitKeys& keys, const float* queries, int dim, float* scores,
             float* work) const {
    const T* values = row_of<T>(a, range, a.values, keys.first);
    for_each_run<T>(a, range, a.keys, keys.first, keys.end, values, dim, work, [&](const auto& run, int32_t key) {
      for_each_row_group(range.rows(), [&](int64_t row, auto group) {
        score_run<decltype(group)::count>(queries + row * dim, run, dim,
                                          scores + row * kScoreStride + (key - keys.first), kScoreStride);
      });
    });
  }

  void add_values(const RowRange& range, const SplitKeys& keys, const float* weights, int dim, float* output,
                  float* work) const {
    const T* next = row_of<T>(a, range, a.keys, keys.next);
    for_each_run<T>(a, range, a.values, keys.first, keys.end, next, dim, work, [&](const auto& run, int32_t key) {
      for_each_row_group(range.rows(), [&](int64_t row, auto group) {
        KV_ISA::add_values<decltype(group)::count>(weights + row * kScoreStride + (key - keys.first), kScoreStride, run, dim,
                                           output + row * dim);
      });
    });
  }
};

}  // namespace

void decode_attention(const PagedAttentionArguments& a, Workers& workers) {
  with_float_type(a.cache_dtype,
                  [&](auto element) { decode_splits(a, DenseCache<decltype(element)>{{}, a}, workers); });
}

}  // namespace KV_ISA
}  // namespace kv
