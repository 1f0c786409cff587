#include "kernels/forget-blocks/forget-blocks.h"

#include "runtime/workers.h"

namespace kv {
namespace KV_ISA {

void forget_blocks(const ForgetBlocksArguments& a, Workers&) {
  for (int64_t head = 0; head < int64_t{a.slot_count} * a.kv_heads; ++head) {
    for (int64_t i = 0; i * a.block_tokens < a.key_counts[head]; ++i) a.where[a.block_table[head * a.table_width + i]] = -1;
  }
}

}  // namespace KV_ISA
}  // namespace kv
