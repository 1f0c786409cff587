#include "runtime/queue.cuda.h"

#include <algorithm>
#include <cuda/atomic>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include "runtime/check.cuda.h"
#include "runtime/fault.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

class CudaEvent : public Moment {
 public:
  explicit CudaEvent(unsigned flags = 0)
      : status_(cuda_status(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | flags))) {}
  ~CudaEvent() override {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }

  void record(cudaStream_t stream) {
    if (status_.ok()) status_ = cuda_status(cudaEventRecord(event_, stream));
  }
  bool recorded() const { return status_.ok(); }

  std::optional<Status> poll() override {
    if (!status_.ok()) return status_;
    const cudaError_t result = cudaEventQuery(event_);
    if (result == cudaErrorNotReady) return std::nullopt;
    return outcome(result);
  }

  Status wait() override { return status_.ok() ? outcome(cudaEventSynchronize(event_)) : status_; }

  Status hold_back(cudaStream_t stream) const {
    return status_.ok() ? cuda_status(cudaStreamWaitEvent(stream, event_, 0)) : status_;
  }

 protected:
  virtual Status outcome(cudaError_t result) const { return cuda_status(result); }

  cudaEvent_t event_ = nullptr;
  Status status_;
};

// Keeps a copy of the fault record as it was at this moment: the fault of a later operation must not fail an earlier
// wait.
class CudaMoment : public CudaEvent {
 public:
  CudaMoment(cudaStream_t stream, CudaFaults* faults, std::shared_ptr<HostFailure> host,
             std::shared_ptr<HostMemory> seen)
      : host_(std::move(host)), seen_(std::move(seen)) {
    if (seen_ == nullptr) status_ = Status::failure(StatusCode::out_of_memory, "no memory to wait with");
    if (status_.ok() && host_ != nullptr) {
      status_ = cuda_status(cudaMemcpyAsync(&faults->host_part_failed, host_->flag(), sizeof(int32_t),
                                            cudaMemcpyHostToDevice, stream));
    }
    if (status_.ok()) {
      status_ = cuda_status(cudaMemcpyAsync(seen_->data, faults, sizeof(CudaFaults), cudaMemcpyDeviceToHost, stream));
    }
    record(stream);
  }

 private:
  Status outcome(cudaError_t result) const override {
    if (result != cudaSuccess) return cuda_status(result);
    const auto& faults = *reinterpret_cast<const CudaFaults*>(seen_->data);
    if (faults.fault.code != 0) {
      return {StatusCode::invalid_value, faults.fault.text(faults.fault), faults.fault.operation};
    }
    return faults.host_part_failed != 0 ? host_->status() : Status::success();
  }

  std::shared_ptr<HostFailure> host_;
  std::shared_ptr<HostMemory> seen_;
};

class CudaGraph : public Graph {
 public:
  CudaGraph(cudaGraphExec_t executable, std::shared_ptr<CudaQueue> queue,
            std::vector<std::shared_ptr<CudaScratch>> memory, HostTasks host_tasks, std::shared_ptr<HostBells> bells)
      : executable_(executable),
        queue_(std::move(queue)),
        memory_(std::move(memory)),
        host_tasks_(std::move(host_tasks)),
        bells_(std::move(bells)) {}
  ~CudaGraph() override {
    cudaStreamSynchronize(queue_->stream());
    cudaGraphExecDestroy(executable_);
  }

  Status launch() override {
    const auto tasks = static_cast<int64_t>(host_tasks_.size());
    if (tasks > 0) bells_->expect(tasks);
    const Status status = cuda_status(cudaGraphLaunch(executable_, queue_->stream()));
    if (tasks > 0 && !status.ok()) bells_->expect(-tasks);
    return status;
  }

 private:
  cudaGraphExec_t executable_;
  std::shared_ptr<CudaQueue> queue_;
  std::vector<std::shared_ptr<CudaScratch>> memory_;
  HostTasks host_tasks_;
  std::shared_ptr<HostBells> bells_;
};

// Null when the host has no memory to pin.
std::shared_ptr<void> pinned(size_t bytes) {
  void* memory = nullptr;
  if (cudaHostAlloc(&memory, bytes, cudaHostAllocPortable) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return std::shared_ptr<void>(memory, [](void* data) { cudaFreeHost(data); });
}

// Null when the host has no memory to pin.
std::shared_ptr<HostFailure> make_host_failure() {
  const std::shared_ptr<void> memory = pinned(sizeof(HostFailure::Flag));
  if (memory == nullptr) return nullptr;
  auto* flag = new (memory.get()) HostFailure::Flag(0);
  return std::make_shared<HostFailure>(std::shared_ptr<HostFailure::Flag>(memory, flag));
}

// Rings, and waits until the host has run the task. What kernels wrote before is visible to the host then, and what the
// host wrote to the kernels behind.
__global__ void run_host_task(HostBell* bell, HostTask* task) {
  ptx::follow_previous_kernel();
  __threadfence_system();
  const ::cuda::atomic_ref<HostTask*, ::cuda::thread_scope_system> word(*reinterpret_cast<HostTask**>(bell));
  word.store(task, ::cuda::memory_order_release);
  while (word.load(::cuda::memory_order_acquire) != nullptr) {
  }
}

}  // namespace

