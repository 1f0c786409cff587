// Reads the arguments that operations over coded keys share, when they compute scores.
#pragma once

#include "bindings/paged-batch.h"
#include "shared/key-scores/key-scores.h"

namespace kv {

// query [token, queryHead, dim] and scores [token, queryHead, key] are the first two arguments. From `batch` on come
// the four of describe_tables, and scale.
inline void describe_key_scores(OperationCall& call, size_t batch, KeyScoresArguments& to) {
  const TensorArgument query = call.tensor(1);
  const OutputArgument scores = call.output(2);
  describe_tables(call, batch, query.extent(0), to);
  describe_query(query, to);
  to.scores = scores.as<float>();
  to.score_token_stride = scores.stride(0);
  to.score_head_stride = scores.stride(1);
  to.scale = static_cast<float>(call.number(batch + 4));
}

}  // namespace kv
