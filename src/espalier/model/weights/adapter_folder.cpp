// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/weights/adapter_folder.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string_view>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/json_file.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/ops/checks.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kPrefix = "base_model.model.";  // prefix of all tensors, from PEFT's wrapper modules

/// The name in files of a map, or of one of its tensors.
std::string name_in_file(const ModelSpec& spec, const std::string& name) {
  return kPrefix + module_name(spec, name);
}

/// null, false or empty.
bool is_off(const Json& value) {
  return value.is_null() || value == false || value == "none" || value == 0 ||
         ((value.is_array() || value.is_object()) && value.empty());
}

// Keys that, if set, make an adapter different from scale (x A^T) B^T on linear maps.
constexpr auto kRefused = std::to_array<std::string_view>(
    {"bias", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern", "trainable_token_indices",
     "use_dora", "use_qalora", "use_bdlora", "layer_replication", "lora_bias", "alora_invocation_tokens",
     "arrow_config", "kasa_config", "monteclora_config", "velora_config", "megatron_config"});

// Initialisations that do not change the weights of the model, as others do (pissa, olora, loftq, ...).
constexpr auto kInitialisations = std::to_array<std::string_view>({"gaussian", "orthogonal", "eva"});

double number(const Json& config, const char* key, double missing, const std::string& file) {
  if (!config.contains(key)) return missing;
  ESPALIER_CHECK(config[key].is_number(), "{}: {}: expected a number, received {}", file, key,
                 config[key].dump());
  return config[key].get<double>();
}

void check_is_lora(const Json& config, const std::string& file) {
  ESPALIER_CHECK(config.is_object(), "{}: expected a JSON object", file);
  const Json type = config.value("peft_type", Json());
  ESPALIER_CHECK(type == "LORA", "{}: peft_type: expected \"LORA\", received {}", file, type.dump());
}

/// A PEFT configuration that fits the model, for messages.
std::string how_to_fit(const ModelSpec& spec) {
  return fmt::format("LoraConfig(target_modules={}) makes one that fits",
                     Json(target_names(spec, adapted_maps(spec, {kAllLinear}))).dump());
}

/// Refuses target_parameters, by which PEFT adapts experts and routers (in some families also with
/// all-linear).
void check_no_parameters(const Json& config, const std::string& file, const SafetensorsFile& tensors,
                         const ModelSpec& spec) {
  const Json value = config.value("target_parameters", Json());
  if (is_off(value)) return;
  std::set<std::string> known, others;
  for (const LinearMap& map : adaptable_maps(spec)) known.insert(name_in_file(spec, map.name));
  for (const TensorView& tensor : tensors.tensors()) {
    const std::string module = tensor.name.substr(0, tensor.name.rfind(".lora_"));
    const size_t layers = module.find("layers.");
    if (known.contains(module) || layers == std::string::npos) continue;
    others.insert(module.substr(module.find('.', layers + std::string_view("layers.").size()) + 1));
  }
  const std::string found =
      others.empty() ? "" : fmt::format(" (here tensors lora_A and lora_B of {})", fmt::join(others, ", "));
  throw InputError(fmt::format(
      "{}: target_parameters: expected none, received {}: experts and routers cannot have adapters{}; {}",
      file, value.dump(), found, how_to_fit(spec)));
}

void check_is_plain(const Json& config, const std::string& file) {
  for (const std::string_view key : kRefused) {
    const Json value = config.value(std::string(key), Json());
    ESPALIER_CHECK(is_off(value), "{}: {}: expected none, received {}", file, key, value.dump());
  }
  const Json init = config.value("init_lora_weights", Json(true));
  const std::string word = init.is_string() ? init.get<std::string>() : "";
  ESPALIER_CHECK(
      init.is_boolean() || std::ranges::find(kInitialisations, word) != kInitialisations.end(),
      "{}: init_lora_weights: expected true, false, {}, received {}: it changes the weights of the "
      "model (PEFT converts such adapters: path_initial_model_for_weight_conversion)",
      file, fmt::join(kInitialisations, ", "), init.dump());
}

