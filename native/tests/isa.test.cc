// Which instruction sets a process may use.
#include "runtime/isa.h"

#include "tests/check.h"

#if defined(KV_AMX)
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <string>

using namespace kv;

namespace {

constexpr char kTest[] = "tile registers that the system refuses are left alone";
constexpr char kStateBefore[] = "KV_TEST_STATE_BEFORE";
constexpr int kCannotRefuse = 3;

// From here on this process and what it executes get no permission for tile registers.
bool refuse_tiles() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x1023, 0, 1),  // ARCH_REQ_XCOMP_PERM
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {static_cast<unsigned short>(std::size(filter)), filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace

// The answer is kept for a process's life, so another process is asked.
TEST(kTest) {
  if (const char* before = std::getenv(kStateBefore)) {
    const bool had_tiles = before == std::to_string(static_cast<int>(AmxState::ready));
    CHECK(amx_state() == (had_tiles ? AmxState::refused : AmxState::absent));
    CHECK(!runs(Isa::amx));
    if (had_tiles) CHECK(best_isa() == Isa::avx512);
    return;
  }
  if (amx_state() == AmxState::refused) return;
  setenv(kStateBefore, std::to_string(static_cast<int>(amx_state())).c_str(), 1);
  const pid_t child = fork();
  if (child == 0) {
    if (!refuse_tiles()) _exit(kCannotRefuse);
    dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);
    execl("/proc/self/exe", "native_tests", kTest, nullptr);
    _exit(1);
  }
  unsetenv(kStateBefore);
  int status = 0;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kCannotRefuse));
}
#endif
