// Runs a CPU kernel over lists as a host part.
#pragma once

#include <functional>

#include "runtime/execution.h"
#include "runtime/host-part.h"
#include "runtime/status.h"
#include "shared/row-lists/row-lists.h"

namespace kv {

// `run` gets where to say `list_outside`. Counts and rows out of range are an invalid_value.
Status run_over_lists(const RowLists& lists, HostContext& host,
                      const std::function<void(int64_t* list_outside, ExecutionContext& context)>& run);

}  // namespace kv
