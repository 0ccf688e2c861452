// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/forward.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/custom_class.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/engine/part.h"
#include "espalier/ops/attention/tree_attention.h"
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

TreeSequence::TreeSequence(const Batch& batch, std::span<ContextFrame* const> ancestors,
                           c10::intrusive_ptr<RouterStatistics> statistics, RouterRecord* record)
    : subtree_end_(batch.subtree_end),
      position_ids_(batch.position_ids),
      context_blocks_(batch.context_blocks),
      context_positions_(batch.context_positions),
      nodes_(batch.nodes),
      ancestors_(ancestors.begin(), ancestors.end()),
      routers_{batch.routes, batch.multiplicity, std::move(statistics), record},
      adapters_(batch.adapters),
      part_(batch.part) {
  ESPALIER_ASSERT(ancestors.size() == batch.ancestors.size());
}

at::Tensor TreeSequence::attention(int64_t layer, const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& v, const AttentionOptions& options) const {
  AttentionContext context;
  for (ContextFrame* frame : ancestors_) {
    const LayerContext& leaves = frame->leaves(layer);
    context.k.push_back(leaves[0]);
    context.v.push_back(leaves[1]);
  }
  ForestTokens tokens{subtree_end_};
  if (options.sliding_window > 0) tokens.position = position_ids_.to(at::kInt);
  if (part_) return part_->attention(q, k, v, tokens, options, std::move(context));
  if (!ancestors_.empty()) {
    context.blocks = context_blocks_;
    context.positions = context_positions_;
  }
  return tree_attention(q, k, v, tokens, options, context);
}

std::vector<at::Tensor> TreeSequence::cut_context(int64_t layer) const {
  if (ancestors_.empty()) return {};
  return ancestors_.back()->leaves(layer);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A function of one tensor with any number of results.
using Recomputed = std::function<std::vector<at::Tensor>(const at::Tensor& input)>;

// Wraps a function so that autograd can save it as an IValue.
struct Held : torch::CustomClassHolder {
  explicit Held(Recomputed given) : function(std::move(given)) {}
  Recomputed function;
};

class Recompute : public torch::autograd::Function<Recompute> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& input,
                               const c10::intrusive_ptr<Held>& held) {
    ctx->save_for_backward({input});
    ctx->saved_data["function"] = c10::IValue::make_capsule(held);
    ctx->set_materialize_grads(false);
    return held->function(input);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto held = c10::static_intrusive_pointer_cast<Held>(ctx->saved_data["function"].toCapsule());
    const at::Tensor input = ctx->get_saved_variables()[0].detach().requires_grad_();
    variable_list results, result_grads;
    {
      const at::AutoGradMode with_grad(true);
      const variable_list all = held->function(input);
      for (size_t i = 0; i < grads.size(); ++i) {
        if (!grads[i].defined()) continue;
        results.push_back(all[i]);
        result_grads.push_back(grads[i]);
      }
    }
    if (!results.empty()) torch::autograd::backward(results, result_grads);
    return {input.grad(), at::Tensor()};
  }
};

// Returns `function(input)` and saves only `input`: the backward pass calls `function` again, with the same
// parameters, and runs backward through it (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
// 2016). `function` must be deterministic. Leaf tensors that it captures receive their gradients.
std::vector<at::Tensor> recompute(const at::Tensor& input, Recomputed function) {
  // Autograd runs backward only if an input requires grad. The input of the first layer of a frozen model
  // does not, although the layer's adapters do.
  const bool frozen = at::GradMode::is_enabled() && !input.requires_grad();
  return Recompute::apply(frozen ? input.detach().requires_grad_() : input,
                          c10::make_intrusive<Held>(std::move(function)));
}

// The layer as a function of its input. Returns hidden (of `rows`, see Model::layer), then the layer's
// context.
Recomputed layer_function(const Model& model, const TreeSequence& sequence, int64_t index,
                          const PositionTables& tables, const at::Tensor& rows) {
  return [&model, sequence, index, tables, rows](const at::Tensor& input) {
    std::optional<accumulating::RowAdapterScope> scope;
    if (sequence.adapters()) scope.emplace(*sequence.adapters());
    LayerOutput output = model.layer(index, input, tables, sequence, rows);
    output.context.insert(output.context.begin(), output.hidden);
    return std::move(output.context);
  };
}

