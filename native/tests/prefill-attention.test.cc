#include "tests/attention-checks.h"
#include "tests/prefill-builds.h"

namespace kv {
namespace {

constexpr DType kCacheTypes[] = {DType::f16, DType::bf16};

constexpr auto on_every_dense_prefill = [](auto&& body) {
  on_every_prefill([&](const PrefillBuild& build) { body(build.dense, build.isa); });
};

void check_every_dense_prefill(AttentionCase& c, Workers& workers) {
  const std::vector<WantedRow> wanted = c.oracle();
  on_every_dense_prefill([&](AttentionOperation operation, Isa isa) {
    run(operation, c, workers, isa);
    CHECK(c.agrees(wanted, isa));
  });
}

// Bit for bit, because a row meets the same tiles of keys in the same order, and keys that it does not
// see weigh exactly nothing.
void check_chunks_equal_one_shot(DType cache_dtype, int head_dim) {
  AttentionShape s;
  s.queries = {131};
  s.key_counts = {131, 131};
  s.query_heads = 6;
  s.kv_heads = 2;
  s.head_dim = head_dim;
  s.cache_dtype = cache_dtype;
  AttentionCase whole(s, 5), chunked(s, 5);
  const std::vector<WantedRow> wanted = whole.oracle();
  Workers workers(1);
  on_every_dense_prefill([&](AttentionOperation operation, Isa isa) {
    run(operation, whole, workers, isa);
    CHECK(whole.agrees(wanted, isa));

    ExecutionContext context{workers, isa};
    for (const int32_t chunk : {1, 7, 64}) {
      chunked.poison();
      for (int32_t first = 0; first < 131; first += chunk) {
        const int32_t end = std::min(131, first + chunk);
        chunked.query_start[0] = first;
        chunked.query_start[1] = end;
        chunked.count_of(0, 0) = chunked.count_of(0, 1) = end;
        CHECK(operation(chunked.arguments, context).ok());
      }
      CHECK(same_results(whole, chunked));
    }
  });
}

AttentionShape two_heads(DType cache_dtype) {
  AttentionShape s;
  s.queries = {70};
  s.key_counts = {200, 70};
  s.query_heads = 6;
  s.kv_heads = 2;
  s.cache_dtype = cache_dtype;
  return s;
}

// Queries, keys and values near the ends of f32's range, whose scores are not.
void check_range() {
  Workers workers(2);
  for (const auto& [query, key] : {std::pair{-70, 70}, {70, -70}, {120, -118}, {-120, 120}, {125, -128}, {-10, -60}}) {
    for (const int value : {0, 70, 120, -90, -105}) {
      AttentionShape s = two_heads(DType::bf16);
      s.query_exponent = query;
      s.key_exponent = key;
      s.value_exponent = value;
      AttentionCase c(s, 8);
      check_every_dense_prefill(c, workers);
    }
  }
}

// Powers of two that differ from dim to dim, those of queries and of keys opposite to each other.
void check_mixed_range() {
  AttentionCase c(two_heads(DType::bf16), 9);
  const auto multiply = [&](DType dtype, std::vector<uint8_t>& bytes, int sign) {
    constexpr int kExponents[] = {0, 120, -120, 60, 30, -40, -125};
    for (int64_t i = 0; i < static_cast<int64_t>(bytes.size() / byte_size(dtype)); ++i) {
      const int exponent = i % c.shape.head_dim % 3 == 0 ? kExponents[i % c.shape.head_dim / 3 % 7] : 0;
      write_element(dtype, bytes, i, std::ldexp(read_element(dtype, bytes, i), sign * exponent));
    }
  };
  multiply(c.shape.query_dtype, c.query, 1);
  multiply(c.shape.cache_dtype, c.keys, -1);
  Workers workers(2);
  check_every_dense_prefill(c, workers);
}

// The second half of each key takes back what the first half adds to a score, but for a few bits.
void check_cancelling() {
  for (const int head_dim : {64, 128}) {
    AttentionShape s = two_heads(DType::bf16);
    s.head_dim = head_dim;
    AttentionCase c(s, 10);
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < static_cast<int64_t>(c.keys.size() / 2); ++i) {
      if (i % head_dim < half) continue;
      write_element(DType::bf16, c.keys, i, read_element(DType::bf16, c.keys, i - half));
    }
    for (int64_t i = 0; i < static_cast<int64_t>(c.query.size() / 4); ++i) {
      if (i % head_dim < half) continue;
      write_element(DType::f32, c.query, i, -(1 + 0x1p-20f) * read_element(DType::f32, c.query, i - half));
    }
    Workers workers(1);
    check_every_dense_prefill(c, workers);
  }
}

// On tiles, a NaN or an infinite number among the values shows in the rows that see it, and in no other.
void check_values_that_are_no_numbers(const PrefillBuild& build) {
  if (!build.tiled) return;
  constexpr int kRows = 150, kSpoilt = 97;
  for (const float spoilt_number : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    AttentionShape s;
    s.queries = {kRows};
    s.key_counts = {kRows};
    s.cache_dtype = DType::bf16;
    AttentionCase sound(s, 6), spoilt(s, 6);
    write_element(s.cache_dtype, spoilt.values, spoilt.cache_index(0, 0, kSpoilt) + 5, spoilt_number);
    Workers workers(1);
    run(build.dense, sound, workers, build.isa);
    run(build.dense, spoilt, workers, build.isa);
    size_t wrong = 0;
    for (int row = 0; row < kRows; ++row) {
      for (int32_t d = 0; d < s.head_dim; ++d) {
        const float got = read_element(DType::f32, spoilt.output, row * s.head_dim + d);
        if (row >= kSpoilt && d == 5) {
          wrong += std::isfinite(got);
        } else {
          wrong += got != read_element(DType::f32, sound.output, row * s.head_dim + d);
        }
      }
    }
    CHECK(wrong == 0);
  }
}

// Rows whose queries are no numbers, or infinite, leave their neighbours alone.
void check_queries_that_are_no_numbers(const PrefillBuild& build) {
  AttentionCase sound(two_heads(DType::bf16), 6), spoilt(two_heads(DType::bf16), 6);
  const auto write = [&](int64_t row, float number) {
    write_element(DType::f32, spoilt.query, row * spoilt.shape.head_dim + 3, number);
  };
  write(40, std::numeric_limits<float>::quiet_NaN());
  write(41, std::numeric_limits<float>::infinity());
  Workers workers(1);
  run(build.dense, sound, workers, build.isa);
  run(build.dense, spoilt, workers, build.isa);
  for (int64_t row = 0; row < 70 * 6; ++row) {
    for (int64_t d = 0; d < 64; ++d) {
      const float got = read_element(DType::f32, spoilt.output, row * 64 + d);
      if (row == 40 || row == 41) {
        CHECK(std::isnan(got));
      } else {
        CHECK(got == read_element(DType::f32, sound.output, row * 64 + d));
      }
    }
  }
}

}  // namespace

