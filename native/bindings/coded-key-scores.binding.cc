#include "kernels/coded-key-scores/coded-key-scores.h"

#include "bindings/coded-keys.h"
#include "bindings/key-scores.h"

namespace kv {

// codedKeyScores(stream, query [token, queryHead, dim], scores [token, queryHead, key], codedKeys [codedBlock, byte],
// centroids [kvHead, book, centroid, subDim], channelScale [kvHead, dim] or undefined, codeBits,
// ranges [token, queryHead, part, bound] or undefined, blockTable [slot, kvHead, block], keyCounts [slot, kvHead],
// slots [batch], queryStart [boundary], scale)
Napi::Value coded_key_scores(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  CodedKeyScoresArguments arguments;
  describe_key_scores(call, 8, arguments);
  const OutputArgument ranges = call.optional_output(7);
  arguments.ranges = ranges.as<float>();
  if (arguments.ranges != nullptr) arguments.range_parts = static_cast<int32_t>(ranges.extent(2));
  describe_coded_keys(call, 3, arguments.head_dim, arguments.coded);
  arguments.block_count = arguments.coded.block_count;
  return call.enqueue("codedKeyScores",
                      [arguments](ExecutionContext& context) { return coded_key_scores(arguments, context); });
}

}  // namespace kv
