// SPDX-License-Identifier: Apache-2.0
#include "espalier/python_engine/options.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/model/weights/tensor_bytes.h"

namespace espalier::python_engine {
namespace {

// The name in Python.
std::string python_name(std::string name) {
  std::ranges::replace(name, '-', '_');
  return name;
}

void add(EngineOptions* options, OptionList* list) {
  options->add(list);
}

void add(ObjectiveOptions* options, OptionList* list) {
  add_objective_options(options, list);
}

void add(SamplingFlags* options, OptionList* list) {
  options->add_sampling(list);
  options->add_sizes(list);
}

template <class Options>
Options parsed(const NamedTexts& texts) {
  Options options;
  OptionList list;
  add(&options, &list);
  for (const auto& [name, text] : texts) {
    std::vector<std::string> names = list.names();
    std::ranges::transform(names, names.begin(), python_name);
    ESPALIER_CHECK(list.find(name) != nullptr, "{}: there is no such option; expected one of {}",
                   python_name(name), fmt::join(names, ", "));
  }
  list.set(texts);
  return options;
}

template <class Options>
std::string described() {
  Options options;
  OptionList list;
  add(&options, &list);
  return list.description().dump();
}

}  // namespace

void EngineOptions::add(OptionList* list) {
  add_dtype(list, "dtype", &train.dtype,
            "Precision of training (bfloat16: with float32 master weights and gradient sums)");
  add_optimizer_options(&train, list, /*schedules=*/false);
  add_freeze_pad_embedding(list, &train.freeze_pad_embedding);
  planning.add(list, /*predicts=*/false);
  device.add(list, /*trains=*/true);
  add_threads(list);
  constexpr int64_t kFewestBareBytes = 65'536;
  list->add(
      "prefix-cache", &prefix_cache,
      "Memory for keys, values and states of prompts and completions that are kept between calls of "
      "sample, such as 1GiB: prompts that go on from them encode only what is new. What was not used for "
      "the longest time goes first (0: nothing is kept)",
      {.bytes = true, .fewest_bare = kFewestBareBytes});
  lora.add(list);
  list->add("seed", &train.seed, "Seed of new adapters", {.group = "LoRA"});
}

EngineOptions parse_engine_options(const NamedTexts& texts) {
  auto options = parsed<EngineOptions>(texts);
  options.train.lora = options.lora.options();
  options.train.adapter = options.lora.adapter;
  return options;
}

ObjectiveOptions parse_objective_options(const NamedTexts& texts) {
  const auto options = parsed<ObjectiveOptions>(texts);
  check_objective_options(options);
  return options;
}

SamplingFlags parse_sampling_options(const NamedTexts& texts) {
  return parsed<SamplingFlags>(texts);
}

std::string engine_options_json() {
  return described<EngineOptions>();
}

std::string objective_options_json() {
  return described<ObjectiveOptions>();
}

std::string sampling_options_json() {
  return described<SamplingFlags>();
}

}  // namespace espalier::python_engine
