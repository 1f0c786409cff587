// What a newer C++ library asks of glibc that 2.28 does not have; hidden, for the addon alone.
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

extern "C" {

// 2.32: whether the process has one thread. No process that has loaded the addon does.
char __libc_single_threaded = 0;

// 2.30. Without it, until as long from now by the wall clock, as the C++ library itself did then.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  static const auto provided =
      reinterpret_cast<decltype(&pthread_cond_clockwait)>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (provided != nullptr) return provided(condition, mutex, clock, until);
  constexpr long kSecond = 1000000000;
  timespec now;
  timespec deadline;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &deadline);
  deadline.tv_sec += until->tv_sec - now.tv_sec;
  deadline.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (deadline.tv_nsec >= kSecond) {
    deadline.tv_nsec -= kSecond;
    deadline.tv_sec += 1;
  } else if (deadline.tv_nsec < 0) {
    deadline.tv_nsec += kSecond;
    deadline.tv_sec -= 1;
  }
  return pthread_cond_timedwait(condition, mutex, &deadline);
}

// 2.29 has a second version of each. The first one differs in how it reports errors, which nobody asks for.
double first_exp(double);
double first_log(double);
__asm__(".symver first_exp, exp@GLIBC_2.2.5");
__asm__(".symver first_log, log@GLIBC_2.2.5");
double exp(double x) { return first_exp(x); }
double log(double x) { return first_log(x); }

}  // extern "C"
