// SPDX-License-Identifier: Apache-2.0
// The words of simt_hopper.h in the emulator. Copies arrive at random moments and hold NaN until then;
// products read their operands through their descriptors, as late as waits allow, and fail where an operand
// has changed since they were issued; what asynchronous reads may not yet see is kept by the 16 bytes.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "espalier/ops/kernels/cuda/attention/simt_hopper.h"
#include "tests/ops/kernels/cuda/emulator.h"
#include "tests/ops/kernels/cuda/emulator_hooks.h"

namespace espalier::testing {
namespace {

using simt::Order;
using simt::emulator::AsyncProduct;

constexpr uint32_t kSharedBegin = 1024;       // what the system has of a block's shared memory on Hopper
constexpr uint32_t kTouchMeNot = 0x7f80dead;  // a signalling NaN: arithmetic changes it
constexpr int kWarpsOfGroup = simt::kWarpgroupSize / simt::kWarpSize;

struct CountingBarrier {
  int arrivals;
  int arrivals_left;
  int64_t bytes_left = 0;
  int64_t phases_ended = 0;
  bool fenced = false;
  int initialised_by;

  void settle() {
    if (arrivals_left > 0 || bytes_left != 0) return;
    ++phases_ended;
    arrivals_left = arrivals;
  }
};

/// A product of one warp: what its lanes asked for, and its operands as they were then.
struct WarpProduct {
  std::array<AsyncProduct, simt::kWarpSize> lanes;
  int warp;
  std::vector<uint16_t> a, b;
};

struct WarpProducts {
  bool fenced = false;
  std::vector<WarpProduct> open;
  std::deque<std::vector<WarpProduct>> groups;
  std::map<float*, std::vector<float>> sums;  // of accumulators in flight
  size_t issued = 0;
};

/// A write to global memory from shared memory.
struct Write {
  const std::byte* from;
  std::vector<std::byte> bytes;  // when it was issued
  std::function<void(const std::byte*)> finish;
};

struct ThreadWrites {
  std::vector<Write> open;
  std::deque<std::vector<Write>> groups;
};

int own_warp() {
  return simt::thread() / simt::kWarpSize;
}

std::string signature(const AsyncProduct& p) {
  return fmt::format("{:x} {:x} {} {} {} {}", p.a, p.b, p.columns, static_cast<int>(p.order_a),
                     static_cast<int>(p.order_b), p.add);
}

class HopperPart : public BlockPart {
 public:
  HopperPart() : writer_(shared_bytes() / 16 + 1, -1) {}

  void end() override {
    if (copies_under_way_ > 0) fail_emulation("the block ended while copies were under way");
    for (const auto& [thread, writes] : writes_) {
      if (!writes.open.empty() || !writes.groups.empty())
        fail_emulation("thread {} ended before its adds and stores had read shared memory", thread);
    }
    for (const auto& [warp, products] : products_) {
      if (!products.open.empty() || !products.groups.empty())
        fail_emulation("warp {} ended before its products were done", warp);
      if (products.issued != asked_for_[warp / kWarpsOfGroup].size())
        fail_emulation("warp {} took part in fewer products than others of its group", warp);
    }
  }

  int64_t offset(const void* pointer, int64_t bytes, int alignment, const char* what) const {
    const int64_t at = static_cast<const std::byte*>(pointer) - simt::shared();
    if (at < 0 || at + bytes > shared_bytes()) fail_emulation("{}: not in shared memory", what);
    if (at % alignment != 0) fail_emulation("{}: an address that is no multiple of {}", what, alignment);
    return at;
  }

  // Order of ordinary writes and asynchronous reads.

  void write(void* to, const void* from, int thread) {
    const int64_t chunk = offset(to, 16, 16, "put") / 16;
    std::memcpy(to, from, 16);
    writer_[chunk] = thread;
    unfenced_[thread].push_back(chunk);
  }
  void fence_copies() {
    for (const int64_t chunk : unfenced_[simt::thread()]) {
      if (writer_[chunk] == simt::thread()) writer_[chunk] = -1;
    }
    unfenced_[simt::thread()].clear();
  }
  void check_visible(int64_t at, const char* what) const {
    if (writer_[at / 16] >= 0)
      fail_emulation("{}: reads what thread {} wrote without a fence", what, writer_[at / 16]);
  }

  // Barriers.

