#include "kernels/running-means/running-means.h"

#include "bindings/operation-call.h"

namespace kv {

// runningMeans(stream, values [block, blockToken, dim], sums [valueBlock, dim], means [valueBlock, dim],
//              list [from | to | before | count, sum])
Napi::Value running_means(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument values = call.tensor(1);
  const TensorArgument list = call.tensor(4);
  RunningMeansArguments arguments;
  arguments.values = values.data;
  arguments.dtype = values.dtype();
  arguments.block_stride = values.stride(0);
  arguments.token_stride = values.stride(1);
  arguments.head_dim = static_cast<int32_t>(values.extent(2));
  arguments.sums = call.output(2).as<float>();
  arguments.means = call.output(3).data;
  arguments.from = list.as<int32_t>();
  arguments.to = arguments.from + list.stride(0);
  arguments.before = arguments.to + list.stride(0);
  arguments.counts = arguments.before + list.stride(0);
  arguments.length = static_cast<int32_t>(list.extent(1));
  return call.enqueue("runningMeans", [arguments](ExecutionContext& context) { return running_means(arguments, context); });
}

}  // namespace kv
