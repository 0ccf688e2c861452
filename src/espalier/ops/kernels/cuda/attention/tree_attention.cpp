// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/attention/tree_attention.h"

#include <stdexcept>

#include "espalier/ops/kernels/cuda/device.h"

namespace espalier::cuda {
namespace {

const AttentionImplementation& implementation(AttentionKernels kernels) {
  return kernels == AttentionKernels::kHopper ? hopper_attention() : ampere_attention();
}

/// The requested implementation, or Ampere's if that does not take the problem.
const AttentionImplementation& implementation_for(const AttentionProblem& problem, bool backward) {
  const DeviceProperties& device = device_properties();
  for (const AttentionKernels kernels : {problem.kernels, AttentionKernels::kAmpere}) {
    const AttentionImplementation& one = implementation(kernels);
    const AttentionSupport support =
        one.support(problem.element, problem.head_dim, device.compute_capability, device.shared_bytes);
    const bool takes = one.takes == nullptr || one.takes(problem, backward);
    if ((backward ? support.backward : support.forward) && takes) return one;
  }
  throw std::runtime_error("fused attention: no kernel for this head dimension on this GPU");
}

}  // namespace

AttentionSupport attention_support(AttentionKernels kernels, ElementKind element, int32_t head_dim,
                                   int compute_capability, int64_t shared_bytes) {
  return implementation(kernels).support(element, head_dim, compute_capability, shared_bytes);
}

AttentionMemory forward_memory(const AttentionProblem& problem) {
  return implementation_for(problem, false).forward_memory(problem);
}

AttentionMemory backward_memory(const AttentionProblem& problem) {
  return implementation_for(problem, true).backward_memory(problem);
}

void attend(const AttentionProblem& problem, const AttentionOutputs& outputs, void* scratch, void* stream) {
  implementation_for(problem, false).attend(problem, outputs, scratch, stream);
}

void attend_backward(const AttentionProblem& problem, const AttentionGradients& gradients, void* scratch,
                     void* stream) {
  implementation_for(problem, true).attend_backward(problem, gradients, scratch, stream);
}

}  // namespace espalier::cuda