  void init_barrier(uint64_t* at, int arrivals) {
    offset(at, 8, 8, "init_barrier");
    if (barriers_.contains(at)) fail_emulation("init_barrier: a barrier that is one already");
    if (arrivals <= 0) fail_emulation("init_barrier: {} arrivals", arrivals);
    barriers_[at] = {.arrivals = arrivals, .arrivals_left = arrivals, .initialised_by = simt::thread()};
  }
  void fence_barriers() {
    for (auto& [at, barrier] : barriers_) barrier.fenced |= barrier.initialised_by == simt::thread();
  }
  CountingBarrier& barrier(uint64_t* at) {
    const auto found = barriers_.find(at);
    if (found == barriers_.end()) fail_emulation("a barrier that nobody has initialised");
    if (!found->second.fenced) fail_emulation("a barrier whose initialisation was not fenced");
    return found->second;
  }
  void arrive(uint64_t* at, int bytes) {
    CountingBarrier& b = barrier(at);
    if (b.arrivals_left == 0) fail_emulation("a barrier: more arrivals than the phase counts");
    --b.arrivals_left;
    b.bytes_left += bytes;
    b.settle();
    let_others_run();
  }
  void wait_phase(uint64_t* at, int parity) {
    const CountingBarrier* b = &barrier(at);
    if (parity != 0 && parity != 1) fail_emulation("wait_phase: parity {}", parity);
    wait_until([b, parity] { return b->phases_ended % 2 != parity; });
  }

  // Copies.

  void check_target(void* to, int64_t bytes, int alignment) {
    const int64_t at = offset(to, bytes, alignment, "a copy's target");
    for (int64_t chunk = at / 16; chunk < (at + bytes) / 16; ++chunk) {
      if (!arriving_.insert(chunk).second) fail_emulation("two copies to the same place at once");
      writer_[chunk] = -1;
    }
    std::memset(to, 0xff, bytes);
    ++copies_under_way_;
  }
  void arrived(void* to, uint64_t* barrier_at, int64_t bytes) {
    const int64_t at = static_cast<std::byte*>(to) - shared_;
    for (int64_t chunk = at / 16; chunk < (at + bytes) / 16; ++chunk) arriving_.erase(chunk);
    --copies_under_way_;
    CountingBarrier& b = barrier(barrier_at);
    b.bytes_left -= bytes;
    b.settle();
  }
  void load_box(void* to, const simt::TensorMap& map, uint64_t* barrier_at,
                const std::array<int64_t, 3>& from) {
    const int64_t bytes = int64_t{map.box_heads} * map.box_tokens * simt::kSlabRowBytes;
    check_map(map);
    shared_ = simt::shared();
    check_target(to, bytes, 1024);  // 128 would do, but what a slab is counts from there
    barrier(barrier_at);
    do_later([this, to, map, barrier_at, from, bytes] {
      for (int row = 0; row < map.box_heads * map.box_tokens; ++row)
        copy_row(static_cast<std::byte*>(to), map, from, row);
      arrived(to, barrier_at, bytes);
    });
  }
  void load_bytes(void* to, const void* source, int bytes, uint64_t* barrier_at) {
    if (bytes <= 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0)
      fail_emulation("load_bytes: {} bytes, or a source that is not aligned to 16", bytes);
    shared_ = simt::shared();
    check_target(to, bytes, 16);
    barrier(barrier_at);
    do_later([this, to, source, bytes, barrier_at] {
      std::memcpy(to, source, bytes);
      arrived(to, barrier_at, bytes);
    });
  }

  // Writes to global memory.

  void write_later(const void* from, int64_t bytes, int alignment, const char* what,
                   std::function<void(const std::byte*)> finish) {
    const int64_t at = offset(from, bytes, alignment, what);
    for (int64_t o = at; o < at + bytes; o += 16) check_visible(o, what);
    const auto* begin = static_cast<const std::byte*>(from);
    writes_[simt::thread()].open.push_back({begin, {begin, begin + bytes}, std::move(finish)});
  }
  void add_floats(float* to, const float* from, int bytes) {
    if (bytes <= 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0)
      fail_emulation("add_floats: {} bytes, or a target that is not aligned to 16", bytes);
    write_later(from, bytes, 16, "add_floats", [to, bytes](const std::byte* values) {
      for (size_t i = 0; i < bytes / sizeof(float); ++i) {
        float value;
        std::memcpy(&value, values + i * sizeof(float), sizeof(float));
        to[i] += value;
      }
    });
  }
  void store_box(const simt::TensorMap& map, const void* from, const std::array<int64_t, 3>& to) {
    check_map(map);
    const int rows = map.box_heads * map.box_tokens;
    write_later(from, int64_t{rows} * simt::kSlabRowBytes, 1024, "store_box",
                [map, to, rows](const std::byte* box) {
                  for (int row = 0; row < rows; ++row) store_row(box, map, to, row);
                });
  }
  void commit_writes() {
    ThreadWrites& own = writes_[simt::thread()];
    own.groups.push_back(std::move(own.open));
    own.open.clear();
  }
  void wait_writes_read(int groups_left) {
    let_others_run();
    ThreadWrites& own = writes_[simt::thread()];
    while (static_cast<int>(own.groups.size()) > groups_left) {
      for (const Write& write : own.groups.front()) {
        if (std::memcmp(write.from, write.bytes.data(), write.bytes.size()) != 0)
          fail_emulation("an add or a store: its source has changed before it was waited for");
        write.finish(write.bytes.data());
      }
      own.groups.pop_front();
    }
  }

