// SPDX-License-Identifier: Apache-2.0
// A library for LD_PRELOAD that counts the calls which change files below a folder, and kills the process at
// one of them or lets it fail. Tests build it and set, in the environment:
//
//   FAIL_BELOW  the folder, an absolute path
//   FAIL_LOG    a file that gets a line "NAME PATH" for each call before it is made
//   FAIL_AT     the number of the call that fails, from 1; 0: none
//   FAIL_HOW    0: SIGKILL in place of the call; -1: the call comes two seconds late; an errno otherwise
//   FAIL_LASTS  1: calls that need room (mkdir, open, write, fsync) fail from then on, as on a full disk
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

const char* setting(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

struct Settings {
  const char* below = setting("FAIL_BELOW");
  const char* log = setting("FAIL_LOG");
  long at = std::atol(setting("FAIL_AT"));
  int how = std::atoi(setting("FAIL_HOW"));
  bool lasts = std::atoi(setting("FAIL_LASTS")) != 0;
};

// The path of a descriptor, or of `name` below it.
const char* path_of(int descriptor, const char* name, char* buffer, size_t size) {
  if (name != nullptr && (name[0] == '/' || descriptor == AT_FDCWD)) return name;
  char link[64];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t length = ::readlink(link, buffer, size - 1);
  if (length < 0) return "";
  buffer[length] = '\0';
  if (name != nullptr) std::snprintf(buffer + length, size - static_cast<size_t>(length), "/%s", name);
  return buffer;
}

// Whether the call fails; sets errno.
bool fails(const char* call, const char* path, bool needs_room) {
  static std::atomic<long> count{0};
  const Settings wanted;  // read anew: a fork may have its own
  if (wanted.below[0] == '\0' || std::strncmp(path, wanted.below, std::strlen(wanted.below)) != 0)
    return false;
  const long number = ++count;
  if (wanted.log[0] != '\0') {
    char line[4352];
    const int length = std::snprintf(line, sizeof line, "%s %s\n", call, path);
    const long file = syscall(SYS_openat, AT_FDCWD, wanted.log, O_WRONLY | O_CREAT | O_APPEND, 0666);
    syscall(SYS_write, file, line, length);
    syscall(SYS_close, file);
  }
  if (wanted.at == 0 || number < wanted.at || (number > wanted.at && !(wanted.lasts && needs_room)))
    return false;
  if (wanted.how == 0) {
    ::kill(::getpid(), SIGKILL);
    for (;;) ::pause();
  }
  if (wanted.how < 0) {
    ::sleep(2);
    return false;
  }
  errno = wanted.how;
  return true;
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

int open_file(const char* name, const char* path, int flags, mode_t mode) {
  if ((flags & O_CREAT) != 0 && fails("open", path, true)) return -1;
  return next<int (*)(const char*, int, mode_t)>(name)(path, flags, mode);
}

mode_t mode_of(int flags, va_list arguments) {
  return (flags & O_CREAT) != 0 ? static_cast<mode_t>(va_arg(arguments, int)) : 0;
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_file("open", path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_file("open64", path, flags, mode);
}

int mkdir(const char* path, mode_t mode) {
  return fails("mkdir", path, true) ? -1 : next<int (*)(const char*, mode_t)>("mkdir")(path, mode);
}

ssize_t write(int descriptor, const void* bytes, size_t count) {
  char buffer[4096];
  if (fails("write", path_of(descriptor, nullptr, buffer, sizeof buffer), true)) return -1;
  return next<ssize_t (*)(int, const void*, size_t)>("write")(descriptor, bytes, count);
}

int fsync(int descriptor) {
  char buffer[4096];
  if (fails("fsync", path_of(descriptor, nullptr, buffer, sizeof buffer), true)) return -1;
  return next<int (*)(int)>("fsync")(descriptor);
}

int rename(const char* from, const char* to) {
  return fails("rename", to, false) ? -1 : next<int (*)(const char*, const char*)>("rename")(from, to);
}

int unlinkat(int descriptor, const char* name, int flags) {
  char buffer[4096];
  if (fails("unlink", path_of(descriptor, name, buffer, sizeof buffer), false)) return -1;
  return next<int (*)(int, const char*, int)>("unlinkat")(descriptor, name, flags);
}

int unlink(const char* path) {
  return fails("unlink", path, false) ? -1 : next<int (*)(const char*)>("unlink")(path);
}

}  // extern "C"