bool has_router_losses(const ForwardOptions& options) {
  return options.router_statistics && options.router_statistics->options().any();
}

// The rows of the last layer to compute: those that reach the LM head, or all with router losses.
at::Tensor rows_of_last_layer(const Batch& batch, const ForwardOptions& options) {
  if (has_router_losses(options)) return {};
  if (!options.head) return batch.logit_rows.slice(0, 0, 0);
  return batch.num_logit_rows() == batch.num_tokens() ? at::Tensor() : batch.logit_rows;
}

// Entropies [E] of the distributions of edges. Queries the op with a single edge per row, since edges of a
// row share their distribution.
at::Tensor entropy_by_row(const Model& model, const at::Tensor& hidden, const Batch& batch) {
  const at::Tensor rows = at::arange(batch.num_logit_rows(), batch.edge_row.options());
  return model.distribution(hidden, {rows, at::zeros_like(rows), {}}).entropy.index_select(0, batch.edge_row);
}

void run_head(const Model& model, const at::Tensor& hidden, const Batch& batch, Entropies entropies,
              ForwardResult* result) {
  RECORD_USER_SCOPE("head");
  std::optional<accumulating::RowAdapterScope> scope;
  if (batch.adapters) scope.emplace(*batch.adapters);
  const Edges edges{batch.edge_row, batch.edge_target, batch.edge_temperature};
  const bool is_differentiable = entropies == Entropies::kDifferentiable;
  // Edges of a row at different temperatures do not share their distribution.
  if (edges.temperature.defined() || (is_differentiable && !batch.topk_edge.defined())) {
    const EdgeDistribution distribution = model.distribution(hidden, edges);
    result->logprobs = distribution.logprobs;
    if (entropies != Entropies::kNone)
      result->entropy = is_differentiable ? distribution.entropy : distribution.entropy.detach();
    return;
  }
  result->logprobs = model.logprobs(hidden, edges);
  if (entropies == Entropies::kNone) return;
  const at::AutoGradMode mode(at::GradMode::is_enabled() && is_differentiable);
  result->entropy = entropy_by_row(model, hidden, batch);
}

}  // namespace

ForwardResult forward(const Model& model, const Batch& batch, std::span<ContextFrame* const> ancestors,
                      const ForwardOptions& options) {
  const TreeSequence sequence(batch, ancestors, options.router_statistics, options.router_record);
  const PositionTables tables = model.position_tables(batch.position_ids);
  at::Tensor hidden = model.embed(batch.input_ids);
  ForwardResult result;
  const int64_t num_layers = model.num_layers();
  for (int64_t i = 0; i < num_layers; ++i) {
    const at::Tensor rows = i + 1 < num_layers ? at::Tensor() : rows_of_last_layer(batch, options);
    // Autograd runs what was made last first, so that nothing of this layer is left to run.
    if (i > 0 && options.left && hidden.requires_grad())
      hidden.register_hook([left = options.left, i](const at::Tensor&) { left(i); });
    const Recomputed layer = layer_function(model, sequence, i, tables, rows);
    std::vector<at::Tensor> outputs = options.checkpoint_layers ? recompute(hidden, layer) : layer(hidden);
    hidden = outputs.front();
    if (options.keep_context) result.context.emplace_back(outputs.begin() + 1, outputs.end());
  }
  if (has_router_losses(options)) {
    result.last = hidden;
    if (batch.num_logit_rows() < batch.num_tokens()) hidden = hidden.index_select(0, batch.logit_rows);
  } else if (batch.part) {
    result.last = options.head ? hidden : result.context.back().front();
  }
  if (options.head) run_head(model, hidden, batch, options.entropies, &result);
  return result;
}

}  // namespace espalier
