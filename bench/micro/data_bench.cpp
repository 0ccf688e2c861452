// SPDX-License-Identifier: Apache-2.0
// Speed of reading and writing trajectories. Run: core_bench --benchmark_filter=Data
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "espalier/base/rng.h"
#include "espalier/data/reader.h"
#include "espalier/data/writer.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

/// A folder that is removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "espalier_bench_XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TemporaryFolder() { fs::remove_all(path_); }

  fs::path file(const char* name) const { return path_ / name; }

 private:
  fs::path path_;
};

/// Rows of 2,000 to 6,000 ids of five and six digits, the last half of them with loss.
Trajectories rows_of(int64_t num_tokens) {
  Rng rng(1);
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;
  while (static_cast<int64_t>(ids.size()) < num_tokens) {
    const int64_t size = rng.between(2000, 6000);
    for (int64_t t = 0; t < size; ++t) {
      ids.push_back(static_cast<int32_t>(rng.between(10'000, 151'935)));
      mask.push_back(2 * t >= size);
    }
    offsets.push_back(static_cast<int64_t>(ids.size()));
  }
  Trajectories result;
  result.offsets = Column<int64_t>(std::move(offsets));
  result.input_ids = Column<int32_t>(std::move(ids));
  result.loss_weights = Column<uint8_t>(std::move(mask));
  return result;
}

void count_bytes(benchmark::State& state, const fs::path& path, int64_t tokens) {
  const auto bytes = static_cast<double>(fs::file_size(path));
  state.counters["bytes/s"] = benchmark::Counter(bytes, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(tokens), benchmark::Counter::kIsIterationInvariantRate);
}

/// Argument: tokens in millions.
void BM_DataReadJsonl(benchmark::State& state) {
  const TemporaryFolder folder;
  const fs::path path = folder.file("rows.jsonl");
  const Trajectories rows = rows_of(state.range(0) * 1'000'000);
  write_trajectories(path, rows);
  for (auto _ : state) benchmark::DoNotOptimize(read_trajectories(path).num_tokens());
  count_bytes(state, path, rows.num_tokens());
}
BENCHMARK(BM_DataReadJsonl)->Arg(10)->Unit(benchmark::kMillisecond);

void BM_DataWriteJsonl(benchmark::State& state) {
  const TemporaryFolder folder;
  const fs::path path = folder.file("rows.jsonl");
  const Trajectories rows = rows_of(state.range(0) * 1'000'000);
  for (auto _ : state) write_trajectories(path, rows);
  count_bytes(state, path, rows.num_tokens());
}
BENCHMARK(BM_DataWriteJsonl)->Arg(10)->Unit(benchmark::kMillisecond);

int64_t sum_of(const Trajectories& rows) {
  int64_t sum = 0;
  for (const int32_t id : rows.input_ids.span()) sum += id;
  return sum;
}

/// Opens the file, with the checks of every value, and then reads every id once more.
void BM_DataReadPacked(benchmark::State& state) {
  const TemporaryFolder folder;
  const fs::path path = folder.file("rows.safetensors");
  const Trajectories rows = rows_of(state.range(0) * 1'000'000);
  write_trajectories(path, rows);
  for (auto _ : state) benchmark::DoNotOptimize(sum_of(read_trajectories(path)));
  count_bytes(state, path, rows.num_tokens());
}
BENCHMARK(BM_DataReadPacked)->Arg(10)->Arg(100)->Unit(benchmark::kMillisecond);

/// What memory gives: a copy of as many bytes as the packed file of BM_DataReadPacked has.
void BM_DataCopyMemory(benchmark::State& state) {
  const Trajectories rows = rows_of(state.range(0) * 1'000'000);
  const auto bytes = static_cast<size_t>(rows.num_tokens()) * (sizeof(int32_t) + sizeof(uint8_t));
  const std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::ClobberMemory();
  }
  state.counters["bytes/s"] =
      benchmark::Counter(static_cast<double>(bytes), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_DataCopyMemory)->Arg(10)->Arg(100)->Unit(benchmark::kMillisecond);

void BM_DataWritePacked(benchmark::State& state) {
  const TemporaryFolder folder;
  const fs::path path = folder.file("rows.safetensors");
  const Trajectories rows = rows_of(state.range(0) * 1'000'000);
  for (auto _ : state) write_trajectories(path, rows);
  count_bytes(state, path, rows.num_tokens());
}
BENCHMARK(BM_DataWritePacked)->Arg(10)->Arg(100)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace espalier
