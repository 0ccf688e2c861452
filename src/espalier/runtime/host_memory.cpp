// SPDX-License-Identifier: Apache-2.0
#include "espalier/runtime/host_memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "espalier/base/environment.h"

namespace espalier {

int64_t available_host_memory() {
  int64_t least = std::numeric_limits<int64_t>::max(), processes = 1;
  std::ifstream memory("/proc/meminfo"), groups("/proc/self/cgroup");
  for (std::string line; std::getline(memory, line);) {
    if (line.starts_with("MemAvailable:")) least = std::stoll(line.substr(13)) * 1024;
  }
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::/")) continue;
    std::filesystem::path group = line.substr(4);
    for (bool root = false; !root; group = group.parent_path()) {
      root = group.empty();
      int64_t limit = 0;
      std::ifstream file("/sys/fs/cgroup" / group / "memory.max");
      if (file >> limit) least = std::min(least, limit);  // not "max"
    }
  }
  for (const auto resource : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(least))
      least = static_cast<int64_t>(limit.rlim_cur);
  }
  const std::string_view local = environment("LOCAL_WORLD_SIZE");
  std::from_chars(local.data(), local.data() + local.size(), processes);
  return least / std::max<int64_t>(1, processes);
}

}  // namespace espalier
