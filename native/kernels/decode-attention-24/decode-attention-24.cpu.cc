#include "kernels/decode-attention-24/decode-attention-24.h"

#include "shared/attention/decode/key-splits.cpu.h"
#include "shared/blocks-24/sparse-vectors-24.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// Vectors of a row's output that stay in registers, for each of kRowGroup rows.
constexpr int kSparseVectors = kLanes == 16 ? 4 : 2;

// A block that will be read after this one. It is prefetched in small steps.
struct Ahead {
  const char* data;
  int element_bytes;  // bytes of the block for each element of a dense block
  bool second_cache;

  // GCC leaves out calls of a function that only asks for memory, unless it is inlined before it is looked at.
  __attribute__((always_inline)) void fetch(int element, int count) const {
    const char* from = data + element * element_bytes;
    const int bytes = count * element_bytes;
    // The compiler does not see which cache it is: it would write every loop around this twice.
    bool second = second_cache;
    asm("" : "+r"(second));
    if (second) {
      for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    } else {
      for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
    }
  }
};

template <class T>
struct DenseBlock {
  typedef T Element;

  const T* rows;
  int64_t stride;
  Ahead ahead;
  int dim;
  int count;

  const T* row(int token) const { return rows + token * stride; }
  Vec at(int token, int d) const { return load(row(token) + d); }
  int ahead_of(int token) const { return token; }
  template <int kRows>
  __attribute__((always_inline)) void fetch(int token, int on, int first, int elements) const {
    ahead.fetch((token + on) * dim + first, elements);
  }
  template <int kRows>
  __attribute__((always_inline)) void fetch_next(int token, int first, int elements) const {
    fetch<kRows>(token, 0, first, elements);
  }
};

template <class T>
struct SparseBlock {
  const T* non_zeros;
  const uint32_t* metadata;
  Ahead ahead;
};

#if defined(__AVX512F__)
constexpr int kOrders = 2;

template <class T>
const float* order_queries(const float* queries, int64_t rows, int dim, float* ordered) {
  if (dim == 128) {
    order_quads<128>(queries, rows, ordered);
  } else {
    order_quads<64>(queries, rows, ordered);
  }
  return ordered;
}

// The sums over the quads of each of four vectors, one in each 128 bits.
inline Vec add_quads(Vec a, Vec b, Vec c, Vec d) {
  const auto halves = [](Vec x, Vec y) __attribute__((always_inline)) {
    return reinterpret_cast<Vec>(_mm512_mask_blend_ps(0xff00, x, y)) +
           reinterpret_cast<Vec>(_mm512_maskz_shuffle_f32x4(kAllLanes, x, y, 0x4e));
  };
  const Vec ab = halves(a, b), cd = halves(c, d);
  return reinterpret_cast<Vec>(_mm512_maskz_shuffle_f32x4(kAllLanes, ab, cd, 0x88)) +
         reinterpret_cast<Vec>(_mm512_maskz_shuffle_f32x4(kAllLanes, ab, cd, 0xdd));
}

