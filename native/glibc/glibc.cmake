# The addon loads with glibc 2.28, whatever it was built with. Version 2.34 moved into libc what libpthread, libdl and
# librt had, under new symbol versions. Linked against stand-ins for the old libraries the addon asks for the old versions,
# which every glibc has. tools/check-glibc.mjs finds what this list lacks.
set(glibc_pthread_2.2.5
    __pthread_key_create pthread_condattr_setpshared pthread_create pthread_detach pthread_getspecific pthread_join
    pthread_key_create pthread_key_delete pthread_kill pthread_mutex_trylock pthread_mutexattr_destroy
    pthread_mutexattr_init pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once pthread_rwlock_destroy
    pthread_rwlock_init pthread_rwlock_rdlock pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock
    pthread_rwlock_tryrdlock pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock
    pthread_rwlockattr_destroy pthread_rwlockattr_init pthread_rwlockattr_setpshared pthread_setspecific
    pthread_spin_destroy pthread_spin_init pthread_spin_lock pthread_spin_trylock pthread_spin_unlock sem_destroy sem_init
    sem_post sem_timedwait sem_trywait sem_wait)
set(glibc_dl_2.2.5 dlclose dlerror dlopen dlsym dlvsym)
set(glibc_dl_2.3.4 dlmopen)
set(glibc_rt_2.2.5 shm_open shm_unlink)

# A library of empty functions, `soname`, that has the symbols of each version.
function(add_glibc_stand_in name soname)
  set(source "")
  set(script "")
  foreach(version IN LISTS ARGN)
    set(symbols ${glibc_${name}_${version}})
    list(JOIN symbols "; " listed)
    string(APPEND script "GLIBC_${version} { ${listed}; };\n")
    list(TRANSFORM symbols REPLACE "(.+)" "extern \"C\" void \\1() {}\n")
    list(JOIN symbols "" functions)
    string(APPEND source "${functions}")
  endforeach()
  set(stem ${CMAKE_CURRENT_BINARY_DIR}/glibc-${name})
  file(GENERATE OUTPUT ${stem}.cc CONTENT "${source}")
  file(GENERATE OUTPUT ${stem}.map CONTENT "${script}")
  add_library(glibc_${name} SHARED ${stem}.cc)
  set_target_properties(glibc_${name} PROPERTIES CXX_VISIBILITY_PRESET default NO_SONAME ON
                                                 LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/glibc)
  target_link_options(glibc_${name} PRIVATE -nostdlib LINKER:-soname,${soname} LINKER:--version-script=${stem}.map)
  target_link_libraries(kv PRIVATE glibc_${name})
endfunction()

add_glibc_stand_in(pthread libpthread.so.0 2.2.5)
add_glibc_stand_in(dl libdl.so.2 2.2.5 2.3.4)
add_glibc_stand_in(rt librt.so.1 2.2.5)
# Some of what asks for them is linked after them.
target_link_options(kv PRIVATE LINKER:--no-as-needed)
target_sources(kv PRIVATE glibc/newer-than-2.28.cc)
# The system has the libraries that are stood in for.
set_target_properties(kv PROPERTIES BUILD_WITH_INSTALL_RPATH ON)
