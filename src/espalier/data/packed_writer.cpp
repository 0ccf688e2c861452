// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "espalier/base/safetensors.h"
#include "espalier/data/packed.h"

namespace espalier {
namespace {

/// Tensors that view the columns or bytes owned by the list.
class TensorList {
 public:
  explicit TensorList(bool keeps_doubles) : keeps_doubles_(keeps_doubles) {}

  template <typename T>
  void add(const std::string& name, std::span<const T> values, std::vector<int64_t> shape) {
    tensors_.push_back({name, dtype_of<T>(), std::move(shape), std::as_bytes(values)});
  }
  template <typename T>
  void add(const std::string& name, std::span<const T> values) {
    add(name, values, {static_cast<int64_t>(values.size())});
  }

  void add_reals(const std::string& name, const RealColumn& column) {
    add_reals(name, column, {column.size()});
  }

  void add_reals(const std::string& name, const RealColumn& column, const std::vector<int64_t>& shape) {
    if (const auto* floats = std::get_if<Column<float>>(&column.values()))
      return add(name, floats->span(), shape);
    const auto* doubles = std::get_if<Column<double>>(&column.values());
    const int64_t size = column.size();
    bool all_float = doubles == nullptr || !keeps_doubles_;
    for (int64_t i = 0; i < size && all_float; ++i) {
      // Converting a double out of the range of float is undefined behaviour.
      all_float = std::abs(column[i]) <= std::numeric_limits<float>::max() &&
                  static_cast<double>(static_cast<float>(column[i])) == column[i];
    }
    if (all_float) {
      add(name, made<float>(size, [&](int64_t i) { return static_cast<float>(column[i]); }), shape);
    } else {
      add(name, doubles->span(), shape);
    }
  }

  void add_optional_reals(const std::string& name, const Optional<RealColumn>& column) {
    if (!column.any()) return;
    add_reals(name, column.values);
    add_present(name, column.present);
  }

  void add_present(const std::string& name, const Column<uint8_t>& present) {
    if (!present.empty()) add(name + ".present", present.span());
  }

  void add_texts(const std::string& name, const std::vector<std::string>& texts) {
    if (texts.empty()) return;
    std::string joined;
    std::vector<int64_t> ends;
    for (const std::string& text : texts) {
      joined += text;
      ends.push_back(static_cast<int64_t>(joined.size()));
    }
    add(name, made<uint8_t>(static_cast<int64_t>(joined.size()), [&](int64_t i) { return joined[i]; }));
    add(name + ".offsets", made<int64_t>(static_cast<int64_t>(ends.size()) + 1,
                                         [&](int64_t i) { return i == 0 ? 0 : ends[i - 1]; }));
  }

  /// Largest element types first, so that every tensor is aligned in the file.
  const std::vector<TensorView>& sorted() {
    std::stable_sort(tensors_.begin(), tensors_.end(), [](const TensorView& a, const TensorView& b) {
      return dtype_bytes(a.dtype) > dtype_bytes(b.dtype);
    });
    return tensors_;
  }

 private:
  template <typename T, typename Value>
  std::span<const T> made(int64_t size, Value value) {
    auto values = std::make_shared<std::vector<T>>(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) (*values)[i] = static_cast<T>(value(i));
    owned_.push_back(values);
    return *values;
  }

  bool keeps_doubles_;
  std::vector<TensorView> tensors_;
  std::vector<std::shared_ptr<const void>> owned_;
};

}  // namespace

void write_packed(const std::filesystem::path& path, const Trajectories& trajectories,
                  const PackedOptions& options) {
  const Trajectories& t = trajectories;
  // A copy of mapped doubles may be larger than memory.
  TensorList tensors(options.keeps_doubles || t.release);
  const std::vector<int64_t> no_rows{0};
  tensors.add("offsets", t.offsets.empty() ? std::span(no_rows) : t.offsets.span());
  tensors.add("input_ids", t.input_ids.span());
  if (const auto* mask = std::get_if<Column<uint8_t>>(&t.loss_weights.values())) {
    tensors.add("loss_mask", mask->span());
  } else {
    tensors.add_reals("loss_weights", t.loss_weights);
  }
  for (const auto& [name, column] : kTokenReals) tensors.add_optional_reals(name, t.*column);
  for (const RowReal& real : kRowReals) tensors.add_optional_reals(real.name, t.*real.column);
  if (t.chosen.any()) {
    tensors.add("chosen", t.chosen.values.span());
    tensors.add_present("chosen", t.chosen.present);
  }
  for (const auto& [name, column] : kRowTexts) tensors.add_texts(name, t.*column);
  for (const PackedTexts& texts : options.texts) {
    if (texts.bytes.empty()) continue;
    tensors.add(texts.name, texts.bytes.span());
    tensors.add(texts.name + ".offsets", texts.offsets.span());
  }
  if (t.routes_per_token > 0)
    tensors.add("routed_experts", t.routed_experts.span(), {t.num_tokens(), t.routes_per_token});
  if (!t.turn_reward_offsets.empty()) {
    tensors.add_reals("turn_rewards", t.turn_rewards);
    tensors.add("turn_rewards.offsets", t.turn_reward_offsets.span());
  }
  if (t.ref_topk > 0) {
    tensors.add("ref_topk_ids", t.ref_topk_ids.span(), {t.num_tokens(), t.ref_topk});
    tensors.add_reals("ref_topk_logprobs", t.ref_topk_logprobs, {t.num_tokens(), t.ref_topk});
  }
  write_safetensors(path, tensors.sorted(), options.metadata, t.release);
}

}  // namespace espalier
