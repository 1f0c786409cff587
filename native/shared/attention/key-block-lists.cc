#include "shared/attention/key-block-lists.h"

namespace kv {
namespace {

std::string text(int64_t number) { return std::to_string(number); }

std::string bad_list(int64_t head, int64_t tile, int64_t limit) {
  return "the list of query head " + text(head) + ", query tile " + text(tile) +
         " counts more key blocks than it has room for, or does not ascend within the first " + text(limit) +
         ", which are all that its rows see";
}

std::string too_few_tiles(int64_t tiles, int64_t listed) {
  return "the batch's rows have " + text(tiles) + " query tiles, but there are lists for " + text(listed);
}

bool is_list(const int32_t* blocks, int32_t count, int32_t capacity, int32_t limit) {
  if (count < 0 || count > capacity) return false;
  int32_t previous = -1;
  for (int32_t i = 0; i < count; ++i) {
    if (blocks[i] <= previous || blocks[i] >= limit) return false;
    previous = blocks[i];
  }
  return true;
}

}  // namespace

Status validate_key_block_lists(const PagedAttentionArguments& a, const KeyBlockLists& lists) {
  int64_t tiles = 0;
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    tiles += query_tiles_of(a.query_start[entry + 1] - a.query_start[entry]);
  }
  if (tiles > lists.query_tiles) {
    return Status::failure(StatusCode::invalid_value, too_few_tiles(tiles, lists.query_tiles));
  }
  int64_t tile = 0;
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    const int32_t queries = a.query_start[entry + 1] - a.query_start[entry];
    for (int32_t first = 0; first < queries; first += kListedQueryTile, ++tile) {
      for (int32_t head = 0; head < a.query_heads; ++head) {
        const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head / (a.query_heads / a.kv_heads);
        const int32_t limit = key_block_limit(a.causal, a.key_counts[cache_head], queries, first);
        const int64_t list = lists.list(head, tile);
        if (!is_list(lists.blocks_of(list), lists.counts[list], lists.capacity, limit)) {
          return Status::failure(StatusCode::invalid_value, bad_list(head, tile, limit));
        }
      }
    }
  }
  return Status::success();
}

std::string describe_key_block_list_fault(const Fault& fault) {
  const bool list = fault.code == static_cast<int32_t>(KeyBlockListFault::list);
  return list ? bad_list(fault.value, fault.row, fault.limit) : too_few_tiles(fault.value, fault.limit);
}

}  // namespace kv
