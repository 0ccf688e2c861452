// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/lora.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>

#include "espalier/base/option_names.h"
#include "espalier/base/options.h"

namespace espalier {
namespace {

constexpr std::string_view kWeight = ".weight";

std::string last_part(const std::string& name) {
  return name.substr(name.rfind('.') + 1);
}

/// In models whose experts are separate MLPs with these names in checkpoints, PEFT treats every map with such
/// a name as an expert, which Transformers stores as one tensor for all.
bool takes_for_experts(const ModelSpec& spec, const std::string& map) {
  const bool has_experts = std::ranges::any_of(spec.layers, [](const LayerSpec& layer) {
    const auto* moe = std::get_if<MoeSpec>(&layer.mlp);
    return moe != nullptr && moe->names == MlpNames();
  });
  const std::string name = last_part(map);
  return has_experts && (name == "gate_proj" || name == "up_proj" || name == "down_proj");
}

bool is_adaptable(const LayerSpec& layer, const ParameterShape& parameter) {
  const std::string& name = parameter.name;
  if (parameter.shape.size() != 2 || !name.ends_with(kWeight)) return false;
  // Mixers of Mamba-2 in Transformers read the weight directly, not through the module, so PEFT refuses it.
  if (name == "mixer.out_proj.weight") return false;
  const auto* moe = std::get_if<MoeSpec>(&layer.mlp);
  return moe == nullptr ||
         !(name.starts_with(moe->experts_name + ".") || name == moe->router_name + std::string(kWeight));
}

std::string without_weight(const std::string& name) {
  return name.ends_with(kWeight) ? name.substr(0, name.size() - kWeight.size()) : name;
}

bool stands_for(const std::string& target, const std::string& module) {
  return module == target || module.ends_with("." + target);
}

/// The part of a module's name after "layers.N.".
std::string in_layer(const ModelSpec& spec, const std::string& name) {
  const size_t number = spec.parameter_prefix.size() + std::string_view("layers.").size();
  return name.substr(name.find('.', number) + 1);
}

/// Modules with parameters but without an adapter, in any layer or outside.
std::vector<std::string> other_modules(const ModelSpec& spec, const std::vector<LinearMap>& maps) {
  std::set<std::string> adapted;
  for (const LinearMap& map : maps) adapted.insert(map.name);
  std::vector<std::string> others;
  for (const ParameterShape& parameter : parameter_shapes(spec)) {
    std::string module = without_weight(parameter.name);
    if (!adapted.contains(module)) others.push_back(std::move(module));
  }
  return others;
}

std::string known_names(const std::vector<LinearMap>& maps) {
  std::set<std::string> names;
  for (const LinearMap& map : maps) names.insert(last_part(map.name));
  return fmt::format("{}, {}", fmt::join(names, ", "), kAllLinear);
}

/// The names of a comma-separated list, in its order, without duplicates.
std::vector<std::string> names_in(const std::string& list) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    std::string name = list.substr(begin, end - begin);
    ESPALIER_CHECK(!name.empty() && name.find(' ') == std::string::npos,
                   "expected comma-separated names without spaces, received `{}`", list);
    if (std::ranges::find(names, name) == names.end()) names.push_back(std::move(name));
    begin = end + 1;
  }
  return names;
}

}  // namespace

void add_lora_options(LoraOptions* options, OptionList* list) {
  list->group("LoRA");
  list->add("lora-rank", &options->rank,
            "Train low-rank adapters of this rank instead of the weights, which are frozen and have neither "
            "gradients nor optimiser state. Checkpoints are then PEFT folders",
            {.least = 1, .shows_default = false});
  list->add("lora-alpha", &options->alpha,
            "Scale of adapters: their output is multiplied by this over the rank (default: the rank)",
            {.above = 0, .shows_default = false});
  const auto set = [options](const std::vector<std::string>& texts, const OptionTraits&) {
    options->targets = names_in(texts.back());
  };
  const auto targets = [options] { return fmt::format("{}", fmt::join(options->targets, ",")); };
  list->add({"lora-targets",
             OptionKind::kText,
             {set, targets},
             "Linear maps with adapters: comma-separated names, such as q_proj,v_proj, or all-linear. A name "
             "selects all maps whose names end with it. Routers and experts have none; the LM head has one "
             "only where lm_head is named",
             {.shown = "NAMES"}});
  list->add("lora-rslora", &options->rslora, "Divide by the square root of the rank instead (rsLoRA)");
}

