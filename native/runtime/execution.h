// What an operation is given when it is launched.
#pragma once

#include <cstddef>
#include <string>

#include "runtime/isa.h"
#include "runtime/workers.h"

namespace kv {

enum class DeviceKind { cpu, cuda };

class Device;
class Queue;
struct Fault;

// Puts one of an operation's faults into words. Host code.
using FaultText = std::string (*)(const Fault& fault);

// Where kernels on a device report bad data: the fault record, the operation's name, and the function that words the
// fault.
struct FaultSink {
  Fault* fault = nullptr;
  const char* operation = nullptr;
  FaultText text = nullptr;
};

struct ExecutionContext {
  Workers& workers;
  Isa isa = Isa::baseline;
  DeviceKind device = DeviceKind::cpu;
  void* cuda_stream = nullptr;  // cudaStream_t, when device is cuda
  Device* owner = nullptr;
  Queue* queue = nullptr;
  Fault* fault = nullptr;           // of the queue
  const char* operation = nullptr;  // name of the operation that is being launched

  FaultSink faults(FaultText text) const { return {fault, operation, text}; }
  // The queue's. They are here so that kernels need not include all that a device is.
  void* workspace(size_t bytes) const;
  void* zeroed_workspace(size_t bytes) const;
};

}  // namespace kv
