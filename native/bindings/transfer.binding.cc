// Moves bytes between tensors and JavaScript, in stream order.
#include <cstring>
#include <vector>

#include "bindings/operation-call.h"
#include "bindings/typed-array.h"

namespace kv {
namespace {

// Copies strided elements in host memory to row-major order.
char* gather(const Layout& layout, const char* source, char* destination, int axis) {
  const auto size = static_cast<int64_t>(byte_size(layout.dtype));
  if (axis == layout.rank) {
    std::memcpy(destination, source, static_cast<size_t>(size));
    return destination + size;
  }
  for (int64_t i = 0; i < layout.shape[axis]; ++i) {
    destination = gather(layout, source + i * layout.strides[axis] * size, destination, axis + 1);
  }
  return destination;
}

// Bytes from the first element to the end of the last.
size_t span_of(const Layout& layout) {
  int64_t last = 0;
  for (int axis = 0; axis < layout.rank; ++axis) last += (layout.shape[axis] - 1) * layout.strides[axis];
  return static_cast<size_t>(last + 1) * byte_size(layout.dtype);
}

// Copies a tensor to contiguous memory, on the host or on the stream's device.
Status copy_out(const TensorArgument& tensor, void* destination, ExecutionContext& context) {
  if (tensor.layout.elements() == 0) return Status::success();
  if (tensor.layout.contiguous()) return context.owner->copy(destination, tensor.data, tensor.bytes(), *context.queue);
  if (context.device == DeviceKind::cpu) {
    gather(tensor.layout, tensor.as<char>(), static_cast<char*>(destination), 0);
    return Status::success();
  }
  std::vector<char> spread(span_of(tensor.layout));
  std::vector<char> dense(tensor.bytes());
  Status status = context.owner->copy(spread.data(), tensor.data, spread.size(), *context.queue);
  if (!status.ok()) return status;
  gather(tensor.layout, spread.data(), dense.data(), 0);
  return context.owner->copy(destination, dense.data(), dense.size(), *context.queue);
}

}  // namespace

// read(stream, tensor, destination: TypedArray): a promise of the destination, filled in row-major order.
Napi::Value read(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument tensor = call.tensor(1);
  const auto destination = info[2].As<Napi::TypedArray>();
  void* data = bytes_of(destination);
  call.enqueue("read", [tensor, data](ExecutionContext& context) { return copy_out(tensor, data, context); });
  return settle_in_order(call.stream(), info.Env(), destination);
}

// write(stream, source: TypedArray, tensor): the bytes are taken now, and stored in stream order.
Napi::Value write(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const auto source = info[1].As<Napi::TypedArray>();
  const TensorArgument tensor = call.tensor(2);
  const std::vector<char> bytes(bytes_of(source), bytes_of(source) + source.ByteLength());
  return call.enqueue("write", [tensor, bytes](ExecutionContext& context) {
    return context.owner->copy(tensor.data, bytes.data(), bytes.size(), *context.queue);
  });
}

// copy(stream, source, destination): as many bytes, the destination contiguous; one may be on the host.
Napi::Value copy(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument source = call.tensor(1);
  const TensorArgument destination = call.tensor(2);
  return call.enqueue("copy", [source, destination](ExecutionContext& context) {
    return copy_out(source, destination.data, context);
  });
}

}  // namespace kv
