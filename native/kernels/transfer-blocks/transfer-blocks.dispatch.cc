#include "kernels/transfer-blocks/transfer-blocks.h"
#include "runtime/device.h"
#include "shared/dispatch/cpu-dispatch.h"

namespace kv {
namespace {

// One copy of the device's copy engine, which takes nothing from kernels that run meanwhile.
Status transfer(const TransferBlocksArguments& a, int64_t from, int64_t to, int64_t blocks, ExecutionContext& context) {
  const char* source = static_cast<const char*>(a.source) + from * a.block_bytes;
  char* destination = static_cast<char*>(a.destination) + to * a.block_bytes;
  const auto bytes = static_cast<size_t>(blocks * a.block_bytes);
  Device& device = *context.owner;
  if (a.from_host) return device.upload(destination, HostMemory::borrow(source, bytes, true), *context.queue);
  if (a.to_host) return device.download(HostMemory::borrow(destination, bytes, true), source, *context.queue);
  return device.copy(destination, source, bytes, *context.queue);
}

// Blocks that follow each other in both pools are one copy.
Status transfer_runs(const TransferBlocksArguments& a, ExecutionContext& context) {
  Status status;
  for (int32_t first = 0, end = 1; first < a.copies && status.ok(); first = end++) {
    while (end < a.copies && a.from[end] == a.from[end - 1] + 1 && a.to[end] == a.to[end - 1] + 1) ++end;
    status = transfer(a, a.from[first], a.to[first], end - first, context);
  }
  return status;
}

}  // namespace

KV_CPU_KERNEL(transfer_blocks, TransferBlocksArguments)

Status transfer_blocks(const TransferBlocksArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return transfer_runs(arguments, context);
  transfer_blocks_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
