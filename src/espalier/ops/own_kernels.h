// SPDX-License-Identifier: Apache-2.0
// Operators on CUDA that have kernels of ours and, beside them, compositions of ATen's operators: which of
// the two runs.
#pragma once

namespace espalier {

enum class OwnKernels {
  kElementwise,  // rms_norm, rotary and swiglu
  kHead,         // edge_logprobs in bfloat16
};

/// Whether our kernels run, in a build that has them: as the environment says (ESPALIER_ELEMENTWISE and
/// ESPALIER_HEAD: `kernels` or `composed`), else as it was set, at the start yes. Throws on another word.
bool uses_own_kernels(OwnKernels kernels);

/// No other thread may compute meanwhile. Returns what was set before.
bool set_own_kernels(OwnKernels kernels, bool used);

/// "ESPALIER_ELEMENTWISE" or "ESPALIER_HEAD".
const char* variable_of(OwnKernels kernels);

}  // namespace espalier
