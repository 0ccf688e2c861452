// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/part.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "espalier/distributed/group.h"
#include "espalier/ops/checks.h"
#include "espalier/plan/key_reads.h"
#include "espalier/runtime/device.h"

namespace espalier {
namespace {

constexpr int64_t kMostHeadGroups = 4;

at::Tensor index_tensor(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong);
}

}  // namespace

/// Held by the graph, since a layer that is recomputed exchanges again.
struct BatchPart::Reads : torch::CustomClassHolder {
  Reads(const KeyReads& keys, const Group& group, at::Device device)
      : ranks(group), send(keys.send), receive(keys.receive), most_received(keys.most_received) {
    std::vector<at::Tensor> host{index_tensor(keys.order)};
    for (const std::vector<int64_t>& pick : keys.picks) host.push_back(index_tensor(pick));
    picks = upload(host, device);
    order = picks.front();
    picks.erase(picks.begin());
    if (!keys.blocks.empty()) blocks = index_tensor(keys.blocks).view({-1, 5});
    positions = index_tensor(keys.positions);
  }

  /// In how many transfers keys k [T, K, D] and v [T, K, E] are sent: a divisor of K, the same on all ranks.
  /// Attention of one group of heads runs while the next ones are on their way. Small transfers do not pay.
  int64_t head_groups(const at::Tensor& k, const at::Tensor& v) const {
    const int64_t bytes = most_received * k.size(1) * (k.size(2) + v.size(2)) * k.element_size();
    int64_t groups = kMostHeadGroups;
    while (groups > 1 && (k.size(1) % groups > 0 || bytes < groups * ranks.bucket_bytes() / 32)) --groups;
    return groups;
  }

  const Group& ranks;
  std::vector<at::Tensor> picks;  // by source
  at::Tensor order;               // empty: as picked
  std::vector<int64_t> send, receive;
  int64_t most_received;
  at::Tensor blocks, positions;  // on the host; blocks undefined: none
};

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Reads = BatchPart::Reads;

/// Keys and values on their way to the ranks that read them, a group of heads at a time, and their gradients
/// on the way back. What has arrived is not kept, since nodes of the graph may live until all has run.
struct Transfers : torch::CustomClassHolder {
  Transfers(c10::intrusive_ptr<Reads> reads, const at::Tensor& k, const at::Tensor& v)
      : reads(std::move(reads)),
        groups(this->reads->head_groups(k, v)),
        like_k(at::empty({0, k.size(1), k.size(2)}, k.options())),
        like_v(at::empty({0, v.size(1), v.size(2)}, v.options())) {}

  static Transfers& of(AutogradContext* ctx) {
    return *c10::static_intrusive_pointer_cast<Transfers>(ctx->saved_data["transfers"].toCapsule());
  }

  const c10::intrusive_ptr<Reads> reads;
  const int64_t groups;
  const at::Tensor like_k, like_v;                               // [0, K, D] and [0, K, E]
  std::vector<std::function<at::Tensor()>> keys{}, gradients{};  // gradients: of the last group first
};

/// Heads of one of several equal groups.
at::Tensor heads_of(const at::Tensor& tensor, int64_t group, int64_t groups) {
  const int64_t size = tensor.size(1) / groups;
  return tensor.narrow(1, group * size, size);
}

