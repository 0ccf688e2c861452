// SPDX-License-Identifier: Apache-2.0
#include "espalier/distributed/group.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

namespace espalier {
namespace {

// Parts of tensors are multiples of so many elements, so that vector instructions begin where they do on the
// whole tensor, and an update of parts gives its bits.
constexpr int64_t kAlignment = 64;
// So many buckets at most are on their way.
constexpr size_t kMostSent = 2;

/// The elements of a part, but for the last ones.
int64_t chunk_of(int64_t numel, int64_t ranks) {
  const int64_t step = kAlignment * ranks;
  return kAlignment * ((numel + step - 1) / step);
}

/// Copies what a rank has of a bucket to a row [width], or from it.
void copy_pieces(const Bucket& bucket, int64_t rank, const at::Tensor& row, bool to_row) {
  int64_t at = 0;
  for (const auto& [flat, chunk, begin, width] : bucket.columns) {
    const int64_t from = rank * chunk + begin, length = std::min(flat.numel() - from, width);
    at += width;
    if (length <= 0) continue;
    const at::Tensor there = row.narrow(0, at - width, length), here = flat.narrow(0, from, length);
    (to_row ? there : here).copy_(to_row ? here : there);
  }
}

/// Adds the tensor to buckets; full(bucket) takes those that are full, and those of another dtype.
template <class Full>
void add_to(Bucket* next, const at::Tensor& tensor, const Group& group, const Full& full) {
  ESPALIER_ASSERT(tensor.is_contiguous());
  if (next->width > 0 && next->columns[0].flat.scalar_type() != tensor.scalar_type())
    full(std::exchange(*next, {}));
  const int64_t chunk = chunk_of(tensor.numel(), group.size());
  const int64_t limit = std::max(kAlignment, group.bucket_bytes() / (group.size() * tensor.element_size()));
  for (int64_t begin = 0, width = 0; begin < chunk; begin += width) {
    width = std::min(chunk - begin, limit - next->width);
    next->columns.push_back({tensor.detach().view(-1), chunk, begin, width});
    if ((next->width += width) == limit) full(std::exchange(*next, {}));
  }
}

/// In float64. On a CPU ATen converts what it adds up, piece by piece here, so that it stays in the cache.
at::Tensor sum_of(const at::Tensor& rows) {
  if (!rows.is_cpu()) return rows.sum(at::kDouble);
  at::Tensor total = at::zeros({}, at::kDouble);
  for (const at::Tensor& piece : rows.view(-1).split(1 << 15)) total += piece.sum(at::kDouble);
  return total;
}

}  // namespace

void PartSums::add(const at::Tensor& tensor) {
  if (group_.size() > 1) add_to(&next_, tensor, group_, [this](Bucket bucket) { send(std::move(bucket)); });
}

void PartSums::end() {
  if (next_.width > 0) send(std::exchange(next_, {}));
}

void PartSums::send(Bucket bucket) {
  const at::NoGradGuard no_grad;
  if (sent_.size() == kMostSent) receive();
  const at::TensorOptions options = bucket.columns[0].flat.options();
  const at::Tensor rows = at::zeros({group_.size(), bucket.width}, options);
  for (int64_t rank = 0; rank < rows.size(0); ++rank) copy_pieces(bucket, rank, rows[rank], true);
  if (!totals_.defined()) totals_ = at::zeros({3}, options.dtype(at::kDouble));
  totals_[0] += sum_of(rows);
  totals_[1] += sum_of(rows.abs());
  const double rounding = rows.element_size() == 8 ? 1e-12 : 0x1p-23;
  rounding_ = std::max(rounding_, static_cast<double>(rows.size(0)) * rounding);
  bucket.received = group_.exchange(rows);
  sent_.push_back(std::move(bucket));
}

void PartSums::receive() {
  const at::NoGradGuard no_grad;
  const Bucket bucket = std::move(sent_.front());
  sent_.pop_front();
  const at::Tensor rows = bucket.received(), sum = rows[0];
  for (int64_t rank = 1; rank < rows.size(0); ++rank) sum.add_(rows[rank]);
  totals_[2] += sum_of(sum);
  copy_pieces(bucket, group_.rank(), sum, false);
}

void PartSums::finish() {
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
  Bucket next;
  const auto gather_bucket = [this](const Bucket& bucket) {
    const at::Tensor own = at::zeros({bucket.width}, bucket.columns[0].flat.options());
    copy_pieces(bucket, rank(), own, true);
    const at::Tensor rows = gather(own);
    for (int64_t rank = 0; rank < size(); ++rank) copy_pieces(bucket, rank, rows[rank], false);
  };
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) add_to(&next, tensor, *this, gather_bucket);
  }
  if (next.width > 0) gather_bucket(next);
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
  sums.end();
  sums.finish();
  gather_parts(tensors);
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

std::function<at::Tensor()> Group::exchange(const at::Tensor& rows, const std::vector<int64_t>&,
                                            const std::vector<int64_t>&) const {
  return [rows] { return rows; };
}

const Group& alone() {
  static const Group group;
  return group;
}

}  // namespace espalier
