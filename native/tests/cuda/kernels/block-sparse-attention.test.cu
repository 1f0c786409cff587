// Attention over lists of key blocks: against float64, and against dense attention where all blocks are listed.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "kernels/block-sparse-attention/block-sparse-attention.cuda.h"
#include "kernels/prefill-attention/prefill-attention.cuda.h"
#include "shared/attention/any-shape/attention.cuda.h"
#include "shared/attention/key-block-lists.cuda.h"
#include "tests/cuda/kernels/attention-reference.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"

namespace kv::tests {
namespace {

enum class Damage { descending, twice, negative, past_limit, count_negative, count_past_room, few_tiles };

struct Case : AttentionCase {
  double density = 0.4;  // of the blocks; 1 lists all, and is compared with dense attention
  bool any_shape = false;
  std::optional<Damage> damage;
};

// The list of each query head and tile, with a tile and a block more than are used.
struct Lists {
  std::vector<int> blocks, counts;
  KeyBlockLists sizes;

  Lists(const Case& test, const BatchLayout& layout, Random& random) {
    for (const Sequence& sequence : test.sequences) sizes.query_tiles += query_tiles_of(sequence.queries);
    ++sizes.query_tiles;
    sizes.capacity = key_block_limit(false, layout.most_keys(), 0, 0) + 1;
    blocks.assign(size_t(test.query_heads) * sizes.query_tiles * sizes.capacity, -7);
    counts.assign(size_t(test.query_heads) * sizes.query_tiles, -7);
    std::uniform_real_distribution<double> share;
    for (int head = 0; head < test.query_heads; ++head) {
      int tile = 0;
      for (size_t entry = 0; entry < test.sequences.size(); ++entry) {
        const int queries = test.sequences[entry].queries;
        const int keys = layout.counts[layout.slots[entry] * test.kv_heads + head / (test.query_heads / test.kv_heads)];
        for (int first = 0; first < queries; first += kListedQueryTile, ++tile) {
          const int64_t list = sizes.list(head, tile);
          const double density = test.density == 1 ? 1 : (tile + head) % 5 == 0 ? 0 : test.density;
          counts[list] = 0;
          for (int block = 0; block < key_block_limit(test.causal, keys, queries, first); ++block) {
            if (share(random) < density) blocks[list * sizes.capacity + counts[list]++] = block;
          }
        }
      }
    }
  }

