// Prunes blocks of keys or values to 2:4 and compresses them, in one call (HieraSparse, equations 2a to 2d and
// section III-B). For each entry of `prunings`, among the blocks of its range that are dense:
//   loss = sum over the block of |x| of the elements that are not kept                                      (2c)
//   the `count` blocks of least loss become sparse; equal losses: the lower block first                     (2d)
// An element is kept when it is one of the two of largest |x| among its four neighbours, equal |x|: the lower
// index first (2a, 2b); or, with an element mask, when the mask says so.
//
// The caller may give the losses in place of 2c.
//
// |x| is compared by its bits, so that NaN is largest, then infinity. A loss is summed in f32 or wider, in any order;
// losses compare by their bits without the sign, so that NaN comes last. When all dense blocks of a range are
// pruned, no loss needs to be computed.
//
// Which blocks become sparse is decided on the device, where they go by the host, which so knows without reading back
// what is in use afterwards: in ascending block order they take the sparse blocks ids[first_id ..), and dense ids
// from `freed_from` on become free. A block of the range that stays dense in one of these moves, after everything
// was compressed, into the dense id of a block that became sparse and is below `freed_from`; both in ascending
// block order. The map is updated.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/blocks-24/blocks-24.h"
#include "shared/paged/paged-faults.h"

namespace kv {

// What happens to one kv head of one slot; six words in device memory.
struct Pruning {
  int32_t table_row;    // slot * kv_heads + kv_head; each at most once in a call
  int32_t first_block;  // the range, in blocks of the sequence
  int32_t end_block;    // past its last
  int32_t count;        // how many of its dense blocks become sparse
  int32_t first_id;     // of `ids`
  int32_t freed_from;   // exactly `count` of the range's dense ids are this or larger
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
  int32_t most_blocks = 0;  // of any range: at least end_block - first_block
  const int32_t* ids = nullptr;  // [id_count]: free sparse blocks
  int32_t id_count = 0;

  // [kv_head, block_token 64, dim], not zero where an element is kept: at most two of four neighbours. Null: by
  // magnitude. Elements that are not kept count for the loss.
  const uint8_t* element_mask = nullptr;

  // [slot, kv_head, table_width]: the loss of each block of a sequence, any number; NaN comes last. Null: by (2c).
  const float* block_loss = nullptr;
};

// A number of 32 bits that compares as given losses do. Static: each instruction set has its own.
static constexpr uint32_t rank_of_given_loss(float loss, uint32_t bits) {
  if (loss != loss) return 0xfffffffeu;
  if (loss == 0.0f) return 0x80000000u;
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

enum class Compress24Fault : int32_t {
  row_out_of_range = static_cast<int32_t>(PagedFault::operations_own),  // value: the row of the index map
  pruning_out_of_range,  // value: what is asked for; limit: what there is
};

std::string describe_compress_24_fault(const Fault& fault);

// Refuses other dtypes and head sizes (capability); maps, ranges and ids that lead outside, or a `count` that the range
// does not have (invalid_value), before it writes anything.
Status compress_24(const Compress24Arguments& arguments, ExecutionContext& context);

}  // namespace kv