LoraOptions options_of(const Json& config, const std::string& file) {
  LoraOptions options;
  const double rank = number(config, "r", 8, file);  // PEFT's defaults
  ESPALIER_CHECK(rank >= 1 && rank == std::floor(rank) && rank <= 1e9,
                 "{}: r: expected a whole number of at least 1, received {}", file, rank);
  options.rank = static_cast<int64_t>(rank);
  options.alpha = number(config, "lora_alpha", 8, file);
  ESPALIER_CHECK(options.alpha > 0 && std::isfinite(options.alpha),
                 "{}: lora_alpha: expected a finite number above 0, received {}", file, options.alpha);
  const Json rslora = config.value("use_rslora", Json(false));
  ESPALIER_CHECK(rslora.is_boolean(), "{}: use_rslora: expected true or false, received {}", file,
                 rslora.dump());
  options.rslora = rslora.get<bool>();
  return options;
}

fs::path weights_file(const fs::path& folder) {
  const fs::path file = folder / kAdapterWeightsFile;
  ESPALIER_CHECK(fs::exists(file) || !fs::exists(folder / "adapter_model.bin"),
                 "{}: expected {}, received adapter_model.bin, a pickle, which can run programs and is never "
                 "read (load it with PEFT and save it again)",
                 folder.string(), kAdapterWeightsFile);
  return file;
}

/// Checks that all tensors of the file are used.
void check_all_used(const SafetensorsFile& file, const std::set<std::string>& used, const ModelSpec& spec) {
  for (const TensorView& tensor : file.tensors()) {
    if (used.contains(tensor.name)) continue;
    throw InputError(
        fmt::format("{}: tensor `{}`: the model has {} layers, and no linear map of this name that can have "
                    "an adapter; {}",
                    file.path().string(), tensor.name, spec.layers.size(), how_to_fit(spec)));
  }
}

}  // namespace

SavedAdapter load_adapter(const fs::path& folder, const DecoderConfig& config, at::ScalarType dtype,
                          at::Device device) {
  const fs::path config_file = folder / kAdapterConfigFile;
  ESPALIER_CHECK(fs::is_directory(folder), "{}: expected the folder of an adapter, there is none",
                 folder.string());
  ESPALIER_CHECK(fs::exists(config_file), "{}: expected the folder of an adapter, with {}; there is none",
                 folder.string(), kAdapterConfigFile);
  SavedAdapter saved;
  saved.adapter.config = read_json_file<Json>(config_file);
  const Json& json = saved.adapter.config;
  check_is_lora(json, config_file.string());
  const SafetensorsFile file(weights_file(folder));
  const ModelSpec& spec = config;
  check_no_parameters(json, config_file.string(), file, spec);
  check_is_plain(json, config_file.string());
  saved.options = options_of(json, config_file.string());
  saved.adapter.scale = lora_scale(saved.options);

  const int64_t rank = saved.options.rank;
  std::set<std::string> used;
  for (const LinearMap& map : adaptable_maps(spec)) {
    const std::string a = map.name + kLoraA, b = map.name + kLoraB;
    if (file.find(name_in_file(spec, a)) == nullptr && file.find(name_in_file(spec, b)) == nullptr) continue;
    saved.options.targets.push_back(map.name);
    for (const ParameterShape& part :
         {ParameterShape{a, {rank, map.in}}, ParameterShape{b, {map.out, rank}}}) {
      const std::string name = name_in_file(spec, part.name);
      const TensorView* stored = file.find(name);
      ESPALIER_CHECK(stored != nullptr, "{}: tensor `{}` is missing", file.path().string(), name);
      const at::Tensor value = converted_tensor(*stored, file.path().string(), part.shape,
                                                detail::accumulator_dtype(dtype), device);
      saved.adapter.parameters.push_back({part.name, value.set_requires_grad(true)});
      used.insert(name);
    }
  }
  const std::string head = name_in_file(spec, kHeadModule) + ".base_layer.weight";
  if (const TensorView* stored = file.find(head);
      stored != nullptr && used.contains(name_in_file(spec, std::string(kHeadModule) + kLoraA))) {
    saved.lm_head =
        converted_tensor(*stored, file.path().string(), {spec.vocab_size, spec.hidden_size}, dtype, device);
    used.insert(head);
  }
  check_all_used(file, used, spec);
  ESPALIER_CHECK(!used.empty(), "{}: expected tensors of an adapter, received none", file.path().string());
  file.mapping()->check_whole();
  return saved;
}

