#include "kernels/copy-index-map/copy-index-map.h"

#include "runtime/workers.h"

namespace kv {
namespace KV_ISA {

void copy_index_map(const CopyIndexMapArguments& a, Workers& workers) {
  workers.for_each(static_cast<size_t>(a.kv_heads), [&](size_t head, int) {
    const int64_t first = static_cast<int64_t>(head) * a.table_width;
    for (int64_t i = first; i < first + a.table_width; ++i) a.target[i] = copied_entry(a, a.source[i]);
  });
}

}  // namespace KV_ISA
}  // namespace kv
