// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/reference.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/hash.h"
#include "espalier/base/safetensors.h"
#include "espalier/config/layer_spec.h"
#include "espalier/data/trajectories.h"
#include "espalier/engine/batch.h"
#include "espalier/engine/cost.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/objective/objective.h"

namespace espalier {
namespace {

constexpr const char* kTensor = "ref_logprobs";
constexpr const char* kHashOfValues = "values";

using Description = std::map<std::string, std::string>;

/// Everything that the log-probabilities depend on.
Description describe(const Reference& reference, const Trajectories& trajectories) {
  Description text{{"format", "1"},
                   {"weights", weights_hash(reference.model)},
                   {"config", hash_file(reference.model / "config.json")},
                   {"dtype", dtype_name(reference.dtype)}};
  const auto hashes = content_hashes(trajectories);
  for (const char* column : {"input_ids", "loss_weights", "routed_experts", "temperature"}) {
    const auto found = hashes.find(column);
    text[column] = found == hashes.end() ? "" : found->second;
  }
  return text;
}

std::string hash_bytes(std::span<const std::byte> bytes) {
  Hasher hasher;
  hasher.add(bytes);
  return hasher.digits();
}

template <class T>
RealColumn mapped_column(const TensorView& tensor, const SafetensorsFile& file) {
  const std::span<const T> values(reinterpret_cast<const T*>(tensor.bytes.data()), tensor.num_elements());
  return RealColumn(Column<T>(values, file.mapping()));
}

/// The column in a file; nullopt, with the reason in `*fault`, if it does not match `expected`.
std::optional<RealColumn> read_kept(const std::filesystem::path& path, const Description& expected,
                                    int64_t num_tokens, std::string* fault) {
  try {
    const SafetensorsFile file(path);
    for (const auto& [name, value] : expected) {
      const auto found = file.metadata().find(name);
      if (found == file.metadata().end() || found->second != value) {
        *fault = fmt::format("it was computed with other {}", name);
        return std::nullopt;
      }
    }
    const TensorView& tensor = file.at(kTensor);
    const auto whole = file.metadata().find(kHashOfValues);
    const char* dtype = expected.at("dtype") == "float64" ? "F64" : "F32";
    if (whole == file.metadata().end() || whole->second != hash_bytes(tensor.bytes) ||
        tensor.dtype != dtype || tensor.num_elements() != num_tokens) {
      *fault = "its values are damaged";
      return std::nullopt;
    }
    return tensor.dtype == "F64" ? mapped_column<double>(tensor, file) : mapped_column<float>(tensor, file);
  } catch (const InputError& error) {
    *fault = error.what();
    return std::nullopt;
  }
}

template <class T>
RealColumn to_column(const at::Tensor& values) {
  const T* begin = values.const_data_ptr<T>();
  return RealColumn(Column<T>(std::vector<T>(begin, begin + values.numel())));
}

/// [N] float32 (float64), on the host.
at::Tensor compute(const Reference& reference, const Trajectories& trajectories,
                   const MicroBatchProgress& progress, const Group& group) {
  const Decoder decoder = load_decoder(reference.model, reference.dtype, reference.device);
  check_recorded_routes("reference-model", trajectories, router_shape(decoder.config()),
                        decoder.config().num_hidden_layers());
  const Loss loss = Loss::at_row_temperatures(trajectories);
  const PlanCosts costs{assumed_times(decoder.config(), reference.device),
                        memory_model(decoder.config(), reference.dtype, loss, reference.device)};
  const Step step = make_step(trajectories, {.plan = reference.plan, .costs = &costs});
  std::vector<double> values(trajectories.num_tokens());
  compute_logprobs(decoder, loss, step, &values, progress, group);
  check_finite(trajectories, values, "log-probability by reference-model");
  return at::tensor(values, at::kDouble).to(reference.dtype == at::kDouble ? at::kDouble : at::kFloat);
}

}  // namespace

void check_reference(const Reference& reference, const DecoderConfig& policy,
                     const ObjectiveOptions& objective, const Trajectories& trajectories,
                     const std::string& where) {
  const std::vector<std::string> fields = data_fields(*make_objective(objective));
  ESPALIER_CHECK(
      std::ranges::find(fields, "ref_logprobs") != fields.end(),
      "reference-model: expected an objective that reads ref_logprobs (opd without ref-topk, dpo, ipo, "
      "kto, or a policy gradient with kl-coef above 0), received {}{}",
      to_string(objective.kind),
      objective.ref_topk == RefTopk::kNone ? ""
                                           : fmt::format(" with ref-topk {}", to_string(objective.ref_topk)));
  const int64_t vocab_size = read_config(reference.model).vocab_size;
  ESPALIER_CHECK(vocab_size == policy.vocab_size,
                 "reference-model {}: expected the vocab_size of the model, {}, received {}",
                 reference.model.string(), policy.vocab_size, vocab_size);
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    ESPALIER_CHECK(!trajectories.ref_logprobs.has(row),
                   "{}: trajectory {} (row {}) has `ref_logprobs` already: expected none beside "
                   "reference-model, which computes them",
                   where, trajectories.name(row), row);
  }
}

bool add_reference_logprobs(const Reference& reference, const KeptReference& kept, Trajectories* trajectories,
                            const Group& group) {
  const Description description = describe(reference, *trajectories);
  const int64_t num_tokens = trajectories->num_tokens();
  std::string fault;
  std::optional<RealColumn> column;
  if (std::filesystem::exists(kept.file)) {
    column = read_kept(kept.file, description, num_tokens, &fault);
    if (!column && kept.note) kept.note(fmt::format("{} is not used: {}", kept.file.string(), fault));
  }
  if (!group.any(!column)) {
    trajectories->ref_logprobs = {*column, {}};
    return true;
  }
  const at::Tensor values = compute(reference, *trajectories, kept.progress, group);
  trajectories->ref_logprobs = {
      values.scalar_type() == at::kDouble ? to_column<double>(values) : to_column<float>(values), {}};
  ESPALIER_CHECK(kept.trained_hash.empty() || content_hashes(*trajectories)[kTensor] == kept.trained_hash,
                 "--resume: the data's {} are not those that the run was trained on; resume with the same "
                 "--reference-model and data, or start a new run in another --out",
                 kTensor);
  const TensorView view = view_tensor(kTensor, values);
  Description written = description;
  written[kHashOfValues] = hash_bytes(view.bytes);
  group.together([&] {
    if (group.is_first()) write_safetensors(kept.file, {view}, written);
    return true;
  });
  column = read_kept(kept.file, description, num_tokens, &fault);
  ESPALIER_CHECK(column, "{}: {}", kept.file.string(), fault);
  trajectories->ref_logprobs = {*column, {}};
  return false;
}

}  // namespace espalier
