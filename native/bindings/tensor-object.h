// The native half of a tensor handle: where the elements are, and how they are laid out.
#pragma once

#include <napi.h>

#include <memory>

#include "bindings/native-object.h"
#include "runtime/dtype.h"
#include "runtime/storage.h"

namespace kv {

constexpr int kMaxRank = 6;

struct Layout {
  DType dtype = DType::f32;
  int rank = 0;
  int64_t shape[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};  // in elements
  int64_t byte_offset = 0;

  // Number of elements in the axes from `first` on.
  int64_t elements(int first = 0) const;
  bool contiguous(int first = 0) const;
};

// Reads (dtype, shape, strides, byteOffset) from four consecutive arguments. Throws a JavaScript error unless they
// are whole numbers that a layout can have. TensorObject checks that the layout fits into the memory.
Layout layout_argument(const Napi::CallbackInfo& info, size_t first);

class TensorObject : public NativeObject<TensorObject> {
 public:
  static constexpr char kName[] = "native tensor";
  static constexpr napi_type_tag kTag = {0x6b762d74656e736f, 0x9d3f1c5a7e2b4810};

  static Napi::Function define(Napi::Env env);
  // Throws a JavaScript error when the layout reaches beyond the storage.
  static Napi::Object create(Napi::Env env, std::shared_ptr<Storage> storage, const Layout& layout);

  explicit TensorObject(const Napi::CallbackInfo& info) : NativeObject<TensorObject>(info) {}
  ~TensorObject() override;

  const Layout& layout() const { return layout_; }
  // Throws a JavaScript error when the tensor was released, or when JavaScript has taken its memory away.
  std::shared_ptr<Storage> storage(Napi::Env env) const;

 private:
  Napi::Value view(const Napi::CallbackInfo& info);
  Napi::Value address(const Napi::CallbackInfo& info);
  Napi::Value release(const Napi::CallbackInfo& info);

  // A tensor owns its storage; a view does not. Releasing the tensor therefore frees the memory although views exist.
  std::shared_ptr<Storage> owned_;
  std::weak_ptr<Storage> storage_;
  Layout layout_;
};

}  // namespace kv
