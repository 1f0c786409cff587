// Prunes blocks of keys or values to 2:4 and compresses them, in one call (HieraSparse, equations 2a to 2d and
// section III-B). Each entry of `prunings` has a range of blocks. For the dense blocks of the range:
//   loss = sum over the block of |x| of the elements that are not kept (2c)
//   the `count` blocks of least loss become sparse; of equal losses the lower block comes first (2d)
// Of each four neighbours, the two elements of largest |x| are kept; of equal |x| the lower index comes first (2a,
// 2b). With an element mask, the mask says which elements are kept. The caller may give the losses instead of (2c).
//
// Elements are compared by the bits of |x|, so NaN is largest, then infinity. A loss is summed in f32 or wider, in
// any order. Losses are compared by their bits without the sign, so NaN comes last. If all dense blocks of a range
// are pruned, no loss is computed.
//
// The device decides which blocks become sparse. The host decides which ids they get, so that it knows without
// reading back which blocks are then in use. In ascending block order the sparse blocks get ids[first_id ..). Dense
// ids from `freed_from` on become free. A block that stays dense and has such an id must move. After all compression,
// it moves to the dense id of a block that became sparse, below `freed_from`. Both kinds of block are taken in
// ascending block order. The map is updated.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/blocks-24/blocks-24.h"
#include "shared/paged/paged-faults.h"

namespace kv {

// What happens to one kv head of one slot. Six words in device memory.
struct Pruning {
  int32_t table_row;    // slot * kv_heads + kv_head; a row may occur only once in a call
  int32_t first_block;  // the range, in blocks of the sequence
  int32_t end_block;    // after the last block
  int32_t count;        // how many of its dense blocks become sparse
  int32_t first_id;     // index in `ids`
  int32_t freed_from;   // exactly `count` dense ids of the range are this or larger
};

struct Compress24Arguments {
  KvOperand operand = KvOperand::keys;
  DType dtype = DType::f16;  // or bf16
  int32_t head_dim = 0;      // 64 or 128

  void* dense = nullptr;  // [dense_block, block_token 64, dim]
  int32_t dense_block_count = 0;
  void* non_zeros = nullptr;     // [sparse_block, 32 * dim]
  uint32_t* metadata = nullptr;  // [sparse_block, 2 * dim]
  int32_t sparse_block_count = 0;

  int32_t* table = nullptr;  // [slot, kv_head, table_width]: the operand's index map
  int32_t table_width = 0;
  int32_t kv_heads = 0;
  int32_t slot_count = 0;

  const Pruning* prunings = nullptr;  // [pruning]
  int32_t pruning_count = 0;
  int32_t most_blocks = 0;  // the largest range: at least end_block - first_block of each
  const int32_t* ids = nullptr;  // [id_count]: ids of free sparse blocks
  int32_t id_count = 0;

  // [kv_head, block_token 64, dim]. An element is kept if its byte is not zero: at most two of four neighbours. Null
  // means that magnitudes decide. Elements that are not kept count for the loss.
  const uint8_t* element_mask = nullptr;

  // [slot, kv_head, table_width]: the loss of each block of a sequence. Any number; NaN comes last. Null means (2c).
  const float* block_loss = nullptr;
};

// A 32-bit number in the order of the given losses. Static, so that each instruction set has its own copy.
static constexpr uint32_t rank_of_given_loss(float loss, uint32_t bits) {
  if (loss != loss) return 0xfffffffeu;
  if (loss == 0.0f) return 0x80000000u;
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

enum class Compress24Fault : int32_t {
  row_out_of_range = static_cast<int32_t>(PagedFault::operations_own),  // value: the row of the index map
  pruning_out_of_range,  // value: what is asked for; limit: what exists
};

std::string describe_compress_24_fault(const Fault& fault);

// Refuses other dtypes and head sizes (capability). Refuses maps, ranges and ids that are out of range, and a `count`
// that the range does not have (invalid_value). Both happen before anything is written.
Status compress_24(const Compress24Arguments& arguments, ExecutionContext& context);

}  // namespace kv
