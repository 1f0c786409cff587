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

// Key 150 of 200 is NaN, which the first 20 of 70 queries do not see.
void check_nan_shows_where_it_is_seen(Isa isa) {
  AttentionShape s;
  s.queries = {70};
  s.key_counts = {200};
  s.cache_dtype = DType::f16;
  AttentionCase sound(s, 6);
  AttentionCase spoilt(s, 6);
  write_element(s.cache_dtype, spoilt.keys, spoilt.cache_index(0, 0, 150), std::numeric_limits<float>::quiet_NaN());
  Workers workers(2);
  run(prefill_attention, sound, workers, isa);
  run(prefill_attention, spoilt, workers, isa);
  for (int32_t query = 0; query < 70; ++query) {
    const bool seen = query >= 20;
    const auto shows = [&](float got, float wanted) { return seen ? std::isnan(got) : got == wanted; };
    const auto at = static_cast<size_t>(query);
    CHECK(shows(spoilt.log_sum_exp[at], sound.log_sum_exp[at]));
    for (int32_t d = 0; d < s.head_dim; ++d) {
      const int64_t element = query * spoilt.arguments.output_token_stride + d;
      CHECK(shows(read_element(s.output_dtype, spoilt.output, element), read_element(s.output_dtype, sound.output, element)));
    }
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

TEST("a NaN shows in the rows that see it, and in no other") { on_every_isa(check_nan_shows_where_it_is_seen); }

TEST("prefill-attention refuses contradictions") { check_refusals(prefill_attention); }

}  // namespace kv