  // Products.

  void fence_products() { products_[own_warp()].fenced = true; }

  void multiply(const std::array<AsyncProduct, simt::kWarpSize>& lanes) {
    const int warp = own_warp();
    WarpProducts& own = products_[warp];
    if (!own.fenced) fail_emulation("a group of products that does not begin with fence_products");
    check_alike(lanes, own, warp);
    WarpProduct product{lanes, warp, {}, {}};
    product.a = read_a(product);
    product.b = read_b(product);
    for (const AsyncProduct& lane : lanes) {
      if (own.sums.contains(lane.d)) {
        check_untouched(lane);
      } else {
        own.sums[lane.d].assign(lane.d, lane.d + lane.columns / 2);
        std::fill_n(lane.d, lane.columns / 2, std::bit_cast<float>(kTouchMeNot));
      }
    }
    own.open.push_back(std::move(product));
  }
  void commit_products() {
    WarpProducts& own = products_[own_warp()];
    own.groups.push_back(std::move(own.open));
    own.open.clear();
    own.fenced = false;
  }
  void wait_products(int groups_left) {
    WarpProducts& own = products_[own_warp()];
    if (!own.open.empty()) fail_emulation("wait_products: products that no group has");
    while (static_cast<int>(own.groups.size()) > groups_left) {
      for (const WarpProduct& product : own.groups.front()) finish(product, own);
      own.groups.pop_front();
    }
    std::set<float*> in_flight;
    for (const auto& group : own.groups) {
      for (const WarpProduct& product : group) {
        for (const AsyncProduct& lane : product.lanes) in_flight.insert(lane.d);
      }
    }
    std::erase_if(own.sums, [&](const auto& sum) {
      const auto& [d, values] = sum;
      if (in_flight.contains(d)) return false;
      for (size_t i = 0; i < values.size(); ++i) {
        if (std::bit_cast<uint32_t>(d[i]) != kTouchMeNot)
          fail_emulation("a register of D has changed while a product was under way");
      }
      std::copy(values.begin(), values.end(), d);
      return true;
    });
  }

 private:
  /// What cuTensorMapEncodeTiled refuses.
  static void check_map(const simt::TensorMap& map) {
    bool good = reinterpret_cast<uintptr_t>(map.data) % 16 == 0 && map.stride_bytes[0] == 2;
    for (int i = 0; i < 3; ++i) good &= map.size[i] > 0;
    for (int i = 1; i < 3; ++i) good &= map.stride_bytes[i] > 0 && map.stride_bytes[i] % 16 == 0;
    for (const int box : {map.box_heads, map.box_tokens}) good &= 0 < box && box <= 256;
    if (!good) fail_emulation("a map that the copy engine does not take");
  }

  /// Where an element of a box is in its tensor; null where it is outside.
  static const std::byte* element_of(const simt::TensorMap& map, const std::array<int64_t, 3>& box, int row,
                                     int column) {
    const int64_t at[3] = {box[0] + column, box[1] + row % map.box_heads, box[2] + row / map.box_heads};
    for (int i = 0; i < 3; ++i) {
      if (at[i] < 0 || at[i] >= map.size[i]) return nullptr;
    }
    return map.data + at[0] * 2 + at[1] * map.stride_bytes[1] + at[2] * map.stride_bytes[2];
  }
  static int place_in_slab(int row, int column) {
    return simt::slab_offset(row, column / 8) + column % 8 * 2;
  }
  static void copy_row(std::byte* to, const simt::TensorMap& map, const std::array<int64_t, 3>& from,
                       int row) {
    for (int c = 0; c < simt::kSlabColumns; ++c) {
      uint16_t bits = 0;
      if (const std::byte* element = element_of(map, from, row, c)) std::memcpy(&bits, element, 2);
      std::memcpy(to + place_in_slab(row, c), &bits, 2);
    }
  }
  static void store_row(const std::byte* box, const simt::TensorMap& map, const std::array<int64_t, 3>& to,
                        int row) {
    for (int c = 0; c < simt::kSlabColumns; ++c) {
      if (const std::byte* element = element_of(map, to, row, c))
        std::memcpy(const_cast<std::byte*>(element), box + place_in_slab(row, c), 2);
    }
  }

