// Moves bytes between tensors and JavaScript, in stream order.
#include <cstring>
#include <vector>

#include "bindings/operation-call.h"
#include "bindings/typed-array.h"

namespace kv {
namespace {

// Copies a strided tensor to row-major order.
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

void copy_out(const TensorArgument& tensor, void* destination) {
  if (tensor.layout.contiguous()) {
    if (tensor.bytes() > 0) std::memcpy(destination, tensor.data, tensor.bytes());
  } else {
    gather(tensor.layout, tensor.as<char>(), static_cast<char*>(destination), 0);
  }
}

}  // namespace

// read(stream, tensor, destination: TypedArray): a promise of the destination, filled in row-major order.
Napi::Value read(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument tensor = call.tensor(1);
  const auto destination = info[2].As<Napi::TypedArray>();
  void* data = bytes_of(destination);
  call.enqueue("read", [tensor, data](ExecutionContext&) {
    copy_out(tensor, data);
    return Status::success();
  });
  return settle_in_order(call.stream(), info.Env(), destination);
}

// write(stream, source: TypedArray, tensor): the bytes are taken now, and stored in stream order.
Napi::Value write(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const auto source = info[1].As<Napi::TypedArray>();
  const TensorArgument tensor = call.tensor(2);
  const std::vector<char> bytes(bytes_of(source), bytes_of(source) + source.ByteLength());
  return call.enqueue("write", [tensor, bytes](ExecutionContext&) {
    std::memcpy(tensor.data, bytes.data(), bytes.size());
    return Status::success();
  });
}

// copy(stream, source, destination): as many bytes, the destination contiguous.
Napi::Value copy(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument source = call.tensor(1);
  const TensorArgument destination = call.tensor(2);
  return call.enqueue("copy", [source, destination](ExecutionContext&) {
    copy_out(source, destination.data);
    return Status::success();
  });
}

}  // namespace kv
