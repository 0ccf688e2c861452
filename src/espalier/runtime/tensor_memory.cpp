// SPDX-License-Identifier: Apache-2.0
#include "espalier/runtime/tensor_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <malloc.h>

#include <atomic>
#include <cstring>

namespace espalier {
namespace {

std::atomic<int64_t> held{0}, peak{0};

void add(int64_t bytes) {
  const int64_t now = held.fetch_add(bytes) + bytes;
  int64_t before = peak.load();
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
}

void release(void* data) {
  if (data == nullptr) return;
  held.fetch_sub(static_cast<int64_t>(malloc_usable_size(data)));
  c10::free_cpu(data);
}

// LibTorch's CPU allocator, with counting.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    if (data != nullptr) add(static_cast<int64_t>(malloc_usable_size(data)));
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

c10::CachingAllocator::Stat device_stat(at::Device device) {
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

}  // namespace

void count_tensor_memory() {
  static CountingAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
}

void reuse_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);  // never
  mallopt(M_TOP_PAD, 64 << 20);
#endif
}

int64_t tensor_memory(at::Device device) {
  return device.is_cuda() ? device_stat(device).current : held.load();
}

int64_t peak_tensor_memory(at::Device device) {
  return device.is_cuda() ? device_stat(device).peak : peak.load();
}

void reset_peak_tensor_memory(at::Device device) {
  if (device.is_cuda()) {
    c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
  } else {
    peak.store(held.load());
  }
}

}  // namespace espalier
