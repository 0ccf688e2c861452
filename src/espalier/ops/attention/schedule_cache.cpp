// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/schedule_cache.h"

#include <cstring>
#include <list>
#include <mutex>

#include "espalier/ops/guarded_output.h"

namespace espalier::fused {
namespace {

// Forward and backward of a few micro-batches.
constexpr size_t kMostEntries = 8;

struct Entry {
  ScheduleSource source;  // without its tensor, so that the cache does not keep it alive
  c10::weak_intrusive_ptr<c10::TensorImpl> subtree_end;
  int64_t version;
  at::Tensor memory;
};

bool same(const std::vector<ContextRectangle>& a, const std::vector<ContextRectangle>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(ContextRectangle)) == 0);
}

bool matches(const Entry& entry, const ScheduleSource& source) {
  const ScheduleSource& kept = entry.source;
  return entry.subtree_end._unsafe_get_target() == source.subtree_end.unsafeGetTensorImpl() &&
         entry.version == source.subtree_end._version() && kept.backward == source.backward &&
         kept.deterministic == source.deterministic && kept.num_heads == source.num_heads &&
         kept.num_key_heads == source.num_key_heads && kept.head_dim == source.head_dim &&
         kept.stream == source.stream && same(kept.rectangles, source.rectangles);
}

class Cache {
 public:
  KeptSchedules find(const ScheduleSource& source, int64_t bytes) {
    const std::scoped_lock lock(mutex_);
    entries_.remove_if([](const Entry& entry) { return entry.subtree_end.expired(); });
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      if (!matches(*entry, source)) continue;
      entries_.splice(entries_.begin(), entries_, entry);
      return {entry->memory, true};
    }
    const at::Tensor memory = output_like({bytes}, source.subtree_end.options().dtype(at::kByte));
    if (entries_.size() == kMostEntries) entries_.pop_back();
    Entry entry{source, c10::weak_intrusive_ptr<c10::TensorImpl>(source.subtree_end.getIntrusivePtr()),
                static_cast<int64_t>(source.subtree_end._version()), memory};
    entry.source.subtree_end.reset();
    entries_.push_front(std::move(entry));
    return {memory, false};
  }

 private:
  std::mutex mutex_;
  std::list<Entry> entries_;  // most recently used first
};

}  // namespace

KeptSchedules schedules_for(const ScheduleSource& source, int64_t bytes, bool reusable) {
  // Inference tensors have no version counter to detect writes.
  if (!reusable || source.subtree_end.is_inference()) {
    return {output_like({bytes}, source.subtree_end.options().dtype(at::kByte)), false};
  }
  static auto& cache = *new Cache;  // never destroyed, since its memory is on the device
  return cache.find(source, bytes);
}

}  // namespace espalier::fused
