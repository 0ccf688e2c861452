#include "espalier/model/weights.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/safetensors.h"
#include "espalier/model/json_file.h"
#include "espalier/model/tensor_bytes.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr const char* kLmHead = "lm_head.weight";
constexpr const char* kEmbedding = "model.embed_tokens.weight";

/// `folder / name`, refused where it is a link that leaves the folder: a downloaded folder must not make a
/// run read, or copy into a checkpoint, a file from elsewhere. The one exception is the layout of the Hugging
/// Face cache, where the files of snapshots/REVISION/ are links into blobs/ beside snapshots/.
fs::path resolve_inside(const fs::path& folder, const std::string& name) {
  const fs::path path = folder / name;
  std::error_code error;
  if (!fs::is_symlink(path, error)) return path;
  const fs::path root = fs::canonical(folder, error);
  ESPALIER_CHECK(!error, "{}: {}", folder.string(), error.message());
  const fs::path target = fs::canonical(path, error).parent_path();
  ESPALIER_CHECK(!error, "{}: {}", path.string(), error.message());
  const bool is_cache_blob =
      root.parent_path().filename() == "snapshots" && target == root.parent_path().parent_path() / "blobs";
  ESPALIER_CHECK(target == root || is_cache_blob,
                 "{}: expected a file of this folder, received a link that leaves it, to {}", path.string(),
                 target.string());
  return path;
}

/// The safetensors files of a model folder, opened, and the index where there is one.
struct WeightFiles {
  std::vector<SafetensorsFile> files;
  std::map<std::string, size_t> file_of;  // tensor name -> place in files
  OrderedJson index;                      // null where the weights are one file
  fs::path where;                         // what to name in an error about a missing tensor
};

std::map<std::string, std::string> read_weight_map(const OrderedJson& index, const fs::path& where) {
  const bool has_map = index.is_object() && index.contains("weight_map") && index["weight_map"].is_object();
  ESPALIER_CHECK(has_map, "{}: weight_map: expected an object, received none", where.string());
  std::map<std::string, std::string> weight_map;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    ESPALIER_CHECK(file.is_string(), "{}: weight_map.{}: expected a file name, received {}", where.string(),
                   tensor, file.type_name());
    const auto name = file.get<std::string>();
    const bool is_plain = name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos &&
                          name.ends_with(".safetensors") && !name.starts_with('.');
    ESPALIER_CHECK(is_plain,
                   "{}: weight_map.{}: expected a plain .safetensors name inside the folder, received `{}`",
                   where.string(), tensor, name);
    ESPALIER_CHECK(weight_map.emplace(tensor, name).second, "{}: weight_map.{}: given twice", where.string(),
                   tensor);
  }
  return weight_map;
}

WeightFiles open_shards(const fs::path& folder) {
  WeightFiles weights;
  weights.where = folder / kIndexFile;
  weights.index = read_json_file<OrderedJson>(resolve_inside(folder, kIndexFile));
  const auto weight_map = read_weight_map(weights.index, weights.where);
  std::set<std::string> names;
  for (const auto& [tensor, name] : weight_map) names.insert(name);
  for (const std::string& name : names) {
    ESPALIER_CHECK(fs::is_regular_file(folder / name),
                   "{}: weight_map names the file `{}`, which is not there", weights.where.string(), name);
    const SafetensorsFile& file = weights.files.emplace_back(resolve_inside(folder, name));
    for (const TensorView& tensor : file.tensors()) {
      const auto entry = weight_map.find(tensor.name);
      ESPALIER_CHECK(entry != weight_map.end() && entry->second == name,
                     "{}: tensor `{}`: expected in {} by the weight_map of {}, received in `{}`",
                     file.path().string(), tensor.name,
                     entry == weight_map.end() ? "no file" : "`" + entry->second + "`", kIndexFile, name);
      weights.file_of.emplace(tensor.name, weights.files.size() - 1);
    }
  }
  for (const auto& [tensor, name] : weight_map) {
    ESPALIER_CHECK(weights.file_of.contains(tensor), "{}: weight_map.{}: `{}` has no such tensor",
                   weights.where.string(), tensor, name);
  }
  return weights;
}

WeightFiles open_weights(const fs::path& folder) {
  // Transformers, too, takes the single file where both forms are there.
  if (fs::exists(folder / kSingleFile)) {
    WeightFiles weights;
    weights.where = folder / kSingleFile;
    const SafetensorsFile& file = weights.files.emplace_back(resolve_inside(folder, kSingleFile));
    for (const TensorView& tensor : file.tensors()) weights.file_of.emplace(tensor.name, 0);
    return weights;
  }
  ESPALIER_CHECK(fs::exists(folder / kIndexFile),
                 "{}: expected weights in {} or {}, received neither (other formats must be converted first)",
                 folder.string(), kSingleFile, kIndexFile);
  return open_shards(folder);
}

const TensorView& find_parameter(const WeightFiles& weights, const std::string& name) {
  const auto place = weights.file_of.find(name);
  ESPALIER_CHECK(place != weights.file_of.end(), "{}: tensor `{}` is missing; config.json asks for it",
                 weights.where.string(), name);
  return weights.files[place->second].at(name);
}

