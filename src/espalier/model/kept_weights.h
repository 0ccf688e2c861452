// SPDX-License-Identifier: Apache-2.0
// What is made of weights once, for passes that follow each other.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <unordered_map>

#include "espalier/ops/scoped_value.h"

namespace espalier::accumulating {

template <class Made, detail::Scope kNumber>
class KeptWeights {
 public:
  static constexpr detail::Scope kScope = kNumber;

  /// What make() made of the weight, which is made anew where the weight has changed.
  template <class Make>
  const Made& get(const at::Tensor& weight, const Make& make) {
    Kept& kept = kept_[weight.const_data_ptr()];
    if (!kept.made || kept.version != weight._version()) kept = {weight, weight._version(), make()};
    return *kept.made;
  }

 private:
  struct Kept {
    at::Tensor weight;  // held, so that nothing else comes to lie at its place
    int64_t version = 0;
    std::optional<Made> made;
  };
  std::unordered_map<const void*, Kept> kept_;
};

}  // namespace espalier::accumulating
