#include "kernels/train-codebook/train-codebook.h"

#include "bindings/operation-call.h"

namespace kv {

// trainCodebook(stream, keys [kvHead, token, dim], scale [kvHead, dim], means, rounded [kvHead, book, centroid, subDim],
//               counts [kvHead, book, centroid], channelScale, seed, batchVectors, firstIteration, iterations)
Napi::Value train_codebook(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument keys = call.tensor(1);
  const OutputArgument means = call.output(3);
  TrainCodebookArguments arguments;
  arguments.keys = keys.data;
  arguments.dtype = keys.dtype();
  arguments.head_stride = keys.stride(0);
  arguments.token_stride = keys.stride(1);
  arguments.kv_heads = static_cast<int32_t>(keys.extent(0));
  arguments.tokens = keys.extent(1);
  arguments.head_dim = static_cast<int32_t>(keys.extent(2));
  arguments.groups = static_cast<int32_t>(keys.extent(2) / means.extent(3));
  arguments.books = static_cast<int32_t>(means.extent(1));
  arguments.centroids = static_cast<int32_t>(means.extent(2));
  arguments.scale = call.output(2).as<float>();
  arguments.means = means.as<float>();
  arguments.rounded = call.output(4).as<uint16_t>();
  arguments.counts = call.output(5).as<int32_t>();
  arguments.channel_scale = call.flag(6);
  arguments.seed = static_cast<uint64_t>(call.integer(7));
  arguments.batch_vectors = static_cast<int32_t>(call.integer(8));
  arguments.first_iteration = static_cast<int32_t>(call.integer(9));
  arguments.iterations = static_cast<int32_t>(call.integer(10));
  return call.enqueue("trainCodebook",
                      [arguments](ExecutionContext& context) { return train_codebook(arguments, context); });
}

}  // namespace kv
