#include <chrono>
#include <thread>

#include "shared/paged/paged-faults.h"
#include "tests/check.h"
#include "tests/cuda/cuda-testing.h"

using namespace kv;
using namespace kv::tests;

namespace {

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

// What `reader` finds in a value that `writer`, which is late, sets to 1.
int value_read(bool waits) {
  const std::shared_ptr<Device> device = cuda_device();
  Stream writer(device);
  Stream reader(device);
  Shared memory(3);
  int* const gate = memory.data();
  int* const value = gate + 1;
  volatile int* const found = gate + 2;
  *found = -1;
  writer.enqueue(device_operation("write", [=] __device__() {
    wait_until(gate, 1);
    *value = 1;
  }));
  if (waits) reader.wait_for(writer);
  reader.enqueue(device_operation("read", [=] __device__() { *found = *static_cast<volatile int*>(value); }));
  if (waits) {
    pause();
    CHECK(*found == -1);
  } else {
    CHECK(reached(reader).ok());
  }
  memory[0] = 1;
  CHECK(reached(writer).ok() && reached(reader).ok());
  return *found;
}

}  // namespace

TEST("a stream that waits runs after a late one, and would not without its wait") {
  CHECK(value_read(true) == 1);
  CHECK(value_read(false) == 0);
}

TEST("a stream that waits does not overwrite what a late one still reads, and goes on launching") {
  const std::shared_ptr<Device> device = cuda_device();
  Stream reader(device);
  Stream writer(device);
  Shared memory(3);
  int* const gate = memory.data();
  int* const value = gate + 1;
  int* const found = gate + 2;
  *value = 1;
  std::promise<void> launched;
  reader.enqueue(device_operation("read", [=] __device__() {
    wait_until(gate, 1);
    *found = *value;
  }));
  writer.wait_for(reader);
  writer.enqueue({"write", {}, [&](ExecutionContext& context) {
    launched.set_value();
    return run_on_device(context, [=] __device__() { *value = 2; });
  }});
  launched.get_future().wait();
  pause();
  CHECK(memory[1] == 1);
  memory[0] = 1;
  CHECK(reached(reader).ok() && reached(writer).ok());
  CHECK(memory[2] == 1 && memory[1] == 2);
}

TEST("a fault on a stream fails those that waited for it, by name, and not what they had done before") {
  const std::shared_ptr<Device> device = cuda_device();
  Stream failing(device);
  Stream waiting(device);
  Shared gate;
  int* const opened = gate.data();
  failing.enqueue({"append", {}, [=](ExecutionContext& context) {
    const FaultSink sink = context.faults(describe_paged_fault);
    return run_on_device(context, [=] __device__() {
      wait_until(opened, 1);
      report_fault(sink, PagedFault::slot_out_of_range, 7, 0, 4);
    });
  }});
  CHECK(reached(waiting).ok());
  waiting.wait_for(failing);
  waiting.enqueue(device_operation("next", [] __device__() {}));
  gate[0] = 1;
  const Status status = reached(waiting);
  CHECK(status.code == StatusCode::invalid_value);
  CHECK(status.message.rfind("waitFor: append: a batch entry names slot 7", 0) == 0);
  CHECK(reached(failing).message.rfind("append: ", 0) == 0);
}

TEST("branches of a recording run beside each other and are joined, at every replay") {
  const std::shared_ptr<Device> device = cuda_device();
  Stream stream(device);
  Stream side(device);
  Shared memory(4);
  int* const rounds = memory.data();
  int* const left = rounds + 1;
  int* const right = rounds + 2;
  int* const sum = rounds + 3;
  stream.begin_recording();
  stream.enqueue(device_operation("count", [=] __device__() {
    ++*rounds;
    __threadfence_system();
  }));
  side.wait_for(stream);
  // Each waits for the other.
  side.enqueue(device_operation("right", [=] __device__() {
    *static_cast<volatile int*>(right) = *rounds;
    __threadfence_system();
    wait_until(left, *rounds);
  }));
  side.enqueue(device_operation("twice", [=] __device__() { *sum = *left + *right; }));
  stream.enqueue(device_operation("left", [=] __device__() {
    *static_cast<volatile int*>(left) = *rounds;
    __threadfence_system();
    wait_until(right, *rounds);
  }));
  stream.wait_for(side);
  stream.enqueue(device_operation("add", [=] __device__() { *sum += 100 * *rounds; }));
  const std::shared_ptr<Recording> recording = stream.end_recording();
  CHECK(recording->joined());
  const auto start = std::chrono::steady_clock::now();
  for (int round = 1; round <= 6; ++round) {
    stream.replay(recording);
    CHECK(reached(stream).ok());
    CHECK(memory[3] == 102 * round);
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(4));
  CHECK(recording->graph != nullptr);
}

TEST("a fault on a branch is the stream's that replays") {
  const std::shared_ptr<Device> device = cuda_device();
  Stream stream(device);
  Stream side(device);
  Shared fails;
  const int* const wanted = fails.data();
  stream.begin_recording();
  side.wait_for(stream);
  side.enqueue({"score", {}, [=](ExecutionContext& context) {
    const FaultSink sink = context.faults(describe_paged_fault);
    return run_on_device(context, [=] __device__() {
      if (*static_cast<const volatile int*>(wanted) != 0) report_fault(sink, PagedFault::slot_out_of_range, 3, 0, 2);
    });
  }});
  stream.wait_for(side);
  const std::shared_ptr<Recording> recording = stream.end_recording();
  for (int round = 0; round < 3; ++round) stream.replay(recording);
  CHECK(reached(stream).ok());
  fails[0] = 1;
  stream.replay(recording);
  CHECK(reached(stream).message.rfind("score: ", 0) == 0);
  CHECK(reached(side).ok());
}
