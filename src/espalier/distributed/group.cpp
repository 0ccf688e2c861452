// SPDX-License-Identifier: Apache-2.0
#include "espalier/distributed/group.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

namespace espalier {
namespace {

// Parts of tensors are multiples of so many elements, so that vector instructions begin where they do on the
// whole tensor, and an update of parts gives its bits.
constexpr int64_t kAlignment = 64;
// Tensors are sent in buckets of so many bytes, of which so many at most are on their way.
constexpr int64_t kBucketBytes = int64_t{32} << 20;
constexpr size_t kMostSent = 2;

class Alone : public Group {
 public:
  int64_t rank() const override { return 0; }
  int64_t size() const override { return 1; }
  at::Tensor gather(const at::Tensor& own) const override { return own.unsqueeze(0); }
  std::function<at::Tensor()> exchange(const at::Tensor& rows) const override {
    return [rows] { return rows; };
  }
};

/// The elements of a part, but for the last ones.
int64_t chunk_of(int64_t numel, int64_t ranks) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  return kAlignment * ceil_div(ceil_div(numel, kAlignment), ranks);
}

/// Calls copy(piece of the buffer [N, width], piece of the tensor) for all elements of the columns.
template <class Copy>
void copy_columns(const Buckets::Columns& columns, const at::Tensor& buffer, const Copy& copy) {
  const auto& [flat, chunk, begin, width] = columns;
  const int64_t rows = flat.numel() / chunk, rest = flat.numel() % chunk;
  if (rows > 0) {
    copy(buffer.narrow(0, 0, rows),
         flat.narrow(0, 0, rows * chunk).view({rows, chunk}).narrow(1, begin, width));
  }
  const int64_t left = std::clamp<int64_t>(rest - begin, 0, width);
  if (left > 0) copy(buffer.select(0, rows).narrow(0, 0, left), flat.narrow(0, rows * chunk + begin, left));
}

int64_t width_of(const std::vector<Buckets::Columns>& columns) {
  int64_t width = 0;
  for (const Buckets::Columns& each : columns) width += each.width;
  return width;
}

}  // namespace

void Buckets::add(const at::Tensor& tensor) {
  ESPALIER_ASSERT(tensor.is_contiguous());
  if (!next_.empty() && next_.front().flat.scalar_type() != tensor.scalar_type()) end();
  const int64_t chunk = chunk_of(tensor.numel(), ranks_);
  const int64_t limit = std::max<int64_t>(kAlignment, kBucketBytes / (ranks_ * tensor.element_size()));
  for (int64_t begin = 0, width = 0; begin < chunk; begin += width) {
    width = std::min(chunk - begin, limit - width_);
    next_.push_back({tensor.view(-1), chunk, begin, width});
    width_ += width;
    if (width_ == limit) end();
  }
}

void Buckets::end() {
  if (!next_.empty()) full_(next_);
  next_.clear();
  width_ = 0;
}

PartSums::PartSums(const Group& group)
    : group_(group), buckets_(group.size(), [this](const auto& columns) { send(columns); }) {}

void PartSums::add(const at::Tensor& tensor) {
  if (group_.size() > 1) buckets_.add(tensor);
}

void PartSums::send(const std::vector<Buckets::Columns>& columns) {
  const at::NoGradGuard no_grad;
  if (sent_.size() == kMostSent) receive();
  const at::Tensor& first = columns.front().flat;
  const at::Tensor rows = at::zeros({group_.size(), width_of(columns)}, first.options());
  int64_t begin = 0;
  for (const Buckets::Columns& each : columns) {
    copy_columns(each, rows.narrow(1, begin, each.width),
                 [](const at::Tensor& buffer, const at::Tensor& tensor) { buffer.copy_(tensor); });
    begin += each.width;
  }
  if (!totals_.defined()) totals_ = at::zeros({3}, first.options().dtype(at::kDouble));
  totals_[0] += rows.sum(at::kDouble);
  totals_[1] += at::linalg_vector_norm(rows, 1, {}, false, at::kDouble);
  rounding_ = std::max(
      rounding_, static_cast<double>(group_.size()) * (first.scalar_type() == at::kDouble ? 1e-12 : 0x1p-23));
  sent_.push_back({columns, group_.exchange(rows)});
}

void PartSums::receive() {
  const at::NoGradGuard no_grad;
  const Sent sent = std::move(sent_.front());
  sent_.pop_front();
  const at::Tensor rows = sent.received(), sum = rows[0];
  for (int64_t rank = 1; rank < rows.size(0); ++rank) sum.add_(rows[rank]);
  totals_[2] += sum.sum(at::kDouble);
  int64_t from = 0;
  for (const auto& [flat, chunk, begin, width] : sent.columns) {
    const at::Tensor own = group_.part(flat);
    const int64_t length = std::clamp<int64_t>(own.numel() - begin, 0, width);
    if (length > 0) own.narrow(0, begin, length).copy_(sum.narrow(0, from, length));
    from += width;
  }
}

void PartSums::finish() {
  buckets_.end();
  while (!sent_.empty()) receive();
  if (!totals_.defined()) return;
  const at::Tensor host = totals_.cpu();
  const double* own = host.const_data_ptr<double>();
  const std::vector<double> all = group_.add_up(std::vector<double>(own, own + host.numel()));
  if (!std::isfinite(all[1]) || std::abs(all[0] - all[2]) <= rounding_ * all[1]) return;
  throw RankError(
      fmt::format("sums over the ranks: expected all elements to add up to {:g}, received {:g}: "
                  "some were lost on the way",
                  all[0], all[2]));
}

