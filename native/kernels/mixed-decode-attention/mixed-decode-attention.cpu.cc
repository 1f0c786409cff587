#include "kernels/mixed-decode-attention/mixed-decode-attention.h"

#include "kernels/decode-attention/decode-attention-splits.h"
#include "kernels/sparse-vectors.h"

namespace kv {
namespace KV_ISA {
namespace {

// Vectors of a row's output that stay in registers: with kRowGroup rows, enough chains of additions to hide how
// long one takes.
constexpr int kSparseVectors = 2;

// A block that will be read after this one, fetched a 64th at a time.
struct Ahead {
  const char* data;
  int64_t step_bytes;

  void fetch(int64_t from, int64_t bytes) const {
    for (int64_t i = from; i < from + bytes; i += 64) __builtin_prefetch(data + i, 0, 2);
  }
  void fetch_step(int step) const { fetch(step * step_bytes, step_bytes); }
};

template <class T>
struct DenseBlock {
  const T* rows;
  int64_t stride;
  Ahead ahead;
  int dim;
  int count;

  Vec at(int token, int d) const { return load(rows + token * stride + d); }
  void fetch_next(int token, int first, int elements) const {
    ahead.fetch((token * dim + first) * ahead.step_bytes / dim, elements * ahead.step_bytes / dim);
  }
};

template <class T>
struct SparseKeyBlock {
  const T* non_zeros;
  const uint16_t* masks;
  Ahead ahead;
  int dim;
  int count;

  Vec at(int token, int d) const {
    const Meta16Place place = key_meta16(token, d / 16, dim);
    const uint32_t mask = masks[2 * place.word + place.shift / 16];
    return spread(non_zeros + key_non_zero(token, d / 2, dim), mask >> d % 16);
  }
  void fetch_next(int token, int, int) const { ahead.fetch_step(token); }
};

// output[row, first .. first + kSparseVectors * kLanes) += weights[row, 64 tokens] times a sparse block's values.
template <int kRows, class T>
void add_sparse_columns(const float* weights, int64_t weight_stride, const T* non_zeros, const uint32_t* metadata,
                        const Ahead& ahead, int dim, int first, float* output) {
  Vec totals[kRows][kSparseVectors];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kSparseVectors; ++v) totals[row][v] = load(output + row * dim + first + v * kLanes);
  }
  for (int group = 0; group < 4; ++group) {
    VecInt index[kSparseVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kSparseVectors; ++v) index[v] = load_value_meta(metadata, first + v * kLanes, group);
    for (int quad = 4 * group; quad < 4 * group + 4; ++quad) {
      const int64_t bytes = ahead.step_bytes * 4 * kSparseVectors * kLanes / dim;
      ahead.fetch(4 * quad * ahead.step_bytes + bytes * first / (kSparseVectors * kLanes), bytes);
      for (int kept = 2 * quad; kept < 2 * quad + 2; ++kept) {
        Vec loaded[kSparseVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kSparseVectors; ++v) loaded[v] = load_kept(non_zeros, kept, first + v * kLanes);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const Vec four = load_quad(weights + row * weight_stride + 4 * quad);
#pragma GCC unroll 2
          for (int v = 0; v < kSparseVectors; ++v) totals[row][v] += pick(four, index[v]) * loaded[v];
        }
#pragma GCC unroll 2
        for (int v = 0; v < kSparseVectors; ++v) index[v] >>= 2;
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kSparseVectors; ++v) store(output + row * dim + first + v * kLanes, totals[row][v]);
  }
}

template <class T>
class MixedCache {
 public:
  explicit MixedCache(const MixedAttentionArguments& arguments) : a_(arguments) {}

  int64_t work_floats(int dim) const { return 2 * dim; }

  void score(const RowRange& range, const SplitKeys& keys, const float* queries, int dim, float* scores,
             float* work) const {
    const int32_t* table = range.blocks;
    uint16_t* masks = reinterpret_cast<uint16_t*>(work);
    for_each_block(keys, [&](int32_t first, int count, bool last) {
      const Ahead ahead = last ? value_ahead(value_blocks(range), keys.first) : key_ahead(table, first + count);
      const int32_t entry = table[first / kMixedBlockTokens];
      const auto score_rows = [&](const auto& block) {
        for_each_row_group(range.rows(), [&](int64_t row, auto group) {
          score_run<decltype(group)::count>(queries + row * dim, block, dim,
                                            scores + row * kScoreStride + (first - keys.first), kScoreStride);
        });
      };
      if (entry > 0) {
        score_rows(dense_block(a_.keys, entry, ahead, count));
      } else {
        load_key_masks(metadata(a_.sparse_keys, entry), dim, masks);
        score_rows(SparseKeyBlock<T>{non_zeros(a_.sparse_keys, entry), masks, ahead, dim, count});
      }
    });
  }

