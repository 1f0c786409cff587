#include "kernels/observation-scores/observation-scores.h"

#include "bindings/paged-batch.h"

namespace kv {

// observationScores(stream, query [token, queryHead, dim], scores [batch, kvHead, token], the six arguments of
// PagedBatchTensors, scale, domain, reduction)
Napi::Value observation_scores(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument query = call.tensor(1);
  const OutputArgument scores = call.output(2);
  const PagedBatchTensors tensors(call, 3);
  ObservationScoresArguments arguments;
  tensors.describe(arguments, query);
  arguments.scale = static_cast<float>(call.number(9));
  arguments.domain = static_cast<ScoreDomain>(call.integer(10));
  arguments.reduction = static_cast<GroupReduction>(call.integer(11));
  arguments.scores = scores.as<float>();
  arguments.score_tokens = static_cast<int32_t>(scores.extent(2));
  return call.enqueue("observationScores", [arguments](ExecutionContext& context) {
    return observation_scores(arguments, context);
  });
}

}  // namespace kv
