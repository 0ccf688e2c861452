// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/weights/weights.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/hash.h"
#include "espalier/base/json_file.h"
#include "espalier/base/manifest.h"
#include "espalier/base/safetensors.h"
#include "espalier/config/config.h"
#include "espalier/config/families/family.h"
#include "espalier/model/weights/fused_experts.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/ops/checks.h"

namespace espalier {
namespace {

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> suffixes) {
  return std::any_of(suffixes.begin(), suffixes.end(),
                     [&](std::string_view suffix) { return name.ends_with(suffix); });
}

/// Tensors that follow from the config or are only used for inference.
bool is_harmless(std::string_view name) {
  return ends_with_any(
      name, {"rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "attn.k_scale",
             "attn.v_scale", "k_proj.k_scale", "v_proj.v_scale", "kv_scale"});
}

bool is_adapter(std::string_view name) {
  constexpr auto kMarks =
      std::to_array<std::string_view>({"lora_", "loha_", "lokr_", "modules_to_save", "adapter"});
  return std::any_of(kMarks.begin(), kMarks.end(),
                     [&](std::string_view mark) { return name.find(mark) != std::string_view::npos; });
}

std::string no_such_parameter(const DecoderConfig& config) {
  return fmt::format("a {} model has no such parameter", config.model_type);
}

std::string reason_in_layer(const DecoderConfig& config, std::string_view part) {
  if (part.ends_with(".bias")) {
    const std::string_view key = bias_key(config, part);
    if (!key.empty()) return fmt::format("config.json says that {} is false", key);
    if (part.starts_with("self_attn.") || part.starts_with("mlp."))
      return fmt::format("a {} model has no bias there", config.model_type);
  }
  if (ends_with_any(part, {"q_norm.weight", "k_norm.weight"}))
    return fmt::format("config.json says that the model is a {}, which has no norms of queries and keys",
                       config.model_type);
  return no_such_parameter(config);
}

/// The reason why a tensor that is no parameter of the decoder must not be ignored, in terms of config.json;
/// nullopt if it can be copied unchanged: buffers that follow from the config (rotary_emb.inv_freq, scales of
/// a key-value cache) and parts of a larger model (vision towers, reward heads, multi-token prediction
/// layers). A tensor that looks like part of the decoder would change what the model computes: layers beyond
/// num_hidden_layers, biases and norms that the config does not have, unmerged adapters, scales of quantised
/// weights. Does not check `lm_head.weight` of a tied model, which depends on its values.
std::optional<std::string> reason_to_refuse(const DecoderConfig& config, const std::string& tensor) {
  if (is_adapter(tensor)) return "it belongs to an adapter, which must be merged into the weights first";
  if (is_harmless(tensor)) return std::nullopt;
  const std::string layers = config.parameter_prefix + "layers.";
  if (tensor.starts_with(layers)) {
    int64_t layer = -1;
    const char* const end = tensor.data() + tensor.size();
    const auto [last, error] = std::from_chars(tensor.data() + layers.size(), end, layer);
    if (error != std::errc() || last == end || *last != '.') return no_such_parameter(config);
    const int64_t behind = layer - config.num_hidden_layers();
    if (behind >= 0 && behind < config.num_prediction_layers) return std::nullopt;
    if (layer < 0 || behind >= 0)
      return fmt::format("config.json says that num_hidden_layers is {}", config.num_hidden_layers());
    return reason_in_layer(config, std::string_view(last + 1, end));
  }
  for (const std::string& own :
       {config.parameter_prefix + config.embedding_name + ".",
        config.parameter_prefix + config.final_norm_name + ".", std::string("lm_head.")}) {
    if (tensor.starts_with(own)) return no_such_parameter(config);
  }
  return std::nullopt;
}

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr const char* kLmHead = "lm_head.weight";

std::string embedding_name(const DecoderConfig& config) {
  return config.parameter_prefix + config.embedding_name + ".weight";
}

/// `folder / name`. Throws if it is a symbolic link that leaves the folder, so that a downloaded folder
/// cannot cause other files to be read or copied into a checkpoint. Links of the Hugging Face cache are
/// allowed: from snapshots/REVISION/ into blobs/ beside snapshots/.
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

/// The opened safetensors files of a model folder, and the index if there is one.
struct WeightFiles {
  std::vector<SafetensorsFile> files;
  std::map<std::string, size_t> file_index;  // tensor name -> place in files
  OrderedJson index;                         // null if there is a single file
  fs::path where;                            // path for errors about missing tensors
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
      weights.file_index.emplace(tensor.name, weights.files.size() - 1);
    }
  }
  for (const auto& [tensor, name] : weight_map) {
    ESPALIER_CHECK(weights.file_index.contains(tensor), "{}: weight_map.{}: `{}` has no such tensor",
                   weights.where.string(), tensor, name);
  }
  return weights;
}

