// Lists all classes and functions that JavaScript sees.
#include <napi.h>

#include "bindings/device-object.h"
#include "bindings/environment.h"
#include "bindings/host-pool-object.h"
#include "bindings/recording-object.h"
#include "bindings/stream-object.h"
#include "bindings/tensor-object.h"
#include "runtime/isa.h"

// Each line is an operation: its name in JavaScript, and its function in a `*.binding.cc`.
#define KV_OPERATIONS(OPERATION)                                   \
  OPERATION(antidiagonalBlockScores, antidiagonal_block_scores)    \
  OPERATION(appendKv, append_kv)                                   \
  OPERATION(blockMetadata, block_metadata)                         \
  OPERATION(blockScores, block_scores)                             \
  OPERATION(blockSparseAttention, block_sparse_attention)          \
  OPERATION(clusteredBlockScores, clustered_block_scores)          \
  OPERATION(codedKeyScores, coded_key_scores)                      \
  OPERATION(compress24, compress_24)                               \
  OPERATION(copy, copy)                                            \
  OPERATION(copyBlocks, copy_blocks)                               \
  OPERATION(copyIndexMap, copy_index_map)                          \
  OPERATION(copyValues, copy_values)                               \
  OPERATION(crossEntropy, cross_entropy)                           \
  OPERATION(cudaReport, cuda_report)                               \
  OPERATION(decodeAttention, decode_attention)                     \
  OPERATION(decodeAttention24, decode_attention_24)                \
  OPERATION(decodeAttentionListed, decode_attention_listed)        \
  OPERATION(decodeAttentionQuantized, decode_attention_quantized)  \
  OPERATION(decodeKeys, decode_keys)                               \
  OPERATION(decomposeAttention, decompose_attention)               \
  OPERATION(decompress24, decompress_24)                           \
  OPERATION(dequantizeKv, dequantize_kv)                           \
  OPERATION(embedding, embedding)                                  \
  OPERATION(encodeKeys, encode_keys)                               \
  OPERATION(fetchBlocks, fetch_blocks)                             \
  OPERATION(forgetBlocks, forget_blocks)                           \
  OPERATION(gatherKv, gather_kv)                                   \
  OPERATION(indexCentroids, index_centroids)                       \
  OPERATION(linear, linear)                                        \
  OPERATION(loadValues, load_values)                               \
  OPERATION(mapFile, map_file)                                     \
  OPERATION(mergeAttention, merge_attention)                       \
  OPERATION(observationScores, observation_scores)                 \
  OPERATION(placeBlocks, place_blocks)                             \
  OPERATION(planBlocks, plan_blocks)                               \
  OPERATION(pooledBlockScores, pooled_block_scores)                \
  OPERATION(prefillAttention, prefill_attention)                   \
  OPERATION(prefillAttention24, prefill_attention_24)              \
  OPERATION(quantizedKeyScores, quantized_key_scores)              \
  OPERATION(quantizeKv, quantize_kv)                               \
  OPERATION(read, read)                                            \
  OPERATION(rmsNorm, rms_norm)                                     \
  OPERATION(rope, rope)                                            \
  OPERATION(runningMeans, running_means)                           \
  OPERATION(sample, sample)                                        \
  OPERATION(selectByMass, select_by_mass)                          \
  OPERATION(selectKeyBlocks, select_key_blocks)                    \
  OPERATION(selectTokens, select_tokens)                           \
  OPERATION(selectTopBlocks, select_top_blocks)                    \
  OPERATION(swiglu, swiglu)                                        \
  OPERATION(trainCodebook, train_codebook)                         \
  OPERATION(transferBlocks, transfer_blocks)                       \
  OPERATION(verticalSlashBlockScores, vertical_slash_block_scores) \
  OPERATION(weightedValues, weighted_values)                       \
  OPERATION(write, write)                                          \
  OPERATION(writeEntries, write_entries)

namespace kv {

#define DECLARE(name, function) Napi::Value function(const Napi::CallbackInfo& info);
KV_OPERATIONS(DECLARE)
#undef DECLARE

namespace {

// amx(): 'absent', 'refused' or 'ready'
Napi::Value amx_report(const Napi::CallbackInfo& info) {
  const AmxState state = amx_state();
  const char* name = state == AmxState::ready ? "ready" : state == AmxState::refused ? "refused" : "absent";
  return Napi::String::New(info.Env(), name);
}

Napi::Object initialise(Napi::Env env, Napi::Object exports) {
  std::shared_ptr<Environment> environment = Environment::create(env);
  environment->tensor_constructor = Napi::Persistent(TensorObject::define(env));
  environment->stream_constructor = Napi::Persistent(StreamObject::define(env));
  environment->device_constructor = Napi::Persistent(DeviceObject::define(env));
  environment->recording_constructor = Napi::Persistent(RecordingObject::define(env));
  environment->host_pool_constructor = Napi::Persistent(HostPoolObject::define(env));
  exports.Set("NativeDevice", environment->device_constructor.Value());
  exports.Set("instructionSet", isa_name(best_isa()));
  exports.Set("amx", Napi::Function::New(env, amx_report, "amx"));
  exports.Set("version", KV_VERSION);
#define EXPORT(name, function) exports.Set(#name, Napi::Function::New(env, function, #name));
  KV_OPERATIONS(EXPORT)
#undef EXPORT
  return exports;
}

}  // namespace
}  // namespace kv

static Napi::Object initialise_addon(Napi::Env env, Napi::Object exports) { return kv::initialise(env, exports); }
NODE_API_MODULE(kv, initialise_addon)
