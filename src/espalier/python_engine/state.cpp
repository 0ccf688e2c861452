// SPDX-License-Identifier: Apache-2.0
#include "espalier/python_engine/state.h"

#include <numeric>

#include "espalier/base/json_file.h"
#include "espalier/base/manifest.h"
#include "espalier/model/weights/adapter_folder.h"
#include "espalier/train/run/resume.h"

namespace espalier::python_engine {

namespace fs = std::filesystem;

std::vector<int64_t> rows_of(const Trajectories& rows, const Indices& indices) {
  if (indices) {
    ESPALIER_CHECK(!indices->empty(), "indices: expected at least one row, received none");
    for (const int64_t row : *indices) {
      ESPALIER_CHECK(row >= 0 && row < rows.num_rows(), "indices: expected rows from 0 to {}, received {}",
                     rows.num_rows() - 1, row);
    }
    return *indices;
  }
  std::vector<int64_t> all(rows.num_rows());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

namespace {

void check_targets(const Trajectories& rows, int64_t row, int64_t vocab_size) {
  if (rows.target_ids.empty()) return;
  for (const int32_t id : rows.target_ids.span().subspan(rows.offsets[row], rows.row_size(row))) {
    ESPALIER_CHECK(id >= 0 && id < vocab_size,
                   "row {}: field `target_ids`: expected token ids from 0 and below {}, the model's "
                   "vocab_size, received {}",
                   rows.name(row), vocab_size, id);
  }
}

}  // namespace

void Engine::State::check_rows(const Trajectories& rows, const std::vector<int64_t>& indices) const {
  ESPALIER_CHECK(rows.num_rows() > 0, "rows: expected at least one, received none");
  for (const int64_t row : indices) {
    const auto ids = rows.row(row);
    const auto largest = std::ranges::max_element(ids);
    ESPALIER_CHECK(
        largest == ids.end() || *largest < config.vocab_size,
        "row {}: field `input_ids`: expected token ids below {}, the model's vocab_size, received {}",
        rows.name(row), config.vocab_size, *largest);
    check_targets(rows, row, config.vocab_size);
    const int64_t begin = rows.offsets[row] * rows.ref_topk, end = rows.offsets[row + 1] * rows.ref_topk;
    const auto topk = rows.ref_topk_ids.span().subspan(begin, end - begin);
    const auto largest_topk = std::ranges::max_element(topk);
    ESPALIER_CHECK(
        largest_topk == topk.end() || *largest_topk < config.vocab_size,
        "row {}: field `ref_topk_ids`: expected token ids below {}, the model's vocab_size, received {}",
        rows.name(row), config.vocab_size, *largest_topk);
  }
  check_recorded_routes("rows", rows, routers, config.num_hidden_layers());
}

void Engine::State::check_checkpoint(const fs::path& folder, const RunState& saved, bool with_optimizer,
                                     std::vector<std::string>* notes) const {
  const std::string fault = manifest_fault(folder, checkpoint_name(saved.step),
                                           [&](const std::string& note) { notes->push_back(note); });
  ESPALIER_CHECK(fault.empty(), "{}: the checkpoint is damaged: {}", folder.string(), fault);
  const bool is_adapter = fs::exists(folder / kAdapterConfigFile);
  const bool has_adapter = now->decoder().has_adapter();
  const auto trained = [](bool adapter) { return adapter ? "an adapter" : "all weights"; };
  ESPALIER_CHECK(is_adapter == has_adapter,
                 "{}: expected a checkpoint of {}, as the engine trains, received one of {}", folder.string(),
                 trained(has_adapter), trained(is_adapter));
  const auto saved_config =
      is_adapter ? saved.model_config : read_json_file<nlohmann::ordered_json>(folder / "config.json");
  const auto difference = config_difference(saved_config, source.config());
  if (difference) {
    throw InputError(
        fmt::format("{}: expected a checkpoint of the same model, received one of another: {} is {} in its "
                    "config.json, {} here",
                    folder.string(), difference->key, difference->before, difference->now));
  }
  if (is_adapter) now->check_adapter_of(folder);
  if (!saved.settings) return;
  for (const auto& [name, own] : {std::pair("dtype", dtype_name(dtype)),
                                  std::pair("optimizer", to_string(options.train.optimizer.kind))}) {
    if (!with_optimizer && name == std::string_view("optimizer")) continue;
    const auto was = saved.settings->fixed.value(name, nlohmann::ordered_json(own));
    ESPALIER_CHECK(was == own, "{}: expected a checkpoint with {} {}, that of the engine, received {}",
                   folder.string(), name, own, was.dump());
  }
}

}  // namespace espalier::python_engine
