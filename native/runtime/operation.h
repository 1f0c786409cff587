// One operation of a stream: a kernel's call, or a copy.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "runtime/execution.h"
#include "runtime/status.h"
#include "runtime/storage.h"

namespace kv {

struct Operation {
  const char* name = nullptr;  // the public name, for messages; a literal
  std::vector<std::shared_ptr<Storage>> holds;  // memory that is kept until the operation has run
  std::function<Status(ExecutionContext&)> launch;
};

}  // namespace kv
