#include "kernels/clustered-block-scores/clustered-block-scores.h"

#include "shared/attention/attention-rows.cpu.h"
#include "shared/attention/prefill/key-tile.cpu.h"
#include "shared/prefill-block-scores/scored-tile.h"

namespace kv {
namespace KV_ISA {
namespace {

static_assert(kKeyClusters % kStep == 0, "clusters fill steps of the micro-kernel");
static_assert(kScoredBlockKeys % kLanes == 0, "keys fill vectors");

// The clusters of all blocks.
struct Clusters {
  float* means;       // [kv_head, block, cluster, dim]
  float* logarithms;  // [kv_head, block, cluster]: of how many keys the cluster has

  static int64_t floats(const PrefillBlockScoresArguments& a) {
    return int64_t{a.kv_heads} * a.blocks * kKeyClusters * (a.head_dim + 1);
  }
  Clusters(const PrefillBlockScoresArguments& a, void* memory)
      : means(static_cast<float*>(memory)),
        logarithms(means + int64_t{a.kv_heads} * a.blocks * kKeyClusters * a.head_dim) {}
};

// The keys of one block.
struct BlockKeys {
  float* keys;        // [key, dim]
  float* transposed;  // [dim, key]; zeros behind the last key
  float* mean;        // [dim]
  int32_t dim;
  int32_t count;

  static int64_t floats(int32_t dim) { return int64_t{dim} * (2 * kScoredBlockKeys + 1); }

  template <class T>
  void load_keys(const PrefillBlockScoresArguments& a, const int32_t* blocks, int32_t first) const {
    for (int32_t i = 0; i < count; ++i) load_row(key_at<T>(a, blocks, first + i), keys + i * dim, dim, dim);
    std::memset(keys + count * dim, 0, sizeof(float) * static_cast<size_t>((kScoredBlockKeys - count) * dim));
    for (int32_t d = 0; d < dim; ++d) {
      for (int32_t i = 0; i < kScoredBlockKeys; ++i) transposed[d * kScoredBlockKeys + i] = keys[i * dim + d];
    }
  }

  void add_key(int32_t key, float* to) const {
    for (int32_t d = 0; d < dim; ++d) to[d] += keys[key * dim + d];
  }

  // Squared distances of all keys from the seed.
  void measure(const float* seed, float* distances) const {
    constexpr int kVectors = kScoredBlockKeys / kLanes;
    Vec sums[kVectors] = {};
    for (int32_t d = 0; d < dim; ++d) {
      const Vec at = splat(seed[d]);
      for (int v = 0; v < kVectors; ++v) {
        const Vec apart = load(transposed + d * kScoredBlockKeys + v * kLanes) - at;
        sums[v] += apart * apart;
      }
    }
    for (int v = 0; v < kVectors; ++v) store(distances + v * kLanes, sums[v]);
  }

  // The first of the farthest keys; the first key where all distances are NaN.
  const float* farthest(const float* distances) const {
    int32_t best = 0;
    for (int32_t i = 1; i < count; ++i) best = distances[i] > distances[best] ? i : best;
    return keys + best * dim;
  }

  void write_clusters(float* means, float* logarithms) const {
    float distances[kScoredBlockKeys];
    float nearest[kScoredBlockKeys];
    int32_t cluster_of[kScoredBlockKeys] = {};
    for (float& distance : nearest) distance = __builtin_inff();
    std::memset(mean, 0, sizeof(float) * static_cast<size_t>(dim));
    for (int32_t i = 0; i < count; ++i) add_key(i, mean);
    for (int32_t d = 0; d < dim; ++d) mean[d] /= static_cast<float>(count);
    measure(mean, distances);
    const float* seed = farthest(distances);
    for (int32_t cluster = 0; cluster < kKeyClusters; ++cluster) {
      measure(seed, distances);
      // A key that is not finite stays in the first cluster.
      for (int32_t i = 0; i < kScoredBlockKeys; ++i) {
        const bool nearer = distances[i] < nearest[i];
        nearest[i] = nearer ? distances[i] : nearest[i];
        cluster_of[i] = nearer ? cluster : cluster_of[i];
      }
      seed = farthest(nearest);
    }
    int32_t sizes[kKeyClusters] = {};
    std::memset(means, 0, sizeof(float) * static_cast<size_t>(dim) * kKeyClusters);
    for (int32_t i = 0; i < count; ++i) {
      ++sizes[cluster_of[i]];
      add_key(i, means + cluster_of[i] * dim);
    }
    for (int32_t cluster = 0; cluster < kKeyClusters; ++cluster) {
      const auto size = static_cast<float>(sizes[cluster]);
      logarithms[cluster] = size > 0 ? __builtin_logf(size) : -__builtin_inff();
      for (int32_t d = 0; size > 0 && d < dim; ++d) means[cluster * dim + d] /= size;
    }
  }
};

// The scored rows of some tiles of one query head, in whole panels. Row r is row kScoredRowStep * r of the tiles.
struct Band {
  static constexpr int32_t kTiles = 3;
  static constexpr int32_t kRows = kTiles * kScoredRowsOfTile;
  static_assert(kRows % kPanelRows == 0 && kScoredRowsOfTile % kLanes == 0, "a band has whole panels and vectors");