at::Tensor read_parameter(const WeightFiles& weights, const ParameterShape& expected, at::ScalarType dtype,
                          at::Device device) {
  const TensorView& tensor = find_parameter(weights, expected.name);
  const std::string& where = weights.files[weights.file_of.at(expected.name)].path().native();
  ESPALIER_CHECK(tensor.shape == expected.shape, "{}: tensor `{}`: expected shape [{}], received [{}]", where,
                 tensor.name, fmt::join(expected.shape, ", "), fmt::join(tensor.shape, ", "));
  const std::optional<at::ScalarType> stored = floating_dtype(tensor.dtype);
  ESPALIER_CHECK(stored.has_value(), "{}: tensor `{}`: expected dtype F64, F32, BF16 or F16, received {}",
                 where, tensor.name, tensor.dtype);
  // Copied before it is converted, since a mapped tensor may be unaligned.
  at::Tensor value = at::empty(tensor.shape, at::TensorOptions().dtype(*stored));
  if (!tensor.bytes.empty()) std::memcpy(value.mutable_data_ptr(), tensor.bytes.data(), tensor.bytes.size());
  return value.to(device).to(dtype);
}

bool is_companion(const std::string& name) {
  static constexpr auto kLeftOut = std::to_array<std::string_view>(
      {".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"});
  return name != "config.json" && name != "trainer_state.json" && !name.starts_with('.') &&
         std::none_of(kLeftOut.begin(), kLeftOut.end(),
                      [&](std::string_view suffix) { return name.ends_with(suffix); });
}

/// Names of the files beside config and weights that belong to the model: tokenizer, templates, generation
/// defaults, licence. Sorted. Weights of any format, optimiser states, hidden files and folders are left out.
std::vector<std::string> companion_files(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!is_companion(name) || !entry.is_regular_file(error)) continue;
    resolve_inside(folder, name);
    names.push_back(name);
  }
  ESPALIER_CHECK(!error, "{}: {}", folder.string(), error.message());
  std::sort(names.begin(), names.end());
  return names;
}

/// The tensors of one source file with the decoder's parameters in place of the stored ones. Values live in
/// `keep` until the file is written.
std::vector<TensorView> replace_parameters(const SafetensorsFile& source,
                                           const std::map<std::string, at::Tensor>& parameters,
                                           at::ScalarType dtype, std::vector<at::Tensor>* keep) {
  std::vector<TensorView> tensors;
  for (const TensorView& stored : source.tensors()) {
    const auto parameter = parameters.find(stored.name);
    if (parameter == parameters.end()) {
      tensors.push_back(stored);
      continue;
    }
    keep->push_back(parameter->second.detach().to(at::kCPU, dtype).contiguous());
    tensors.push_back(view_tensor(stored.name, keep->back()));
  }
  return tensors;
}

/// What to write under which name: the decoder's parameters, and its embedding as the head of a tied model
/// whose files hold one.
std::map<std::string, at::Tensor> values_to_write(const Decoder& decoder, const WeightFiles& source) {
  std::map<std::string, at::Tensor> values;
  for (const Parameter& parameter : decoder.parameters()) {
    find_parameter(source, parameter.name);
    values.emplace(parameter.name, parameter.value);
  }
  if (decoder.config().tie_word_embeddings) values.emplace(kLmHead, values.at(kEmbedding));
  return values;
}

void copy_companions(const fs::path& source, const fs::path& out) {
  for (const std::string& name : companion_files(source)) {
    std::error_code error;
    fs::copy_file(source / name, out / name, fs::copy_options::overwrite_existing, error);
    ESPALIER_CHECK(!error, "cannot copy {} to {}: {}", (source / name).string(), (out / name).string(),
                   error.message());
  }
}

}  // namespace

at::ScalarType parse_dtype(const std::string& name) {
  if (name == "float64") return at::kDouble;
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  throw InputError(fmt::format("dtype: expected float64, float32 or bfloat16, received `{}`", name));
}

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "float64";
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    default:
      throw InputError(
          fmt::format("dtype: expected float64, float32 or bfloat16, received {}", at::toString(dtype)));
  }
}

Decoder load_decoder(const fs::path& model_folder, at::ScalarType dtype, at::Device device) {
  DecoderConfig config = read_config_file(resolve_inside(model_folder, "config.json"));
  const WeightFiles weights = open_weights(model_folder);
  // What save_decoder would refuse to copy is refused now, before hours of training.
  companion_files(model_folder);
  std::vector<Parameter> parameters;
  for (const ParameterShape& expected : parameter_shapes(config)) {
    parameters.push_back(
        {expected.name, read_parameter(weights, expected, dtype, device).set_requires_grad(true)});
  }
  return Decoder(std::move(config), std::move(parameters));
}

void save_decoder(const Decoder& decoder, const fs::path& source, const fs::path& out, at::ScalarType dtype) {
  const std::string dtype_word = dtype_name(dtype);
  std::error_code error;
  fs::create_directories(out, error);
  ESPALIER_CHECK(!error, "cannot make {}: {}", out.string(), error.message());
  // Written over its own source, a model would be read while it is replaced.
  ESPALIER_CHECK(!fs::equivalent(source, out, error), "cannot save the model over its source {}",
                 source.string());

  WeightFiles weights = open_weights(source);
  const std::map<std::string, at::Tensor> values = values_to_write(decoder, weights);
  int64_t total_bytes = 0;
  for (const SafetensorsFile& file : weights.files) {
    std::vector<at::Tensor> keep;
    const std::vector<TensorView> tensors = replace_parameters(file, values, dtype, &keep);
    for (const TensorView& tensor : tensors) total_bytes += static_cast<int64_t>(tensor.bytes.size());
    std::map<std::string, std::string> metadata = file.metadata();
    metadata.emplace("format", "pt");  // Transformers 4 refuses files that do not say so
    write_safetensors(out / file.path().filename(), tensors, metadata);
  }
  if (!weights.index.is_null()) {
    weights.index["metadata"]["total_size"] = total_bytes;
    write_text(out / kIndexFile, weights.index.dump(2) + "\n");
  }
  write_text(out / "config.json", config_with_dtype(resolve_inside(source, "config.json"), dtype_word));
  copy_companions(source, out);
}

}  // namespace espalier
