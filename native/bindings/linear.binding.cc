#include "kernels/linear/linear.h"

#include <cstdint>
#include <string>

#include "bindings/errors.h"
#include "bindings/operation-call.h"

namespace kv {
namespace {

// Where the bytes of a tensor [token, feature] lie.
struct Rows {
  template <class Argument>
  explicit Rows(const Argument& tensor) : start(reinterpret_cast<intptr_t>(tensor.data)) {
    const auto element = static_cast<int64_t>(byte_size(tensor.dtype()));
    width = tensor.extent(1) * element;
    stride = tensor.stride(0) * element;
    end = tensor.layout.elements() == 0 ? start : start + (tensor.extent(0) - 1) * stride + width;
  }

  int64_t start;
  int64_t end;
  int64_t width;
  int64_t stride;
};

// Columns of one matrix do not overlap, though they lie between one another; rows of different strides that lie so are
// taken to.
bool overlap(const Rows& a, const Rows& b) {
  if (a.start == a.end || b.start == b.end || a.end <= b.start || b.end <= a.start) return false;
  const int64_t column = ((b.start - a.start) % a.stride + a.stride) % a.stride;
  return a.stride != b.stride || column < a.width || column + b.width > a.stride;
}

void refuse_overlap(Napi::Env env, const Rows& a, const Rows& b, const char* what) {
  if (!overlap(a, b)) return;
  throw make_error(env, "KV_INVALID_VALUE",
                   std::string("linear: an output shares memory with ") + what + "; give each output its own.");
}

}  // namespace

// linear(stream, input [token, in], accumulate,
//        and for each layer weight [out, in], bias [out] or undefined, output [token, out])
Napi::Value linear(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument input = call.tensor(1);
  std::vector<LinearArguments> layers;
  std::vector<Rows> outputs;
  for (size_t argument = 3; argument + 2 < info.Length(); argument += 3) {
    const TensorArgument weight = call.tensor(argument);
    const TensorArgument bias = call.optional_tensor(argument + 1);
    const OutputArgument output = call.output(argument + 2);
    refuse_overlap(info.Env(), Rows(input), Rows(output), "the input");
    for (const Rows& earlier : outputs) refuse_overlap(info.Env(), earlier, Rows(output), "another");
    outputs.emplace_back(output);
    LinearArguments layer;
    layer.input = input.data;
    layer.input_stride = input.stride(0);
    layer.output = output.data;
    layer.output_stride = output.stride(0);
    layer.dtype = input.dtype();
    layer.weight = weight.data;
    layer.weight_stride = weight.stride(0);
    layer.weight_dtype = weight.dtype();
    if (bias) {
      layer.bias = bias.data;
      layer.bias_dtype = bias.dtype();
    }
    layer.tokens = input.extent(0);
    layer.in_features = input.extent(1);
    layer.out_features = weight.extent(0);
    layer.accumulate = call.flag(2);
    layers.push_back(layer);
  }
  return call.enqueue("linear", [layers](ExecutionContext& context) { return linear(layers, context); });
}

}  // namespace kv