// scores[row * score_stride + key] = queries[row] . keys[key] for kRows rows: score_run for a sparse block. Queries are ordered.
template <int kRows, int kDim, class T>
__attribute__((noinline)) void score_sparse_dims(const float* queries, const SparseBlock<T>& keys, float* scores, int64_t score_stride) {
  VecInt places[2] = {};
  for (int token = 0; token < kLanes; ++token) {
    const int place = pair_place(token, kDim);
    places[0][token] = place % 8 + place / 8 * kLanes;
    places[1][token] = places[0][token] + 8;
  }
  for (int tile = 0; tile < kBlock24Tokens; tile += 16) {
    const T* non_zeros = keys.non_zeros + tile * (kDim / 2);
    const uint32_t* words = keys.metadata + key_meta16(tile, 0, kDim).word;
    float sums[2][(kRows + 1) / 2][kLanes];
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      Vec totals[kRows][kTokenPairs] = {};
#pragma GCC unroll 4
      for (int part = 0; part < kDim / 32; ++part) {
        keys.ahead.fetch((tile + 8 * odd) * kDim + part * 256, 256);
        VecInt dims[kTokenPairs];
#pragma GCC unroll 4
        for (int p = 0; p < kTokenPairs; ++p) dims[p] = picked_dims_of_pair<kDim>(words, pair_token(p, odd, kDim), part, odd);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          Vec kept[kTokenPairs];
#pragma GCC unroll 4
          for (int p = 0; p < kTokenPairs; ++p) {
            kept[p] = load_kept_pair<kDim>(non_zeros, pair_token(p, odd, kDim), part, v);
            if (v == 1) dims[p] >>= 8;
          }
#pragma GCC unroll 4
          for (int row = 0; row < kRows; ++row) {
            const Vec query = load(queries + (kOrders * row + odd) * kDim + 32 * part + v * kLanes);
#pragma GCC unroll 4
            for (int p = 0; p < kTokenPairs; ++p) totals[row][p] += pick(query, dims[p]) * kept[p];
          }
        }
      }
#pragma GCC unroll 2
      for (int row = 0; row < kRows; row += 2) {
        const Vec(&x)[kTokenPairs] = totals[row];
        const Vec(&y)[kTokenPairs] = totals[row + 1 < kRows ? row + 1 : row];
        store(sums[odd][row / 2], add_quads(add_halves(x[0], x[1]), add_halves(x[2], x[3]), add_halves(y[0], y[1]), add_halves(y[2], y[3])));
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      store(scores + row * score_stride + tile, permute(load(sums[0][row / 2]), load(sums[1][row / 2]), places[row % 2]));
    }
  }
}
#elif defined(__AVX2__)
// Sums over lanes, for two vectors with the lanes of load_kept_pair. to[0] and to[1] get the sums of the first
// tokens, to[8] and to[9] those of the second tokens.
inline void store_sums_of_pairs(Vec a, Vec b, float* to) {
  const Vec sums = shuffle(a, b, [](int i) { return (i & 4) + (i & 1) * 2 + (i & 2) / 2 * kLanes; }) +
                   shuffle(a, b, [](int i) { return (i & 4) + (i & 1) * 2 + 1 + (i & 2) / 2 * kLanes; });
  Quad halves[2];
  std::memcpy(halves, &sums, sizeof halves);
  const Quad total = halves[0] + halves[1];
  const float in_order[4] = {total[0], total[2], total[1], total[3]};
  std::memcpy(to, in_order, 2 * sizeof(float));
  std::memcpy(to + 8, in_order + 2, 2 * sizeof(float));
}

constexpr int kOrders = 1;

// Reorders the dims of queries to the order of load_kept_pair, which score_sparse_dims takes.
template <class T>
const float* order_queries(const float* queries, int64_t rows, int dim, float* ordered) {
  for (int64_t group = 0; group < rows * dim; group += 16) {
#pragma GCC unroll 4
    for (int place = 0; place < 4; ++place) {
      const int quad = kept_quad(T{}, place / 2, place % 2);
      std::memcpy(ordered + group + 4 * place, queries + group + 4 * quad, 4 * sizeof(float));
    }
  }
  return ordered;
}