WeightFiles open_weights(const fs::path& folder) {
  // Like Transformers, prefer the single file if both forms exist.
  if (fs::exists(folder / kSingleFile)) {
    WeightFiles weights;
    weights.where = folder / kSingleFile;
    const SafetensorsFile& file = weights.files.emplace_back(resolve_inside(folder, kSingleFile));
    for (const TensorView& tensor : file.tensors()) weights.file_index.emplace(tensor.name, 0);
    return weights;
  }
  ESPALIER_CHECK(fs::exists(folder / kIndexFile),
                 "{}: expected weights in {} or {}, received neither (other formats must be converted first)",
                 folder.string(), kSingleFile, kIndexFile);
  return open_shards(folder);
}

/// The name of the tensor that contains a parameter: its own, or a fused tensor of experts.
const std::string& stored_name(const WeightFiles& weights, const std::string& parameter, FusedPlace* fused) {
  const bool has_own = weights.file_index.contains(parameter);
  if (auto place = fused_place(parameter); place && weights.file_index.contains(place->name)) {
    ESPALIER_CHECK(!has_own, "{}: tensor `{}`: expected once, received in `{}` as well",
                   weights.where.string(), parameter, place->name);
    *fused = std::move(*place);
    return fused->name;
  }
  if (has_own) return parameter;
  ESPALIER_CHECK(!weights.file_index.contains(parameter + "_blocks"),
                 "{}: tensor `{}_blocks`: expected `{}` in a floating dtype, received MXFP4 (save a copy in "
                 "bfloat16 with Transformers: from_pretrained(MODEL, dtype=\"bfloat16\", "
                 "quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(COPY))",
                 weights.where.string(), parameter, parameter);
  throw InputError(
      fmt::format("{}: tensor `{}` is missing; config.json asks for it", weights.where.string(), parameter));
}

/// A stored parameter and its file.
struct StoredParameter {
  TensorView tensor;
  fs::path file;
};

StoredParameter find_parameter(const WeightFiles& weights, const std::string& name) {
  FusedPlace fused;
  const std::string& stored = stored_name(weights, name, &fused);
  const SafetensorsFile& file = weights.files[weights.file_index.at(stored)];
  if (&stored == &name) return {file.at(name), file.path()};
  return {part_of(file.at(stored), fused, name, file.path().string()), file.path()};
}

/// Names of the tensors that contain parameters.
std::set<std::string> stored_names(const WeightFiles& weights,
                                   const std::vector<ParameterShape>& parameters) {
  std::set<std::string> names;
  std::map<std::string, int64_t> num_experts;  // of fused tensors
  for (const ParameterShape& parameter : parameters) {
    FusedPlace fused;
    names.insert(stored_name(weights, parameter.name, &fused));
    if (!fused.name.empty()) num_experts[fused.name] = fused.expert + 1;
  }
  for (const auto& [name, expected] : num_experts) {
    const SafetensorsFile& file = weights.files[weights.file_index.at(name)];
    const int64_t received = file.at(name).shape.at(0);
    ESPALIER_CHECK(received == expected, "{}: tensor `{}`: expected {} experts, received {}",
                   file.path().string(), name, expected, received);
  }
  return names;
}

at::Tensor read_parameter(const WeightFiles& weights, const ParameterShape& expected, at::ScalarType dtype,
                          at::Device device) {
  const auto [tensor, file] = find_parameter(weights, expected.name);
  return converted_tensor(tensor, file.string(), expected.shape, dtype, device);
}

