// Reads the arguments that operations over coded keys share, when they compute scores.
#pragma once

#include "bindings/operation-call.h"
#include "shared/key-scores/key-scores.h"

namespace kv {

// query [token, queryHead, dim] and scores [token, queryHead, key] are the first two arguments. Five consecutive ones from
// `batch` on are blockTable [slot, kvHead, block], keyCounts [slot, kvHead], slots [batch], queryStart [boundary], scale.
inline void describe_key_scores(OperationCall& call, size_t batch, KeyScoresArguments& to) {
  const TensorArgument query = call.tensor(1);
  const OutputArgument scores = call.output(2);
  const TensorArgument table = call.tensor(batch);
  const OutputArgument counts = call.output(batch + 1);
  const TensorArgument slots = call.tensor(batch + 2);
  to.batch = static_cast<int32_t>(slots.extent(0));
  to.kv_heads = static_cast<int32_t>(counts.extent(1));
  to.head_dim = static_cast<int32_t>(query.extent(2));
  to.query_start = call.tensor(batch + 3).as<int32_t>();
  to.query_tokens = static_cast<int32_t>(query.extent(0));
  to.slots = slots.as<int32_t>();
  to.block_table = table.as<int32_t>();
  to.table_width = static_cast<int32_t>(table.extent(2));
  to.key_counts = counts.as<int32_t>();
  to.slot_count = static_cast<int32_t>(counts.extent(0));
  to.query = query.data;
  to.query_token_stride = query.stride(0);
  to.query_head_stride = query.stride(1);
  to.query_dtype = query.dtype();
  to.query_heads = static_cast<int32_t>(query.extent(1));
  to.scores = scores.as<float>();
  to.score_token_stride = scores.stride(0);
  to.score_head_stride = scores.stride(1);
  to.scale = static_cast<float>(call.number(batch + 4));
}

}  // namespace kv
