#include "kernels/train-codebook/train-codebook.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"

namespace kv {

KV_CPU_KERNEL(train_codebook, TrainCodebookArguments)

Status train_codebook(const TrainCodebookArguments& given, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) {
    return Status::failure(StatusCode::capability, "codebooks are trained on a CPU device; copy the keys to one");
  }
  int64_t head = -1;
  int64_t token = -1;
  TrainCodebookArguments arguments = given;
  arguments.bad_head = &head;
  arguments.bad_token = &token;
  train_codebook_cpu(arguments, context);
  if (head < 0) return Status::success();
  return Status::failure(StatusCode::invalid_value, "the key of token " + std::to_string(token) + " of kv head " +
                                                        std::to_string(head) + " has a number that is not finite");
}

}  // namespace kv
