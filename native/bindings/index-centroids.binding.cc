#include "kernels/index-centroids/index-centroids.h"

#include "bindings/operation-call.h"

namespace kv {

// indexCentroids(stream, centroids [kvHead, book, centroid, subDim], index [kvHead, book, byte]), both in host memory
Napi::Value index_centroids(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument centroids = call.tensor(1);
  const OutputArgument index = call.output(2);
  if (!centroids.on_host || !index.on_host) {
    throw make_error(info.Env(), "KV_DEVICE",
                     "centroids and their index are built on the host; give tensors of device.hostTensor()");
  }
  IndexCentroidsArguments arguments;
  arguments.centroids = centroids.as<uint16_t>();
  arguments.index = index.as<uint8_t>();
  arguments.books = centroids.extent(0) * centroids.extent(1);
  arguments.centroid_count = static_cast<int32_t>(centroids.extent(2));
  arguments.sub_dim = static_cast<int32_t>(centroids.extent(3));
  return call.enqueue("indexCentroids", [arguments](ExecutionContext& context) { return index_centroids(arguments, context); });
}

}  // namespace kv
