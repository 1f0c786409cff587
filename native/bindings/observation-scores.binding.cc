#include "kernels/observation-scores/observation-scores.h"

#include "bindings/paged-batch.h"

namespace kv {

// observationScores(stream, query [token, queryHead, dim], scores [batch, kvHead, token], the six arguments of
// describe_cache, scale, domain, reduction)
Napi::Value observation_scores(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const OutputArgument scores = call.output(2);
  ObservationScoresArguments arguments;
  describe_cache(call, 3, call.tensor(1), arguments);
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
