// Sums the values that lists name, on the host (HCAttention Eq. 5), for each row and query head:
//   output = sum_i weights[i] values[value_rows[i]].
// It is a host part of its stream: values and output are in the host's memory, and lists are, or are sent there. A row of
// values is read once for all query heads of its kv head. Of long lists a CUDA device sums the last pieces at the same
// time, over a link that the host's own way to its memory does not share. Sums have the same bits wherever they are made.
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

// Room in the host's memory, of the same shapes, for lists that are in a GPU's.
struct ListRoom {
  int32_t* value_rows = nullptr;
  int32_t* counts = nullptr;
  float* weights = nullptr;
};

struct WeightedValuesArguments : RowLists {
  const float* weights = nullptr;  // [row, kv_head, capacity, group_head]
  const void* values = nullptr;    // [pool_rows, dim] contiguous
  DType dtype = DType::f32;        // or f16, bf16, i8, whose codes count as whole numbers
  int32_t head_dim = 0;
  float* output = nullptr;  // [row, query_head, dim] contiguous; zeros without tokens
  ListRoom room;            // null where the host reads the lists as they are
};

// Rows that are summed in their order; the sums of pieces are then added in theirs.
constexpr int32_t kPieceRows = 512;
// Of lists of fewer pieces, the device's would cost more than they save.
constexpr int32_t kLeastPieces = 24;

// The pieces that a device sums of a list, if it has a share: about as many as come over the link while the host reads
// the others.
constexpr int32_t device_pieces(int32_t count, DType dtype) {
  const int32_t pieces = (count + kPieceRows - 1) / kPieceRows;
  return pieces < kLeastPieces ? 0 : (dtype == DType::i8 ? 8 : 7) * pieces / 16;
}

// The rows in front of those.
constexpr int32_t host_rows(int32_t count, DType dtype) {
  const int32_t pieces = (count + kPieceRows - 1) / kPieceRows;
  const int32_t own = device_pieces(count, dtype);
  return own == 0 ? count : (pieces - own) * kPieceRows;
}

// What a device does for the host: it sends lists that come with room, and sums what host_rows() leaves of each.
struct SharedValuesArguments {
  WeightedValuesArguments a;
  HostPart host_part;
  bool is_shared;  // if not, `host_part` sums all of each list
};

enum class WeightedValuesFault : int32_t {
  row_outside = 1,  // value: the row; row: the list; limit: rows of the pool
};

std::string describe_weighted_values_fault(const Fault& fault);

// Counts and rows out of range end in invalid_value when the host part runs.
Status weighted_values(const WeightedValuesArguments& arguments, ExecutionContext& context);

}  // namespace kv
