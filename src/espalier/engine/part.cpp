// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/part.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "espalier/distributed/group.h"
#include "espalier/ops/checks.h"
#include "espalier/plan/key_reads.h"
#include "espalier/runtime/device.h"

namespace espalier {
namespace {

at::Tensor index_tensor(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong);
}

}  // namespace

/// Held by the graph, since a layer that is recomputed exchanges again.
struct BatchPart::Reads : torch::CustomClassHolder {
  Reads(const KeyReads& keys, const Group& group, at::Device device)
      : group(group), send(keys.send), receive(keys.receive), is_needed(keys.is_needed) {
    std::vector<at::Tensor> host{index_tensor(keys.order)};
    for (const std::vector<int64_t>& pick : keys.picks) host.push_back(index_tensor(pick));
    picks = upload(host, device);
    order = picks.front();
    picks.erase(picks.begin());
    if (!keys.blocks.empty()) blocks = index_tensor(keys.blocks).view({-1, 5});
    positions = index_tensor(keys.positions);
  }

  at::Tensor exchanged(const at::Tensor& rows, bool is_back) const {
    return group.exchange(rows.contiguous(), is_back ? receive : send, is_back ? send : receive)();
  }

  const Group& group;
  std::vector<at::Tensor> picks;  // by source
  at::Tensor order;               // empty: as picked
  std::vector<int64_t> send, receive;
  bool is_needed;
  at::Tensor blocks, positions;  // on the host; blocks undefined: none
};

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Reads = BatchPart::Reads;

/// (reads, k and v of every source) -> own k and v, received k and v. The own ones pass through, so that the
/// backward pass of every rank comes here once for each layer, after that of attention.
class KeyExchange : public torch::autograd::Function<KeyExchange> {
 public:
  static variable_list forward(AutogradContext* ctx, const c10::intrusive_ptr<Reads>& reads,
                               at::TensorList sources) {
    ctx->saved_data["reads"] = c10::IValue::make_capsule(reads);
    ctx->set_materialize_grads(false);
    const at::Tensor &k = sources[sources.size() - 2], &v = sources[sources.size() - 1];
    std::vector<int64_t> keys;
    std::vector<at::Tensor> sent;
    for (size_t s = 0; s < reads->picks.size(); ++s) {
      keys.push_back(sources[2 * s].size(0));
      const auto picked = [&](const at::Tensor& of) {
        return of.flatten(1).index_select(0, reads->picks[s]);
      };
      sent.push_back(at::cat({picked(sources[2 * s]), picked(sources[2 * s + 1])}, 1));
    }
    at::Tensor rows = at::cat(sent);
    if (reads->order.numel() > 0) rows = rows.index_select(0, reads->order);
    rows = reads->exchanged(rows, /*is_back=*/false);
    const int64_t width = k.size(1) * k.size(2);
    ctx->saved_data["keys"] = keys;
    ctx->saved_data["shapes"] = std::vector<int64_t>{k.size(1), k.size(2), v.size(1), v.size(2)};
    ctx->saved_data["like"] = k.detach().slice(0, 0, 0);
    const auto columns = [&](int64_t begin, const at::Tensor& like) {
      return rows.narrow(1, begin, like.size(1) * like.size(2)).reshape({-1, like.size(1), like.size(2)});
    };
    return {k, v, columns(0, k), columns(width, v)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto reads = c10::static_intrusive_pointer_cast<Reads>(ctx->saved_data["reads"].toCapsule());
    const auto keys = ctx->saved_data["keys"].toIntVector();
    const auto shapes = ctx->saved_data["shapes"].toIntVector();
    const at::Tensor like = ctx->saved_data["like"].toTensor();
    const int64_t widths[] = {shapes[0] * shapes[1], shapes[2] * shapes[3]};
    const int64_t received = std::accumulate(reads->receive.begin(), reads->receive.end(), int64_t{0});
    const auto flat = [&](size_t i, int64_t rows) {
      return grads[i].defined() ? grads[i].flatten(1) : like.new_zeros({rows, widths[i % 2]});
    };
    at::Tensor rows = reads->exchanged(at::cat({flat(2, received), flat(3, received)}, 1), /*is_back=*/true);
    if (reads->order.numel() > 0) rows = at::empty_like(rows).index_copy_(0, reads->order, rows);
    // Several ranks may have read a row.
    const at::ScalarType sum_dtype = detail::accumulator_dtype(like.scalar_type());
    variable_list result{at::Tensor()};
    int64_t begin = 0;
    for (size_t s = 0; s < reads->picks.size(); ++s) {
      const at::Tensor& pick = reads->picks[s];
      at::Tensor sum = at::zeros({keys[s], widths[0] + widths[1]}, rows.options().dtype(sum_dtype));
      sum.index_add_(0, pick, rows.narrow(0, begin, pick.numel()).to(sum_dtype));
      begin += pick.numel();
      if (s + 1 == reads->picks.size()) sum += at::cat({flat(0, keys[s]), flat(1, keys[s])}, 1);
      for (int64_t i = 0; i < 2; ++i) {
        result.push_back(sum.narrow(1, i * widths[0], widths[i])
                             .to(like.scalar_type())
                             .reshape({-1, shapes[2 * i], shapes[2 * i + 1]}));
      }
    }
    return result;
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

void BatchPart::receive(int64_t sliding_window, at::Tensor* k, at::Tensor* v,
                        AttentionContext* context) const {
  const c10::intrusive_ptr<Reads>& reads = this->reads(sliding_window, k->device());
  context->blocks = reads->blocks;
  context->positions = reads->positions;
  if (!reads->is_needed) return;
  std::vector<at::Tensor> sources;
  for (size_t s = 0; s < context->k.size(); ++s) {
    sources.push_back(context->k[s]);
    sources.push_back(context->v[s]);
  }
  sources.insert(sources.end(), {*k, *v});
  const variable_list result = KeyExchange::apply(reads, at::TensorList(sources));
  *k = result[0];
  *v = result[1];
  context->k.push_back(result[2]);
  context->v.push_back(result[3]);
}

}  // namespace espalier
