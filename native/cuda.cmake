# The CUDA device. A kernel's file name says what it is compiled for: *.sm90a.cu for Hopper,
# *.sm80.cu for Ampere and Ada, any other *.cu for both. Ada runs the code of sm_80: its own would be the same instructions.
set(CMAKE_CUDA_ARCHITECTURES 80-real)
option(KV_FAST_COMPILE "Compile CUDA code fast, into slow kernels: shows that it compiles" OFF)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

file(GLOB cuda_sources CONFIGURE_DEPENDS runtime/*.cu shared/*/*.cu shared/*/*/*.cu kernels/*/*.cu)
set(cuda_hopper ${cuda_sources})
set(cuda_ampere ${cuda_sources})
list(FILTER cuda_hopper INCLUDE REGEX "\\.sm90a\\.cu$")
list(FILTER cuda_ampere INCLUDE REGEX "\\.sm80\\.cu$")
set(cuda_every ${cuda_sources})
list(FILTER cuda_every EXCLUDE REGEX "\\.(sm90a|sm80)\\.cu$")

set(optimisation --compress-mode=size)
function(add_cuda_objects name architectures)
  add_library(${name} OBJECT ${ARGN})
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}" CUDA_RUNTIME_LIBRARY Static)
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr ${optimisation}
                                         -Xcompiler=-Wall,-Wextra,-Wno-psabi>)
endfunction()

add_cuda_objects(cuda_hopper "90a-real" ${cuda_hopper})
set(architectures_of_every "80-real;90a-real")
# The checks below run on Hopper, and with them Ampere's kernels if they are compiled for it.
set(cuda_ampere_on_hopper ${cuda_ampere})
if(KV_FAST_COMPILE)
  # Not Hopper's own kernels: which of their products would wait for each other, the assembler says of optimised code
  # alone.
  set(optimisation -Ofc=max --compress-mode=none)
  # Code for Ampere and for Hopper differs in native/ptx and shared/block-scores alone, as tools/check-headers.mjs sees
  # to. Hopper's own kernels use what differs in native/ptx, except for two headers. So sources that use those two, or
  # shared/block-scores, and those beside a header that does, are compiled for both; all others only for Ampere.
  file(GLOB common_files kernels/*/*.h kernels/*/*.cu shared/*/*.h shared/*/*.cu)
  set(places_of_both "")
  foreach(file IN LISTS common_files)
    file(STRINGS ${file} differs REGEX "^#include \"(shared/block-scores/.*\\.cuda|ptx/(cluster|mma-f64)\\.cuda)\\.h\"")
    if(differs AND file MATCHES "\\.h$")
      get_filename_component(folder ${file} DIRECTORY)
      list(APPEND places_of_both ${folder})
    elseif(differs)
      list(APPEND places_of_both ${file})
    endif()
  endforeach()
  set(cuda_on_both "")
  foreach(source IN LISTS cuda_every)
    get_filename_component(folder ${source} DIRECTORY)
    if(source IN_LIST places_of_both OR folder IN_LIST places_of_both)
      list(APPEND cuda_on_both ${source})
    endif()
  endforeach()
  list(REMOVE_ITEM cuda_every ${cuda_on_both})
  add_cuda_objects(cuda_on_both "${architectures_of_every}" ${cuda_on_both})
  target_sources(kv_core PRIVATE $<TARGET_OBJECTS:cuda_on_both>)
  set(architectures_of_every "80-real")
  set(cuda_ampere_on_hopper "")
endif()
add_cuda_objects(cuda_ampere "80-real" ${cuda_ampere})
add_cuda_objects(cuda_every "${architectures_of_every}" ${cuda_every})
target_sources(kv_core PRIVATE $<TARGET_OBJECTS:cuda_hopper> $<TARGET_OBJECTS:cuda_ampere> $<TARGET_OBJECTS:cuda_every>)

# It was declared before the language was known; its CUDA objects come from the libraries above.
set_target_properties(kv_core PROPERTIES CUDA_ARCHITECTURES OFF)
# Nothing but what picks kernels and devices knows of CUDA, so a build with it shares all other objects with one without.
target_compile_definitions(dispatch PRIVATE KV_HAVE_CUDA=1)
set_property(SOURCE runtime/cuda-device-absent.cc APPEND PROPERTY COMPILE_DEFINITIONS KV_HAVE_CUDA=1)
target_link_libraries(kv_core INTERFACE $<LINK_ONLY:CUDA::cudart_static>)

# Tests of the runtime that need a GPU where they run: build them anywhere, run `cuda_tests` there.
file(GLOB cuda_test_sources CONFIGURE_DEPENDS tests/cuda/*.cu)
add_executable(cuda_tests tests/main.cc ${cuda_test_sources})
set_target_properties(cuda_tests PROPERTIES CUDA_ARCHITECTURES "${architectures_of_every}" CUDA_RUNTIME_LIBRARY Static)
target_compile_options(cuda_tests PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--extended-lambda --expt-relaxed-constexpr ${optimisation}
                                                                  -Xcompiler=-Wall,-Wextra,-Wno-psabi>)
# None waits for longer than a few seconds; those of the CPU may be slow, under sanitizers.
target_compile_definitions(cuda_tests PRIVATE KV_TEST_SECONDS=30)
target_link_libraries(cuda_tests PRIVATE kv_core)

# Checks of single kernels on Hopper. The linker finds these objects before it looks into kv_core. The same objects are
# the library that the scripts of tools/gpu time.
file(GLOB cuda_kernel_test_sources CONFIGURE_DEPENDS tests/cuda/kernels/*.cu tests/cuda/kernels/*.cc)
add_cuda_objects(cuda_kernel_test_objects "90a-real" ${cuda_kernel_test_sources} ${cuda_ampere_on_hopper})
target_compile_options(cuda_kernel_test_objects PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${KV_FAST_COMPILE}>>:-O0>)
target_link_libraries(cuda_kernel_test_objects PRIVATE CUDA::cudart_static)
add_executable(cuda_kernel_tests tests/main.cc $<TARGET_OBJECTS:cuda_kernel_test_objects>)
target_link_libraries(cuda_kernel_tests PRIVATE kv_core)
add_library(cuda-kernels SHARED $<TARGET_OBJECTS:cuda_kernel_test_objects>)
target_link_libraries(cuda-kernels PRIVATE kv_core)
set_target_properties(cuda_kernel_tests cuda-kernels PROPERTIES CUDA_ARCHITECTURES OFF
                                                    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