/// (transfers, k and v of every source) -> own k and v, and a number on which what is received depends. The
/// own ones pass through, so that the backward pass of every rank comes here once for each layer, after that
/// of attention; there it waits for gradients.
class SendKeys : public torch::autograd::Function<SendKeys> {
 public:
  static variable_list forward(AutogradContext* ctx, const c10::intrusive_ptr<Transfers>& transfers,
                               at::TensorList sources) {
    ctx->saved_data["transfers"] = c10::IValue::make_capsule(transfers);
    ctx->set_materialize_grads(false);
    const Reads& reads = *transfers->reads;
    std::vector<int64_t> keys;
    for (size_t s = 0; s < reads.picks.size(); ++s) keys.push_back(sources[2 * s].size(0));
    ctx->saved_data["keys"] = keys;
    for (int64_t group = 0; group < transfers->groups; ++group) {
      std::vector<at::Tensor> sent;
      for (size_t s = 0; s < reads.picks.size(); ++s) {
        const auto picked = [&](const at::Tensor& rows) {
          return heads_of(rows, group, transfers->groups).index_select(0, reads.picks[s]).flatten(1);
        };
        sent.push_back(at::cat({picked(sources[2 * s]), picked(sources[2 * s + 1])}, 1));
      }
      at::Tensor rows = at::cat(sent);
      if (reads.order.numel() > 0) rows = rows.index_select(0, reads.order);
      transfers->keys.push_back(reads.ranks.exchange(rows, reads.send, reads.receive));
    }
    const at::Tensor &k = sources[sources.size() - 2], &v = sources[sources.size() - 1];
    return {k, v, at::zeros({}, k.options())};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    Transfers& transfers = Transfers::of(ctx);
    const Reads& reads = *transfers.reads;
    const auto keys = ctx->saved_data["keys"].toIntVector();
    std::vector<at::Tensor> columns_k, columns_v;
    const at::Tensor &k = transfers.like_k, &v = transfers.like_v;
    const int64_t width_k = k.size(1) * k.size(2), width_v = v.size(1) * v.size(2);
    for (size_t group = transfers.gradients.size(); group-- > 0;) {
      const at::Tensor rows = std::exchange(transfers.gradients[group], {})();
      columns_k.push_back(rows.narrow(1, 0, width_k / transfers.groups));
      columns_v.push_back(rows.narrow(1, width_k / transfers.groups, width_v / transfers.groups));
    }
    at::Tensor rows = at::cat({at::cat(columns_k, 1), at::cat(columns_v, 1)}, 1);
    if (reads.order.numel() > 0) rows = at::empty_like(rows).index_copy_(0, reads.order, rows);
    // Several ranks may have read a row.
    const at::ScalarType sum_dtype = detail::accumulator_dtype(k.scalar_type());
    variable_list result{at::Tensor()};
    int64_t begin = 0;
    for (size_t s = 0; s < reads.picks.size(); ++s) {
      const at::Tensor& pick = reads.picks[s];
      at::Tensor sum = at::zeros({keys[s], width_k + width_v}, rows.options().dtype(sum_dtype));
      sum.index_add_(0, pick, rows.narrow(0, begin, pick.numel()).to(sum_dtype));
      begin += pick.numel();
      at::Tensor sum_k = sum.narrow(1, 0, width_k), sum_v = sum.narrow(1, width_k, width_v);
      if (s + 1 == reads.picks.size()) {
        if (grads[0].defined()) sum_k += grads[0].flatten(1);
        if (grads[1].defined()) sum_v += grads[1].flatten(1);
      }
      result.push_back(sum_k.to(k.scalar_type()).reshape({-1, k.size(1), k.size(2)}));
      result.push_back(sum_v.to(k.scalar_type()).reshape({-1, v.size(1), v.size(2)}));
    }
    return result;
  }
};

/// (transfers, group, the number of SendKeys) -> the k and v of a group that this rank receives. In backward
/// it begins to send their gradients.
class ReceiveKeys : public torch::autograd::Function<ReceiveKeys> {
 public:
  static variable_list forward(AutogradContext* ctx, const c10::intrusive_ptr<Transfers>& transfers,
                               int64_t group, const at::Tensor&) {
    ctx->saved_data["transfers"] = c10::IValue::make_capsule(transfers);
    const at::Tensor rows = std::exchange(transfers->keys[group], {})();
    int64_t begin = 0;
    const auto columns = [&](const at::Tensor& like) {
      const int64_t heads = like.size(1) / transfers->groups, width = heads * like.size(2);
      begin += width;
      return rows.narrow(1, begin - width, width).reshape({-1, heads, like.size(2)});
    };
    at::Tensor k = columns(transfers->like_k);
    return {std::move(k), columns(transfers->like_v)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    Transfers& transfers = Transfers::of(ctx);
    const Reads& reads = *transfers.reads;
    const at::Tensor rows = at::cat({grads[0].flatten(1), grads[1].flatten(1)}, 1);
    transfers.gradients.push_back(reads.ranks.exchange(rows, reads.receive, reads.send));
    return {at::Tensor(), at::Tensor(), at::zeros({}, rows.options())};
  }
};

}  // namespace

