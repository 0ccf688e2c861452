// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/context_frame.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "espalier/runtime/device.h"

namespace espalier {
namespace {

// Gradients of these dtypes may stay in the leaf, where autograd sums them in place.
bool sums_in_place(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
}

// On the CPU as well, offloading copies: the same path everywhere, so that one test covers it.
at::Tensor to_host(const at::Tensor& tensor) {
  return tensor.is_cuda() ? download(tensor)
                          : tensor.to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

// Copies from pinned memory, and back to it, wait for nothing: both are in the order of the stream.
at::Tensor from_host(const at::Tensor& tensor, at::Device device, bool copy) {
  return tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true, copy);
}

// sum += gradient, where the sum may wait in host memory.
void add_to(at::Tensor& sum, const at::Tensor& gradient) {
  if (sum.device() == gradient.device()) {
    sum.add_(gradient);
  } else {
    sum.copy_(from_host(sum, gradient.device(), /*copy=*/false).add_(gradient), /*non_blocking=*/true);
  }
}

}  // namespace

ContextFrame::ContextFrame(const std::vector<LayerContext>& live, bool offload) : offload_(offload) {
  for (const LayerContext& layer : live) {
    devices_.push_back(layer.empty() ? at::Device(at::kCPU) : layer.front().device());
    LayerContext& kept = kept_.emplace_back();
    for (const at::Tensor& tensor : layer) {
      kept.push_back(offload ? to_host(tensor.detach()) : tensor.detach());
    }
    gradient_sums_.emplace_back(layer.size());
  }
  leaves_.resize(live.size());
}

const LayerContext& ContextFrame::leaves(int64_t layer) {
  LayerContext& leaves = leaves_[layer];
  if (leaves.empty()) {
    for (const at::Tensor& tensor : kept_[layer]) {
      const at::Tensor reader =
          offload_ ? from_host(tensor, devices_[layer], /*copy=*/true) : tensor.detach();
      leaves.push_back(reader.requires_grad_());
    }
  }
  return leaves;
}

void ContextFrame::collect() {
  const at::NoGradGuard no_grad;
  for (size_t layer = 0; layer < leaves_.size(); ++layer) {
    for (size_t i = 0; i < leaves_[layer].size(); ++i) {
      const at::Tensor& leaf = leaves_[layer][i];
      at::Tensor& gradient = at::Tensor(leaf).mutable_grad();
      if (!gradient.defined() || (sums_in_place(leaf) && !offload_)) continue;
      at::Tensor& sum = gradient_sums_[layer][i];
      const at::Tensor wide = gradient.to(sums_in_place(leaf) ? leaf.scalar_type() : at::kFloat);
      if (sum.defined()) {
        add_to(sum, wide);
      } else {
        sum = offload_ ? download(wide) : wide;
      }
      gradient.reset();
    }
    if (offload_) leaves_[layer].clear();
  }
}

void ContextFrame::append_seeds(const std::vector<LayerContext>& live, std::vector<at::Tensor>* tensors,
                                std::vector<at::Tensor>* gradients) const {
  for (size_t layer = 0; layer < live.size(); ++layer) {
    for (size_t i = 0; i < live[layer].size(); ++i) {
      const bool in_leaf = i < leaves_[layer].size() && leaves_[layer][i].grad().defined();
      const at::Tensor gradient = in_leaf ? leaves_[layer][i].grad() : gradient_sums_[layer][i];
      // Below the first adapter of a frozen model nothing has a gradient.
      if (!gradient.defined() || !live[layer][i].requires_grad()) continue;
      tensors->push_back(live[layer][i]);
      const at::Tensor& target = live[layer][i];
      gradients->push_back(from_host(gradient, target.device(), /*copy=*/false).to(target.scalar_type()));
    }
  }
}

}  // namespace espalier
