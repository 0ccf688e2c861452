// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process.
#pragma once

#include <ATen/ATen.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
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

    std::function<at::Tensor()> exchange(const at::Tensor& rows) const override {
      const at::Tensor received = meet_with(rows, [this](std::vector<at::Tensor> all) {
        for (at::Tensor& sent : all) sent = sent[rank_];
        return at::stack(all);
      });
      return [received] { return received; };
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
  }

  int64_t size_;
  std::vector<at::Tensor> tensors_;  // by rank
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t here_ = 0, meetings_ = 0;
  bool has_failed_ = false;
};

}  // namespace espalier::testing
