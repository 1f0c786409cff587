// Maps a file into memory, read-only: weights are read from the page cache and never copied.
#include <fcntl.h>
#include <napi.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "bindings/device-object.h"
#include "bindings/errors.h"
#include "bindings/tensor-object.h"
#include "runtime/background.h"

namespace kv {
namespace {

// Unmapping pages that were read takes some 40 ms a GiB, and all other threads that map memory wait meanwhile. Few
// pages are therefore dropped at once.
void unmap(char* data, size_t bytes) {
  constexpr size_t kPiece = size_t{16} << 20;
  for (size_t done = 0; done < bytes; done += kPiece) {
    madvise(data + done, std::min(kPiece, bytes - done), MADV_DONTNEED);
  }
  munmap(data, bytes);
}

class MapFile : public Napi::AsyncWorker {
 public:
  MapFile(Napi::Env env, std::shared_ptr<Device> device, std::string path)
      : Napi::AsyncWorker(env), device_(std::move(device)), path_(std::move(path)), deferred_(env) {}

  Napi::Promise promise() const { return deferred_.Promise(); }

 protected:
  void Execute() override {
    // O_NONBLOCK, because opening a pipe would otherwise wait for its other end.
    const int file = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) return SetError(std::strerror(errno));
    struct statx facts {};  // statx, because the usual fstat needs glibc 2.33
    if (statx(file, "", AT_EMPTY_PATH, STATX_TYPE | STATX_SIZE, &facts) != 0) {
      SetError(std::strerror(errno));
    } else if (!S_ISREG(facts.stx_mode) || facts.stx_size == 0) {
      SetError("it is empty or not a regular file");
    } else {
      bytes_ = static_cast<size_t>(facts.stx_size);
      data_ = mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file, 0);
      if (data_ == MAP_FAILED) refuse_mapping(errno);
    }
    close(file);
  }

  void OnOK() override {
    Layout layout;
    layout.dtype = DType::u8;
    layout.rank = 1;
    layout.shape[0] = static_cast<int64_t>(bytes_);
    layout.strides[0] = 1;
    std::shared_ptr<void> mapping(data_, [bytes = bytes_](void* data) { unmap(static_cast<char*>(data), bytes); });
    constexpr bool kWritable = false;
    auto storage = std::make_shared<Storage>(device_, BorrowedMemory{data_, bytes_, kWritable, nullptr, [mapping]() mutable {
      let_go_in_background(std::move(mapping));
    }});
    Napi::Object mapped = Napi::Object::New(Env());
    mapped.Set("tensor", TensorObject::create(Env(), std::move(storage), layout));
    mapped.Set("byteLength", static_cast<double>(bytes_));
    deferred_.Resolve(mapped);
  }

  void OnError(const Napi::Error& error) override {
    deferred_.Reject(make_error(Env(), code_, path_ + " could not be mapped: " + error.Message()).Value());
  }

 private:
  void refuse_mapping(int error) {
    if (error != ENOMEM) return SetError(std::strerror(error));
    code_ = "KV_OUT_OF_MEMORY";
    SetError("its " + std::to_string(bytes_) + " bytes are more than the process has addresses for. Raise its limit (ulimit -v).");
  }

  std::shared_ptr<Device> device_;
  std::string path_;
  Napi::Promise::Deferred deferred_;
  const char* code_ = "KV_MODEL_FORMAT";
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace

// mapFile(device, path): a promise of { tensor: u8 over the file's bytes, byteLength }.
Napi::Value map_file(const Napi::CallbackInfo& info) {
  auto* worker = new MapFile(info.Env(), DeviceObject::from(info[0]).device(), info[1].As<Napi::String>());
  Napi::Promise promise = worker->promise();
  worker->Queue();
  return promise;
}

}  // namespace kv
