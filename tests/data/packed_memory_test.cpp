// SPDX-License-Identifier: Apache-2.0
// How much memory a packed file takes after it is read.
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "espalier/data/builder.h"
#include "espalier/data/packed.h"
#include "tests/base/scratch_folder.h"

namespace espalier {
namespace {

/// Resident KiB of this process's mappings of a file, by /proc/self/smaps; -1: not mapped.
int64_t resident_kib(const std::filesystem::path& path) {
  std::ifstream maps("/proc/self/smaps");
  int64_t total = -1;
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    // A mapping begins with its addresses in lower-case hexadecimal, its properties with an upper-case
    // letter.
    if (line[0] < 'A' || line[0] > 'Z') {
      inside = line.ends_with(path.string());
      if (inside) total = std::max<int64_t>(total, 0);
    } else if (inside && line.starts_with("Rss:")) {
      total += std::stoll(line.substr(4));
    }
  }
  return total;
}

TEST(PackedMemory, NoPageStaysAfterReading) {
  const testing::ScratchFolder folder;
  const auto path = std::filesystem::canonical(folder.path()) / "a.safetensors";
  TrajectoriesBuilder builder;
  TrajectoryRow row;
  row.input_ids.assign(100'000, 7);
  for (int r = 0; r < 3; ++r) builder.append(row);
  write_packed(path, builder.finish());
  const Trajectories trajectories = read_packed(path, {}, nullptr);
  EXPECT_EQ(resident_kib(path), 0);
  EXPECT_EQ(trajectories.input_ids[299'999], 7);
  EXPECT_GT(resident_kib(path), 0);  // the control: what is read is counted
  trajectories.release();
  EXPECT_EQ(resident_kib(path), 0);
  EXPECT_EQ(trajectories.input_ids[299'999], 7);
}

}  // namespace
}  // namespace espalier
