#include "kernels/copy-index-map/copy-index-map.h"

#include "runtime/workers.h"

namespace kv {
namespace KV_ISA {

void copy_index_map(const CopyIndexMapArguments& a, Workers& workers) {
  workers.for_each(2 * static_cast<size_t>(a.kv_heads), [&](size_t row, int) {
    const size_t operand = row % 2;
    const int64_t first = static_cast<int64_t>(row / 2) * a.table_width;
    for (int64_t i = first; i < first + a.table_width; ++i) {
      a.target[operand][i] = copied_entry(a, a.source[operand][i]);
    }
  });
}

}  // namespace KV_ISA
}  // namespace kv
