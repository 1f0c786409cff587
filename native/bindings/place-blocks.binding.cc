#include "kernels/place-blocks/place-blocks.h"

#include "bindings/paged-batch.h"

namespace kv {

// placeBlocks(stream, blockTable [slot, kvHead, block], keyCounts [slot, kvHead], slots [batch], queryStart [boundary],
//             sourceTable [slot, kvHead, block], where [hostBlock], holds [cachedBlock], usedAt [cachedBlock],
//             loads [end, load], loadCount [one], rows, blockTokens, sinkBlocks, firstCached)
Napi::Value place_blocks(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const OutputArgument where = call.output(6);
  const OutputArgument holds = call.output(7);
  const OutputArgument loads = call.output(9);
  PlaceBlocksArguments arguments;
  describe_tables(call, 1, call.integer(11), arguments);
  arguments.block_tokens = static_cast<int32_t>(call.integer(12));
  arguments.block_count = static_cast<int32_t>(where.extent(0));
  arguments.source_table = call.tensor(5).as<int32_t>();
  arguments.sink_blocks = static_cast<int32_t>(call.integer(13));
  arguments.first_cached = static_cast<int32_t>(call.integer(14));
  arguments.cached = static_cast<int32_t>(holds.extent(0));
  arguments.where = where.as<int32_t>();
  arguments.holds = holds.as<int32_t>();
  arguments.used_at = call.output(8).as<int32_t>();
  arguments.loads = loads.as<int32_t>();
  arguments.most_loads = static_cast<int32_t>(loads.extent(1));
  arguments.load_count = call.output(10).as<int32_t>();
  return call.enqueue("placeBlocks", [arguments](ExecutionContext& context) { return place_blocks(arguments, context); });
}

}  // namespace kv
