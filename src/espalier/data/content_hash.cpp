// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/content_hash.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "espalier/base/hash.h"

namespace espalier {
namespace {

// Values are hashed as doubles, so that a byte mask equals weights of 0 and 1.
void add_reals(const RealColumn& column, Hasher* hasher) {
  std::array<double, 4096> block{};
  for (int64_t begin = 0; begin < column.size(); begin += block.size()) {
    const auto count = std::min<int64_t>(block.size(), column.size() - begin);
    // Adding 0 turns -0 into 0, which compares equal.
    for (int64_t i = 0; i < count; ++i) block[i] = column[begin + i] + 0.0;
    hasher->add_values(std::span<const double>(block).first(count));
  }
}

void add_column(const RealColumn& column, Hasher* hasher) {
  add_reals(column, hasher);
}

void add_column(const Column<uint8_t>& column, Hasher* hasher) {
  hasher->add_values(column.span());
}

// The hash includes which rows have the column.
template <typename Values>
void add_optional(const char* name, const Optional<Values>& column, int64_t rows,
                  std::map<std::string, std::string>* hashes) {
  if (!column.any()) return;
  Hasher hasher;
  std::vector<uint8_t> present(rows);
  for (int64_t row = 0; row < rows; ++row) present[row] = column.has(row);
  hasher.add_values(std::span<const uint8_t>(present));
  add_column(column.values, &hasher);
  (*hashes)[name] = hasher.digits();
}

void add_strings(const char* name, const std::vector<std::string>& column,
                 std::map<std::string, std::string>* hashes) {
  const bool any = std::any_of(column.begin(), column.end(), [](const std::string& s) { return !s.empty(); });
  if (!any) return;
  Hasher hasher;
  for (const std::string& text : column) {
    const uint64_t size = text.size();
    hasher.add_values(std::span(&size, 1));
    hasher.add(std::as_bytes(std::span(text)));
  }
  (*hashes)[name] = hasher.digits();
}

}  // namespace

std::map<std::string, std::string> content_hashes(const Trajectories& trajectories) {
  std::map<std::string, std::string> hashes;
  const int64_t rows = trajectories.num_rows();
  Hasher ids;
  ids.add_values(trajectories.offsets.span());
  ids.add_values(trajectories.input_ids.span());
  hashes["input_ids"] = ids.digits();
  Hasher weights;
  add_reals(trajectories.loss_weights, &weights);
  hashes["loss_weights"] = weights.digits();
  add_optional("logprobs", trajectories.logprobs, rows, &hashes);
  add_optional("ref_logprobs", trajectories.ref_logprobs, rows, &hashes);
  add_optional("advantages", trajectories.advantages, rows, &hashes);
  add_optional("reward", trajectories.reward, rows, &hashes);
  add_optional("chosen", trajectories.chosen, rows, &hashes);
  add_strings("group_id", trajectories.group_id, &hashes);
  add_strings("pair_id", trajectories.pair_id, &hashes);
  if (!trajectories.turn_reward_offsets.empty()) {
    Hasher rewards;
    rewards.add_values(trajectories.turn_reward_offsets.span());
    add_reals(trajectories.turn_rewards, &rewards);
    hashes["turn_rewards"] = rewards.digits();
  }
  if (trajectories.ref_topk > 0) {
    Hasher ids, logprobs;
    ids.add_values(std::span(&trajectories.ref_topk, 1));
    ids.add_values(trajectories.ref_topk_ids.span());
    hashes["ref_topk_ids"] = ids.digits();
    add_reals(trajectories.ref_topk_logprobs, &logprobs);
    hashes["ref_topk_logprobs"] = logprobs.digits();
  }
  if (trajectories.routes_per_token > 0) {
    Hasher routes;
    routes.add_values(std::span(&trajectories.routes_per_token, 1));
    routes.add_values(trajectories.routed_experts.span());
    hashes["routed_experts"] = routes.digits();
  }
  return hashes;
}

}  // namespace espalier
