#include "espalier/train/checkpoint.h"

#include <ATen/ATen.h>

#include <charconv>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/model/tensor_bytes.h"
#include "espalier/model/weights.h"

namespace espalier {
namespace {

constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kStateFile = "trainer_state.json";
constexpr const char* kWeightsFile = "resume.safetensors";

// The weights in the dtype that they are trained in. bfloat16 models resume from their float32 masters.
void save_exact_weights(const std::filesystem::path& file, const Decoder& decoder) {
  std::vector<at::Tensor> keep;
  std::vector<TensorView> views;
  for (const Parameter& parameter : decoder.parameters()) {
    keep.push_back(parameter.value.detach().cpu());
    views.push_back(view_tensor(parameter.name, keep.back()));
  }
  write_safetensors(file, views);
}

int64_t step_of(const std::filesystem::path& folder) {
  const std::string name = folder.filename().string();
  constexpr std::string_view kPrefix = "step_";
  int64_t step = -1;
  if (!name.starts_with(kPrefix)) return -1;
  const char* end = name.data() + name.size();
  const auto [last, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  return error == std::errc() && last == end ? step : -1;
}

}  // namespace

std::filesystem::path save_checkpoint(const CheckpointOptions& options, int64_t step, const Decoder& decoder,
                                      const Optimizer& optimizer,
                                      const nlohmann::ordered_json& trainer_state) {
  const std::filesystem::path parent = options.run_folder / "checkpoints";
  const std::filesystem::path folder = parent / fmt::format("step_{}", step);
  const std::filesystem::path temporary = parent / fmt::format(".step_{}.partial", step);
  std::filesystem::create_directories(parent);
  std::filesystem::remove_all(temporary);
  save_decoder(decoder, options.source_model, temporary, options.save_dtype);
  optimizer.save(temporary / kOptimizerFile);
  const at::ScalarType dtype = decoder.parameters().front().value.scalar_type();
  if (options.save_dtype != dtype) save_exact_weights(temporary / kWeightsFile, decoder);
  write_text(temporary / kStateFile, trainer_state.dump(2) + "\n");
  sync_folder(temporary);
  ESPALIER_CHECK(!std::filesystem::exists(folder), "{}: expected no such folder, it exists already",
                 folder.string());
  std::filesystem::rename(temporary, folder);
  sync_folder(parent);
  return folder;
}

std::optional<std::filesystem::path> newest_checkpoint(const std::filesystem::path& run_folder) {
  const std::filesystem::path parent = run_folder / "checkpoints";
  if (!std::filesystem::is_directory(parent)) return std::nullopt;
  std::optional<std::filesystem::path> newest;
  for (const auto& entry : std::filesystem::directory_iterator(parent)) {
    if (!entry.is_directory() || step_of(entry.path()) < 0) continue;
    if (!newest || step_of(entry.path()) > step_of(*newest)) newest = entry.path();
  }
  return newest;
}

nlohmann::json read_trainer_state(const std::filesystem::path& checkpoint) {
  const std::filesystem::path file = checkpoint / kStateFile;
  const auto state = nlohmann::json::parse(read_text(file), nullptr, /*allow_exceptions=*/false);
  ESPALIER_CHECK(state.is_object() && state.contains("step") && state["step"].is_number_integer(),
                 "{}: expected a JSON object with an integer `step`", file.string());
  return state;
}

void load_checkpoint(const std::filesystem::path& checkpoint, Decoder* decoder, Optimizer* optimizer) {
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = decoder->parameters().front().value.scalar_type();
  const bool exact_weights = std::filesystem::exists(checkpoint / kWeightsFile);
  if (exact_weights) {
    const SafetensorsFile file(checkpoint / kWeightsFile);
    for (const Parameter& parameter : decoder->parameters()) {
      read_tensor(file, parameter.name, parameter.value.detach());
    }
  } else {
    const Decoder saved = load_decoder(checkpoint, dtype);
    for (size_t i = 0; i < decoder->parameters().size(); ++i) {
      decoder->parameters()[i].value.detach().copy_(saved.parameters()[i].value);
    }
  }
  optimizer->load(checkpoint / kOptimizerFile);
}

}  // namespace espalier
