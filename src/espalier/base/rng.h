// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers: a value depends on (seed, stream, index) only, so results do not change with
// the order of evaluation, the number of threads or a resume.
#pragma once

#include <array>
#include <cstdint>

namespace espalier {

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

/// The random sequence of (seed, stream). A copy continues from the same position.
class Rng {
 public:
  explicit Rng(uint64_t seed, uint64_t stream = 0);

  /// Uniform over all 64-bit values.
  uint64_t next();
  /// Uniform in [0, 1), 53 random bits.
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  /// Standard normal (Box-Muller; one value per two draws).
  double normal();
  /// Uniform in [0, bound), bound >= 1, without modulo bias.
  int64_t below(int64_t bound);
  /// Uniform in [low, high], both included.
  int64_t between(int64_t low, int64_t high);

 private:
  uint64_t seed_;
  uint64_t stream_;
  uint64_t index_ = 0;
  std::array<uint32_t, 4> block_{};
  int used_ = 4;
};

}  // namespace espalier
