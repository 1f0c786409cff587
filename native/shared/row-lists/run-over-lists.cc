#include "shared/row-lists/run-over-lists.h"

#include <string>

namespace kv {
namespace {

std::string place_of(const RowLists& lists, int64_t list) {
  return "row " + std::to_string(list / lists.kv_heads) + ", kv head " + std::to_string(list % lists.kv_heads);
}

}  // namespace

Status run_over_lists(const RowLists& lists, HostContext& host,
                      const std::function<void(int64_t* list_outside, ExecutionContext& context)>& run) {
  for (int64_t list = 0; list < lists.lists(); ++list) {
    if (lists.counts[list] >= 0 && lists.counts[list] <= lists.capacity) continue;
    return Status::failure(StatusCode::invalid_value, place_of(lists, list) + " has a list of " +
                                                          std::to_string(lists.counts[list]) +
                                                          " values, and there is room for " + std::to_string(lists.capacity));
  }
  int64_t outside = -1;
  ExecutionContext context{host.workers};
  context.isa = host.isa;
  run(&outside, context);
  if (outside < 0) return Status::success();
  return Status::failure(StatusCode::invalid_value, place_of(lists, outside) + " lists a value that is not among the " +
                                                        std::to_string(lists.pool_rows) + " rows of the pool");
}

}  // namespace kv