  static void check_untouched(const AsyncProduct& lane) {
    for (int i = 0; i < lane.columns / 2; ++i) {
      if (std::bit_cast<uint32_t>(lane.d[i]) != kTouchMeNot)
        fail_emulation("a register of D has changed while a product was under way");
    }
  }

  /// All lanes of a warp and all warps of a group must ask for the same.
  void check_alike(const std::array<AsyncProduct, simt::kWarpSize>& lanes, WarpProducts& own, int warp) {
    const std::string asked = signature(lanes[0]);
    for (const AsyncProduct& lane : lanes) {
      if (signature(lane) != asked) fail_emulation("multiply_async: lanes ask for different products");
    }
    std::vector<std::string>& all = asked_for_[warp / kWarpsOfGroup];
    if (own.issued == all.size()) all.push_back(asked);
    if (all[own.issued] != asked)
      fail_emulation("multiply_async: warp {} asks for {}, others of its group for {}", warp, asked,
                     all[own.issued]);
    ++own.issued;
  }

  /// Element (kept, summed) of the operand that a descriptor names: the address arithmetic of the hardware.
  uint16_t element(uint64_t descriptor, Order order, int kept, int summed) const {
    if (descriptor >> 62 != 1 || (descriptor & 0x3fffc000c000c000) != 0)
      fail_emulation("a descriptor {:x} that is none, or not of 128-byte swizzles", descriptor);
    const auto field = [&](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4; };
    const uint32_t start = field(0), leading = field(16), stride = field(32);
    const uint32_t linear = order == Order::kSummed ? start + kept / 8 * stride + kept % 8 * 128 + summed * 2
                                                    : start + kept / 64 * leading + kept % 64 * 2 +
                                                          summed / 8 * stride + summed % 8 * 128;
    const int64_t at = int64_t{linear ^ (linear >> 7 & 7) << 4} - kSharedBegin;
    if (at < 0 || at + 2 > shared_bytes()) fail_emulation("a descriptor leads out of shared memory");
    check_visible(at, "multiply_async");
    uint16_t bits;
    std::memcpy(&bits, simt::shared() + at, 2);
    return bits;
  }
  /// [16 rows of the warp, 16]
  std::vector<uint16_t> read_a(const WarpProduct& product) const {
    std::vector<uint16_t> a(16 * 16);
    if (product.lanes[0].a_registers == nullptr) {
      for (int m = 0; m < 16; ++m) {
        for (int k = 0; k < 16; ++k) {
          a[m * 16 + k] =
              element(product.lanes[0].a, product.lanes[0].order_a, product.warp % kWarpsOfGroup * 16 + m, k);
        }
      }
      return a;
    }
    for (int l = 0; l < simt::kWarpSize; ++l) {
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = product.lanes[l].a_registers[i];
        uint16_t* to = &a[(l / 4 + 8 * (i % 2)) * 16 + 2 * (l % 4) + 8 * (i / 2)];
        to[0] = static_cast<uint16_t>(pair);
        to[1] = static_cast<uint16_t>(pair >> 16);
      }
    }
    return a;
  }
  /// [16, columns]
  std::vector<uint16_t> read_b(const WarpProduct& product) const {
    const AsyncProduct& any = product.lanes[0];
    std::vector<uint16_t> b(static_cast<size_t>(16) * any.columns);
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < any.columns; ++n) b[k * any.columns + n] = element(any.b, any.order_b, n, k);
    }
    return b;
  }

  void finish(const WarpProduct& product, WarpProducts& own) {
    if (read_a(product) != product.a || read_b(product) != product.b)
      fail_emulation("an operand of a product has changed before it was waited for (or was not there yet)");
    const AsyncProduct& any = product.lanes[0];
    const int columns = any.columns;
    std::vector<float> b(product.b.size());
    std::transform(product.b.begin(), product.b.end(), b.begin(), any.to_float);
    std::vector<float> row(columns);
    for (int m = 0; m < 16; ++m) {
      const auto sum = [&](int n) -> float& {
        const AsyncProduct& lane = product.lanes[m % 8 * 4 + n % 8 / 2];
        return own.sums.at(lane.d)[n / 8 * 4 + m / 8 * 2 + n % 2];
      };
      for (int n = 0; n < columns; ++n) row[n] = any.add ? sum(n) : 0.0F;
      for (int k = 0; k < 16; ++k) {
        const float a = any.to_float(product.a[m * 16 + k]);
        for (int n = 0; n < columns; ++n) row[n] += a * b[k * columns + n];
      }
      for (int n = 0; n < columns; ++n) sum(n) = row[n];
    }
  }

  std::byte* shared_ = nullptr;
  std::vector<int> writer_;  // by 16 bytes: the thread that wrote them and has not fenced since, or -1
  std::map<int, std::vector<int64_t>> unfenced_;  // by thread
  std::map<uint64_t*, CountingBarrier> barriers_;
  std::set<int64_t> arriving_;
  int64_t copies_under_way_ = 0;
  std::map<int, ThreadWrites> writes_;
  std::map<int, WarpProducts> products_;
  std::map<int, std::vector<std::string>> asked_for_;  // by warpgroup
};

