// SPDX-License-Identifier: Apache-2.0
// Tensors as entries of safetensors files.
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

/// The floating dtype of a safetensors word (F64, F32, F16, BF16), nothing for any other word.
std::optional<at::ScalarType> floating_dtype(const std::string& word);

/// Numbers that should be finite and are not.
class NonFiniteError : public InputError {
 public:
  using InputError::InputError;
};

/// Whether all values are finite. Waits for the tensor's device.
bool all_finite(const at::Tensor& tensor);

/// "float64" | "float32" | "bfloat16"; throws InputError naming the accepted words.
std::vector<std::string> dtype_names();
at::ScalarType parse_dtype(const std::string& name);
std::string dtype_name(at::ScalarType dtype);
/// Describe an option of these words.
void add_dtype(OptionList* list, const std::string& name, at::ScalarType* dtype, const std::string& help);
void add_dtype(OptionList* list, const std::string& name, std::optional<at::ScalarType>* dtype,
               const std::string& help, const std::string& group);

/// "holds 3 values of 976 that are not finite (the first: nan at 12)"; "" where all are finite.
std::string nonfinite_text(const at::Tensor& tensor);

/// `tensor` (contiguous, on the CPU, of a floating dtype) as a named entry. The entry points into the tensor.
TensorView view_tensor(const std::string& name, const at::Tensor& tensor);

/// The values of an entry in `dtype` on `device`. Throws InputError naming `where` and the tensor when the
/// shape is not `shape`, the entry is of no floating dtype, or its values are not finite in `dtype`.
at::Tensor converted_tensor(const TensorView& tensor, const std::string& where,
                            const std::vector<int64_t>& shape, at::ScalarType dtype, at::Device device);

/// Overwrites `tensor` (contiguous, of a floating dtype, on any device) with the entry `name` of `file`, bit
/// for bit. Throws InputError when it is missing or of another dtype or shape.
void read_tensor(const SafetensorsFile& file, const std::string& name, const at::Tensor& tensor);

}  // namespace espalier