// The same for reordered queries. The tokens t and t + 8 of each 16 are scored together, because their metadata share
// a word.
template <int kRows, int kDim, class T>
void score_sparse_dims(const float* queries, const SparseBlock<T>& keys, float* scores, int64_t score_stride) {
  constexpr int kPairs = kRows > 2 ? 2 : 4;  // pairs that are computed together
  for (int n = 0; n < kBlock24Tokens; n += 2 * kPairs) {
    keys.ahead.fetch(n * kDim, 2 * kPairs * kDim);
    const int token = n / 16 * 16 + n % 16 / 2;
    const uint32_t* words = keys.metadata + key_meta16(token, 0, kDim).word;
    Vec totals[kRows][kPairs] = {};
    for (int group = 0; group < kDim / 16; ++group) {
#pragma GCC unroll 4
      for (int pair = 0; pair < kPairs; ++pair) {
        const T* first = keys.non_zeros + key_non_zero(token + pair, 8 * group, kDim);
        const uint32_t word = words[key_meta16(pair, group, kDim).word];
        Vec kept[2];
        load_kept_pair(first, first + 4 * kDim, kept);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const VecInt dims = picked_dims_of_pair<T>(word, v);
#pragma GCC unroll 4
          for (int row = 0; row < kRows; ++row) {
            const Vec query = load(queries + row * kDim + 16 * group + 8 * v);
            totals[row][pair] += pick(query, dims) * kept[v];
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
      for (int pair = 0; pair < kPairs; pair += 2) {
        store_sums_of_pairs(totals[row][pair], totals[row][pair + 1], scores + row * score_stride + token + pair);
      }
    }
  }
}
#else
constexpr int kOrders = 1;

template <class T>
const float* order_queries(const float* queries, int64_t, int, float*) {
  return queries;
}

template <class T>
struct SparseKeyRun : SparseBlock<T> {
  int dim;
  int count = kBlock24Tokens;

  SparseKeyRun(const SparseBlock<T>& block, int dim) : SparseBlock<T>(block), dim(dim) {}

  Vec at(int token, int d) const { return load_key(this->non_zeros, this->metadata, token, d, dim); }
  template <int kRows>
  __attribute__((always_inline)) void fetch_next(int token, int, int) const { this->ahead.fetch(token * dim, dim); }
};

template <int kRows, int kDim, class T>
void score_sparse_dims(const float* queries, const SparseBlock<T>& keys, float* scores, int64_t score_stride) {
  score_run<kRows>(queries, SparseKeyRun<T>(keys, kDim), kDim, scores, score_stride);
}
#endif

template <int kRows, class T>
void score_sparse(const float* queries, const SparseBlock<T>& keys, int dim, float* scores, int64_t score_stride) {
  const auto score = dim == 128 ? score_sparse_dims<kRows, 128, T> : score_sparse_dims<kRows, 64, T>;
  score(queries, keys, scores, score_stride);
}

// output[row, first .. first + kSparseVectors * kLanes) += weights[row, 64 tokens] times the values of a sparse
// block.
template <int kRows, class T>
void add_sparse_columns(const float* weights, int64_t weight_stride, const SparseBlock<T>& values, int dim, int first,
                        float* output) {
  Vec totals[kRows][kSparseVectors];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kSparseVectors; ++v) totals[row][v] = load(output + row * dim + first + v * kLanes);
  }
  const ValueMeta meta(values.metadata, first);
  for (int group = 0; group < 4; ++group) {
    VecInt index[kSparseVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kSparseVectors; ++v) index[v] = meta.at(v, group);
    for (int quad = 4 * group; quad < 4 * group + 4; ++quad) {
      const int columns = kSparseVectors * kLanes;
      values.ahead.fetch(4 * (quad * dim + first), 4 * columns);
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        Vec loaded[kSparseVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kSparseVectors; ++v) loaded[v] = load_kept(values.non_zeros, quad, j, first, v);
        const float* of_quad = weights + 4 * quad;
        // With 16 registers none is left for the weights, so they are loaded again for the second j.
        if (kLanes == 8) asm volatile("" : "+r"(of_quad));
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const Vec four = load_quad(of_quad + row * weight_stride);
#pragma GCC unroll 4
          for (int v = 0; v < kSparseVectors; ++v) totals[row][v] += pick(four, index[v]) * loaded[v];
        }
#pragma GCC unroll 4
        for (int v = 0; v < kSparseVectors; ++v) index[v] >>= 2;
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kSparseVectors; ++v) store(output + row * dim + first + v * kLanes, totals[row][v]);
  }
}

template <class T>
class Cache24 : public PlainRows {
 public:
  Cache24(const Attention24Arguments& arguments, bool second_cache) : a_(arguments), second_cache_(second_cache) {}

  int64_t work_floats(int64_t rows, int dim) const { return (kOrders + 2) * rows * dim; }

  void score(const RowRange& range, const SplitKeys& keys, const float* queries, int dim, float* scores,
             float* work) const {
    const int32_t* table = range.blocks;
    const float* ordered = order_queries<T>(queries, range.rows(), dim, work);
    const auto prepared = scoring_queries<T>(queries, range.rows(), dim, range.group, work + kOrders * range.rows() * dim);
    for_each_block(keys, [&](int32_t first, int count, bool last) {
      const auto ahead = last ? value_ahead(value_blocks(range), keys.first) : key_ahead(table, first + count);
      const int32_t entry = table[first / kBlock24Tokens];
      for_each_row_group(range.rows(), [&](int64_t row, auto group) {
        constexpr int kRows = decltype(group)::count;
        float* to = scores + row * kScoreStride + (first - keys.first);
        if (is_dense(entry)) {
          const auto block = dense_block(a_.keys, entry, ahead, count);
          score_prepared<kRows>(prepared, row, block, to, kScoreStride);
        } else {
          const auto block = sparse_block(a_.sparse_keys, entry, ahead);
          score_sparse<kRows>(ordered + row * kOrders * dim, block, dim, to, kScoreStride);
        }
      });
    });
  }

