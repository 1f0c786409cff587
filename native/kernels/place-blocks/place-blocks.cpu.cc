#include "kernels/place-blocks/place-blocks.h"

#include "kernels/block-metadata/block-metadata.h"
#include "runtime/workers.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

bool holds_nothing(const PlaceBlocksArguments& a, int32_t place) {
  const int32_t block = a.holds[place];
  return block < 0 || block >= a.block_count || a.where[block] != a.first_cached + place;
}

// Calls use(source, host block) for each that the cache lacks: the first of every kv head, then the next.
template <class Use>
void for_each_lacking(const PlaceBlocksArguments& a, int32_t entry, Use use) {
  const int32_t rows = a.query_start[entry + 1] - a.query_start[entry];
  for (int32_t i = 0; rows > 0 && i <= rows / a.block_tokens && i < a.table_width; ++i) {
    for (int32_t head = 0; head < a.kv_heads; ++head) {
      const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
      const FilledBlocks filled(a.key_counts[cache_head], rows, a.block_tokens);
      const int32_t index = filled.first + i;
      if (index < a.sink_blocks || index >= filled.end) continue;
      const int64_t at = cache_head * a.table_width + index;
      if (!a.is_cached(a.where[a.block_table[at]])) use(a.source_table[at], a.block_table[at]);
    }
  }
}

}  // namespace

void place_blocks(const PlaceBlocksArguments& a, Workers&) {
  int32_t place = 0, loads = 0;
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    for_each_lacking(a, entry, [&](int32_t source, int32_t block) {
      while (place < a.cached && !holds_nothing(a, place)) ++place;
      if (place == a.cached) return;
      a.holds[place] = block;
      a.used_at[place] = 0;
      a.where[block] = a.first_cached + place;
      a.loads[loads] = source;
      a.loads[a.most_loads + loads++] = a.first_cached + place++;
    });
  }
  a.load_count[0] = loads;
}

}  // namespace KV_ISA
}  // namespace kv