std::shared_ptr<HostBells> CudaHostBells::get() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bells_ != nullptr) return bells_;
  const std::shared_ptr<void> memory = pinned(HostBells::kCount * sizeof(HostBell));
  if (memory == nullptr) return nullptr;
  auto* bells = static_cast<HostBell*>(memory.get());
  for (size_t i = 0; i < HostBells::kCount; ++i) new (bells + i) HostBell;
  try {
    bells_ = std::make_shared<HostBells>(std::shared_ptr<HostBell>(memory, bells));
  } catch (const std::exception&) {
  }
  return bells_;
}

Status run_after(cudaStream_t later, cudaStream_t earlier) {
  cudaEvent_t reached = nullptr;
  Status status = cuda_status(cudaEventCreateWithFlags(&reached, cudaEventDisableTiming));
  if (status.ok()) status = cuda_status(cudaEventRecord(reached, earlier));
  if (status.ok()) status = cuda_status(cudaStreamWaitEvent(later, reached, 0));
  if (reached != nullptr) cudaEventDestroy(reached);
  return status;
}

std::shared_ptr<CudaQueue> CudaQueue::create(std::shared_ptr<PinnedMemory> pinned, ScratchBytes scratch_bytes,
                                             std::shared_ptr<CudaHostBells> bells) {
  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return nullptr;
  void* faults = nullptr;
  if (cudaMallocAsync(&faults, sizeof(CudaFaults), stream) != cudaSuccess ||
      cudaMemsetAsync(faults, 0, sizeof(CudaFaults), stream) != cudaSuccess) {
    cudaGetLastError();
    cudaStreamDestroy(stream);
    return nullptr;
  }
  return std::make_shared<CudaQueue>(stream, static_cast<CudaFaults*>(faults), std::move(pinned), std::move(scratch_bytes),
                                     std::move(bells));
}

CudaQueue::CudaQueue(cudaStream_t stream, CudaFaults* faults, std::shared_ptr<PinnedMemory> pinned,
                     ScratchBytes scratch_bytes, std::shared_ptr<CudaHostBells> bells)
    : stream_(stream),
      faults_(faults),
      pinned_(std::move(pinned)),
      scratch_bytes_(std::move(scratch_bytes)),
      bells_(std::move(bells)) {}

CudaQueue::CudaQueue(cudaStream_t stream, std::shared_ptr<CudaQueue> trunk)
    : stream_(stream),
      trunk_(std::move(trunk)),
      faults_(trunk_->faults_),
      pinned_(trunk_->pinned_),
      scratch_bytes_(trunk_->scratch_bytes_),
      bells_(trunk_->bells_) {}

CudaQueue::~CudaQueue() {
  workspace_.reset();
  zeroed_.reset();
  if (trunk_ == nullptr) cudaFreeAsync(faults_, stream_);
  if (side_ != nullptr) cudaStreamDestroy(side_);
  cudaStreamDestroy(stream_);
}

void* CudaQueue::side_stream() {
  int lowest = 0;
  int highest = 0;
  if (side_ != nullptr) return side_;
  if (cudaDeviceGetStreamPriorityRange(&lowest, &highest) == cudaSuccess &&
      cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, highest) == cudaSuccess) {
    return side_;
  }
  cudaGetLastError();
  return side_ = nullptr;
}