  const PrefillBlockScoresArguments& a;
  ScoredTile first;     // the first tile
  float* queries;       // panels of [dim, row]
  float* products;      // [cluster, row] of a panel
  float* denominators;  // [row]
  int32_t* seen;        // [row]: how many blocks it sees; 0 behind the last row
  float* logits;        // [block, row]
  int32_t rows = 0;     // scored ones that there are
  int32_t end = 0;      // of the panels that have any of them

  static int64_t floats(const PrefillBlockScoresArguments& a) {
    return int64_t{kRows} * (a.head_dim + 2 + a.blocks) + kKeyClusters * kPanelRows;
  }

  Band(const PrefillBlockScoresArguments& arguments, int64_t query_head, int32_t tile, void* memory)
      : a(arguments), first(arguments, query_head, tile) {
    queries = static_cast<float*>(memory);
    products = queries + kRows * a.head_dim;
    denominators = products + kKeyClusters * kPanelRows;
    seen = reinterpret_cast<int32_t*>(denominators + kRows);
    logits = denominators + 2 * kRows;
    const int32_t left = static_cast<int32_t>(divide_up(first.tokens - first.position, kScoredRowStep));
    rows = left < kRows ? left : kRows;
    end = static_cast<int32_t>(divide_up(rows, kPanelRows)) * kPanelRows;
    for (int32_t row = 0; row < kRows; ++row) seen[row] = row < rows ? first.seen_by(row * kScoredRowStep) : 0;
  }

  int32_t seen_by_last() const { return seen[rows - 1]; }

  template <class T>
  void load_queries() const {
    for (int32_t row = 0; row < end; ++row) {
      float* to = queries + row / kPanelRows * kPanelRows * a.head_dim + row % kPanelRows;
      const T* query = row < rows ? query_at<T>(a, first.first_row + row * kScoredRowStep, first.query_head) : nullptr;
      for (int32_t d = 0; d < a.head_dim; ++d) to[d * kPanelRows] = query == nullptr ? 0 : to_float(query[d]) * a.scale;
    }
  }

  void write_logits(const Clusters& clusters) const {
    for (int32_t block = 0; block < seen_by_last(); ++block) {
      const int64_t first_cluster = (first.kv_head * a.blocks + block) * kKeyClusters;
      const float* means = clusters.means + first_cluster * a.head_dim;
      const float* logarithms = clusters.logarithms + first_cluster;
      for (int32_t panel = 0; panel < end; panel += kPanelRows) {
        for (int32_t cluster = 0; cluster < kKeyClusters; cluster += kStep) {
          multiply<false>(means + cluster * a.head_dim, a.head_dim, 1, queries + panel * a.head_dim, a.head_dim, nullptr,
                          products + cluster * kPanelRows);
        }
        for (int32_t row = 0; row < kPanelRows; row += kLanes) {
          // The first cluster has what is not finite, and `maximum` keeps that.
          Vec best = load(products + row) + logarithms[0];
          for (int32_t cluster = 1; cluster < kKeyClusters; ++cluster) {
            best = maximum(best, load(products + cluster * kPanelRows + row) + logarithms[cluster]);
          }
          VecInt visible;
          std::memcpy(&visible, seen + panel + row, sizeof visible);
          store(logits + int64_t{block} * kRows + panel + row, visible > block ? best : splat(-__builtin_inff()));
        }
      }
    }
  }

