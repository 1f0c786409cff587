#include "kernels/decode-attention/decode-attention.h"

#include "shared/memory-streams/memory-streams.h"
#include "tests/attention-checks.h"

namespace kv {
namespace {

constexpr auto on_every_decode = [](auto&& body) { on_every_isa([&](Isa isa) { body(decode_attention, isa); }); };

}  // namespace

TEST("decode-attention agrees with the oracle") {
  check_random_cases(on_every_decode, {0, 1, 1, 1, 3}, {-1, 0, 1, 254, 255, 256, 700});
  check_shifted_scores(on_every_decode, 1);
}

TEST("decode-attention does not depend on threads, neighbours or blocks") {
  check_independent_of_threads_and_neighbours(on_every_decode, 3);
  check_blocks_equal_contiguous(on_every_decode);
}

TEST("decode-attention gives the same bits in whichever cache it asks for memory") {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int head_dim : {64, 80, 128}) {
      for (const int query_heads : {2, 8}) {
        AttentionShape s;
        s.queries = {1, 1};
        s.key_counts = {700, 65, 3, 257};
        s.query_heads = query_heads;
        s.kv_heads = 2;
        s.head_dim = head_dim;
        s.cache_dtype = dtype;
        AttentionCase test(s, 9);
        const std::vector<WantedRow> wanted = test.oracle();
        on_every_isa([&](Isa isa) {
          Workers workers(2);
          run(decode_attention, test, workers, isa);
          CHECK(test.agrees(wanted, isa));
          const std::vector<uint8_t> output = test.output;
          const std::vector<float> log_sum_exp = test.log_sum_exp;
          for (const MemoryReading& reading : kMemoryReadings) {
            workers.set_memory_reading(reading);
            run(decode_attention, test, workers, isa);
            CHECK(test.output == output && test.log_sum_exp == log_sum_exp);
          }
        });
      }
    }
  }
}

TEST("decode-attention shows a NaN in the rows that see it, and in no other") {
  on_every_isa([](Isa isa) { check_nan_shows_where_it_is_seen(decode_attention, isa, 3, 1); });
}

TEST("decode-attention refuses contradictions") { check_refusals(decode_attention); }

}  // namespace kv