/// Whether two stored tensors of floating dtypes hold the same values.
bool have_equal_values(const TensorView& a, const TensorView& b) {
  if (a.shape != b.shape) return false;
  if (a.dtype == b.dtype) return std::equal(a.bytes.begin(), a.bytes.end(), b.bytes.begin(), b.bytes.end());
  const auto as_doubles = [](const TensorView& stored) {
    const std::optional<at::ScalarType> dtype = floating_dtype(stored.dtype);
    if (!dtype) return at::Tensor();
    at::Tensor value = at::empty(stored.shape, at::TensorOptions().dtype(*dtype));
    if (!stored.bytes.empty())
      std::memcpy(value.mutable_data_ptr(), stored.bytes.data(), stored.bytes.size());
    return value.to(at::kDouble);
  };
  const at::Tensor left = as_doubles(a), right = as_doubles(b);
  return left.defined() && right.defined() && left.equal(right);
}

/// Sorted names of tensors that are not parameters of the decoder and can be copied. Throws if one must not
/// be ignored.
std::vector<std::string> check_extra_tensors(const DecoderConfig& config, const WeightFiles& weights,
                                             const std::vector<ParameterShape>& parameters) {
  std::set<std::string> own = stored_names(weights, parameters);
  own.merge(stored_names(weights, buffer_shapes(config)));
  std::vector<std::string> carried;
  for (const auto& [name, file] : weights.file_index) {
    if (own.contains(name)) continue;
    const std::string where = weights.files[file].path().string();
    if (name == kLmHead) {
      // Only tied models lack this parameter, but many of their checkpoints contain it.
      ESPALIER_CHECK(
          have_equal_values(weights.files[file].at(name),
                            find_parameter(weights, embedding_name(config)).tensor),
          "{}: tensor `{}`: config.json says that tie_word_embeddings is true, but its values are not "
          "those of `{}` (correct config.json, or remove the tensor)",
          where, name, embedding_name(config));
      continue;
    }
    const std::optional<std::string> reason = reason_to_refuse(config, name);
    ESPALIER_CHECK(!reason, "{}: tensor `{}`: {} (correct config.json, or remove the tensor)", where, name,
                   *reason);
    carried.push_back(name);
  }
  return carried;
}

bool is_companion(const std::string& name) {
  static constexpr auto kLeftOut = std::to_array<std::string_view>(
      {".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"});
  return name != "config.json" && name != "trainer_state.json" && name != kManifestFile &&
         !name.starts_with('.') &&
         std::none_of(kLeftOut.begin(), kLeftOut.end(),
                      [&](std::string_view suffix) { return name.ends_with(suffix); });
}

/// Sorted names of the other files of a model: tokenizer, templates, generation defaults, licence. Excludes
/// weights of any format, optimiser states, hidden files and folders.
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

/// Bytes of a mapped file: copied if they are few, so that later changes of the file have no effect.
struct KeptBytes {
  std::vector<std::byte> copy;
  std::shared_ptr<const MappedFile> mapping;  // if too large to copy
  std::span<const std::byte> bytes;

  KeptBytes(std::span<const std::byte> source, std::shared_ptr<const MappedFile> file) : bytes(source) {
    constexpr size_t kMostCopied = size_t{64} << 20;
    if (source.size() > kMostCopied) {
      mapping = std::move(file);
      return;
    }
    copy.assign(source.begin(), source.end());
    bytes = copy;
  }
  KeptBytes(KeptBytes&&) = default;  // moving a vector does not move its bytes
};

/// A tensor of the source. For parameters only the name is used, since values come from the decoder.
struct KeptTensor {
  TensorView stored;  // without bytes
  std::optional<KeptBytes> bytes;
};

struct KeptFile {
  std::string name;
  std::map<std::string, std::string> metadata;
  std::vector<KeptTensor> tensors;
};

KeptFile keep_file(const SafetensorsFile& file, const std::set<std::string>& parameters) {
  KeptFile kept{file.path().filename().string(), file.metadata(), {}};
  kept.metadata.emplace("format", "pt");  // required by Transformers 4
  for (const TensorView& tensor : file.tensors()) {
    KeptTensor& entry = kept.tensors.emplace_back(KeptTensor{tensor, std::nullopt});
    entry.stored.bytes = {};
    if (!parameters.contains(tensor.name)) entry.bytes.emplace(tensor.bytes, file.mapping());
  }
  return kept;
}

int64_t bytes_of(const KeptTensor& tensor, at::ScalarType dtype) {
  if (tensor.bytes) return std::ssize(tensor.bytes->bytes);
  return tensor.stored.num_elements() * static_cast<int64_t>(c10::elementSize(dtype));
}

