// Sums the values that lists name, on the host (HCAttention Eq. 5), for each row and query head:
//   output = sum_i weights[i] values[value_rows[i]].
// It is a host part of its stream: all its memory is the host's. A row of values is read once for all query heads of its
// kv head. Of long lists a CUDA device sums the last pieces at the same time, over a link that the host's own way to
// its memory does not share. Sums have the same bits wherever they are made.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/fault.h"
#include "runtime/host-part.h"
#include "runtime/status.h"
#include "shared/row-lists/row-lists.h"

namespace kv {

struct WeightedValuesArguments : RowLists {
  const float* weights = nullptr;  // [row, kv_head, capacity, group_head]
  const void* values = nullptr;    // [pool_rows, dim] contiguous
  DType dtype = DType::f32;        // or f16, bf16, i8, whose codes count as whole numbers
  int32_t head_dim = 0;
  float* output = nullptr;  // [row, query_head, dim] contiguous; zeros without tokens
};

// Rows that are summed in their order; the sums of pieces are then added in theirs.
constexpr int32_t kPieceRows = 512;
// Of lists of fewer pieces, the device's would cost more than they save.
constexpr int32_t kLeastPieces = 24;

// The pieces that a device sums of a list, if it has a share: about as many as come over the link while the host reads
// the others.
constexpr int32_t device_pieces(int32_t count) {
  const int32_t pieces = (count + kPieceRows - 1) / kPieceRows;
  return pieces < kLeastPieces ? 0 : 3 * pieces / 8;
}

// The rows in front of those.
constexpr int32_t host_rows(int32_t count) {
  const int32_t pieces = (count + kPieceRows - 1) / kPieceRows;
  return device_pieces(count) == 0 ? count : (pieces - device_pieces(count)) * kPieceRows;
}

// What a device shares with the host: `host_part` sums the first host_rows() of each list.
struct SharedValuesArguments {
  WeightedValuesArguments a;
  HostPart host_part;
};

enum class WeightedValuesFault : int32_t {
  row_outside = 1,  // value: the row; row: the list; limit: rows of the pool
};

std::string describe_weighted_values_fault(const Fault& fault);

// Counts and rows out of range end in invalid_value when the host part runs.
Status weighted_values(const WeightedValuesArguments& arguments, ExecutionContext& context);

}  // namespace kv
