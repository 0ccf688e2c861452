#include "espalier/ops/kernels/cuda/tree_attention.h"

#include <span>
#include <stdexcept>

#include "espalier/ops/kernels/cuda/device.h"

namespace espalier::cuda {
namespace {

/// Best first.
std::span<const AttentionImplementation* const> attention_implementations() {
  static const AttentionImplementation* const all[] = {&hopper_attention(), &ampere_attention()};
  return all;
}

const AttentionImplementation& implementation(const AttentionProblem& problem,
                                              bool AttentionSupport::* direction) {
  const bool backward = direction == &AttentionSupport::backward;
  const DeviceProperties& device = device_properties();
  for (const AttentionImplementation* one : attention_implementations()) {
    const AttentionSupport support =
        one->support(problem.element, problem.head_dim, device.compute_capability, device.shared_bytes);
    const bool takes = one->takes == nullptr || one->takes(problem, backward);
    if (support.*direction && takes) return *one;
  }
  throw std::runtime_error("fused attention: no kernel for this head dimension on this GPU");
}

}  // namespace

AttentionSupport attention_support(ElementKind element, int32_t head_dim, int compute_capability,
                                   int64_t shared_bytes) {
  AttentionSupport any{false, false};
  for (const AttentionImplementation* one : attention_implementations()) {
    const AttentionSupport support = one->support(element, head_dim, compute_capability, shared_bytes);
    any.forward |= support.forward;
    any.backward |= support.backward;
  }
  return any;
}

int64_t forward_scratch_bytes(const AttentionProblem& problem) {
  return implementation(problem, &AttentionSupport::forward).forward_scratch_bytes(problem);
}

int64_t backward_scratch_bytes(const AttentionProblem& problem) {
  return implementation(problem, &AttentionSupport::backward).backward_scratch_bytes(problem);
}

void attend(const AttentionProblem& problem, const AttentionOutputs& outputs, void* scratch, void* stream) {
  implementation(problem, &AttentionSupport::forward).attend(problem, outputs, scratch, stream);
}

void attend_backward(const AttentionProblem& problem, const AttentionGradients& gradients, void* scratch,
                     void* stream) {
  implementation(problem, &AttentionSupport::backward).attend_backward(problem, gradients, scratch, stream);
}

}  // namespace espalier::cuda