  void add_values(const RowRange& range, const SplitKeys& keys, const float* weights, int dim, float* output,
                  float*) const {
    const int32_t* table = value_blocks(range);
    for_each_block(keys, [&](int32_t first, int count, bool last) {
      const Ahead ahead = last ? key_ahead(range.blocks, keys.next) : value_ahead(table, first + count);
      const int32_t entry = table[first / kMixedBlockTokens];
      for_each_row_group(range.rows(), [&](int64_t row, auto group) {
        constexpr int kRows = decltype(group)::count;
        const float* of_rows = weights + row * kScoreStride + (first - keys.first);
        if (entry > 0) {
          KV_ISA::add_values<kRows>(of_rows, kScoreStride, dense_block(a_.values, entry, ahead, count), dim,
                                    output + row * dim);
          return;
        }
        for (int d = 0; d < dim; d += kSparseVectors * kLanes) {
          add_sparse_columns<kRows>(of_rows, kScoreStride, non_zeros(a_.sparse_values, entry),
                                    metadata(a_.sparse_values, entry), ahead, dim, d, output + row * dim);
        }
      });
    });
  }

 private:
  // Calls body(first key, keys, whether it is the split's last block).
  template <class Body>
  static void for_each_block(const SplitKeys& keys, Body&& body) {
    for (int32_t first = keys.first; first < keys.end; first += kMixedBlockTokens) {
      const int32_t left = keys.end - first;
      body(first, left < kMixedBlockTokens ? left : kMixedBlockTokens, left <= kMixedBlockTokens);
    }
  }

  const int32_t* value_blocks(const RowRange& range) const {
    return a_.value_table + (range.blocks - a_.block_table);
  }
  const T* dense(const void* pool, int32_t entry) const {
    return static_cast<const T*>(pool) + (entry - 1) * a_.block_stride;
  }
  const T* non_zeros(const SparseBlocks& sparse, int32_t entry) const {
    return static_cast<const T*>(sparse.non_zeros) + (-entry - 1) * sparse_block_elements(a_.head_dim);
  }
  const uint32_t* metadata(const SparseBlocks& sparse, int32_t entry) const {
    return sparse.metadata + (-entry - 1) * sparse_block_words(a_.head_dim);
  }
  DenseBlock<T> dense_block(const void* pool, int32_t entry, const Ahead& ahead, int count) const {
    return {dense(pool, entry), a_.token_stride, ahead, a_.head_dim, count};
  }

  Ahead key_ahead(const int32_t* table, int32_t key) const { return ahead_of(a_.keys, a_.sparse_keys, table, key); }
  Ahead value_ahead(const int32_t* table, int32_t key) const {
    return ahead_of(a_.values, a_.sparse_values, table, key);
  }
  // Fetches the metadata of the block of `key` at once.
  Ahead ahead_of(const void* pool, const SparseBlocks& sparse, const int32_t* table, int32_t key) const {
    const int32_t entry = table[key / kMixedBlockTokens];
    const int64_t row_bytes = a_.head_dim * static_cast<int64_t>(sizeof(T));
    if (entry > 0) return {reinterpret_cast<const char*>(dense(pool, entry)), row_bytes};
    const char* words = reinterpret_cast<const char*>(metadata(sparse, entry));
    Ahead{words, 0}.fetch(0, 4 * sparse_block_words(a_.head_dim));
    return {reinterpret_cast<const char*>(non_zeros(sparse, entry)), row_bytes / 2};
  }

  const MixedAttentionArguments& a_;
};

}  // namespace

void mixed_decode_attention(const MixedAttentionArguments& a, Workers& workers) {
  if (a.cache_dtype == DType::bf16) return decode_splits(a, MixedCache<Bfloat>(a), workers);
  decode_splits(a, MixedCache<Half>(a), workers);
}

}  // namespace KV_ISA
}  // namespace kv
