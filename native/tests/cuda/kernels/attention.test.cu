// Attention over dense blocks against float64: random inputs, NaN in every cache row that holds no key, poisoned
// outputs.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/decode-attention/decode-attention.cuda.h"
#include "kernels/prefill-attention/prefill-attention.cuda.h"
#include "shared/paged/paged-faults.h"
#include "tests/cuda/kernels/attention-reference.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"

namespace kv::tests {
namespace {

struct Case : AttentionCase {
  bool decode = false;
  std::optional<PagedFault> outside;  // decode with a table that leads outside in this way
};

template <typename Element>
Outcome attend(const Case& test, Random& random) {
  BatchLayout layout(test);
  PagedCache<Element> cache(test, layout, random);
  lead_outside(test, test.outside, layout, cache.table);
  const AttentionOperands<Element> operands(test, layout, random_query<Element>(test, layout.rows, random));
  const DeviceBuffer<Element> keys(cache.keys), values(cache.values);
  const DeviceBuffer<int> table(cache.table);
  PagedAttentionArguments arguments = operands.arguments();
  arguments.keys = keys.get();
  arguments.values = values.get();
  arguments.block_table = table.get();

  DecodeAttentionMemory memory{0, kPrefillAttentionWorkspaceBytes};
  if (test.decode) succeeds(cuda::decode_attention_memory(arguments, &memory));
  const DeviceBuffer<unsigned char> counters(memory.counter_bytes), workspace(memory.workspace_bytes, 0x5a);
  const DeviceBuffer<Fault> fault(1);
  const bool same = operands.repeats([&] {
    return test.decode   ? cuda::decode_attention(arguments, arguments.block_table, counters.get(), workspace.get(),
                                                  {fault.get()}, nullptr)
           : test.ampere ? sm80::prefill_attention(arguments, arguments.block_table, nullptr)
                         : sm90a::prefill_attention(arguments, arguments.block_table, workspace.get(), nullptr);
  });

  Outcome outcome;
  if (!test.outside) outcome = compare_with_reference(arguments, layout.most_keys(), operands);
  outcome.expect(same || test.outside, "two launches differ");
  const int32_t found = fault.host()[0].code;
  outcome.expect(found == (test.outside ? static_cast<int32_t>(*test.outside) : 0), "fault " + std::to_string(found));
  outcome.expect(counters.host() == std::vector<unsigned char>(memory.counter_bytes), "leaves counters");
  return outcome;
}

Outcome run(const Case& test, Random& random) {
  return with_16_bit_type(test.dtype, [&](auto element) { return attend<decltype(element)>(test, random); });
}

std::vector<Case> prefill_cases() {
  CaseList<Case> list(true);
  list.add("small", small_prompts());
  list.add("small, all keys", small_prompts(), [](Case& test) { test.causal = false; });
  if (only_small_cases()) return list.cases;
  const std::vector<Sequence> ragged = ragged_prompts();
  list.add("ragged", ragged);
  list.add("ragged, all keys", ragged, [](Case& test) { test.causal = false; });
  for (const int block : {8, 16, 32, 128, 192, 1024}) {
    list.add("blocks of " + std::to_string(block), ragged, [=](Case& test) { test.block_tokens = block; });
  }
  list.add("one head a group", ragged, [](Case& test) { test.kv_heads = 8; });
  list.add("one kv head", ragged, [](Case& test) { test.kv_heads = 1; });
  add_unusual_prompts(list);
  return list.cases;
}

std::vector<Case> decode_cases() {
  CaseList<Case> list(false);
  const auto add = [&](const std::string& name, const std::vector<Sequence>& sequences, auto change) {
    list.add(name, sequences, [=](Case& test) {
      test.decode = true;
      change(test);
    });
  };
  const auto unchanged = [](Case&) {};
  add("small", decode_of({1, 64, 200}), unchanged);
  for (const auto& [name, fault] : std::vector<std::pair<std::string, PagedFault>>{
           {"counts", PagedFault::cache_overflow},
           {"blocks", PagedFault::block_out_of_range},
           {"slots", PagedFault::slot_out_of_range},
           {"rows", PagedFault::rows_not_ascending}}) {
    add(name + " that lead outside", decode_of({200, 1, 64}), [fault = fault](Case& test) { test.outside = fault; });
    add(name + " of many sequences that lead outside", decode_of(std::vector<int>(90, 20)),
        [fault = fault](Case& test) { test.outside = fault; });
  }
  if (only_small_cases()) return list.cases;
  const auto lengths = decode_of({1, 15, 16, 17, 63, 64, 65, 1000, 4000, 0, 333});
  add("ragged", lengths, unchanged);
  for (const int block : {16, 128, 1024}) {
    add("blocks of " + std::to_string(block), lengths, [=](Case& test) { test.block_tokens = block; });
  }
  for (const int heads : {1, 7, 8, 16, 24, 32}) {
    add(std::to_string(heads) + " heads a group", lengths, [=](Case& test) { test.query_heads = 2 * heads; });
  }
  add("heads keep different counts", lengths, [](Case& test) {
    test.kv_heads = 4;
    test.heads_differ = true;
  });
  add("one long sequence", decode_of({16000}), unchanged);
  add("long sequences", decode_of({9000, 16000, 12345, 64, 8000}), [](Case& test) { test.kv_heads = 8; });
  add("many short sequences", decode_of(std::vector<int>(300, 70)), unchanged);
  const auto eight_kv_heads = [](Case& test) { test.query_heads = test.kv_heads = 8; };
  add("many sequences of many kv heads", decode_of(std::vector<int>(300, 70)), eight_kv_heads);
  std::vector<int> uneven(100);
  for (int i = 0; i < 100; ++i) uneven[i] = i % 9 == 0 ? 0 : i * 7919 % 1500;
  add("many sequences of uneven lengths", decode_of(uneven), eight_kv_heads);
  add("shifted by 1e4", decode_of({900, 5000}), [](Case& test) { test.shift_scores = true; });
  add("a few queries each", few_queries_each(), unchanged);
  add("a few queries each, all keys", few_queries_each(), [](Case& test) { test.causal = false; });
  add("growing maxima", decode_of({1500}), [](Case& test) { test.growth = 0.02f; });
  return list.cases;
}

}  // namespace

TEST("prefill-attention agrees with float64") { run_cases(prefill_cases(), run); }

TEST("decode-attention agrees with float64, and reports tables that lead outside") { run_cases(decode_cases(), run); }

}  // namespace kv::tests

// For torch-attention.py. Takes what attention_for_python reads. Returns 0, or prints why not.
KV_FOR_PYTHON int kv_attention(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  const kv::PagedAttentionArguments arguments = kv::tests::attention_for_python(sizes, pointers, scale);
  const int64_t kernel = sizes[0];
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const kv::FaultSink faults{kv::tests::fault_for_python(), "decode-attention"};
  const kv::Status status =
      kernel == 1   ? kv::cuda::decode_attention(arguments, arguments.block_table, pointers[10], pointers[9],
                                                 faults, cuda_stream)
      : kernel == 2 ? kv::sm80::prefill_attention(arguments, arguments.block_table, cuda_stream)
                    : kv::sm90a::prefill_attention(arguments, arguments.block_table, pointers[9], cuda_stream);
  return kv::tests::result_for_python(status);
}