double lora_scale(const LoraOptions& options) {
  const auto rank = static_cast<double>(options.rank);
  return options.alpha / (options.rslora ? std::sqrt(rank) : rank);
}

void check_lora_options(const LoraOptions& options) {
  ESPALIER_CHECK(options.rank >= 1, "{}: expected a whole number of at least 1, received {}",
                 named("lora-rank"), options.rank);
  ESPALIER_CHECK(options.alpha > 0 && std::isfinite(options.alpha),
                 "{}: expected a finite number above 0, received {}", named("lora-alpha"), options.alpha);
  ESPALIER_CHECK(!options.targets.empty(), "{}: expected names of linear maps, received none",
                 named("lora-targets"));
}

std::vector<LinearMap> adaptable_maps(const ModelSpec& spec) {
  std::vector<LinearMap> maps;
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const std::string prefix = layer_prefix(spec, static_cast<int64_t>(i));
    for (const ParameterShape& parameter : layer_parameters(spec.layers[i], spec.hidden_size)) {
      const std::string name = without_weight(parameter.name);
      if (!is_adaptable(spec.layers[i], parameter) || takes_for_experts(spec, name)) continue;
      maps.push_back({prefix + name, parameter.shape[1], parameter.shape[0]});
    }
  }
  maps.push_back({kHeadModule, spec.hidden_size, spec.vocab_size});
  return maps;
}

std::string module_name(const ModelSpec& spec, const std::string& name) {
  if (spec.module_prefix.empty() || !name.starts_with(spec.parameter_prefix)) return name;
  return spec.module_prefix + name.substr(spec.parameter_prefix.size());
}

std::vector<LinearMap> adapted_maps(const ModelSpec& spec, const std::vector<std::string>& targets) {
  const std::vector<LinearMap> all = adaptable_maps(spec);
  const std::vector<std::string> others = other_modules(spec, all);
  for (const std::string& target : targets) {
    if (target == kAllLinear) continue;
    const bool found =
        std::ranges::any_of(all, [&](const LinearMap& map) { return stands_for(target, map.name); });
    const auto other =
        std::ranges::find_if(others, [&](const std::string& module) { return stands_for(target, module); });
    ESPALIER_CHECK(other == others.end(),
                   "lora-targets: `{}` selects {}, which cannot have an adapter{}; those that can: {}",
                   target, *other, found ? " (a longer name, such as self_attn.q_proj, selects fewer)" : "",
                   known_names(all));
    ESPALIER_CHECK(found, "lora-targets: the model has no linear map `{}`; it has: {}", target,
                   known_names(all));
  }
  std::vector<LinearMap> maps;
  std::ranges::copy_if(all, std::back_inserter(maps), [&](const LinearMap& map) {
    return std::ranges::any_of(targets, [&](const std::string& target) {
      return target == kAllLinear ? map.name != kHeadModule : stands_for(target, map.name);
    });
  });
  return maps;
}

std::vector<std::string> target_names(const ModelSpec& spec, const std::vector<LinearMap>& maps) {
  const std::vector<std::string> others = other_modules(spec, maps);
  const auto names_others = [&](const std::string& target) {
    return std::ranges::any_of(others, [&](const std::string& module) { return stands_for(target, module); });
  };
  std::vector<std::string> names;
  for (const LinearMap& map : maps) {
    std::string name = last_part(map.name);
    if (names_others(name)) name = in_layer(spec, map.name);
    if (names_others(name)) name = module_name(spec, map.name);
    if (std::ranges::find(names, name) == names.end()) names.push_back(std::move(name));
  }
  return names;
}

}  // namespace espalier