HopperPart& part() {
  return static_cast<HopperPart&>(block_part([] { return std::make_unique<HopperPart>(); }));
}

}  // namespace
}  // namespace espalier::testing

namespace espalier::simt {

uint32_t shared_address(const void* pointer) {
  return testing::kSharedBegin +
         static_cast<uint32_t>(static_cast<const std::byte*>(pointer) - emulator::place().shared);
}

namespace emulator {

using testing::part;

void init_barrier(uint64_t* barrier, int arrivals) {
  part().init_barrier(barrier, arrivals);
}
void fence_barriers() {
  part().fence_barriers();
}
void arrive(uint64_t* barrier, int bytes) {
  part().arrive(barrier, bytes);
}
void wait_phase(uint64_t* barrier, int parity) {
  part().wait_phase(barrier, parity);
}

void load_box(void* to, const TensorMap* map, uint64_t* barrier, int column, int head, int token) {
  part().load_box(to, *map, barrier, {column, head, token});
}
void load_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  part().load_bytes(to, from, bytes, barrier);
}
void add_floats(float* to_global, const float* from_shared, int bytes) {
  part().add_floats(to_global, from_shared, bytes);
}
void store_box(const TensorMap* map, const void* from, int column, int head, int token) {
  part().store_box(*map, from, {column, head, token});
}
void commit_writes() {
  part().commit_writes();
}
void wait_writes_read(int groups_left) {
  part().wait_writes_read(groups_left);
}
void acquire_map(const TensorMap*) {}
void fence_copies() {
  part().fence_copies();
}

void fence_products() {
  collective("fence_products", nullptr, [](void* const*) { part().fence_products(); });
}
void multiply_async(AsyncProduct product) {
  collective("multiply_async", &product, [](void* const* payloads) {
    std::array<AsyncProduct, kWarpSize> lanes;
    for (int l = 0; l < kWarpSize; ++l) lanes[l] = *static_cast<AsyncProduct*>(payloads[l]);
    part().multiply(lanes);
  });
}
void commit_products() {
  collective("commit_products", nullptr, [](void* const*) { part().commit_products(); });
}
void wait_products(int groups_left) {
  collective("wait_products", &groups_left,
             [](void* const* payloads) { part().wait_products(*static_cast<int*>(payloads[0])); });
}

void put(void* to_shared, const void* vector) {
  part().write(to_shared, vector, thread());
}
void add_vector(float* to_global, const float* values) {
  if (reinterpret_cast<uintptr_t>(to_global) % 16 != 0)
    testing::fail_emulation("add_vector: a target that is not aligned to 16");
  for (int i = 0; i < 4; ++i) to_global[i] += values[i];
}
void put_matrices(void* row, const uint32_t* r) {
  struct Payload {
    void* row;
    const uint32_t* r;
  } payload{row, r};
  collective("put_matrices", &payload, [](void* const* payloads) {
    for (int m = 0; m < 4; ++m) {
      for (int row = 0; row < 8; ++row) {
        uint32_t words[4];
        for (int i = 0; i < 4; ++i) words[i] = static_cast<Payload*>(payloads[row * 4 + i])->r[m];
        const int lane = m * 8 + row;
        part().write(static_cast<Payload*>(payloads[lane])->row, words,
                     thread() / kWarpSize * kWarpSize + lane);
      }
    }
  });
}

}  // namespace emulator
}  // namespace espalier::simt