  void add_values(const RowRange& range, const SplitKeys& keys, const float* weights, int dim, float* output,
                  float*) const {
    const int32_t* table = value_blocks(range);
    for_each_block(keys, [&](int32_t first, int count, bool last) {
      const auto ahead = last ? key_ahead(keys.next_range.blocks, keys.next) : value_ahead(table, first + count);
      const int32_t entry = table[first / kBlock24Tokens];
      for_each_row_group(range.rows(), [&](int64_t row, auto group) {
        constexpr int kRows = decltype(group)::count;
        const float* of_rows = weights + row * kScoreStride + (first - keys.first);
        if (is_dense(entry)) {
          KV_ISA::add_values<kRows>(of_rows, kScoreStride, dense_block(a_.values, entry, ahead, count), dim,
                                    output + row * dim);
          return;
        }
        for (int d = 0; d < dim; d += kSparseVectors * kLanes) {
          add_sparse_columns<kRows>(of_rows, kScoreStride, sparse_block(a_.sparse_values, entry, ahead), dim, d,
                                    output + row * dim);
        }
      });
    });
  }

 private:
  // Calls body(first key, keys, whether this is the split's last block).
  template <class Body>
  static void for_each_block(const SplitKeys& keys, Body&& body) {
    for (int32_t first = keys.first; first < keys.end; first += kBlock24Tokens) {
      const int32_t left = keys.end - first;
      body(first, left < kBlock24Tokens ? left : kBlock24Tokens, left <= kBlock24Tokens);
    }
  }

  const int32_t* value_blocks(const RowRange& range) const {
    return a_.value_table + (range.blocks - a_.block_table);
  }
  const T* dense(const void* pool, int32_t entry) const {
    return static_cast<const T*>(pool) + entry * a_.block_stride;
  }
  const T* non_zeros(const SparseBlocks24& sparse, int32_t entry) const {
    return static_cast<const T*>(sparse.non_zeros) + block_number(entry) * sparse_block_elements(a_.head_dim);
  }
  const uint32_t* metadata(const SparseBlocks24& sparse, int32_t entry) const {
    return sparse.metadata + block_number(entry) * sparse_block_words(a_.head_dim);
  }
  DenseBlock<T> dense_block(const void* pool, int32_t entry, const Ahead& ahead, int count) const {
    return {dense(pool, entry), a_.token_stride, ahead, a_.head_dim, count};
  }

  SparseBlock<T> sparse_block(const SparseBlocks24& sparse, int32_t entry, const Ahead& ahead) const {
    return {non_zeros(sparse, entry), metadata(sparse, entry), ahead};
  }

  Ahead key_ahead(const int32_t* table, int32_t key) const { return ahead_of(a_.keys, a_.sparse_keys, table, key); }
  Ahead value_ahead(const int32_t* table, int32_t key) const {
    return ahead_of(a_.values, a_.sparse_values, table, key);
  }
  // The block of `key`, to be prefetched. Its metadata are prefetched at once.
  Ahead ahead_of(const void* pool, const SparseBlocks24& sparse, const int32_t* table, int32_t key) const {
    const int32_t entry = table[key / kBlock24Tokens];
    if (is_dense(entry)) return {reinterpret_cast<const char*>(dense(pool, entry)), sizeof(T), second_cache_};
    const int words = static_cast<int>(sparse_block_words(a_.head_dim));
    Ahead{reinterpret_cast<const char*>(metadata(sparse, entry)), sizeof(uint32_t), second_cache_}.fetch(0, words);
    return {reinterpret_cast<const char*>(non_zeros(sparse, entry)), sizeof(T) / 2, second_cache_};
  }

  const Attention24Arguments& a_;
  bool second_cache_;
};

}  // namespace

void decode_attention_24(const Attention24Arguments& a, Workers& workers) {
  const auto decode = [&](auto element) {
    typedef decltype(element) T;
    decode_splits(a, Cache24<T>(a, workers.memory_reading().cache == 2), workers);
  };
  if (a.cache_dtype == DType::bf16) return decode(Bfloat{});
  decode(Half{});
}

}  // namespace KV_ISA
}  // namespace kv
