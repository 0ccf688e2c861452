// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/context_frame.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "espalier/runtime/device.h"

namespace espalier {
namespace {

// Whether autograd can accumulate gradients of this dtype in the leaf.
bool sums_in_place(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
}

// Offloading also copies on the CPU, so that tests on the CPU cover the same code.
at::Tensor to_host(const at::Tensor& tensor) {
  return tensor.is_cuda() ? download(tensor)
                          : tensor.to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

// Copies from and to pinned memory are asynchronous, in stream order.
at::Tensor from_host(const at::Tensor& tensor, at::Device device, bool copy) {
  return tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true, copy);
}

// sum += gradient, where the sum may be in host memory.
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
      const at::Tensor upcast = gradient.to(sums_in_place(leaf) ? leaf.scalar_type() : at::kFloat);
      if (sum.defined()) {
        add_to(sum, upcast);
      } else {
        sum = offload_ ? download(upcast) : upcast;
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
      // In a frozen model nothing before the first adapter requires grad.
      if (!gradient.defined() || !live[layer][i].requires_grad()) continue;
      tensors->push_back(live[layer][i]);
      const at::Tensor& target = live[layer][i];
      gradients->push_back(from_host(gradient, target.device(), /*copy=*/false).to(target.scalar_type()));
    }
  }
}

}  // namespace espalier
