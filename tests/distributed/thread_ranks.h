// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process.
#pragma once

#include <ATen/ATen.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "espalier/distributed/group.h"

namespace espalier::testing {

class ThreadRanks {
 public:
  explicit ThreadRanks(int64_t size) : size_(size), bytes_(size), tensors_(size) {}

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

    std::vector<std::string> gather(const std::string& bytes) const override {
      all_.bytes_[rank_] = bytes;
      all_.meet();
      std::vector<std::string> result = all_.bytes_;
      all_.meet();
      return result;
    }

    void add_up(const std::vector<at::Tensor>& tensors) const override {
      const at::NoGradGuard no_grad;
      all_.tensors_[rank_] = tensors;
      all_.meet();
      std::vector<at::Tensor> sums;
      for (size_t i = 0; i < tensors.size(); ++i) {
        sums.push_back(all_.tensors_[0][i].clone());
        for (int64_t rank = 1; rank < all_.size_; ++rank) sums[i].add_(all_.tensors_[rank][i]);
      }
      all_.meet();
      for (size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(sums[i]);
    }

   private:
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
  std::vector<std::string> bytes_;                // by rank
  std::vector<std::vector<at::Tensor>> tensors_;  // by rank
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t here_ = 0, meetings_ = 0;
  bool has_failed_ = false;
};

}  // namespace espalier::testing
