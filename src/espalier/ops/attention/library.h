// SPDX-License-Identifier: Apache-2.0
// tree_attention by a library that Python knows (python/espalier/kernels/attention.py: cudnn.flex_attention).
// Its implementations of the operators espalier::tree_attention_library and its backward are found by the
// dispatcher.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>

#include "espalier/ops/attention/arguments.h"

namespace espalier::library {

/// The name and version of the library, where it serves the CUDA device of this index, or with -1 the CPU; ""
/// where it does not, and where nothing is registered, as in a process without Python.
std::string name(int64_t device);

/// Whether tree_attention asks it first on the device, for inputs that it serves, as cuda_kernels() has it:
/// on a CPU only where it is named.
bool is_chosen(const c10::Device& device);

/// As espalier::tree_attention and its backward; nothing where the library does not serve the device, the
/// sizes, the options or the forest. Where keys and values differ in width, the library gets copies of one
/// width.
std::optional<detail::TreeAttentionResults> tree_attention(const detail::TreeAttentionArguments& arguments);
std::optional<detail::TreeAttentionGradients> tree_attention_backward(
    const detail::TreeAttentionBackward& backward);

}  // namespace espalier::library
