#include "kernels/vertical-slash-block-scores/vertical-slash-block-scores.h"

#include "bindings/prefill-block-scores.h"

namespace kv {

// verticalSlashBlockScores(the arguments of block_scores_arguments)
Napi::Value vertical_slash_block_scores(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const auto arguments = block_scores_arguments<VerticalSlashBlockScoresArguments>(call);
  return call.enqueue("verticalSlashBlockScores", [arguments](ExecutionContext& context) {
    return vertical_slash_block_scores(arguments, context);
  });
}

}  // namespace kv
