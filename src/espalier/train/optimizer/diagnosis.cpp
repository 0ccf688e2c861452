// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/optimizer/diagnosis.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "espalier/engine/engine.h"
#include "espalier/model/weights/tensor_bytes.h"

namespace espalier {
namespace {

// A token with an extreme value, for messages.
struct Place {
  int64_t row = -1;
  int64_t position = 0;
  double logprob = 0;

  std::string text(const Trajectories& trajectories) const {
    return fmt::format("token {} of trajectory `{}` (row {})", position, trajectories.name(row), row);
  }
};

struct TermFindings {
  int64_t nonfinite = 0;  // terms whose log-probability is not finite
  Place first_nonfinite;
  std::vector<int64_t> nonfinite_rows;
  double largest_share = 0;  // largest |coefficient * advantage * ratio|
  Place largest;
};

TermFindings look_at_terms(const Step& step, const Loss& loss, const std::vector<double>& logprobs) {
  const Trajectories& trajectories = loss.trajectories();
  TermFindings findings;
  for (size_t k = 0; k < step.rows.size(); ++k) {
    const int64_t row = step.rows[k];
    const Objective& objective = loss.part(loss.part_of(row)).objective();
    const bool has_ratio =
        objective.reads(TermColumn::kAdvantage) && objective.reads(TermColumn::kOldLogprob);
    for (const Term& term : step.terms.row(static_cast<int64_t>(k))) {
      const int64_t token = trajectories.offsets[row] + term.position;
      const Place place{row, term.position, logprobs[token]};
      if (!std::isfinite(place.logprob)) {
        if (findings.nonfinite++ == 0) findings.first_nonfinite = place;
        std::vector<int64_t>& rows = findings.nonfinite_rows;
        if (rows.empty() || rows.back() != row) rows.push_back(row);
      } else if (has_ratio && trajectories.logprobs.has(row)) {
        const double advantage = loss.column(TermColumn::kAdvantage, row, term.position);
        if (clips_ratio(objective.options().kind) && advantage >= 0)
          continue;  // clipped, so it cannot overflow
        const double share = std::abs(term.coefficient * advantage) *
                             std::exp(place.logprob - trajectories.logprobs.values[token]);
        if (!(share <= findings.largest_share)) {
          findings.largest_share = share;
          findings.largest = place;
        }
      }
    }
  }
  return findings;
}

std::string suspicious_terms(const Decoder& decoder, const Step& step, const Loss& loss) {
  const Trajectories& trajectories = loss.trajectories();
  std::vector<double> logprobs(trajectories.num_tokens(), std::numeric_limits<double>::quiet_NaN());
  Step undivided = step;
  undivided.context_group = nullptr;  // each rank looks at all of its micro-batches
  compute_logprobs(decoder, loss, undivided, &logprobs);
  const TermFindings found = look_at_terms(step, loss, logprobs);
  if (found.nonfinite > 0) {
    return fmt::format(
        "the log-probability of {} is {} ({} of {} tokens with loss are not finite, in rows {})",
        found.first_nonfinite.text(trajectories), found.first_nonfinite.logprob, found.nonfinite,
        step.terms.values.size(), row_list(trajectories, found.nonfinite_rows));
  }
  // Below this bound the gradient does not overflow float32.
  if (found.largest_share <= 1e25) return "";
  const int64_t token = trajectories.offsets[found.largest.row] + found.largest.position;
  return fmt::format(
      "{} has log-probability {:.6g}, but `logprobs` of the data say {:.6g}: a policy ratio of {:.3g}",
      found.largest.text(trajectories), found.largest.logprob, trajectories.logprobs.values[token],
      std::exp(found.largest.logprob - trajectories.logprobs.values[token]));
}

std::vector<std::string_view> split(std::string_view name) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    parts.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool is_norm(std::string_view module) {
  return module.find("norm") != std::string_view::npos;
}

}  // namespace

std::string nonfinite_parameters(const Decoder& decoder) {
  std::string first;
  int64_t count = 0;
  for (const Parameter& parameter : decoder.parameters()) {
    const std::string fault = nonfinite_text(parameter.value);
    if (!fault.empty() && count++ == 0) first = fmt::format("`{}` {}", parameter.name, fault);
  }
  return count > 1 ? fmt::format("{}, and so do {} other parameters", first, count - 1) : first;
}

std::string explain_nonfinite(const Decoder& decoder, const Step& step, const Loss& loss) {
  const std::string parameters = nonfinite_parameters(decoder);
  if (!parameters.empty()) return parameters;
  std::vector<std::string> findings;
  const std::string gradient = worst_gradient(decoder);
  const std::string terms = suspicious_terms(decoder, step, loss);
  const std::string rows = "the step has rows " + row_list(loss.trajectories(), step.rows);
  for (const std::string& finding : {terms, gradient, rows}) {
    if (!finding.empty()) findings.push_back(finding);
  }
  return fmt::format("{}", fmt::join(findings, "; "));
}

std::string worst_gradient(const Decoder& decoder) {
  const std::vector<at::Tensor> gradients = decoder.gradients();
  double worst_share = 0, largest_norm = -1;
  size_t worst = 0, largest = 0;
  int64_t nonfinite = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const double share = 1 - gradients[i].isfinite().mean(at::kDouble).item<double>();
    if (share > 0) ++nonfinite;
    if (share > worst_share) {
      worst_share = share;
      worst = i;
    }
    const double norm = global_norm({gradients[i]});
    if (norm > largest_norm) {
      largest_norm = norm;
      largest = i;
    }
  }
  const auto name = [&](size_t i) { return decoder.parameters()[i].name; };
  if (nonfinite > 0) {
    return fmt::format("the gradient of `{}` {}{}", name(worst), nonfinite_text(gradients[worst]),
                       nonfinite > 1 ? fmt::format(", and so do {} other gradients", nonfinite - 1) : "");
  }
  if (largest_norm < 0) return "";
  return fmt::format("the largest gradient is that of `{}`, with norm {:.3g}", name(largest), largest_norm);
}

