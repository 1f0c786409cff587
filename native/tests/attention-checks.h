// Checks that both dense attention operations must pass.
#pragma once

#include "tests/attention-case.h"
#include "tests/check.h"

namespace kv {

using AttentionOperation = Status (*)(const PagedAttentionArguments&, ExecutionContext&);

inline void run(AttentionOperation operation, AttentionCase& c, Workers& workers, Isa isa) {
  c.poison();
  ExecutionContext context{workers, isa};
  CHECK(operation(c.arguments, context).ok());
}

inline bool same_results(const AttentionCase& a, const AttentionCase& b) {
  return a.output == b.output && a.log_sum_exp == b.log_sum_exp;
}

inline AttentionShape random_shape(std::mt19937& random, std::initializer_list<int> query_counts,
                                   std::initializer_list<int> earlier_keys) {
  AttentionShape s;
  s.kv_heads = pick(random, 1, 3);
  s.query_heads = s.kv_heads * pick(random, 1, 6);
  s.head_dim = pick_from(random, {1, 7, 32, 33, 64, 80, 96, 128, 129, 256});
  s.block_tokens = pick_from(random, {1, 16, 50, 64, 1000});
  s.query_dtype = pick_from(random, {DType::f32, DType::f16, DType::bf16});
  s.cache_dtype = pick_from(random, {DType::f32, DType::f16, DType::bf16});
  s.output_dtype = pick_from(random, {DType::f32, DType::f16, DType::bf16});
  s.causal = pick(random, 0, 3) > 0;
  s.gap = pick_from(random, {0, 0, 3});
  const int batch = pick(random, 1, 3);
  for (int b = 0; b < batch; ++b) {
    s.queries.push_back(pick_from(random, query_counts));
    for (int h = 0; h < s.kv_heads; ++h) {
      s.key_counts.push_back(std::max(0, s.queries.back() + pick_from(random, earlier_keys)));
    }
  }
  return s;
}

// `on_every_build` calls its argument with an operation and an instruction set for it, for each build. All builds are compared
// with one run of an oracle, which takes most of the time.

// Negative numbers of earlier keys leave the first rows without any.
template <class OnEveryBuild>
void check_random_cases(OnEveryBuild&& on_every_build, std::initializer_list<int> query_counts,
                        std::initializer_list<int> earlier_keys) {
  std::mt19937 random(11);
  for (unsigned seed = 0; seed < 60; ++seed) {
    Workers workers(1 + static_cast<int>(seed % 3));
    AttentionCase c(random_shape(random, query_counts, earlier_keys), seed);
    const std::vector<WantedRow> wanted = c.oracle();
    on_every_build([&](AttentionOperation operation, Isa isa) {
      run(operation, c, workers, isa);
      CHECK(c.agrees(wanted, isa));
    });
  }
}

template <class OnEveryBuild>
void check_shifted_scores(OnEveryBuild&& on_every_build, int queries) {
  for (const auto& [shift, dtype] : {std::pair{0.0, DType::f32}, {1e4, DType::f32}, {0.0, DType::bf16}, {1e4, DType::bf16}}) {
    AttentionShape s;
    s.cache_dtype = dtype;
    s.queries = {queries};
    s.key_counts = {600, 90};
    s.query_heads = 6;
    s.kv_heads = 2;
    s.exact = true;
    s.score_shift = shift;
    AttentionCase c(s, 3);
    Workers workers(2);
    const std::vector<WantedRow> wanted = c.oracle();
    on_every_build([&](AttentionOperation operation, Isa isa) {
      run(operation, c, workers, isa);
      CHECK(c.agrees(wanted, isa));
    });
  }
}

// One of the keys is NaN, which the first `blind` of the queries do not see.
inline void check_nan_shows_where_it_is_seen(AttentionOperation operation, Isa isa, int queries, int blind,
                                             DType cache_dtype = DType::f16) {
  const int keys = 400;
  AttentionShape s;
  s.queries = {queries};
  s.key_counts = {keys};
  s.cache_dtype = cache_dtype;
  AttentionCase sound(s, 6);
  AttentionCase spoilt(s, 6);
  const int64_t spoilt_key = spoilt.cache_index(0, 0, keys - queries + blind);
  write_element(s.cache_dtype, spoilt.keys, spoilt_key, std::numeric_limits<float>::quiet_NaN());
  Workers workers(2);
  run(operation, sound, workers, isa);
  run(operation, spoilt, workers, isa);
  for (int query = 0; query < queries; ++query) {
    const auto shows = [&](float got, float wanted) { return query < blind ? got == wanted : std::isnan(got); };
    const auto at = static_cast<size_t>(query);
    CHECK(shows(spoilt.log_sum_exp[at], sound.log_sum_exp[at]));
    for (int32_t d = 0; d < s.head_dim; ++d) {
      const int64_t element = query * spoilt.arguments.output_token_stride + d;
      CHECK(shows(read_element(s.output_dtype, spoilt.output, element), read_element(s.output_dtype, sound.output, element)));
    }
  }
}

// On more threads, and one entry at a time, bit for bit the same.
template <class OnEveryBuild>
void check_independent_of_threads_and_neighbours(OnEveryBuild&& on_every_build, int most_queries,
                                                 DType cache_dtype = DType::f16) {
  AttentionShape s;
  s.queries = {most_queries, 1, most_queries, 2};
  s.key_counts = {most_queries, 513, 1, 70, 300, 900, 2, 2};
  s.query_heads = 6;
  s.kv_heads = 2;
  s.cache_dtype = cache_dtype;
  AttentionCase together(s, 5), threaded(s, 5), alone(s, 5);
  const std::vector<WantedRow> wanted = together.oracle();
  const std::vector<int32_t> slots = alone.slots;
  const std::vector<int32_t> query_start = alone.query_start;
  alone.arguments.batch = 1;
  Workers one(1), three(3);
  on_every_build([&](AttentionOperation operation, Isa isa) {
    run(operation, together, one, isa);
    CHECK(together.agrees(wanted, isa));

    run(operation, threaded, three, isa);
    CHECK(same_results(together, threaded));

    alone.poison();
    ExecutionContext context{one, isa};
    for (size_t b = 0; b < slots.size(); ++b) {
      alone.arguments.slots = &slots[b];
      alone.arguments.query_start = &query_start[b];
      CHECK(operation(alone.arguments, context).ok());
    }
    CHECK(same_results(together, alone));
  });
}

// The same cache as one block and as many: bit for bit the same.
template <class OnEveryBuild>
void check_blocks_equal_contiguous(OnEveryBuild&& on_every_build, DType cache_dtype = DType::f32) {
  AttentionShape s;
  s.cache_dtype = cache_dtype;
  s.queries = {4};
  s.key_counts = {700};
  s.query_heads = 4;
  s.head_dim = cache_dtype == DType::bf16 ? 96 : 80;
  s.block_tokens = 701;
  AttentionCase contiguous(s, 7);
  s.block_tokens = 16;
  AttentionCase paged(s, 7);
  for (int32_t key = 0; key < 700; ++key) {
    for (int32_t d = 0; d < s.head_dim; ++d) {
      const int64_t from = contiguous.cache_index(0, 0, key) + d;
      const int64_t to = paged.cache_index(0, 0, key) + d;
      write_element(s.cache_dtype, paged.keys, to, read_element(s.cache_dtype, contiguous.keys, from));
      write_element(s.cache_dtype, paged.values, to, read_element(s.cache_dtype, contiguous.values, from));
    }
  }
  Workers workers(2);
  on_every_build([&](AttentionOperation operation, Isa isa) {
    run(operation, contiguous, workers, isa);
    run(operation, paged, workers, isa);
    CHECK(same_results(contiguous, paged));
  });
}

inline void check_refusals(AttentionOperation operation) {
  AttentionShape s;
  s.queries = {2};
  s.key_counts = {2};
  AttentionCase c(s, 1);
  Workers workers(1);
  ExecutionContext context{workers, best_isa()};
  const auto refused = [&](auto change) {
    const PagedAttentionArguments before = c.arguments;
    change(c.arguments);
    const Status status = operation(c.arguments, context);
    c.arguments = before;
    return !status.ok() && !status.message.empty();
  };
  CHECK(refused([](auto& a) { a.query_heads = 0; }));
  CHECK(refused([](auto& a) { a.kv_heads = 2; }));
  CHECK(refused([](auto& a) { a.head_dim = 0; }));
  CHECK(refused([](auto& a) { a.block_tokens = 0; }));
  CHECK(refused([](auto& a) { a.cache_dtype = DType::i8; }));
  CHECK(refused([](auto& a) { a.output_dtype = DType::i32; }));
  CHECK(refused([](auto& a) { a.table_width = 0; }));
  CHECK(refused([](auto& a) { a.block_count = 0; }));
  CHECK(refused([](auto& a) { a.slot_count = 0; }));
  CHECK(refused([](auto& a) { a.query_tokens = 1; }));
  c.count_of(0, 0) = -1;
  CHECK(refused([](auto&) {}));
}

}  // namespace kv
