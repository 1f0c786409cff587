// What a launcher returns. Kernels never throw and never exit.
#pragma once

#include <string>
#include <utility>

namespace kv {

enum class StatusCode { ok, out_of_memory, capability, device_fault, invalid_value };

struct Status {
  StatusCode code = StatusCode::ok;
  std::string message;
  const char* operation = nullptr;  // whose failure it is, where that is not the operation in hand

  bool ok() const { return code == StatusCode::ok; }
  static Status success() { return {}; }
  static Status failure(StatusCode code, std::string message) { return {code, std::move(message), nullptr}; }
};

}  // namespace kv