/// A file of a saved model, of a rank where several write it.
struct SavedFile {
  std::string name;
  const std::map<std::string, std::string>& metadata;
  int64_t rank = 0;
  std::vector<const KeptTensor*> tensors{};
  int64_t bytes = 0;
};

/// The files of the source, or one of each of several ranks.
std::vector<SavedFile> saved_files(const std::vector<KeptFile>& source, at::ScalarType dtype, int64_t ranks) {
  std::vector<SavedFile> files;
  std::vector<const KeptTensor*> all;
  for (const KeptFile& file : source) {
    files.push_back({file.name, file.metadata});
    for (const KeptTensor& tensor : file.tensors) files.back().tensors.push_back(&tensor);
    std::ranges::copy(files.back().tensors, std::back_inserter(all));
  }
  if (ranks == 1) return files;
  files.clear();
  for (int64_t rank = 0; rank < ranks; ++rank)
    files.push_back({rank_file(kSingleFile, {rank, ranks}).string(), source.front().metadata, rank});
  const auto bytes = [&](const KeptTensor* tensor) { return bytes_of(*tensor, dtype); };
  std::ranges::stable_sort(all, std::ranges::greater{}, bytes);
  for (const KeptTensor* tensor : all) {
    SavedFile& least = *std::ranges::min_element(files, {}, &SavedFile::bytes);
    least.tensors.push_back(tensor);
    least.bytes += bytes(tensor);
  }
  return files;
}

at::Tensor value_of(const std::string& name, const NamedValues& values) {
  const auto value = values.find(name);
  return value != values.end() ? value->second : fuse_experts(name, values);
}

/// The tensors of one file, with parameters replaced by the decoder's `values`. `keep` owns converted tensors
/// until the file is written.
std::vector<TensorView> tensors_to_write(const SavedFile& file, const NamedValues& values,
                                         at::ScalarType dtype, std::vector<at::Tensor>* keep) {
  std::vector<TensorView> tensors;
  for (const KeptTensor* tensor : file.tensors) {
    const std::string& name = tensor->stored.name;
    if (tensor->bytes) {
      tensors.push_back(tensor->stored);
      tensors.back().bytes = tensor->bytes->bytes;
      continue;
    }
    keep->push_back(value_of(name, values).detach().to(at::kCPU, dtype).contiguous());
    if (const std::string fault = nonfinite_text(keep->back()); !fault.empty())
      throw NonFiniteError(fmt::format("`{}` {}", name, fault));
    tensors.push_back(view_tensor(name, keep->back()));
  }
  return tensors;
}

}  // namespace

Decoder load_decoder(const fs::path& model_folder, at::ScalarType dtype, at::Device device) {
  DecoderConfig config = read_config_file(resolve_inside(model_folder, "config.json"));
  const WeightFiles weights = open_weights(model_folder);
  // Throws now, before training, if SourceModel would refuse to copy a file.
  companion_files(model_folder);
  const std::vector<ParameterShape> shapes = parameter_shapes(config);
  std::vector<Parameter> parameters;
  for (const ParameterShape& expected : shapes) {
    parameters.push_back(
        {expected.name, read_parameter(weights, expected, dtype, device).set_requires_grad(true)});
  }
  std::vector<Parameter> buffers;
  for (const ParameterShape& expected : buffer_shapes(config)) {
    buffers.push_back(
        {expected.name, read_parameter(weights, expected, detail::accumulator_dtype(dtype), device)});
  }
  check_extra_tensors(config, weights, shapes);
  for (const SafetensorsFile& file : weights.files) file.mapping()->check_whole();
  return Decoder(std::move(config), std::move(parameters), std::move(buffers));
}

std::vector<std::string> carried_tensors(const fs::path& model_folder) {
  const DecoderConfig config = read_config_file(resolve_inside(model_folder, "config.json"));
  const std::vector<ParameterShape> shapes = parameter_shapes(config);
  const WeightFiles weights = open_weights(model_folder);
  return check_extra_tensors(config, weights, shapes);
}

std::string weights_hash(const fs::path& model_folder) {
  std::string list;
  for (const SafetensorsFile& file : open_weights(model_folder).files)
    list += fmt::format("{} {}\n", file.path().filename().string(), hash_file(file.path()));
  Hasher hasher;
  hasher.add(std::as_bytes(std::span(list)));
  return hasher.digits();
}

