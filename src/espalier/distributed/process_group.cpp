// SPDX-License-Identifier: Apache-2.0
#include "espalier/distributed/process_group.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <numeric>
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
  RECORD_USER_SCOPE("exchange");
  struct Waiting {
    Waiting() { ++num_waiting; }
    ~Waiting() { --num_waiting; }
  };
  const Waiting waiting;
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

// PyTorch 2.15 deprecates `_allgather_base` and `alltoall_base` for new names. Templates, so that only the
// name that exists is compiled.
template <class Backend>
c10::intrusive_ptr<c10d::Work> all_gather(Backend& group, at::Tensor& all, at::Tensor& own) {
  if constexpr (requires { group.all_gather_single(all, own); }) {
    return group.all_gather_single(all, own);
  } else {
    return group._allgather_base(all, own);
  }
}

template <class Backend>
c10::intrusive_ptr<c10d::Work> all_to_all(Backend& group, at::Tensor& received, at::Tensor& sent,
                                          std::vector<int64_t>& output, std::vector<int64_t>& input) {
  if constexpr (requires { group.all_to_all_single(received, sent, output, input); }) {
    return group.all_to_all_single(received, sent, output, input);
  } else {
    return group.alltoall_base(received, sent, output, input);
  }
}

class ProcessGroup : public Group {
 public:
  ProcessGroup(c10::intrusive_ptr<c10d::ProcessGroup> group, SplitRanks split)
      : group_(std::move(group)), split_(std::move(split)) {}

  int64_t rank() const override { return group_->getRank(); }
  int64_t size() const override { return group_->getSize(); }

  at::Tensor gather(const at::Tensor& own) const override {
    at::Tensor all = at::empty({size() * own.numel()}, own.options()), flat = own.contiguous().view(-1);
    wait(start([&] { return all_gather(*group_, all, flat); }), own.device());
    std::vector<int64_t> shape = own.sizes().vec();
    shape.insert(shape.begin(), size());
    return all.view(shape);
  }

  std::function<at::Tensor()> exchange(const at::Tensor& rows, const std::vector<int64_t>& send,
                                       const std::vector<int64_t>& receive) const override {
    std::vector<int64_t> shape = rows.sizes().vec(), input = send, output = receive;
    shape[0] = std::accumulate(receive.begin(), receive.end(), int64_t{0});
    at::Tensor received = at::empty(shape, rows.options()), sent = rows;
    const auto work = start([&] { return all_to_all(*group_, received, sent, output, input); });
    return [work, sent, received] {
      wait(work, received.device());
      return received;
    };
  }

  std::unique_ptr<Group> split(int64_t ranks) const override {
    ESPALIER_ASSERT(split_);
    throw_failure();
    return process_group(split_(ranks));
  }

 private:
  /// The work that `begin` starts.
  template <class Begin>
  static c10::intrusive_ptr<c10d::Work> start(const Begin& begin) {
    throw_failure();
    try {
      return begin();
    } catch (const std::exception& error) {
      throw_lost(text_of(error));
    }
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  SplitRanks split_;
};

}  // namespace

std::unique_ptr<Group> process_group(const std::string& name, SplitRanks split) {
  try {
    return std::make_unique<ProcessGroup>(c10d::resolve_process_group(name), std::move(split));
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
