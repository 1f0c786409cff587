#include "bindings/device-object.h"

#include <string>
#include <system_error>
#include <utility>

#include "bindings/environment.h"
#include "bindings/errors.h"
#include "bindings/host-pool-object.h"
#include "bindings/stream-object.h"
#include "bindings/tensor-object.h"
#include "bindings/typed-array.h"
#include "runtime/cuda-device.h"
#include "shared/memory-streams/memory-streams.h"

namespace kv {
namespace {

Isa isa_argument(const Napi::Value& value) {
  const Isa best = best_isa();
  if (!value.IsString()) return best;
  const std::string name = value.As<Napi::String>();
  for (const Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (name == isa_name(isa) && runs(isa)) return isa;
  }
  const bool refused = name == isa_name(Isa::amx) && amx_state() == AmxState::refused;
  throw make_error(value.Env(), "KV_CAPABILITY",
                   "instruction set '" + name + "' was asked for; " +
                       (refused ? "the system does not let this process use the processor's tile registers"
                                : std::string("this processor runs up to '") + isa_name(best) + "'"));
}

// A device on the CPU whose threads read memory as is soon found to be fastest, as many streams as `streams` says.
std::shared_ptr<Device> open_cpu_device(int threads, Isa isa, size_t limit, const Napi::Value& streams) {
  std::shared_ptr<Device> device = create_cpu_device(threads, isa, limit);
  const int wanted = streams.IsNumber() ? streams.As<Napi::Number>().Int32Value() : 0;
  if (wanted != 0) {
    MemoryReading several;
    several.streams = static_cast<short>(wanted);
    device->workers().set_memory_reading(several);
    return device;
  }
  const std::weak_ptr<Device> opened = device;
  when_memory_reading_known(isa, [opened](MemoryReading fastest) {
    if (const std::shared_ptr<Device> here = opened.lock()) here->workers().set_memory_reading(fastest);
  });
  return device;
}

// The arguments of `new NativeDevice`.
std::shared_ptr<Device> open_device(const Napi::CallbackInfo& info) {
  const std::string kind = info[0].As<Napi::String>();
  const int threads = info[2].As<Napi::Number>().Int32Value();
  const auto limit = static_cast<size_t>(info[4].As<Napi::Number>().DoubleValue());
  try {
    if (kind == "cpu") return open_cpu_device(threads, isa_argument(info[3]), limit, info[5]);
    Status status;
    std::shared_ptr<Device> device =
        create_cuda_device(info[1].As<Napi::Number>().Int32Value(), threads, limit, status);
    if (!status.ok()) throw make_error(info.Env(), status);
    return device;
  } catch (const std::system_error& error) {
    throw make_error(info.Env(), "KV_OUT_OF_MEMORY",
                     std::to_string(threads) + " threads were asked for, and the process can have no more: " +
                         error.what() + ". Ask for fewer.");
  }
}

}  // namespace

Napi::Function DeviceObject::define(Napi::Env env) {
  return DefineClass(
      env, "NativeDevice",
      {InstanceMethod<&DeviceObject::allocate>("allocate"), InstanceMethod<&DeviceObject::wrap>("wrap"),
       InstanceMethod<&DeviceObject::host_pool>("hostPool"),
       InstanceMethod<&DeviceObject::create_stream>("createStream"), InstanceMethod<&DeviceObject::memory>("memory"),
       InstanceMethod<&DeviceObject::instruction_set>("instructionSet"),
       InstanceMethod<&DeviceObject::memory_reading>("memoryReading"), InstanceMethod<&DeviceObject::name>("name")});
}

DeviceObject::DeviceObject(const Napi::CallbackInfo& info)
    : NativeObject<DeviceObject>(info), device_(open_device(info)) {}

// allocate(dtype, shape, strides, 0, bytes, contents: TypedArray or undefined)
Napi::Value DeviceObject::allocate(const Napi::CallbackInfo& info) {
  const Layout layout = layout_argument(info, 0);
  const double bytes = info[4].ToNumber().DoubleValue();
  std::shared_ptr<Storage> storage =
      bytes >= 0 && bytes < 0x1p62 ? Storage::allocate(device_, static_cast<size_t>(bytes)) : nullptr;
  if (!storage) throw make_error(info.Env(), "KV_OUT_OF_MEMORY", "the memory does not fit");
  if (!info[5].IsUndefined()) {
    const Status status = storage->fill(bytes_of(info[5], storage->bytes()));
    if (!status.ok()) throw make_error(info.Env(), status);
  }
  return TensorObject::create(info.Env(), std::move(storage), layout);
}

// wrap(dtype, shape, strides, 0, memory: TypedArray): makes no copy. The array is kept alive as long as it is used.
Napi::Value DeviceObject::wrap(const Napi::CallbackInfo& info) {
  const Layout layout = layout_argument(info, 0);
  const ArrayBytes memory = array_bytes(info[4]);
  auto keep = std::make_shared<Napi::Reference<Napi::Value>>(Napi::Reference<Napi::Value>::New(info[4], 1));
  keep->SuppressDestruct();
  // JavaScript may detach the buffer at any time. It has no memory then.
  const auto in_place = [keep, memory] {
    const ArrayBytes now = array_bytes(keep->Value());
    return now.data == memory.data && now.bytes >= memory.bytes;
  };
  std::shared_ptr<Environment> environment = Environment::of(info.Env());
  const auto release = [environment, keep] { environment->post([keep](Napi::Env) { keep->Reset(); }); };
  constexpr bool kWritable = true;
  auto storage =
      std::make_shared<Storage>(device_, BorrowedMemory{memory.data, memory.bytes, kWritable, in_place, release});
  return TensorObject::create(info.Env(), std::move(storage), layout);
}

// hostPool(bytes): a pool of which no memory is made yet.
Napi::Value DeviceObject::host_pool(const Napi::CallbackInfo& info) {
  return HostPoolObject::create(info.Env(), device_, info[0].ToNumber().DoubleValue());
}

Napi::Value DeviceObject::create_stream(const Napi::CallbackInfo& info) {
  return StreamObject::create(info.Env(), device_);
}

Napi::Value DeviceObject::memory(const Napi::CallbackInfo& info) {
  const MemoryReport report = device_->memory();
  Napi::Object object = Napi::Object::New(info.Env());
  object.Set("live", static_cast<double>(report.live));
  object.Set("peak", static_cast<double>(report.peak));
  object.Set("scratch", static_cast<double>(report.scratch));
  object.Set("pinned", static_cast<double>(report.pinned));
  object.Set("limit", static_cast<double>(report.limit));
  object.Set("finalized", static_cast<double>(report.finalized));
  return object;
}

Napi::Value DeviceObject::instruction_set(const Napi::CallbackInfo& info) {
  return Napi::String::New(info.Env(), isa_name(device_->isa()));
}

// A promise of how the device's threads read memory once the processor's way is known.
Napi::Value DeviceObject::memory_reading(const Napi::CallbackInfo& info) {
  std::shared_ptr<Environment> environment = Environment::of(info.Env());
  const Napi::Promise::Deferred deferred = Napi::Promise::Deferred::New(info.Env());
  environment->begin_pending(info.Env());
  when_memory_reading_known(device_->isa(), [environment, deferred, device = device_](MemoryReading) {
    environment->post([environment, deferred, device](Napi::Env env) {
      environment->end_pending(env);
      const MemoryReading reading = device->workers().memory_reading();
      Napi::Object object = Napi::Object::New(env);
      object.Set("streams", reading.streams);
      object.Set("cache", reading.cache);
      object.Set("requests", reading.requests);
      deferred.Resolve(object);
    });
  });
  return deferred.Promise();
}

Napi::Value DeviceObject::name(const Napi::CallbackInfo& info) { return Napi::String::New(info.Env(), device_->name()); }

}  // namespace kv
