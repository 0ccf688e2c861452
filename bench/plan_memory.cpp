// SPDX-License-Identifier: Apache-2.0
// What reading, building and planning a large file hold in memory, and how long they take (bench/results).
//
//     plan_memory FILE STRATEGY TOKEN_BUDGET
//
// Per phase: seconds, and the most that was resident (sampled from /proc/self/status) as anonymous memory, as
// pages of mapped files and as the sum of both.
#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <fstream>
#include <functional>
#include <stop_token>
#include <string>
#include <thread>

#include "espalier/base/check.h"
#include "espalier/data/reader.h"
#include "espalier/plan/planner.h"
#include "espalier/tree/forest.h"

namespace espalier {
namespace {

struct Resident {
  int64_t anonymous = 0, file = 0, sum = 0;  // KiB
};

Resident resident() {
  Resident now;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) now.anonymous = std::stoll(line.substr(8));
    if (line.starts_with("RssFile:")) now.file = std::stoll(line.substr(8));
  }
  now.sum = now.anonymous + now.file;
  return now;
}

/// Runs one phase and prints its line.
void measure(const char* name, const std::function<void()>& phase) {
  Resident peak;
  const auto begin = std::chrono::steady_clock::now();
  {
    const std::jthread sampler([&peak](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        const Resident now = resident();
        peak = {std::max(peak.anonymous, now.anonymous), std::max(peak.file, now.file),
                std::max(peak.sum, now.sum)};
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    });
    phase();
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const auto gigabytes = [](int64_t kib) { return static_cast<double>(kib) * 1024 / 1e9; };
  fmt::print("{:<6} {:7.1f} s   anonymous {:6.2f} GB   file {:6.2f} GB   both {:6.2f} GB\n", name,
             seconds.count(), gigabytes(peak.anonymous), gigabytes(peak.file), gigabytes(peak.sum));
}

void run(const std::string& path, const std::string& strategy, const std::string& token_budget) {
  PlanOptions options{.strategy = parse_strategy(strategy)};
  std::from_chars(token_budget.data(), token_budget.data() + token_budget.size(), options.token_budget);
  Trajectories trajectories;
  Forest forest;
  Plan plan;
  measure("read", [&] {
    ReadReport report;
    trajectories = read_trajectories(path, {}, &report);
  });
  measure("build", [&] {
    forest = build_forest({.offsets = trajectories.offsets.span(),
                           .tokens = trajectories.input_ids.span(),
                           .release = trajectories.release});
  });
  measure("plan", [&] { plan = make_plan(forest, options); });
  fmt::print(
      "{} rows, {} flat tokens, {} tree tokens, {} nodes; {}: {} micro-batches, {} encoded (ERR {:.4f})\n",
      trajectories.num_rows(), forest.flat_tokens(), forest.tree_tokens(), forest.num_nodes(),
      to_string(plan.options.strategy), plan.micro_batches.size(), plan.num_tokens(),
      effective_reuse_ratio(forest, plan));
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  if (argc != 4) {
    fmt::print(stderr, "usage: plan_memory FILE STRATEGY TOKEN_BUDGET\n");
    return 2;
  }
  try {
    espalier::run(argv[1], argv[2], argv[3]);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
