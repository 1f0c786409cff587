#include "kernels/select-top-blocks/select-top-blocks.h"

#include "bindings/operation-call.h"

namespace kv {

// selectTopBlocks(stream, scores [token, kvHead, block], keyCounts [slot, kvHead], slots [batch], queryStart [boundary],
//                 chosen [slot, kvHead, chosenBlock], chosenCounts [slot, kvHead], budgets [slot], blockTokens, sinkBlocks,
//                 recentBlocks)
Napi::Value select_top_blocks(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument scores = call.tensor(1);
  const OutputArgument counts = call.output(2);
  const TensorArgument slots = call.tensor(3);
  const OutputArgument chosen = call.output(5);
  SelectTopBlocksArguments arguments;
  arguments.batch = static_cast<int32_t>(slots.extent(0));
  arguments.kv_heads = static_cast<int32_t>(counts.extent(1));
  arguments.query_start = call.tensor(4).as<int32_t>();
  arguments.query_tokens = static_cast<int32_t>(scores.extent(0));
  arguments.slots = slots.as<int32_t>();
  arguments.table_width = static_cast<int32_t>(scores.extent(2));
  arguments.key_counts = counts.as<int32_t>();
  arguments.slot_count = static_cast<int32_t>(counts.extent(0));
  arguments.scores = scores.as<float>();
  arguments.score_token_stride = scores.stride(0);
  arguments.score_head_stride = scores.stride(1);
  arguments.room = static_cast<int32_t>(chosen.extent(2));
  arguments.chosen = chosen.as<int32_t>();
  arguments.chosen_counts = call.output(6).as<int32_t>();
  arguments.budgets = call.tensor(7).as<int32_t>();
  arguments.block_tokens = static_cast<int32_t>(call.integer(8));
  arguments.sink_blocks = static_cast<int32_t>(call.integer(9));
  arguments.recent_blocks = static_cast<int32_t>(call.integer(10));
  return call.enqueue("selectTopBlocks", [arguments](ExecutionContext& context) { return select_top_blocks(arguments, context); });
}

}  // namespace kv