BatchPart::BatchPart(const Step& step, int64_t index, Layout layout)
    : step_(step),
      index_(index),
      layout_(std::move(layout)),
      tokens_(step.divisions[index].tokens(step.context_group->rank())),
      is_stand_in_(tokens_.empty()) {
  if (is_stand_in_) tokens_ = {0};
}

int64_t BatchPart::place(int64_t token) const {
  if (is_stand_in_) return -1;
  const auto found = std::ranges::lower_bound(tokens_, token);
  return found != tokens_.end() && *found == token ? found - tokens_.begin() : -1;
}

std::vector<int32_t> BatchPart::subtree_ends() const {
  if (is_stand_in_) return {1};
  std::vector<int32_t> ends;
  for (const int64_t token : tokens_) {
    ends.push_back(static_cast<int32_t>(
        step_.divisions[index_].before(step_.context_group->rank(), layout_.subtree_end[token])));
  }
  return ends;
}

const c10::intrusive_ptr<BatchPart::Reads>& BatchPart::reads(int64_t sliding_window,
                                                             at::Device device) const {
  c10::intrusive_ptr<Reads>& reads = reads_[sliding_window];
  if (reads) return reads;
  const Group& group = *step_.context_group;
  const DividedMicroBatch divided{layout_, step_.context.row(index_), step_.divisions,
                                  step_.divisions[index_], group.size()};
  reads = c10::make_intrusive<Reads>(key_reads(divided, group.rank(), sliding_window), group, device);
  return reads;
}

at::Tensor BatchPart::attention(const at::Tensor& all_q, const at::Tensor& own_k, const at::Tensor& own_v,
                                const ForestTokens& tokens, const AttentionOptions& options,
                                AttentionContext context) const {
  const c10::intrusive_ptr<Reads>& reads = this->reads(options.sliding_window, all_q.device());
  context.blocks = reads->blocks;
  context.positions = reads->positions;
  if (reads->most_received == 0) return tree_attention(all_q, own_k, own_v, tokens, options, context);
  std::vector<at::Tensor> sources;
  for (size_t s = 0; s < context.k.size(); ++s) sources.insert(sources.end(), {context.k[s], context.v[s]});
  sources.insert(sources.end(), {own_k, own_v});
  const auto transfers = c10::make_intrusive<Transfers>(reads, own_k, own_v);
  const variable_list sent = SendKeys::apply(transfers, at::TensorList(sources));
  const int64_t groups = transfers->groups;
  const auto divided = [groups](const at::Tensor& tensor, int64_t dim) {
    return groups == 1 ? std::vector<at::Tensor>{tensor} : tensor.chunk(groups, dim);
  };
  std::vector<std::vector<at::Tensor>> heads;  // of every source, by group
  for (const at::Tensor& source : sources) heads.push_back(divided(source, 1));
  const auto q = divided(all_q, 1), k = divided(sent[0], 1), v = divided(sent[1], 1);
  std::vector<at::Tensor> results;
  for (int64_t group = 0; group < groups; ++group) {
    for (size_t s = 0; s + 2 < heads.size(); s += 2) {
      context.k[s / 2] = heads[s][group];
      context.v[s / 2] = heads[s + 1][group];
    }
    const variable_list received = ReceiveKeys::apply(transfers, group, sent[2]);
    AttentionContext group_context = context;
    group_context.k.push_back(received[0]);
    group_context.v.push_back(received[1]);
    AttentionOptions group_options = options;
    if (options.sinks.defined()) group_options.sinks = divided(options.sinks, 0)[group];
    results.push_back(tree_attention(q[group], k[group], v[group], tokens, group_options, group_context));
  }
  return groups == 1 ? results[0] : at::cat(results, 1);
}

}  // namespace espalier
