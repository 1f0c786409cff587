#include "runtime/cublas-lt.cuda.h"

#include <dlfcn.h>

namespace kv {
namespace {

struct Library {
  CublasLt functions{};
  bool loaded = false;
  std::string reason;
};

template <class Function>
bool find(void* library, const char* name, Function& function, std::string& reason) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) reason = std::string("cuBLASLt has no ") + name;
  return function != nullptr;
}

Library load() {
  Library library;
  void* handle = nullptr;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}) {
    handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) break;
    library.reason += std::string(library.reason.empty() ? "" : "; ") + dlerror();
  }
  if (handle == nullptr) return library;
  CublasLt& f = library.functions;
  library.reason.clear();
  library.loaded = find(handle, "cublasLtCreate", f.create, library.reason) &&
                   find(handle, "cublasLtMatmul", f.matmul, library.reason) &&
                   find(handle, "cublasLtMatmulDescCreate", f.matmul_create, library.reason) &&
                   find(handle, "cublasLtMatmulDescSetAttribute", f.matmul_set, library.reason) &&
                   find(handle, "cublasLtMatmulDescDestroy", f.matmul_destroy, library.reason) &&
                   find(handle, "cublasLtMatrixLayoutCreate", f.layout_create, library.reason) &&
                   find(handle, "cublasLtMatrixLayoutDestroy", f.layout_destroy, library.reason) &&
                   find(handle, "cublasLtMatmulPreferenceCreate", f.preference_create, library.reason) &&
                   find(handle, "cublasLtMatmulPreferenceSetAttribute", f.preference_set, library.reason) &&
                   find(handle, "cublasLtMatmulPreferenceDestroy", f.preference_destroy, library.reason) &&
                   find(handle, "cublasLtMatmulAlgoGetHeuristic", f.heuristic, library.reason);
  return library;
}

}  // namespace

const CublasLt* cublas_lt(std::string* reason) {
  static const Library library = load();
  if (reason != nullptr) *reason = library.reason;
  return library.loaded ? &library.functions : nullptr;
}

}  // namespace kv
