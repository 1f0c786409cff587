#include "runtime/stream.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <utility>

namespace kv {
namespace {

// How long the stream's thread sleeps before it looks again whether work has ended.
constexpr auto kPoll = std::chrono::microseconds(20);

std::shared_ptr<Queue> queue_of(Device& device) {
  std::shared_ptr<Queue> queue = device.create_queue();
  if (queue == nullptr) throw std::bad_alloc();
  return queue;
}

void add_once(std::vector<const char*>& names, const char* name) {
  if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
}

Status named(const Status& status, const std::vector<const char*>& suspects) {
  std::string culprit;
  for (const char* name : suspects) culprit += (culprit.empty() ? "" : ", ") + std::string(name);
  if (status.operation != nullptr) culprit = status.operation;
  return Status::failure(status.code, culprit + ": " + status.message);
}

// The failure of a stream that waited for a failed one.
Status passed_on(const Status& status) {
  const std::string culprit = status.operation == nullptr ? "" : std::string(status.operation) + ": ";
  return Status::failure(status.code, "waitFor: " + culprit + status.message);
}

}  // namespace

Stream::Stream(std::shared_ptr<Device> device)
    : device_(std::move(device)), launched_(queue_of(*device_)), thread_(&Stream::thread_main, this) {}

void Stream::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  std::lock_guard<std::mutex> lock(closing_);
  if (thread_.joinable()) thread_.join();
}

void Stream::enqueue(Operation operation) {
  if (recording()) {
    recording_->steps.push_back({branch_, std::move(operation), std::nullopt});
  } else {
    push({Kind::operation, std::move(operation), nullptr, nullptr, {}, {}});
  }
}

void Stream::begin_recording() {
  recording_ = std::make_shared<Recording>();
  branch_ = 0;
}

std::shared_ptr<Recording> Stream::end_recording() {
  recording_->open = false;
  return std::move(recording_);
}

void Stream::leave_recording() {
  if (recording() && branch_ == 0) recording_->open = false;
  recording_ = nullptr;
}

void Stream::replay(std::shared_ptr<Recording> recording) {
  push({Kind::replay, {}, std::move(recording), nullptr, {}, {}});
}

void Stream::release(std::shared_ptr<Recording> recording) {
  push({Kind::release, {}, std::move(recording), nullptr, {}, {}});
}

void Stream::notify(Notification notification) {
  push({Kind::notification, {}, nullptr, std::move(notification), {}, {}});
}

void Stream::wait_for(Stream& other, bool takes_failure) {
  if (other.recording()) {
    if (!recording()) {
      recording_ = other.recording_;
      branch_ = recording_->branches++;
    }
    recording_->steps.push_back({branch_, {}, other.branch_});
    return;
  }
  const auto signal = std::make_shared<std::promise<Signal>>();
  push({Kind::wait, {}, nullptr, nullptr, nullptr, signal->get_future(), takes_failure});
  other.push({Kind::signal, {}, nullptr, nullptr, signal, {}});
}

void Stream::push(Entry entry) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(entry));
  }
  wake_.notify_one();
}

Status Stream::prepare(const Operation& operation) {
  if (device_->kind() == DeviceKind::cpu) return Status::success();
  add_once(unconfirmed_, operation.name);
  for (const std::shared_ptr<Storage>& storage : operation.holds) {
    const Status status = storage->used_on(launched_);
    if (!status.ok()) return status;
  }
  return Status::success();
}

void Stream::run(const Operation& operation) {
  Status status = prepare(operation);
  if (status.ok()) status = launch(operation, *launched_);
  if (!status.ok()) fail(status, operation.name);
}

void Stream::replay_now(Recording& recording) {
  const char* current = "replay";
  if (recording.graph == nullptr && recording.ran) {
    const auto launch_all = [&] { return launch_steps(recording, current); };
    const Status status = launched_->capture(launch_all, recording.queues, recording.graph);
    if (!status.ok()) return fail(status, current);
  }
  for (const RecordedStep& step : recording.steps) {
    if (step.awaited.has_value()) continue;
    if (recording.graph != nullptr) {
      add_once(unconfirmed_, step.operation.name);
      continue;
    }
    const Status status = prepare(step.operation);
    if (!status.ok()) return fail(status, step.operation.name);
  }
  while (recording.queues.size() + 1 < recording.branches) recording.queues.push_back(launched_->branch());
  const Status status = recording.graph != nullptr ? recording.graph->launch() : launch_steps(recording, current);
  recording.ran = true;
  if (status.ok()) return;
  fail(status, current);
  // After a failure, branches are not joined. Memory that a branch still uses is freed in the order of this stream,
  // so this stream waits for every branch.
  for (const std::shared_ptr<Queue>& queue : recording.queues) {
    if (queue != nullptr) launched_->run_after(*queue);
  }
}

