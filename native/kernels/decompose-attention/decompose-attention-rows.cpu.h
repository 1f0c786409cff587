// Computes each row's mean, variance and Λ-shape (lines 3 to 8). The lanes of a vector are query rows.
#pragma once

#include "kernels/decompose-attention/decompose-attention-interior.h"
#include "kernels/decompose-attention/decompose-attention-products.cpu.h"
#include "shared/attention/attention-rows.cpu.h"
#include "shared/attention/prefill/key-tile.cpu.h"

namespace kv {
namespace KV_ISA {

// The statistics of the rows, [group, row].
struct RowStatistics {
  float* mean;       // mu, from keys without their centre
  float* variance;   // sigma squared
  float* log_shape;  // ln of the sum over sinks and diagonal of e^(logit - mu)
};

// Rows of a tile. They share the sums over the keys that all of them have in their interior.
constexpr int32_t kTileTokens = 64;

struct RowTile {
  const DecomposeAttentionArguments& a;
  Interior interior;
  int64_t kv_head;
  int64_t stride;
  const float* keys;     // [token, stride], without their centre; kStep more rows follow
  const float* moments;  // [stride, stride], sum over the interior of the tile's first row
  const float* sum;      // [stride], sum over the same keys
  RowStatistics to;

  // The keys whose products a panel holds: first the sinks, then the keys that are new to the tile.
  static int64_t buffered(const DecomposeAttentionArguments& a) {
    return divide_up(a.sink_tokens, kStep) * kStep + kTileTokens + a.diagonal_tokens + kStep;
  }
  static size_t floats(const DecomposeAttentionArguments& a, int64_t stride) {
    return static_cast<size_t>((stride + kStep + buffered(a)) * kPanelRows);
  }

  // Adds `count` rows from `first` on, counted from the call's first row. `memory` has room for floats().
  void add(int32_t first, int32_t count, float* memory) const {
    const int32_t rows = count * a.group();
    for (int32_t row = 0; row < rows; row += kPanelRows) {
      with_float_type(a.query_dtype, [&](auto element) { load_panel<decltype(element)>(first, rows, row, memory); });
      add_panel(first, count, row, memory);
    }
  }

 private:
  // Row r is token r / group of query head r % group. Rows beyond the last are zeros.
  template <class T>
  void load_panel(int32_t first, int32_t rows, int32_t row, float* query) const {
    for (int32_t lane = 0; lane < kPanelRows; ++lane) {
      const int32_t r = row + lane;
      const int64_t token = int64_t{a.query_start[0]} + first + r / a.group();
      const T* from = static_cast<const T*>(a.query) + token * a.query_token_stride +
                      (kv_head * a.group() + r % a.group()) * a.query_head_stride;
      for (int64_t d = 0; d < stride; ++d) {
        query[d * kPanelRows + lane] = r < rows && d < a.head_dim ? to_float(from[d]) * a.scale : 0;
      }
    }
  }

  void multiply_keys(int32_t first, int32_t count, const float* query, float* products) const {
    for (int32_t key = 0; key < count; key += kStep) {
      multiply<false>(keys + (first + key) * stride, stride, 1, query, static_cast<int>(stride), nullptr,
                      products + key * kPanelRows);
    }
  }

  void add_panel(int32_t first, int32_t count, int32_t row, float* memory) const {
    const int32_t first_row = interior.first_row + first;
    const int32_t band_first = interior.end(first_row);
    const int32_t band = first_row + count - band_first;
    const int32_t sinks = interior.sinks < interior.tokens ? interior.sinks : interior.tokens;
    float* query = memory;
    float* quadratic = query + stride * kPanelRows;
    float* of_sinks = quadratic + kStep * kPanelRows;
    float* of_band = of_sinks + divide_up(a.sink_tokens, kStep) * kStep * kPanelRows;

    Vec sums[kPanelVectors] = {};
    Vec squares[kPanelVectors] = {};
    for (int64_t d = 0; d < stride; d += kStep) {
      multiply<false>(moments + d * stride, stride, 1, query, static_cast<int>(stride), nullptr, quadratic);
      for (int i = 0; i < kStep; ++i) {
        for (int v = 0; v < kPanelVectors; ++v) {
          const Vec q = load(query + (d + i) * kPanelRows + v * kLanes);
          sums[v] += q * sum[d + i];
          squares[v] += q * load(quadratic + i * kPanelRows + v * kLanes);
        }
      }
    }
    multiply_keys(0, sinks, query, of_sinks);
    multiply_keys(band_first, band, query, of_band);
    for (int v = 0; v < kPanelVectors; ++v) {
      finish(first, row + v * kLanes, count * a.group(), sums[v], squares[v], {of_sinks + v * kLanes, 0, sinks},
             {of_band + v * kLanes, band_first, band});
    }
  }

  // The products of some keys with one vector of rows.
  struct Products {
    const float* values;
    int32_t first_key;
    int32_t count;
  };

  void finish(int32_t first, int32_t row, int32_t rows, Vec sum, Vec square, Products of_sinks, Products of_band) const {
    VecInt position;
    VecInt wide;  // rows whose mean is over all keys that they see
    Vec counted;
    for (int lane = 0; lane < kLanes; ++lane) {
      position[lane] = interior.first_row + first + (row + lane) / a.group();
      const int32_t count = interior.count(position[lane]);
      wide[lane] = count == 0 || a.formulas == DecompositionFormulas::paper ? -1 : 0;
      counted[lane] = static_cast<float>(wide[lane] ? position[lane] + 1 : count);
    }
    const Vec nothing = splat(-__builtin_inff());
    Vec peak = splat(kLowestScore);
    const auto each = [&](Products products, int32_t diagonal, auto&& body) {
      for (int32_t i = 0; i < products.count; ++i) {
        const VecInt key = VecInt{} + (products.first_key + i);
        const VecInt seen = key <= position;
        body(load(products.values + i * kPanelRows), seen, seen & (key > position - diagonal));
      }
    };
    // Sinks always belong to the shape, as if every key were in the diagonal.
    const auto every = [&](auto&& body) {
      each(of_sinks, interior.tokens, body);
      each(of_band, interior.diagonal, body);
    };
    every([&](Vec logit, VecInt seen, VecInt shape) {
      const Vec counts = (seen & (~shape | wide)) ? logit : Vec{};
      sum += counts;
      square += counts * counts;
      peak = maximum(peak, shape ? logit : nothing);
    });
    const Vec mean = sum / counted;
    const Vec variance = square / counted - mean * mean;
    Vec total = {};
    every([&](Vec logit, VecInt, VecInt shape) { total += shape ? exponential(logit - peak) : Vec{}; });
    for (int lane = 0; lane < kLanes && row + lane < rows; ++lane) {
      const int64_t at = int64_t{(row + lane) % a.group()} * a.rows + first + (row + lane) / a.group();
      to.mean[at] = mean[lane];
      to.variance[at] = variance[lane] > 0 || variance[lane] != variance[lane] ? variance[lane] : 0;
      to.log_shape[at] = peak[lane] - mean[lane] + __builtin_logf(total[lane]);
    }
  }
};

}  // namespace KV_ISA
}  // namespace kv
