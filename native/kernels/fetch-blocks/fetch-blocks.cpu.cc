#include "kernels/fetch-blocks/fetch-blocks.h"

#include <cstring>

#include "runtime/workers.h"

namespace kv {
namespace KV_ISA {

void fetch_blocks(const FetchBlocksArguments& a, Workers& workers) {
  workers.for_each(static_cast<size_t>(a.load_count[0]), [&](size_t i, int) {
    const int64_t from = a.loads[i] * a.block_bytes, to = a.loads[static_cast<size_t>(a.most_loads) + i] * a.block_bytes;
    const auto bytes = static_cast<size_t>(a.block_bytes);
    std::memcpy(static_cast<char*>(a.keys) + to, static_cast<const char*>(a.host_keys) + from, bytes);
    std::memcpy(static_cast<char*>(a.values) + to, static_cast<const char*>(a.host_values) + from, bytes);
  });
}

}  // namespace KV_ISA
}  // namespace kv
