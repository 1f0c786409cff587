// Arguments of operations over lists of rows in host memory.
#pragma once

#include "bindings/operation-call.h"
#include "shared/row-lists/row-lists.h"

namespace kv {

// Throws a JavaScript error when a GPU's stream is given tensors that are not all on the host.
inline void expect_on_host(const OperationCall& call, const Napi::CallbackInfo& info, bool on_host) {
  if (on_host || call.stream().device()->kind() == DeviceKind::cpu) return;
  throw make_error(info.Env(), "KV_DEVICE",
                   "a tensor is in the device's memory, and the host sums; give tensors of device.hostTensor() or of a "
                   "host pool");
}

// valueRows [token, kvHead, chosen], counts [token, kvHead], values [valueBlock, blockToken, dim]
inline void read_row_lists(const TensorArgument& rows, const TensorArgument& counts, const TensorArgument& values, RowLists& lists) {
  lists.value_rows = rows.as<int32_t>();
  lists.counts = counts.as<int32_t>();
  lists.rows = static_cast<int32_t>(rows.extent(0));
  lists.kv_heads = static_cast<int32_t>(rows.extent(1));
  lists.capacity = static_cast<int32_t>(rows.extent(2));
  lists.pool_rows = values.extent(0) * values.extent(1);
}

}  // namespace kv