Status Stream::launch_steps(const Recording& recording, const char*& current) {
  const auto queue_of = [&](size_t branch) -> Queue& {
    return branch == 0 || recording.queues[branch - 1] == nullptr ? *launched_ : *recording.queues[branch - 1];
  };
  for (const RecordedStep& step : recording.steps) {
    Queue& queue = queue_of(step.branch);
    Status status;
    if (!step.awaited.has_value()) {
      current = step.operation.name;
      status = launch(step.operation, queue);
    } else if (&queue != &queue_of(*step.awaited)) {
      current = "waitFor";
      status = queue.run_after(queue_of(*step.awaited));
    }
    if (!status.ok()) return status;
  }
  current = "replay";
  return Status::success();
}

Status Stream::launch(const Operation& operation, Queue& queue) {
  ExecutionContext context{device_->workers(),  device_->isa(), device_->kind(),
                           queue.cuda_stream(), device_.get(),  &queue,          queue.fault(),   operation.name};
  std::lock_guard<std::mutex> turn(device_->turn());
  return guarded([&] { return operation.launch(context); });
}

// The wait always ends: a stream waits only for what was enqueued earlier, so the other stream's thread reaches the
// signal without this one. Notifications of this stream are delivered while it waits.
void Stream::follow(std::future<Signal>& other, bool takes_failure) {
  while (!awaited_.empty() && other.wait_for(kPoll) != std::future_status::ready) settle(false);
  const Signal signal = other.get();
  if (!failure_.ok()) return;
  if (takes_failure && !signal.failure.ok()) {
    failure_ = passed_on(signal.failure);
  } else if (signal.moment != nullptr) {
    const Status status = launched_->run_after(*signal.moment);
    if (!status.ok()) return fail(status, "waitFor");
    if (!takes_failure) return;
    const auto went_well = [](const std::shared_ptr<Moment>& earlier) {
      const std::optional<Status> outcome = earlier->poll();
      return outcome.has_value() && outcome->ok();
    };
    others_.erase(std::remove_if(others_.begin(), others_.end(), went_well), others_.end());
    others_.push_back(signal.moment);
  }
}

void Stream::await(Notification notification) {
  std::shared_ptr<Moment> moment = launched_->mark();
  if (moment == nullptr) return notification(failure_);
  awaited_.push_back({std::move(moment), std::move(notification), failure_, std::exchange(unconfirmed_, {}),
                      std::exchange(others_, {})});
}

void Stream::settle(bool all) {
  while (!awaited_.empty()) {
    Awaited& first = awaited_.front();
    const std::optional<Status> outcome = all ? first.moment->wait() : first.moment->poll();
    if (!outcome.has_value()) return;
    Status failure = outcome->ok() ? Status::success() : named(*outcome, first.operations);
    for (const std::shared_ptr<Moment>& other : first.others) {
      // This wait is short, because the other stream's moment came before this one.
      const Status there = other->wait();
      if (failure.ok() && !there.ok()) failure = passed_on(there);
    }
    if (first.failure.ok() && !failure.ok()) {
      failure_ = failure;
      for (Awaited& later : awaited_) later.failure = failure;
    }
    first.notification(first.failure);
    awaited_.pop_front();
  }
}

// A device reports a fault of its own at any later call, without the operation's name. All operations that are not
// known to have succeeded are therefore named.
void Stream::fail(const Status& status, const char* operation) {
  std::vector<const char*> suspects;
  if (status.code == StatusCode::device_fault) {
    for (const Awaited& awaited : awaited_) {
      for (const char* name : awaited.operations) add_once(suspects, name);
    }
    for (const char* name : unconfirmed_) add_once(suspects, name);
  }
  if (suspects.empty()) suspects.push_back(operation);
  failure_ = named(status, suspects);
}

void Stream::process(Entry& entry) {
  switch (entry.kind) {
    case Kind::notification:
      return await(std::move(entry.notification));
    case Kind::signal:
      return entry.signal->set_value({launched_->mark(), failure_});
    case Kind::wait:
      return follow(entry.awaited, entry.takes_failure);
    case Kind::operation:
      if (failure_.ok()) run(entry.operation);
      return;
    case Kind::replay:
      if (failure_.ok()) replay_now(*entry.recording);
      return;
    case Kind::release:
      return;
  }
}

bool Stream::next(Entry& entry) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (queue_.empty() && !stop_) {
    if (awaited_.empty()) {
      wake_.wait(lock);
      continue;
    }
    wake_.wait_for(lock, kPoll);
    lock.unlock();
    settle(false);
    lock.lock();
  }
  if (queue_.empty()) return false;
  entry = std::move(queue_.front());
  queue_.pop_front();
  if (stop_ && failure_.ok()) failure_ = Status::failure(StatusCode::device_fault, "the stream was closed");
  return true;
}

void Stream::thread_main() {
  device_->bind_thread();
  Entry entry;
  while (next(entry)) {
    process(entry);
    entry = {};
    settle(false);
  }
  launched_->close();
  settle(true);
}

}  // namespace kv
