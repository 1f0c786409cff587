#include "runtime/cuda-queue.h"

#include <utility>
#include <vector>

#include "runtime/cuda-check.h"
#include "runtime/fault.h"

namespace kv {
namespace {

// The fault as it was when the queue came to the moment: a later operation's fault must not fail an earlier wait.
class CudaMoment : public Moment {
 public:
  CudaMoment(cudaStream_t stream, const Fault* fault, std::shared_ptr<HostMemory> seen) : seen_(std::move(seen)) {
    if (seen_ == nullptr) status_ = Status::failure(StatusCode::out_of_memory, "no memory to wait with");
    if (status_.ok()) status_ = cuda_status(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    if (status_.ok()) {
      status_ = cuda_status(cudaMemcpyAsync(seen_->data, fault, sizeof(Fault), cudaMemcpyDeviceToHost, stream));
    }
    if (status_.ok()) status_ = cuda_status(cudaEventRecord(event_, stream));
  }
  ~CudaMoment() override {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }

  std::optional<Status> poll() override {
    if (!status_.ok()) return status_;
    const cudaError_t result = cudaEventQuery(event_);
    if (result == cudaErrorNotReady) return std::nullopt;
    return outcome(result);
  }

  Status wait() override { return status_.ok() ? outcome(cudaEventSynchronize(event_)) : status_; }

 private:
  Status outcome(cudaError_t result) const {
    const auto& fault = *reinterpret_cast<const Fault*>(seen_->data);
    if (result != cudaSuccess || fault.code == FaultCode::none) return cuda_status(result);
    return {StatusCode::invalid_value, describe(fault), fault.operation};
  }

  std::shared_ptr<HostMemory> seen_;
  cudaEvent_t event_ = nullptr;
  Status status_;
};

class CudaGraph : public Graph {
 public:
  CudaGraph(cudaGraphExec_t executable, std::shared_ptr<CudaQueue> queue,
            std::vector<std::shared_ptr<CudaScratch>> memory)
      : executable_(executable), queue_(std::move(queue)), memory_(std::move(memory)) {}
  ~CudaGraph() override {
    cudaStreamSynchronize(queue_->stream());
    cudaGraphExecDestroy(executable_);
  }

  Status launch() override { return cuda_status(cudaGraphLaunch(executable_, queue_->stream())); }

 private:
  cudaGraphExec_t executable_;
  std::shared_ptr<CudaQueue> queue_;
  std::vector<std::shared_ptr<CudaScratch>> memory_;
};

}  // namespace

std::shared_ptr<CudaQueue> CudaQueue::create(std::shared_ptr<PinnedMemory> pinned, ScratchBytes scratch_bytes) {
  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return nullptr;
  void* fault = nullptr;
  if (cudaMallocAsync(&fault, sizeof(Fault), stream) != cudaSuccess ||
      cudaMemsetAsync(fault, 0, sizeof(Fault), stream) != cudaSuccess) {
    cudaGetLastError();
    cudaStreamDestroy(stream);
    return nullptr;
  }
  return std::make_shared<CudaQueue>(stream, static_cast<Fault*>(fault), std::move(pinned), std::move(scratch_bytes));
}

CudaQueue::CudaQueue(cudaStream_t stream, Fault* fault, std::shared_ptr<PinnedMemory> pinned,
                     ScratchBytes scratch_bytes)
    : stream_(stream), fault_(fault), pinned_(std::move(pinned)), scratch_bytes_(std::move(scratch_bytes)) {}

CudaQueue::~CudaQueue() {
  workspace_.reset();
  zeroed_.reset();
  cudaFreeAsync(fault_, stream_);
  cudaStreamDestroy(stream_);
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
    workspace_.reset();  // first, so that the two need not fit beside each other
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

std::unique_ptr<Moment> CudaQueue::mark() {
  std::shared_ptr<HostMemory> seen = pinned_->take(sizeof(Fault));
  if (seen == nullptr) seen = HostMemory::allocate(sizeof(Fault));
  return std::make_unique<CudaMoment>(stream_, fault_, std::move(seen));
}

Status CudaQueue::capture(const std::function<Status()>& launches, std::unique_ptr<Graph>& graph) {
  cudaStream_t stream = nullptr;
  Status status = cuda_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  if (!status.ok()) return status;
  cudaGraph_t captured = nullptr;
  // Other threads go on allocating and copying meanwhile.
  status = cuda_status(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  if (status.ok()) {
    capturing_ = stream;
    status = launches();
    capturing_ = nullptr;
    const Status ended = cuda_status(cudaStreamEndCapture(stream, &captured));
    if (status.ok()) status = ended;
  }
  cudaStreamDestroy(stream);
  cudaGraphExec_t executable = nullptr;
  if (status.ok()) status = cuda_status(cudaGraphInstantiate(&executable, captured, 0));
  if (captured != nullptr) cudaGraphDestroy(captured);
  if (status.ok()) {
    const std::vector<std::shared_ptr<CudaScratch>> memory = {workspace_, zeroed_};
    graph = std::make_unique<CudaGraph>(executable, std::static_pointer_cast<CudaQueue>(shared_from_this()), memory);
  }
  return status;
}

}  // namespace kv
