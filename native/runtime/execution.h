// What an operation finds when its turn in a stream comes.
#pragma once

#include "runtime/isa.h"
#include "runtime/workers.h"

namespace kv {

enum class DeviceKind { cpu, cuda };

class Device;
class Queue;
struct Fault;

// Where kernels on a device report bad data, and in which operation's name.
struct FaultSink {
  Fault* fault = nullptr;
  const char* operation = nullptr;
};

struct ExecutionContext {
  Workers& workers;
  Isa isa = Isa::baseline;
  DeviceKind device = DeviceKind::cpu;
  void* cuda_stream = nullptr;  // cudaStream_t, when device is cuda
  Device* owner = nullptr;
  Queue* queue = nullptr;
  FaultSink faults = {};
};

}  // namespace kv
