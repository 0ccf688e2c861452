// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "espalier/distributed/group.h"

namespace espalier::testing {

class ThreadRanks {
 public:
  explicit ThreadRanks(int64_t size) : size_(size), tensors_(size) {}

  /// Calls body(group) on every rank. Gives what each has thrown, "" where nothing. Once a rank has thrown,
  /// the collectives of the others throw RankError.
  template <class Body>
  std::vector<std::string> run(const Body& body) {
    std::vector<std::string> thrown(size_);
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < size_; ++rank) {
      threads.emplace_back([&, rank] {
        const Rank group(*this, rank);
        try {
          body(group);
        } catch (const std::exception& error) {
          thrown[rank] = error.what();
          fail();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return thrown;
  }

 private:
  class Rank : public Group {
   public:
    Rank(ThreadRanks& all, int64_t rank) : all_(all), rank_(rank) {}
    int64_t rank() const override { return rank_; }
    int64_t size() const override { return all_.size_; }
    int64_t bucket_bytes() const override { return 4096; }  // several in the smallest models

    at::Tensor gather(const at::Tensor& own) const override {
      return meet_with(own, [](const std::vector<at::Tensor>& all) { return at::stack(all); });
    }

    std::function<at::Tensor()> exchange(const at::Tensor& rows, const std::vector<int64_t>& send,
                                         const std::vector<int64_t>& receive) const override {
      const at::Tensor counts = gather(at::tensor(send, at::kLong));  // of every sender
      const at::Tensor received = meet_with(rows, [&](std::vector<at::Tensor> all) {
        for (int64_t r = 0; r < size(); ++r) {
          const int64_t count = counts[r][rank_].item<int64_t>();
          EXPECT_EQ(count, receive[r]);
          all[r] = all[r].narrow(0, counts[r].narrow(0, 0, rank_).sum().item<int64_t>(), count);
        }
        return at::cat(all);
      });
      return [received] { return received; };
    }

    std::unique_ptr<Group> split(int64_t ranks) const override {
      return std::make_unique<Rank>(all_.ranks_from(rank_ / ranks * ranks, ranks), rank_ % ranks);
    }

   private:
    /// read(what every rank gives), while all ranks are here.
    template <class Read>
    at::Tensor meet_with(const at::Tensor& own, const Read& read) const {
      const at::NoGradGuard no_grad;
      all_.tensors_[rank_] = own;
      all_.meet();
      const at::Tensor result = read(all_.tensors_);
      all_.meet();
      return result;
    }

    ThreadRanks& all_;
    int64_t rank_;
  };

  /// Waits for all ranks.
  void meet() {
    std::unique_lock lock(mutex_);
    const int64_t meeting = meetings_;
    if (++here_ == size_) {
      here_ = 0;
      ++meetings_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return meetings_ > meeting || has_failed_; });
    if (meetings_ == meeting) throw RankError("another rank has failed");
  }

  void fail() {
    const std::lock_guard lock(mutex_);
    has_failed_ = true;
    changed_.notify_all();
    for (const auto& [first, some] : some_) some->fail();
  }

  /// So many successive ranks, which all of them get.
  ThreadRanks& ranks_from(int64_t first, int64_t count) {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<ThreadRanks>& some = some_[{first, count}];
    if (!some) some = std::make_unique<ThreadRanks>(count);
    if (has_failed_) some->fail();
    return *some;
  }

  int64_t size_;
  std::vector<at::Tensor> tensors_;  // by rank
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t here_ = 0, meetings_ = 0;
  bool has_failed_ = false;
  std::map<std::pair<int64_t, int64_t>, std::unique_ptr<ThreadRanks>> some_;
};

}  // namespace espalier::testing
