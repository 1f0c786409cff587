#include "kernels/copy-blocks/copy-blocks.h"

#include <algorithm>
#include <numeric>

#include "tests/check.h"
#include "tests/kernel-testing.h"

namespace kv {
namespace {

TEST("copy-blocks copies whole blocks and touches no other") {
  for (unsigned seed = 0; seed < 30; ++seed) {
    on_every_isa([&](Isa isa) {
      std::mt19937 random(seed);
      const int blocks = pick(random, 1, 40);
      const int bytes = pick_from(random, {1, 7, 16, 1000, 4096});
      std::vector<uint8_t> pool(static_cast<size_t>(blocks * bytes));
      for (uint8_t& byte : pool) byte = static_cast<uint8_t>(pick(random, 0, 255));
      const int sources = pick(random, 1, blocks);
      std::vector<int32_t> to(static_cast<size_t>(blocks - sources));
      std::iota(to.begin(), to.end(), sources);
      std::shuffle(to.begin(), to.end(), random);
      std::vector<int32_t> from(to.size());
      for (int32_t& block : from) block = pick(random, 0, sources - 1);
      std::vector<uint8_t> wanted = pool;
      for (size_t i = 0; i < to.size(); ++i) {
        std::copy_n(pool.begin() + from[i] * bytes, bytes, wanted.begin() + to[i] * bytes);
      }
      Workers workers(3);
      ExecutionContext context{workers, isa};
      CopyBlocksArguments a;
      a.pool = pool.data();
      a.block_bytes = bytes;
      a.from = from.data();
      a.to = to.data();
      a.copies = static_cast<int32_t>(to.size());
      CHECK(copy_blocks(a, context).ok());
      CHECK(pool == wanted);
    });
  }
}

}  // namespace
}  // namespace kv
