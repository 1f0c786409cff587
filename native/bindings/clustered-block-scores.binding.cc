#include "kernels/clustered-block-scores/clustered-block-scores.h"

#include "bindings/prefill-block-scores.h"

namespace kv {

// clusteredBlockScores(the arguments of block_scores_arguments)
Napi::Value clustered_block_scores(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const auto arguments = block_scores_arguments<ClusteredBlockScoresArguments>(call);
  return call.enqueue("clusteredBlockScores", [arguments](ExecutionContext& context) {
    return clustered_block_scores(arguments, context);
  });
}

}  // namespace kv