SavedAdapter load_adapter(const fs::path& folder, const Decoder& decoder) {
  SavedAdapter saved = load_adapter(folder, decoder.config(), decoder.dtype(), decoder.device());
  ESPALIER_CHECK(!saved.lm_head.defined() || saved.lm_head.equal(decoder.lm_head().weight),
                 "{}: lm_head: expected the weight of the model beside its adapter, received another: the "
                 "adapter was trained on another model",
                 (folder / kAdapterWeightsFile).string());
  return saved;
}

Decoder load_adapted(const fs::path& model, const fs::path& adapter, at::ScalarType dtype,
                     at::Device device) {
  Decoder decoder = load_decoder(model, dtype, device);
  if (adapter.empty()) return decoder;
  return Decoder(decoder.config(), decoder.weights(), decoder.buffers(),
                 load_adapter(adapter, decoder).adapter);
}

void check_no_dropout(const Adapter& adapter, const fs::path& folder) {
  const std::string file = (folder / kAdapterConfigFile).string();
  const double dropout = number(adapter.config, "lora_dropout", 0, file);
  ESPALIER_CHECK(dropout == 0,
                 "{}: lora_dropout: expected 0 for training, received {}: dropout would differ between the "
                 "trajectories that share a token",
                 file, dropout);
}

Json adapter_config(const LoraOptions& options, const std::vector<std::string>& targets,
                    const std::string& base) {
  const bool whole = options.alpha == std::floor(options.alpha) && options.alpha < 1e15;
  return {{"alpha_pattern", Json::object()},
          {"auto_mapping", nullptr},
          {"base_model_name_or_path", base},
          {"bias", "none"},
          {"fan_in_fan_out", false},
          {"inference_mode", true},
          {"init_lora_weights", true},
          {"lora_alpha", whole ? Json(static_cast<int64_t>(options.alpha)) : Json(options.alpha)},
          {"lora_dropout", 0.0},
          {"modules_to_save", nullptr},
          {"peft_type", "LORA"},
          {"r", options.rank},
          {"rank_pattern", Json::object()},
          {"revision", nullptr},
          {"target_modules", targets},
          {"task_type", "CAUSAL_LM"},
          {"use_dora", false},
          {"use_rslora", options.rslora}};
}

void save_adapter(const ModelSpec& spec, const Adapter& adapter, const fs::path& out, at::ScalarType dtype) {
  std::error_code error;
  fs::create_directories(out, error);
  ESPALIER_CHECK(!error, "cannot make {}: {}", out.string(), error.message());
  std::vector<at::Tensor> keep;
  std::vector<TensorView> tensors;
  for (const Parameter& parameter : adapter.parameters) {
    keep.push_back(parameter.value.detach().to(at::kCPU, dtype).contiguous());
    if (const std::string fault = nonfinite_text(keep.back()); !fault.empty())
      throw NonFiniteError(fmt::format("`{}` {}", parameter.name, fault));
    tensors.push_back(view_tensor(name_in_file(spec, parameter.name), keep.back()));
  }
  write_safetensors(out / kAdapterWeightsFile, tensors, {{"format", "pt"}});
  write_text(out / kAdapterConfigFile, adapter.config.dump(2) + "\n");
}

}  // namespace espalier
