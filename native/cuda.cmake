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

# A small source takes most of its time for the headers of CUDA, so where the code need only compile, twelve of those that
# `of` matches make one unit. (A release compiles each alone: among others, a function may be inlined where it would not be,
# or not where it would.) `names` are those that several of them use for things of their own; in a unit they get the
# source's number. A name that a header declares for several of them cannot be one of these, so that the sources of such
# headers make units of their own, or stay alone.
set(alone "/(decompose-attention-rows|decode-attention)[^/]*\\.cuda\\.cu$")
function(unite sources of names)
  if(NOT KV_FAST_COMPILE)
    return()
  endif()
  set(parts ${${sources}})
  list(FILTER parts INCLUDE REGEX "^${CMAKE_CURRENT_SOURCE_DIR}/(kernels|runtime|shared|tests)/.*${of}[^/]*\\.cu$")
  list(FILTER parts EXCLUDE REGEX ${alone})
  set(made ${${sources}})
  list(REMOVE_ITEM made ${parts})
  list(LENGTH made others)
  set(number 0)
  foreach(source IN LISTS parts)
    math(EXPR unit "${number} / 12")
    set(text "#define KV_SOURCE source_${number}_\n")
    foreach(name IN LISTS names)
      string(APPEND text "#define ${name} ${name}_${number}\n")
    endforeach()
    string(APPEND text "#include \"${source}\"\n")
    foreach(name IN LISTS names ITEMS KV_SOURCE)
      string(APPEND text "#undef ${name}\n")
    endforeach()
    string(APPEND unit_${unit} "${text}")
    math(EXPR number "${number} + 1")
  endforeach()
  foreach(last RANGE ${unit})
    set(file ${CMAKE_CURRENT_BINARY_DIR}/${sources}_${others}_${last}.cu)
    file(GENERATE OUTPUT ${file} CONTENT "${unit_${last}}")
    list(APPEND made ${file})
  endforeach()
  set(${sources} ${made} PARENT_SCOPE)
endfunction()

# Code for Ampere and for Hopper differs in native/ptx and shared/prefill-block-scores alone, as tools/check-headers.mjs sees to.
# Hopper's own kernels use what differs in native/ptx, except for two headers. These sources use those two, or
# shared/prefill-block-scores, or stand beside a header that does.
file(GLOB common_files kernels/*/*.h kernels/*/*.cu shared/*/*.h shared/*/*.cu)
set(places_that_differ "")
foreach(file IN LISTS common_files)
  file(STRINGS ${file} differs REGEX "^#include \"(shared/prefill-block-scores/.*\\.cuda|ptx/(cluster|mma-f64)\\.cuda)\\.h\"")
  if(differs AND file MATCHES "\\.h$")
    get_filename_component(folder ${file} DIRECTORY)
    list(APPEND places_that_differ ${folder})
  elseif(differs)
    list(APPEND places_that_differ ${file})
  endif()
endforeach()
set(cuda_that_differs "")
foreach(source IN LISTS cuda_every)
  get_filename_component(folder ${source} DIRECTORY)
  if(source IN_LIST places_that_differ OR folder IN_LIST places_that_differ)
    list(APPEND cuda_that_differs ${source})
  endif()
endforeach()
list(REMOVE_ITEM cuda_every ${cuda_that_differs})
set(names_of_tiles Launch Tile Band estimate)
set(names_of_parts kColumns kStages kStride)
set(names kThreads kWarps kBins kBlocks kColumns kMostGroups kPack Pack Parameters Launch Scan no_room fits_packs warp_maximum)
unite(cuda_that_differs "block-scores" "${names_of_tiles}")
unite(cuda_that_differs "decompose-attention" "${names_of_parts}")
unite(cuda_every "decompose-attention" "${names_of_parts}")
unite(cuda_every "" "${names}")

set(architectures_of_every "80-real;90a-real")
set(architectures_that_differ ${architectures_of_every})
# The checks below run on Hopper, and with them Ampere's kernels if they are compiled for it.
set(cuda_ampere_on_hopper ${cuda_ampere})
if(KV_FAST_COMPILE)
  # Not Hopper's own kernels: which of their products would wait for each other, the assembler says of optimised code
  # alone.
  set(optimisation -Ofc=max --compress-mode=none)
  # What does not differ is compiled for Ampere alone.
  set(architectures_of_every "80-real")
  set(cuda_ampere_on_hopper "")
endif()
add_cuda_objects(cuda_hopper "90a-real" ${cuda_hopper})
add_cuda_objects(cuda_ampere "80-real" ${cuda_ampere})
add_cuda_objects(cuda_that_differs "${architectures_that_differ}" ${cuda_that_differs})
add_cuda_objects(cuda_every "${architectures_of_every}" ${cuda_every})
target_sources(kv_core PRIVATE $<TARGET_OBJECTS:cuda_hopper> $<TARGET_OBJECTS:cuda_ampere> $<TARGET_OBJECTS:cuda_every>
                               $<TARGET_OBJECTS:cuda_that_differs>)

# It was declared before the language was known; its CUDA objects come from the libraries above.
set_target_properties(kv_core PROPERTIES CUDA_ARCHITECTURES OFF)
# Nothing but what picks kernels and devices knows of CUDA, so a build with it shares all other objects with one without.
target_compile_definitions(dispatch PRIVATE KV_HAVE_CUDA=1)
set_property(SOURCE runtime/cuda-device-absent.cc APPEND PROPERTY COMPILE_DEFINITIONS KV_HAVE_CUDA=1)
target_link_libraries(kv_core INTERFACE $<LINK_ONLY:CUDA::cudart_static>)

# Tests of the runtime that need a GPU where they run: build them anywhere, run `cuda_tests` there.
file(GLOB cuda_test_sources CONFIGURE_DEPENDS tests/cuda/*.cu)
unite(cuda_test_sources "" "")
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
unite(cuda_kernel_test_sources "" "Case;multiply")
add_cuda_objects(cuda_kernel_test_objects "90a-real" ${cuda_kernel_test_sources} ${cuda_ampere_on_hopper})
target_compile_options(cuda_kernel_test_objects PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${KV_FAST_COMPILE}>>:-O0>)
target_link_libraries(cuda_kernel_test_objects PRIVATE CUDA::cudart_static)
add_executable(cuda_kernel_tests tests/main.cc $<TARGET_OBJECTS:cuda_kernel_test_objects>)
target_link_libraries(cuda_kernel_tests PRIVATE kv_core)
add_library(cuda-kernels SHARED $<TARGET_OBJECTS:cuda_kernel_test_objects>)
target_link_libraries(cuda-kernels PRIVATE kv_core)
set_target_properties(cuda_kernel_tests cuda-kernels PROPERTIES CUDA_ARCHITECTURES OFF
                                                    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
