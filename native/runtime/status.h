// What a launcher returns. Kernels never throw and never exit.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>

namespace kv {

enum class StatusCode { ok, out_of_memory, capability, device_fault, invalid_value };

struct Status {
  StatusCode code = StatusCode::ok;
  std::string message;
  const char* operation = nullptr;  // the operation that failed, if it is not the one that runs now

  bool ok() const { return code == StatusCode::ok; }
  static Status success() { return {}; }
  static Status failure(StatusCode code, std::string message) { return {code, std::move(message), nullptr}; }
};

inline Status invalid(std::string message) { return Status::failure(StatusCode::invalid_value, std::move(message)); }

// Calls `work`. An exception becomes a failure status.
template <class Work>
Status guarded(Work&& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return Status::failure(StatusCode::out_of_memory, "its working memory could not be allocated");
  } catch (const std::exception& error) {
    return Status::failure(StatusCode::device_fault, error.what());
  }
}

}  // namespace kv
