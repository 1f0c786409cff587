#include "runtime/slabs.h"

#include <cstdint>
#include <thread>
#include <vector>

#include "tests/check.h"

using namespace kv;

namespace {

constexpr size_t kSlab = 4096;

struct alignas(64) Memory {
  char bytes[3 * kSlab];
};

}  // namespace

TEST("pieces of slabs are aligned, apart, and inside the memory") {
  Memory memory;
  Slabs slabs(memory.bytes, kSlab, 3);
  char* last_end = memory.bytes;
  for (const size_t bytes : {size_t{1}, size_t{64}, size_t{65}, size_t{3000}, size_t{4096}}) {
    char* piece = slabs.take(bytes);
    CHECK(piece != nullptr && reinterpret_cast<uintptr_t>(piece) % 64 == 0);
    CHECK(piece >= last_end && piece + bytes <= memory.bytes + sizeof memory.bytes);
    CHECK((piece - memory.bytes) / kSlab == (piece + bytes - 1 - memory.bytes) / kSlab);
    last_end = piece + bytes;
  }
}

TEST("a slab serves again once its pieces are back, and not before") {
  Memory memory;
  Slabs slabs(memory.bytes, kSlab, 3);
  CHECK(slabs.take(kSlab + 1) == nullptr);
  std::vector<char*> pieces;
  for (int i = 0; i < 6; ++i) pieces.push_back(slabs.take(kSlab / 2));
  CHECK(slabs.take(1) == nullptr);
  slabs.give_back(pieces[2]);
  CHECK(slabs.take(1) == nullptr);
  slabs.give_back(pieces[3]);
  CHECK(slabs.take(kSlab) == pieces[2]);
  CHECK(Slabs(nullptr, kSlab, 0).take(1) == nullptr);
}

TEST("threads that take and give back pieces never share one") {
  Memory memory;
  Slabs slabs(memory.bytes, kSlab, 3);
  std::vector<std::thread> threads;
  bool apart[4] = {true, true, true, true};
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 2000; ++round) {
        char* piece = slabs.take(static_cast<size_t>(100 + 50 * thread));
        if (piece == nullptr) continue;
        for (int i = 0; i < 100; ++i) piece[i] = static_cast<char>(thread);
        for (int i = 0; i < 100; ++i) apart[thread] = apart[thread] && piece[i] == thread;
        slabs.give_back(piece);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const bool held : apart) CHECK(held);
}
