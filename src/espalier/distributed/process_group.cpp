// SPDX-License-Identifier: Apache-2.0
#include "espalier/distributed/process_group.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "espalier/distributed/group.h"
#include "espalier/runtime/out_of_memory.h"

namespace espalier {
namespace {

using Milliseconds = std::chrono::milliseconds;

// A failure of another rank is looked for so often.
constexpr Milliseconds kBetween{250};
// What the end of another process breaks here may come before the word of why it has ended.
constexpr Milliseconds kForTheReason{2000};
// Gradients are added up in flat tensors of so many bytes at least, but for the last.
constexpr int64_t kBucketBytes = int64_t{32} << 20;

std::atomic<bool> has_failed{false};
std::mutex failure_mutex;
std::string failure;
std::atomic<int> num_waiting{0};

void throw_failure() {
  if (!has_failed) return;
  const std::lock_guard lock(failure_mutex);
  throw RankError(failure);
}

[[noreturn]] void throw_lost(const std::string& reason) {
  const auto end = std::chrono::steady_clock::now() + kForTheReason;
  while (!has_failed && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(Milliseconds(20));
  throw_failure();
  throw RankError(fmt::format("a rank is lost: {}", reason));
}

void wait(const c10::intrusive_ptr<c10d::Work>& work, at::Device device) {
  if (!device.is_cpu()) {  // its stream waits, not the host; a limit would end the work of NCCL
    work->wait();
    return;
  }
  for (;;) {
    throw_failure();
    try {
      work->wait(kBetween);
      return;
    } catch (const std::exception& error) {
      if (work->isCompleted()) throw_lost(text_of(error));
    }
  }
}

class ProcessGroup : public Group {
 public:
  explicit ProcessGroup(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

  int64_t rank() const override { return group_->getRank(); }
  int64_t size() const override { return group_->getSize(); }

  std::vector<std::string> gather(const std::string& bytes) const override {
    int64_t longest = 0;
    std::vector<std::string> result;
    for (const at::Tensor& size : gather(at::tensor({static_cast<int64_t>(bytes.size())}, at::kLong))) {
      result.emplace_back(size.item<int64_t>(), '\0');
      longest = std::max(longest, size.item<int64_t>());
    }
    if (longest == 0) return result;
    const at::Tensor padded = at::zeros({longest}, at::kByte);
    std::memcpy(padded.data_ptr(), bytes.data(), bytes.size());
    const std::vector<at::Tensor> gathered = gather(padded);
    for (size_t r = 0; r < result.size(); ++r) {
      std::memcpy(result[r].data(), gathered[r].const_data_ptr(), result[r].size());
    }
    return result;
  }

  void add_up(const std::vector<at::Tensor>& tensors) const override {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> bucket;
    int64_t bytes = 0;
    const auto reduce_bucket = [&] {
      if (!bucket.empty()) add_up_bucket(bucket);
      bucket.clear();
      bytes = 0;
    };
    for (const at::Tensor& tensor : tensors) {
      bucket.push_back(tensor);
      bytes += static_cast<int64_t>(tensor.nbytes());
      if (bytes >= kBucketBytes) reduce_bucket();
    }
    reduce_bucket();
  }

 private:
  /// Calls `start`, which gives the work on the device that is waited for.
  template <class Start>
  static void run(at::Device device, const Start& start) {
    struct Waiting {
      Waiting() { ++num_waiting; }
      ~Waiting() { --num_waiting; }
    };
    const Waiting waiting;
    throw_failure();
    c10::intrusive_ptr<c10d::Work> work;
    try {
      work = start();
    } catch (const std::exception& error) {
      throw_lost(text_of(error));
    }
    wait(work, device);
  }

  std::vector<at::Tensor> gather(const at::Tensor& own) const {
    std::vector<std::vector<at::Tensor>> all(1);
    for (int64_t r = 0; r < size(); ++r) all[0].push_back(at::empty_like(own));
    std::vector<at::Tensor> input{own};
    run(own.device(), [&] { return group_->allgather(all, input); });
    return all[0];
  }

  void add_up_bucket(const std::vector<at::Tensor>& bucket) const {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& tensor : bucket) parts.push_back(tensor.reshape(-1));
    const bool is_in_place = bucket.size() == 1 && bucket.front().is_contiguous();
    std::vector<at::Tensor> flat{is_in_place ? parts.front() : at::cat(parts)};
    run(flat[0].device(), [&] { return group_->allreduce(flat); });
    if (is_in_place) return;
    int64_t begin = 0;
    for (const at::Tensor& tensor : bucket) {
      tensor.copy_(flat[0].narrow(0, begin, tensor.numel()).view_as(tensor));
      begin += tensor.numel();
    }
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace

std::unique_ptr<Group> process_group(const std::string& name) {
  try {
    return std::make_unique<ProcessGroup>(c10d::resolve_process_group(name));
  } catch (const c10::Error& error) {
    throw InputError(fmt::format("process_group: expected one of torch.distributed, received `{}`: {}", name,
                                 error.what_without_backtrace()));
  }
}

void fail_ranks(const std::string& message) {
  const std::lock_guard lock(failure_mutex);
  if (has_failed) return;
  failure = message;
  has_failed = true;
}

bool waits_for_ranks() {
  return num_waiting > 0;
}

}  // namespace espalier
