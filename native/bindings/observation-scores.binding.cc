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
  tensors.describe(arguments, query.extent(0));
  arguments.query = query.data;
  arguments.query_token_stride = query.stride(0);
  arguments.query_head_stride = query.stride(1);
  arguments.query_dtype = query.dtype();
  arguments.query_heads = static_cast<int32_t>(query.extent(1));
  arguments.keys = tensors.keys.data;
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
