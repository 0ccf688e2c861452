// SPDX-License-Identifier: Apache-2.0
// Conversion between tensors and entries of safetensors files.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/safetensors.h"

namespace espalier {

class OptionList;

/// The floating dtype of a safetensors dtype (F64, F32, F16, BF16); nullopt for others.
std::optional<at::ScalarType> floating_dtype(const std::string& word);

/// Thrown for values that should be finite and are not.
class NonFiniteError : public InputError {
 public:
  using InputError::InputError;
};

/// Whether all values are finite. Synchronises the tensor's device.
bool all_finite(const at::Tensor& tensor);

/// "float64" | "float32" | "bfloat16"; throws InputError naming the accepted words.
std::vector<std::string> dtype_names();
at::ScalarType parse_dtype(const std::string& name);
std::string dtype_name(at::ScalarType dtype);
/// Add an option with these values.
void add_dtype(OptionList* list, const std::string& name, at::ScalarType* dtype, const std::string& help);
void add_dtype(OptionList* list, const std::string& name, std::optional<at::ScalarType>* dtype,
               const std::string& help, const std::string& group);

/// "holds 3 values of 976 that are not finite (the first: nan at 12)"; "" if all are finite.
std::string nonfinite_text(const at::Tensor& tensor);

/// `tensor` (contiguous, on the CPU, of a floating dtype) as a named entry. The entry points into the tensor.
TensorView view_tensor(const std::string& name, const at::Tensor& tensor);

/// The values of an entry in `dtype` on `device`. Throws InputError naming `where` and the tensor if the
/// shape is not `shape`, the dtype is not floating, or values are not finite in `dtype`.
at::Tensor converted_tensor(const TensorView& tensor, const std::string& where,
                            const std::vector<int64_t>& shape, at::ScalarType dtype, at::Device device);

/// Copies the entry `name` of `file` into `tensor` (contiguous, floating dtype, any device). Throws
/// InputError if it is missing or has another dtype or shape.
void read_tensor(const SafetensorsFile& file, const std::string& name, const at::Tensor& tensor);

}  // namespace espalier
