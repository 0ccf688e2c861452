// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/weights/tensor_bytes.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/options.h"

namespace espalier {
namespace {

constexpr std::array<std::pair<const char*, at::ScalarType>, 4> kFloatingDtypes = {
    {{"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16}}};

constexpr auto kDtypes = std::to_array<Word<at::ScalarType>>(
    {{"float64", at::kDouble}, {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}});

}  // namespace

std::vector<std::string> dtype_names() {
  return all_words(kDtypes);
}

at::ScalarType parse_dtype(const std::string& name) {
  return parse_word(kDtypes, "dtype", name);
}

std::string dtype_name(at::ScalarType dtype) {
  for (const auto& known : kDtypes) {
    if (known.value == dtype) return std::string(known.word);
  }
  throw InputError(
      fmt::format("dtype: expected {}, received {}", fmt::join(dtype_names(), ", "), at::toString(dtype)));
}

void add_dtype(OptionList* list, const std::string& name, at::ScalarType* dtype, const std::string& help) {
  list->add(name, dtype, kDtypes, help, {.group = kMachineGroup});
}

void add_dtype(OptionList* list, const std::string& name, std::optional<at::ScalarType>* dtype,
               const std::string& help, const std::string& group) {
  list->add(name, dtype, kDtypes, help, {.group = group});
}

std::optional<at::ScalarType> floating_dtype(const std::string& word) {
  for (const auto& [name, dtype] : kFloatingDtypes) {
    if (word == name) return dtype;
  }
  return std::nullopt;
}

bool all_finite(const at::Tensor& tensor) {
  // The maximum of absolute values propagates NaN and needs no temporary memory.
  return tensor.numel() == 0 ||
         std::isfinite(
             at::linalg_vector_norm(tensor.detach(), std::numeric_limits<double>::infinity()).item<double>());
}

std::string nonfinite_text(const at::Tensor& tensor) {
  if (all_finite(tensor)) return "";
  const at::Tensor flat = tensor.detach().reshape({-1});
  const at::Tensor places = at::isfinite(flat).logical_not().nonzero();
  const auto first = places[0].item<int64_t>();
  const bool one = places.size(0) == 1;
  return fmt::format("holds {} value{} of {} that {} not finite ({}{} at {})", places.size(0), one ? "" : "s",
                     flat.numel(), one ? "is" : "are", one ? "" : "the first: ", flat[first].item<double>(),
                     first);
}

TensorView view_tensor(const std::string& name, const at::Tensor& tensor) {
  ESPALIER_ASSERT(tensor.is_contiguous() && tensor.device().is_cpu());
  TensorView view;
  view.name = name;
  for (const auto& [word, dtype] : kFloatingDtypes) {
    if (tensor.scalar_type() == dtype) view.dtype = word;
  }
  ESPALIER_ASSERT(!view.dtype.empty());
  view.shape = tensor.sizes().vec();
  view.bytes = {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
  return view;
}

at::Tensor converted_tensor(const TensorView& tensor, const std::string& where,
                            const std::vector<int64_t>& shape, at::ScalarType dtype, at::Device device) {
  ESPALIER_CHECK(tensor.shape == shape, "{}: tensor `{}`: expected shape [{}], received [{}]", where,
                 tensor.name, fmt::join(shape, ", "), fmt::join(tensor.shape, ", "));
  const std::optional<at::ScalarType> stored = floating_dtype(tensor.dtype);
  ESPALIER_CHECK(stored.has_value(), "{}: tensor `{}`: expected dtype F64, F32, BF16 or F16, received {}",
                 where, tensor.name, tensor.dtype);
  // Copy before converting, since a mapped tensor may be unaligned.
  at::Tensor value = at::empty(tensor.shape, at::TensorOptions().dtype(*stored));
  if (!tensor.bytes.empty()) std::memcpy(value.mutable_data_ptr(), tensor.bytes.data(), tensor.bytes.size());
  value = value.to(device).to(dtype);
  const std::string fault = nonfinite_text(value);
  ESPALIER_CHECK(fault.empty(), "{}: tensor `{}`: as {} it {}", where, tensor.name, dtype_name(dtype), fault);
  return value;
}

void read_tensor(const SafetensorsFile& file, const std::string& name, const at::Tensor& tensor) {
  const at::Tensor host = tensor.is_cpu() ? tensor : at::empty_like(tensor, at::TensorOptions(at::kCPU));
  const TensorView stored = file.at(name);
  const TensorView expected = view_tensor(name, host);
  ESPALIER_CHECK(stored.dtype == expected.dtype && stored.shape == expected.shape,
                 "{}: tensor {}: expected {} [{}], received {} [{}]", file.path().string(), name,
                 expected.dtype, fmt::join(expected.shape, ", "), stored.dtype,
                 fmt::join(stored.shape, ", "));
  if (!stored.bytes.empty()) std::memcpy(host.mutable_data_ptr(), stored.bytes.data(), stored.bytes.size());
  if (!tensor.is_cpu()) tensor.copy_(host);
}

}  // namespace espalier