  // The logarithms of the rows' denominators; 0 behind the last row.
  void write_denominators() const {
    for (int32_t row = 0; row < end; row += kLanes) {
      Vec peak = splat(kLowestScore);
      for (int32_t block = 0; block < seen_by_last(); ++block) peak = maximum(peak, load(logits + int64_t{block} * kRows + row));
      Vec sum = {};
      for (int32_t block = 0; block < seen_by_last(); ++block) sum += exponential(load(logits + int64_t{block} * kRows + row) - peak);
      for (int32_t lane = 0; lane < kLanes; ++lane) {
        denominators[row + lane] = sum[lane] == 0 ? 0 : peak[lane] + __builtin_logf(sum[lane]);
      }
    }
  }

  void write_scores() const {
    for (int32_t tile = 0; tile * kScoredRowsOfTile < rows; ++tile) {
      float* scores = first.scores + int64_t{tile} * a.blocks;
      for (int32_t block = 0; block < a.blocks; ++block) {
        scores[block] = block < seen_by_last() ? mean_share(block, tile * kScoredRowsOfTile) : -__builtin_inff();
      }
    }
  }

 private:
  // The logarithm of the mean share of a block over the rows of a tile.
  float mean_share(int32_t block, int32_t begin) const {
    const auto share = [&](int32_t row) { return load(logits + int64_t{block} * kRows + row) - load(denominators + row); };
    const int32_t tile_end = begin + kScoredRowsOfTile < end ? begin + kScoredRowsOfTile : end;
    Vec peaks = splat(kLowestScore);
    for (int32_t row = begin; row < tile_end; row += kLanes) peaks = maximum(peaks, share(row));
    const float peak = horizontal_maximum(peaks);
    Vec sum = {};
    for (int32_t row = begin; row < tile_end; row += kLanes) sum += exponential(share(row) - peak);
    const int32_t count = rows < begin + kScoredRowsOfTile ? rows - begin : kScoredRowsOfTile;
    return peak + __builtin_logf(horizontal_sum(sum) / static_cast<float>(count));
  }
};

}  // namespace

void clustered_block_scores(const ClusteredBlockScoresArguments& a, Workers& workers) {
  const Clusters clusters(a, workers.shared_scratch(static_cast<size_t>(Clusters::floats(a)) * sizeof(float)));
  workers.for_each(static_cast<size_t>(int64_t{a.kv_heads} * a.blocks), [&](size_t index, int worker) {
    const int64_t block = static_cast<int64_t>(index);
    const int64_t cache_head = int64_t{a.slots[0]} * a.kv_heads + block / a.blocks;
    const auto first = static_cast<int32_t>(block % a.blocks) * kScoredBlockKeys;
    const int32_t left = a.key_counts[cache_head] - first;
    auto* memory = static_cast<float*>(workers.scratch(worker, static_cast<size_t>(BlockKeys::floats(a.head_dim)) * sizeof(float)));
    const int64_t block_floats = int64_t{a.head_dim} * kScoredBlockKeys;
    const BlockKeys keys{memory, memory + block_floats, memory + 2 * block_floats, a.head_dim,
                         left < kScoredBlockKeys ? left : kScoredBlockKeys};
    with_float_type(a.cache_dtype, [&](auto element) {
      keys.load_keys<decltype(element)>(a, a.block_table + cache_head * a.table_width, first);
    });
    keys.write_clusters(clusters.means + block * kKeyClusters * a.head_dim, clusters.logarithms + block * kKeyClusters);
  });
  const int64_t bands = divide_up(a.tiles, Band::kTiles);
  workers.for_each(static_cast<size_t>(bands * a.query_heads), [&](size_t index, int worker) {
    // The last tiles see the most, so they come first.
    const auto tile = static_cast<int32_t>(bands - 1 - static_cast<int64_t>(index) / a.query_heads) * Band::kTiles;
    const Band band(a, static_cast<int64_t>(index) % a.query_heads, tile,
                    workers.scratch(worker, static_cast<size_t>(Band::floats(a)) * sizeof(float)));
    with_float_type(a.query_dtype, [&](auto element) { band.load_queries<decltype(element)>(); });
    band.write_logits(clusters);
    band.write_denominators();
    band.write_scores();
  });
}

}  // namespace KV_ISA
}  // namespace kv
