// Copies bytes between tensors and JavaScript, in stream order.
#include <cstring>
#include <memory>

#include "bindings/errors.h"
#include "bindings/operation-call.h"
#include "bindings/typed-array.h"

namespace kv {
namespace {

// Copies elements in host memory to row-major order.
char* gather(const Layout& layout, const char* source, char* destination, int axis = 0) {
  if (layout.contiguous(axis)) {
    const size_t bytes = static_cast<size_t>(layout.elements(axis)) * byte_size(layout.dtype);
    std::memcpy(destination, source, bytes);
    return destination + bytes;
  }
  const int64_t step = layout.strides[axis] * static_cast<int64_t>(byte_size(layout.dtype));
  for (int64_t i = 0; i < layout.shape[axis]; ++i) {
    destination = gather(layout, source + i * step, destination, axis + 1);
  }
  return destination;
}

// The number of bytes from the first element to the end of the last.
size_t span_of(const Layout& layout) {
  int64_t last = 0;
  for (int axis = 0; axis < layout.rank; ++axis) last += (layout.shape[axis] - 1) * layout.strides[axis];
  return static_cast<size_t>(last + 1) * byte_size(layout.dtype);
}

Status no_memory() { return Status::failure(StatusCode::out_of_memory, "no host memory for the copy"); }

// Gathers elements in host memory. It runs as a host part, in the order of the queue, because other work of the queue
// may write these elements or read the destination. `held` is kept until then. With `waits` the caller waits until it
// is done, which memory of another device needs.
Status gather_in_order(const TensorArgument& source, const char* elements, char* destination, bool waits,
                       ExecutionContext& context, std::shared_ptr<HostMemory> held = nullptr) {
  const auto part = [layout = source.layout, elements, destination, held](HostContext&) {
    gather(layout, elements, destination);
    return Status::success();
  };
  const Status status = context.queue->run_on_host(part, context);
  const std::shared_ptr<Moment> done = waits && status.ok() ? context.queue->mark_launched() : nullptr;
  return done == nullptr ? status : done->wait();
}

// Copies elements in host memory to a contiguous tensor on the device.
Status send(const TensorArgument& source, const char* elements, void* destination, ExecutionContext& context,
            std::shared_ptr<HostMemory> held = nullptr) {
  const std::shared_ptr<HostMemory> packed = context.owner->host_memory(source.bytes());
  if (packed == nullptr) return no_memory();
  const Status status = gather_in_order(source, elements, packed->data, source.foreign, context, std::move(held));
  return status.ok() ? context.owner->upload(destination, packed, *context.queue) : status;
}

// Whether a contiguous tensor lies behind another in the same memory.
bool follows(const TensorArgument& tensor, const TensorArgument& next) {
  return tensor.storage == next.storage && tensor.as<char>() + tensor.bytes() == next.data;
}

// Adds the elements of `next`, which follows a contiguous tensor.
void append(TensorArgument& tensor, const TensorArgument& next) {
  tensor.layout.shape[0] = tensor.layout.elements() + next.layout.elements();
  tensor.layout.rank = 1;
  tensor.layout.strides[0] = 1;
}

// Whether the device can copy alone, because it reaches source and destination by address.
bool copies_directly(const TensorArgument& source, const OutputArgument& destination) {
  return source.layout.contiguous() && source.reached && destination.reached;
}

Status copy_tensor(const TensorArgument& source, const OutputArgument& destination, ExecutionContext& context) {
  Device& device = *context.owner;
  const bool direct = copies_directly(source, destination);
  const bool waits = source.foreign || destination.foreign;
  if (source.on_host && destination.on_host) {
    return gather_in_order(source, source.as<char>(), destination.as<char>(), waits, context);
  }
  if (source.on_host) {
    if (!source.layout.contiguous()) return send(source, source.as<char>(), destination.data, context);
    return device.upload(destination.data, HostMemory::borrow(source.data, source.bytes(), direct), *context.queue);
  }
  if (direct) {
    if (!destination.on_host) return device.copy(destination.data, source.data, source.bytes(), *context.queue);
    return device.download(HostMemory::borrow(destination.data, source.bytes(), direct), source.data, *context.queue);
  }
  const std::shared_ptr<HostMemory> spread = HostMemory::allocate(span_of(source.layout));
  if (spread == nullptr) return no_memory();
  const Status status = device.download(spread, source.data, *context.queue);
  if (!status.ok()) return status;
  if (!destination.on_host) return send(source, spread->data, destination.data, context, spread);
  return gather_in_order(source, spread->data, destination.as<char>(), waits, context, spread);
}

}  // namespace

// read(stream, tensor, destination: TypedArray): a promise of the destination, filled in row-major order.
Napi::Value read(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument tensor = call.tensor(1);
  char* const destination = bytes_of(info[2], tensor.bytes());
  refuse_recording(call.stream(), info.Env(), "read");
  if (tensor.layout.elements() == 0) return settle_in_order(call.stream(), info.Env(), info[2]);
  const auto brought = std::make_shared<std::shared_ptr<HostMemory>>();
  call.enqueue("read", [tensor, destination, brought](ExecutionContext& context) {
    if (tensor.on_host) return gather_in_order(tensor, tensor.as<char>(), destination, tensor.foreign, context);
    *brought = context.owner->host_memory(span_of(tensor.layout));
    if (*brought == nullptr) return no_memory();
    return context.owner->download(*brought, tensor.data, *context.queue);
  });
  return settle_in_order(call.stream(), info.Env(), info[2], [tensor, destination, brought] {
    if (*brought != nullptr) gather(tensor.layout, (*brought)->data, destination);
  });
}

// write(stream, source: TypedArray, tensor): takes the bytes now and stores them in stream order.
Napi::Value write(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const OutputArgument tensor = call.copied(2);
  const char* const source = bytes_of(info[1], tensor.bytes());
  refuse_recording(call.stream(), info.Env(), "write");
  const std::shared_ptr<HostMemory> bytes = call.stream().device()->host_memory(tensor.bytes());
  if (bytes == nullptr) throw make_error(info.Env(), no_memory());
  std::memcpy(bytes->data, source, bytes->bytes);
  return call.enqueue("write", [tensor, bytes](ExecutionContext& context) {
    if (tensor.on_host) {
      const auto store = [tensor, bytes](HostContext&) {
        std::memcpy(tensor.data, bytes->data, bytes->bytes);
        return Status::success();
      };
      return context.queue->run_on_host(store, context);
    }
    return context.owner->upload(tensor.data, bytes, *context.queue);
  });
}

// copy(stream, destination, source, ...): as many bytes. The destination is contiguous, and so is each of several sources.
// Any may be on the host.
Napi::Value copy(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  struct Copy {
    TensorArgument source;
    OutputArgument destination;
  };
  std::vector<Copy> copies;
  OutputArgument destination = call.copied(1);
  for (size_t index = 2; index < info.Length(); ++index) {
    const TensorArgument source = call.tensor(index);
    if (source.layout.elements() == 0) continue;
    if (!copies.empty() && follows(copies.back().source, source)) {
      append(copies.back().source, source);
    } else {
      copies.push_back({source, destination});
    }
    destination.data = static_cast<char*>(destination.data) + source.bytes();
  }
  for (const Copy& copy : copies) {
    const auto& [source, to] = copy;
    const bool in_host_memory = source.on_host && to.on_host && !source.foreign && !to.foreign;
    if (!copies_directly(source, to) && !in_host_memory) {
      refuse_recording(call.stream(), info.Env(), "a copy through host memory");
    }
  }
  if (copies.empty()) return info.Env().Undefined();
  return call.enqueue("copy", [copies](ExecutionContext& context) {
    Status status;
    for (size_t i = 0; i < copies.size() && status.ok(); ++i) {
      status = copy_tensor(copies[i].source, copies[i].destination, context);
    }
    return status;
  });
}

}  // namespace kv
