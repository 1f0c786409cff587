#include "kernels/transfer-blocks/transfer-blocks.h"

#include <cstring>

#include "runtime/workers.h"

namespace kv {
namespace KV_ISA {

void transfer_blocks(const TransferBlocksArguments& a, Workers& workers) {
  const char* source = static_cast<const char*>(a.source);
  char* destination = static_cast<char*>(a.destination);
  workers.for_each(static_cast<size_t>(a.copies), [&](size_t i, int) {
    std::memcpy(destination + a.to[i] * a.block_bytes, source + a.from[i] * a.block_bytes,
                static_cast<size_t>(a.block_bytes));
  });
}

}  // namespace KV_ISA
}  // namespace kv
