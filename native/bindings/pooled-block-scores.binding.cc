#include "kernels/pooled-block-scores/pooled-block-scores.h"

#include "bindings/prefill-block-scores.h"

namespace kv {

// pooledBlockScores(the arguments of block_scores_arguments)
Napi::Value pooled_block_scores(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const auto arguments = block_scores_arguments<PooledBlockScoresArguments>(call);
  return call.enqueue("pooledBlockScores", [arguments](ExecutionContext& context) {
    return pooled_block_scores(arguments, context);
  });
}

}  // namespace kv
