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

// The score of rank `rank`, where rank 1 is the largest. It counts scores by their leading bits, then by the next
// bits.
float ranked(const float* scores, int64_t count, int64_t rank, uint32_t* bins) {
  uint32_t order = 0;
  for (int shift = 32; shift > 0;) {
    const int bits = shift < kOrderBits ? shift : kOrderBits;
    const int above = shift;
    shift -= bits;
    std::memset(bins, 0, kOrderBins * sizeof(uint32_t));
    for (int64_t i = 0; i < count; ++i) {
      uint32_t word;
      std::memcpy(&word, scores + i, sizeof word);
      const uint32_t other = order_of(word);
      const bool counts = above == 32 || other >> above == order >> above;
      if (counts) ++bins[other >> shift & ((1u << bits) - 1)];
    }
    uint32_t bin = (1u << bits) - 1;
    for (; bin > 0 && bins[bin] < rank; --bin) rank -= bins[bin];
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
  int64_t all = 0;
  for (int32_t tile = 0; tile < a.tiles(); ++tile) all += tiles.seen(tile);
  const int64_t maxima = int64_t{tiles.lag_runs()} + tiles.blocks() + tiles.row_runs();
  const size_t bytes = static_cast<size_t>(maxima + all + kOrderBins) * sizeof(float);
  workers.for_each(static_cast<size_t>(a.query_heads), [&](size_t index, int worker) {
    const int64_t head = static_cast<int64_t>(index);
    float* memory = static_cast<float*>(workers.scratch(worker, bytes));
    const BlockMaxima of_head = {memory, memory + tiles.lag_runs(), memory + tiles.lag_runs() + tiles.blocks()};
    float* scores = memory + maxima;
    find_maxima(tiles, head, of_head);
    int64_t scored = 0;
    for (int32_t tile = 0; tile < a.tiles(); ++tile) {
      for (int32_t block = 0; block < tiles.seen(tile); ++block) scores[scored++] = tiles.score(of_head, tile, block);
    }
    float threshold = a.threshold;
    if (a.by_budget) {
      const double share = a.budget * static_cast<double>(all);
      const int64_t whole = static_cast<int64_t>(share);
      const int64_t wanted = static_cast<double>(whole) < share ? whole + 1 : whole;
      threshold = ranked(scores, all, wanted > 1 ? wanted : 1, reinterpret_cast<uint32_t*>(scores + all));
    }
    const float* score = scores;
    for (int32_t tile = 0; tile < a.tiles(); ++tile) {
      const int64_t list = head * a.tiles() + tile;
      int32_t taken = 0;
      for (int32_t block = 0; block < tiles.seen(tile); ++block) {
        if (!(*score++ < threshold)) a.key_blocks[list * a.capacity + taken++] = block;
      }
      a.counts[list] = taken;
    }
  });
}

}  // namespace KV_ISA
}  // namespace kv