std::vector<std::string> Group::gather(const std::string& bytes) const {
  if (size() == 1) return {bytes};
  const at::Tensor sizes = gather(at::tensor({static_cast<int64_t>(bytes.size())}, at::kLong));
  std::vector<std::string> result;
  for (int64_t r = 0; r < size(); ++r) result.emplace_back(sizes[r].item<int64_t>(), '\0');
  const int64_t longest = sizes.max().item<int64_t>();
  if (longest == 0) return result;
  const at::Tensor padded = at::zeros({longest}, at::kByte);
  std::memcpy(padded.data_ptr(), bytes.data(), bytes.size());
  const at::Tensor gathered = gather(padded);
  for (size_t r = 0; r < result.size(); ++r) {
    std::memcpy(result[r].data(), gathered[static_cast<int64_t>(r)].const_data_ptr(), result[r].size());
  }
  return result;
}

at::Tensor Group::part(const at::Tensor& tensor) const {
  if (size() == 1) return tensor;
  const int64_t chunk = chunk_of(tensor.numel(), size()), begin = std::min(rank() * chunk, tensor.numel());
  return tensor.view(-1).narrow(0, begin, std::min(chunk, tensor.numel() - begin));
}

at::Tensor Group::whole(const at::Tensor& own, at::IntArrayRef shape) const {
  if (size() == 1) return own;
  at::Tensor result = at::empty(shape, own.options());
  part(result).copy_(own);
  gather_parts({result});
  return result;
}

void Group::gather_parts(const std::vector<at::Tensor>& tensors) const {
  if (size() == 1) return;
  const at::NoGradGuard no_grad;
  Buckets buckets(size(), [this](const std::vector<Buckets::Columns>& columns) {
    const at::Tensor own = at::zeros({width_of(columns)}, columns.front().flat.options());
    int64_t to = 0, from = 0;
    for (const auto& [flat, chunk, begin, width] : columns) {
      const at::Tensor here = part(flat);
      const int64_t length = std::clamp<int64_t>(here.numel() - begin, 0, width);
      if (length > 0) own.narrow(0, to, length).copy_(here.narrow(0, begin, length));
      to += width;
    }
    const at::Tensor rows = gather(own);
    for (const Buckets::Columns& each : columns) {
      copy_columns(each, rows.narrow(1, from, each.width),
                   [](const at::Tensor& buffer, const at::Tensor& tensor) { tensor.copy_(buffer); });
      from += each.width;
    }
  });
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) buckets.add(tensor.detach());
  }
  buckets.end();
}

void Group::zero_others(const std::vector<at::Tensor>& tensors) const {
  for (const at::Tensor& tensor : tensors) {
    if (size() == 1 || !tensor.defined()) continue;
    const at::Tensor own = part(tensor).clone();
    tensor.zero_();
    part(tensor).copy_(own);
  }
}

void Group::add_up(const std::vector<at::Tensor>& tensors) const {
  PartSums sums(*this);
  for (const at::Tensor& tensor : tensors) sums.add(tensor);
  sums.finish();
  gather_parts(tensors);
}

std::vector<double> Group::from_first(const std::vector<double>& values) const {
  return add_up(is_first() ? values : std::vector<double>(values.size()));
}

std::vector<double> Group::reduce(const std::vector<double>& values,
                                  const std::vector<RankReduction>& ways) const {
  const std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double));
  const std::vector<std::string> all = gather(bytes);
  std::vector<double> result(values.size()), others(values.size());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    ESPALIER_ASSERT(all[rank].size() == bytes.size() && ways.size() == values.size());
    std::memcpy(others.data(), all[rank].data(), bytes.size());
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = rank == 0                        ? others[i]
                  : ways[i] == RankReduction::kSum ? result[i] + others[i]
                  : ways[i] == RankReduction::kMin ? std::min(result[i], others[i])
                  : ways[i] == RankReduction::kMax ? std::max(result[i], others[i])
                                                   : std::hypot(result[i], others[i]);
    }
  }
  return result;
}

std::vector<double> Group::add_up(const std::vector<double>& values) const {
  return reduce(values, std::vector<RankReduction>(values.size(), RankReduction::kSum));
}

bool Group::any(bool condition) const {
  return add_up(std::vector<double>{condition ? 1.0 : 0.0}).front() > 0;
}

void Group::check_equal(const std::string& what, const std::string& text) const {
  std::map<std::string, std::vector<size_t>> ranks_by_text;
  const std::vector<std::string> texts = gather(text);
  for (size_t rank = 0; rank < texts.size(); ++rank) ranks_by_text[texts[rank]].push_back(rank);
  if (ranks_by_text.size() == 1) return;
  std::vector<std::string> found;
  for (const auto& [value, ranks] : ranks_by_text) {
    found.push_back(fmt::format("{} on rank {}", value, fmt::join(ranks, ", ")));
  }
  throw RankError(
      fmt::format("{}: expected the same on all ranks, received {}", what, fmt::join(found, "; ")));
}

const Group& alone() {
  static const Alone group;
  return group;
}

}  // namespace espalier
