#include "kernels/prefill-attention/prefill-attention.h"

#include "tests/attention-checks.h"

namespace kv {
namespace {

// Bit for bit, because a row meets the same tiles of keys in the same order, and keys that it does not
// see weigh exactly nothing.
void check_chunks_equal_one_shot(Isa isa) {
  AttentionShape s;
  s.queries = {131};
  s.key_counts = {131, 131};
  s.query_heads = 6;
  s.kv_heads = 2;
  s.cache_dtype = DType::f16;
  AttentionCase whole(s, 5);
  Workers workers(1);
  run(prefill_attention, whole, workers, isa);
  CHECK(whole.agrees(isa));

  ExecutionContext context{workers, isa};
  for (const int32_t chunk : {1, 7, 64}) {
    AttentionCase chunked(s, 5);
    for (int32_t first = 0; first < 131; first += chunk) {
      const int32_t end = std::min(131, first + chunk);
      chunked.query_start[0] = first;
      chunked.query_start[1] = end;
      chunked.count_of(0, 0) = chunked.count_of(0, 1) = end;
      CHECK(prefill_attention(chunked.arguments, context).ok());
    }
    CHECK(same_results(whole, chunked));
  }
}

}  // namespace

TEST("prefill-attention agrees with the oracle") {
  check_random_cases(prefill_attention, {0, 1, 2, 17, 65, 130}, {-5, 0, 0, 1, 63, 200});
  on_every_isa([](Isa isa) { check_shifted_scores(prefill_attention, isa, 70); });
}

TEST("prefill-attention does not depend on threads, neighbours, chunks or blocks") {
  on_every_isa([](Isa isa) {
    check_independent_of_threads_and_neighbours(prefill_attention, isa, 100);
    check_chunks_equal_one_shot(isa);
    check_blocks_equal_contiguous(prefill_attention, isa);
  });
}

TEST("prefill-attention shows a NaN in the rows that see it, and in no other") {
  on_every_isa([](Isa isa) { check_nan_shows_where_it_is_seen(prefill_attention, isa, 70, 20); });
}

TEST("prefill-attention refuses contradictions") { check_refusals(prefill_attention); }

}  // namespace kv
