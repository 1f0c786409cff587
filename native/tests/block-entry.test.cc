#include "shared/paged/block-entry.h"

#include "tests/check.h"

namespace kv {
namespace {

constexpr int32_t kLastNumber = (1 << kBlockNumberBits) - 1;

TEST("entries of block tables name each kind's blocks, and none of another's") {
  for (const int32_t number : {0, 1, 12345, kLastNumber}) {
    const int32_t sparse = block_entry(BlockKind::sparse_24, number);
    CHECK(!is_dense(sparse) && block_number(sparse) == number);
    CHECK(names_block(sparse, BlockKind::sparse_24, kLastNumber + 1));
    CHECK(!names_block(sparse, BlockKind::sparse_24, number));
    CHECK(!names_dense(sparse, INT32_MAX));
    CHECK(is_dense(number) && names_dense(number, number + 1) && !names_dense(number, number));
    CHECK(!names_block(number, BlockKind::sparse_24, INT32_MAX));
    const int32_t none = block_entry(BlockKind::none, number);
    CHECK(!names_dense(none, INT32_MAX) && !names_block(none, BlockKind::sparse_24, INT32_MAX));
  }
  CHECK(block_entry(BlockKind::none, kLastNumber) == -1);
}

}  // namespace
}  // namespace kv
