#include "runtime/stream.h"

#include <exception>
#include <new>
#include <utility>

namespace kv {

Stream::Stream(std::shared_ptr<Device> device)
    : device_(std::move(device)), launched_(device_->create_queue()), thread_(&Stream::thread_main, this) {}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Stream::enqueue(const char* name, Holds holds, Operation operation) {
  push({name, std::move(holds), std::move(operation), nullptr, {}});
}

void Stream::notify(Notification notification) { push({nullptr, {}, nullptr, std::move(notification), {}}); }

void Stream::wait_for(Stream& other) {
  auto reached = std::make_shared<std::promise<Status>>();
  push({"waitFor", {}, nullptr, nullptr, reached->get_future()});
  other.notify([reached](const Status& status) { reached->set_value(status); });
}

void Stream::push(Entry entry) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(entry));
  }
  wake_.notify_one();
}

Status Stream::run(Entry& entry) {
  if (entry.reached.valid()) return entry.reached.get();
  if (device_->kind() != DeviceKind::cpu) {
    unconfirmed_.push_back(entry.name);
    for (const std::shared_ptr<Storage>& storage : entry.holds) storage->used_on(launched_);
  }
  std::lock_guard<std::mutex> turn(device_->turn());
  return launch(entry);
}

Status Stream::launch(Entry& entry) {
  ExecutionContext context{device_->workers(),        device_->isa(), device_->kind(),
                           launched_->cuda_stream(), device_.get(),  launched_.get(), {launched_->fault(), entry.name}};
  try {
    return entry.operation(context);
  } catch (const std::bad_alloc&) {
    return Status::failure(StatusCode::out_of_memory, "its working memory could not be allocated");
  } catch (const std::exception& error) {
    return Status::failure(StatusCode::device_fault, error.what());
  }
}

void Stream::synchronize() {
  const Status status = launched_->synchronize();
  if (!status.ok() && failure_.ok()) fail(status, nullptr);
  unconfirmed_.clear();
}

// A device that runs what it is given later reports its own fault only when it is asked, and not of which operation.
void Stream::fail(const Status& status, const char* operation) {
  std::string culprit;
  if (status.operation != nullptr) {
    culprit = status.operation;
  } else if (operation != nullptr && (unconfirmed_.empty() || status.code != StatusCode::device_fault)) {
    culprit = operation;
  } else {
    for (const char* name : unconfirmed_) {
      if (culprit.find(name) == std::string::npos) culprit += (culprit.empty() ? "" : ", ") + std::string(name);
    }
  }
  failure_ = Status::failure(status.code, culprit + ": " + status.message);
}

void Stream::thread_main() {
  device_->bind_thread();
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    if (stop_ && failure_.ok()) failure_ = Status::failure(StatusCode::device_fault, "the stream was closed");
    lock.unlock();
    if (entry.notification) {
      synchronize();
      entry.notification(failure_);
    } else if (failure_.ok()) {
      const Status status = run(entry);
      if (!status.ok()) fail(status, entry.name);
    }
    entry = {};
    lock.lock();
  }
}

}  // namespace kv
