#include "kernels/cross-entropy/cross-entropy.h"

#include "bindings/operation-call.h"

namespace kv {

// crossEntropy(stream, logits [row, vocabulary], targets [row], output [row])
Napi::Value cross_entropy(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument logits = call.tensor(1);
  CrossEntropyArguments arguments;
  arguments.logits = logits.as<float>();
  arguments.row_stride = logits.stride(0);
  arguments.targets = call.tensor(2).as<int32_t>();
  arguments.output = call.output(3).as<float>();
  arguments.rows = logits.extent(0);
  arguments.vocabulary = logits.extent(1);
  return call.enqueue("crossEntropy",
                      [arguments](ExecutionContext& context) { return cross_entropy(arguments, context); });
}

}  // namespace kv
