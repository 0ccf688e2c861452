// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/kernels/cuda/emulator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/context/fiber.hpp>
#include <boost/context/fixedsize_stack.hpp>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tests/test_seed.h"

// GCC defines a macro, clang has a feature.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ESPALIER_ADDRESS_SANITIZER
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define ESPALIER_ADDRESS_SANITIZER
#endif

#ifdef ESPALIER_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace espalier::testing {
namespace {

namespace context = boost::context;

constexpr size_t kStackBytes = 256 << 10;
constexpr int kCopyBytes = 16;

/// Stacks of fibers that have ended wait here for the next ones: a kernel has thousands of threads.
class PooledStacks {
 public:
  context::stack_context allocate() {
    std::vector<context::stack_context>& free = pool().free;
    if (free.empty()) return context::fixedsize_stack(kStackBytes).allocate();
    const context::stack_context stack = free.back();
    free.pop_back();
#ifdef ESPALIER_ADDRESS_SANITIZER
    // The frames that start a fiber never return, which leaves them poisoned. They are at the top.
    constexpr size_t kFirstFrames = 8 << 10;
    __asan_unpoison_memory_region(static_cast<std::byte*>(stack.sp) - kFirstFrames, kFirstFrames);
#endif
    return stack;
  }
  void deallocate(const context::stack_context& stack) { pool().free.push_back(stack); }

 private:
  struct Pool {
    std::vector<context::stack_context> free;
    ~Pool() {
      for (context::stack_context& stack : free) context::fixedsize_stack(kStackBytes).deallocate(stack);
    }
  };
  static Pool& pool() {
    static thread_local Pool pool;
    return pool;
  }
};

template <class... Args>
[[noreturn]] void fail_emulation(fmt::format_string<Args...> text, Args&&... args) {
  throw std::logic_error(fmt::format(text, std::forward<Args>(args)...));
}

/// One side of a switch between stacks, as the address sanitizer wants to be told of it.
struct Stack {
  const void* bottom = nullptr;
  size_t size = 0;
  void* fake = nullptr;

  void leave([[maybe_unused]] const Stack& next, [[maybe_unused]] bool forever = false) {
#ifdef ESPALIER_ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(forever ? nullptr : &fake, next.bottom, next.size);
#endif
  }
  void enter([[maybe_unused]] Stack* last) {
#ifdef ESPALIER_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(fake, &last->bottom, &last->size);
#endif
  }
};

struct Copy {
  void* to;
  const void* from;
  bool valid;
};

struct Thread {
  simt::emulator::Place place;
  context::fiber fiber;
  Stack stack;
  bool runnable = true;
  bool done = false;
  std::exception_ptr error;
  std::vector<Copy> open_group;
  std::vector<std::vector<Copy>> groups;
};

/// Lanes of a warp on their way to a collective.
struct Meeting {
  const char* name = nullptr;
  int arrived = 0;
  std::array<void*, simt::kWarpSize> payloads{};
  std::array<Thread*, simt::kWarpSize> threads{};
};

/// Thrown in threads that wait when another has failed, so that they end.
struct Abandoned {};

class Block {
 public:
  Block(const EmulatedLaunch& launch, const std::array<int, 3>& index, const std::function<void()>& kernel,
        std::mt19937_64& random, EmulatedCounts& counts)
      : kernel_(kernel), random_(random), counts_(counts), threads_(launch.threads) {
    // Of exactly the size that was asked for, so that the sanitizer sees what lies beyond.
    void* memory = nullptr;
    if (posix_memalign(&memory, 1024, std::max<size_t>(1, launch.shared_bytes)) != 0) throw std::bad_alloc();
    shared_.reset(static_cast<std::byte*>(memory));
    std::memset(memory, 0xff, launch.shared_bytes);
    meetings_.resize(launch.threads / simt::kWarpSize);
    for (int t = 0; t < launch.threads; ++t) {
      threads_[t].place = {t, {index[0], index[1], index[2]}, shared_.get()};
      start(threads_[t]);
    }
  }

  void run() {
    std::vector<Thread*> ready;
    while (true) {
      list_ready(&ready);
      if (ready.empty()) break;
      std::shuffle(ready.begin(), ready.end(), random_);
      for (Thread* thread : ready) resume(*thread);
    }
    if (error_) std::rethrow_exception(error_);
    const auto waiting =
        std::find_if(threads_.begin(), threads_.end(), [](const Thread& t) { return !t.done; });
    if (waiting == threads_.end()) return;
    const int first = waiting->place.thread;
    abandoned_ = true;
    for (Thread& thread : threads_) {
      if (!thread.done) resume(thread);
    }
    fail_emulation("block {}: thread {} waits for what never comes", waiting->place.block[0], first);
  }

  Thread& running() { return *running_; }
  EmulatedCounts& counts() { return counts_; }

