#include "kernels/copy-blocks/copy-blocks.h"

#include <cstring>

#include "runtime/workers.h"

namespace kv {
namespace KV_ISA {

void copy_blocks(const CopyBlocksArguments& a, Workers& workers) {
  char* pool = static_cast<char*>(a.pool);
  workers.for_each(static_cast<size_t>(a.copies), [&](size_t i, int) {
    std::memcpy(pool + a.to[i] * a.block_bytes, pool + a.from[i] * a.block_bytes, static_cast<size_t>(a.block_bytes));
  });
}

}  // namespace KV_ISA
}  // namespace kv