TEST("prefill-attention agrees with the oracle") {
  check_random_cases(on_every_dense_prefill, {0, 1, 2, 17, 65, 130}, {-5, 0, 0, 1, 63, 200});
  check_shifted_scores(on_every_dense_prefill, 70);
}

TEST("prefill-attention does not depend on threads, neighbours, chunks or blocks") {
  for (const DType dtype : kCacheTypes) {
    check_independent_of_threads_and_neighbours(on_every_dense_prefill, 100, dtype);
    for (const int head_dim : {64, 128}) check_chunks_equal_one_shot(dtype, head_dim);
    check_blocks_equal_contiguous(on_every_dense_prefill, dtype == DType::bf16 ? dtype : DType::f32);
  }
}

TEST("prefill-attention keeps its bound over f32's whole range") {
  check_range();
  check_mixed_range();
  check_cancelling();
}

TEST("prefill-attention shows a NaN in the rows that see it, and in no other") {
  on_every_prefill([](const PrefillBuild& build) {
    for (const DType dtype : kCacheTypes) check_nan_shows_where_it_is_seen(build.dense, build.isa, 70, 20, dtype);
  });
  on_every_prefill(check_values_that_are_no_numbers);
  on_every_prefill(check_queries_that_are_no_numbers);
}

TEST("prefill-attention refuses contradictions") { check_refusals(prefill_attention); }

}  // namespace kv