std::string row_list(const Trajectories& trajectories, const std::vector<int64_t>& rows) {
  constexpr size_t kShown = 5;
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(rows.size(), kShown); ++i) {
    const std::string name = trajectories.name(rows[i]);
    names.push_back(name == std::to_string(rows[i]) ? name : fmt::format("{} (`{}`)", rows[i], name));
  }
  if (rows.size() > kShown) names.push_back(fmt::format("and {} more", rows.size() - kShown));
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string module_kind(std::string_view parameter) {
  std::vector<std::string_view> modules = split(parameter);
  const auto layers = std::ranges::find(modules, "layers");
  if (modules.end() - layers < 3) {
    modules.pop_back();  // weight or bias
    if (modules.empty()) return std::string(parameter);
    return is_norm(modules.back()) ? "norm" : std::string(modules.back());
  }
  modules.erase(modules.begin(), layers + 2);  // the name within the layer remains
  if (is_norm(modules.front())) return "norm";
  const auto has = [&](std::string_view module) {
    return std::ranges::find(modules, module) != modules.end();
  };
  if (has("gate") || has("router")) return "router";
  if (has("experts") || modules.front() == "block_sparse_moe") return "experts";
  return std::string(modules.front());
}

std::vector<std::pair<std::string, double>> grad_norms_by_kind(const Decoder& decoder, const Group& group) {
  const std::vector<at::Tensor> gradients = decoder.gradients();
  std::vector<std::pair<std::string, std::vector<at::Tensor>>> groups;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const std::string kind = module_kind(decoder.parameters()[i].name);
    auto members = std::ranges::find(groups, kind, [](const auto& one) { return one.first; });
    if (members == groups.end()) members = groups.insert(members, {kind, {}});
    if (gradients[i].defined()) members->second.push_back(group.part(gradients[i]));
  }
  std::vector<double> norms;
  for (const auto& [kind, members] : groups) norms.push_back(global_norm(members));
  norms = group.reduce(norms, std::vector<RankReduction>(norms.size(), RankReduction::kNorm));
  std::vector<std::pair<std::string, double>> by_kind;
  for (size_t i = 0; i < norms.size(); ++i) by_kind.emplace_back(groups[i].first, norms[i]);
  return by_kind;
}

}  // namespace espalier
