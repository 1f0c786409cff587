#include "kernels/write-entries/write-entries.h"

#include <cstring>

#include "bindings/operation-call.h"
#include "bindings/typed-array.h"

namespace kv {

// writeEntries(stream, table, list: Int32Array [at | entries, entry]): takes the list now.
Napi::Value write_entries(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const OutputArgument table = call.output(1);
  const ArrayBytes given = array_bytes(info[2]);
  refuse_recording(call.stream(), info.Env(), "writeEntries");
  const std::shared_ptr<HostMemory> list = call.stream().device()->host_memory(given.bytes);
  if (list == nullptr) {
    throw make_error(info.Env(), Status::failure(StatusCode::out_of_memory, "no host memory for the list"));
  }
  std::memcpy(list->data, given.data, given.bytes);
  WriteEntriesArguments arguments;
  arguments.table = table.as<int32_t>();
  arguments.count = static_cast<int32_t>(given.bytes / sizeof(int32_t) / 2);
  return call.enqueue("writeEntries", [arguments, list](ExecutionContext& context) mutable {
    const void* at = list->data;
    if (context.device == DeviceKind::cuda) {
      void* const brought = context.workspace(list->bytes);
      if (brought == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for the list");
      const Status status = context.owner->upload(brought, list, *context.queue);
      if (!status.ok()) return status;
      at = brought;
    }
    arguments.at = static_cast<const int32_t*>(at);
    arguments.entries = arguments.at + arguments.count;
    return write_entries(arguments, context);
  });
}

}  // namespace kv
