// Turns queries and keys, and appends the keys and values, of decode steps on CUDA devices.
#pragma once

#include "kernels/append-kv/append-kv.h"

namespace kv {

bool fits_append_kv_rope(const AppendKvArguments& arguments);

Status append_kv_rope(const AppendKvArguments& arguments, ExecutionContext& context);

}  // namespace kv