  /// Waits until all threads have come.
  void sync() {
    at_barrier_.push_back(running_);
    running_->runnable = false;
    if (at_barrier_.size() == threads_.size()) {
      for (Thread* thread : at_barrier_) thread->runnable = true;
      at_barrier_.clear();
    }
    pause();
  }

  void collective(const char* name, void* payload, void (*work)(void* const*)) {
    const int thread = running_->place.thread;
    Meeting& meeting = meetings_[thread / simt::kWarpSize];
    if (meeting.arrived > 0 && std::strcmp(meeting.name, name) != 0) {
      fail_emulation("warp {}: some lanes are in {} and some in {}", thread / simt::kWarpSize, meeting.name,
                     name);
    }
    meeting.name = name;
    meeting.payloads[thread % simt::kWarpSize] = payload;
    meeting.threads[thread % simt::kWarpSize] = running_;
    running_->runnable = false;
    if (++meeting.arrived == simt::kWarpSize) {
      const Meeting all = meeting;
      meeting = {};
      counts_.products += std::strcmp(name, "multiply_add") == 0;
      work(all.payloads.data());
      for (Thread* lane : all.threads) lane->runnable = true;
    }
    pause();
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  /// For a while one warp runs only where no other can: barriers that only seem to be enough show.
  void starve(std::vector<Thread*>* ready) {
    const auto num_warps = static_cast<int>(meetings_.size());
    if (starved_turns_-- == 0) {
      starved_ = static_cast<int>(random_() % (2 * num_warps));  // or none
      starved_turns_ = 1 << random_() % 8;
    }
    const auto is_starved = [&](const Thread* t) { return t->place.thread / simt::kWarpSize == starved_; };
    if (!std::all_of(ready->begin(), ready->end(), is_starved)) std::erase_if(*ready, is_starved);
  }

  /// The threads that run next: those of one warp, for a while that may be long, so that warps drift apart as
  /// far as barriers let them.
  void list_ready(std::vector<Thread*>* ready) {
    const auto list = [&](auto begin, auto end) {
      ready->clear();
      for (auto thread = begin; thread != end; ++thread) {
        if (!thread->done && (thread->runnable || abandoned_)) ready->push_back(&*thread);
      }
    };
    if (warp_turns_ > 0 && !abandoned_) {
      --warp_turns_;
      const auto begin = threads_.begin() + warp_ * simt::kWarpSize;
      list(begin, begin + simt::kWarpSize);
      if (!ready->empty()) return;
    }
    list(threads_.begin(), threads_.end());
    if (ready->empty()) return;
    if (!abandoned_) starve(ready);
    warp_ = (*ready)[random_() % ready->size()]->place.thread / simt::kWarpSize;
    warp_turns_ = 1 << random_() % 12;
    if (!abandoned_)
      std::erase_if(*ready, [&](const Thread* t) { return t->place.thread / simt::kWarpSize != warp_; });
  }

  void start(Thread& thread) {
    PooledStacks allocator;
    const context::stack_context stack = allocator.allocate();
    thread.stack.size = stack.size;
    thread.stack.bottom = static_cast<std::byte*>(stack.sp) - stack.size;
    thread.fiber = context::fiber(std::allocator_arg, context::preallocated(stack.sp, stack.size, stack),
                                  allocator, [this, &thread](context::fiber&& scheduler) {
                                    thread.stack.enter(&scheduler_stack_);
                                    scheduler_ = std::move(scheduler);
                                    try {
                                      kernel_();
                                    } catch (const Abandoned&) {
                                    } catch (...) {
                                      thread.error = std::current_exception();
                                    }
                                    thread.done = true;
                                    thread.stack.leave(scheduler_stack_, /*forever=*/true);
                                    return std::move(scheduler_);
                                  });
  }

  void resume(Thread& thread) {
    running_ = &thread;
    Stack ignored;
    scheduler_stack_.leave(thread.stack);
    thread.fiber = std::move(thread.fiber).resume();
    scheduler_stack_.enter(&ignored);
    if (thread.error && !error_) {
      error_ = thread.error;
      abandoned_ = true;
    }
  }

  /// Lets another thread go on.
  void pause() {
    Thread& thread = *running_;
    thread.stack.leave(scheduler_stack_);
    scheduler_ = std::move(scheduler_).resume();
    thread.stack.enter(&scheduler_stack_);
    if (abandoned_) throw Abandoned();
  }

  const std::function<void()>& kernel_;
  std::mt19937_64& random_;
  EmulatedCounts& counts_;
  std::unique_ptr<std::byte, Free> shared_;
  std::vector<Thread> threads_;
  std::vector<Meeting> meetings_;
  std::vector<Thread*> at_barrier_;
  Thread* running_ = nullptr;
  int warp_ = 0;
  int warp_turns_ = 0;
  int starved_ = -1;
  int starved_turns_ = 0;
  context::fiber scheduler_;
  Stack scheduler_stack_;
  std::exception_ptr error_;
  bool abandoned_ = false;
};

thread_local Block* current = nullptr;

void check_aligned(const char* what, const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % kCopyBytes != 0)
    fail_emulation("{}: an address that is no multiple of 16", what);
}

}  // namespace