  // Of query head 1, tile 0, which sees two blocks or more.
  void spoil(Damage damage) {
    int* list = blocks.data() + sizes.list(1, 0) * sizes.capacity;
    int& count = counts[sizes.list(1, 0)];
    switch (damage) {
      case Damage::descending:
        std::swap(list[0], list[1]);
        break;
      case Damage::twice:
        list[1] = list[0];
        break;
      case Damage::negative:
        list[0] = -1;
        break;
      case Damage::past_limit:
        ++list[count - 1];
        break;
      case Damage::count_negative:
        count = -1;
        break;
      case Damage::count_past_room:
        count = sizes.capacity + 1;
        break;
      case Damage::few_tiles:
        sizes.query_tiles = 1;
        std::fill(counts.begin(), counts.end(), 0);
        break;
    }
  }
};

// Whether dense attention, which leaves its results in `dense`, gives the bits that are in `operands`.
template <typename Element>
Outcome compare_with_dense(const Case& test, PagedAttentionArguments arguments,
                           const AttentionOperands<Element>& operands, const AttentionOperands<Element>& dense,
                           ExecutionContext& context, void* workspace) {
  arguments.output = dense.output.get();
  arguments.log_sum_exp = dense.log_sum_exp.get();
  succeeds(test.any_shape ? attention_any_cuda(arguments, context)
           : test.ampere  ? sm80::prefill_attention(arguments, arguments.block_table, nullptr)
                          : sm90a::prefill_attention(arguments, arguments.block_table, workspace, nullptr));
  succeeds(cudaDeviceSynchronize());
  const auto sparse_lse = operands.log_sum_exp.host(), dense_lse = dense.log_sum_exp.host();
  Outcome outcome;
  outcome.expect(operands.output.host() == dense.output.host(), "not the output of dense attention");
  outcome.expect(std::memcmp(sparse_lse.data(), dense_lse.data(), dense_lse.size() * sizeof(float)) == 0,
                 "not the log-sum-exp of dense attention");
  return outcome;
}

template <typename Element>
Outcome attend(const Case& test, Random& random) {
  const BatchLayout layout(test);
  const PagedCache<Element> cache(test, layout, random);
  const std::vector<Element> query = random_query<Element>(test, layout.rows, random);
  const AttentionOperands<Element> operands(test, layout, query), dense(test, layout, query);
  const DeviceBuffer<Element> keys(cache.keys), values(cache.values);
  const DeviceBuffer<int> table(cache.table);
  Lists lists(test, layout, random);
  if (test.damage) lists.spoil(*test.damage);
  const DeviceBuffer<int> blocks(lists.blocks), counts(lists.counts);

  BlockSparseAttentionArguments arguments;
  static_cast<PagedAttentionArguments&>(arguments) = operands.arguments();
  arguments.keys = keys.get();
  arguments.values = values.get();
  arguments.block_table = table.get();
  arguments.lists = lists.sizes;
  arguments.lists.blocks = blocks.get();
  arguments.lists.counts = counts.get();

  Workers workers(1);
  ExecutionContext context{workers};
  const DeviceBuffer<Fault> fault(1);
  context.fault = fault.get();
  const size_t lists_bytes = checked_lists_bytes(arguments, arguments.lists);
  const size_t plan_bytes = listed_plan_bytes(arguments);
  const DeviceBuffer<char> memory(lists_bytes + plan_bytes + kBlockSparseAttentionWorkspaceBytes, 0x5a);
  KeyBlockLists checked;
  const bool same = operands.repeats([&] {
    BlockSparseAttentionArguments given = arguments;
    succeeds(check_lists_cuda(given, memory.get(), context, &given.lists));
    checked = given.lists;
    if (test.any_shape) return attention_any_cuda(given, context, given.lists);
    ListedPlan plan;
    succeeds(plan_listed_tiles(given, memory.get() + lists_bytes, nullptr, &plan));
    return test.ampere ? sm80::block_sparse_attention(given, plan, nullptr)
                       : sm90a::block_sparse_attention(given, plan, memory.get() + lists_bytes + plan_bytes, nullptr);
  });

  Outcome outcome = test.density < 1 ? compare_with_reference(arguments, layout.most_keys(), operands, checked)
                                     : compare_with_dense(test, arguments, operands, dense, context, memory.get());
  outcome.expect(same, "two launches differ");
  const KeyBlockListFault wanted =
      test.damage == Damage::few_tiles ? KeyBlockListFault::too_few_query_tiles : KeyBlockListFault::list;
  const int32_t found = fault.host()[0].code;
  outcome.expect(found == (test.damage ? static_cast<int32_t>(wanted) : 0), "fault " + std::to_string(found));
  return outcome;
}

std::vector<Case> cases() {
  CaseList<Case> list(true);
  for (const double density : {0.4, 1.0}) {
    const std::string share = ", density " + std::to_string(density).substr(0, 3);
    const auto add = [&](const std::string& name, const std::vector<Sequence>& sequences, auto change) {
      list.add(name + share, sequences, [=](Case& test) {
        test.density = density;
        change(test);
      });
    };
    add("small", small_prompts(), [](Case&) {});
    add("small, all keys", small_prompts(), [](Case& test) { test.causal = false; });
    if (only_small_cases()) continue;
    const std::vector<Sequence> ragged = ragged_prompts();
    add("ragged", ragged, [](Case&) {});
    add("ragged, all keys", ragged, [](Case& test) { test.causal = false; });
    for (const int block : {8, 16, 32, 128, 192, 1024}) {
      add("blocks of " + std::to_string(block), ragged, [=](Case& test) { test.block_tokens = block; });
    }
    add("one head a group", ragged, [](Case& test) { test.kv_heads = 8; });
    add("one kv head", ragged, [](Case& test) { test.kv_heads = 1; });
    for (const int block : {7, 64}) {
      add("any shape, blocks of " + std::to_string(block), ragged, [=](Case& test) {
        test.any_shape = true;
        test.block_tokens = block;
      });
    }
  }
  if (!only_small_cases()) add_unusual_prompts(list);
  const std::vector<std::pair<std::string, Damage>> damages{
      {"descend", Damage::descending},       {"repeat a block", Damage::twice},
      {"name block -1", Damage::negative},   {"name a block past the limit", Damage::past_limit},
      {"count -1", Damage::count_negative},  {"count more than there is room for", Damage::count_past_room},
      {"are too few", Damage::few_tiles}};
  for (const auto& [name, damage] : damages) {
    list.add("lists that " + name, small_prompts(), [damage = damage](Case& test) {
      test.density = 0.9999;
      test.damage = damage;
    });
  }
  return list.cases;
}

}  // namespace

TEST("block-sparse-attention agrees with float64, and with dense attention where all blocks are listed") {
  run_cases(cases(), [](const Case& test, Random& random) {
    return with_16_bit_type(test.dtype, [&](auto element) { return attend<decltype(element)>(test, random); });
  });
}

}  // namespace kv::tests

// For torch-block-sparse.py. `sizes`: those of kv_attention, then query tiles and capacity of the lists. `pointers`:
// those of kv_attention, then the listed blocks and their counts. Checks, plans and attends. Returns 0, or prints why
// not.
KV_FOR_PYTHON int kv_block_sparse_attention(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  kv::BlockSparseAttentionArguments arguments;
  static_cast<kv::PagedAttentionArguments&>(arguments) = kv::tests::attention_for_python(sizes, pointers, scale);
  arguments.lists.query_tiles = static_cast<int32_t>(sizes[11]);
  arguments.lists.capacity = static_cast<int32_t>(sizes[12]);
  arguments.lists.blocks = static_cast<const int32_t*>(pointers[11]);
  arguments.lists.counts = static_cast<const int32_t*>(pointers[12]);
  static kv::Workers workers(1);
  kv::ExecutionContext context{workers};
  context.cuda_stream = stream;
  context.fault = kv::tests::fault_for_python();
  auto* memory = static_cast<char*>(pointers[9]);
  kv::Status status = kv::check_lists_cuda(arguments, memory, context, &arguments.lists);
  memory += kv::checked_lists_bytes(arguments, arguments.lists);
  kv::ListedPlan plan;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (status.ok()) status = kv::plan_listed_tiles(arguments, memory, cuda_stream, &plan);
  memory += kv::listed_plan_bytes(arguments);
  if (status.ok()) status = kv::sm90a::block_sparse_attention(arguments, plan, memory, cuda_stream);
  return kv::tests::result_for_python(status);
}