struct SourceModel::Content {
  fs::path folder;
  OrderedJson config;
  OrderedJson index;  // null if there is a single file
  std::vector<KeptFile> weights;
  std::map<std::string, KeptBytes> companions;
};

SourceModel::SourceModel(const fs::path& folder) {
  auto content = std::make_shared<Content>();
  content->folder = folder;
  const fs::path config_file = resolve_inside(folder, "config.json");
  const DecoderConfig config = read_config_file(config_file);
  content->config = read_json_file<OrderedJson>(config_file);
  const WeightFiles weights = open_weights(folder);
  content->index = weights.index;
  // Parameters of the decoder, and the head of a tied model if its files contain one.
  std::set<std::string> parameters = stored_names(weights, parameter_shapes(config));
  if (config.tie_word_embeddings) parameters.insert(kLmHead);
  for (const SafetensorsFile& file : weights.files) {
    content->weights.push_back(keep_file(file, parameters));
    file.mapping()->check_whole();  // tensors were copied from it
  }
  for (const std::string& name : companion_files(folder)) {
    const auto file = std::make_shared<const MappedFile>(folder / name);
    content->companions.emplace(name, KeptBytes(file->bytes(), file));
  }
  content_ = std::move(content);
}

const OrderedJson& SourceModel::config() const {
  return content_->config;
}

NamedValues SourceModel::values_of(const Decoder& decoder) {
  NamedValues values;
  for (const Parameter& parameter : decoder.weights()) values.emplace(parameter.name, parameter.value);
  if (decoder.config().tie_word_embeddings)
    values.emplace(kLmHead, values.at(embedding_name(decoder.config())));
  return values;
}

NamedValues SourceModel::copies_of(const Decoder& decoder, at::ScalarType dtype, const Share& share) const {
  NamedValues copies;
  const NamedValues values = values_of(decoder);
  for (const SavedFile& file : saved_files(content_->weights, dtype, share.ranks)) {
    for (const KeptTensor* tensor : file.tensors) {
      if (tensor->bytes || file.rank != share.rank) continue;
      const std::string& name = tensor->stored.name;
      copies.emplace(name, value_of(name, values).detach().to(at::kCPU, dtype, false, /*copy=*/true));
    }
  }
  return copies;
}

void SourceModel::save(const NamedValues& values, const fs::path& out, at::ScalarType dtype,
                       const Share& share) const {
  const std::string dtype_word = dtype_name(dtype);
  std::error_code error;
  fs::create_directories(out, error);
  ESPALIER_CHECK(!error, "cannot make {}: {}", out.string(), error.message());
  // Saving over the source would overwrite mapped files.
  ESPALIER_CHECK(!fs::equivalent(content_->folder, out, error), "cannot save the model over its source {}",
                 content_->folder.string());

  int64_t total_bytes = 0;
  std::map<std::string, std::string> weight_map;
  const std::vector<SavedFile> files = saved_files(content_->weights, dtype, share.ranks);
  for (const SavedFile& file : files) {
    for (const KeptTensor* tensor : file.tensors) {
      total_bytes += bytes_of(*tensor, dtype);
      weight_map[tensor->stored.name] = file.name;
    }
    if (file.rank != share.rank || file.tensors.empty()) continue;
    std::vector<at::Tensor> keep;
    write_safetensors(out / file.name, tensors_to_write(file, values, dtype, &keep), file.metadata);
    for (const KeptTensor* tensor : file.tensors) {
      if (tensor->bytes && tensor->bytes->mapping) tensor->bytes->mapping->check_whole();
    }
  }
  if (share.rank > 0) return;
  if (!content_->index.is_null() || files.front().name != kSingleFile) {
    OrderedJson index = content_->index;
    index["metadata"]["total_size"] = total_bytes;
    // Entries that say the same keep their order.
    if (nlohmann::json(index["weight_map"]) != nlohmann::json(weight_map)) index["weight_map"] = weight_map;
    write_text(out / kIndexFile, index.dump(2) + "\n");
  }
  write_text(out / "config.json", config_with_dtype(content_->config, dtype_word));
  for (const auto& [name, kept] : content_->companions) {
    AtomicFile file(out / name);
    file.write(kept.bytes);
    file.commit();
  }
}

}  // namespace espalier