std::shared_ptr<CudaScratch> CudaQueue::allocate(size_t bytes) {
  void* data = nullptr;
  if (capturing_ != nullptr || cudaMallocAsync(&data, bytes, stream_) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  scratch_bytes_->fetch_add(bytes);
  return std::shared_ptr<CudaScratch>(new CudaScratch{data, bytes},
                                      [stream = stream_, held = scratch_bytes_](CudaScratch* scratch) {
                                        cudaFreeAsync(scratch->data, stream);
                                        held->fetch_sub(scratch->bytes);
                                        delete scratch;
                                      });
}

void* CudaQueue::workspace(size_t bytes) {
  if (workspace_ == nullptr || bytes > workspace_->bytes) {
    workspace_.reset();  // freed first, so that old and new need not fit at the same time
    workspace_ = allocate(bytes);
  }
  return workspace_ == nullptr ? nullptr : workspace_->data;
}

void* CudaQueue::zeroed_workspace(size_t bytes) {
  if (zeroed_ == nullptr || bytes > zeroed_->bytes) {
    zeroed_.reset();
    zeroed_ = allocate(bytes);
    if (zeroed_ != nullptr && cudaMemsetAsync(zeroed_->data, 0, bytes, stream_) != cudaSuccess) zeroed_.reset();
  }
  return zeroed_ == nullptr ? nullptr : zeroed_->data;
}

Status CudaQueue::run_on_host(HostPart part, ExecutionContext& context) {
  CudaQueue& queue = trunk();
  if (queue.host_failure_ == nullptr) queue.host_failure_ = make_host_failure();
  const std::shared_ptr<HostBells> bells = bells_->get();
  if (bell_ == nullptr && bells != nullptr) bell_ = bells->take();
  if (queue.host_failure_ == nullptr || bell_ == nullptr) {
    return Status::failure(StatusCode::out_of_memory, "no memory for its host part");
  }
  const auto task = std::make_shared<HostTask>(*context.owner, queue.host_failure_, context.operation,
                                               std::move(part));
  // A graph expects its tasks when it is launched.
  const int64_t expected = capturing_ != nullptr ? 0 : 1;
  bells->expect(expected);
  const Status status = launch_overlapped(run_host_task, 1, 1, 0, static_cast<cudaStream_t>(cuda_stream()), bell_.get(),
                                          task.get());
  if (!status.ok()) {
    bells->expect(-expected);
    return status;
  }
  HostTasks& kept = capturing_ != nullptr ? queue.captured_ : queue.host_tasks_;
  const auto done = [](const std::shared_ptr<HostTask>& earlier) { return earlier->done(); };
  kept.erase(std::remove_if(kept.begin(), kept.end(), done), kept.end());
  kept.push_back(task);
  return status;
}

void CudaQueue::close() {
  if (host_failure_ == nullptr) return;
  host_failure_->report(Status::failure(StatusCode::device_fault, "the stream was closed"));
  cudaStreamSynchronize(stream_);
  host_tasks_.clear();
}

std::shared_ptr<Moment> CudaQueue::mark() {
  std::shared_ptr<HostMemory> seen = pinned_->take(sizeof(CudaFaults));
  if (seen == nullptr) seen = HostMemory::allocate(sizeof(CudaFaults));
  return std::make_shared<CudaMoment>(stream_, faults_, host_failure_, std::move(seen));
}

// A thread that waits for this moment sleeps instead of spinning.
std::shared_ptr<Moment> CudaQueue::mark_launched() {
  auto moment = std::make_shared<CudaEvent>(cudaEventBlockingSync);
  moment->record(stream_);
  if (!moment->recorded()) cudaStreamSynchronize(stream_);
  return moment;
}

Status CudaQueue::run_after(const Moment& moment) {
  return static_cast<const CudaEvent&>(moment).hold_back(stream_);
}

Status CudaQueue::run_after(Queue& other) {
  return kv::run_after(static_cast<cudaStream_t>(cuda_stream()), static_cast<cudaStream_t>(other.cuda_stream()));
}

std::shared_ptr<Queue> CudaQueue::branch() {
  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return std::make_shared<CudaQueue>(stream, std::static_pointer_cast<CudaQueue>(shared_from_this()));
}

Status CudaQueue::capture(const std::function<Status()>& launches, const Queues& branches,
                          std::unique_ptr<Graph>& graph) {
  cudaStream_t stream = nullptr;
  Status status = cuda_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  if (!status.ok()) return status;
  std::vector<CudaQueue*> captured_on = {this};
  for (const std::shared_ptr<Queue>& branch : branches) {
    if (branch != nullptr) captured_on.push_back(static_cast<CudaQueue*>(branch.get()));
  }
  cudaGraph_t captured = nullptr;
  // Thread-local mode, because other threads go on allocating and copying during the capture.
  status = cuda_status(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  if (status.ok()) {
    // This queue is captured on a new stream, because other threads know its own. Only this thread knows a branch's
    // stream.
    for (CudaQueue* queue : captured_on) queue->capturing_ = queue == this ? stream : queue->stream_;
    status = launches();
    for (CudaQueue* queue : captured_on) queue->capturing_ = nullptr;
    const Status ended = cuda_status(cudaStreamEndCapture(stream, &captured));
    if (status.ok()) status = ended;
  }
  cudaStreamDestroy(stream);
  cudaGraphExec_t executable = nullptr;
  if (status.ok()) status = cuda_status(cudaGraphInstantiate(&executable, captured, 0));
  if (captured != nullptr) cudaGraphDestroy(captured);
  if (status.ok()) {
    std::vector<std::shared_ptr<CudaScratch>> memory;
    for (CudaQueue* queue : captured_on) memory.insert(memory.end(), {queue->workspace_, queue->zeroed_});
    HostTasks tasks = std::exchange(captured_, {});
    std::shared_ptr<HostBells> bells = tasks.empty() ? nullptr : bells_->get();
    graph = std::make_unique<CudaGraph>(executable, std::static_pointer_cast<CudaQueue>(shared_from_this()),
                                        std::move(memory), std::move(tasks), std::move(bells));
  }
  return status;
}

}  // namespace kv
