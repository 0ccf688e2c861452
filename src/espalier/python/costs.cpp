// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <filesystem>
#include <optional>
#include <string>

#include "espalier/base/check.h"
#include "espalier/config/config.h"
#include "espalier/plan/cost_model_file.h"
#include "espalier/python/bindings.h"
#include "espalier/python/model_costs.h"

namespace espalier::python {

namespace nb = nanobind;

namespace {

Processor processor_of(const std::string& device) {
  ESPALIER_CHECK(device == "cpu" || device == "cuda", "--device: expected cpu or cuda, received `{}`",
                 device);
  return device == "cpu" ? Processor::kCpu : Processor::kGpu;
}

ModelCosts costs(const std::filesystem::path& model, const std::string& device,
                 const std::optional<std::filesystem::path>& cost_model) {
  const Processor processor = processor_of(device);
  const DecoderConfig config =
      std::filesystem::is_regular_file(model) ? read_config_file(model) : read_config(model);
  const ModelCost cost = model_cost(config);
  return {config.model_type,
          cost_model ? read_cost_model(*cost_model, cost) : assumed_time_model(cost, processor)};
}

std::string costs_text(const ModelCosts& self) {
  return fmt::format("<espalier.Costs: {}, {} layers, {} rates>", self.model_type,
                     self.time.cost.layers.size(), self.time.calibrated ? "measured" : "built-in");
}

}  // namespace

void bind_costs(nb::module_& module) {
  nb::class_<ModelCosts>(
      module, "Costs",
      "The cost of a model's forward and backward passes: FLOPs by its config.json, and "
      "seconds by\nbuilt-in or measured rates.\n\n"
      "Examples:\n"
      "    >>> import espalier, transformers\n"
      "    >>> config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48,\n"
      "    ...                                   num_attention_heads=4, num_key_value_heads=2)\n"
      "    >>> espalier.costs(config).model_type\n"
      "    'llama'")
      .def_ro("model_type", &ModelCosts::model_type, "The family, as in config.json.")
      .def_prop_ro(
          "calibrated", [](const ModelCosts& self) { return self.time.calibrated; },
          "Whether the rates were measured. Built-in rates suffice to compare plans, but do not predict "
          "times.")
      .def("__repr__", &costs_text);
  module.def("costs", &costs, nb::arg("model"), nb::arg("device"), nb::arg("cost_model").none(),
             "Implements espalier.costs.");
}

}  // namespace espalier::python
