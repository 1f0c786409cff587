#include "kernels/select-by-mass/select-by-mass.h"

#include "bindings/paged-batch.h"

namespace kv {

// selectByMass(stream, scores [token, queryHead, key], denseLogSumExp [token, queryHead] or undefined,
//              blockTable [slot, kvHead, block], keyCounts [slot, kvHead], slots [batch], queryStart [boundary],
//              valueScales [valueBlock, blockToken] or undefined, meanRows [slot, kvHead] or undefined,
//              valueRows [token, kvHead, chosen], weights [token, kvHead, chosen, groupHead] or undefined, counts [token, kvHead],
//              logSumExp [token, queryHead], ranges [token, queryHead, part, bound] or undefined, valueBlocks, tau, missingMass)
Napi::Value select_by_mass(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument scores = call.tensor(1);
  const OutputArgument rows = call.output(9);
  SelectByMassArguments arguments;
  arguments.scores = scores.as<float>();
  arguments.query_heads = static_cast<int32_t>(scores.extent(1));
  arguments.score_tokens = static_cast<int32_t>(scores.extent(2));
  arguments.dense_log_sum_exp = call.optional_tensor(2).as<float>();
  describe_tables(call, 3, scores.extent(0), arguments);
  arguments.value_scales = call.optional_tensor(7).as<uint16_t>();
  arguments.mean_rows = call.optional_tensor(8).as<int32_t>();
  arguments.value_rows = rows.as<int32_t>();
  arguments.capacity = static_cast<int32_t>(rows.extent(2));
  arguments.weights = call.optional_output(10).as<float>();
  arguments.counts = call.output(11).as<int32_t>();
  arguments.log_sum_exp = call.output(12).as<float>();
  const TensorArgument ranges = call.optional_tensor(13);
  arguments.ranges = ranges.as<float>();
  if (arguments.ranges != nullptr) arguments.range_parts = static_cast<int32_t>(ranges.extent(2));
  arguments.block_count = static_cast<int32_t>(call.integer(14));
  arguments.tau = call.number(15);
  arguments.missing = static_cast<MissingMass>(call.integer(16));
  return call.enqueue("selectByMass",
                      [arguments](ExecutionContext& context) { return select_by_mass(arguments, context); });
}

}  // namespace kv
