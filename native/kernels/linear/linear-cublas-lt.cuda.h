// The linear layer of many rows through cuBLASLt.
#pragma once

#include "kernels/linear/linear.h"

namespace kv {

// Whether cuBLASLt is there and multiplies these dtypes and layouts.
bool cublas_lt_multiplies(const LinearArguments& arguments);

Status linear_cublas_lt(const LinearArguments& arguments, ExecutionContext& context);

}  // namespace kv
