#include "shared/paged/prompt-queries.h"

#include <string>

namespace kv {

Status validate_sizes(const PromptQueries& a) {
  const Status status = validate_sizes(static_cast<const PagedBatch&>(a));
  if (!status.ok()) return status;
  if (!is_float(a.query_dtype)) return Status::failure(StatusCode::capability, "queries must be f32, f16 or bf16");
  if (a.batch != 1) return invalid("there are " + std::to_string(a.batch) + " batch entries; give one");
  if (a.query_heads <= 0 || a.query_heads % a.kv_heads != 0) {
    return invalid("the query heads (" + std::to_string(a.query_heads) + ") must be a multiple of the kv heads (" +
                   std::to_string(a.kv_heads) + ")");
  }
  return Status::success();
}

}  // namespace kv
