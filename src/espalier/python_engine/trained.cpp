// SPDX-License-Identifier: Apache-2.0
#include "espalier/python_engine/trained.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/model/weights/adapter_folder.h"

namespace espalier::python_engine {

void Trained::check_whole() const {
  ESPALIER_CHECK(!is_half_loaded,
                 "Engine: expected whole weights, but the last load failed half-way: load again");
  ESPALIER_CHECK(
      !trainer.is_half_updated(),
      "Engine: expected whole weights, but the last optim_step failed half-way: load a checkpoint");
}

void Trained::check_trains() const {
  ESPALIER_CHECK(!decoder().is_frozen(),
                 "Engine: expected an adapter of new_adapter in use, which can be trained, received {}",
                 decoder().has_adapter() ? "a copy, which cannot" : "none");
  check_no_dropout(decoder().adapter(), {});
}

void Trained::check_adapter_of(const std::filesystem::path& folder) const {
  const Adapter& own = decoder().adapter();
  const Adapter saved = load_adapter(folder, decoder()).adapter;
  ESPALIER_CHECK(
      saved.scale == own.scale,
      "{}: expected an adapter with scale {:g} (alpha over rank), that of the engine, received {:g}",
      folder.string(), own.scale, saved.scale);
  const auto shapes_of = [](const Adapter& adapter) {
    std::vector<std::string> shapes;
    for (const Parameter& parameter : adapter.parameters) {
      shapes.push_back(fmt::format("{} [{}]", parameter.name, fmt::join(parameter.value.sizes(), ", ")));
    }
    return shapes;
  };
  const std::vector<std::string> expected = shapes_of(own), received = shapes_of(saved);
  const auto [mine, theirs] = std::ranges::mismatch(expected, received);
  const auto shown = [](const auto& at, const auto& all) { return at == all.end() ? "no more" : *at; };
  ESPALIER_CHECK(mine == expected.end() && theirs == received.end(),
                 "{}: expected an adapter with {}, as the engine's, received one with {}", folder.string(),
                 shown(mine, expected), shown(theirs, received));
}

TrainedRows::TrainedRows(const std::vector<EngineAdapter>& adapters, const std::shared_ptr<Trained>& in_use) {
  if (adapters.empty()) all.push_back(in_use);
  for (const auto& [trained] : adapters) {
    if (std::ranges::find(all, trained) == all.end()) all.push_back(trained);
    maps.push_back(trained ? trained->maps : nullptr);
  }
}

void TrainedRows::check(const Trajectories& rows, const Group& group) const {
  ESPALIER_CHECK(maps.empty() || group.size() == 1,
                 "adapters: expected none with a process group of several ranks, received some");
  ESPALIER_CHECK(maps.empty() || std::ssize(maps) == rows.num_rows(),
                 "adapters: expected one for each of {} rows, received {}", rows.num_rows(), maps.size());
  for (const auto& trained : all) {
    ESPALIER_ASSERT(trained);
    trained->check_whole();
    trained->check_trains();
  }
}

double TrainedRows::count_gradients() const {
  double norm = 0;
  for (const auto& trained : all) {
    for (const Parameter& parameter : trained->decoder().parameters()) complete_gradient(parameter.value);
    trained->grad_norm = trained->trainer.gradient_norm();
    ++trained->num_added;
    norm = std::hypot(norm, trained->grad_norm);
  }
  return norm;
}

}  // namespace espalier::python_engine
