// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/rng.h"

#include <cmath>
#include <numbers>

#include "espalier/base/check.h"

namespace espalier {

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  // Constants of the paper's table 2 (multipliers) and section 3.1 (Weyl sequence of the key).
  constexpr uint64_t kMultiplier0 = 0xD2511F53;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9;
  constexpr uint32_t kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

Rng::Rng(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}

uint64_t Rng::next() {
  if (used_ == 4) {
    block_ = philox4x32({static_cast<uint32_t>(index_), static_cast<uint32_t>(index_ >> 32),
                         static_cast<uint32_t>(stream_), static_cast<uint32_t>(stream_ >> 32)},
                        {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
    ++index_;
    used_ = 0;
  }
  const uint64_t value = block_[used_] | (static_cast<uint64_t>(block_[used_ + 1]) << 32);
  used_ += 2;
  return value;
}

double Rng::normal() {
  // 1 - uniform() is in (0, 1], so the logarithm is finite.
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

int64_t Rng::below(int64_t bound) {
  ESPALIER_ASSERT(bound >= 1);
  // The lowest 2^64 mod bound values are rejected, so that every remainder has equally many values.
  const uint64_t range = static_cast<uint64_t>(bound);
  const uint64_t refused = (0 - range) % range;
  uint64_t value = next();
  while (value < refused) value = next();
  return static_cast<int64_t>(value % range);
}

int64_t Rng::between(int64_t low, int64_t high) {
  ESPALIER_ASSERT(low <= high);
  // Unsigned arithmetic gives the span without overflow. A span of 2^63 or more is drawn by rejection.
  const uint64_t span = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  uint64_t offset;
  if (span < static_cast<uint64_t>(INT64_MAX)) {
    offset = static_cast<uint64_t>(below(static_cast<int64_t>(span) + 1));
  } else {
    do offset = next();
    while (offset > span);
  }
  return static_cast<int64_t>(static_cast<uint64_t>(low) + offset);
}

}  // namespace espalier
