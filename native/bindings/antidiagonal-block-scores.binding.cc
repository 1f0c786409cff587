#include "kernels/antidiagonal-block-scores/antidiagonal-block-scores.h"

#include "bindings/prefill-block-scores.h"

namespace kv {

// antidiagonalBlockScores(the arguments of block_scores_arguments, stride)
Napi::Value antidiagonal_block_scores(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  auto arguments = block_scores_arguments<AntidiagonalBlockScoresArguments>(call);
  arguments.stride = static_cast<int32_t>(call.integer(10));
  return call.enqueue("antidiagonalBlockScores", [arguments](ExecutionContext& context) {
    return antidiagonal_block_scores(arguments, context);
  });
}

}  // namespace kv
