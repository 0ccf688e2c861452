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

  uint64_t next();                             ///< uniform over all 64-bit values
  double uniform();                            ///< uniform in [0, 1), 53 random bits
  double normal();                             ///< standard normal (Box-Muller; one value per two draws)
  int64_t below(int64_t bound);                ///< uniform in [0, bound), bound >= 1, without modulo bias
  int64_t between(int64_t low, int64_t high);  ///< uniform in [low, high], both included

 private:
  uint64_t seed_;
  uint64_t stream_;
  uint64_t index_ = 0;
  std::array<uint32_t, 4> block_{};
  int used_ = 4;
};

}  // namespace espalier
