#include "kernels/select-key-blocks/select-key-blocks.h"

#include "kernels/select-key-blocks/select-key-blocks-score.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

float largest(const float* values, int64_t first, int64_t end, int64_t length) {
  float most = -__builtin_inff();
  for (int64_t i = first > 0 ? first : 0; i < end && i < length; ++i) most = larger(most, values[i]);
  return most;
}

void find_maxima(const TileBlocks& tiles, int64_t head, const HeadEstimate& maxima) {
  const SelectKeyBlocksArguments& a = tiles.a;
  constexpr int64_t kRun = kSelectedBlockTokens;
  const float* vertical = a.vertical + head * a.tokens;
  const float* horizontal = a.horizontal + head * a.rows;
  for (int32_t run = 0; run < tiles.lag_runs(); ++run) {
    const int64_t first = tiles.first_lag(run);
    maxima.lags[run] = largest(a.slash + head * a.tokens, first, first + kRun, a.tokens);
  }
  for (int32_t i = 0; i < tiles.blocks(); ++i) maxima.blocks[i] = largest(vertical, i * kRun, (i + 1) * kRun, a.tokens);
  for (int32_t i = 0; i < tiles.row_runs(); ++i) maxima.rows[i] = largest(horizontal, i * kRun, (i + 1) * kRun, a.rows);
}

// Calls body(tile, block, score) for every block that a tile of one head sees.
template <class Body>
void for_each_score(const TileBlocks& tiles, const HeadEstimate& estimate, Body&& body) {
  for (int32_t tile = 0; tile < tiles.a.tiles(); ++tile) {
    for (int32_t block = 0; block < tiles.seen(tile); ++block) body(tile, block, tiles.score(estimate, tile, block));
  }
}

// Of each head, from where on its blocks are within the budget. Scores of all heads are counted by their leading bits,
// then by the next bits. `bins` has kOrderBins for each head.
void find_cuts(const TileBlocks& tiles, float* maxima, uint32_t* bins, Cut* cuts, Workers& workers) {
  const int64_t heads = tiles.a.query_heads;
  int64_t rank = tiles.budgeted();
  uint32_t order = 0;
  uint32_t bin = 0;
  for (int shift = 32; shift > 0;) {
    const int bits = shift < kOrderBits ? shift : kOrderBits;
    const int above = shift;
    shift -= bits;
    workers.for_each(static_cast<size_t>(heads), [&](size_t head, int) {
      uint32_t* of_head = bins + head * kOrderBins;
      std::memset(of_head, 0, kOrderBins * sizeof(uint32_t));
      for_each_score(tiles, tiles.estimate_of(static_cast<int64_t>(head), maxima), [&](int32_t, int32_t, float score) {
        uint32_t word;
        std::memcpy(&word, &score, sizeof word);
        const uint32_t other = order_of(word);
        const bool counts = above == 32 || other >> above == order >> above;
        if (counts) ++of_head[other >> shift & ((1u << bits) - 1)];
      });
    });
    const auto counted = [&](uint32_t of_bin) {
      int64_t count = 0;
      for (int64_t head = 0; head < heads; ++head) count += bins[head * kOrderBins + of_bin];
      return count;
    };
    bin = (1u << bits) - 1;
    for (int64_t count = counted(bin); bin > 0 && count < rank; count = counted(bin)) {
      rank -= count;
      --bin;
    }
    order |= bin << shift;
  }
  const uint32_t word = bits_of_order(order);
  float score;
  std::memcpy(&score, &word, sizeof score);
  for (int64_t head = 0; head < heads; ++head) {
    cuts[head] = {score, score == __builtin_inff() ? kAllTies : rank > 0 ? rank : 0};
    rank -= bins[head * kOrderBins + bin];
  }
}

}  // namespace

void select_key_blocks(const SelectKeyBlocksArguments& a, Workers& workers) {
  const TileBlocks tiles{a};
  const size_t heads = static_cast<size_t>(a.query_heads);
  const size_t of_head = sizeof(Cut) + kOrderBins * sizeof(uint32_t) + static_cast<size_t>(tiles.maxima()) * sizeof(float);
  auto* cuts = static_cast<Cut*>(workers.shared_scratch(heads * of_head));
  auto* bins = reinterpret_cast<uint32_t*>(cuts + heads);
  auto* maxima = reinterpret_cast<float*>(bins + heads * kOrderBins);
  if (a.scores == nullptr) {
    workers.for_each(heads, [&](size_t head, int) {
      find_maxima(tiles, static_cast<int64_t>(head), tiles.estimate_of(static_cast<int64_t>(head), maxima));
    });
  }
  if (a.by_budget) find_cuts(tiles, maxima, bins, cuts, workers);
  workers.for_each(heads, [&](size_t head, int) {
    const int64_t first_list = static_cast<int64_t>(head) * a.tiles();
    Cut cut = a.by_budget ? cuts[head] : Cut{a.threshold, kAllTies};
    for (int32_t tile = 0; tile < a.tiles(); ++tile) a.counts[first_list + tile] = 0;
    for_each_score(tiles, tiles.estimate_of(static_cast<int64_t>(head), maxima), [&](int32_t tile, int32_t block, float score) {
      const int64_t list = first_list + tile;
      const bool tie = score == cut.score && cut.ties > 0;
      if (tie) --cut.ties;
      if (tie || score > cut.score) a.key_blocks[list * a.capacity + a.counts[list]++] = block;
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
