#include "shared/prefill-block-scores/prefill-block-scores.h"

namespace kv {
namespace {

std::string miscounts(int64_t head, int64_t count, int64_t wanted) {
  if (head < 0) {
    return "the entry has " + std::to_string(count) + " rows, but there are scores of " + std::to_string(wanted) +
           " tiles of 128";
  }
  return "kv head " + std::to_string(head) + " holds " + std::to_string(count) + " keys, but there are scores of " +
         std::to_string(wanted) + " blocks of 64";
}

bool fills(int64_t count, int32_t parts, int32_t of_part) { return (count + of_part - 1) / of_part == parts; }

}  // namespace

std::string describe_block_scores_fault(const Fault& fault) {
  const bool counts = fault.code == static_cast<int32_t>(BlockScoresFault::other_count);
  return counts ? miscounts(fault.row, fault.value, fault.limit) : describe_paged_fault(fault);
}

Status validate_sizes(const PrefillBlockScoresArguments& a) {
  const Status status = validate_sizes(static_cast<const PromptQueries&>(a));
  if (!status.ok()) return status;
  if (a.tiles <= 0 || a.blocks <= 0) return invalid("there must be scores of a tile and a block or more");
  return Status::success();
}

Status validate_counts(const PrefillBlockScoresArguments& a) {
  const int32_t rows = a.query_start[1] - a.query_start[0];
  if (!fills(rows, a.tiles, kScoredTileRows)) return invalid(miscounts(-1, rows, a.tiles));
  for (int32_t head = 0; head < a.kv_heads; ++head) {
    const int32_t count = a.key_counts[int64_t{a.slots[0]} * a.kv_heads + head];
    if (!fills(count, a.blocks, kScoredBlockKeys) || count < rows) return invalid(miscounts(head, count, a.blocks));
  }
  return Status::success();
}

}  // namespace kv
