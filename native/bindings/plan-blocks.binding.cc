#include "kernels/plan-blocks/plan-blocks.h"

#include "bindings/paged-batch.h"

namespace kv {

// planBlocks(stream, blockTable [slot, kvHead, block], keyCounts [slot, kvHead], slots [batch], queryStart [boundary],
//            chosen [slot, kvHead, chosenBlock], chosenCounts [slot, kvHead], where [hostBlock], holds [cachedBlock],
//            usedAt [cachedBlock], clock [one], history [slot, kvHead, step, chosenBlock], demand [slot, kvHead, count],
//            readTable [slot, kvHead, chosenBlock], readCounts [slot, kvHead], loads [end, load], loadCount [one],
//            rows, blockTokens, sinkBlocks, recentBlocks)
Napi::Value plan_blocks(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument chosen = call.tensor(5);
  const OutputArgument where = call.output(7);
  const OutputArgument holds = call.output(8);
  const OutputArgument loads = call.output(15);
  PlanBlocksArguments arguments;
  describe_tables(call, 1, call.integer(17), arguments);
  arguments.block_tokens = static_cast<int32_t>(call.integer(18));
  arguments.block_count = static_cast<int32_t>(where.extent(0));
  arguments.chosen = chosen.as<int32_t>();
  arguments.chosen_counts = call.tensor(6).as<int32_t>();
  arguments.room = static_cast<int32_t>(chosen.extent(2));
  arguments.sink_blocks = static_cast<int32_t>(call.integer(19));
  arguments.recent_blocks = static_cast<int32_t>(call.integer(20));
  arguments.cached = static_cast<int32_t>(holds.extent(0));
  arguments.first_cached = arguments.slot_count * arguments.kv_heads * (arguments.sink_blocks + arguments.recent_blocks);
  arguments.where = where.as<int32_t>();
  arguments.holds = holds.as<int32_t>();
  arguments.used_at = call.output(9).as<int32_t>();
  arguments.clock = call.output(10).as<int32_t>();
  arguments.history = call.output(11).as<int32_t>();
  arguments.demand = call.output(12).as<BlockDemand>();
  arguments.read_table = call.output(13).as<int32_t>();
  arguments.read_counts = call.output(14).as<int32_t>();
  arguments.loads = loads.as<int32_t>();
  arguments.most_loads = static_cast<int32_t>(loads.extent(1));
  arguments.load_count = call.output(16).as<int32_t>();
  return call.enqueue("planBlocks", [arguments](ExecutionContext& context) { return plan_blocks(arguments, context); });
}

}  // namespace kv
