// What an operation finds when its turn in a stream comes.
#pragma once

#include <string>

#include "runtime/isa.h"
#include "runtime/workers.h"

namespace kv {

enum class DeviceKind { cpu, cuda };

class Device;
class Queue;
struct Fault;

// An operation's words for one of its faults. Host code.
using FaultText = std::string (*)(const Fault& fault);

// Where kernels on a device report bad data, in which operation's name, and who puts it into words.
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
  const char* operation = nullptr;  // the name of the one whose turn it is

  FaultSink faults(FaultText text) const { return {fault, operation, text}; }
};

}  // namespace kv
