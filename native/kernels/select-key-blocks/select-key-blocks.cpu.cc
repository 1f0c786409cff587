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

void find_maxima(const TileBlocks& tiles, int64_t head, const BlockMaxima& maxima) {
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
void for_each_score(const TileBlocks& tiles, const BlockMaxima& maxima, Body&& body) {
  for (int32_t tile = 0; tile < tiles.a.tiles(); ++tile) {
    for (int32_t block = 0; block < tiles.seen(tile); ++block) body(tile, block, tiles.score(maxima, tile, block));
  }
}

// The score of rank `rank` among those of all heads, where rank 1 is the largest. It counts scores by their leading
// bits, then by the next bits. `bins` has kOrderBins for each head; `maxima_of` finds those of a head.
template <class MaximaOf>
float ranked(const TileBlocks& tiles, MaximaOf&& maxima_of, int64_t rank, uint32_t* bins, Workers& workers) {
  const int64_t heads = tiles.a.query_heads;
  uint32_t order = 0;
  for (int shift = 32; shift > 0;) {
    const int bits = shift < kOrderBits ? shift : kOrderBits;
    const int above = shift;
    shift -= bits;
    workers.for_each(static_cast<size_t>(heads), [&](size_t head, int) {
      uint32_t* of_head = bins + head * kOrderBins;
      std::memset(of_head, 0, kOrderBins * sizeof(uint32_t));
      for_each_score(tiles, maxima_of(static_cast<int64_t>(head)), [&](int32_t, int32_t, float score) {
        uint32_t word;
        std::memcpy(&word, &score, sizeof word);
        const uint32_t other = order_of(word);
        const bool counts = above == 32 || other >> above == order >> above;
        if (counts) ++of_head[other >> shift & ((1u << bits) - 1)];
      });
    });
    const auto counted = [&](uint32_t bin) {
      int64_t count = 0;
      for (int64_t head = 0; head < heads; ++head) count += bins[head * kOrderBins + bin];
      return count;
    };
    uint32_t bin = (1u << bits) - 1;
    for (int64_t count = counted(bin); bin > 0 && count < rank; count = counted(bin)) {
      rank -= count;
      --bin;
    }
    order |= bin << shift;
  }
  const uint32_t word = bits_of_order(order);
  float score;
  std::memcpy(&score, &word, sizeof score);
  return score;
}

}  // namespace

void select_key_blocks(const SelectKeyBlocksArguments& a, Workers& workers) {
  const TileBlocks tiles{a};
  const int64_t of_head = int64_t{tiles.lag_runs()} + tiles.blocks() + tiles.row_runs();
  const size_t heads = static_cast<size_t>(a.query_heads);
  float* memory = static_cast<float*>(workers.shared_scratch(heads * (static_cast<size_t>(of_head) + kOrderBins) * sizeof(float)));
  const auto maxima_of = [&](int64_t head) {
    float* first = memory + head * of_head;
    return BlockMaxima{first, first + tiles.lag_runs(), first + tiles.lag_runs() + tiles.blocks()};
  };
  workers.for_each(heads, [&](size_t head, int) {
    find_maxima(tiles, static_cast<int64_t>(head), maxima_of(static_cast<int64_t>(head)));
  });
  auto* bins = reinterpret_cast<uint32_t*>(memory + a.query_heads * of_head);
  const float threshold = a.by_budget ? ranked(tiles, maxima_of, tiles.budgeted(), bins, workers) : a.threshold;
  workers.for_each(heads, [&](size_t head, int) {
    const int64_t first_list = static_cast<int64_t>(head) * a.tiles();
    for (int32_t tile = 0; tile < a.tiles(); ++tile) a.counts[first_list + tile] = 0;
    for_each_score(tiles, maxima_of(static_cast<int64_t>(head)), [&](int32_t tile, int32_t block, float score) {
      const int64_t list = first_list + tile;
      if (!(score < threshold)) a.key_blocks[list * a.capacity + a.counts[list]++] = block;
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