EmulatedCounts emulate(const EmulatedLaunch& launch, const std::function<void()>& kernel) {
  if (launch.threads <= 0 || launch.threads % simt::kWarpSize != 0) {
    fail_emulation("a block of {} threads: expected whole warps", launch.threads);
  }
  std::mt19937_64 random(test_seed(launch.seed));
  std::vector<std::array<int, 3>> blocks;
  for (int x = 0; x < launch.blocks[0]; ++x) {
    for (int y = 0; y < launch.blocks[1]; ++y) {
      for (int z = 0; z < launch.blocks[2]; ++z) blocks.push_back({x, y, z});
    }
  }
  std::shuffle(blocks.begin(), blocks.end(), random);
  EmulatedCounts counts;
  for (const std::array<int, 3>& index : blocks) {
    Block block(launch, index, kernel, random, counts);
    current = &block;
    block.run();
  }
  current = nullptr;
  return counts;
}

}  // namespace espalier::testing

namespace espalier::simt::emulator {

using testing::current;

const Place& place() {
  return current->running().place;
}

void sync_block() {
  current->sync();
}

void collective(const char* name, void* payload, void (*work)(void* const* payloads)) {
  current->collective(name, payload, work);
}

void copy_async(void* to_shared, const void* from_global, bool valid) {
  testing::check_aligned("copy_async to", to_shared);
  testing::check_aligned("copy_async from", from_global);
  std::memset(to_shared, 0xff, testing::kCopyBytes);  // what stood there is gone from now on
  current->running().open_group.push_back({to_shared, from_global, valid});
}

void check_aligned(const char* what, const void* address, int bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
    testing::fail_emulation("{}: an address that is no multiple of {}", what, bytes);
  }
}

void commit_copies() {
  testing::Thread& thread = current->running();
  thread.groups.push_back(std::move(thread.open_group));
  thread.open_group.clear();
}

void wait_copies(int groups_left) {
  testing::Thread& thread = current->running();
  while (static_cast<int>(thread.groups.size()) > groups_left) {
    for (const testing::Copy& copy : thread.groups.front()) {
      if (copy.valid) {
        std::memcpy(copy.to, copy.from, testing::kCopyBytes);
      } else {
        std::memset(copy.to, 0, testing::kCopyBytes);
      }
    }
    thread.groups.erase(thread.groups.begin());
  }
}

void count_matrix_read(const void* const (&rows)[8]) {
  // 32 banks of 4 bytes: a row takes 4 neighbours of them, one of 8 places.
  int at_place[8] = {};
  for (const void* row : rows) ++at_place[reinterpret_cast<uintptr_t>(row) / testing::kCopyBytes % 8];
  ++current->counts().matrix_reads;
  current->counts().matrix_accesses += *std::max_element(at_place, at_place + 8);
}

void read_matrices(void* const* reads) {
  for (int m = 0; m < 4; ++m) {
    const void* rows[8];
    for (int r = 0; r < 8; ++r) {
      rows[r] = static_cast<const MatrixRead*>(reads[8 * m + r])->row;
      testing::check_aligned("load_matrices", rows[r]);
    }
    count_matrix_read(rows);
    for (int lane = 0; lane < kWarpSize; ++lane) {
      auto& own = *static_cast<MatrixRead*>(reads[lane]);
      const auto element = [&](int row, int column) {
        uint16_t bits;
        std::memcpy(&bits, static_cast<const std::byte*>(rows[row]) + 2 * column, sizeof(bits));
        return uint32_t{bits};
      };
      const int row = lane / 4, pair = 2 * (lane % 4);
      own.result[m] = own.transposed ? element(pair, row) | element(pair + 1, row) << 16
                                     : element(row, pair) | element(row, pair + 1) << 16;
    }
  }
}

float to_float(BFloat16 element) {
  return std::bit_cast<float>(uint32_t{element.bits} << 16);
}

uint16_t round_to_bits(float value, BFloat16) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

namespace {

float upcast(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float sign = bits >> 15 ? -1.0F : 1.0F;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                               : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25));
}

}  // namespace

float to_float(Float16 element) {
  static const std::vector<float> all = [] {
    std::vector<float> numbers;
    for (uint32_t bits = 0; bits < 1 << 16; ++bits) numbers.push_back(upcast(static_cast<uint16_t>(bits)));
    return numbers;
  }();
  return all[element.bits];
}

uint16_t round_to_bits(float value, Float16) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return 0x7fff;
  const float size = std::fabs(value);
  if (size >= 65520.0F) return sign | 0x7c00;
  // In units of the last place at this size; nearbyint rounds to even, and its carry into the exponent is
  // right.
  const int exponent = std::max(size == 0 ? -14 : std::ilogb(size), -14);
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return static_cast<uint16_t>(sign | (units + ((exponent + 14) << 10)));
}

}  // namespace espalier::simt::emulator
