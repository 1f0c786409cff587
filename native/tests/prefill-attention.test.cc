#include "kernels/prefill-attention/prefill-attention.h"

#include "tests/attention-case.h"

namespace kv {
namespace {

int failures = 0;

void check(bool holds, const char* what) {
  if (holds) return;
  std::printf("failed: %s\n", what);
  ++failures;
}

void run(AttentionCase& c, Workers& workers, Isa isa) {
  c.poison();
  ExecutionContext context{workers, isa};
  const Status status = prefill_attention(c.arguments, context);
  check(status.ok(), status.message.c_str());
}

int pick(std::mt19937& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

template <class T>
T pick_from(std::mt19937& random, std::initializer_list<T> options) {
  return options.begin()[pick(random, 0, static_cast<int>(options.size()) - 1)];
}

AttentionShape random_shape(std::mt19937& random) {
  AttentionShape s;
  s.kv_heads = pick(random, 1, 3);
  s.query_heads = s.kv_heads * pick(random, 1, 5);
  s.head_dim = pick_from(random, {1, 7, 32, 33, 64, 80, 96, 128, 129, 256});
  s.block_tokens = pick_from(random, {1, 16, 50, 64, 1000});
  s.query_dtype = pick_from(random, {DType::f32, DType::f16, DType::bf16});
  s.cache_dtype = pick_from(random, {DType::f32, DType::f16, DType::bf16});
  s.output_dtype = pick_from(random, {DType::f32, DType::f16, DType::bf16});
  s.causal = pick(random, 0, 3) > 0;
  s.gap = pick_from(random, {0, 0, 3});
  const int batch = pick(random, 1, 3);
  for (int b = 0; b < batch; ++b) {
    const int queries = pick_from(random, {0, 1, 2, 17, 65, 130});
    s.queries.push_back(queries);
    for (int h = 0; h < s.kv_heads; ++h) {
      // Some heads hold fewer keys than there are queries: their first rows see nothing.
      s.key_counts.push_back(std::max(0, queries + pick_from(random, {-5, 0, 0, 1, 63, 200})));
    }
  }
  return s;
}

void random_cases(Isa isa) {
  std::mt19937 random(11);
  for (unsigned seed = 0; seed < 60; ++seed) {
    Workers workers(1 + static_cast<int>(seed % 3));
    AttentionCase c(random_shape(random), seed);
    run(c, workers, isa);
    check(c.agrees("random case"), isa_name(isa));
  }
}

void shifted_scores(Isa isa) {
  for (const double shift : {0.0, 1e4}) {
    AttentionShape s;
    s.queries = {70};
    s.key_counts = {150, 90};
    s.query_heads = 6;
    s.kv_heads = 2;
    s.exact = true;
    s.score_shift = shift;
    AttentionCase c(s, 3);
    Workers workers(2);
    run(c, workers, isa);
    check(c.agrees("scores shifted by 1e4"), isa_name(isa));
  }
}

// One prompt at once, in chunks, and on other thread counts: bit for bit the same, because a row meets
// the same tiles of keys in the same order and hidden keys weigh exactly nothing.
void chunks_equal_one_shot(Isa isa) {
  AttentionShape s;
  s.queries = {131};
  s.key_counts = {131, 131};
  s.query_heads = 6;
  s.kv_heads = 2;
  s.head_dim = 64;
  s.cache_dtype = DType::f16;
  AttentionCase c(s, 5);
  Workers one(1);
  run(c, one, isa);
  check(c.agrees("one shot"), isa_name(isa));
  const std::vector<uint8_t> output = c.output;
  const std::vector<float> log_sum_exp = c.log_sum_exp;

  Workers three(3);
  run(c, three, isa);
  check(c.output == output && c.log_sum_exp == log_sum_exp, "three threads equal one");

  ExecutionContext context{one, isa};
  for (const int32_t chunk : {1, 7, 64}) {
    c.poison();
    for (int32_t first = 0; first < 131; first += chunk) {
      const int32_t end = std::min(131, first + chunk);
      c.query_start[0] = first;
      c.query_start[1] = end;
      c.count_of(0, 0) = c.count_of(0, 1) = end;
      check(prefill_attention(c.arguments, context).ok(), "chunk");
    }
    check(c.output == output && c.log_sum_exp == log_sum_exp, "chunks equal one shot");
  }
}

// The same cache as one block and as many: bit for bit the same.
void blocks_equal_contiguous() {
  AttentionShape s;
  s.queries = {40};
  s.key_counts = {100};
  s.query_heads = 4;
  s.head_dim = 80;
  s.block_tokens = 128;
  AttentionCase contiguous(s, 7);
  s.block_tokens = 16;
  AttentionCase paged(s, 8);
  paged.query = contiguous.query;
  paged.arguments.query = paged.query.data();
  for (int32_t key = 0; key < 100; ++key) {
    for (int32_t d = 0; d < s.head_dim; ++d) {
      const int64_t from = contiguous.cache_index(0, 0, key) + d;
      const int64_t to = paged.cache_index(0, 0, key) + d;
      write_element(DType::f32, paged.keys, to, static_cast<float>(read_element(DType::f32, contiguous.keys, from)));
      write_element(DType::f32, paged.values, to, static_cast<float>(read_element(DType::f32, contiguous.values, from)));
    }
  }
  Workers workers(2);
  run(contiguous, workers, best_isa());
  run(paged, workers, best_isa());
  check(contiguous.output == paged.output, "blocks equal one long block");
}

void refusals() {
  AttentionShape s;
  s.queries = {2};
  s.key_counts = {2};
  AttentionCase c(s, 1);
  Workers workers(1);
  ExecutionContext context{workers, best_isa()};
  const auto refused = [&](auto change) {
    const PagedAttentionArguments before = c.arguments;
    change(c.arguments);
    const Status status = prefill_attention(c.arguments, context);
    c.arguments = before;
    return !status.ok() && !status.message.empty();
  };
  check(refused([](auto& a) { a.kv_heads = 2; }), "kv heads that do not divide the query heads");
  check(refused([](auto& a) { a.head_dim = 0; }), "no head dimension");
  check(refused([](auto& a) { a.block_tokens = 0; }), "no block tokens");
  check(refused([](auto& a) { a.cache_dtype = DType::i8; }), "an integer cache");
  check(refused([](auto& a) { a.output_dtype = DType::i32; }), "an integer output");
  check(refused([](auto& a) { a.table_width = 0; }), "more keys than the table holds");
  c.count_of(0, 0) = -1;
  check(refused([](auto&) {}), "a negative key count");
}

}  // namespace
}  // namespace kv

int main() {
  for (const kv::Isa isa : {kv::Isa::baseline, kv::Isa::avx2, kv::Isa::avx512}) {
    if (isa > kv::best_isa()) continue;
    kv::random_cases(isa);
    kv::shifted_scores(isa);
    kv::chunks_equal_one_shot(isa);
  }
  kv::blocks_equal_contiguous();
  kv::refusals();
  if (kv::failures > 0) return 1;
  std::printf("prefill-attention: passed\n");
  return 0;
}
