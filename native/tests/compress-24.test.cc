#include "kernels/compress-24/compress-24.h"

#include <limits>

#include "tests/check.h"
#include "tests/kernel-testing.h"

namespace kv {
namespace {

constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
constexpr int32_t kMost = std::numeric_limits<int32_t>::max();

// Two blocks of one kv head, of which the first is sparse already and the second is to become so.
struct Compression {
  std::vector<uint16_t> dense = std::vector<uint16_t>(64 * 64 + 1);
  int first_element = 0;
  std::vector<uint16_t> non_zeros = std::vector<uint16_t>(2 * 32 * 64);
  std::vector<uint32_t> metadata = std::vector<uint32_t>(2 * 2 * 64);
  std::vector<int32_t> table = {block_entry(BlockKind::sparse_24, 0), 0};
  std::vector<int32_t> ids = {1};
  Pruning pruning = {0, 0, 2, 1, 0, 0};

  Status run() {
    Compress24Arguments a;
    a.head_dim = 64;
    a.dense = dense.data() + first_element;
    a.dense_block_count = 1;
    a.non_zeros = non_zeros.data();
    a.metadata = metadata.data();
    a.sparse_block_count = 2;
    a.table = table.data();
    a.table_width = 2;
    a.kv_heads = 1;
    a.slot_count = 1;
    a.prunings = &pruning;
    a.pruning_count = 1;
    a.most_blocks = 2;
    a.ids = ids.data();
    a.id_count = 1;
    Workers workers(1);
    ExecutionContext context{workers, best_isa()};
    return compress_24(a, context);
  }
};

TEST("compress-24 refuses blocks that begin inside 16 bytes") {
  Compression c;
  c.first_element = 1;
  CHECK(c.run().code == StatusCode::capability);
  CHECK(c.table[1] == 0);
}

TEST("compress-24 refuses numbers that lead outside, however large, before it writes") {
  for (const int32_t number : {kLeast, kLeast + 1, -3, 3, kMost - 1, kMost}) {
    for (int32_t Pruning::* const field :
         {&Pruning::table_row, &Pruning::first_block, &Pruning::end_block, &Pruning::count, &Pruning::first_id}) {
      Compression c;
      c.pruning.*field = number;
      CHECK(c.run().code == StatusCode::invalid_value);
      CHECK(c.table[1] == 0);
    }
    Compression c;
    c.ids[0] = number;
    CHECK(c.run().code == StatusCode::invalid_value);
    CHECK(c.table[1] == 0);
  }
}

// Entries that are not dense are nobody's business here, and any place before all dense ids frees all of them.
TEST("compress-24 takes what leads nowhere") {
  for (const int32_t number : {kLeast, kLeast + 1, -3, -1}) {
    Compression c;
    c.table[0] = number;
    c.pruning.freed_from = number;
    CHECK(c.run().ok());
    CHECK(c.table[0] == number);
    CHECK(c.table[1] == block_entry(BlockKind::sparse_24, 1));
  }
}

}  // namespace
}  // namespace kv
